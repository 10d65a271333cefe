"""Writing files, so that readers find the old one or the new one; how sizes are said; the way to a store behind a URL.

What may have been made by a stranger is read by `untrusted_files`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from terrazzo.errors import BadInput, install

__all__ = [
    "CHECKPOINTS",
    "GIB",
    "gib_text",
    "open_file_system",
    "replace_file",
    "replacing",
    "sync_folder",
    "to_nowhere",
]

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of a run, where nothing else was said."""

GIB = 2**30
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}
"""The extra of ours that a protocol needs; of others fsspec says what to install."""


def gib_text(count_bytes: float) -> str:
    """As messages about room have it."""
    return f"{count_bytes / GIB:,.2f} GiB"


def open_file_system(url: str, what: str) -> tuple[Any, str]:
    """Fsspec's file system for a URL, and the path in it; `what` is what errors call it.

    Raises:
        BadInput: its package is not installed, or it is no URL that fsspec knows.
    """
    from fsspec.core import url_to_fs  # only those that have URLs wait for it

    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        edit = install(extra) if extra else str(error)
        raise BadInput(f"{what} needs a package that is not installed. {edit}.") from error
    except ValueError as error:
        raise BadInput(f"{what} cannot be opened: {error}. Correct the URL.") from error
    return fs, path.rstrip("/")


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool) -> Iterator[Path]:
    """A hidden path beside `path`, to write a file at: it takes the place of `path` once the block has succeeded.

    So a reader finds the old file or the new one, and each is whole. Nothing stays behind of a block that fails, and
    `path` stays as it is where the block leaves no file.

    Args:
        sync: the new file is on the disk before it is renamed, and the rename after it: a loss of power leaves the old
            file or the new one. Without it such a loss may leave an empty file.
    """
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    try:
        yield beside
        if not beside.exists():
            return
        if sync:
            _sync(beside, os.O_RDONLY)
        beside.replace(path)
        if sync:
            sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def replace_file(path: Path, text: str, *, sync: bool) -> None:
    """Give a small file this text, in UTF-8, all at once; see `replacing`."""
    with replacing(path, sync=sync) as beside:
        beside.write_text(text, encoding="utf-8")


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk, so that a rename in it survives a loss of power."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_nowhere(stream: IO[str]) -> None:
    """Whatever waits in a stream or is written to it goes nowhere from here on. One without a descriptor is left."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
