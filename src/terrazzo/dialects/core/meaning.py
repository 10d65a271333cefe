"""What settings mean together: degrees of a mesh, which settings have an effect, and whether two say the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.description import MODEL_AXES, TIERS, Description, Extra, asks_for_nothing
from terrazzo.engine import PLANS, Place, Plan
from terrazzo.errors import BadInput

__all__ = [
    "APART",
    "NVME_ONLY",
    "ON_CPU",
    "TWO_AXES",
    "agree_on",
    "data_ranks",
    "degrees",
    "extras_by_key",
    "has_no_effect",
    "ranks_left",
    "same_value",
    "tier_and_share",
]

TWO_AXES = tuple(name for name in PLANS if any("S" in place.axes for place in Plan.named(name).places().values()))
"""Rows that need replicas and shards."""
NVME_ONLY = tuple(f"offload.{name}" for name in ("path", "buffers", "direct", "block_bytes", "depth", "digest"))
"""Settings that say how files are read and written."""
ON_CPU = "the optimizer steps on the CPU once backward is done"
"""What libraries with one way to step there do, in words."""
APART = tuple(axis for axis in MODEL_AXES if axis != "ep")
"""Axes whose ranks see the same data. Experts are split over data ranks."""

_OF_AXIS = {"parallel.schedule": "pp", "parallel.chunks": "pp", "parallel.sequence": "tp"}
"""Settings that say how the ranks of one axis work together."""


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


def data_ranks(description: Description) -> int | None:
    """Ranks that see different data; None where it is not known."""
    sizes, world = degrees(description), description.value("mesh.world")
    if sizes["dp_shard"] and sizes["dp_replicate"]:
        return sizes["dp_shard"] * sizes["dp_replicate"]
    others = math.prod(sizes[axis] or 1 for axis in APART)
    return None if world is None or world % others else world // others


def ranks_left(description: Description, world: int | None, axes: Iterable[str]) -> int | None:
    """Ranks that some axes leave: of the world that the description says, else of `world`.

    0 where they need more than there are; None where the number of ranks is not known.
    """
    ranks: int | None = description.value("mesh.world") or world
    return None if ranks is None else ranks // math.prod(description.value(f"mesh.{axis}") or 1 for axis in axes)


def extras_by_key(description: Description) -> Mapping[str, Extra]:
    """What the source says beyond the sections. Without the spelling of settings, which a dialect may keep, too."""
    spoken = {key for _, setting in description.items() for key in setting.keys}
    return {extra.key: extra for extra in description.extras if extra.key not in spoken}


def has_no_effect(description: Description, path: str) -> bool:
    """Whether a setting says how something is done that is not done here: it has no effect."""
    if axis := _OF_AXIS.get(path):
        return description.value(f"mesh.{axis}") in (None, 1)
    if path.startswith("prefetch."):
        return all(description.value(f"sharding.{state}") == "-" for state in ("weight", "between"))
    if not path.startswith("offload.") or path in TIERS:
        return False
    tiers = [str(description.value(tier) or "device") for tier in TIERS]
    return not any("nvme" in tier if path in NVME_ONLY else tier != "device" for tier in tiers)


def tier_and_share(text: str) -> tuple[str, float | None, bool]:
    """What a setting such as `offload.optim` asks for, to a library that knows one tier for each state.

    Returns:
        The furthest tier with a share, which has room for what the others would hold; the share that is off the
        device, None for all; and whether it is spread over two such tiers. What is no tier comes back as it is: it
        is for the source's findings to say.
    """
    try:
        shares = Place(tier=text).shares
    except BadInput:
        return text, None, False
    off = [share for tier, share in shares.items() if tier != "device"]
    return list(shares)[-1], None if "device" not in shares else sum(off), len(off) > 1


def agree_on(path: str, one: Description, other: Description) -> bool:
    """Whether two descriptions mean the same by a setting, as far as both say it."""
    if not one[path].is_set or not other[path].is_set or same_value(path, one.value(path), other.value(path)):
        return True
    if has_no_effect(one, path) and has_no_effect(other, path):
        return True
    axis = path.removeprefix("mesh.")
    if axis in ("dp_shard", "dp_replicate"):  # one may say what the other leaves to the world
        known = {degrees(one)[axis], degrees(other)[axis]}
        return len(known) == 1 or None in known
    return False


def same_value(path: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same."""
    if asks_for_nothing(path, one) and asks_for_nothing(path, other):
        return True
    if path == "saving.export":  # a Hugging Face folder holds the full state dict
        return {one, other} <= {"full", "hf"}
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same_value(path, a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
