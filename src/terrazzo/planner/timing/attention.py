"""What attention takes: its products by the kernel that runs them, its scores where they are written, and its tiles.

Rates are of kernels measured by themselves; no training run decided one.
"""

from __future__ import annotations

import math

from terrazzo.parallel import TILE_ROWS, WINDOW_ROWS
from terrazzo.planner.figures import Formula
from terrazzo.planner.machine.architectures import ARCHITECTURES
from terrazzo.planner.model.shapes import BUILT_IN, BlockShape
from terrazzo.planner.setup.kernels import unfused_by_itself
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.products import product
from terrazzo.planner.timing.rates import matmul_rate, memory_rate, power_share, sixteen_bits, sustained_rate

__all__ = [
    "FORMULAS",
    "attention_bytes",
    "attention_flops",
    "attention_rate",
    "attention_seconds",
    "forward_share",
]

KERNEL_SHARES = {"cudnn": 0.78, "flash3": 0.85}
"""What kernels that are made for Hopper reach of the largest rate of matrix products that the device's power keeps up,
forward and backward together on long causal sequences at 128 channels: cuDNN 526 of 681 TFLOP/s at 16,384 tokens
(benchmarks/results/gpu/kernels.md, on an H100), FlashAttention-3 616 in its two forward products and 561 in its five
backward (arXiv 2407.08608). No backward on Blackwell is published: it is given Hopper's. The share of FlashAttention-2
is the device's `flash_share`."""

TRITON_SHARE = 1 / 1.8
"""Rate of the first FlashAttention in Triton, as a share of FlashAttention-2's: 1.3 to 2.5 times slower (arXiv
2307.08691, section 4.1), the geometric mean."""

CPU_SHARE = 0.42
"""What attention reaches on a CPU of the largest rate of matrix products (`python -m benchmarks.planner.ranking`)."""

RAMP = 500
"""Tokens by which a causal sequence is longer, as far as a kernel's rate goes: 99, 155, 182 and 189 TFLOP/s at 512,
2,048, 8,192 and 16,384 tokens on an A100, 163, 265, 308 and 328 on an H100 (Dao-AILab/flash-attention assets)."""

HEAD, WIDEST, ROUNDING = 20, 128, 32
"""Channels by which a head is wider likewise, up to the widest: at 64 a kernel reaches 0.87 to 0.9 times the rate that
it has at 128, at 256 no more (the same figures). Heads are rounded up to multiples of 32 channels."""

FORWARD_SHARE = 2 / 7
"""Forward's share of fused attention's work: two products, and five backward with the scores once more (arXiv
2205.14135)."""

SCORE_BYTES, CAP_BYTES = 28, 16
"""Bytes read and written per score, forward and backward, by a fused softmax with dropout in 16 bits between two
products, and by the three operators of a soft cap."""

TORCH_SCORE_BYTES, TORCH_DROPPED_BYTES = 52, 84
"""The same in torch's math path on a CPU, one operator after the other in fp32, without dropout and with: forward, the
product (4), a mask (8), the softmax (8) and the next product (4), backward two products (8), the softmax (12) and two
products (8); dropout draws a factor (4), scales it (8) and multiplies, forward (8) and backward (12)."""

QUERY_BYTES, KEY_BYTES = 36, 10
"""Bytes read and written for each element of the queries and of the keys or values of a tile, where attention is
computed tile by tile: outputs, in 16 bits, are weighted in fp32 and added to the others', gradients are added in fp32
(terrazzo/parallel/context/attention_tiles.py)."""


_FLASH = {"A100": "Ampere GA100", "H100": "Hopper", "B200": "Blackwell"}

FORMULAS = {
    "time.attention": Formula(
        "pace * (flops / attention_flops + moved_bytes / bandwidth); flops of a layer and micro-batch are "
        f"{2 / FORWARD_SHARE:g} * tokens * attended * heads * head_dim / tp, masked ones skipped, at the kernel's "
        f"share of the largest matrix rate that power keeps up, on long sequences at {WIDEST} channels, * attended / "
        f"(attended + {RAMP}), and less at narrow heads: FlashAttention-2 "
        + ", ".join(f"{ARCHITECTURES[row].flash_share:g} on {name}" for name, row in _FLASH.items())
        + f", in Triton 1 / {1 / TRITON_SHARE:g} of that, from Hopper on "
        + " and ".join(f"{name} {share:g}" for name, share in KERNEL_SHARES.items())
        + f"; unfused 12 * ... of plain products, and {SCORE_BYTES} bytes per score, in torch's own path on a CPU "
        f"{TORCH_SCORE_BYTES} or, dropped, {TORCH_DROPPED_BYTES}; tiles of shared sequences "
        f"move {QUERY_BYTES} bytes for each element of their queries, and {KEY_BYTES} of their keys and values",
        "two products forward and five backward; kernels measured by themselves (Dao-AILab/flash-attention assets, "
        "arXiv 2307.08691, arXiv 2407.08608, benchmarks/results/gpu/kernels.md); "
        "terrazzo/parallel/context/attention_tiles.py",
    ),
}


def forward_share(setup: Setup) -> float:
    """Forward's share of attention's work forward and backward."""
    return FORWARD_SHARE if not setup.keeps_scores else 1 / 3


def _attended(setup: Setup, block: BlockShape) -> int:
    """Tokens that one looks back on, itself included; kept scores are of the whole sequence, be they masked."""
    return setup.sequence if setup.keeps_scores else block.attended(setup.sequence)


def attention_seconds(setup: Setup, block: BlockShape) -> float:
    """Seconds of one block's attention for one micro-batch on one rank, forward and backward."""
    moved = attention_bytes(setup, block) / memory_rate(setup.cluster.device)
    return attention_flops(setup, block) / attention_rate(setup, block) + moved


def attention_flops(setup: Setup, block: BlockShape) -> float:
    """FLOPs of one block's attention for one micro-batch on one rank, forward and backward; fused kernels skip what is
    masked. Of prompts whose tokens see each other, as long as nobody says, none of that is counted.
    """
    each = 2 * setup.rank_tokens * _heads(setup, block) * (block.head_dim + block.value_dim)
    if setup.keeps_scores:
        return 3 * each * _attended(setup, block)
    length = setup.sequence
    near = min(length, block.window or length)
    far = (length - near) ** 2 / (2 * block.stride * length) if block.stride else 0.0
    return each * (near * (1 - near / length / 2) + far) / FORWARD_SHARE


def attention_bytes(setup: Setup, block: BlockShape) -> float:
    """Bytes read and written beside the products: scores, if they are, and what puts tiles of shared sequences
    together.
    """
    scores = setup.rank_tokens * _attended(setup, block) * _heads(setup, block) * _score_bytes(setup, block)
    return (scores if setup.keeps_scores else 0.0) + _tile_bytes(setup, block)


def _score_bytes(setup: Setup, block: BlockShape) -> int:
    on_cpu = setup.cluster.device.kind == "cpu"
    if on_cpu and not setup.as_megatron and unfused_by_itself(block, on_cpu) not in (None, "eager"):
        return TORCH_DROPPED_BYTES if block.attention_dropout else TORCH_SCORE_BYTES
    return SCORE_BYTES + (CAP_BYTES if block.soft_cap else 0)


def _tile_bytes(setup: Setup, block: BlockShape) -> float:
    """Bytes read and written to put tiles together.

    With gathered keys each run of queries meets those before it in one tile and itself in another; in a ring each
    rank's keys are tiles of their own. With a share of the heads there is one tile, of whole sequences. Within a window
    each block of queries has three, and with prefixes two, of which the built-in decoder's layers are made on one rank
    too.
    """
    ranks, tokens = setup.mesh.cp, setup.rank_tokens
    queries = _heads(setup, block) * block.value_dim
    keys = block.key_heads(setup.mesh.tp) * (block.head_dim + block.value_dim)
    slides = block.window is not None and block.window < setup.sequence
    if slides and (ranks > 1 or setup.model.family == BUILT_IN):
        times = (block.window or 0) / WINDOW_ROWS + 1
        return tokens * (3 * queries * QUERY_BYTES + times * keys * KEY_BYTES)
    if block.prefix:
        times = ranks + setup.sequence / (2 * TILE_ROWS)  # half of a sequence's blocks meet a key
        return tokens * (max(2, ranks) * queries * QUERY_BYTES + times * keys * KEY_BYTES)
    if ranks == 1 or setup.context == "ulysses":
        return 0.0
    tiles = 2 if setup.context == "gather" else ranks
    return tokens * (tiles * queries * QUERY_BYTES + ranks * keys * KEY_BYTES)


def attention_rate(setup: Setup, block: BlockShape) -> float:
    """FLOP/s of attention's products: less where sequences are short or heads narrow."""
    device, matmul = setup.cluster.device, sixteen_bits(setup.matmul)
    largest, sustained = matmul_rate(device, matmul), sustained_rate(device, matmul)
    assert largest is not None and sustained is not None
    if device.kind == "cpu":
        return largest * CPU_SHARE
    if setup.keeps_scores:
        return sustained * _filled(setup, block)
    share = KERNEL_SHARES.get(setup.attention, device.flash_share) if device.wide_warps else device.flash_share
    share *= TRITON_SHARE if setup.attention == "triton" else 1.0
    channels = min(block.head_dim, WIDEST)
    rounded = math.ceil(block.head_dim / ROUNDING) * ROUNDING / block.head_dim
    narrow = channels / (channels + HEAD) * (WIDEST + HEAD) / WIDEST / rounded
    length = min(_attended(setup, block), _tile_length(setup))
    return largest * power_share(device, matmul) * share * narrow * length / (length + RAMP)


def _tile_length(setup: Setup) -> float:
    """Tokens of the keys that a kernel is called with."""
    return setup.sequence / (setup.mesh.cp if setup.context == "ring" else 1)


def _filled(setup: Setup, block: BlockShape) -> float:
    """What the products of all heads reach of the rate of large ones: two of six are as deep as a head has channels."""
    length, stack = float(_attended(setup, block)), setup.micro_batch * _heads(setup, block)
    deep, wide = product(stack, length, length, block.head_dim), product(stack, length, block.head_dim, length)
    return 6 * 2 * stack * length * length * block.head_dim / (2 * deep + 4 * wide)


def _heads(setup: Setup, block: BlockShape) -> float:
    return block.heads / block.attention_parts(setup.mesh.tp)
