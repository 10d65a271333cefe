"""The manifest: what a checkpoint holds and where, as strict JSON.

Every state of every parameter is listed under the parameter's original name with its global shape and the flat,
row-major element ranges that each file holds. A reader on another world size finds what it needs from this alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from terrazzo.errors import BadInput

__all__ = [
    "MANIFEST",
    "VERSION",
    "Entry",
    "Manifest",
    "OptimizerEntry",
    "StateEntry",
    "read_manifest",
    "tensor_key",
]

MANIFEST = "manifest.json"
VERSION = 1

FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}\.safetensors$")]  # no path can leave the folder


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StateEntry(_Strict):
    """One state of a parameter: ranges are `[start, stop, index into files]`, sorted, without gaps."""

    dtype: str
    ranges: list[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]]


class Entry(_Strict):
    """A parameter or buffer: its global shape, and its states by kind (`weight`, `exp_avg`, `step`, `buffer`, ...)."""

    shape: list[NonNegativeInt]
    states: dict[str, StateEntry]


class OptimizerEntry(_Strict):
    """The optimizer's class, the hyper-parameters of its groups, and the fp16 loss scaler's counters."""

    name: str
    groups: list[dict[str, Any]]
    scaler: dict[str, float] = {}


class Manifest(_Strict):
    """The whole manifest. `ranks` holds what is of each rank alone: the states of its random generators."""

    format: Literal["terrazzo"] = "terrazzo"
    version: int = VERSION
    step: NonNegativeInt
    world_size: int = Field(gt=0)
    plan: str
    files: list[FileName]
    entries: dict[str, Entry]
    optimizer: OptimizerEntry | None
    ranks: list[dict[str, Any]]
    extra: dict[str, Any]


def tensor_key(name: str, kind: str, start: int) -> str:
    """The name under which a file holds one range."""
    return f"{name}|{kind}|{start}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint; raises `BadInput` when it is absent, damaged or of another version."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(
            f"'{folder}' is not a complete checkpoint: it has no {MANIFEST}. Give a folder such as step-00000100."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadInput(f"The checkpoint manifest '{path}' is damaged at {where}: {first['msg']}.") from None
    if manifest.version != VERSION:
        raise BadInput(
            f"The checkpoint '{folder}' has format version {manifest.version}, this release reads {VERSION}: use the"
            " release that wrote it, or a newer one."
        )
    for name, entry in manifest.entries.items():
        for kind, state in entry.states.items():
            _check_ranges(f"{path}: {name}, {kind}", state, len(manifest.files))
    return manifest


def _check_ranges(where: str, state: StateEntry, files: int) -> None:
    position = 0
    for start, stop, file in state.ranges:
        if start != position or stop < start or file >= files:
            raise BadInput(
                f"{where}: the range {start}..{stop} does not continue at {position}; the manifest is damaged."
            )
        position = stop
