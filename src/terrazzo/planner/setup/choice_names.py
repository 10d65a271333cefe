"""The names that a user chooses by: strategies with their offload, precisions, activation checkpointing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from terrazzo.engine import MOMENTS_NAMES, PLANS, PRECISIONS, FrozenFormat, Plan, Precision
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.planner.setup.optimizers import OptimizerSpec
from terrazzo.planner.setup.setup import Fp8Recipe
from terrazzo.words import CHECKPOINT_MODES, DTYPE_FIELDS, PRECISION_SPELLINGS, CheckpointMode, preset_named

__all__ = [
    "CHECKPOINTING",
    "LINEARS",
    "PRECISION_KEYS",
    "PRECISION_PRESETS",
    "STRATEGIES",
    "TRIED_MODES",
    "MatmulPrecision",
    "by_preset",
    "checkpointing",
    "names_base",
    "precision",
    "precision_text",
    "strategy",
]

_BF16, _FP32 = torch.bfloat16, torch.float32


class MatmulPrecision(NamedTuple):
    """Dtypes of all states, the format of matrix products, and in fp8 the recipe of their scales."""

    states: Precision
    matmul: str
    recipe: Fp8Recipe = "tensorwise"


PRECISION_PRESETS = {
    "fp32": MatmulPrecision(PRECISIONS["fp32"], "fp32"),
    "bf16": MatmulPrecision(PRECISIONS["bf16"], "bf16"),
    "bf16-pure": MatmulPrecision(PRECISIONS["bf16-pure"], "bf16"),
    "fp16": MatmulPrecision(PRECISIONS["fp16"], "fp16"),
    "fp8": MatmulPrecision(PRECISIONS["bf16"], "fp8"),
    "fp8-rowwise": MatmulPrecision(PRECISIONS["bf16"], "fp8", "rowwise"),
    "mxfp8": MatmulPrecision(PRECISIONS["bf16"], "fp8", "mx"),
    "fsdp2": MatmulPrecision(Precision(weight=_FP32, compute=_BF16, reduce=_FP32), "bf16"),
    "zero": MatmulPrecision(Precision(_BF16, _BF16, _BF16, _BF16, _FP32, _FP32), "bf16"),
}
"""The precisions that have a name. `fp8`, with one scale for each matrix or for each row of one, and `mxfp8`, with one
for each 32 elements, keep the states of `bf16`; `fsdp2` shards fp32 weights and computes in bf16, as FSDP2 and
torchtitan do; `zero` is the ZeRO paper's 2 + 2 + 12 bytes (arXiv 1910.02054)."""

PRECISION_FIELDS = (*DTYPE_FIELDS, "rounding", "frozen", "gather", "quantized_reduce", "error_feedback")
"""Fields of a `Precision` by which it may differ from the one of a name."""

PRECISION_KEYS = (*PRECISION_FIELDS, "linears")
"""What may be other than a precision's name says, by the keys of the section `precision` of a configuration."""

_KEYS_ARE = f"Keys are {', '.join(PRECISION_KEYS)}, as in bf16,gather=int8."

LINEARS = {"fp8-tensorwise": "fp8", "fp8-rowwise": "fp8-rowwise"}
"""The presets whose linear layers multiply in 8 bits, by the values of the key `linears`."""

_PLAIN_LINEARS = "compute"

_FP8_SPELLINGS = {"float8": "fp8", "fp8-tensorwise": "fp8", "float8-tensorwise": "fp8", "float8-rowwise": "fp8-rowwise"}
"""How torchao and configurations spell presets that are the planner's own."""

_NOT_PLANNED = {
    **dict.fromkeys(("nvfp4", "mxfp4", "fp4"), "products in 4 bits are neither planned nor run: say fp8, or mxfp8"),
    **dict.fromkeys(
        ("fp8-blockwise", "fp8-block", "fp8-delayed"),
        "fp8 is planned with a scale for each matrix (fp8), each row of one (fp8-rowwise) or 32 elements (mxfp8)",
    ),
    **dict.fromkeys(
        ("nf4", "nf4-double", "int4", "4bit"),
        "frozen matrices alone are kept in 4 bits: say qlora, or bf16,frozen=nf4",
    ),
}
"""Formats that users know and no precision is, with what there is in their place."""

_MEANINGS: Mapping[str, Mapping[str, Any]] = {
    "frozen": {"none": None},
    "gather": {"compute": None},
    "quantized_reduce": {"none": None},
    "error_feedback": {"true": True, "false": False},
}
"""What a key's words mean to a `Precision`, where that is not the word itself."""

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Formats of matrix products, by the dtype that is computed in; other dtypes multiply as fp32."""

_SYNONYMS = {"fsdp": "zero3", "fsdp2": "zero3", "hsdp": "hybrid_shard"}
STRATEGIES = (*PLANS, *_SYNONYMS)
"""Names of plans that `strategy` knows, each of which may have an offload."""

CHECKPOINTING = (*CHECKPOINT_MODES, "every_N")
TRIED_MODES = ("none", "selective", "selective_half", "full")
"""Modes that are tried where none is named, in order of the time they cost."""

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
    share = offload.partition(":")[2]
    if share and not share.strip("0."):
        raise BadInput(f"strategy {name!r} offloads nothing: its share of the units is {share}. Use {base} without it.")
    return Plan.named(f"{base}{at}{offload}")


def precision(name: str, optimizer: OptimizerSpec | None = None, qlora: bool = False) -> MatmulPrecision:
    """What a name means with what follows it: `bf16,gather=int8,moments=int8`; and what else is decided of it.

    Args:
        optimizer: which may keep its moments in a form of its own.
        qlora: keep frozen matrices in 4 bits.

    Raises: `BadInput` with the nearest name or key, for a value that a key cannot have, and for one that is decided.
    """
    base, keys = _parts(name)
    preset, linears = PRECISION_PRESETS[base], keys.pop("linears", "")
    values = {key: _MEANINGS.get(key, {}).get(word, word) for key, word in keys.items()}
    states = replace(preset.states, **values) if values else preset.states
    in_fp8 = PRECISION_PRESETS[LINEARS[linears]] if linears in LINEARS else preset
    if in_fp8.matmul != "fp8" or linears == _PLAIN_LINEARS:
        in_fp8 = MatmulPrecision(states, _FORMATS.get(states.compute, "fp32"))
    return in_fp8._replace(states=_as_decided(states, keys, optimizer, qlora))


def _as_decided(states: Precision, keys: Mapping[str, Any], optimizer: OptimizerSpec | None, qlora: bool) -> Precision:
    if optimizer is not None and optimizer.form is not None:
        if "moments" in keys and states.moments != optimizer.form:
            raise BadInput(
                f"optimizer {optimizer.name} keeps its moments in {optimizer.form}, and precision names another "
                "moments=. Leave moments out of precision, or take optimizer adamw."
            )
        states = replace(states, moments=optimizer.form)
    if qlora and states.frozen is None:
        if "frozen" in keys:
            raise BadInput(
                "qlora keeps a frozen base in 4 bits, and precision has frozen=none. Leave frozen out of precision, or "
                "take lora, whose base stays in 16 bits."
            )
        states = replace(states, frozen=FrozenFormat.NF4)
    return states


def names_base(name: str) -> bool:
    """Whether it begins with the name of a precision, and not with a key."""
    return "=" not in name.partition(",")[0]


def precision_text(chosen: MatmulPrecision) -> str:
    """A name of `precision` that means this: of those with the fewest keys behind them, the first."""
    in_fp8, presets = (chosen.matmul == "fp8", chosen.recipe), PRECISION_PRESETS.items()
    alike = {name: each.states for name, each in presets if (each.matmul == "fp8", each.recipe) == in_fp8}
    name, keys = by_preset(chosen.states, alike)
    return ",".join([name, *(f"{key}={word}" for key, word in keys.items())])


class NamedPrecision(NamedTuple):
    """The name of a preset, and what is other than it says, as keys and words."""

    name: str
    keys: Mapping[str, str]


def by_preset(states: Precision, presets: Mapping[str, Precision]) -> NamedPrecision:
    """The first of the presets that need the fewest keys behind them; one that scales the loss as these do."""
    scales = bool(states.loss_scaling)
    alike = {name: each for name, each in presets.items() if bool(each.loss_scaling) == scales} or presets
    named = (NamedPrecision(name, dict(_own(states, each))) for name, each in alike.items())
    return min(named, key=lambda each: len(each.keys))


def _own(chosen: Precision, preset: Precision) -> Iterator[tuple[str, str]]:
    for key in PRECISION_FIELDS:
        value = getattr(chosen, key)
        if value != getattr(preset, key):
            words = {meaning: word for word, meaning in _MEANINGS.get(key, {}).items()}
            yield key, str(words.get(value) or MOMENTS_NAMES.get(value, value))


def _parts(name: str) -> tuple[str, dict[str, Any]]:
    """The name of a preset, and the values of the keys behind it."""
    first, *rest = (part.strip() for part in name.split(","))
    key, own = _key(first), dict[str, Any]()
    if key not in PRECISION_PRESETS:
        spelled = {spelling: preset for preset, each in PRECISION_SPELLINGS.items() for spelling in each}
        near = did_you_mean(key, (*PRECISION_PRESETS, *spelled, *_FP8_SPELLINGS))
        synonyms = ", ".join(f"{spelling} = {preset}" for spelling, preset in spelled.items())
        raise BadInput(
            f"There is no precision {first!r}.{near} Precisions are {', '.join(PRECISION_PRESETS)}; {synonyms}."
        )
    for part in rest:
        field, _, value = (word.strip().lower() for word in part.partition("="))
        if field not in PRECISION_KEYS:
            raise BadInput(
                f"precision {name!r} has {part!r}, which is no key.{did_you_mean(field, PRECISION_KEYS)} {_KEYS_ARE}"
            )
        if not value or field in own:
            problem = f"names {field} twice" if value else f"has no value for {field}"
            raise BadInput(f"precision {name!r} {problem}. {_KEYS_ARE}")
        own[field] = value
    if (linears := own.get("linears", _PLAIN_LINEARS)) not in (known := (_PLAIN_LINEARS, *LINEARS)):
        near = did_you_mean(linears, known)
        raise BadInput(f"precision: linears is {linears!r}; it must be one of {', '.join(known)}.{near}")
    return key, own


def _key(name: str) -> str:
    key = name.strip().lower().replace("_", "-")
    if key in _NOT_PLANNED:
        raise BadInput(f"There is no precision {name!r}: {_NOT_PLANNED[key]}.")
    return _FP8_SPELLINGS.get(key) or (key if key in PRECISION_PRESETS else preset_named(name))


class Checkpointing(NamedTuple):
    """A mode of activation checkpointing, of one block in `every`."""

    mode: CheckpointMode
    every: int = 1


def checkpointing(name: str) -> Checkpointing:
    """What a name of `CHECKPOINTING` means. Raises: `BadInput` with the nearest name."""
    key = name.strip().lower().replace("-", "_")
    if match := re.fullmatch(r"every_([1-9][0-9]{0,8})", key):
        return Checkpointing("full", int(match[1]))
    for mode in CHECKPOINT_MODES:
        if key == mode:
            return Checkpointing(mode)
    near = f" Did you mean '{_MODES[key]}'?" if key in _MODES else did_you_mean(key, CHECKPOINTING)
    raise BadInput(
        f"There is no activation checkpointing {name!r}.{near} "
        f"Use {', '.join(CHECKPOINT_MODES)}, or every_N for one block in N, such as every_2."
    )
