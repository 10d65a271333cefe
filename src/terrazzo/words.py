"""Names that configurations and code share: of dtypes, precisions, memory tiers, tensor-parallel styles, schedules.

Nothing here imports torch, so that configurations can be read, and refused, without it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count
from terrazzo.messages import did_you_mean

__all__ = [
    "CHECKPOINT_MODES",
    "DTYPE_FIELDS",
    "DTYPE_SPELLINGS",
    "FILL_IN",
    "PRECISION_SPELLINGS",
    "PRESET_DTYPES",
    "ROUNDINGS",
    "SCHEDULES",
    "STYLE_NAMES",
    "TIERS",
    "CheckpointMode",
    "Rounding",
    "check_schedule",
    "dtype_named",
    "precision_faults",
    "preset_named",
    "tier_shares",
]

FILL_IN = "FILL-IN"
"""Stands in a generated configuration for what only the user knows; a run does not start with it."""

CheckpointMode = Literal["none", "full", "selective", "selective_half"]
"""What activation checkpointing does with a unit; `every_N` is `full` for one unit in N."""
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = get_args(CheckpointMode)

# -- dtypes --------------------------------------------------------------------------------------------------------

DTYPE_SPELLINGS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""torch's name of every dtype that a state may have, by its name in configurations."""
_DTYPE_OF = {spelling: name for name, long in DTYPE_SPELLINGS.items() for spelling in (name, long)}

Rounding = Literal["nearest", "stochastic", "remainder"]
"""How a step in fp32 of master weights in bf16 is rounded."""
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

DTYPE_FIELDS = ("weight", "compute", "reduce", "accumulate", "master", "moments")
"""The fields of a `Precision` that are dtypes."""
PRESET_DTYPES = {
    name: dict(zip(DTYPE_FIELDS, dtypes, strict=True))
    for name, dtypes in {
        "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32"),
        "bf16": ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32"),
        "bf16-pure": ("bf16", "bf16", "bf16", "bf16", "bf16", "bf16"),
        "fp16": ("fp16", "fp16", "fp32", "fp32", "fp32", "fp32"),
    }.items()
}
"""Presets: `bf16` and `fp16` compute in 16 bits and reduce, accumulate and update in fp32."""

PRECISION_SPELLINGS = {
    "fp32": ("float32", "32", "32-true"),
    "bf16": ("bfloat16", "bf16-mixed", "amp-bf16"),
    "bf16-pure": ("bf16-true",),
    "fp16": ("float16", "half", "fp16-mixed", "16-mixed", "amp-fp16"),
}
"""How torch, Lightning, Composer and others spell the presets; `_` for `-`, capitals and `torch.` are the same."""
_PRESET_OF = {spelling: name for name, spellings in PRECISION_SPELLINGS.items() for spelling in spellings}
_STATES_IN_DOUBLE = "{weight: fp64, compute: fp64, reduce: fp64, accumulate: fp64, master: fp64, moments: fp64}"
_DOUBLE = (
    f"no preset is in float64: give each dtype, in a configuration by precision: {_STATES_IN_DOUBLE}, in Python by "
    'precision=tz.Precision(*["fp64"] * 6)'
)
_NO_MASTERS = "it would update weights in fp16, which loses most updates: say 'fp16', whose master weights are fp32"
_UNCLEAR = {
    **dict.fromkeys(("16", "amp", "mixed"), "it may be either of two: say 'bf16' or 'fp16'"),
    **dict.fromkeys(("16-true", "fp16-true", "fp16-pure"), _NO_MASTERS),
    **dict.fromkeys(("fp64", "float64", "double", "64", "64-true"), _DOUBLE),
    "fp8": "linear layers multiply in it, and nothing is kept in it: say 'bf16', and tz.nn.float8(model), or in a "
    "configuration precision.linears='fp8-tensorwise'",
    "tf32": "it is a way to multiply fp32: say 'fp32', and torch.set_float32_matmul_precision('high')",
}


def preset_named(name: object) -> str:
    """The preset that a spelling stands for; an unknown word is returned as it is.

    Raises:
        BadInput: the word may mean several presets, or a precision that is no preset.
    """
    word = str(name).strip().lower().removeprefix("torch.").replace("_", "-")
    if word in _UNCLEAR:
        raise BadInput(f"precision {str(name)!r}: {_UNCLEAR[word]}.")
    return word if word in PRESET_DTYPES else _PRESET_OF.get(word, str(name))


def dtype_named(name: object) -> str:
    """The short name of a dtype, given any of its names; an unknown word is returned as it is."""
    return _DTYPE_OF.get(str(name).strip().lower().removeprefix("torch."), str(name))


def precision_faults(
    dtypes: Mapping[str, str], *, rounding: str, gather: str | None, quantized_reduce: str | None, error_feedback: bool
) -> Iterator[tuple[str, str]]:
    """Settings of a precision that are right by themselves and cannot be together.

    Args:
        dtypes: short names by field, and formats such as `int8` for moments.
        gather: the format of weights on the wire; None for that of `compute`.
        quantized_reduce: the format of gradients on the wire; None for the dtype of `reduce`.

    Yields: the setting, and what a message says behind it, with the edit.
    """
    master, moments = dtypes["master"], dtypes["moments"]
    narrow = moments not in DTYPE_SPELLINGS
    if narrow and master == "fp64":
        yield (
            "moments",
            (
                f"in {moments} under a master in fp64, which steps in fp64 alone: use precision.master 'fp32', or leave"
                " precision.moments out"
            ),
        )
    if rounding != "nearest" and (master != "bf16" or not narrow):
        yield (
            "rounding",
            (
                f"'{rounding}' is of master weights in bf16 with moments in int8 or fp8, and here master is {master}"
                f" and moments are {moments}: use precision 'bf16-pure' with precision.moments 'int8', or leave"
                " precision.rounding out"
            ),
        )
    if gather is not None and dtypes["compute"] == "fp64":
        yield (
            "gather",
            (
                f"{gather} of weights that are computed with in fp64, all but eight of whose bits would be lost: leave"
                " precision.gather out, or compute in bf16 or fp32"
            ),
        )
    if quantized_reduce is not None and dtypes["accumulate"] == "fp64":
        yield (
            "quantized_reduce",
            (
                f"{quantized_reduce} of gradients that are kept in fp64, but what is sent in blocks is summed in fp32:"
                " leave precision.quantized_reduce out, or accumulate in fp32"
            ),
        )
    if error_feedback and quantized_reduce is None:
        yield (
            "error_feedback",
            (
                "of gradients that are sent in the dtype of reduce: it keeps what codes lose. Use"
                " precision.quantized_reduce 'int8' or 'int4', or leave precision.error_feedback out"
            ),
        )


# -- tiers ---------------------------------------------------------------------------------------------------------

TIERS = ("device", "cpu", "nvme")
"""Where a state can be kept: in the device's memory, the host's, or files on a drive."""
_TIER_FORM = 'Write one of device, cpu, nvme, or shares of the units such as "cpu:0.7" or "nvme:0.5,cpu:0.3".'


@functools.cache
def tier_shares(tier: str) -> Mapping[str, float]:
    """The share of the units in each tier, parsed from `cpu:0.7` or `nvme:0.5,cpu:0.3`; device first, nvme last.

    Raises:
        BadInput: a part is not a tier or a share.
    """
    given: dict[str, float] = {}
    for part in tier.split(","):
        name, colon, share = part.strip().partition(":")
        if name not in TIERS or name in given:
            wrong = " twice." if name in given else f", which does not exist.{did_you_mean(name, TIERS)}"
            raise BadInput(f"{tier!r} names the tier {name!r}{wrong} {_TIER_FORM}")
        given[name] = _share(share, tier) if colon else 1.0
    total = sum(given.values())
    if total > 1 + 1e-9:
        raise BadInput(f"{tier!r} gives away {total:g} of the units, more than all. {_TIER_FORM}")
    given["device"] = given.get("device", 0.0) + 1 - total
    return MappingProxyType({known: given[known] for known in TIERS if given.get(known, 0) > 1e-9})


def _share(text: str, tier: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise BadInput(f"{tier!r}: the share {text!r} is not a number from 0 to 1. {_TIER_FORM}")
    return share


# -- what ranks share beside data ----------------------------------------------------------------------------------

STYLE_NAMES = (
    *("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise", "replicate"),
    *("enter", "sequence"),
)
"""Styles of tensor parallelism, which `parallel.tensor.styles` implements."""

SCHEDULES = ("1f1b", "gpipe", "zero_bubble")
"""Schedules of a pipeline. `1f1b` with several chunks is the interleaved one."""


def check_schedule(schedule: str, chunks: int) -> None:
    """Raise `BadInput` for an unknown schedule, or one that cannot have so many chunks."""
    if schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise BadInput(
            f"The pipeline schedule {schedule!r} does not exist.{did_you_mean(str(schedule), SCHEDULES)} Give one of "
            f"{known}; 1f1b with chunks=2 or more is the interleaved one."
        )
    if not is_count(chunks):
        raise BadInput(f"The pipeline has chunks {chunks!r}; it counts the stages of a rank: give an int, 1 or more.")
    if schedule != "1f1b" and chunks > 1:
        raise BadInput(
            f"The pipeline schedule {schedule!r} has one stage for each rank, and chunks is {chunks}: take '1f1b', "
            "which is interleaved then, or chunks=1."
        )
