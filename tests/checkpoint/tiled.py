"""Checkpoints as meshes with tensor parallelism write them, made by hand: what each rank would give, rank by rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from terrazzo.checkpoint.format.manifest import head
from terrazzo.checkpoint.format.rank_layout import FileEntry, TilePlace, arrange
from terrazzo.checkpoint.saving.job import SaveJob
from terrazzo.checkpoint.storage.places import store_and_name
from terrazzo.checkpoint.tensors import bytes_of, name_of

Mesh = tuple[int, int]
"""Data ranks, and ranks of tensor parallelism."""
Part = tuple[tuple[slice, ...], int, int]
"""A rectangle of a whole tensor, and which of its elements, flat."""
States = dict[tuple[str, str], Tensor]

# By name the shape, and the dim along which intervals of it are cut each into as many parts as there are ranks. Four
# ranks have a key and a value twice, since these have two heads of one row.
CUTS: dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...]]] = {
    "embed": ((11, 6), 0, (0, 11)),
    "qkv": ((12, 6), 0, (0, 8, 10, 12)),
    "down": ((6, 9), 1, (0, 9)),
    "experts": ((3, 8, 5), 1, (0, 4, 8)),
    "bias": ((3,), 0, (0, 3)),
    "norm": ((6,), None, ()),
    "scale": ((), None, ()),
}
MESHES: tuple[Mesh, ...] = ((1, 1), (3, 1), (1, 2), (2, 2), (2, 4), (1, 5))


def states() -> States:
    """All of it, whole; `down` in bfloat16."""
    found: States = {}
    for number, (name, (shape, _, _)) in enumerate(CUTS.items()):
        generator = torch.Generator().manual_seed(number)
        for kind in ("weight", "exp_avg"):
            values = torch.rand(shape, generator=generator)
            found[name, kind] = values.bfloat16() if name == "down" else values
        found[name, "step"] = torch.tensor([float(number)])
    return found


def rectangles(name: str, tp: int, rank: int) -> list[tuple[slice, ...]]:
    """What a rank of tensor parallelism has of a tensor, one after the other; parts may be empty."""
    shape, cut, edges = CUTS[name]
    if cut is None:
        return [tuple(slice(0, size) for size in shape)]
    found = []
    for first, last in pairwise(edges):
        size = last - first
        low, high = size * rank // tp, size * (rank + 1) // tp
        if name == "qkv" and size < tp:  # heads that several ranks share
            low, high = rank * size // tp, rank * size // tp + 1
        found.append(tuple(slice(first + low, first + high) if d == cut else slice(0, n) for d, n in enumerate(shape)))
    return found


def parts(name: str, mesh: Mesh, data: int, rank: int) -> Iterator[Part]:
    """What a data rank owns: a range of all that its rank of tensor parallelism has, as one flat tensor."""
    held = [(at, torch.empty(CUTS[name][0])[at].numel()) for at in rectangles(name, mesh[1], rank)]
    share = -(-sum(numel for _, numel in held) // mesh[0])
    begin, before = data * share, 0
    for at, numel in held:
        start, stop = max(begin - before, 0), min(begin + share - before, numel)
        if start < stop:
            yield at, start, stop
        before += numel


def write(path: Path, whole: States, mesh: Mesh) -> None:
    """The checkpoint of `whole` that all ranks of a mesh write. What ranks share, the first of them gives."""
    store, name = store_and_name(str(path))
    nonce, world, given = os.urandom(4).hex(), mesh[0] * mesh[1], set()
    jobs = []
    for number in range(world):
        data, rank = divmod(number, mesh[1])
        entries: dict[str, tuple[FileEntry, Tensor]] = {}
        for (tensor, kind), values in whole.items():
            if kind == "step":
                found = [(FileEntry(tensor, kind, 0, 1, CUTS[tensor][0], 1, "float32"), values)] if number == 0 else []
            else:
                found = list(_entries(tensor, kind, values, mesh, data, rank, given))
            entries |= {entry.key: (entry, part) for entry, part in found}
        common = {
            **head("", 7),
            "topology": {
                "world_size": world,
                "plan": {},
                "mesh": {"dp_shard": mesh[0], "tp": mesh[1]},
                "precision": {},
            },
            "tensors": {tensor: list(shape) for tensor, (shape, _, _) in CUTS.items()},
            "aliases": {},
            "optimizer": {"name": "AdamW", "groups": [{"lr": 0.5, "params": list(CUTS)}], "scaler": {}},
            "extra": {"step": 7},
        }
        arranged = arrange([entry for entry, _ in entries.values()])
        job = SaveJob(store.where, name, nonce, number, world, arranged, None, common if number == 0 else None)
        jobs.append((job, {key: part for key, (_, part) in entries.items()}))
    draft = jobs[0][0].draft()
    draft.begin()
    for job, held in jobs:
        SaveJob.from_json(job.to_json()).write(draft, lambda entry, held=held: bytes_of(held[entry.key]))  # type: ignore[misc]
    jobs[0][0].conclude(draft)


def _entries(
    name: str, kind: str, values: Tensor, mesh: Mesh, data: int, rank: int, given: set[object]
) -> Iterator[tuple[FileEntry, Tensor]]:
    for at, start, stop in parts(name, mesh, data, rank):
        offsets, sizes = tuple(s.start for s in at), tuple(s.stop - s.start for s in at)
        what = (name, kind, offsets, start)
        if what not in given:
            given.add(what)
            tile = None if sizes == tuple(values.shape) else TilePlace(offsets, sizes)
            entry = FileEntry(name, kind, start, stop, tuple(values.shape), values.numel(), name_of(values.dtype), tile)
            yield entry, values[at].reshape(-1)[start:stop].clone()
