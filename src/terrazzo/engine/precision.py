"""The dtype of every tensor the engine keeps, sends or computes with. Nothing is left to a library's default."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from terrazzo.errors import BadInput, did_you_mean

__all__ = ["DTYPES", "DTYPE_FIELDS", "DTYPE_NAMES", "PRECISIONS", "LossScaling", "Precision"]

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Every dtype that a state may have, with its name in configurations."""
_DTYPES = {name: dtype for dtype, short in DTYPE_NAMES.items() for name in (short, str(dtype).removeprefix("torch."))}
DTYPES = {short: dtype for dtype, short in DTYPE_NAMES.items()}
"""Every dtype that a state may have, by its name in configurations."""


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
    """Six dtypes, each a `torch.dtype` or its name (`"fp32"`, `"bf16"`, `"fp16"`, `"fp64"`).

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
    moments: torch.dtype = torch.float32
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        for name in DTYPE_FIELDS:
            value = getattr(self, name)
            if isinstance(value, str):
                value = _DTYPES.get(value, value)
            if value not in _DTYPES.values():
                raise BadInput(
                    f"precision: {name} is {value!r}; it must be one of fp32, bf16, fp16, fp64."
                    f"{did_you_mean(str(value), _DTYPES)}"
                )
            object.__setattr__(self, name, value)

    @classmethod
    def named(cls, name: str) -> Precision:
        """The preset of that name.

        Raises:
            BadInput: an unknown name; the nearest is named.
        """
        if name not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise BadInput(f"There is no precision {name!r}.{did_you_mean(name, PRECISIONS)} Presets are {known}.")
        return PRECISIONS[name]

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
