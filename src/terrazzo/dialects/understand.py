"""From a file to what it means: load, recognise, read, and work out what follows from what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from terrazzo.dialects.description import Description, Extra, Setting, inactive, settings
from terrazzo.dialects.dialect import NO_CONTEXT, Context, Dialect, Document, Reading
from terrazzo.dialects.files import Loaded, load
from terrazzo.dialects.reader import derived
from terrazzo.dialects.registry import dialect, recognise
from terrazzo.engine import Plan
from terrazzo.engine.place import PLANS

__all__ = [
    "NVME_ONLY",
    "TWO_AXES",
    "Understood",
    "agree",
    "data_ranks",
    "degrees",
    "extras_by_key",
    "idle",
    "read_document",
    "same",
    "understand",
]

TIERS = ("offload.weight", "offload.grad", "offload.optim")
TWO_AXES = tuple(name for name in PLANS if any("S" in place.axes for place in Plan.named(name).places().values()))
"""Rows that need replicas and shards."""
NVME_ONLY = tuple(f"offload.{name}" for name in ("path", "buffers", "direct", "block_bytes", "depth", "digest"))
"""Settings that say how files are read and written."""


@dataclass(frozen=True)
class Understood:
    """A file with its meaning."""

    loaded: Loaded
    dialect: Dialect
    reading: Reading
    context: Context

    @property
    def description(self) -> Description:
        return self.reading.description


def understand(path: str | Path, name: str | None = None, context: Context = NO_CONTEXT) -> Understood:
    """Read a file.

    Args:
        name: of its dialect; None: as it looks.
        context: what the file does not say; its `folder` is set to the file's.

    Errors: `BadInput` for a file that cannot be loaded, or is of no dialect or of several.
    """
    loaded = load(path)
    found = dialect(name) if name else recognise(loaded.document, str(path))
    context = replace(context, folder=loaded.path.parent)
    return Understood(loaded, found, read_document(found, loaded.document, context), context)


def read_document(found: Dialect, document: Document, context: Context = NO_CONTEXT) -> Reading:
    """What a document means, with the number of ranks of the context and the third of the batch's three sizes."""
    reading = found.read(document, context)
    given: dict[str, Setting[Any]] = {}
    if reading.description.value("mesh.world") is None and context.world is not None:
        given["mesh.world"] = Setting(context.world, "derived")
    description = reading.description.replace(given)
    return Reading(description.replace(_batch(description)), reading.verdicts)


def _batch(description: Description) -> dict[str, Setting[Any]]:
    """The one size that follows from the others and the number of ranks, if one is missing."""
    whole, micro, count = (description[f"batch.{name}"] for name in ("global_batch", "micro_batch", "accumulation"))
    ranks = data_ranks(description)
    if ranks is None:
        return {}
    if whole.value is None and micro.value and count.value:
        return {"batch.global_batch": derived(micro.value * count.value * ranks, micro, count)}
    if count.value is None and whole.value and micro.value and whole.value % (micro.value * ranks) == 0:
        return {"batch.accumulation": derived(whole.value // (micro.value * ranks), whole, micro)}
    if micro.value is None and whole.value and count.value and whole.value % (count.value * ranks) == 0:
        return {"batch.micro_batch": derived(whole.value // (count.value * ranks), whole, count)}
    return {}


def degrees(description: Description) -> dict[str, int | None]:
    """Every axis of the mesh with its degree; None where that is not known.

    `dp_shard` is what is left of the world. Where it is given and `dp_replicate` is set to None, that is what is left.
    A hybrid row of which neither is given splits over one node, and how many there are is not known.
    """
    found = {axis: description.value(f"mesh.{axis}") or 1 for axis in ("pp", "dp_replicate", "cp", "sp", "tp")}
    shard, world, replicas = (description[f"mesh.{name}"] for name in ("dp_shard", "world", "dp_replicate"))
    open_replicas = replicas.is_set and replicas.value is None
    known: dict[str, int | None] = {**found, "dp_shard": shard.value}
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
    found, world = degrees(description), description.value("mesh.world")
    if found["dp_shard"] and found["dp_replicate"]:
        return found["dp_shard"] * found["dp_replicate"]
    others = math.prod(found[axis] or 1 for axis in ("pp", "cp", "sp", "tp"))
    return None if world is None or world % others else world // others


def extras_by_key(description: Description) -> Mapping[str, Extra]:
    """What the source says beyond the sections. Without the spelling of settings, which a dialect may keep, too."""
    spoken = {key for _, setting in settings(description) for key in setting.keys}
    return {extra.key: extra for extra in description.extras if extra.key not in spoken}


def idle(description: Description, path: str) -> bool:
    """Whether a setting says how something is done that is not done here: it has no effect."""
    if path.startswith("prefetch."):
        return all(description.value(f"sharding.{state}") == "-" for state in ("weight", "between"))
    if not path.startswith("offload.") or path in TIERS:
        return False
    tiers = [str(description.value(tier) or "device") for tier in TIERS]
    return not any("nvme" in tier if path in NVME_ONLY else tier != "device" for tier in tiers)


def agree(path: str, one: Description, other: Description) -> bool:
    """Whether two descriptions mean the same by a setting, as far as both say it."""
    if not one[path].is_set or not other[path].is_set or same(path, one.value(path), other.value(path)):
        return True
    axis = path.removeprefix("mesh.")
    if axis in ("dp_shard", "dp_replicate"):  # one may say what the other leaves to the world
        known = {degrees(one)[axis], degrees(other)[axis]}
        return len(known) == 1 or None in known
    return False


def same(path: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same."""
    if inactive(path, one) and inactive(path, other):
        return True
    if path == "saving.export":  # a Hugging Face folder holds the full state dict
        return {one, other} <= {"full", "hf"}
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(path, a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
