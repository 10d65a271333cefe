"""Terrazzo's own checkpoints as a `Source`: every block that is read is checked against its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SEAL,
    TIES,
    TIES_NOT_KNOWN,
    State,
    index_space,
)
from terrazzo.checkpoint.format.parse import named_tiles, parse_manifest, rectangle_of
from terrazzo.checkpoint.format.runs import Runs
from terrazzo.checkpoint.format.seal import check_seal
from terrazzo.checkpoint.source import OptimizerInfo, Source, StateInfo, TensorInfo
from terrazzo.checkpoint.storage.blocks import Blocks, DigestBlock
from terrazzo.checkpoint.storage.store import CheckpointFolder
from terrazzo.checkpoint.tensors import bytes_of, dtype_of
from terrazzo.engine.partition.rectangles import Rectangle, rectangles_of
from terrazzo.errors import Damaged

__all__ = ["TerrazzoCheckpoint"]


class TerrazzoCheckpoint(Source):
    """A folder that Terrazzo wrote. Opening it reads and checks the manifest, and the files' sizes.

    Args:
        sizes: whether to check these.

    Raises:
        Damaged: the manifest or its seal is missing, changed or contradicts itself, or a file has another size.
        BadInput: it is of another version.
    """

    format = "Terrazzo"

    def __init__(self, folder: CheckpointFolder, sizes: bool = True) -> None:
        super().__init__(folder.where)
        self.folder = folder
        data = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
        check_seal(data, folder.read(SEAL, 4096), folder.where)
        self.manifest = manifest = parse_manifest(data, f"{folder.where}/{MANIFEST}")
        self.names_ties = manifest.software.get(TIES) != TIES_NOT_KNOWN
        self._blocks = Blocks(folder, manifest)
        for file in manifest.files if sizes else ():
            if (size := folder.size_bytes(file.name)) != file.size_bytes:
                raise Damaged(f"'{folder.where}/{file.name}' has {size} bytes and was written with {file.size_bytes}.")
        self.tensors = {
            name: TensorInfo(
                tuple(tensor.shape),
                {kind: StateInfo(dtype_of(state.dtype), state.numel) for kind, state in tensor.states.items()},
            )
            for name, tensor in manifest.tensors.items()
        }
        self.cache = folder.cache()
        self.identity = hashlib.sha256(data).hexdigest()
        self.aliases, self.step, self.extra = dict(manifest.aliases), manifest.step, manifest.extra
        self.ranks = manifest.ranks
        if (optimizer := manifest.optimizer) is not None:
            groups = [group.model_dump() for group in optimizer.groups]
            self.optimizer = OptimizerInfo(optimizer.name, groups, optimizer.scaler)

    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        state, what = self._state(name, kind), f"{name}, {kind}"
        space = index_space(self.tensors[name].shape, state.numel)
        values = torch.empty(stop - start, dtype=dtype_of(state.dtype))
        if len(state.tiles) == 1:
            itemsize = values.itemsize
            runs = Runs.of_range(start * itemsize, stop * itemsize)
            self._blocks.fill(bytes_of(values), state.tiles[0].ranges, runs, itemsize, what)
            return values
        done = 0
        for part in rectangles_of(space, start, stop):
            self._fill(values[done : done + part.numel].view(part.sizes), state, part, what)
            done += part.numel
        return values

    def read_box(self, name: str, kind: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        part = self._part(name, kind, offsets, sizes)
        state = self._state(name, kind)
        values = torch.empty(part.sizes, dtype=dtype_of(state.dtype))
        self._fill(values, state, part, f"{name}, {kind}")
        return values

    def _state(self, name: str, kind: str) -> State:
        return self.manifest.tensors[name].states[kind]

    def _fill(self, out: Tensor, state: State, part: Rectangle, what: str) -> None:
        """The contiguous `out` with a rectangle of a state, from whichever tiles have some of it."""
        itemsize = out.itemsize
        for tile_name, tile in named_tiles(what, state):
            common = rectangle_of(tile).intersect(part)
            if common is None:
                continue
            there = out[common.relative_to(part).slices]
            into = there if there.is_contiguous() else torch.empty(common.sizes, dtype=out.dtype)
            in_tile = common.relative_to(rectangle_of(tile))
            in_bytes = Rectangle((*in_tile.offsets, 0), (*in_tile.sizes, itemsize))
            runs = Runs((*tile.sizes, itemsize), in_bytes)
            self._blocks.fill(bytes_of(into.view(-1)), tile.ranges, runs, itemsize, tile_name)
            if into is not there:
                there.copy_(into)

    def blocks(self, wanted: Callable[[str], bool] = lambda kind: True) -> dict[str, list[DigestBlock]]:
        """By file, its blocks of the kinds of state that are `wanted`, and its header, in the order of the bytes."""
        manifest = self.manifest
        by_file = {file.name: [DigestBlock(file.name, 0, file.header_bytes, file.header_digest, "the header")]
                 for file in manifest.files}  # fmt: skip
        for name, tensor in manifest.tensors.items():
            for kind, state in tensor.states.items():
                if wanted(kind):
                    itemsize = dtype_of(state.dtype).itemsize
                    for what, tile in named_tiles(f"{name}, {kind}", state):
                        for extent in tile.ranges:
                            by_file[manifest.files[extent.file].name] += self._blocks.of(extent, itemsize, what)
        return {file: sorted(blocks, key=lambda block: block.offset) for file, blocks in by_file.items()}

    def about(self) -> dict[str, Any]:
        described = self.manifest.model_dump(include={"version", "run", "written", "software", "topology"})
        return described | {
            "files": [{"name": file.name, "size_bytes": file.size_bytes} for file in self.manifest.files]
        }

    def check(self, wanted: Callable[[str], bool], part: int, parts: int, beside: Collection[int] = ()) -> None:
        shares = _shares([block for blocks in self.blocks(wanted).values() for block in blocks], parts)
        buffer = memoryview(bytearray(max((block.count_bytes for block in shares[part]), default=0)))
        for block in shares[part]:
            block.check(self.folder, buffer)
        for number in (part, *beside):
            self._blocks.trust(shares[number])


def _shares(blocks: list[DigestBlock], parts: int) -> list[list[DigestBlock]]:
    """Consecutive blocks of about a part's share of the bytes: where ranks are as before, its own file's."""
    total, before = sum(block.count_bytes for block in blocks), 0
    shares: list[list[DigestBlock]] = [[] for _ in range(parts)]
    for block in blocks:
        shares[before * parts // max(total, 1)].append(block)
        before += block.count_bytes
    return shares
