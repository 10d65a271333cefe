"""Folders in the temporary folder that are removed at the end, whichever process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from terrazzo.errors import BadInput

__all__ = ["ScratchFolder"]

_MARKER = ".terrazzo-scratch"
"""A file in each of these folders: a folder without it is never removed, whatever its name."""


class ScratchFolder:
    """A folder that processes of one user share under a `name`. The last one to leave removes it.

    Each process holds a shared lock on it while it lives. A folder with our name and marker that is not locked was left
    by dead processes: whoever opens another folder removes it.

    Raises:
        BadInput: another user has a folder of that name.
    """

    def __init__(self, name: str) -> None:
        prefix = f".terrazzo-scratch-{os.getuid()}-"
        self.path = Path(tempfile.gettempdir()) / f"{prefix}{name}"
        for path in self.path.parent.glob(f"{prefix}*"):
            if path != self.path:
                _remove_if_dead(path)
        self._descriptor = self._join()

    def _join(self) -> int:
        while True:
            try:
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir(mode=0o700)
                descriptor = _open(self.path)
            except FileNotFoundError:
                continue  # removed by the last one before us
            try:
                _lock(descriptor, fcntl.LOCK_SH)  # waits only for a process that is removing it
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    (self.path / _MARKER).touch()
                    return descriptor
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def leave(self, *, keep: bool = False) -> None:
        """Release the folder. The last process removes it, unless `keep` leaves it for those that still come."""
        if not keep and _lock(self._descriptor, fcntl.LOCK_EX):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.leave()


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError):
        raise _not_ours(path) from None
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        os.close(descriptor)
        raise _not_ours(path)
    return descriptor


def _not_ours(path: Path) -> BadInput:
    return BadInput(
        f"'{path}' is not a folder that only this user can write to: remove it, or set TMPDIR to another folder."
    )


def _lock(descriptor: int, kind: int) -> bool:
    """Try to lock; returns whether it is locked. False also if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | (fcntl.LOCK_NB if kind == fcntl.LOCK_EX else 0))
    except OSError:
        return False
    return True


def _remove_if_dead(path: Path) -> None:
    with contextlib.suppress(OSError, BadInput), _opened(path) as descriptor:
        os.stat(_MARKER, dir_fd=descriptor, follow_symlinks=False)
        if _lock(descriptor, fcntl.LOCK_EX):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = _open(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
