"""The precision that Lightning trains in, by its word and the strategy."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import LOADED, PARAMETER_DTYPES, Setting, SettingsByPath
from terrazzo.engine import LossScaling

__all__ = ["WORDS", "precision_row"]

WORDS: dict[Any, str] = {
    **{word: word for word in ("16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true")},
    "transformer-engine": "bf16-true",
    "transformer-engine-float16": "16-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "32": "32-true",
    "64": "64-true",
    16: "16-mixed",
    32: "32-true",
    64: "64-true",
}
"""Lightning's full word by any of its words."""
_DTYPES = {"16": "fp16", "bf16": "bf16", "32": "fp32", "64": "fp64"}


def precision_row(strategy: str, word: Setting[Any]) -> SettingsByPath:
    """The dtype of every state, under a word of `WORDS`.

    FSDP gathers and reduces in the 16-bit type, `mixed` or `true`; `true` alone stores the weights in it as well. DDP
    keeps fp32 weights and reduces in fp32. `mixed` runs the forward under autocast, with either.
    """
    name, _, way = word.value.partition("-")
    narrow, stored = _DTYPES[name], _DTYPES[name] if way == "true" else "fp32"
    row = dict.fromkeys(PARAMETER_DTYPES, stored) | {"compute": narrow}
    sharded = strategy == "FSDPStrategy"
    if sharded:
        row |= {"reduce": narrow}
    scaled = LossScaling() if name == "16" and way == "mixed" else None
    values = {
        **row,
        "buffers": narrow if sharded else LOADED,
        "autocast": way == "mixed",
        "loss_scaling": scaled,
    }
    return {f"precision.{state}": Setting(value, word.origin, word.key) for state, value in values.items()}
