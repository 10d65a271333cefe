"""The names that a user chooses by: strategies with their offload, precisions, activation checkpointing."""

from __future__ import annotations

import re
from typing import get_args

import torch

from terrazzo.engine import PLANS, PRECISIONS, Plan, Precision
from terrazzo.errors import BadInput, did_you_mean
from terrazzo.planner.setup.setup import Checkpointing
from terrazzo.words import PRECISION_SPELLINGS, preset_named

__all__ = [
    "CHECKPOINTING",
    "RECIPES",
    "STRATEGIES",
    "checkpointing",
    "has_row_scales",
    "precision",
    "strategy",
]

_BF16, _FP32 = torch.bfloat16, torch.float32

RECIPES: dict[str, tuple[Precision, str]] = {
    "fp32": (PRECISIONS["fp32"], "fp32"),
    "bf16": (PRECISIONS["bf16"], "bf16"),
    "bf16-pure": (PRECISIONS["bf16-pure"], "bf16"),
    "fp16": (PRECISIONS["fp16"], "fp16"),
    "fp8": (PRECISIONS["bf16"], "fp8"),
    "fp8-rowwise": (PRECISIONS["bf16"], "fp8"),
    "fsdp2": (Precision(weight=_FP32, compute=_BF16, reduce=_FP32), "bf16"),
    "zero": (Precision(_BF16, _BF16, _BF16, _BF16, _FP32, _FP32), "bf16"),
}
"""Dtypes of all states, and the format of matrix products. `fp8`, with one scale for each
matrix or for each row of one, keeps the states of `bf16`; `fsdp2` shards fp32
weights and computes in bf16, as FSDP2 and torchtitan do; `zero` is the ZeRO paper's 2 + 2 + 12 bytes (arXiv
1910.02054)."""

_SYNONYMS = {"fsdp": "zero3", "fsdp2": "zero3", "hsdp": "hybrid_shard"}
STRATEGIES = (*PLANS, *_SYNONYMS)
"""Names of plans that `strategy` knows, each of which may have an offload."""

CHECKPOINTING = ("none", "selective", "selective_half", "full", "every_N")
_MODES = {"true": "full", "on": "full", "false": "none", "off": "none", "op": "selective_half", "sac": "selective"}
"""What else people call these."""


def strategy(name: str) -> Plan:
    """The plan of any name that `Plan.named` takes, or of `fsdp`, `fsdp2` and `hsdp` in place of its first part.

    Raises: `BadInput` with the nearest name.
    """
    base, at, offload = name.strip().lower().replace("_", "-").partition("@")
    base = base.replace("-", "_")
    base = _SYNONYMS.get(base, base)
    if base not in PLANS:
        near = did_you_mean(base.replace("_", ""), STRATEGIES) or did_you_mean(base, STRATEGIES)
        raise BadInput(f"There is no strategy {name!r}.{near} Strategies are {', '.join(STRATEGIES)}.")
    return Plan.named(f"{base}{at}{offload}")


def precision(name: str) -> tuple[Precision, str]:
    """Dtypes, and the format of matrix products, of that name. Raises: `BadInput` with the nearest name."""
    key = _key(name)
    if key not in RECIPES:
        spelled = {spelling: preset for preset, each in PRECISION_SPELLINGS.items() for spelling in each}
        near = did_you_mean(key, (*RECIPES, *spelled))
        synonyms = ", ".join(f"{spelling} = {preset}" for spelling, preset in spelled.items())
        raise BadInput(f"There is no precision {name!r}.{near} Precisions are {', '.join(RECIPES)}; {synonyms}.")
    return RECIPES[key]


def has_row_scales(name: str) -> bool:
    """Whether the precision of that name scales each row of a matrix by itself."""
    return _key(name) == "fp8-rowwise"


def _key(name: str) -> str:
    key = name.strip().lower().replace("_", "-")
    return key if key in RECIPES else preset_named(name)


def checkpointing(name: str) -> tuple[Checkpointing, int]:
    """Mode and `every` of a name of `CHECKPOINTING`. Raises: `BadInput` with the nearest name."""
    key = name.strip().lower().replace("-", "_")
    if match := re.fullmatch(r"every_([1-9][0-9]{0,8})", key):
        return "full", int(match[1])
    for mode in get_args(Checkpointing):
        if key == mode:
            return mode, 1
    near = f" Did you mean '{_MODES[key]}'?" if key in _MODES else did_you_mean(key, CHECKPOINTING)
    raise BadInput(
        f"There is no activation checkpointing {name!r}.{near} "
        "Use none, selective, selective_half, full, or every_N for one block in N, such as every_2."
    )
