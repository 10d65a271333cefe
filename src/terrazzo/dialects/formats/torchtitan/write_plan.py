"""Writing the mesh and the row of torchtitan's `Trainer.Config`."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import DATA_AXES, SHARDING
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.core.meaning import idle, left
from terrazzo.dialects.formats.shared.rows import HYBRID_ROWS, choose_row
from terrazzo.dialects.formats.torchtitan.keys import DEGREES, KEYS, PIPELINE, SCHEDULES, STAGE_LAYERS

__all__ = ["APART", "option", "write_plan"]

_ROWS = ("zero3", "shard_grad_op", *HYBRID_ROWS, "zero0")
_REPLICAS, _SHARDS = (f"parallelism.data_parallel_{word}_degree" for word in ("replicate", "shard"))
_KEEPS = ("shard_grad_op", "hybrid_shard_zero2")
APART = ("tp", "cp", "pp")
"""Axes whose ranks see the same data; there is no sp."""
_ORDERS = {
    ("gpipe", False): "GPipe",
    ("1f1b", True): "Interleaved1F1B",
    ("zero_bubble", True): "InterleavedZeroBubble",
    ("zero_bubble", False): "InterleavedZeroBubble",
}
"""Name of a schedule by the order, and whether a rank has several stages."""


def option(pen: Pen, path: str, key: str, words: dict[Any, Any] | None = None) -> None:
    """Write a setting unless it is the key's default; the words are those of neutral values."""
    pen.option(path, key, KEYS[key].default if words is None else KEYS[key].neutral, words)


def write_plan(pen: Pen, context: ReadingContext) -> None:
    """Write the degrees of the mesh, the order of stages, and what is split over data ranks."""
    for path, key in DEGREES.items():
        option(pen, path, key)
    if not idle(pen.description, "parallel.sequence"):
        option(pen, "parallel.sequence", "parallelism.enable_sequence_parallel")
    _pipeline(pen, context)
    if pen.value("mesh.sp", 1) != 1:
        pen.refuse("mesh.sp", "torchtitan has no Ulysses attention: use context parallelism (mesh.cp)")
    pen.implied("mesh.world")
    row, why = choose_row(pen, _ROWS, "zero3, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or zero0")
    if not pen.own and pen.value("mesh.pp", 1) != 1:
        pen.write("training.disable_cuda_graphs", True)  # on by default, and refused of a pipeline
    if row is not None:
        _reshard(pen, row, why)
        _degrees(pen, row, context)


def _pipeline(pen: Pen, context: ReadingContext) -> None:
    """The order of stages by the name that it has with one or several on each rank."""
    paths, ranks = ("parallel.schedule", "parallel.chunks"), pen.value("mesh.pp", 1)
    order, chunks = pen.value("parallel.schedule", "1f1b"), pen.value("parallel.chunks", 1)
    if pen.own or idle(pen.description, "parallel.chunks") or (order, chunks) == SCHEDULES["1f1b"]:
        return
    name = _ORDERS.get((order, chunks > 1))
    if name is None:
        pen.lossy(paths, f"torchtitan's orders are other ones than {order}: it is 1F1B, the numbers are the same")
    elif chunks == 2 or name == "GPipe":
        pen.put(paths, PIPELINE, name)
    elif chunks == 1:
        pen.put(paths, PIPELINE, name, "torchtitan has it with two stages on each rank", "lossy")
    elif context.layers is None:
        why = f"two stages on each rank: how many layers make {chunks}, --model tells"
        pen.put(paths, PIPELINE, name, why, "lossy")
    else:
        pen.put(paths, PIPELINE, name)
        pen.write(STAGE_LAYERS, -(-context.layers // (ranks * chunks)))


def _reshard(pen: Pen, row: str, why: str) -> None:
    key = "parallelism.fsdp_reshard_after_forward"
    pipelined = pen.value("mesh.pp", 1) != 1
    if row == "zero0":
        pen.implied(SHARDING, why, _SHARDS)
        return
    keeps = row in _KEEPS
    if pen.own:
        needed = pen.wanted("sharding.between", None, key) and not pen.kept(key)
    else:
        needed = keeps != pipelined
    if needed:
        pen.put(SHARDING, key, "never" if keeps else "always", why, "lossy" if why else "applied")
    elif why:
        pen.lossy(SHARDING, why)
    else:
        pen.implied(SHARDING)


def _degrees(pen: Pen, row: str, context: ReadingContext) -> None:
    replicas, shards = pen.value("mesh.dp_replicate", 1), pen.value("mesh.dp_shard")
    if row == "zero0":
        _replicated(pen, replicas, shards, context)
    elif row in HYBRID_ROWS:
        if pen.value("mesh.dp_replicate") is None:
            why = "the number of replicas is not known: set it, or every rank is a shard of one replica"
            pen.refuse((*DATA_AXES, *SHARDING), why)
            return
        pen.put("mesh.dp_replicate", _REPLICAS, replicas)
        _shard_degree(pen, shards)
    else:
        _flat(pen, replicas, shards)


def _flat(pen: Pen, replicas: int, shards: int | None) -> None:
    """All data ranks are one axis, whatever axes the source has."""
    open_ended = pen.is_set("mesh.dp_replicate") and pen.value("mesh.dp_replicate") is None
    apart = open_ended or replicas != 1
    if pen.own and _REPLICAS in pen.setting("mesh.dp_replicate").keys:
        pen.put("mesh.dp_replicate", _REPLICAS, replicas)
    elif apart:
        pen.lossy("mesh.dp_replicate", "all data ranks are one axis")
    else:
        pen.implied("mesh.dp_replicate")
    whole = None if open_ended or shards is None else replicas * shards
    _shard_degree(pen, whole, "all data ranks are one axis" if apart else "")


def _shard_degree(pen: Pen, ranks: int | None, why: str = "") -> None:
    if pen.wanted("mesh.dp_shard", None, _SHARDS):
        pen.put("mesh.dp_shard", _SHARDS, -1 if ranks is None else ranks, why)
    else:
        pen.implied("mesh.dp_shard")


def _replicated(pen: Pen, replicas: int, shards: int | None, context: ReadingContext) -> None:
    """Nothing is split: every data rank is a replica."""
    ranks = replicas * shards if shards else left(pen.description, context.world, APART) or None
    if ranks is None:
        why = "torchtitan counts replicas, and the number of ranks is not known: say --world"
        pen.refuse((*SHARDING, *DATA_AXES), why)
        pen.write(_SHARDS, 1)  # so that torchtitan stops at the mesh, and does not shard what was to be whole
        return
    if not pen.own or _REPLICAS in pen.setting("mesh.dp_shard").keys:
        pen.put(DATA_AXES, _REPLICAS, ranks, "nothing is split: every rank is a replica")
    else:
        pen.implied(DATA_AXES)
    pen.write(_SHARDS, 1)
