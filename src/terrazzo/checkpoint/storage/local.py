"""Checkpoints in a local or shared POSIX folder: renamed when complete, flushed before, private to their owner."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.format.manifest import MANIFEST, SEAL
from terrazzo.checkpoint.storage.lock import Lock
from terrazzo.checkpoint.storage.store import (
    STEP,
    CheckpointDraft,
    CheckpointFolder,
    CheckpointStore,
    FileWriter,
    aside_name,
    is_checkpoint,
    read_errors_named,
)
from terrazzo.errors import Damaged
from terrazzo.files import replacing, sync_folder

__all__ = ["HiddenFolder", "LocalDraft", "LocalFolder", "LocalStore"]

_PARTIAL = re.compile(r"\.(?P<name>.+)\.(?:partial|removed)-[0-9a-f]+(?:\.lock)?")
_SYNC_FILE_RANGE_WRITE = 2  # from fcntl.h
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one on each machine, the same in its containers
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_DAMAGE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EIO)
"""Errors of a link, a socket, a device, a file where a folder was; and of a medium that has failed: bytes are gone."""
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700  # weights and settings are nobody else's business


class LocalStore(CheckpointStore):
    """Checkpoints as folders of `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.where = root, str(root)

    def names(self) -> list[str]:
        visible = [name for name in _listed(self.root) if not name.startswith(".")]
        return sorted(name for name in visible if _looks_complete(self.root / name))

    def candidates(self) -> list[str]:
        with read_errors_named(self.where):
            if not self.root.is_dir():  # a checkpoint of another format, in one file
                return []
            named = {name for name in _listed(self.root) if name.startswith(STEP) and (self.root / name).is_dir()}
        return sorted(named.union(self.names()))

    def unfinished(self) -> list[str]:
        with read_errors_named(self.where):
            hidden = [name for name in _listed(self.root) if name.startswith(".")] if self.root.is_dir() else []
        return sorted(name for name in hidden if ".partial-" in name and not name.endswith(".lock"))

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self.root / name)

    def itself(self) -> LocalFolder:
        return LocalFolder(self.root)

    def draft(self, name: str, nonce: str) -> LocalDraft:
        return LocalDraft(self.root, name, nonce)

    def remove(self, name: str) -> None:
        gone = self.root / f".{name}.removed-{os.urandom(4).hex()}"
        os.rename(self.root / name, gone)
        sync_folder(self.root)
        shutil.rmtree(gone, ignore_errors=True)  # what stays is swept by the next save

    def set_aside(self, name: str, why: str = "damaged") -> str:
        aside = aside_name(name, why)
        os.rename(self.root / name, self.root / aside)
        sync_folder(self.root)
        return aside

    def occupied(self, name: str) -> bool:
        with read_errors_named(str(self.root / name)):
            return _is_there(self.root / name)


class LocalFolder(CheckpointFolder):
    """The files of one checkpoint. Links and devices are not followed."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def cache(self) -> list[Any] | None:
        try:
            status = os.stat(self.path)
            return [_BOOT.read_text(), status.st_dev, status.st_ino]
        except OSError:
            return None

    def _size_bytes(self, file: str) -> int:
        with self.opened(file) as descriptor:
            return os.fstat(descriptor).st_size

    def _read_each(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> list[int]:
        with self.opened(file) as descriptor:
            return [_read(descriptor, offset, buffer) for offset, buffer in parts]

    def _has(self, file: str) -> bool:
        return _is_there(self.path / file)

    @contextlib.contextmanager
    def opened(self, file: str) -> Iterator[int]:
        """A descriptor of a plain file."""
        path, descriptor = self.path / file, -1
        try:  # a pipe would block without O_NONBLOCK
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Damaged(f"'{path}' is not a plain file.")
            yield descriptor
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            raise Damaged(f"'{path}' cannot be read as a plain file: {error.strerror}.") from None
        finally:
            if descriptor >= 0:
                os.close(descriptor)


class HiddenFolder:
    """A hidden folder beside the name that it gets when all is in it, the same for all processes that give its nonce.

    A lock tells one that is written into from what a dead process has left: that is removed when the next one begins.
    """

    def __init__(self, target: Path, nonce: str) -> None:
        self._target, self.path = target, target.parent / f".{target.name}.partial-{nonce}"
        self._lock = Lock(target.parent / f"{self.path.name}.lock")

    def begin(self, mode: int = 0o777) -> None:
        """Make it, in a folder that is there."""
        _sweep(self._target.parent)
        while self._lock.take() is False:  # first: a folder without one is taken for a dead process's
            time.sleep(0.01)  # another one that begins has looked whether anyone holds it
        os.mkdir(self.path, mode)

    def alive(self) -> bool:
        """Whether the process that began it is still there, as far as can be told."""
        return self._lock.is_taken()

    def committed(self) -> bool:
        """Whether it has its name."""
        return os.path.lexists(self._target) and not os.path.lexists(self.path)

    def commit(self) -> None:
        """Give it its name, durably. Raises `FileExistsError` where something has that."""
        sync_folder(self.path)
        if os.path.lexists(self._target):  # a rename would replace an empty folder
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._target))
        os.rename(self.path, self._target)
        try:
            sync_folder(self._target.parent)
        except OSError:  # nobody knows what a loss of power would leave: then it must not be seen
            os.rename(self._target, self.path)
            raise
        self.close()

    def abandon(self) -> None:
        """Remove it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.drop()


class LocalDraft(CheckpointDraft):
    """Files in a hidden folder."""

    def __init__(self, root: Path, name: str, nonce: str) -> None:
        self._root, self._hidden = root, HiddenFolder(root / name, nonce)
        self._path = self._hidden.path

    def begin(self) -> None:
        _make_folders(self._root)
        self._hidden.begin(_FOLDER_MODE)

    def create(self, file: str, size_bytes: int) -> FileWriter:
        return _LocalSink(self._path / file, size_bytes)

    def folder(self) -> LocalFolder:
        return LocalFolder(self._path)

    def note(self, file: str, data: bytes) -> None:
        with replacing(self._path / file, sync=False) as beside:
            beside.write_bytes(data)

    def noted(self, file: str) -> bytes:
        return (self._path / file).read_bytes()

    def has_note(self, file: str) -> bool:
        return os.path.lexists(self._path / file)

    def committed(self) -> bool:
        return self._hidden.committed()

    def alive(self) -> bool:
        return self._hidden.alive()

    def commit(self, manifest: bytes, seal: bytes) -> None:
        for note in self._path.glob("*.note"):
            os.unlink(note)
        for file, data in ((SEAL, seal), (MANIFEST, manifest)):
            sink = self.create(file, len(data))
            try:
                sink.write(memoryview(data))
            except BaseException:
                sink.abandon()
                raise
            sink.finish()
            if self.folder().read(file, len(data)) != data:
                raise Damaged(f"'{self._path / file}' was written and reads otherwise.")
        self._hidden.commit()

    def abandon(self) -> None:
        self._hidden.abandon()

    def close(self) -> None:
        self._hidden.close()


class _LocalSink:
    def __init__(self, path: Path, size_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path, self._written = path, 0
        self._descriptor = os.open(path, flags, _FILE_MODE)
        try:
            with self._named():
                _reserve(self._descriptor, size_bytes)
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, data: memoryview) -> None:
        data = data.cast("B")
        while data:
            with self._named():
                count = os.write(self._descriptor, data)
            _begin_writing(self._descriptor, self._written, count)
            self._written, data = self._written + count, data[count:]

    def finish(self) -> None:
        with self._named():
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)

    def abandon(self) -> None:
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error of a descriptor says nothing of its file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None


def _read(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` as far as the file goes; returns how many bytes there were."""
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += count
    return done


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Take the space of a file at once: a full disk is found before anything is written."""
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _begin_writing(descriptor: int, offset: int, count: int) -> None:
    """Let the disk begin with these bytes now, and not when all have been handed over."""
    if _libc is not None:
        _libc.sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def _make_folders(path: Path) -> None:
    """Make a folder and those above it, so that a loss of power cannot take them away with what is in them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def _listed(folder: Path) -> list[str]:
    with read_errors_named(str(folder)):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []


def _is_there(path: Path) -> bool:
    """As `os.path.lexists`, which takes any failure for a no."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def _looks_complete(folder: Path) -> bool:
    """Whether it is a checkpoint, or may be one that cannot be looked into: opening that one says why."""
    try:
        return is_checkpoint(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _sweep(root: Path) -> None:
    """Remove the hidden folders of saves, exports and removals that no living process is at."""
    for path in list(root.iterdir()):
        if not _PARTIAL.fullmatch(path.name) or path.name.endswith(".lock"):
            continue
        lock = Lock(root / f"{path.name}.lock")
        if lock.take():
            shutil.rmtree(path, ignore_errors=True)
            lock.drop()
    for path in root.glob(".*.lock"):
        if _PARTIAL.fullmatch(path.name) and not (root / path.name.removesuffix(".lock")).exists():
            lock = Lock(path)
            if lock.take():
                lock.drop()
