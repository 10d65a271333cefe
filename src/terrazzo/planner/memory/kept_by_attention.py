"""What attention keeps for its backward, by the code that runs: what goes in and out, its mask, and its scores."""

from __future__ import annotations

from terrazzo.planner.memory.block_setting import FP32_BYTES, BlockSetting
from terrazzo.planner.model.shapes import BlockShape
from terrazzo.planner.setup.kernels import Unfused, unfused_by_itself

__all__ = ["attention_numel", "bytes_per_token", "perhaps_kept", "score_bytes"]


def bytes_per_token(local: BlockSetting, block: BlockShape) -> float:
    """Bytes per token of a rank that attention keeps but its scores."""
    return _inputs_and_output(local, block) + local.cpu * _masked_tokens(local, block) * local.itemsize


def perhaps_kept(local: BlockSetting, block: BlockShape) -> float:
    """Bytes more if keys and values are repeated for every query head where that is not known, and for a mask.

    FlashAttention's own package needs no mask for a window; torch's kernels on GPUs do, as on CPUs.
    """
    repeated = 0.0 if _expands(local, block) else _expanded(block, local.tp)
    mask = 0.0 if local.cpu else _masked_tokens(local, block)
    return local.tokens * (repeated + mask) * local.itemsize


def attention_numel(local: BlockSetting, block: BlockShape) -> float:
    """Elements per token of a rank: queries and output, keys and values."""
    each = block.heads / block.attention_parts(local.tp) + block.key_heads(local.tp)
    return each * (block.head_dim + block.value_dim)


def _own_code(local: BlockSetting, block: BlockShape) -> Unfused | None:
    """Why attention keeps its scores in code that is known: that of transformers, or torch's own."""
    return unfused_by_itself(block, local.cpu) if local.keeps_scores and not local.megatron else None


def _in_torch(local: BlockSetting, block: BlockShape) -> bool:
    """Whether scores are those of torch's math path, which computes in fp32 all that has fewer bits."""
    return _own_code(local, block) not in (None, "eager")


def _inputs_and_output(local: BlockSetting, block: BlockShape) -> float:
    """Bytes per token of a rank that attention keeps but its scores, and its mask.

    Torch's math path keeps queries and keys as it scales them, and all in fp32 at least.
    """
    elements, item = attention_numel(local, block) + _kept_beside(local, block), local.itemsize
    elements += _expanded(block, local.tp) * _expands(local, block)
    cast = max(item, FP32_BYTES) - item if _in_torch(local, block) else 0
    output = block.heads * block.value_dim / block.attention_parts(local.tp)
    return elements * item + (elements - output) * cast


def _kept_beside(local: BlockSetting, block: BlockShape) -> float:
    """Elements per token of a rank that plain operators keep more of queries and keys that they rotate or scale.

    Of one result with the values all stays, for these, unless they are copied; of latent attention (MLA) that is the
    part of the keys that is not rotated. What is put together of turned channels and others lies in the order of heads,
    and so does a fused kernel's output, which is copied for the next matrix.
    """
    in_torch = _in_torch(local, block)
    if local.fused or not (block.rotated or in_torch):
        return 0.0
    copies = block.one_key or (in_torch and local.itemsize < FP32_BYTES)
    heads = block.heads / block.attention_parts(local.tp)
    of_latent = heads * (block.head_dim - block.rotated) if block.latent else 0.0
    beside = 0.0 if copies else block.query_key_channels(local.tp) if block.fused_qkv else of_latent
    heads_first = block.heads_first or 0 < block.rotated < block.head_dim
    return beside + (heads * block.value_dim if heads_first and not local.keeps_scores else 0.0)


def _expanded(block: BlockShape, tp: int) -> float:
    """Elements per token of a rank more if keys and values are repeated for every query head before attention."""
    more = block.heads / block.attention_parts(tp) - block.key_heads(tp)
    return more * (block.head_dim + block.value_dim)


def _expands(local: BlockSetting, block: BlockShape) -> bool:
    """Whether transformers repeats keys: for torch's kernels wherever there is a mask, and for plain operators."""
    if local.keeps_scores:
        return _own_code(local, block) not in (None, "one key")
    return local.cpu and _masked_tokens(local, block) > 0


def _masked_tokens(local: BlockSetting, block: BlockShape) -> float:
    """Elements per token of the mask of a fused kernel: as many as the sequence has tokens, for all heads."""
    if local.keeps_scores or local.megatron or local.cp > 1 or not block.is_masked(local.sequence):
        return 0.0
    return local.sequence


def score_bytes(local: BlockSetting, block: BlockShape) -> float:
    """Bytes of the scores that attention keeps, all of them, those outside of a window masked."""
    if not local.keeps_scores:
        return 0.0
    per_score = _per_score(local, block) + (local.itemsize if block.soft_cap or block.clamped else 0)
    return local.tokens * local.sequence * block.heads * per_score / block.attention_parts(local.tp)


def _per_score(local: BlockSetting, block: BlockShape) -> int:
    """Bytes of a score: its softmax, and what is multiplied with the values if that is not the same tensor.

    The softmax is in fp32, with sinks or clamped in the dtype of the scores; torch's math path multiplies in fp32 too.
    Dropout keeps softmax and mask, on a CPU as a factor of the softmax's dtype, on a GPU of one byte; in code that is
    not known the softmax is in 16 bits then, as in arXiv 2205.05198.
    """
    item, wide = local.itemsize, max(FP32_BYTES, local.itemsize)
    code, factor = _own_code(local, block), wide if _in_torch(local, block) else item
    softmax = item if block.sinks or block.clamped else wide
    if not block.attention_dropout:
        return softmax + (factor if factor < softmax else 0)
    return (softmax if code else item) + (factor if local.cpu else 1) + factor
