"""What autograd keeps of a micro-batch: bytes of activations per block, and of what is recomputed.

Each coefficient counts the tensors that the operations of a pre-norm block save for backward: inputs of norms and
matrices, queries, keys, values and the attention's output, inner tensors of the MLP, dropout masks. For the block of
arXiv 2205.05198 they add up to its formulas; for Llama-like blocks they equal what `saved_tensors_hooks` sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.planner.caching import once
from terrazzo.planner.figures import Formula
from terrazzo.planner.memory.block_setting import FP32_BYTES, BlockSetting
from terrazzo.planner.memory.kept_by_attention import attention_numel, bytes_per_token, perhaps_kept, score_bytes
from terrazzo.planner.model.shapes import BlockShape
from terrazzo.planner.setup.setup import Setup
from terrazzo.words import CheckpointMode

__all__ = [
    "FORMULAS",
    "BlockActivations",
    "RepeatedShares",
    "block_activations",
    "repeated_shares",
]

FORMULAS = {
    "memory.activations": Formula(
        "blocks x saved bytes of one block per micro-batch x micro-batches in flight. A block saves, in elements per "
        "token: inputs of both norms 2h and of the matrices behind them 2h, or h where attention and MLP share theirs "
        "(split by tp only under sequence parallelism), queries q, keys and values of the kv heads (where they are "
        "normed, queries and keys before that too; eager, and from one matrix: all of its result beside rotated "
        "queries and keys), the attention's output (eager, and where a part of a head is rotated: twice), of each "
        "routed expert that a token meets its input and output, and of the MLP gate, up, silu(gate) and their product "
        "(eager), or gate, up and product (compiled, or in Megatron-core), or input and output of the nonlinearity "
        "(not gated; three tensors more of a tanh GELU in plain operators, as GPT-2's); dropout masks of one byte, on "
        "CPUs of an element; of scores that attention keeps the softmax in fp32 and, cast or dropped, once more, "
        "beside the mask of dropout; on CPUs masks of windows, [sequence, sequence] for all heads; fp32 copies where a "
        "norm or a router computes in fp32. Full checkpointing keeps the block's input alone, selective its input and "
        "the results of matrix products and of attention; under math attention it recomputes the attention core alone; "
        "selective_half keeps every second of the products",
        "arXiv 2205.05198, equations 1 to 6; torch.autograd.graph.saved_tensors_hooks",
    ),
    "memory.working": Formula(
        "what the backward of one block needs beside what was saved: what it recomputes, gradients of its widest "
        "activations or, where sequences are shared, what attention exchanges, and the largest gradient of a single "
        "parameter",
        "arXiv 2205.05198, section 5; order of operations in backward",
    ),
}


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block on one rank for one micro-batch.

    Attributes:
        saved: kept from forward to backward under the setup's checkpointing; `saved_upper` where keys and values are
            expanded to all query heads, and where routed tokens crowd on some ranks.
        recomputed: made again in backward.
        gradients: of activations, at once, in its backward.
        moved: of `saved`, inputs that go to host memory.
    """

    saved: float
    saved_upper: float
    recomputed: float
    gradients: float
    moved: float = 0.0

    @property
    def stays(self) -> float:
        """Bytes of `saved` that stay on the device from forward to backward."""
        return self.saved - self.moved

    @property
    def working(self) -> float:
        """Bytes that its backward needs beside what was saved."""
        return self.recomputed + self.gradients


def block_activations(setup: Setup, block: BlockShape) -> BlockActivations:
    """What a block keeps and needs under `setup`."""
    return _block(BlockSetting.of(setup), block)


@once
def _block(local: BlockSetting, block: BlockShape) -> BlockActivations:
    everything, covered = _everything(local, block), POLICIES[local.checkpointing].saved(local, block)
    share = local.share
    saved = share * covered + (1 - share) * everything
    more = (1 - share) * (perhaps_kept(local, block) + _crowded(local, block))
    recomputed, moved = (everything - covered if share else 0.0), local.moves * share * _input(local, block)
    gradients = max(_gradients(local, block), _exchanged(local, block))
    return BlockActivations(saved, saved + more, recomputed, gradients, moved)


CROWDING = 0.5
"""How many more tokens than the mean may come to a rank's experts (GShard's capacity factor, arXiv 2006.16668)."""


def _crowded(local: BlockSetting, block: BlockShape) -> float:
    if not block.experts or local.ep == 1:
        return 0.0
    inner = block.active_experts * block.ffn * _inner(local, block) * local.itemsize / local.tp
    routed = _routing(local, block) / (local.tp if local.sequence_parallel else 1)
    return CROWDING * local.tokens * (inner + routed)


def _everything(local: BlockSetting, block: BlockShape) -> float:
    """Bytes that a block saves without checkpointing."""
    between = local.tokens * _between(local, block) / (local.tp if local.sequence_parallel else 1)
    inside = bytes_per_token(local, block) + _mlp(local, block) / block.mlp_parts(local.tp)
    inside += block.query_key_norms * block.query_key_channels(local.tp) * _norm(local, block)
    return between + local.tokens * inside + score_bytes(local, block)


def _between(local: BlockSetting, block: BlockShape) -> float:
    """Bytes per token that tensor parallelism alone leaves whole: norms, inputs of the matrices, dropout masks.

    What queries, keys and values are compressed to (MLA) is normed and goes into matrices as the residual stream does.
    """
    width = block.hidden
    inputs = (1 if block.parallel else 2) * width * local.itemsize  # what both share counts once
    mask = local.itemsize if local.cpu else 1
    masks = 2 * width * mask if block.dropout else 0
    latent = block.latent_norm_channels * (_norm(local, block) + local.itemsize)
    return block.norms * width * _norm(local, block) + inputs + latent + masks + _routing(local, block)


def _norm(local: BlockSetting, block: BlockShape) -> int:
    """Bytes per channel that a norm keeps: its input, and where it computes in fp32 a copy and the normalised input.

    A layer norm in plain operators takes the mean off twice, and keeps both, and the normalised input.
    """
    item = local.itemsize
    if block.norm == "plain_layer" and not local.fused:
        return 3 * FP32_BYTES
    if block.norm == "layer" or local.fused:
        return max(item, FP32_BYTES) if block.wide_norm and not local.fused else item
    if block.torch_norm:
        return 2 * FP32_BYTES if local.cpu else item
    return 2 * FP32_BYTES if block.wide_norm else FP32_BYTES + item


def _mlp(local: BlockSetting, block: BlockShape) -> float:
    """Bytes per token inside the MLP, or inside the experts that a token meets."""
    inner = _inner(local, block)
    dense = block.ffn if not block.experts else block.shared_ffn
    total = float(dense * inner * local.itemsize)
    if block.experts:
        total += block.active_experts * block.ffn * inner * local.itemsize
    return total


def _inner(local: BlockSetting, block: BlockShape) -> int:
    """Tensors as wide as the MLP: input and output of its nonlinearity, and the product of a gated one.

    A tanh GELU in plain operators keeps its tanh and both factors of its last product too; ReLU its output alone.
    gpt-oss clamps both results of one matrix, of which neither is contiguous, and scales and shifts them.
    """
    if not block.gated:
        return {"relu": 1, "plain_gelu": 2 if local.fused else 5}.get(block.nonlinearity, 2)
    return 3 if local.fused else 7 if block.nonlinearity == "clamped" else 4


def _routing(local: BlockSetting, block: BlockShape) -> float:
    """Bytes per token of a mixture of experts: scores in fp32, inputs and outputs of experts, and where they are.

    A router in fp32 keeps its input so, in place of the MLP's where no other part takes that; what shared experts give
    is kept where it is weighted.
    """
    if not block.experts:
        return 0.0
    width, item = block.hidden, local.itemsize
    each = 2 * width * item + ROUTE_BYTES
    cast = block.fp32_router and not local.fused and item < FP32_BYTES
    router = width * (FP32_BYTES - (0 if block.shared_ffn else item)) if cast else 0
    return FP32_BYTES * block.experts + block.active_experts * each + block.shared_gate * width * item + router


ROUTE_BYTES = 40
"""Bytes of a token's way to one expert: its number, the row's places there and back, and its weight twice."""


def _input(local: BlockSetting, block: BlockShape) -> float:
    """Bytes of a block's input."""
    return local.tokens * block.hidden * local.itemsize / (local.tp if local.sequence_parallel else 1)


def _products(local: BlockSetting, block: BlockShape) -> float:
    """Bytes of a block's input and of what its matrix products and attention give."""
    width, item = block.hidden, local.itemsize
    mlp = (2 if block.gated else 1) * _inner_width(block)
    whole = 2 * width + block.latent + block.active_experts * width
    split = local.tokens * (attention_numel(local, block) + mlp / block.mlp_parts(local.tp)) * item
    return _input(local, block) + local.tokens * whole * item / (local.tp if local.sequence_parallel else 1) + split


def _half_of_products(local: BlockSetting, block: BlockShape) -> float:
    """Bytes of a block's input, of every second product, and of attention.

    Of queries, keys, values, output, gate, up and down that is all but keys, output and up; without a gate, the
    queries, keys and values of one product and the wide one. Results of batched products are not kept, nor anything of
    routed experts, whose products are grouped.
    """
    item, apart = local.itemsize, block.key_heads(local.tp) * block.head_dim if block.gated else 0
    outputs = block.heads * block.value_dim / block.attention_parts(local.tp) if local.keeps_scores else 0
    attention = attention_numel(local, block) - apart - outputs
    dense = 0 if block.experts and not block.shared_ffn else block.shared_ffn if block.experts else block.ffn
    down = block.hidden if block.gated and dense else 0
    split = local.tokens * (attention + dense / block.mlp_parts(local.tp)) * item
    return _input(local, block) + local.tokens * down * item / (local.tp if local.sequence_parallel else 1) + split


def _selected(local: BlockSetting, block: BlockShape) -> float:
    """Bytes of a block's products, or under math attention of all but its scores."""
    return _everything(local, block) - score_bytes(local, block) if local.keeps_scores else _products(local, block)


def _inner_width(block: BlockShape) -> int:
    """The inner width of the MLP, or of all experts that a token meets."""
    return block.shared_ffn + block.active_experts * block.ffn if block.experts else block.ffn


class RepeatedShares(NamedTuple):
    """What share of a forward's matrix products, attention, and what lies between them is computed again."""

    matmul: float
    attention: float
    memory: float


class CheckpointingPolicy(NamedTuple):
    """What a block that is checkpointed keeps, and what it computes again since it does not keep it.

    Attributes:
        saved: bytes of one block.
        repeated: with a fused kernel of attention; `repeated_math` under math attention, which keeps its scores.
    """

    saved: Callable[[BlockSetting, BlockShape], float]
    repeated: RepeatedShares
    repeated_math: RepeatedShares


POLICIES: dict[CheckpointMode, CheckpointingPolicy] = {
    "none": CheckpointingPolicy(_everything, RepeatedShares(0.0, 0.0, 0.0), RepeatedShares(0.0, 0.0, 0.0)),
    "selective": CheckpointingPolicy(_selected, RepeatedShares(0.0, 0.0, 1.0), RepeatedShares(0.0, 1.0, 0.0)),
    "selective_half": CheckpointingPolicy(
        _half_of_products, RepeatedShares(0.5, 0.0, 1.0), RepeatedShares(0.5, 1.0, 1.0)
    ),
    "full": CheckpointingPolicy(_input, RepeatedShares(1.0, 1.0, 1.0), RepeatedShares(1.0, 1.0, 1.0)),
}
"""Under `selective`, math attention's core alone is computed again (arXiv 2205.05198); under `selective_half` every
second product too."""


def repeated_shares(setup: Setup) -> RepeatedShares:
    """What a block that checkpointing covers computes again."""
    policy = POLICIES[setup.checkpointing]
    return policy.repeated_math if setup.keeps_scores else policy.repeated


def _exchanged(local: BlockSetting, block: BlockShape) -> float:
    """Bytes that attention over shared sequences needs in its backward, beside gradients of the residual stream.

    `gather`: keys and values of all ranks, with their sums in fp32, there and in the order of the ranks. `ring`: those
    of two ranks, with two such sums. `ulysses`: whole sequences of all that goes to ranks with other heads and back.
    """
    if local.cp == 1:
        return 0.0
    both = block.head_dim + block.value_dim
    queries, keys = block.heads * both / block.attention_parts(local.tp), block.key_heads(local.tp) * both
    wide = max(FP32_BYTES, local.itemsize)
    per_token = {
        "gather": local.cp * keys * (local.itemsize + 2 * wide) + queries * (local.itemsize + wide),
        "ring": keys * (3 * local.itemsize + 2 * wide) + queries * (local.itemsize + wide),
        "ulysses": 2 * queries * (local.itemsize + wide),
    }
    return local.tokens * (per_token[local.context] + 2 * block.hidden * local.itemsize)


def _gradients(local: BlockSetting, block: BlockShape) -> float:
    """Bytes of the gradients of activations that are there at once: of the block's output and of its widest tensors."""
    copies = 2 if block.gated else 1
    return local.tokens * local.itemsize * (2 * block.hidden + copies * _inner_width(block) / block.mlp_parts(local.tp))
