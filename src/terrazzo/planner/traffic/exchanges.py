"""What ranks beside the data axes exchange of activations, from shapes alone.

Along `tp`, `cp` and `pp` it is what the engine's modules count, to the byte, of a model whose parameters all train
(`parallel.tensor.activation_exchanges`, `parallel.exchanges`); along `ep` it is that if all experts are as busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from terrazzo.planner.figures import Formula
from terrazzo.planner.machine.mesh import RankGroup, group_of
from terrazzo.planner.machine.transfers import UnitTransfer, When
from terrazzo.planner.memory.block_setting import FP32_BYTES
from terrazzo.planner.model.shapes import BlockShape, UnitShape
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "expert_group", "model_parallel_moves", "pipeline_moves", "shared_gradients"]

FORMULAS = {
    "traffic.tensor": Formula(
        "tokens * hidden * bytes_per_element * (tp - 1) / tp for each all-gather and each reduce-scatter, twice that "
        "for an all-reduce: per block and micro-batch four of each, and with activation checkpointing two and one "
        "more; without sequence parallelism four all-reduces, and one more; the embedding's sum, the head's on the way "
        "back, the sequence's split and end, and the logits that are put together",
        "Megatron-LM, arXiv 1909.08053 section 3; sequence parallelism, arXiv 2205.05198 section 4.2; equals the "
        "engine's count",
    ),
    "traffic.context": Formula(
        "per block and micro-batch, keys and values * (cp - 1) / cp: gather: gathered forward and again backward, "
        "their gradients back; ring: sent on forward and backward, and gradients in fp32 all the way round; ulysses: "
        "queries, repeated keys and values, and outputs there and back, and where documents begin once",
        "terrazzo/parallel/context/attention_modes.py; ring attention, arXiv 2310.01889; Ulysses, arXiv 2309.14509; "
        "equals the engine's count",
    ),
    "traffic.pipeline": Formula(
        "boundaries * micro_batches * tokens * hidden * bytes_per_element, activations onward from each stage but the "
        "last, gradients back from each but the first; in Megatron-core / tp",
        "Megatron-LM, arXiv 2104.04473 sections 2.2 and 4.1; equals the engine's count",
    ),
    "traffic.expert": Formula(
        "per block and micro-batch, tokens * active_experts * hidden * bytes_per_element * (ep - 1) / ep, for dispatch "
        "and combine, forward and backward, and once more where checkpointing repeats them: if all experts are as busy",
        "GShard, arXiv 2006.16668; equals the engine's count then",
    ),
}

PLACE_BYTES = 8
"""Bytes of a token's place in its sequence."""


def model_parallel_moves(setup: Setup, unit: UnitShape) -> Iterator[UnitTransfer]:
    """Tensor, context and expert parallelism in one unit and one micro-batch.

    Moves of forward and backward are told apart by `when`; what activation checkpointing repeats counts as backward.
    """
    for move in _moves_of(setup, unit):
        if not (unit.forward_only and move.when == When.BACKWARD):
            yield move


def _moves_of(setup: Setup, unit: UnitShape) -> Iterator[UnitTransfer]:
    block = unit.block
    if setup.mesh.tp > 1:
        yield from _TensorMoves(setup).of_root(unit) if unit.is_root else ()
        yield from () if block is None else _TensorMoves(setup).of_block(unit, block)
    if setup.mesh.cp > 1:
        yield from _context_moves(setup, unit)
    if block is not None and setup.mesh.ep > 1 and block.experts:
        yield from _expert_moves(setup, block)


class _TensorMoves:
    """Exchanges between `tp` ranks, each with its way back."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._group = setup, group_of(setup.mesh, "tp")
        self._tokens, self._itemsize = setup.rank_tokens, setup.precision.compute.itemsize
        self._residual = self._tokens * setup.model.hidden

    def of_block(self, unit: UnitShape, block: BlockShape) -> Iterator[UnitTransfer]:
        """Two sums and, where sequences are split, two gatherings, and each the other way round on the way back.

        Beside whole experts, for which each rank has its own tokens, one around each that ends in a matrix cut by rows.

        What is recomputed ends where nothing is kept of what follows: before the last sum.
        """
        again = self._setup.checkpointed_share
        yield from self._of_fused(unit, again)
        ends = sum(tensor.role == "matrix" and tensor.split == "row" for tensor in unit.tensors)
        regions = ends if block.experts and self._setup.whole_experts else 2
        sums = regions if block.dropout or block.result_norms else 1
        if not self._setup.sequence_parallel:
            yield self._reduced(When.FORWARD, self._residual, regions)
            yield self._reduced(When.BACKWARD, self._residual, regions + sums * again)
            return
        around = (When.FORWARD, regions, regions), (When.BACKWARD, regions * (1 + again), regions + sums * again)
        for when, gathered, summed in around:
            yield self._gathered(when, self._residual, gathered)
            yield self._move("reduce_scatter", when, self._share(self._residual), summed)

    def _of_fused(self, unit: UnitShape, again: float) -> Iterator[UnitTransfer]:
        """Outputs of matrices that are put together, and on the way back the gradients of what is split again."""
        matrices = [tensor for tensor in unit.tensors if tensor.role == "matrix"]
        together = sum(self._part(tensor.shape[0]) for tensor in matrices if tensor.split == "column_gathered")
        split = sum(self._part(tensor.shape[1]) for tensor in matrices if tensor.split == "row_splits")
        if together:
            yield self._gathered(When.FORWARD, together)
            yield self._gathered(When.BACKWARD, together, again)
            yield self._gathered(When.BACKWARD, split)

    def _part(self, width: int) -> int:
        """Elements of all tokens' channels in whole parts of `width`, of which the widest rank's is padded to."""
        return self._tokens * -(-width // self._group.size) * self._group.size

    def of_root(self, unit: UnitShape) -> Iterator[UnitTransfer]:
        """Around the blocks: the embedding's look-up, the sequence's two ends, the head and its loss."""
        setup, roles = self._setup, {tensor.role: tensor.split for tensor in unit.tensors}
        if "embedding" in roles:
            if roles["embedding"] != "none":
                yield self._reduced(When.FORWARD, self._residual)
            if setup.sequence_parallel:
                yield self._gathered(When.BACKWARD, self._residual)
        if "head" in roles or (setup.model.tied and "embedding" in roles and not setup.staged):
            if setup.sequence_parallel:
                yield self._gathered(When.FORWARD, self._residual)
            yield self._reduced(When.BACKWARD, self._residual)
            yield from self._of_loss()

    def _of_loss(self) -> Iterator[UnitTransfer]:
        """Logits put together; or three numbers of each token, of which two are summed."""
        tokens, size = self._tokens, self._group.size
        if self._setup.puts_logits_together:
            yield self._gathered(When.FORWARD, size * tokens * -(-self._setup.model.logits // size), what="logits")
            return
        highest = size * tokens * FP32_BYTES // self._itemsize
        yield self._gathered(When.FORWARD, highest, what="numbers of the loss")
        padded = -(-tokens // size) * FP32_BYTES
        yield self._move("all_reduce", When.FORWARD, 2 * padded * (size - 1), 2, "numbers of the loss")

    def put_together(self, when: When, count: int) -> UnitTransfer:
        """Sequences, so many times."""
        return self._gathered(when, self._residual, count)

    def _share(self, numel: int) -> int:
        """Bytes of all parts but one."""
        return -(-numel // self._group.size) * self._itemsize * (self._group.size - 1)

    def _gathered(self, when: When, numel: int, count: float = 1, what: str = "activations") -> UnitTransfer:
        return self._move("all_gather", when, self._share(numel), count, what)

    def _reduced(self, when: When, numel: int, count: float = 1) -> UnitTransfer:
        return self._move("all_reduce", when, 2 * self._share(numel), count)

    def _move(self, kind: str, when: When, sent: int, count: float, what: str = "activations") -> UnitTransfer:
        name, messages = f"tensor-parallel {what}", math.ceil(count)
        return UnitTransfer(kind, name, "tensor", when, sent * count, self._group, messages)


def _context_moves(setup: Setup, unit: UnitShape) -> Iterator[UnitTransfer]:
    """Exchanges along cp: keys and values, or heads, of a block; of the root where documents begin."""
    group, tokens = group_of(setup.mesh, "cp"), setup.rank_tokens
    again = setup.checkpointed_share

    def move(kind: str, when: When, what: str, sent: float, count: float = 1) -> UnitTransfer:
        return UnitTransfer(kind, what, "context", when, sent * count, group, math.ceil(count))

    others, block = group.size - 1, unit.block
    if setup.context == "ulysses" and unit.is_root:
        yield move("all_gather", When.FORWARD, "places of documents", tokens * PLACE_BYTES * others)
    if block is None:
        return
    heads = _KeyHeads(setup, block)
    own = tokens * heads.channels * setup.precision.compute.itemsize
    if setup.context == "gather":
        yield move("all_gather", When.FORWARD, "keys and values", own * others)
        yield move("all_gather", When.BACKWARD, "keys and values", own * others, 1 + again)
        yield move("all_to_all", When.BACKWARD, "gradients of keys and values", own * others)
    elif setup.context == "ring":
        wide = tokens * heads.channels * max(FP32_BYTES, setup.precision.compute.itemsize)
        yield move("send", When.FORWARD, "keys and values", own, others)
        yield move("send", When.BACKWARD, "keys and values", own, others * (1 + again))
        yield move("send", When.BACKWARD, "gradients of keys and values", wide, group.size)
    else:
        queries = tokens * heads.queries * setup.precision.compute.itemsize
        sent = (heads.repeats * own + queries) // group.size * others
        yield move("all_to_all", When.FORWARD, "heads", sent)
        yield move("all_to_all", When.BACKWARD, "heads", sent, 1 + again)


class _KeyHeads:
    """Elements per token of one block's attention on one rank.

    Attributes:
        channels: those of keys and values. `queries`: those of queries and outputs.
        repeats: how often each key head goes out, so that ranks have one for each of their query heads.
    """

    def __init__(self, setup: Setup, block: BlockShape) -> None:
        tp, both = setup.mesh.tp, block.head_dim + block.value_dim
        kv_heads = int(block.key_heads(tp))
        self.channels = block.kv_latent or kv_heads * both
        self.queries = block.heads // block.attention_parts(tp) * both
        self.repeats = math.lcm(kv_heads, setup.mesh.cp) // kv_heads


def expert_group(setup: Setup) -> RankGroup:
    """The ranks along ep, which are taken from other axes."""
    return RankGroup("ep", setup.mesh.ep, 1 if setup.whole_experts else setup.mesh.tp, setup.mesh.world_size)


def _expert_moves(setup: Setup, block: BlockShape) -> Iterator[UnitTransfer]:
    """Exchanges along ep. Whole experts are given the part of the sequence that each rank along tp has."""
    mesh, group = setup.mesh, expert_group(setup)
    apart = mesh.tp if setup.whole_experts and setup.sequence_parallel else 1
    once = setup.residual_bytes / apart * block.active_experts * (group.size - 1) / group.size
    for when, count in ((When.FORWARD, 2.0), (When.BACKWARD, 2 + 2 * setup.checkpointed_share)):
        messages = 2 * math.ceil(count)  # ranks say how many rows they have before each
        yield UnitTransfer("all_to_all", "expert tokens", "expert", when, count * once, group, messages)


def pipeline_moves(setup: Setup, pp_rank: int) -> Iterator[UnitTransfer]:
    """What rank `pp_rank` along pp sends of each micro-batch: activations onward, and their gradients back.

    Nothing comes behind the last of all stages, and nothing before the first. The engine's stages send whole sequences,
    which ranks along tp put together first.
    """
    ranks, chunks = setup.mesh.pp, setup.virtual_stages
    if ranks == 1:
        return
    group = group_of(setup.mesh, "pp")
    once = setup.residual_bytes / (setup.mesh.tp if setup.as_megatron else 1)
    shares = _TensorMoves(setup) if setup.mesh.tp > 1 and setup.sequence_parallel and setup.staged else None
    for when, count in ((When.FORWARD, chunks - (pp_rank == ranks - 1)), (When.BACKWARD, chunks - (pp_rank == 0))):
        if count:
            yield UnitTransfer("send", "pipeline activations", "pipeline", when, once * count, group, count)
            if shares is not None:
                yield shares.put_together(when, count)


def shared_gradients(setup: Setup, copied_bytes: int) -> UnitTransfer:
    """What a rank along pp sends once in a step, of parameters that another one has too."""
    group = group_of(setup.mesh, "pp")
    return UnitTransfer("send", "gradients that stages share", "data", When.LAST, copied_bytes, group)
