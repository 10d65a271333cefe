"""The manifest: what a checkpoint holds, where, and what each block of it digests to, as strict JSON.

Every state of every tensor is listed under the tensor's original name with its global shape, the rectangles that it was
cut into, and the flat, row-major element ranges of these that each file holds. A reader on another number of ranks
finds what it needs from this alone. `parse` reads one and checks it.
docs/reference/checkpoint-format.md says it for someone who writes a reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)
from pydantic_core import core_schema

__all__ = [
    "BLOCK_BYTES",
    "DTYPES",
    "FAIL_FAST",
    "FAIL_FAST_MAPPING",
    "FILE_NAME",
    "ITEMSIZES",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "SEAL",
    "TIES",
    "TIES_NOT_KNOWN",
    "VERSION",
    "Dtype",
    "Extent",
    "File",
    "Manifest",
    "OptimizerState",
    "Shape",
    "State",
    "Strict",
    "Tensor",
    "Tile",
    "Topology",
    "blocks_of",
    "head",
    "index_space",
    "is_crowded",
]

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
VERSION = 3
TIES, TIES_NOT_KNOWN = "ties", "not known"
"""An entry of `software` where what was converted has tied tensors under each of their names, or may have them so."""
BLOCK_BYTES = 4 << 20  # what one digest covers: small enough to read one for a few elements, and to stay in a cache
MAX_MANIFEST_BYTES = 1 << 28  # a block has 36 of them, so these are for 30 TB of state

# A manifest is mostly names and digests: what holds more values or containers than this beside them is none, and would
# take fifty times its size in memory.
_BYTES_PER_VALUE, _SPARE_VALUES = 8, 1 << 20
_BYTES_PER_CONTAINER, _SPARE_CONTAINERS = 16, 1 << 18

# By the name that torch has for them, the name that safetensors has.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ITEMSIZES = {name: int(re.sub("_.*|[A-Z]", "", stored) or 8) // 8 for name, stored in DTYPES.items()}
"""Bytes of an element: safetensors' names have its bits in them, but for `BOOL`."""

# Stop at the first error in a list or mapping: of millions each would be described. Older pydantics know lists alone.
FAIL_FAST = FailFast()
FAIL_FAST_MAPPING = FAIL_FAST if "fail_fast" in signature(core_schema.dict_schema).parameters else None

Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
FILE_NAME = re.compile(r"rank-[0-9]{5,9}\.safetensors")
FileName = Annotated[str, Field(pattern=f"^{FILE_NAME.pattern}$")]  # no path can leave the folder
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Shape = Annotated[list[Annotated[NonNegativeInt, Field(lt=1 << 63)]], FAIL_FAST, Field(max_length=64)]


class Strict(BaseModel):
    """A part of a manifest: of exactly these fields, of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError(f"{next(key for key in value if key not in cls.model_fields)!a} is unknown")
        return value


class Extent(Strict):
    """Elements `start..stop` of a tile: where their bytes are, and a digest for each `block_bytes` of them."""

    start: NonNegativeInt
    stop: NonNegativeInt
    file: NonNegativeInt = Field(description="index into files")
    offset: NonNegativeInt = Field(description="bytes from the beginning of the file")
    digests: Annotated[list[Digest], FAIL_FAST]


class Tile(Strict):
    """A rectangle of a state, row-major: `sizes` elements from `offsets` on, in each dim of its index space.

    Its ranges are sorted and without gaps; together they are its elements.
    """

    offsets: Shape
    sizes: Shape
    ranges: Annotated[list[Extent], FAIL_FAST]


class State(Strict):
    """One state of a tensor. Its tiles are `numel` elements together, each of them once; see `index_space`."""

    dtype: Dtype
    numel: NonNegativeInt
    tiles: Annotated[list[Tile], FAIL_FAST]


class Tensor(Strict):
    """A parameter or buffer: its global shape, and its states by kind (`weight`, `exp_avg`, `step`, `buffer`, ...)."""

    shape: Shape
    states: Annotated[dict[str, State], FAIL_FAST_MAPPING]


class File(Strict):
    """A safetensors file: its size, and a digest of the header that stands before the tensors' bytes."""

    name: FileName
    size_bytes: NonNegativeInt
    header_bytes: PositiveInt
    header_digest: Digest


class Topology(Strict):
    """Under what the checkpoint was written, for people: no reader needs it."""

    world_size: PositiveInt
    plan: Annotated[dict[str, str], FAIL_FAST_MAPPING]
    mesh: Annotated[dict[str, PositiveInt], FAIL_FAST_MAPPING]
    precision: Annotated[dict[str, str], FAIL_FAST_MAPPING]


class Group(BaseModel):
    """A param group: the names of its parameters, and whatever hyper-parameters its optimizer has."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    params: Annotated[list[str], FAIL_FAST]


class OptimizerState(Strict):
    """The optimizer's class, its groups' hyper-parameters and parameters, and the fp16 loss scaler's counters."""

    name: str
    groups: Annotated[list[Group], FAIL_FAST]
    scaler: Annotated[dict[str, float], FAIL_FAST_MAPPING]


class Manifest(Strict):
    """The whole manifest. `ranks` holds what is of each rank alone: the states of its random generators."""

    format: Literal["terrazzo"] = "terrazzo"
    version: int = VERSION
    run: str
    step: NonNegativeInt
    written: str = Field(description="UTC, for people: order goes by step")
    software: Annotated[dict[str, str], FAIL_FAST_MAPPING]
    topology: Topology
    digest: Literal["blake3-128"] = "blake3-128"
    block_bytes: PositiveInt = BLOCK_BYTES
    files: Annotated[list[File], FAIL_FAST]
    tensors: Annotated[dict[str, Tensor], FAIL_FAST_MAPPING]
    aliases: Annotated[dict[str, str], FAIL_FAST_MAPPING]
    optimizer: OptimizerState | None
    ranks: Annotated[list[dict[str, Any]], FAIL_FAST]
    extra: dict[str, Any]


def head(run: str, step: int, **software: str) -> dict[str, Any]:
    """The fields of a manifest that is written now: `software` had a part in it, besides Terrazzo and torch."""
    return {
        "run": run,
        "step": step,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": {name: _version(name) for name in ("terrazzo", "torch")} | software,
    }


_version = cache(metadata.version)  # it reads a file, and the run waits for its saves


def index_space(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """What the tiles of a state of `numel` elements are parts of: its tensor's shape where it has as many, else 1-D."""
    return tuple(shape) if math.prod(shape) == numel else (numel,)


def is_crowded(data: bytes) -> bool:
    """Whether JSON holds more values or containers for its size than a manifest may."""
    containers = data.count(b"[") + data.count(b"{")
    return (
        containers > _SPARE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        or containers + data.count(b",") > _SPARE_VALUES + len(data) // _BYTES_PER_VALUE
    )


def blocks_of(count_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """The (first, last) bytes of each block of a range of `count_bytes`."""
    for first in range(0, count_bytes, block_bytes):
        yield first, min(first + block_bytes, count_bytes)
