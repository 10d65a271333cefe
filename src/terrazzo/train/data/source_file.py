"""A file to read, wherever it is: on this machine, or behind a URL that fsspec opens."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.files import open_file_system

__all__ = [
    "COMPRESSIONS",
    "SourceFile",
    "folder_files",
    "is_visible",
    "plain_part",
    "reading",
    "stored_files",
]

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `name` is relative to its source, so that it is the same on every machine.

    `required` tells a file that was named by itself from one that was merely found. `stamp` changes with the content,
    and `size_bytes` is None, where the store says so. With `split` it is a folder, for the library `datasets` to read.
    """

    path: str
    name: str
    required: bool
    size_bytes: int | None
    stamp: int | str
    fs: Any = field(default_factory=LocalFileSystem)
    split: str | None = None

    @classmethod
    def local(cls, path: Path, name: str, *, required: bool) -> SourceFile:
        """A file of this machine."""
        status = path.stat()
        return cls(str(path), name, required, status.st_size, status.st_mtime_ns)

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def where(self) -> str:
        """The path or URL of the file, for errors."""
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    @property
    def compression(self) -> str | None:
        """`gzip`, `bz2`, `xz` or `zstd`, by the last suffix; None for others."""
        return COMPRESSIONS.get(PurePosixPath(self.name.lower()).suffix)

    @property
    def is_plain(self) -> bool:
        """Whether it is a local, uncompressed file, so that only the system and its format's reader can fail."""
        return self.is_local and self.split is None and self.compression is None

    @property
    def key(self) -> tuple[str, str, bool, int | None, int | str]:
        """A key that is equal for equal content, as far as can be told without reading it."""
        where = os.path.abspath(self.path) if self.is_local else self.where
        where = where if self.split is None else f"{where}#{self.split}"
        return where, self.name, self.required, self.size_bytes, self.stamp

    def open(self, compression: str | None = None) -> BinaryIO:
        """Open the file, decompressed if a `compression` is given. Raises `ImportError`: `zstd` is read by pyarrow."""
        stream = self.fs.open(self.path, "rb", compression=compression if compression != "zstd" else None)
        if compression == "zstd":
            from pyarrow import CompressedInputStream  # fsspec's stops at the end of the first frame

            stream = CompressedInputStream(stream, "zstd")
        return io.BufferedReader(stream, BUFFER_BYTES)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns whatever a store or a compressed file raises into `BadInput`, but for connections, which may come back."""
    try:
        yield
    except BadInput:
        raise
    except (ConnectionError, TimeoutError) as error:
        raise TerrazzoError(f"{what} cannot be read now ({type(error).__name__}: {error}). Start again.") from error
    except Exception as error:  # each library of a store has kinds of its own
        raise BadInput(
            f"{what} cannot be read ({type(error).__name__}: {str(error)[:300]}). Check that it is whole, and that this"
            " machine reaches it and may read it."
        ) from error


def stored_files(url: str) -> list[SourceFile]:
    """The files of a URL: one object, all visible ones under a prefix, or those that a glob matches, sorted by name.

    Raises:
        BadInput: there are none, the store cannot be reached, or its library is not installed.
    """
    what = f"data.source '{url}'"
    fs, path = open_file_system(url, what)
    with reading(what):
        fs.invalidate_cache()
        entries, root = _listed(fs, path)
        if root is None:
            return [_stored(fs, entries[0], path.rpartition("/")[2], required=True)]
        names = [one["name"].removeprefix(root).lstrip("/") for one in entries]
        pairs = [pair for pair in zip(entries, names, strict=True) if pair[0]["type"] == "file" and is_visible(pair[1])]
        files = [_stored(fs, one, name, required=False) for one, name in pairs]
    if not files:
        raise BadInput(
            f"{what} names no file that exists and is visible. Give the URL of a file, a prefix of several, or a glob."
        )
    return sorted(files, key=lambda file: PurePosixPath(file.name).parts)


def _listed(fs: Any, path: str) -> tuple[list[dict[str, Any]], str | None]:
    """One file's entry, and None; or those of all that a prefix or glob finds, and the part of the path they share."""
    try:
        info = fs.info(path)
        return ([info], None) if info["type"] == "file" else (list(fs.find(path, detail=True).values()), path)
    except FileNotFoundError:
        pass
    try:
        return (list(fs.glob(path, detail=True).values()), plain_part(path)) if glob.has_magic(path) else ([], path)
    except FileNotFoundError:
        return [], path


def _stored(fs: Any, info: dict[str, Any], name: str, *, required: bool) -> SourceFile:
    size = info.get("size")
    return SourceFile(info["name"], name, required, None if size is None else int(size), str(fs.ukey(info["name"])), fs)


def plain_part(pattern: str) -> str:
    """The leading parts of a path or a glob that have no wildcard: `/texts` of `/texts/*/a.txt`."""
    plain = "/".join(takewhile(lambda part: not glob.has_magic(part), pattern.split("/")))
    return plain or "/" * pattern.startswith("/")


def is_visible(name: str) -> bool:
    """Whether no part of a path is hidden. False also for the empty objects that some tools put in place of folders."""
    return all(part and not part.startswith(".") and part != "__pycache__" for part in name.split("/"))


def folder_files(root: Path, excluded: frozenset[str] = frozenset({"__pycache__"})) -> list[Path]:
    """Every visible file under a folder of this machine, sorted by its path below it."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).parts)
