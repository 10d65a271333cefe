"""Where checkpoints are kept: what a folder of them offers, whether it is local or behind a URL.

A `CheckpointStore` is a folder of checkpoints, a `CheckpointFolder` one of them to read, a `CheckpointDraft` one that
is being written. A draft is invisible until `commit`, which is atomic: of a local folder a rename, elsewhere the
arrival of the manifest.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from terrazzo.checkpoint.format.manifest import FILE_NAME, MANIFEST, SEAL
from terrazzo.errors import BadInput, Damaged, SaveFailed

__all__ = [
    "STEP",
    "CheckpointDraft",
    "CheckpointFolder",
    "CheckpointStore",
    "FileWriter",
    "aside_name",
    "is_aside",
    "is_checkpoint",
    "not_saved",
    "read_errors_named",
    "step_name",
    "step_of",
]

STEP = "step-"
"""How the names of a run's checkpoints begin, damaged ones that were put aside too."""
_STEP_NAME = re.compile(rf"{STEP}([0-9]{{8,}})")


class FileWriter(Protocol):
    """A file being written, from its first byte to its last."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""

    def finish(self) -> None:
        """Put the whole file where a loss of power does not reach it, and close it."""

    def abandon(self) -> None:
        """Close it without asking for anything."""


@contextlib.contextmanager
def read_errors_named(where: str) -> Iterator[None]:
    """Raises `BadInput` for what the system says against reading `where`: that proves no damage of what is there."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"'{where}' cannot be read: {error.strerror or error}. Whether it is whole is not known: have the file"
            " system answer, or let this user read there, and start again."
        ) from error


def not_saved(where: str | os.PathLike[str], problem: object) -> SaveFailed:
    """The error of a save that has failed; what it has written of the checkpoint is not visible."""
    return SaveFailed(
        f"The checkpoint '{where}' was not saved: {str(problem).rstrip('.')}. Earlier ones are as they were."
    )


class CheckpointFolder(ABC):
    """One checkpoint.

    Raises `Damaged` naming the file for one that is missing, too short, not a plain file, or on a medium that has
    failed, and `BadInput` naming it where that is not known, because the system does not let it be read. Stores raise
    `OSError` of the methods for them.
    """

    where: str

    def size_bytes(self, file: str) -> int:
        """The bytes of a file in the folder."""
        with self._existing(file):
            return self._size_bytes(file)

    skip_bytes = 4096
    """Reading through so many bytes costs no more than another read behind them. A disk gives whole pages."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the bytes at `offset`."""
        self.read_each(file, [(offset, buffer)])

    def read_each(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each of the buffers from the bytes at its offset."""
        with self._existing(file):
            counts = self._read_each(file, parts)
        for (offset, buffer), count in zip(parts, counts, strict=True):
            if count < len(buffer):
                raise Damaged(f"'{self.where}/{file}' ends at byte {offset + count}: it has been cut off.")

    def has(self, file: str) -> bool:
        """Whether there is such an entry."""
        with self._existing(file):
            return self._has(file)

    @contextlib.contextmanager
    def _existing(self, file: str) -> Iterator[None]:
        with read_errors_named(f"{self.where}/{file}"):
            try:
                yield
            except FileNotFoundError:
                raise Damaged(f"The checkpoint '{self.where}' has no {file}.") from None

    @abstractmethod
    def _size_bytes(self, file: str) -> int:
        """For stores."""

    @abstractmethod
    def _read_each(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> list[int]:
        """For stores: as far as the file goes; returns how many bytes there were for each buffer."""

    @abstractmethod
    def _has(self, file: str) -> bool:
        """For stores."""

    def cache(self) -> list[Any] | None:
        """As plain JSON, equal for processes whose reads come from the same memory; None where that is not known."""
        return None

    def read(self, file: str, limit: int) -> bytes:
        """A whole small file; `Damaged` when it is larger than `limit` bytes."""
        size = self.size_bytes(file)
        if size > limit:
            raise Damaged(f"'{self.where}/{file}' has {size} bytes, more than the {limit} that it may have.")
        buffer = bytearray(size)
        self.read_into(file, 0, memoryview(buffer))
        return bytes(buffer)


class CheckpointDraft(ABC):
    """A checkpoint being written. One rank begins and ends it; all of them write files into it."""

    @abstractmethod
    def begin(self) -> None:
        """Make room for it, and remove what interrupted saves left behind."""

    @abstractmethod
    def create(self, file: str, size_bytes: int) -> FileWriter:
        """A new file that will have `size_bytes`."""

    @abstractmethod
    def folder(self) -> CheckpointFolder | None:
        """What has been written so far, to read back; None where the store itself checks what it is sent."""

    @abstractmethod
    def note(self, file: str, data: bytes) -> None:
        """Leave a small file for the rank that commits, all at once. It is not part of the checkpoint."""

    @abstractmethod
    def noted(self, file: str) -> bytes:
        """What was left under that name; raises `FileNotFoundError`."""

    @abstractmethod
    def has_note(self, file: str) -> bool:
        """Whether something was left under that name."""

    @abstractmethod
    def committed(self) -> bool:
        """Whether the rank that commits has done so."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the process that began it is still there, as far as can be told."""

    @abstractmethod
    def commit(self, manifest: bytes, seal: bytes) -> None:
        """Drop the notes, add the manifest and make the checkpoint visible under its name, durably."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove it, as far as that is possible. For the process that began it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what `begin` took, when another process has committed."""


class CheckpointStore(ABC):
    """A folder of checkpoints. Asked what there is, raises `BadInput` where the system does not let that be seen."""

    where: str

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the complete checkpoints in the place, whoever wrote them."""

    def candidates(self) -> list[str]:
        """The names of complete checkpoints, and of what has the name of one, damaged as it may be."""
        return self.names()

    def unfinished(self) -> list[str]:
        """Hidden folders of saves that are under way, or were interrupted, where the store hides them."""
        return []

    @abstractmethod
    def folder(self, name: str) -> CheckpointFolder:
        """One checkpoint to read."""

    @abstractmethod
    def itself(self) -> CheckpointFolder:
        """The place, as if it were a checkpoint."""

    @abstractmethod
    def draft(self, name: str, nonce: str) -> CheckpointDraft:
        """One to be written. `nonce` tells attempts at the same name apart and is the same on all ranks."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Make a checkpoint invisible, at once, and then remove its files."""

    @abstractmethod
    def set_aside(self, name: str, why: str = "damaged") -> str:
        """Give a checkpoint a name that no series has, with a word that says why, and return that; its files stay."""

    @abstractmethod
    def occupied(self, name: str) -> bool:
        """Whether anything has that name."""


def step_name(step: int) -> str:
    """The name, in a folder of them, of the checkpoint of `step`."""
    return f"{STEP}{step:08d}"


def step_of(path: str | os.PathLike[str]) -> int | None:
    """The step that a checkpoint's name or path tells; None of a name that `step_name` does not give."""
    name = os.fspath(path).rstrip("/").rpartition("/")[2]
    match = _STEP_NAME.fullmatch(name)
    return step if match and step_name(step := int(match[1])) == name else None


def aside_name(name: str, why: str) -> str:
    """A new name, which no series has, for a checkpoint that is put aside; `why` is a word of it."""
    return f"{name}.{why}-{os.urandom(2).hex()}"


def is_aside(name: str) -> bool:
    """Whether a name is one that `aside_name` gives to a step."""
    return step_of(name.partition(".")[0]) is not None and "." in name


def is_checkpoint(entries: Iterable[str]) -> bool:
    """Whether a visible folder of these entries is one that was committed, as far as it is still there."""
    return any(entry in (MANIFEST, SEAL) or FILE_NAME.fullmatch(entry) for entry in entries)
