"""Building blocks for your own models that take less memory than torch's, or less computing. Each works under every
plan.

linear_cross_entropy    the loss of a language model's head, without its logits
float8                  linear layers whose matrix products are of 8-bit floats

Open to other packages:

    chunked_cross_entropy  the loss itself, and the sizes of its chunks
    float8_linear          what a linear layer multiplies with
    float8_matrices        sizes that the matrix units of GPUs take
    float8_products        the products of a converted layer, for ranks that share it or defer a gradient
    forward_replacement    gives a module another forward, in place
    routers                which modules choose experts
    single_backward        refuses gradients of backwards that cannot be differentiated again
    vocabulary_parts       a vocabulary of which ranks have parts

A module inside: `float8_conversion` (which layers of a model get products in float8).
"""

from terrazzo.nn.chunked_cross_entropy import linear_cross_entropy
from terrazzo.nn.float8_conversion import Converted, float8
from terrazzo.nn.vocabulary_parts import VocabularyParts

__all__ = ["Converted", "VocabularyParts", "float8", "linear_cross_entropy"]
