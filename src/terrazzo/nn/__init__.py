"""Building blocks for models of one's own that hold fewer bytes than torch's, or multiply fewer; each works under every
plan.

linear_cross_entropy    the loss of a language model's head, without its logits
float8                  linear layers whose matrix products are of 8-bit floats
"""

from terrazzo.nn.convert import Converted, float8
from terrazzo.nn.forwards import replace_forward
from terrazzo.nn.loss import (
    MANY_LOGITS,
    PRODUCT_NUMEL,
    VocabularyParts,
    chunk_rows,
    linear_cross_entropy,
    outside_part,
    places_in_part,
)
from terrazzo.nn.products import MULTIPLE, RECIPES, Float8, Float8Linear, product_of
from terrazzo.nn.routers import is_router

__all__ = [
    "MANY_LOGITS",
    "MULTIPLE",
    "PRODUCT_NUMEL",
    "RECIPES",
    "Converted",
    "Float8",
    "Float8Linear",
    "VocabularyParts",
    "chunk_rows",
    "float8",
    "is_router",
    "linear_cross_entropy",
    "outside_part",
    "places_in_part",
    "product_of",
    "replace_forward",
]
