"""What is trained on the simulated device; knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["JOBS", "LAYERS", "LONGEST", "MODEL", "RANKS", "SCALE", "Job"]

RANKS, LAYERS, LONGEST = 8, 8, 128
"""Of the group, blocks of the model, and tokens of a sequence."""

MODEL: dict[str, Any] = {
    "vocab_size": 1000, "dim": 128, "layers": LAYERS, "heads": 2, "kv_heads": 2, "ffn_dim": 512,
    "max_sequence_length": LONGEST,
}  # fmt: skip
"""Sizes of the decoder that is trained."""


SCALE = 256
"""By which every size is multiplied before the replay."""


@dataclass(frozen=True)
class Job:
    """Training by one plan, or by `fsdp2`.

    Attributes:
        axes: of the mesh.
        varied: sequences of a quarter to the whole of the longest length, drawn anew for each step.
    """

    plan: str
    axes: int = 1
    steps: int = 8
    varied: bool = False


PLANS = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "fsdp2")
TIERS = ("zero3@cpu", "zero3@cpu-all", "zero3@nvme", "zero3@nvme-all")
TWO_AXES = ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", "fsdp2")
VARIED = ("zero3", "fsdp2", "zero3@cpu", "zero2")

JOBS = (
    *(Job(plan) for plan in (*PLANS, *TIERS)),
    *(Job(plan, axes=2) for plan in TWO_AXES),
    *(Job(plan, steps=200, varied=True) for plan in VARIED),
)
