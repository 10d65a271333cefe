"""Checkpoints behind a URL, through fsspec: object stores have no rename, so the manifest, written last, is the commit.

What has no manifest is not a checkpoint; what an interrupted save left under a name, and only that, is removed by the
next save under the same name. There are no locks: two runs must not write to the same URL.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.checkpoint.format.manifest import FILE_NAME, MANIFEST, SEAL
from terrazzo.checkpoint.storage.store import (
    CheckpointDraft,
    CheckpointFolder,
    CheckpointStore,
    FileWriter,
    aside_name,
    read_errors_named,
)
from terrazzo.errors import BadInput, Damaged
from terrazzo.files import open_file_system

__all__ = ["RemoteStore"]

_OF_A_SAVE = re.compile(rf"{FILE_NAME.pattern}|{re.escape(SEAL)}|.+\.note")  # before its manifest is there


class RemoteStore(CheckpointStore):
    """Checkpoints as prefixes of a URL."""

    def __init__(self, url: str) -> None:
        fs, self._root = open_file_system(url, f"The checkpoints' place '{url}'")
        self._fs: Any = _InOSErrors(fs)
        self.where = url

    def names(self) -> list[str]:
        self._fs.invalidate_cache()  # another process may have committed
        with read_errors_named(self.where):
            try:
                entries = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        folders = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return sorted(name for name in folders if self.folder(name).has(MANIFEST))

    def folder(self, name: str) -> RemoteFolder:
        return RemoteFolder(self._fs, f"{self._root}/{name}", f"{self.where}/{name}")

    def itself(self) -> RemoteFolder:
        return RemoteFolder(self._fs, self._root, self.where)

    def draft(self, name: str, nonce: str) -> RemoteDraft:
        return RemoteDraft(self._fs, self.folder(name), nonce)

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._root}/{name}/{MANIFEST}")
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def set_aside(self, name: str, why: str = "damaged") -> str:
        aside = aside_name(name, why)
        self._fs.mv(f"{self._root}/{name}", f"{self._root}/{aside}", recursive=True)
        return aside

    def occupied(self, name: str) -> bool:
        with read_errors_named(f"{self.where}/{name}"):
            return _is_there(self._fs, f"{self._root}/{name}/{MANIFEST}")


class RemoteFolder(CheckpointFolder):
    """The objects of one checkpoint."""

    skip_bytes = 1 << 20  # what comes in the time that a request takes

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs, self.path, self.where = fs, path, where

    def _size_bytes(self, file: str) -> int:
        return int(self._fs.size(f"{self.path}/{file}"))

    def _read_each(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> list[int]:
        return [self._read(file, offset, buffer) for offset, buffer in parts]

    def _read(self, file: str, offset: int, buffer: memoryview) -> int:
        data = self._fs.cat_file(f"{self.path}/{file}", start=offset, end=offset + len(buffer))
        if len(data) > len(buffer):
            wanted = f"{len(buffer)} bytes from byte {offset} on"
            raise Damaged(f"'{self.where}/{file}': asked for {wanted}, the server sent {len(data)}.")
        buffer[: len(data)] = data
        return len(data)

    def _has(self, file: str) -> bool:
        return _is_there(self._fs, f"{self.path}/{file}")


class RemoteDraft(CheckpointDraft):
    """Objects under the final name, which no reader takes for a checkpoint before the manifest is there.

    Attempts at one name share its objects: the notes have the `nonce` too, since one that hung may yet write its own.
    """

    def __init__(self, fs: Any, folder: RemoteFolder, nonce: str) -> None:
        self._fs, self._folder, self._nonce = fs, folder, nonce

    def begin(self) -> None:
        if (stranger := self._stranger()) is not None:
            raise BadInput(
                f"'{self._folder.where}' holds '{stranger}', which is not of a save that was interrupted, and is not"
                " replaced: remove it, or use another name."
            )
        if self._fs.exists(self._folder.path):
            self._fs.rm(self._folder.path, recursive=True)
        self._fs.makedirs(self._folder.path, exist_ok=True)

    def create(self, file: str, size_bytes: int) -> FileWriter:
        return _RemoteSink(_InOSErrors(self._fs.open(f"{self._folder.path}/{file}", "wb")))

    def folder(self) -> None:
        return None

    def note(self, file: str, data: bytes) -> None:
        self._fs.pipe_file(self._note(file), data)

    def noted(self, file: str) -> bytes:
        data: bytes = self._fs.cat_file(self._note(file))
        return data

    def has_note(self, file: str) -> bool:  # a store that does not answer is asked again
        return bool(self._fs.exists(self._note(file)))

    def committed(self) -> bool:
        return bool(self._fs.exists(f"{self._folder.path}/{MANIFEST}"))

    def alive(self) -> bool:
        return True  # nobody can tell

    def commit(self, manifest: bytes, seal: bytes) -> None:
        for path in self._fs.glob(f"{self._folder.path}/*.note"):
            self._fs.rm_file(path)
        self._fs.pipe_file(f"{self._folder.path}/{SEAL}", seal)
        self._fs.pipe_file(f"{self._folder.path}/{MANIFEST}", manifest)

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # of whatever kind the store has
            if self._stranger() is None:
                self._fs.rm(self._folder.path, recursive=True)

    def close(self) -> None:
        pass

    def _note(self, file: str) -> str:
        return f"{self._folder.path}/{self._nonce}-{file}"

    def _stranger(self) -> str | None:
        """Something under the name that no unfinished save writes: a manifest, a folder, a file of anyone else's."""
        self._fs.invalidate_cache()
        path = self._folder.path.rstrip("/")
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return None
        for entry in entries:
            name = entry["name"].rstrip("/")
            itself = name == path and not entry.get("size")  # as some stores list a prefix
            if not itself and (entry["type"] != "file" or not _OF_A_SAVE.fullmatch(name.rpartition("/")[2])):
                return str(name.rpartition("/")[2])
        return None


def _is_there(fs: Any, path: str) -> bool:
    """As `fs.exists`, which of some stores takes any failure for a no."""
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True


class _InOSErrors:
    """A file system or a file whose methods raise `OSError` alone: libraries of object stores have errors of their own.

    Whoever saves or loads then takes them for what they are, a store that does not answer, and not for a bug.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._theirs, name)
        return _in_os_errors(found) if callable(found) else found


def _in_os_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return call


class _RemoteSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        self._file.discard() if hasattr(self._file, "discard") else self._file.close()
