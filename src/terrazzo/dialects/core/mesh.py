"""The mesh of a description: how many ranks each axis has, and how many are left for one that does not say it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from terrazzo.dialects.core.description import MODEL_AXES, Description
from terrazzo.engine import PLANS, Plan
from terrazzo.errors import BadInput

__all__ = [
    "SAME_DATA_AXES",
    "TWO_AXES",
    "data_ranks",
    "degrees",
    "ranks_left",
    "ranks_needed",
    "ranks_of_all_axes",
    "row_fault",
]

TWO_AXES = tuple(name for name in PLANS if any("S" in place.axes for place in Plan.named(name).places().values()))
"""Rows that need replicas and shards."""
SAME_DATA_AXES = tuple(axis for axis in MODEL_AXES if axis != "ep")
"""Axes whose ranks see the same data. Experts are split over data ranks."""


def degrees(description: Description) -> dict[str, int | None]:
    """Every axis of the mesh with its degree; None where that is not known.

    `dp_shard` is what is left of the world. Where it is given and `dp_replicate` is set to None, that is what is left.
    A hybrid row of which neither is given splits over one node, and how many there are is not known.
    """
    sizes = {axis: description.value(f"mesh.{axis}") or 1 for axis in ("pp", "dp_replicate", "cp", "sp", "tp")}
    shard, world, replicas = (description[f"mesh.{name}"] for name in ("dp_shard", "world", "dp_replicate"))
    open_replicas = replicas.is_set and replicas.value is None
    known: dict[str, int | None] = {**sizes, "dp_shard": shard.value}
    if shard.value is None and open_replicas and description.value("sharding.optim") in ("S", "S,R"):
        return {**known, "dp_replicate": None}
    if shard.value is not None and not open_replicas:
        return known
    axis = "dp_shard" if shard.value is None else "dp_replicate"
    known[axis] = None
    taken = math.prod(degree for degree in known.values() if degree is not None)
    if world.value is not None and world.value % taken == 0:
        known[axis] = world.value // taken
    return known


def ranks_of_all_axes(description: Description) -> int | None:
    """The number of ranks, as the degrees say it together; None where one of them is open, or all are 1 by default."""
    axes = [description[f"mesh.{axis}"] for axis in SAME_DATA_AXES]
    sizes = degrees(description).values()
    if any(axis.is_set and axis.value is None for axis in axes) or None in sizes:
        return None
    ranks = math.prod(size for size in sizes if size is not None)
    return ranks if ranks > 1 else None


def data_ranks(description: Description) -> int | None:
    """Ranks that see different data; None where it is not known."""
    sizes, world = degrees(description), description.value("mesh.world")
    if sizes["dp_shard"] and sizes["dp_replicate"]:
        return sizes["dp_shard"] * sizes["dp_replicate"]
    others = math.prod(sizes[axis] or 1 for axis in SAME_DATA_AXES)
    return None if world is None or world % others else world // others


def ranks_left(description: Description, world: int | None, axes: Iterable[str]) -> int | None:
    """Ranks that some axes leave: of the world that the description says, else of `world`.

    None where the number of ranks is not known, or the axes do not divide it.
    """
    ranks, taken = _ranks(description, world), math.prod(_sizes(description, axes).values())
    return None if ranks is None or ranks % taken else ranks // taken


def ranks_needed(description: Description, world: int | None, axes: Iterable[str]) -> str:
    """What `ranks_left` lacks where it is None, for messages."""
    if (ranks := _ranks(description, world)) is None:
        return "the number of ranks (--world)"
    sizes = {axis: size for axis, size in _sizes(description, axes).items() if size > 1}
    product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"a number of ranks that divides by {product}, not {ranks},"


def _ranks(description: Description, world: int | None) -> int | None:
    ranks: int | None = description.value("mesh.world") or world
    return ranks


def _sizes(description: Description, axes: Iterable[str]) -> dict[str, int]:
    return {axis: description.value(f"mesh.{axis}") or 1 for axis in axes}


def row_fault(plan: Plan) -> str:
    """Why no mesh can have a plan's row, whatever its tiers; empty where one can."""
    rows = {state: ",".join(place.axes) or "-" for state, place in plan.places().items()}
    try:
        Plan(**rows).resolve(("dp_replicate", "dp_shard", "cp"))
    except BadInput as error:
        return str(error)
    return ""
