"""One swap file: made, locked for as long as its process lives, read and written at offsets, removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from terrazzo.engine.offload.nvme.swap_folder import free_bytes, is_network, require_folder
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.errors import BadInput, SwapFailed, TerrazzoError
from terrazzo.messages import gib_text

__all__ = ["SwapFile", "left_behind_bytes", "lost", "sweep"]

_NAME = re.compile(r"terrazzo-swap-.+-rank\d{5,}\.bin")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_RESTART = "Start again from the last checkpoint, which does not depend on swap files."


class SwapFile:
    """A file of `size_bytes` in `folder` whose space is taken at once; nobody else may read it."""

    def __init__(self, folder: Path, name: str, size_bytes: int, direct: bool) -> None:
        """`name` holds `{nonce}`, which is replaced by random letters.

        Raises:
            BadInput: where it cannot be made.
        """
        require_folder(folder)
        self.folder, self.size_bytes = folder, size_bytes
        try:
            self.path, self.descriptor = _create(folder, name)
        except OSError as error:
            raise BadInput(
                f"No swap file can be made in '{folder}' ({error.strerror}): name a folder in offload.path that this "
                "user may write to."
            ) from None
        try:
            self._take_space()
            self.direct = direct and self._bypass_page_cache()
        except OSError as error:
            self.remove()
            raise self._not_begun(error) from None

    def read(self, position: int, into: memoryview) -> None:
        """Fill `into` from `position`.

        Raises:
            SwapFailed: if the file was cut off or the disk reports an error.
        """
        self._require_whole()
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self.descriptor, [into[done:]], position + done)
            except OSError as error:
                raise lost(self.path, position + done, f"cannot be read ({error.strerror})") from error
            if not count:
                raise lost(self.path, position + done, "ends too early")
            done += count

    def write(self, position: int, data: memoryview) -> None:
        """Write all of `data` at `position`.

        Raises:
            SwapFailed: as `read`, and if the disk is full.
        """
        self._require_whole()
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self.descriptor, [data[done:]], position + done)
            except OSError as error:
                raise self._not_written(position + done, error) from error

    @property
    def deleted(self) -> bool:
        """Whether its name is gone; the bytes stay for as long as this object has the file open."""
        return os.fstat(self.descriptor).st_nlink == 0

    def remove(self) -> None:
        """Remove the file, then let go of it."""
        with contextlib.suppress(OSError):  # what stays is swept by a later run
            os.unlink(self.path)
        self.leave()

    def leave(self) -> None:
        """Let go of the file without removing it."""
        os.close(self.descriptor)

    def _take_space(self) -> None:
        if not self.size_bytes:
            return
        try:
            os.posix_fallocate(self.descriptor, 0, self.size_bytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self.descriptor, self.size_bytes)

    def _bypass_page_cache(self) -> bool:
        """Turn O_DIRECT on and try it with one page; off again where the file system will not have it."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            if self.size_bytes:
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    os.pwritev(self.descriptor, [page], 0)
                    os.preadv(self.descriptor, [page], 0)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
            return False
        return True

    def _require_whole(self) -> None:
        """A write past the end of a file that was cut off would fill what is missing with zeros."""
        left_bytes = os.fstat(self.descriptor).st_size
        if left_bytes < self.size_bytes:
            raise lost(self.path, left_bytes, f"ends too early (it has been cut off from {self.size_bytes} bytes)")

    def _not_begun(self, error: OSError) -> BadInput:
        return BadInput(
            f"A swap file of {_exact(self.size_bytes)} does not fit into '{self.folder}' ({error.strerror}), which has "
            f"{self._free()} free: free some, name another folder in offload.path or several, or keep a share of the "
            "states elsewhere, such as optim: {nvme: 0.5, cpu: 0.5}."
            if error.errno in (*_FULL, errno.EFBIG)
            else f"The swap file '{self.path}' cannot be used ({error.strerror}): name another folder in offload.path."
        )

    def _not_written(self, position: int, error: OSError) -> TerrazzoError:
        if error.errno in _FULL:
            return SwapFailed(
                f"The swap file '{self.path}' cannot be written at byte {position} ({error.strerror}): "
                f"'{self.folder}' has {self._free()} free. Free some or name another folder in offload.path. {_RESTART}"
            )
        return lost(self.path, position, f"cannot be written ({error.strerror})")

    def _free(self) -> str:
        try:
            return _exact(free_bytes(self.folder))
        except OSError:
            return "an unknown number of bytes"


def sweep(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Remove the swap files of processes that are gone; returns their paths.

    A living process holds a lock on its file. Left alone are files where locks do not tell: those that cannot be opened
    or locked by this user, and all on network file systems, where other hosts' locks may not be seen.
    """
    return [str(path) for folder in folders for path in _swap_files(Path(folder)) if _is_dead(path, os.unlink)]


def left_behind_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes that `sweep` would free; nothing is removed, and several processes may ask at once."""
    sizes: list[int] = []
    for path in _swap_files(Path(folder)):
        _is_dead(path, lambda dead: sizes.append(dead.stat().st_blocks * 512), fcntl.LOCK_SH)
    return sum(sizes)


def _swap_files(folder: Path) -> list[Path]:
    """Swap files in `folder`, of whichever run; none where their locks cannot be relied on."""
    if not folder.is_dir() or is_network(folder):
        return []
    return [folder / name for name in sorted(os.listdir(folder)) if _NAME.fullmatch(name)]


def lost(path: Path, position: int, what: str, kind: type[SwapFailed] = SwapFailed) -> SwapFailed:
    """The error for state that lay at `position` of the file and is gone."""
    return kind(
        f"The swap file '{path}' {what} at byte {position}: the state that lay there is lost. {_RESTART} If nobody "
        "changed the file, look for errors of the disk (dmesg, smartctl -a) and name another folder in offload.path."
    )


def _create(folder: Path, name: str) -> tuple[Path, int]:
    """A fresh file under this process's lock."""
    while True:
        path = folder / name.replace("{nonce}", os.urandom(4).hex())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return path, descriptor
        with contextlib.suppress(FileNotFoundError):  # a sweep came between making and locking it, or who counts
            os.unlink(path)
        os.close(descriptor)


def _is_dead(path: Path, then: Callable[[Path], None], lock: int = fcntl.LOCK_EX) -> bool:
    """Whether no process has the file locked, and `then` was done with it under our own lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _lock(descriptor, lock):
            return False
        then(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Whether the file is locked by us now; None where there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def _exact(count_bytes: int) -> str:
    return f"{gib_text(count_bytes)} ({count_bytes} bytes)"
