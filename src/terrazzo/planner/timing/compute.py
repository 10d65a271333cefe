"""Floating-point operations of a model, and how long a device needs for them.

A block's time is that of its matrix products, its attention and its memory-bound operations, each at the rate that
devices reach at such work, and never less than the host needs to launch them. Constants are few; each says what it
stands for and where it is from. Those without another source were set on the MPT runs of MosaicML (A100, H100) and on
vTrain's single-node runs of small GPTs (A100).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from terrazzo.planner.caching import once
from terrazzo.planner.figures import Formula
from terrazzo.planner.layout.buckets import is_packed
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.memory.activations import repeated_shares
from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape, parts_along_tp
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.attention import attention_seconds, forward_share
from terrazzo.planner.timing.products import Shares, block_products, products_of
from terrazzo.planner.timing.rates import MEMORY_SHARE, memory_rate, sixteen_bits, sustained_rate

__all__ = [
    "FORMULAS",
    "Seconds",
    "block_seconds",
    "flops_per_token",
    "head_seconds",
    "launch_seconds",
    "optimizer_bytes",
    "repeated_flops_per_token",
    "step_flops",
]

LAUNCH_S = 2.8e-3
"""Host time for launching one eager block's kernels, forward and backward: the floor of vTrain's small models, whatever
their micro-batch and tensor parallelism."""

COMPILED_LAUNCH = 0.4
"""Share of that time for a compiled block, which has fewer kernels."""

EXPERT_LAUNCH = 1.9
"""How many times as long a block with routed experts takes to launch: scores, their order, rows by expert and back
(`python -m benchmarks.planner.ranking`, on CPUs)."""

CONTEXT_LAUNCH = 1.6
"""How many times as long a block takes whose sequences ranks share: attention by tiles, whose results are put together
(the same benchmark)."""

TENSOR_LAUNCH = 1.2
"""How many times as long a tensor-parallel block takes, which has collectives among its kernels (vTrain's runs)."""

DECODED_BYTES = 22.5
"""Bytes read and written per element to decode 4 bits to 16, in plain operators: a code and an index of four bytes for
each two elements (0.5 + 2 + 2), levels in fp32 (4), times the scale (8), cast (6)."""
CAST_BYTES = 4
"""Bytes read and written per element to bring it from 16 bits to 8: once for its largest value, once for the cast."""

FORMULAS = {
    "time.memory": Formula(
        f"pace * bytes / bandwidth; of norms, residuals, activations, gradients, casts and the loss, and "
        f"{2 * DECODED_BYTES:g} for each element of a frozen matrix in 4 bits, which is decoded twice",
        f"roofline: elementwise kernels reach {MEMORY_SHARE * 100:g} % of the memory's bandwidth",
    ),
    "time.recompute": Formula(
        "pace * micro_batches * layers * repeated_s; a layer's forward / every (full), or what lies between saved "
        "products, under math attention its core (selective), with every second product (selective_half)",
        "arXiv 1604.06174; arXiv 2205.05198 section 5; torchtitan's per-operation checkpointing",
    ),
    "time.launch": Formula(
        "pace * micro_batches * layers * gap_s; of a layer sqrt(launch_s ^ 2 + busy_s ^ 2) - busy_s",
        "the host cannot launch kernels faster; set on vTrain's runs of small GPTs",
    ),
    "time.optimizer": Formula("bytes / bandwidth", "elementwise, so bound by the memory"),
}


@dataclass(frozen=True)
class Seconds:
    """Seconds of one block or the head, for one micro-batch on one rank.

    Attributes:
        matmul, attention, memory: forward and backward. matmul_flops: FLOPs of the products, with what is lost to their
            shapes counted as FLOPs.
        recompute: what activation checkpointing repeats.
        launch: time in which the device waits for the host to launch kernels.
        forward_share, products_share, rest_share: forward's share of attention; of matrix products, more than a third
            where frozen ones have no weight gradient; and of all else, a third.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    launch: float = 0.0
    matmul_flops: float = 0.0
    forward_share: float = 1 / 3
    products_share: float = 1 / 3
    rest_share: float = 1 / 3

    @property
    def forward(self) -> float:
        products = self.matmul * self.products_share
        return products + (self.memory + self.launch) * self.rest_share + self.attention * self.forward_share

    @property
    def forward_alone(self) -> Seconds:
        """The seconds of forward, as those of a block without backward."""
        products, flops = (each * self.products_share for each in (self.matmul, self.matmul_flops))
        attention, rest = self.attention * self.forward_share, self.rest_share
        return Seconds(products, attention, self.memory * rest, 0.0, self.launch * rest, flops, 1.0, 1.0, 1.0)

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory + self.recompute + self.launch

    @property
    def backward(self) -> float:
        return self.total - self.forward

    def at(self, pace: float) -> Seconds:
        """The seconds on a device that needs `pace` times as long."""
        if pace == 1:
            return self
        parts = {part: pace * getattr(self, part) for part in ("matmul", "attention", "memory", "recompute", "launch")}
        return replace(self, **parts)


# -- counting --------------------------------------------------------------------------------------------------


def flops_per_token(model: ModelShape, sequence: int) -> float:
    """FLOPs of a model's forward and backward, recomputation not counted, attention as if no token were masked.

    6 per matrix element that a token meets and 12 * heads * head_dim * sequence per layer (PaLM, arXiv 2204.02311,
    appendix B), with the window in place of the sequence where a layer looks no further back, whatever the kernel
    computes and masks. 4 per frozen element; of blocks that no gradient goes back through, 2 per element and a third
    for attention.
    """
    products = 6 * model.matmul_numel - 2 * model.frozen_matmul_numel - 2 * model.forward_only_numel
    return products + _attention_flops(model, sequence)


def _attention_flops(model: ModelShape, sequence: int, backward: bool = False) -> float:
    """FLOPs per token of attention's products; with `backward`, of the forward of blocks that have a backward alone."""
    total = 0.0
    for unit in model.repeated:
        if (block := unit.block) is not None:
            passes = (0 if unit.forward_only else 1) if backward else (1 if unit.forward_only else 3)
            channels = block.heads * (block.head_dim + block.value_dim)
            total += unit.count * 2 * passes * channels * block.attended(sequence)
    return total


def repeated_flops_per_token(setup: Setup) -> float:
    """FLOPs of the forward that checkpointing runs again in backward; frozen weights are no reason to leave it out."""
    shares = repeated_shares(setup)
    model = setup.model
    products = 2 * (model.matmul_numel - model.forward_only_numel - model.logits * model.hidden)
    attention = _attention_flops(model, setup.sequence, backward=True)
    return (products * shares.matmul + attention * shares.attention) * setup.checkpointed_share


def step_flops(setup: Setup) -> float:
    """FLOPs of one rank in one step: the model's, and what recomputation repeats of them."""
    tokens = setup.tokens * setup.micro_batches * setup.mesh.batch_ranks / setup.mesh.world_size
    return (flops_per_token(setup.model, setup.sequence) + repeated_flops_per_token(setup)) * tokens


# -- a block ---------------------------------------------------------------------------------------------------


def block_seconds(setup: Setup, unit: UnitShape) -> Seconds:
    """Seconds of one block and one micro-batch, forward and, where it has one, backward.

    The device's rates must be known.
    """
    block, device = unit.block, setup.cluster.device
    assert block is not None
    products = _products(setup, unit, block)
    seconds = Seconds(
        matmul=products.flops / products.rate,
        attention=attention_seconds(setup, block),
        memory=_memory_bytes(setup, unit, block) / memory_rate(device),
        matmul_flops=products.flops,
        forward_share=forward_share(setup),
        products_share=products.forward_share,
    )
    launch, decoding = launch_seconds(setup, block), _decoded_bytes(setup, unit) / memory_rate(device)
    if unit.forward_only:
        seconds, launch = seconds.forward_alone, launch / 3
    else:
        seconds, decoding = replace(seconds, recompute=_recompute_s(setup, seconds)), 2 * decoding
        launch *= 1 + setup.checkpointed_share / 3  # all of forward is run again; what is kept is looked up
    seconds = replace(seconds, memory=seconds.memory + decoding)
    return replace(seconds, launch=_gaps(device, launch, seconds.total))


def launch_seconds(setup: Setup, block: BlockShape | None = None) -> float:
    """Host time for one block, forward and backward, or for what is around the blocks."""
    usual, mesh, factor = setup.cluster.device.launch_s, setup.mesh, COMPILED_LAUNCH if setup.compile else 1.0
    factor *= TENSOR_LAUNCH if mesh.tp > 1 else 1.0
    if setup.cluster.device.kind == "cpu":
        factor *= EXPERT_LAUNCH if block is not None and block.experts else 1.0
        factor *= CONTEXT_LAUNCH if block is not None and mesh.cp > 1 else 1.0
    return (LAUNCH_S if usual is None else usual) * factor


def _gaps(device: Device, launch: float, busy: float) -> float:
    """Time in which the device waits for the host; a CPU does both itself, one after the other.

    All of what launching exceeds the device's work by, and some where it does not: kernels shorter than their launch
    leave gaps between longer ones. In quadrature, which vTrain's runs between both regimes follow.
    """
    return launch if device.kind == "cpu" else math.hypot(launch, busy) - busy


class _Products(NamedTuple):
    """FLOPs of a block's products, FLOP/s, and forward's share: a third of what they would be if all were trained."""

    flops: float
    rate: float
    forward_share: float


def _products(setup: Setup, unit: UnitShape, block: BlockShape) -> _Products:
    rate = sustained_rate(setup.cluster.device, setup.matmul)
    assert rate is not None
    mesh, tokens = setup.mesh, setup.rank_tokens
    own = tokens / mesh.tp if setup.whole_experts and setup.sequence_parallel else tokens
    shares = Shares(tokens, own, mesh.tp, mesh.ep, setup.whole_experts)
    rate *= setup.cluster.device.recipe_shares.get(setup.recipe, 1.0)
    in_tiles = setup.cluster.device.kind != "cpu"
    work = block_products(unit.tensors, block, shares, in_tiles)
    whole = block_products(_all_trained(unit.tensors), block, shares, in_tiles)
    return _Products(work, rate, whole / 3 / work if work else 1 / 3)


@once
def _all_trained(tensors: tuple[TensorShape, ...]) -> tuple[TensorShape, ...]:
    return tuple(replace(tensor, trainable=True) for tensor in tensors)


def _memory_bytes(setup: Setup, unit: UnitShape, block: BlockShape) -> float:
    """Bytes read and written in one micro-batch by what is no matrix product, forward and backward."""
    tokens, per_token = setup.rank_tokens, 3 * _elements(setup, block) * setup.precision.compute.itemsize
    sums = _matrix_sums(unit.tensors, block, setup.mesh.tp, setup.mesh.ep, setup.whole_experts)
    weights = sums.numel * (setup.precision.compute.itemsize + setup.precision.accumulate.itemsize)
    if setup.matmul == "fp8":
        per_token += sums.width * CAST_BYTES
        weights += 2 * sums.numel * CAST_BYTES
    return tokens * per_token + weights


def _decoded_bytes(setup: Setup, unit: UnitShape) -> float:
    """Bytes read and written to decode once what is kept in 4 bits of a unit: what each rank uses of it."""
    if setup.precision.frozen is None:
        return 0.0
    packed = [tensor for tensor in unit.tensors if is_packed(tensor, unit)]
    tp, whole_experts = setup.mesh.tp, setup.whole_experts
    return DECODED_BYTES * sum(each.numel / parts_along_tp(each, unit.block, tp, whole_experts) for each in packed)


PLAIN_GELU = 18
"""Elements that a tanh GELU in plain operators reads and writes for each: eight operators, two of which read two."""

PLAIN_NORM, PLAIN_ROTATION = 18, 10
"""Elements of 16 bits that an RMSNorm written in plain operators reads and writes, one after the other, for each that
it norms: to fp32 (3), squared (4), their mean (2), scaled (4), back (3), times the weight (2); and a rotary embedding
for each that it turns: two products (4), a half negated (1), both put together (2), their sum (3). One kernel: 2."""


def _elements(setup: Setup, block: BlockShape) -> float:
    """Elements read and written per token in forward by norms, residuals, nonlinearities, rotations and dropout."""
    tp, plain = setup.mesh.tp, not setup.fuses_kernels
    norm = 2 if block.norm == "layer" or block.torch_norm or not plain else PLAIN_NORM
    wide = block.norms * norm + 2 * (1.5 if setup.compile else 3)
    wide += 2 * 2.5 if block.dropout else 0
    inner = (block.active_experts or 1) * block.ffn + block.shared_ffn
    inner *= (5 if plain else 3) if block.gated else PLAIN_GELU if block.nonlinearity == "plain_gelu" and plain else 2
    inside = inner / block.mlp_parts(tp) + _rotation(block, tp, plain)
    inside += block.query_key_norms * block.query_key_channels(tp) * norm
    return wide * block.hidden / (tp if setup.sequence_parallel else 1) + inside


def _rotation(block: BlockShape, tp: int, plain: bool) -> float:
    """Elements read and written per token to rotate queries and keys.

    Plain operators put what they have turned of a head and what they have not together, which copies both; the key of
    latent attention (MLA) is turned once for all heads. One kernel reads and writes whole heads.
    """
    queries, keys = block.heads / block.attention_parts(tp), block.key_heads(tp)
    copied = 2 * block.query_key_channels(tp)
    if not block.rotated or not plain:
        return copied if block.rotated else 0.0
    turned = PLAIN_ROTATION * (queries + (1 if block.latent else keys)) * block.rotated
    return turned + (copied if block.rotated < block.head_dim else 0.0)


class _MatrixSums(NamedTuple):
    """Trainable elements of one rank's matrices; inputs and output gradients of all of them, per token of a block."""

    numel: float
    width: float


@once
def _matrix_sums(
    tensors: tuple[TensorShape, ...], block: BlockShape, tp: int, ep: int, whole_experts: bool
) -> _MatrixSums:
    """Sums over the matrices of a block. For whole experts a rank has tokens of its own, as many as these over tp."""
    numel = width = 0.0
    for tensor in tensors:
        if tensor.role in ("matrix", "router", "expert"):
            parts, is_expert = parts_along_tp(tensor, block, tp, whole_experts), tensor.role == "expert"
            numel += tensor.numel / parts / (ep if is_expert else 1) if tensor.trainable else 0.0
            width += (tensor.shape[-1] + tensor.shape[-2]) / (tp if is_expert else parts)
    return _MatrixSums(numel, width)


def _recompute_s(setup: Setup, cost: Seconds) -> float:
    shares = repeated_shares(setup)
    forward = cost.matmul * cost.products_share * shares.matmul + cost.memory * shares.memory / 3
    return (forward + cost.attention * cost.forward_share * shares.attention) * setup.checkpointed_share


# -- the head and the optimizer --------------------------------------------------------------------------------


def head_seconds(setup: Setup) -> Seconds:
    """Seconds of embedding, logits and loss for one micro-batch."""
    model, device = setup.model, setup.cluster.device
    rate = sustained_rate(device, sixteen_bits(setup.matmul))
    assert rate is not None
    rows, apart = setup.rank_tokens, setup.mesh.tp
    logits = rows * model.logits
    taken = logits if setup.puts_logits_together else logits / apart  # for the loss
    each = LOGIT_BYTES * (COMPILED_LOGITS if setup.compile and setup.loss == "fused" else 1)
    work, whole = (
        products_of(1, rows, -(-model.logits // apart), model.hidden, trained, device.kind != "cpu")
        for trained in (model.trains_head, True)
    )
    matmul, memory = work / rate, taken * each / memory_rate(device)
    gaps = _gaps(device, launch_seconds(setup), matmul + memory)
    share = whole / 3 / work if work else 1 / 3
    return Seconds(matmul=matmul, memory=memory, launch=gaps, matmul_flops=work, products_share=share)


LOGIT_BYTES = 36
"""Bytes read and written per logit by an eager loss, forward and backward: a copy in fp32, its log-softmax, its
gradient and the cast back."""

COMPILED_LOGITS = 0.5
"""Share of these bytes with a compiled loss, which is a fused one; compiled blocks alone leave them as they are."""


def optimizer_bytes(setup: Setup, owned_numel: float, whole_numel: float = 0.0) -> float:
    """Bytes of an update: reading the gradient twice (its norm, the update), reading and writing master weights and
    moments, writing the weight. An update that takes roots and is not fused writes and reads each of its steps. An
    average of the weights is read and written, and they are read once more.

    Args:
        owned_numel: elements that the rank updates.
        whole_numel: how many of them are of matrices that are updated whole, and have other moments.
    """
    precision, spec = setup.precision, setup.optimizer
    each = spec.bytes_each(precision)
    both_ways = 2 * (precision.accumulate.itemsize + precision.exact_master.itemsize + spec.moments * each)
    steps = 0 if setup.update_kernel == "fused" or not spec.takes_root else STEPS * precision.master.itemsize
    of_matrices = spec.moments if spec.matrices is None else spec.matrices.moments
    less = 2 * whole_numel * (spec.moments - of_matrices) * each
    average = 3 * precision.exact_master.itemsize * setup.ema
    return owned_numel * (both_ways + precision.weight.itemsize + steps + average) - less


STEPS = 13
"""Elements written and read between the steps of an Adam that is not fused: 80 bytes of a parameter in fp32 where the
fused one moves 28 (torch/optim/adam.py)."""
