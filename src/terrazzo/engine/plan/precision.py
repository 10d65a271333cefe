"""The dtype of every tensor the engine keeps, sends or computes with. Nothing is left to a library's default."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from terrazzo.engine.plan.layout import ALIGN, BLOCK, PACKED
from terrazzo.errors import BadInput, did_you_mean

__all__ = [
    "DTYPES",
    "DTYPE_FIELDS",
    "DTYPE_NAMES",
    "MOMENTS_NAMES",
    "PRECISIONS",
    "PRECISION_SPELLINGS",
    "LossScaling",
    "Precision",
    "StateFormat",
    "dtype_named",
    "preset_named",
]


class StateFormat(enum.StrEnum):
    """How an optimizer's states may be kept in less than any dtype that it computes in: see `buckets/codec`."""

    INT8 = "int8"
    FP8 = "fp8"

    @property
    def itemsize(self) -> float:
        """Bytes of an element."""
        return PACKED / BLOCK


DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Every dtype that a state may have, with its name in configurations."""
_DTYPES = {name: dtype for dtype, short in DTYPE_NAMES.items() for name in (short, str(dtype).removeprefix("torch."))}
MOMENTS_NAMES: dict[Any, str] = {**DTYPE_NAMES, **{form: form.value for form in StateFormat}}
"""Everything that moments may be kept in, with its name in configurations."""
DTYPES = {short: dtype for dtype, short in DTYPE_NAMES.items()}
"""Every dtype that a state may have, by its name in configurations."""

PRECISION_SPELLINGS = {
    "fp32": ("float32", "32", "32-true"),
    "bf16": ("bfloat16", "bf16-mixed", "amp-bf16"),
    "bf16-pure": ("bf16-true",),
    "fp16": ("float16", "half", "fp16-mixed", "16-mixed", "amp-fp16"),
}
"""How torch, Lightning, Composer and others spell the presets; `_` for `-`, capitals and `torch.` are the same."""
_PRESET_OF = {spelling: name for name, spellings in PRECISION_SPELLINGS.items() for spelling in spellings}
_DOUBLE = 'no preset is in float64: pass precision=tz.Precision(*["fp64"] * 6), or each of the six dtypes'
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
    """The preset that a spelling stands for; a word that stands for none comes back as it is.

    Raises:
        BadInput: one that may mean several, or what there is no preset for.
    """
    word = str(name).strip().lower().removeprefix("torch.").replace("_", "-")
    if word in _UNCLEAR:
        raise BadInput(f"precision {str(name)!r}: {_UNCLEAR[word]}.")
    return word if word in PRECISIONS else _PRESET_OF.get(word, str(name))


def dtype_named(name: object) -> str:
    """The short name of a dtype, of a state, by any of its names; a word that names none comes back as it is."""
    word = str(name).strip().lower().removeprefix("torch.")
    return DTYPE_NAMES[_DTYPES[word]] if word in _DTYPES else str(name)


_FORMATS = {form.value: form for form in StateFormat}


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling for fp16 gradients (Micikevicius et al., arXiv 1710.03740, section 3.2).

    Attributes:
        init: first scale.
        growth: factor applied after `interval` steps in a row without overflow.
        backoff: factor applied after `hysteresis` overflows without growth between them, and at each one after.
        minimum: an overflow at this scale raises `Diverged` instead of skipping for ever.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if self.growth < 1 or self.backoff >= 1 or self.interval < 1 or self.hysteresis < 1 or self.minimum <= 0:
            raise BadInput(f"{self} cannot work: give growth, interval, hysteresis >= 1, backoff < 1 and minimum > 0.")
        factors = (self.init, self.growth, self.backoff, self.minimum)
        if not all(value > 0 and math.frexp(value)[0] == 0.5 for value in factors):
            raise BadInput(
                f"Loss scaling with init {self.init}, growth {self.growth}, backoff {self.backoff} and minimum "
                f"{self.minimum} would round gradients: all four must be powers of two, such as 65536, 2, 0.5 and 1."
            )


@dataclass(frozen=True)
class Precision:
    """Six dtypes, each a `torch.dtype` or its name (`"fp32"`, `"bf16"`, `"fp16"`, `"fp64"`), `moments` also a
    `StateFormat` (`"int8"`, `"fp8"`).

    Attributes:
        weight: compute weights at rest.
        compute: weights inside modules, activations, and the gradients that autograd produces.
        reduce: gradients on the wire.
        accumulate: gradients kept across micro-batches and given to the optimizer's master weights.
        master: the weights that the optimizer updates.
        moments: whatever else the optimizer keeps per element.
        loss_scaling: dynamic loss scaling, or None for none.
    """

    weight: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    moments: torch.dtype | StateFormat = torch.float32
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        for name in DTYPE_FIELDS:
            value = getattr(self, name)
            formats = _FORMATS if name == "moments" else {}
            if isinstance(value, str):
                value = DTYPES.get(dtype_named(value)) or formats.get(value.strip().lower(), value)
            if value not in (*DTYPE_NAMES, *formats.values()):
                raise BadInput(
                    f"precision: {name} is {value!r}; it must be one of {', '.join((*DTYPES, *formats))}."
                    f"{did_you_mean(str(value), (*_DTYPES, *formats))}"
                )
            object.__setattr__(self, name, value)
        if isinstance(self.moments, StateFormat) and self.master == torch.float64:
            raise BadInput(
                f"precision: moments in {self.moments} under a master in fp64, which steps in fp64 alone. Use master "
                "'fp32', or leave moments out."
            )
        if not isinstance(self.loss_scaling, LossScaling | None):
            raise BadInput(
                f"precision: loss_scaling is {self.loss_scaling!r}; it must be a tz.LossScaling, such as "
                "tz.LossScaling() with the usual numbers, or None."
            )

    @classmethod
    def named(cls, name: str | torch.dtype) -> Precision:
        """The preset of that name, by any usual spelling.

        Raises:
            BadInput: an unknown name, or one that may mean several; the nearest is named.
        """
        preset = preset_named(name)
        if preset not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise BadInput(f"There is no precision {preset!r}.{did_you_mean(preset, PRECISIONS)} Presets are {known}.")
        return PRECISIONS[preset]

    @property
    def narrow(self) -> StateFormat | None:
        """That of moments which are in less than any dtype; None for others."""
        return self.moments if isinstance(self.moments, StateFormat) else None

    @property
    def shown_moments(self) -> torch.dtype:
        """The dtype of moments outside of the optimizer's memory, as in checkpoints."""
        return torch.float32 if isinstance(self.moments, StateFormat) else self.moments

    @property
    def align(self) -> int:
        """Parameters and shards begin on multiples of so many elements: a block has one scale, wherever it lies."""
        return ALIGN if self.narrow is None else BLOCK

    def __str__(self) -> str:
        dtypes = [f"{name} {str(getattr(self, name)).removeprefix('torch.')}" for name in DTYPE_FIELDS]
        scaling = f", loss scale from {self.loss_scaling.init:g}" if self.loss_scaling else ""
        return ", ".join(dtypes) + scaling


DTYPE_FIELDS = tuple(field.name for field in fields(Precision) if field.name != "loss_scaling")
"""What of a `Precision` is a dtype."""

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(weight=_BF16, compute=_BF16),
    "bf16-pure": Precision(_BF16, _BF16, _BF16, _BF16, _BF16, _BF16),
    "fp16": Precision(weight=_FP16, compute=_FP16, loss_scaling=LossScaling()),
}
"""Presets. `bf16` and `fp16` compute in 16 bits and reduce, accumulate and update in fp32."""
