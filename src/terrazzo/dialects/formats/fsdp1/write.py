"""Writing FSDP1's arguments."""

from __future__ import annotations

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, SHARDING_PATHS, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES
from terrazzo.dialects.formats.fsdp1.keys import KEYS
from terrazzo.dialects.formats.shared.fsdp_arguments import leave_to_loop, write_offload, write_wrap_policy
from terrazzo.dialects.formats.shared.fsdp_policy import FSDP1_POLICY, write_policy
from terrazzo.dialects.formats.shared.fsdp_words import ROW_NAMES
from terrazzo.dialects.formats.shared.launcher import leave_to_launcher
from terrazzo.dialects.formats.shared.plan_rows import HYBRID_ROWS, choose_row, shard_ranks

__all__ = ["write"]


def write(description: Description, context: ReadingContext = NO_CONTEXT, library: str = "FSDP1") -> Writing:
    """All that FSDP1's arguments can say. `library`: who passes them on, as in messages."""
    draft = Draft(description, library, KEYS)
    row, why = choose_row(draft, ROW_NAMES, f"one of {', '.join(ROW_NAMES.values())}")
    if row is not None:
        _write_row(draft, row, why)
    _write_mesh(draft, row, context.world)
    leave_to_launcher(draft)
    write_wrap_policy(draft, "auto_wrap_policy")
    draft.option("units.ignored", "ignored_states")
    write_policy(draft, FSDP1_POLICY, context)
    if write_offload(draft, "cpu_offload.offload_params"):
        draft.implied("offload.pin") if draft.value("offload.pin", True) else draft.lossy(
            "offload.pin", "FSDP1 always pins"
        )
    _write_prefetch(draft)
    draft.option("loading.broadcast", "sync_module_states")
    leave_to_loop(draft)
    return draft.finish()


def _write_row(draft: Draft, row: str, why: str) -> None:
    if row != "zero3" or why:
        draft.put(SHARDING_PATHS, "sharding_strategy", ROW_NAMES[row], why, "lossy" if why else "applied")
    else:
        draft.implied(SHARDING_PATHS)


def _write_mesh(draft: Draft, row: str | None, world: int | None) -> None:
    if lost := [axis for axis in SAME_DATA_AXES if draft.value(f"mesh.{axis}", 1) != 1]:
        told = [path for path in DATA_AXIS_PATHS if draft.value(path) not in (None, 1)]
        draft.holds(DATA_AXIS_PATHS, "all ranks are data ranks")
        draft.lossy(told, f"without {' and '.join(lost)} more ranks are left to the data axes: they take them all")
        return
    replicas, shards = draft.value("mesh.dp_replicate"), draft.value("mesh.dp_shard")
    if row in HYBRID_ROWS:
        shards = shard_ranks(draft, world)
    if row not in HYBRID_ROWS:
        _write_flat_mesh(draft, shards)
    elif replicas is not None and shards is not None:
        draft.put(DATA_AXIS_PATHS, "device_mesh", [replicas, shards])
    else:
        known = [path for path in DATA_AXIS_PATHS if draft.value(path) is not None]
        draft.holds(DATA_AXIS_PATHS, "by default the ranks of a node are shards, and the nodes replicas")
        draft.lossy(known, "device_mesh needs both sizes, and the number of ranks is not known: say --world")


def _write_flat_mesh(draft: Draft, shards: int | None) -> None:
    """All data ranks are one axis, whatever axes the source has."""
    replicas = draft.setting("mesh.dp_replicate").value if draft.is_set("mesh.dp_replicate") else 1
    if shards is not None and replicas is not None:
        why = "" if replicas == 1 else "all data ranks are one axis"
        draft.write("device_mesh", [replicas * shards])
        draft.holds(DATA_AXIS_PATHS, why, "device_mesh")
    else:
        draft.holds(DATA_AXIS_PATHS, "all data ranks are one axis")


def _write_prefetch(draft: Draft) -> None:
    for path, key, words, default in (
        ("prefetch.backward", "backward_prefetch", {0: None, 1: "BACKWARD_PRE"}, 1),
        ("prefetch.forward", "forward_prefetch", {0: False, 1: True}, 0),
    ):
        ahead = draft.value(path)
        if ahead is not None and ahead > 1:
            draft.put(path, key, words[1], f"{ahead} units ahead were asked; FSDP1 gathers one", "lossy")
        elif ahead in (None, default):
            draft.implied(path)
        else:
            draft.put(path, key, words[ahead])
