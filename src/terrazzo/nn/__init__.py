"""Building blocks for models of one's own that hold fewer bytes than torch's; each works under every plan.

linear_cross_entropy    the loss of a language model's head, without its logits
"""

from terrazzo.nn.loss import MANY_LOGITS, PRODUCT_NUMEL, VocabularyParts, chunk_rows, linear_cross_entropy, outside_part

__all__ = ["MANY_LOGITS", "PRODUCT_NUMEL", "VocabularyParts", "chunk_rows", "linear_cross_entropy", "outside_part"]
