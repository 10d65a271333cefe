"""Building blocks for models of one's own that hold fewer bytes than torch's, or multiply fewer; each works under every
plan.

linear_cross_entropy    the loss of a language model's head, without its logits
float8                  linear layers whose matrix products are of 8-bit floats

Open to other packages:

    forwards    another forward for a module, in place
    loss        sizes of chunks, for the planner, and rows that other ranks have
    products    what a linear layer multiplies with, where ranks share it or put its gradient off
    routers     which modules choose experts
"""

from terrazzo.nn.convert import Converted, float8
from terrazzo.nn.loss import VocabularyParts, linear_cross_entropy

__all__ = ["Converted", "VocabularyParts", "float8", "linear_cross_entropy"]
