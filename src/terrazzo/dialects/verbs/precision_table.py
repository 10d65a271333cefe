"""Every tensor's dtype, and what the dtypes cost in memory: the table that two configurations are compared by.

Bytes are of model states at rest, per parameter and rank: compute weights, the gradient that is kept, master weights,
the optimizer's moments, and what codes of gradients lose, where that is kept: as if all parameters were matrices. A
weight of the master's dtype at the master's place is the same memory; Terrazzo also derives a narrower weight from a
master that is split alike (its table: 16/D for zero3 in bf16, and not 18/D).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.dialects.core.description import PARAMETER_DTYPES, Description, Setting
from terrazzo.dialects.core.mesh import degrees
from terrazzo.dialects.registry import dialect
from terrazzo.engine import StateFormat
from terrazzo.optim import moments_of

__all__ = ["COLUMNS", "Cost", "Precisions", "costs", "precisions"]

COLUMNS = ("storage", *PARAMETER_DTYPES[1:])
_PATHS = dict(zip(COLUMNS, PARAMETER_DTYPES, strict=True))
_WHERE = ("sharding", "offload")
_NAMES = {"dp_shard": "S", "dp_replicate": "R"}
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Precisions:
    """One row: a dtype for each of `COLUMNS`, empty where it is left to code."""

    storage: str
    compute: str
    reduce: str
    accumulate: str
    master: str
    moments: str
    saved: str

    def cells(self) -> list[str]:
        return [getattr(self, column) or "-" for column in COLUMNS]


@dataclass(frozen=True)
class Cost:
    """Memory of model states on one rank, under one number of ranks.

    Attributes:
        bytes_per_parameter: at rest; None where a dtype is not known, or how many moments the optimizer keeps.
        upcast: how much of it is there because states are wider than the dtype of compute.
    """

    ranks: int
    bytes_per_parameter: float | None
    upcast: float | None


def precisions(description: Description) -> Precisions:
    """The row of a description. Where compute is autocast's choice, the cell says so."""
    cells = {column: str(description.value(f"precision.{name}") or "") for column, name in _PATHS.items()}
    if description.value("precision.autocast"):
        cells["compute"] += " autocast"
    if (linears := description.value("precision.linears")) not in (None, "compute"):
        cells["compute"] += f", linears {linears}"
    if (form := description.value("precision.quantized_reduce")) not in (None, "none"):
        feedback = " with error feedback" if description.value("precision.error_feedback") else ""
        cells["reduce"] += f", {form} codes{feedback}"
    return Precisions(**cells)


def costs(description: Description, worlds: tuple[int, ...] = ()) -> list[Cost]:
    """The memory for each number of ranks; default: the description's own, else 1, 8 and 64."""
    own = description.value("mesh.world")
    return [_cost(description, ranks) for ranks in worlds or ((own,) if own else (1, 8, 64))]


def _cost(description: Description, ranks: int) -> Cost:
    sizes = {name: _size(description, name) for name in ("weight", "accumulate", "master", "moments", "compute")}
    shards = {state: _shards(description, state, ranks) for state in ("weight", "grad", "optim")}
    moments = _moments(description)
    if moments is None or None in sizes.values() or None in shards.values():
        return Cost(ranks, None, None)
    known = {name: size or 0 for name, size in sizes.items()}
    known["moments"] *= moments
    split = {state: count or 1 for state, count in shards.items()}
    narrow = {name: min(size, known["compute"] * (moments if name == "moments" else 1)) for name, size in known.items()}
    whole = _total(description, known, split)
    upcast = whole - _total(description, narrow, split)
    return Cost(ranks, whole + _residual_bytes(description, ranks), upcast)


def _moments(description: Description) -> int | None:
    """How many of an element the optimizer keeps: of one that is not named, Adam's."""
    name = description.value("optimizer.name") or "Adam"
    return moments_of(str(name), description.value("optimizer.options") or {})


def _total(description: Description, sizes: dict[str, float], split: dict[str, int]) -> float:
    total = (sizes["master"] + sizes["moments"]) / split["optim"] + sizes["accumulate"] / split["grad"]
    return total if _shared(description, sizes) else total + sizes["weight"] / split["weight"]


_RESIDUAL = 4
"""Bytes of what codes of one element have lost: in bf16 behind the last step, and behind the next."""


def _residual_bytes(description: Description, ranks: int) -> float:
    """Bytes per parameter of error-feedback residuals on a rank.

    There is one for each element that it sends along the outermost data axis, after dp_shard has split them, and one
    for each that it sends back, where the ranks along that axis keep whole gradients.
    """
    if not description.value("precision.error_feedback"):
        return 0.0
    sizes = _degrees(description, ranks)
    shards, replicas = sizes["dp_shard"] or 1, sizes["dp_replicate"] or 1
    parts = [_NAMES.get(part, part) for part in str(description.value("sharding.optim")).split(",")]
    splits = {axis: axis in parts or "D" in parts for axis in "SR"}
    along, ranks_along = ("R", replicas) if replicas > 1 else ("S", shards)
    elements = 1 / shards if along == "R" and splits["S"] else 1.0
    elements += 0 if splits[along] else elements / ranks_along
    return _RESIDUAL * elements / ((sizes["tp"] or 1) * (sizes["pp"] or 1))


def _shared(description: Description, sizes: dict[str, float]) -> bool:
    """Whether the compute weights at rest are no memory of their own beside the master weights."""
    if _keeps_remainder(description):
        return False
    alike = all(description.value(f"{section}.weight") == description.value(f"{section}.optim") for section in _WHERE)
    if alike and dialect(description.dialect).one_copy and description.value("sharding.weight") != "-":
        return True
    return alike and sizes["weight"] == sizes["master"]


def _keeps_remainder(description: Description) -> bool:
    """Whether of fp32 masters only the 16 bits are kept that bf16 weights leave out."""
    return bool(description.value("precision.rounding") == "remainder")


def _size(description: Description, name: str) -> float | None:
    value = description.value(f"precision.{name}")
    if name == "master" and _keeps_remainder(description):
        return _BYTES["bf16"]
    if name == "moments" and value in [form.value for form in StateFormat]:
        return StateFormat(value).itemsize
    return _BYTES.get(value)


def _degrees(description: Description, ranks: int) -> dict[str, int | None]:
    return degrees(description.replace({"mesh.world": Setting(ranks, "derived")}))


def _shards(description: Description, state: str, ranks: int) -> int | None:
    """Into how many parts a state is cut; None where that is not known, or not of so many ranks."""
    axes = description.value(f"sharding.{state}")
    sizes = _degrees(description, ranks)
    if None not in sizes.values() and math.prod(degree or 1 for degree in sizes.values()) != ranks:
        return None
    data = {"S": sizes["dp_shard"], "R": sizes["dp_replicate"], "cp": sizes["cp"]}
    data["D"] = None if data["S"] is None else data["S"] * (data["R"] or 1) * (data["cp"] or 1)
    parts = [] if axes == "-" else str(axes).split(",")
    count = (sizes["tp"] or 1) * (sizes["pp"] or 1)
    for part in parts:
        degree = data.get(_NAMES.get(part, part))
        if degree is None:
            return None
        count *= degree
    return count if axes is not None else None
