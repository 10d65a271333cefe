"""Whether two descriptions mean the same, and which settings of one have no effect where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.config import MuonConfig
from terrazzo.dialects.core.description import TIER_PATHS, Description, Extra, asks_for_nothing
from terrazzo.dialects.core.mesh import degrees

__all__ = [
    "NVME_ONLY",
    "OF_AXIS",
    "OF_MATRICES",
    "agree_on",
    "extras_by_key",
    "has_no_effect",
    "same_value",
    "saves_when",
]

NVME_ONLY = tuple(f"offload.{name}" for name in ("path", "buffers", "direct", "block_bytes", "depth", "digest"))
"""Settings that say how files are read and written."""

OF_MATRICES = {f"muon.{key}": value for key, value in MuonConfig().model_dump().items() if value not in (None, [])}
"""What Muon does with matrices where its options do not say it."""
OF_AXIS = {"parallel.schedule": "pp", "parallel.chunks": "pp", "parallel.sequence": "tp"}
"""Settings that say how the ranks of one axis work together."""


def agree_on(path: str, one: Description, other: Description) -> bool:
    """Whether two descriptions mean the same by a setting, as far as both say it."""
    if not one[path].is_set or not other[path].is_set or same_value(path, one.value(path), other.value(path)):
        return True
    if has_no_effect(one, path) and has_no_effect(other, path):
        return True
    if path == "saving.when":
        return saves_when(one) == saves_when(other)
    axis = path.removeprefix("mesh.")
    if axis in ("dp_shard", "dp_replicate"):  # one may say what the other leaves to the world
        known = {degrees(one)[axis], degrees(other)[axis]}
        return len(known) == 1 or None in known
    return False


def same_value(path: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting mean the same."""
    if asks_for_nothing(path, one) and asks_for_nothing(path, other):
        return True
    if path == "optimizer.options":
        one, other = ({**OF_MATRICES, **(value or {})} for value in (one, other))
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same_value(path, a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def has_no_effect(description: Description, path: str) -> bool:
    """Whether a setting says how something is done that is not done here: it has no effect."""
    if axis := OF_AXIS.get(path):
        return description.value(f"mesh.{axis}") in (None, 1)
    if path == "optimizer.decay":
        return not description.value("optimizer.weight_decay")
    if path in ("schedule.warmup_lag", "schedule.warmup_start"):
        return not any(description.value(f"schedule.warmup_{length}") for length in ("steps", "fraction"))
    if path == "schedule.decay_lag":
        level = description.value("schedule.final_fraction") == 1.0
        return level or description.value("schedule.name") in (None, "constant")
    if path == "schedule.decay_shape":
        return bool(description.value("schedule.name") != "wsd")
    if path == "saving.every":
        return saves_when(description) in ("never", "end")
    if path.startswith("prefetch."):
        return all(description.value(f"sharding.{state}") == "-" for state in ("weight", "between"))
    if not path.startswith("offload.") or path in TIER_PATHS:
        return False
    tiers = [str(description.value(tier) or "device") for tier in TIER_PATHS]
    return not any("nvme" in tier if path in NVME_ONLY else tier != "device" for tier in tiers)


def saves_when(description: Description) -> str | None:
    """When checkpoints are written: an interval that is no shorter than the run leaves the one at its end."""
    when, every, total = (description.value(path) for path in ("saving.when", "saving.every", "schedule.total_steps"))
    return "end" if when == "steps" and every and total and every >= total else when


def extras_by_key(description: Description) -> Mapping[str, Extra]:
    """What the source says beyond the sections. Without the spelling of settings, which a dialect may keep, too."""
    spoken = {key for _, setting in description.items() for key in setting.keys}
    return {extra.key: extra for extra in description.extras if extra.key not in spoken}
