"""The dtype or format of every tensor that the engine keeps, sends or computes with, how it is rounded, and loss
scaling. Nothing is left to a library's default.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.engine.formats.format_names import (
    GRADIENT_FORMATS,
    WEIGHT_FORMATS,
    FrozenFormat,
    StateFormat,
    WireFormat,
)
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.layout import ALIGN
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number, is_power_of_two
from terrazzo.messages import did_you_mean
from terrazzo.words import (
    DTYPE_FIELDS,
    DTYPE_SPELLINGS,
    PRESET_DTYPES,
    ROUNDINGS,
    Rounding,
    dtype_named,
    precision_faults,
    preset_named,
)

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "MOMENTS_NAMES",
    "PRECISIONS",
    "LossScaling",
    "Precision",
]


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, spelling) for name, spelling in DTYPE_SPELLINGS.items()}
"""Every dtype that a state may have, by its name in configurations."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of dtypes in configurations: the reverse of `DTYPES`."""
_SPELLINGS = [spelling for pair in DTYPE_SPELLINGS.items() for spelling in pair]
MOMENTS_NAMES: dict[Any, str] = {**DTYPE_NAMES, **{form: form.value for form in StateFormat}}
"""Everything that moments may be kept in, with its name in configurations."""
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
        if not (is_count(self.interval) and is_count(self.hysteresis)):
            raise BadInput(f"{self} cannot work: interval and hysteresis count steps: give whole numbers, 1 or more.")
        factors = (self.init, self.growth, self.backoff, self.minimum)
        if not all(map(is_number, factors)) or self.growth < 1 or self.backoff >= 1 or self.minimum <= 0:
            raise BadInput(f"{self} cannot work: give init > 0, growth >= 1, backoff < 1 and minimum > 0, all numbers.")
        if not all(map(is_power_of_two, factors)):
            raise BadInput(
                f"Loss scaling with init {self.init}, growth {self.growth}, backoff {self.backoff} and minimum "
                f"{self.minimum} would round gradients: all four must be powers of two, such as 65536, 2, 0.5 and 1."
            )
        if self.minimum > self.init:
            raise BadInput(
                f"{self} cannot work: an overflow would raise the scale, from init {self.init:g} to minimum "
                f"{self.minimum:g}. Give a minimum of init or less, such as 1."
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
        moments: whatever else the optimizer keeps per element. In a dtype wider than `master` they take its bytes, and
            each step rounds them to `master`, which it computes in.
        loss_scaling: dynamic loss scaling, or None for none.
        rounding: of master weights in bf16 with moments in 8 bits, which are stepped in fp32: to the `nearest`;
            `stochastic`, by bits of the parameter's name, the element and the step; or to the nearest with the
            `remainder` kept, 16 bits of each element that make an fp32 master of it.
        frozen: what frozen matrices of linear layers inside of units are kept in, a `FrozenFormat` (`"nf4"`,
            `"nf4-double"`); None: as other weights. They are gathered so, and decoded to `compute` where they are used.
            What is tied, or in no unit such as embeddings and the head, is kept as other weights.
        gather: weights on the wire, a `WireFormat` (`"int8"`, `"fp8"`): matrices are gathered in blocks of 256 codes of
            8 bits with a scale, and every rank computes with what these stand for. None: in `compute`.
        quantized_reduce: gradients of matrices on the wire, a `WireFormat` (`"int8"`, `"int4"`): each rank sends blocks
            of 256 codes with a scale, and what these stand for is summed in fp32, in rank order. On a mesh with
            `dp_replicate` that axis alone, after the sums within its groups in `reduce`. None: all in `reduce`.
        error_feedback: whether what those codes lose of a gradient is kept, and added to the next one before it is
            encoded: see `plan.error_feedback`.
    """

    weight: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    moments: torch.dtype | StateFormat = torch.float32
    loss_scaling: LossScaling | None = None
    rounding: Rounding = "nearest"
    frozen: FrozenFormat | None = None
    gather: WireFormat | None = None
    quantized_reduce: WireFormat | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name in DTYPE_FIELDS:
            self._read_dtype(name, _FORMATS if name == "moments" else {})
        self._read_format("frozen", tuple(FrozenFormat), "; it must be one of {known}, or None.{hint}")
        if self.rounding not in ROUNDINGS:
            raise BadInput(
                f"precision: rounding is {self.rounding!r}.{did_you_mean(str(self.rounding), ROUNDINGS)} "
                f"Use one of {', '.join(ROUNDINGS)}."
            )
        self._read_messages()
        self._check_together()
        if not isinstance(self.loss_scaling, LossScaling | None):
            raise BadInput(
                f"precision: loss_scaling is {self.loss_scaling!r}; it must be a tz.LossScaling, such as "
                "tz.LossScaling() with the usual numbers, or None."
            )

    def _check_together(self) -> None:
        """Refuse what a configuration refuses too: a step that there is not, a format that would lose what was asked
        for.
        """
        names = {name: MOMENTS_NAMES[getattr(self, name)] for name in DTYPE_FIELDS}
        sent: dict[str, Any] = {name: getattr(self, name) for name in ("gather", "quantized_reduce", "error_feedback")}
        for setting, why in precision_faults(names, rounding=self.rounding, **sent):
            raise BadInput(f"precision: {setting} {why}.")

    def _read_messages(self) -> None:
        """Read the formats of what is sent."""
        unless = ".{hint} Use one of {known}, or leave it out: "
        self._read_format("gather", WEIGHT_FORMATS, unless + "weights are gathered in the dtype that is computed in.")
        self._read_format("quantized_reduce", GRADIENT_FORMATS, unless + "gradients are sent in the dtype of reduce.")
        if not isinstance(self.error_feedback, bool):
            raise BadInput(f"precision: error_feedback is {self.error_feedback!r}; it must be True or False.")

    def _read_dtype(self, name: str, formats: Mapping[str, StateFormat]) -> None:
        """Replace the name of a dtype, or of one of these formats, in the field `name` by what it names."""
        value = getattr(self, name)
        if isinstance(value, str):
            value = DTYPES.get(dtype_named(value)) or formats.get(value.strip().lower(), value)
        if value not in (*DTYPE_NAMES, *formats.values()):
            raise BadInput(
                f"precision: {name} is {value!r}; it must be one of {', '.join((*DTYPES, *formats))}."
                f"{did_you_mean(str(value), (*_SPELLINGS, *formats))}"
            )
        object.__setattr__(self, name, value)

    def _read_format(self, name: str, formats: Sequence[enum.StrEnum], refusal: str) -> None:
        """Replace the name of a format in the field `name` by the format.

        Args:
            refusal: what a message says after the value, with `{known}` formats and a `{hint}`.
        """
        if (value := getattr(self, name)) is None:
            return
        if value not in formats:
            known, hint = ", ".join(formats), did_you_mean(str(value), formats)
            raise BadInput(f"precision: {name} is {value!r}" + refusal.format(known=known, hint=hint))
        object.__setattr__(self, name, type(formats[0])(value))

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
    def stochastic(self) -> bool:
        """Whether master weights are rounded stochastically."""
        return self.rounding == "stochastic"

    @property
    def keeps_remainder(self) -> bool:
        """Whether what master weights in bf16 leave out of fp32 is kept beside them."""
        return self.rounding == "remainder"

    @property
    def exact_master(self) -> torch.dtype:
        """The dtype of master weights with what they leave out, as in checkpoints."""
        return torch.float32 if self.keeps_remainder else self.master

    @property
    def remainder_bytes(self) -> int:
        """Bytes of an element that are kept so."""
        return torch.int16.itemsize if self.keeps_remainder else 0

    @property
    def narrow(self) -> StateFormat | None:
        """Format of moments that are kept in fewer bits than any dtype has; None where they have a dtype."""
        return self.moments if isinstance(self.moments, StateFormat) else None

    @property
    def shown_moments(self) -> torch.dtype:
        """The dtype of moments outside of the optimizer's memory, as in checkpoints."""
        return torch.float32 if isinstance(self.moments, StateFormat) else self.moments

    def align(self, form: FrozenFormat | None = None, diloco: DiLoCo | None = None) -> int:
        """Parameters and shards begin on multiples of so many elements: a block has one scale, wherever it lies.

        Args:
            form: in which a bucket keeps its weights.
            diloco: how replicas train by themselves, whose outer gradients may be sent in blocks, too.
        """
        formats = [each for each in (self.narrow, self.gather, self.quantized_reduce, form) if each is not None]
        return max([ALIGN if diloco is None else diloco.align, *(each.blocks.numel for each in formats)])

    def __str__(self) -> str:
        dtypes = [f"{name} {str(getattr(self, name)).removeprefix('torch.')}" for name in DTYPE_FIELDS]
        scaling = f", loss scale from {self.loss_scaling.init:g}" if self.loss_scaling else ""
        rounding = {"stochastic": ", stochastic rounding", "remainder": ", remainder kept"}.get(self.rounding, "")
        frozen = f", frozen matrices {self.frozen}" if self.frozen else ""
        gather = f", gathered in {self.gather}" if self.gather is not None else ""
        reduce = f", gradients sent in {self.quantized_reduce}" if self.quantized_reduce is not None else ""
        reduce += " with error feedback" if self.error_feedback else ""
        return ", ".join(dtypes) + scaling + rounding + frozen + gather + reduce

    def sends_in_blocks(self, trainable: bool) -> bool:
        """Whether matrices, trainable or frozen ones, are sent in blocks: they have buckets of their own."""
        return self.gather is not None or (trainable and self.quantized_reduce is not None)


PRECISIONS = {
    name: Precision(**dtypes, loss_scaling=LossScaling() if dtypes["compute"] == "fp16" else None)  # type: ignore[arg-type]
    for name, dtypes in PRESET_DTYPES.items()
}
"""The presets."""
