"""Rows of the table as libraries without some of them say them: two axes that are one, and the nearest row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import (
    SHARDING_PATHS,
    Description,
    Setting,
    SettingOrigin,
    SettingsByPath,
    row_name,
)
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.core.wording import meant
from terrazzo.engine import Plan

__all__ = [
    "HYBRID",
    "HYBRID_ROWS",
    "ONE_GROUP",
    "choose_row",
    "in_one_group",
    "is_split",
    "nearest_row",
    "one_axis",
    "row_settings",
    "shard_ranks",
]

HYBRID = {"zero3": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
"""Row on two axes, replicas and shards, by that on one."""
HYBRID_ROWS = tuple(HYBRID.values())
_IN_ONE_GROUP = {**{row: flat for flat, row in HYBRID.items()}, "hpz": "zero3"}
"""What a row on two axes is where one group holds all ranks: FSDP splits over that group and makes groups of one rank
beside it, over which nothing is copied."""
ONE_GROUP = "one group holds all ranks: they are split over, and nothing is copied between groups"

_NEAREST = {
    "zero1": (
        "shard_grad_op",
        "FSDP has no stage 1: weights and gradients are split as well, the numbers are the same",
    ),
    "zero2": (
        "shard_grad_op",
        "FSDP splits the weights at rest too and gathers them once per step: less memory, the same numbers",
    ),
    "hfsdp": ("hybrid_shard", "FSDP keeps the optimizer state whole in every replica: 12/S instead of 12/(S·R) bytes"),
    "hpz": ("zero3", "without a second copy inside the node, backward gathers over all ranks: more traffic"),
}
"""The row that FSDP runs in place of one that it lacks, and what changes. The optimizer's numbers do not."""


# -- reading -------------------------------------------------------------------------------------------------------


def row_settings(row: str, *sources: Setting[Any]) -> SettingsByPath:
    """The four places of a row, under the keys of what chose it, with the origin of the first that is no default."""
    origin: SettingOrigin = next((source.origin for source in sources if source.origin != "default"), "default")
    places = Plan.named(row).places()
    return {f"sharding.{state}": derived(str(place), *sources, origin=origin) for state, place in places.items()}


def in_one_group(settings: Mapping[str, Setting[Any]]) -> SettingsByPath:
    """The places of a row on two axes whose ranks are one group, under the same keys; empty for all else."""
    row = row_name(*(settings[path].value for path in SHARDING_PATHS))
    if row not in _IN_ONE_GROUP or settings["mesh.dp_replicate"].value != 1:
        return {}
    places = Plan.named(_IN_ONE_GROUP[row]).places()
    return {path: replace(settings[path], value=str(places[path.partition(".")[2]])) for path in SHARDING_PATHS}


# -- writing -------------------------------------------------------------------------------------------------------


def nearest_row(description: Description, rows: Collection[str]) -> tuple[str | None, str]:
    """The description's row, or the one nearest to it among `rows`, and what changes with it.

    None with a reason where there is none near; None without one where the description says no row at all.
    """
    if not all(description[path].is_set for path in SHARDING_PATHS):
        return None, ""
    row = description.row
    if row is not None and row in rows:
        return row, ""
    if row in _NEAREST and _NEAREST[row][0] in rows:
        return _NEAREST[row]
    places = "; ".join(f"{path.partition('.')[2]}: {meant(path, description.value(path))}" for path in SHARDING_PATHS)
    return None, f"no setting splits the states so ({places})"


def choose_row(draft: Draft, rows: Collection[str], hint: str) -> tuple[str | None, str]:
    """`nearest_row` of what is written; where there is none near it is refused, with a hint which one to choose.

    Without a row there is a mesh all the same.
    """
    row, why = nearest_row(draft.description, rows)
    if row is None and why:
        draft.refuse(SHARDING_PATHS, f"{why}: choose {hint}")
    return row, why


def is_split(description: Description) -> bool:
    """Whether data ranks share any state: by the row, and where code decides that, by the ranks of dp_shard."""
    if all(description[path].is_set for path in SHARDING_PATHS):
        return description.row != "zero0"
    return (description.value("mesh.dp_shard") or 1) > 1


def shard_ranks(draft: Draft, world: int | None) -> int | None:
    """Ranks per replica: as said, or what is left of the world where that is known."""
    shards: int | None = draft.value("mesh.dp_shard")
    open_ended = draft.is_set("mesh.dp_replicate") and draft.value("mesh.dp_replicate") is None
    if shards is not None or open_ended:
        return shards
    return ranks_left(draft.description, world, ("dp_replicate", *SAME_DATA_AXES))


def one_axis(draft: Draft, world: int | None) -> int | None:
    """Ranks of the one data axis: replicas and their shards, or what other axes leave of the world."""
    shards, replicas = draft.value("mesh.dp_shard"), draft.setting("mesh.dp_replicate")
    if shards is not None and (replicas.value is not None or not replicas.is_set):
        return int(shards * (replicas.value or 1))
    return ranks_left(draft.description, world, SAME_DATA_AXES)
