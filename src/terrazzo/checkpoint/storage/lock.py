"""A file that says who is at work, and that its process cannot leave locked behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from terrazzo.processes.ending import leaves_to_parent

__all__ = ["Lock"]


class Lock:
    """A file that one process holds for as long as it lives, wherever it dies. Not re-entrant."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        leaves_to_parent(self)

    def take(self, owner: str = "") -> bool | None:
        """Whether it is ours now, None where the file system has no locks; `owner` is for `holder` of others."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                taken = _locked(descriptor)
                if taken and not self._is_at_path(descriptor):
                    continue  # its holder removed it after we had opened it
                if taken:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, owner.encode(), 0)
                    self._descriptor = descriptor
                return taken
            finally:
                if self._descriptor != descriptor:
                    os.close(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def in_place(self) -> bool:
        """Whether the file at its path is still the one that was taken; so it is where nothing was taken."""
        try:
            return self._descriptor is None or self._is_at_path(self._descriptor)
        except OSError:
            return False

    def is_taken(self) -> bool:
        """Whether some living process has it, as far as the file system can tell."""
        if not self._path.exists():
            return False
        probe = Lock(self._path)
        taken = probe.take()
        probe.release()
        return taken is not True

    def release(self) -> None:
        """Let go of it and leave the file."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked from this one has the descriptor too
            finally:
                os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child: let go of it, while the parent goes on to hold it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def holder(self) -> str:
        """What the process that holds it said of itself."""
        try:
            return self._path.read_text()
        except OSError:
            return ""

    def drop(self) -> None:
        """Remove it, where it is ours."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # what stays is swept by the next save
                self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closed it is, whatever was said
                self.release()


def _locked(descriptor: int) -> bool | None:
    """Whether the file is locked by us now; None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True
