"""The precision that Lightning trains in, by its word and the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import LOADED, PARAMETER_DTYPES, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.shared.fsdp_policy import load_dtype
from terrazzo.engine import LossScaling

__all__ = ["GATHERS_NARROW", "LAST", "POLICY", "WORDS", "cast_by_deepspeed", "precision_row"]

LAST = "2.6.6"
"""The release of Lightning that this was held against."""
GATHERS_NARROW = (2, 6, 0)
"""The first release whose FSDPStrategy gathers weights in 16 bits under a `mixed` word; before, it did so in fp32."""
POLICY = {"compute": "param_dtype", "reduce": "reduce_dtype", "buffers": "buffer_dtype"}
"""Keys of FSDPStrategy's `mixed_precision`, by the state."""

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


def precision_row(
    strategy: str,
    word: Setting[Any],
    micro_batches: Setting[Any],
    context: ReadingContext,
    policy: Mapping[str, Setting[Any]] | None = None,
) -> tuple[SettingsByPath, str]:
    """The dtype of every state, and that of gathered weights, under a word of `WORDS`: for reader and writer alike.

    Args:
        strategy: its class.
        micro_batches: of a step.
        policy: what FSDPStrategy's `mixed_precision` says, in place of the word: `compute`, which is the type of
            gathered weights, `reduce` and `buffers`, as far as they are given. None: there is none.
    """
    loaded, release = load_dtype(context, True), context.version("lightning", LAST)
    row = _by_word(strategy, word, loaded, policy)
    gathered = _gathered_in(strategy, word.value, loaded, policy, release)
    if strategy == "FSDPStrategy":
        row |= _sums(gathered, word, micro_batches)
    if strategy == "ModelParallelStrategy":  # the code says it
        del row["precision.reduce"]
    return row, gathered


def cast_by_deepspeed(word: Setting[Any]) -> Setting[Any] | None:
    """What DeepSpeedStrategy casts buffers to, with the whole module, before DeepSpeed gets it; None: it does not."""
    name, _, way = word.value.partition("-")
    return Setting(_DTYPES[name], word.origin, word.key) if way == "true" and name != "32" else None


def _by_word(
    strategy: str, word: Setting[Any], loaded: str, policy: Mapping[str, Setting[Any]] | None
) -> SettingsByPath:
    """The dtypes in which one micro-batch goes through.

    `true` stores the weights in the word's type, and casts buffers with them; `mixed` keeps them as they are loaded,
    and runs the forward under autocast. FSDP gathers and reduces in the word's type, and casts buffers to it. DDP
    reduces in the type of the weights, and as `32-true` leaves weights and buffers alone.

    `loaded`: the dtype of the weights before the strategy gets them.
    """
    name, _, way = word.value.partition("-")
    sharded, cast = strategy == "FSDPStrategy", _casts(strategy, word.value)
    stored = _DTYPES[name] if cast else loaded
    narrow = _DTYPES[name] if way == "mixed" else stored
    row = dict.fromkeys(PARAMETER_DTYPES, stored) | {"compute": narrow, "buffers": stored if cast else LOADED}
    if sharded and policy is None:
        row |= {"reduce": narrow, "buffers": narrow}
    scaled = LossScaling() if name == "16" and way == "mixed" else None
    values = {**row, "autocast": way == "mixed", "loss_scaling": scaled}
    settings = {f"precision.{state}": Setting(value, word.origin, word.key) for state, value in values.items()}
    if policy is None:
        return settings
    gathered = policy.get("compute", Setting(stored, word.origin, word.key))
    told = {"reduce": Setting(gathered.value, "default"), **policy}
    if way == "mixed":  # autocast computes in the word's type, whatever weights are gathered in
        told["compute"] = derived(
            narrow, word, *(policy[key] for key in ("compute",) if key in policy), origin=word.origin
        )
    return {**settings, **{f"precision.{state}": setting for state, setting in told.items()}}


def _casts(strategy: str, word: str) -> bool:
    """Whether the weights are cast to the word's type, whatever they are loaded in; else they stay so."""
    name, _, way = word.partition("-")
    return way == "true" and (strategy == "FSDPStrategy" or name != "32")


def _gathered_in(
    strategy: str, word: str, loaded: str, policy: Mapping[str, Setting[Any]] | None, version: tuple[int, ...]
) -> str:
    """The dtype of weights inside modules, whatever autocast makes of them: FSDP gathers them in one of its own."""
    name, _, way = word.partition("-")
    if strategy == "FSDPStrategy" and policy is not None:
        stored = _DTYPES[name] if _casts(strategy, word) else loaded
        return str(policy["compute"].value) if "compute" in policy else stored
    in_fp32 = strategy == "FSDPStrategy" and way == "mixed" and version < GATHERS_NARROW
    return "fp32" if in_fp32 else _DTYPES[name]


def _sums(gathered: str, word: Setting[Any], micro_batches: Setting[Any]) -> SettingsByPath:
    """The dtype in which FSDP1 sums gradients of several micro-batches; empty for one.

    Lightning has it reduce those of the last alone, by `no_sync`: until then they have the dtype of gathered weights.
    """
    if (micro_batches.value or 1) == 1:
        return {}
    return {"precision.accumulate": derived(gathered, word, micro_batches, origin=word.origin)}
