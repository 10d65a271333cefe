"""What devices of an architecture, and domains of a kind of links, have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["ARCHITECTURES", "HOPPER_RECIPES", "SCALEUP_KINDS"]

HOPPER_RECIPES: Mapping[str, float] = {"rowwise": 0.77}
BLACKWELL_RECIPES: Mapping[str, float] = {"rowwise": 0.65, "mx": 0.90}
CDNA_RECIPES: Mapping[str, float] = {"rowwise": 0.91}
"""Rates of products in fp8 as shares of those with one scale for each matrix, so that steps of Llama 3 8B gain over
bf16 what is published (pytorch/ao docs, workflows/training): on 8 H100 25.0 % with one scale for each matrix and 10.1 %
by rows, on 8 B200 25.4, 4.0 and in blocks of 32 (`mx`) 20.0 %, on 8 MI300X 14.7 and 9.6 %. Other devices are given
Hopper's, and CDNA4 in blocks Blackwell's."""


class GpuArchitecture(NamedTuple):
    """What devices of an architecture have in common: attributes as of `Device`."""

    flash_share: float
    wide_warps: bool
    recipe_shares: Mapping[str, float] = HOPPER_RECIPES


ARCHITECTURES = {
    "Volta": GpuArchitecture(0.72, wide_warps=False),
    "Turing": GpuArchitecture(0.72, wide_warps=False),
    "Ampere GA100": GpuArchitecture(0.72, wide_warps=False),
    "Ampere GA102": GpuArchitecture(0.72, wide_warps=False),
    "Ada": GpuArchitecture(0.72, wide_warps=False),
    "Hopper": GpuArchitecture(0.5, wide_warps=True),
    "Blackwell": GpuArchitecture(0.28, wide_warps=True, recipe_shares=BLACKWELL_RECIPES),
    "Blackwell Ultra": GpuArchitecture(0.28, wide_warps=True, recipe_shares=BLACKWELL_RECIPES),
    "Blackwell GB202": GpuArchitecture(0.72, wide_warps=False, recipe_shares=BLACKWELL_RECIPES),
    "Grace Blackwell": GpuArchitecture(0.28, wide_warps=True, recipe_shares=BLACKWELL_RECIPES),
    "Grace Blackwell Ultra": GpuArchitecture(0.28, wide_warps=True, recipe_shares=BLACKWELL_RECIPES),
    "CDNA2": GpuArchitecture(0.5, wide_warps=False),
    "CDNA3": GpuArchitecture(0.5, wide_warps=False, recipe_shares=CDNA_RECIPES),
    "CDNA4": GpuArchitecture(0.5, wide_warps=False, recipe_shares={**CDNA_RECIPES, "mx": BLACKWELL_RECIPES["mx"]}),
}
"""Shares are of long causal sequences at 128 channels, forward and backward: 194 of 271 TFLOP/s on A100, 338 of 681 on
H100, whose own instructions it does not use (Dao-AILab/flash-attention assets), 390 of 1,430 on GB200
(Azure/AI-benchmarking-guide). NVIDIA's devices without wide warps are given A100's share. Of AMD's devices no backward
is published: they are given Hopper's."""


class ScaleUpKind(NamedTuple):
    """What kind of links a scale-up domain has. Attributes as of `Device`."""

    full_mesh: bool
    switch_sums: bool


SCALEUP_KINDS = {
    "": ScaleUpKind(full_mesh=False, switch_sums=False),
    "full mesh": ScaleUpKind(full_mesh=True, switch_sums=False),
    "summing switch": ScaleUpKind(full_mesh=False, switch_sums=True),
}
"""What is known of the links of a scale-up domain; "" stands for all others, such as a switch that does not sum."""
