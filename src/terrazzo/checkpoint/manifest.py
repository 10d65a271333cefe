"""The manifest: what a checkpoint holds, where, and what each block of it digests to, as strict JSON.

Every state of every tensor is listed under the tensor's original name with its global shape and the flat, row-major
element ranges that each file holds. A reader on another number of ranks finds what it needs from this alone.
docs/reference/checkpoint-format.md says it for someone who writes a reader.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from inspect import signature
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import core_schema

from terrazzo.errors import BadInput, Damaged

__all__ = [
    "BLOCK_BYTES",
    "DTYPES",
    "FILE_NAME",
    "ITEMSIZES",
    "MANIFEST",
    "SEAL",
    "VERSION",
    "Extent",
    "File",
    "Manifest",
    "OptimizerState",
    "State",
    "Tensor",
    "Topology",
    "blocks_of",
    "head",
    "is_crowded",
    "parse_manifest",
]

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
VERSION = 2
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
_FIRST = FailFast()
_FIRST_OF_MAPPING = _FIRST if "fail_fast" in signature(core_schema.dict_schema).parameters else None

Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
FILE_NAME = re.compile(r"rank-[0-9]{5,9}\.safetensors")
FileName = Annotated[str, Field(pattern=f"^{FILE_NAME.pattern}$")]  # no path can leave the folder
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError(f"{next(key for key in value if key not in cls.model_fields)!a} is unknown")
        return value


class Extent(_Strict):
    """Elements `start..stop` of a state: where their bytes are, and a digest for each `block_bytes` of them."""

    start: NonNegativeInt
    stop: NonNegativeInt
    file: NonNegativeInt = Field(description="index into files")
    offset: NonNegativeInt = Field(description="bytes from the beginning of the file")
    digests: Annotated[list[Digest], _FIRST]


class State(_Strict):
    """One state of a tensor. Its ranges are sorted and without gaps; together they are `numel` elements."""

    dtype: Dtype
    numel: NonNegativeInt
    ranges: Annotated[list[Extent], _FIRST]


class Tensor(_Strict):
    """A parameter or buffer: its global shape, and its states by kind (`weight`, `exp_avg`, `step`, `buffer`, ...)."""

    shape: Annotated[list[Annotated[NonNegativeInt, Field(lt=1 << 63)]], _FIRST] = Field(max_length=64)
    states: Annotated[dict[str, State], _FIRST_OF_MAPPING]


class File(_Strict):
    """A safetensors file: its size, and a digest of the header that stands before the tensors' bytes."""

    name: FileName
    size_bytes: NonNegativeInt
    header_bytes: NonNegativeInt
    header_digest: Digest


class Topology(_Strict):
    """Under what the checkpoint was written, for people: no reader needs it."""

    world_size: PositiveInt
    plan: Annotated[dict[str, str], _FIRST_OF_MAPPING]
    mesh: Annotated[dict[str, PositiveInt], _FIRST_OF_MAPPING]
    precision: Annotated[dict[str, str], _FIRST_OF_MAPPING]


class Group(BaseModel):
    """A param group: the names of its parameters, and whatever hyper-parameters its optimizer has."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    params: Annotated[list[str], _FIRST]


class OptimizerState(_Strict):
    """The optimizer's class, its groups' hyper-parameters and parameters, and the fp16 loss scaler's counters."""

    name: str
    groups: Annotated[list[Group], _FIRST]
    scaler: Annotated[dict[str, float], _FIRST_OF_MAPPING]


class Manifest(_Strict):
    """The whole manifest. `ranks` holds what is of each rank alone: the states of its random generators."""

    format: Literal["terrazzo"] = "terrazzo"
    version: int = VERSION
    run: str
    step: NonNegativeInt
    written: str = Field(description="UTC, for people: order goes by step")
    software: Annotated[dict[str, str], _FIRST_OF_MAPPING]
    topology: Topology
    digest: Literal["blake3-128"] = "blake3-128"
    block_bytes: PositiveInt = BLOCK_BYTES
    files: Annotated[list[File], _FIRST]
    tensors: Annotated[dict[str, Tensor], _FIRST_OF_MAPPING]
    aliases: Annotated[dict[str, str], _FIRST_OF_MAPPING]
    optimizer: OptimizerState | None
    ranks: Annotated[list[dict[str, Any]], _FIRST]
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


def blocks_of(count_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """The (first, last) bytes of each block of a range of `count_bytes`."""
    for first in range(0, count_bytes, block_bytes):
        yield first, min(first + block_bytes, count_bytes)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest that `data` is, checked to be consistent in itself. Time and memory are linear in its size.

    Raises:
        Damaged: it is not strict JSON of this form, or its ranges overlap, leave gaps, or leave their files.
        BadInput: it is of a version that this release does not read.
    """
    if is_crowded(data):
        raise Damaged(f"The checkpoint manifest '{where}' holds more small values than any does: it is damaged.")
    try:
        plain = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(plain, ensure_ascii=False).encode()  # half a character is no text
        version = plain.get("version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version != VERSION:
            raise BadInput(_wrong_version(where, version))
        manifest = Manifest.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(ascii(part).strip("'") for part in first["loc"]) or "the file"
        raise Damaged(f"The checkpoint manifest '{where}' is damaged at {at}: {first['msg']}.") from None
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise Damaged(f"The checkpoint manifest '{where}' is not strict JSON: {error}.") from None
    if problem := next(_problems(manifest), None):
        raise Damaged(f"The checkpoint manifest '{where}' contradicts itself: {problem}.")
    return manifest


def is_crowded(data: bytes) -> bool:
    """Whether JSON holds more values or containers for its size than a manifest may."""
    containers = data.count(b"[") + data.count(b"{")
    return (
        containers > _SPARE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        or containers + data.count(b",") > _SPARE_VALUES + len(data) // _BYTES_PER_VALUE
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} comes twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _wrong_version(where: str, version: int) -> str:
    which = "a newer release" if version > VERSION else "the release that wrote it, and save again with this one"
    return f"The checkpoint '{where}' has format version {version}, and this release reads {VERSION}: use {which}."


class _Claim(NamedTuple):
    """Bytes of a file that a range claims."""

    first: int
    last: int
    what: str


def _problems(manifest: Manifest) -> Iterator[str]:
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        yield "a file is listed twice"
    yield from (
        f"{file.name} is smaller than its header" for file in manifest.files if file.header_bytes > file.size_bytes
    )
    if manifest.optimizer is not None:
        grouped = Counter(name for group in manifest.optimizer.groups for name in group.params)
        yield from (f"{name!a} is in two parameter groups" for name, count in grouped.items() if count > 1)
    if len(manifest.ranks) not in (0, manifest.topology.world_size):
        yield f"it has random generators of {len(manifest.ranks)} ranks, not of {manifest.topology.world_size}"
    claimed: dict[int, list[_Claim]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        for kind, state in tensor.states.items():
            what = f"{ascii(name)[1:-1]}, {kind}"
            if kind in ("weight", "buffer") and state.numel != math.prod(tensor.shape):
                yield f"{what}: {state.numel} elements do not make the shape {tensor.shape}"
            yield from _range_problems(manifest, what, state, claimed)
    for file, claims in claimed.items():
        yield from _overlaps(manifest.files[file].name, claims)
    yield from (f"the alias {alias!r} is of nothing" for alias, name in manifest.aliases.items()
                if name not in manifest.tensors or alias in manifest.tensors)  # fmt: skip


def _range_problems(manifest: Manifest, what: str, state: State, claimed: dict[int, list[_Claim]]) -> Iterator[str]:
    position, itemsize = 0, ITEMSIZES[state.dtype]
    for part in state.ranges:
        if part.start != position or part.stop <= part.start or part.file >= len(manifest.files):
            yield f"{what}: the range {part.start}..{part.stop} does not continue at {position}"
            return
        position = part.stop
        file, count_bytes = manifest.files[part.file], (part.stop - part.start) * itemsize
        if part.offset < file.header_bytes or part.offset + count_bytes > file.size_bytes:
            yield f"{what}: the range {part.start}..{part.stop} is not inside {file.name}"
        if len(part.digests) != -(-count_bytes // manifest.block_bytes):
            yield f"{what}: the range {part.start}..{part.stop} has {len(part.digests)} digests"
        claimed[part.file].append(_Claim(part.offset, part.offset + count_bytes, what))
    if position != state.numel:
        yield f"{what}: ranges hold {position} of {state.numel} elements"


def _overlaps(file: str, claims: Iterable[_Claim]) -> Iterator[str]:
    ordered = sorted(claims, key=lambda claim: claim.first)
    for before, after in pairwise(ordered):
        if after.first < before.last:
            yield f"{before.what} and {after.what} overlap in {file}"
