"""Writing FSDP1's arguments."""

from __future__ import annotations

from terrazzo.dialects.core.description import DATA_AXES, SHARDING, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.formats.shared.fsdp import ROW_NAMES, leave_to_loop, write_offload, write_wrap_policy
from terrazzo.dialects.formats.shared.fsdp_policy import FSDP1_POLICY, write_policy
from terrazzo.dialects.formats.shared.rows import HYBRID_ROWS, choose_row, shard_ranks

__all__ = ["write"]


def write(description: Description, context: ReadingContext = NO_CONTEXT, library: str = "FSDP1") -> Writing:
    """All that FSDP1's arguments can say. `library`: who passes them on, as in messages."""
    pen = Pen(description, library, "fsdp1")
    world = context.world
    leave_to_loop(pen)
    row, why = choose_row(pen, ROW_NAMES, f"one of {', '.join(ROW_NAMES.values())}")
    if row is not None:
        _write_row(pen, row, why, world)
    pen.implied("mesh.world")
    write_wrap_policy(pen, "auto_wrap_policy")
    older = pen.own and "ignored_modules" in pen.setting("units.ignored").keys
    pen.option("units.ignored", "ignored_modules" if older else "ignored_states", None)
    write_policy(pen, FSDP1_POLICY)
    if write_offload(pen, "cpu_offload.offload_params"):
        pen.implied("offload.pin") if pen.value("offload.pin", True) else pen.lossy("offload.pin", "FSDP1 always pins")
    _write_prefetch(pen)
    pen.option("loading.broadcast", "sync_module_states", False)
    return pen.finish()


def _write_row(pen: Pen, row: str, why: str, world: int | None) -> None:
    if pen.wanted("sharding.weight", "D", "sharding_strategy") or (not pen.own and row != "zero3"):
        pen.put(SHARDING, "sharding_strategy", ROW_NAMES[row], why, "lossy" if why else "applied")
    elif why:
        pen.lossy(SHARDING, why)
    else:
        pen.implied(SHARDING)
    replicas, shards = pen.value("mesh.dp_replicate"), pen.value("mesh.dp_shard")
    if row in HYBRID_ROWS and not pen.own:
        shards = shard_ranks(pen, world)
    if pen.own and not pen.setting("mesh.dp_shard").keys:
        pen.implied(DATA_AXES)
    elif row not in HYBRID_ROWS:
        _write_flat_mesh(pen, shards)
    elif replicas is not None and shards is not None:
        pen.put(DATA_AXES, "device_mesh", [replicas, shards])
    else:
        said = [path for path in DATA_AXES if pen.value(path) is not None]
        pen.implied(DATA_AXES, "by default the ranks of a node are shards, and the nodes replicas")
        pen.lossy(said, "device_mesh needs both sizes, and the number of ranks is not known: say --world")


def _write_flat_mesh(pen: Pen, shards: int | None) -> None:
    """All data ranks are one axis, whatever axes the source has."""
    replicas = pen.setting("mesh.dp_replicate").value if pen.is_set("mesh.dp_replicate") else 1
    if shards is not None and replicas is not None:
        kept = replicas == 1
        pen.put(DATA_AXES, "device_mesh", [replicas * shards], "" if kept else "all data ranks are one axis")
    else:
        pen.implied(DATA_AXES, "all data ranks are one axis")


def _write_prefetch(pen: Pen) -> None:
    for path, key, words, default in (
        ("prefetch.backward", "backward_prefetch", {0: None, 1: "BACKWARD_PRE"}, 1),
        ("prefetch.forward", "forward_prefetch", {0: False, 1: True}, 0),
    ):
        ahead = pen.value(path)
        if pen.kept(key):
            pen.implied(path, key=key)
        elif ahead is not None and ahead > 1:
            pen.put(path, key, words[1], f"{ahead} units ahead were asked; FSDP1 gathers one", "lossy")
        elif pen.wanted(path, default, key):
            pen.put(path, key, words[ahead])
        else:
            pen.implied(path)
