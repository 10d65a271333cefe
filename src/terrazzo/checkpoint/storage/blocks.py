"""Bytes of a checkpoint's files, read under their digests: of a block that has not been checked, all of it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from terrazzo.checkpoint.format.manifest import Extent, Manifest
from terrazzo.checkpoint.format.runs import Runs
from terrazzo.checkpoint.storage.rank_file import checked_block
from terrazzo.checkpoint.storage.store import CheckpointFolder
from terrazzo.engine.plan.layout import Range
from terrazzo.errors import BadInput, Damaged

__all__ = ["Blocks", "DigestBlock"]


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

    def check(self, folder: CheckpointFolder, buffer: memoryview) -> None:
        """Read it into `buffer`. Raises what `read_into` does, and `Damaged`, naming it, for another digest."""
        try:
            good = checked_block(folder, self.file, self.offset, buffer[: self.count_bytes], self.digest)
        except BadInput as error:
            raise type(error)(f"{error} This concerns {self.span}.") from None
        if not good:
            raise Damaged(self.changed(folder))

    def changed(self, folder: CheckpointFolder) -> str:
        """The message for bytes that have another digest."""
        return f"'{folder.where}/{self.file}', {self.span}: not what was written."


class Blocks:
    """The blocks of a checkpoint, and which of them are known to be what was written."""

    def __init__(self, folder: CheckpointFolder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._checked: set[DigestBlock] = set()  # where this process reads, which need not do it again

    def trust(self, blocks: Iterable[DigestBlock]) -> None:
        """They have been checked, by this process or by one that reads from the same memory."""
        self._checked.update(blocks)

    def of(self, extent: Extent, itemsize: int, what: str, within: Range | None = None) -> Iterator[DigestBlock]:
        """The blocks of a range of elements, or of the bytes `within` it, which count from its own first one."""
        file, size = self._manifest.files[extent.file].name, self._manifest.block_bytes
        whole = Range(0, (extent.stop - extent.start) * itemsize)
        wanted = whole if within is None else within.intersect(whole)
        for number in range(wanted.start // size, -(-wanted.stop // size)):
            first = number * size
            count_bytes = min(size, whole.stop - first)
            yield DigestBlock(file, extent.offset + first, count_bytes, extent.digests[number], what)

    def fill(self, out: memoryview, ranges: Sequence[Extent], runs: Runs, itemsize: int, what: str) -> None:
        """Read some of the bytes of a tile, of whose elements `ranges` are, one after the other into `out`.

        Args:
            runs: which, in bytes.
        """
        wanted = Range(runs.start(0), runs.start(runs.count - 1) + runs.length) if runs.numel else Range(0, 0)
        for extent in ranges:
            begin, end = extent.start * itemsize, extent.stop * itemsize
            if wanted.stop <= begin or end <= wanted.start:
                continue
            inner = Range(max(0, wanted.start - begin), wanted.stop - begin)
            for block in self.of(extent, itemsize, what, inner):
                self._fill(out, block, begin + block.offset - extent.offset, runs)

    def _fill(self, out: memoryview, block: DigestBlock, first: int, runs: Runs) -> None:
        """What of `runs` is in a block whose own first byte is the tile's byte `first`."""
        inside = Range(first, first + block.count_bytes)
        if block in self._checked:
            self._fill_directly(out, block, inside, runs)
            return
        buffer: memoryview | None = None
        for before, part in runs.inside(inside):
            if part == inside:
                block.check(self._folder, out[before : before + part.numel])
                return
            if buffer is None:
                buffer = memoryview(bytearray(block.count_bytes))
                block.check(self._folder, buffer)
                self._checked.add(block)
            out[before : before + part.numel] = buffer[part.within(inside)]

    def _fill_directly(self, out: memoryview, block: DigestBlock, inside: Range, runs: Runs) -> None:
        """Runs with little between them are read as one."""
        reads, copies = [], []
        for group in runs.groups(inside, self._folder.skip_bytes):
            span = Range(group[0][1].start, group[-1][1].stop)
            before, part = group[0]
            into = out[before : before + part.numel] if len(group) == 1 else memoryview(bytearray(span.numel))
            reads.append((block.offset + span.start - inside.start, into))
            if len(group) > 1:
                copies += [(before, part.numel, into[part.within(span)]) for before, part in group]
        if reads:
            self._folder.read_each(block.file, reads)
        for before, count, data in copies:
            out[before : before + count] = data
