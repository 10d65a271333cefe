"""Terrazzo's own checkpoints as a `Source`: every block that is read is checked against its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SEAL,
    Extent,
    blocks_of,
    parse_manifest,
)
from terrazzo.checkpoint.seal import check_seal
from terrazzo.checkpoint.shard import checked_block
from terrazzo.checkpoint.source import OptimizerInfo, Source, StateInfo, TensorInfo
from terrazzo.checkpoint.store import Folder
from terrazzo.checkpoint.tensors import bytes_of, dtype_of
from terrazzo.errors import BadInput, Damaged

__all__ = ["Checkpoint", "DigestBlock"]


@dataclass(frozen=True)
class DigestBlock:
    """Bytes of a file under one digest, and what they are."""

    file: str
    offset: int
    count_bytes: int
    digest: str
    what: str

    @property
    def span(self) -> str:
        """Which bytes of the file it is, and of what."""
        return f"bytes {self.offset} to {self.offset + self.count_bytes - 1}, {self.what}"

    def check(self, folder: Folder, buffer: memoryview) -> None:
        """Read it into `buffer`. Raises what `Folder.read_into` does, and `Damaged` for another digest, naming it."""
        try:
            good = checked_block(folder, self.file, self.offset, buffer[: self.count_bytes], self.digest)
        except BadInput as error:
            raise type(error)(f"{error} This concerns {self.span}.") from None
        if not good:
            raise Damaged(self.changed(folder))

    def changed(self, folder: Folder) -> str:
        """The message for bytes that have another digest."""
        return f"'{folder.where}/{self.file}', {self.span}: not what was written."


class Checkpoint(Source):
    """A folder that Terrazzo wrote. Opening it reads and checks the manifest, and the files' sizes.

    Args:
        sizes: whether to check these.

    Raises:
        Damaged: the manifest or its seal is missing, changed or contradicts itself, or a file has another size.
        BadInput: it is of another version.
    """

    format = "Terrazzo"
    names_ties = True

    def __init__(self, folder: Folder, sizes: bool = True) -> None:
        super().__init__(folder.where)
        self.folder = folder
        self._checked: set[DigestBlock] = set()  # where this process reads, which need not do it again
        data = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
        check_seal(data, folder.read(SEAL, 4096), folder.where)
        self.manifest = manifest = parse_manifest(data, f"{folder.where}/{MANIFEST}")
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

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        state = self.manifest.tensors[name].states[kind]
        if not 0 <= start <= stop <= state.numel:
            raise Damaged(f"'{self.where}' has {state.numel} elements of {name}, {kind}, and not {start}..{stop}.")
        dtype = dtype_of(state.dtype)
        values = torch.empty(stop - start, dtype=dtype)
        into = bytes_of(values)
        for extent in state.ranges:
            first, last = max(start, extent.start), min(stop, extent.stop)
            if first < last:
                skipped = extent.offset + (first - extent.start) * dtype.itemsize
                out = into[(first - start) * dtype.itemsize : (last - start) * dtype.itemsize]
                self._fill(out, skipped, self._blocks(extent, dtype.itemsize, f"{name}, {kind}"))
        return values

    def blocks(self, wanted: Callable[[str], bool] = lambda kind: True) -> dict[str, list[DigestBlock]]:
        """By file, its blocks of the kinds of state that are `wanted`, and its header, in the order of the bytes."""
        manifest = self.manifest
        found = {file.name: [DigestBlock(file.name, 0, file.header_bytes, file.header_digest, "the header")]
                 for file in manifest.files}  # fmt: skip
        for name, tensor in manifest.tensors.items():
            for kind, state in tensor.states.items():
                if wanted(kind):
                    itemsize = dtype_of(state.dtype).itemsize
                    for extent in state.ranges:
                        found[manifest.files[extent.file].name] += self._blocks(extent, itemsize, f"{name}, {kind}")
        return {file: sorted(blocks, key=lambda block: block.offset) for file, blocks in found.items()}

    def about(self) -> dict[str, Any]:
        kept = self.manifest.model_dump(include={"version", "run", "written", "software", "topology"})
        return kept | {"files": [{"name": file.name, "size_bytes": file.size_bytes} for file in self.manifest.files]}

    def check(self, wanted: Callable[[str], bool], part: int, parts: int, beside: Collection[int] = ()) -> None:
        shares = _shares([block for blocks in self.blocks(wanted).values() for block in blocks], parts)
        buffer = memoryview(bytearray(max((block.count_bytes for block in shares[part]), default=0)))
        for block in shares[part]:
            block.check(self.folder, buffer)
        for number in (part, *beside):
            self._checked.update(shares[number])

    def _blocks(self, extent: Extent, itemsize: int, what: str) -> Iterator[DigestBlock]:
        file = self.manifest.files[extent.file].name
        spans = blocks_of((extent.stop - extent.start) * itemsize, self.manifest.block_bytes)
        for (first, last), expected in zip(spans, extent.digests, strict=True):
            yield DigestBlock(file, extent.offset + first, last - first, expected, what)

    def _fill(self, out: memoryview, offset: int, blocks: Iterable[DigestBlock]) -> None:
        """Fill `out` with the bytes at `offset`, which lie in `blocks`; whole blocks are read in place."""
        end = offset + len(out)
        for block in blocks:
            last = block.offset + block.count_bytes
            if last <= offset or block.offset >= end:
                continue
            if offset <= block.offset and last <= end:
                self._read_block(block, out[block.offset - offset : last - offset])
            elif block in self._checked:
                begin, finish = max(offset, block.offset), min(end, last)
                self.folder.read_into(block.file, begin, out[begin - offset : finish - offset])
            else:
                buffer = memoryview(bytearray(block.count_bytes))
                self._read_block(block, buffer)
                begin, finish = max(offset, block.offset), min(end, last)
                out[begin - offset : finish - offset] = buffer[begin - block.offset : finish - block.offset]

    def _read_block(self, block: DigestBlock, into: memoryview) -> None:
        if block in self._checked:
            self.folder.read_into(block.file, block.offset, into)
        else:
            block.check(self.folder, into)


def _shares(blocks: list[DigestBlock], parts: int) -> list[list[DigestBlock]]:
    """Consecutive blocks of about a part's share of the bytes: where ranks are as before, its own file's."""
    total, before = sum(block.count_bytes for block in blocks), 0
    shares: list[list[DigestBlock]] = [[] for _ in range(parts)]
    for block in blocks:
        shares[before * parts // max(total, 1)].append(block)
        before += block.count_bytes
    return shares
