"""Archives of `torch.save` inside of a file: of one that holds a tensor only the description is read here."""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from terrazzo.checkpoint.importers.parts.tree import Unusable, as_tree
from terrazzo.checkpoint.importers.parts.values import Chunk, Region
from terrazzo.engine.plan.rectangles import Rectangle
from terrazzo.errors import Damaged

__all__ = ["Archive", "ArchivedChunk", "PlainValues"]

# What tensors and plain values need, as torch pickles them.
_NAMES = re.compile(
    r"torch\._utils _rebuild_tensor_v[23]|torch(\.storage)? \w+Storage|torch \w*\d\w*|torch (bool|Size|device)"
    r"|collections OrderedDict|builtins (set|complex)|__builtin__ (set|complex)|_codecs encode"
)


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
                _check_archive(zipfile.ZipFile(io.BytesIO(data)), len(data))
                value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                self._known[data] = as_tree(value, str(archive.file))
            return self._known[data]
        except Exception as error:  # whatever a damaged archive makes torch raise
            return Unusable(f"it cannot be read without running code, or is damaged: {_reason(error)}")


class ArchivedChunk(Chunk):
    """A block that is one `torch.save` archive inside of a file."""

    def __init__(self, box: Rectangle, archive: Archive, dtype: torch.dtype, what: str) -> None:
        self.box = box
        self._archive, self._dtype, self._what = archive, dtype, what

    def region(self) -> Region:
        return self._region

    @cached_property
    def _region(self) -> Region:
        try:
            with self._archive.file.open("rb") as file:
                return self._described(_View(file, self._archive.offset, self._archive.count_bytes))
        except Exception as error:  # whatever a damaged archive makes torch raise
            archive = self._archive
            first, last = archive.offset, archive.offset + archive.count_bytes - 1
            raise Damaged(
                f"'{archive.file}', bytes {first} to {last}, {self._what}: not as torch writes it: {_reason(error)}."
            ) from None

    def _described(self, view: _View) -> Region:
        """On the device `meta` torch reads the description alone."""
        archive = zipfile.ZipFile(view)
        data = _check_archive(archive, self._archive.count_bytes)
        view.seek(0)
        tensor = torch.load(cast(BinaryIO, view), map_location="meta", weights_only=True)
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"there is a {type(tensor).__name__} that is not a dense tensor")
        if tuple(tensor.shape) != self.box.sizes or tensor.dtype != self._dtype:
            raise ValueError(f"there is {list(tensor.shape)} of {tensor.dtype}, not the block that was announced")
        first, strides = int(tensor.storage_offset()), tensor.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        if len(data) != 1 or (first + span) * self._dtype.itemsize > data[0].file_size:
            raise ValueError(f"its values are not all there ({len(data)} storages)")
        start = _first_byte(view, data[0])
        if start + data[0].file_size > self._archive.count_bytes:
            raise ValueError("its values are behind its end")
        start += self._archive.offset + first * self._dtype.itemsize
        return Region(self._archive.file, start, self._dtype, self.box.sizes, strides, self._what)


def _reason(error: Exception) -> str:
    """The line of torch's message that says what is wrong; others tell how to load it all the same."""
    text = str(error).partition("WeightsUnpickler error:")
    lines = (line.partition(" Please")[0].strip() for line in (text[2] or text[0]).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _check_archive(archive: zipfile.ZipFile, count_bytes: int) -> list[zipfile.ZipInfo]:
    """The storages in an archive whose loading needs no more memory than its `count_bytes`. Raises `ValueError`."""
    infos = archive.infolist()
    packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
    if packed or sum(info.file_size for info in infos) > count_bytes:
        raise ValueError("it is compressed, which torch's are not")
    for info in infos:
        if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
            raise ValueError("it was written on a big-endian machine")
        if info.filename.endswith("/data.pkl"):
            _check_names(archive.read(info))
    return [info for info in infos if info.filename.split("/")[-2:-1] == ["data"]]


def _check_names(pickled: bytes) -> None:
    """Refuse what `weights_only` would call: `bytearray` of any size, and tensors of any size."""
    for opcode, name, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and not _NAMES.fullmatch(str(name)):
            raise ValueError(f"it asks for {str(name).replace(' ', '.')}")


def _first_byte(view: _View, info: zipfile.ZipInfo) -> int:
    """Where in an archive a file's contents begin: after a header whose length is in it."""
    view.seek(info.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", view.read(4))
    return info.header_offset + 30 + int(name_bytes) + int(extra_bytes)


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
