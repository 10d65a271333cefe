"""Writing the mesh and the row of torchtitan's `Trainer.Config`."""

from __future__ import annotations

from terrazzo.dialects.core.agreement import has_no_effect
from terrazzo.dialects.core.description import DATA_AXIS_PATHS, SHARDING_PATHS
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import ranks_left
from terrazzo.dialects.formats.shared.launcher import leave_to_launcher
from terrazzo.dialects.formats.shared.plan_rows import HYBRID_ROWS, choose_row
from terrazzo.dialects.formats.torchtitan.keys import DEGREES, PIPELINE, SCHEDULES, STAGE_LAYERS

__all__ = ["TAKEN_AXES", "write_plan"]

_ROWS = ("zero3", "shard_grad_op", *HYBRID_ROWS, "zero0")
_REPLICAS, _SHARDS = (f"parallelism.data_parallel_{word}_degree" for word in ("replicate", "shard"))
_KEEPS = ("shard_grad_op", "hybrid_shard_zero2")
TAKEN_AXES = ("tp", "cp", "pp")
"""Axes whose ranks see the same data; there is no sp."""
_ORDERS = {
    ("gpipe", False): "GPipe",
    ("1f1b", True): "Interleaved1F1B",
    ("zero_bubble", True): "InterleavedZeroBubble",
    ("zero_bubble", False): "InterleavedZeroBubble",
}
"""Name of a schedule by the order, and whether a rank has several stages."""


def write_plan(draft: Draft, context: ReadingContext) -> None:
    """Write the degrees of the mesh, the order of stages, and what is split over data ranks."""
    for path, key in DEGREES.items():
        draft.option(path, key)
    if not has_no_effect(draft.description, "parallel.sequence"):
        draft.option("parallel.sequence", "parallelism.enable_sequence_parallel")
    _pipeline(draft, context)
    if draft.value("mesh.sp", 1) != 1:
        draft.refuse("mesh.sp", "torchtitan has no Ulysses attention: use context parallelism (mesh.cp)")
    leave_to_launcher(draft)
    row, why = choose_row(draft, _ROWS, "zero3, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or zero0")
    if draft.value("mesh.pp", 1) != 1:
        draft.write("training.disable_cuda_graphs", True)  # on by default, and refused of a pipeline
    if row is not None:
        _reshard(draft, row, why)
    _degrees(draft, row, context)


def _pipeline(draft: Draft, context: ReadingContext) -> None:
    """The order of stages by the name that it has with one or several on each rank."""
    paths, ranks = ("parallel.schedule", "parallel.chunks"), draft.value("mesh.pp", 1)
    order, chunks = draft.value("parallel.schedule", "1f1b"), draft.value("parallel.chunks", 1)
    if has_no_effect(draft.description, "parallel.chunks") or (order, chunks) == SCHEDULES["1f1b"]:
        return
    name = _ORDERS.get((order, chunks > 1))
    if name is None:
        draft.lossy(paths, f"torchtitan's orders are other ones than {order}: it is 1F1B, the numbers are the same")
    elif chunks == 2 or name == "GPipe":
        draft.put(paths, PIPELINE, name)
    elif chunks == 1:
        draft.put(paths, PIPELINE, name, "torchtitan has it with two stages on each rank", "lossy")
    elif context.layers is None:
        why = f"two stages on each rank: how many layers make {chunks}, --model tells"
        draft.put(paths, PIPELINE, name, why, "lossy")
    else:
        draft.put(paths, PIPELINE, name)
        draft.write(STAGE_LAYERS, -(-context.layers // (ranks * chunks)))


def _reshard(draft: Draft, row: str, why: str) -> None:
    key = "parallelism.fsdp_reshard_after_forward"
    pipelined = draft.value("mesh.pp", 1) != 1
    if row == "zero0":
        draft.implied(SHARDING_PATHS, why, _SHARDS)
        return
    keeps = row in _KEEPS
    if keeps != pipelined:
        draft.put(SHARDING_PATHS, key, "never" if keeps else "always", why, "lossy" if why else "applied")
    elif why:
        draft.lossy(SHARDING_PATHS, why)
    else:
        draft.implied(SHARDING_PATHS)


def _degrees(draft: Draft, row: str | None, context: ReadingContext) -> None:
    replicas, shards = draft.value("mesh.dp_replicate", 1), draft.value("mesh.dp_shard")
    if row == "zero0":
        _replicated(draft, replicas, shards, context)
    elif row in HYBRID_ROWS:
        if draft.value("mesh.dp_replicate") is None:
            why = "the number of replicas is not known: set it, or every rank is a shard of one replica"
            draft.refuse((*DATA_AXIS_PATHS, *SHARDING_PATHS), why)
            return
        draft.put("mesh.dp_replicate", _REPLICAS, replicas)
        _shard_degree(draft, shards)
    else:
        _flat(draft, replicas, shards)


def _flat(draft: Draft, replicas: int, shards: int | None) -> None:
    """All data ranks are one axis, whatever axes the source has."""
    open_ended = draft.is_set("mesh.dp_replicate") and draft.value("mesh.dp_replicate") is None
    apart = open_ended or replicas != 1
    if apart:
        draft.lossy("mesh.dp_replicate", "all data ranks are one axis")
    else:
        draft.implied("mesh.dp_replicate")
    whole = None if open_ended or shards is None else replicas * shards
    _shard_degree(draft, whole, "all data ranks are one axis" if apart else "")


def _shard_degree(draft: Draft, ranks: int | None, why: str = "") -> None:
    if draft.value("mesh.dp_shard") is None:
        draft.implied("mesh.dp_shard")
    else:
        draft.write(_SHARDS, -1 if ranks is None else ranks)
        draft.holds("mesh.dp_shard", why, _SHARDS)


def _replicated(draft: Draft, replicas: int, shards: int | None, context: ReadingContext) -> None:
    """Nothing is split: every data rank is a replica."""
    ranks = replicas * shards if shards else ranks_left(draft.description, context.world, TAKEN_AXES)
    if ranks is None:
        why = "torchtitan counts replicas, and the number of ranks is not known: say --world"
        draft.refuse((*SHARDING_PATHS, *DATA_AXIS_PATHS), why)
        draft.write(_SHARDS, 1)  # so that torchtitan stops at the mesh, and does not shard what was to be whole
        return
    draft.write(_REPLICAS, ranks)
    draft.write(_SHARDS, 1)
    draft.holds(DATA_AXIS_PATHS, "nothing is split: every rank is a replica", _REPLICAS)
