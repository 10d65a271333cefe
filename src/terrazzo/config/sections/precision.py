"""The section `precision`: every dtype of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from terrazzo.config.section import KeyDisagreement, Named
from terrazzo.words import DTYPE_FIELDS, PRESET_DTYPES, Rounding, dtype_named, precision_faults, preset_named

__all__ = ["PrecisionConfig"]

DtypeName = Literal["fp32", "bf16", "fp16", "fp64"]
MomentsName = Literal["fp32", "bf16", "fp16", "fp64", "int8", "fp8"]
GatherName = Literal["compute", "int8", "fp8"]
QuantizedReduceName = Literal["none", "int8", "int4"]
FrozenName = Literal["nf4", "nf4-double"]


class PrecisionConfig(Named):
    """A named precision, and single dtypes of it replaced where given."""

    name: Literal["fp32", "bf16", "bf16-pure", "fp16"] = Field("fp32", description="all six dtypes by one name")
    weight: DtypeName | None = Field(None, description="compute weights at rest; null: as the name")
    compute: DtypeName | None = Field(None, description="inside modules; null: as the name")
    reduce: DtypeName | None = Field(None, description="gradients on the wire; null: as the name")
    accumulate: DtypeName | None = Field(None, description="gradient sums; null: as the name")
    master: DtypeName | None = Field(None, description="weights that the optimizer updates; null: as the name")
    moments: MomentsName | None = Field(
        None, description="optimizer state; in 8 bits, a scale for each 256 elements; null: as the name"
    )
    rounding: Rounding = Field(
        "nearest",
        description="of master weights in bf16 with moments in 8 bits; `remainder`: to the nearest, and the 16 bits "
        "that this leaves out of fp32 are kept",
    )
    frozen: FrozenName | None = Field(
        None,
        description="matrices that lora freezes, in 4 bits and blocks of 64; `nf4-double`: their scales too; null: as "
        "other weights",
    )
    gather: GatherName = Field(
        "compute",
        description="weights on the wire: in `compute`, or matrices in 8 bits with a scale for each 256 elements",
    )
    quantized_reduce: QuantizedReduceName = Field(
        "none",
        description="gradients on the wire: all in `reduce`, or those of matrices in 8 or 4 bits with a scale for each "
        "256 elements; on a mesh with `dp_replicate` over that axis alone",
    )
    error_feedback: bool = Field(
        False,
        description="what codes of quantized_reduce lose of a gradient is kept, and added to the next one: 4 bytes for "
        "each element that a rank sends codes of",
    )
    linears: Literal["compute", "fp8-tensorwise", "fp8-rowwise"] = Field(
        "compute",
        description="how linear layers multiply: in `compute`, or in 8 bits with a scale for each matrix or each row",
    )
    skip: list[str] | None = Field(
        None, description="globs over names of linear layers that stay in `compute`; null: those outside of the blocks"
    )

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.skip is not None and self.linears == "compute":
            yield KeyDisagreement(
                "skip", "says which linear layers are not in fp8, and linears is 'compute': remove skip"
            )
        dtypes = self.dtypes
        faults = precision_faults(
            dtypes,
            rounding=self.rounding,
            gather=None if self.gather == "compute" else self.gather,
            quantized_reduce=None if self.quantized_reduce == "none" else self.quantized_reduce,
            error_feedback=self.error_feedback,
        )
        yield from (KeyDisagreement(key, why) for key, why in faults)
        if self.frozen is not None and self.linears != "compute":
            yield KeyDisagreement(
                "frozen",
                f"'{self.frozen}' is decoded to 'compute', which linears '{self.linears}' would round again:"
                " leave one of them out",
            )
        if self.linears != "compute" and dtypes["compute"] not in ("bf16", "fp32"):
            yield KeyDisagreement(
                "linears",
                f"'{self.linears}' goes with bf16 alone, and on a CPU with fp32: set precision.name to 'bf16'",
            )

    @property
    def dtypes(self) -> dict[str, str]:
        """Each dtype that the name and single keys make, by its key."""
        return {key: getattr(self, key) or PRESET_DTYPES[self.name][key] for key in DTYPE_FIELDS}

    @property
    def recipe(self) -> str | None:
        """The recipe of float8 linear layers, as `tz.nn.float8` takes it; None for none."""
        return None if self.linears == "compute" else self.linears.removeprefix("fp8-")

    @field_validator("name", mode="before")
    @classmethod
    def _as_preset(cls, value: Any) -> Any:
        return preset_named(value) if isinstance(value, str | int) else value

    @field_validator(*DTYPE_FIELDS, mode="before")
    @classmethod
    def _as_dtype(cls, value: Any) -> Any:
        return dtype_named(value) if isinstance(value, str) else value
