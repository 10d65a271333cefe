"""Archives of `torch.save` inside of a file: of one that holds a tensor only the description is read here."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from terrazzo.checkpoint.importers.parts.tree import Unusable, as_tree
from terrazzo.checkpoint.importers.parts.unpickle import read_archive
from terrazzo.checkpoint.importers.parts.values import Chunk, Region
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.errors import Damaged

__all__ = ["Archive", "ArchivedChunk", "PlainValues"]


@dataclass(frozen=True)
class Archive:
    """`count_bytes` bytes of a file from `offset` on, which are one archive."""

    file: Path
    offset: int
    count_bytes: int


class PlainValues:
    """Reads values that are no tensors; most hyper-parameters are saved again for each parameter."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, archive: Archive) -> Any:
        """The value of an archive, or why it cannot be taken."""
        try:
            with archive.file.open("rb") as file:
                file.seek(archive.offset)
                data = file.read(archive.count_bytes)
            if data not in self._known:
                records = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
                self._known[data] = as_tree(read_archive(io.BytesIO(data), records), str(archive.file))
            return self._known[data]
        except Exception as error:  # whatever a damaged archive raises
            return Unusable(f"it cannot be read without running code, or is damaged: {error or type(error).__name__}")


class ArchivedChunk(Chunk):
    """A block that is one `torch.save` archive inside of a file."""

    def __init__(self, box: Rectangle, archive: Archive, dtype: torch.dtype, what: str) -> None:
        self.box = box
        self._archive, self._dtype, self._what = archive, dtype, what

    def region(self) -> Region:
        return self._region

    @cached_property
    def _region(self) -> Region:
        archive = self._archive
        first, last = archive.offset, archive.offset + archive.count_bytes - 1
        try:
            whole = torch.UntypedStorage.from_file(str(archive.file), False, archive.file.stat().st_size)
            with archive.file.open("rb") as file:
                view = cast(BinaryIO, _View(file, archive.offset, archive.count_bytes))
                tensor = read_archive(view, whole[first : last + 1])
            if type(tensor) is not torch.Tensor:
                raise ValueError(f"there is a {type(tensor).__name__} that is not a dense tensor")
            if tuple(tensor.shape) != self.box.sizes or tensor.dtype != self._dtype:
                raise ValueError(f"there is {list(tensor.shape)} of {tensor.dtype}, not the block that was announced")
            start = tensor.data_ptr() - whole.data_ptr() if tensor.numel() else first
            return Region(archive.file, start, self._dtype, self.box.sizes, tensor.stride(), self._what)
        except Exception as error:  # whatever a damaged archive raises
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise Damaged(
                f"'{archive.file}', bytes {first} to {last}, {self._what}: not as torch writes it: {why}."
            ) from None


class _View(io.RawIOBase):
    """Part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, count_bytes: int) -> None:
        self._file, self._offset, self._count = file, offset, count_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._count}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer)[: max(0, self._count - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(into)  # type: ignore[attr-defined]
        self._position += count
        return int(count)
