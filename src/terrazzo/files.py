"""Replacing files atomically, the user's cache, and file systems behind URLs.

Files that strangers may have made are read by `untrusted_files`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.messages import install

__all__ = [
    "CHECKPOINTS",
    "cache_folder",
    "is_url",
    "open_file_system",
    "replace_file",
    "replacing",
    "sync_folder",
]

CHECKPOINTS = "checkpoints"
"""The default folder of checkpoints, in the folder of a run."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}
"""The extra of this package that a protocol needs; for other protocols fsspec says what to install."""


def cache_folder(name: str) -> Path:
    """The folder of that name for what Terrazzo keeps of the user's between runs; it need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "terrazzo" / name


def is_url(where: str | os.PathLike[str]) -> bool:
    """Whether it is behind a URL, and not a local path."""
    return "://" in str(where)


def open_file_system(url: str, what: str) -> tuple[Any, str]:
    """Fsspec's file system for a URL, and the path in it; `what` names the URL in errors.

    Raises:
        BadInput: a package for it is not installed, or fsspec does not know the URL.
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
    """A hidden path beside `path` to write a file to, which replaces `path` when the block has succeeded.

    Readers find the old file or the new one, each complete, with the mode that the old one had; until then only this
    user can read what replaces it. Where `path` is a symbolic link, the file that it names is replaced, as by
    `open(path, "w")`. A block that fails leaves nothing behind, and one that removes the file does not change `path`.

    Args:
        sync: flush the new file to the disk before the rename, and the rename after it: a power failure then leaves the
            old file or the new one. Without it, it may leave an empty file.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    try:
        if path.exists():
            beside.touch(0o600)
        yield beside
        if not beside.exists():
            return
        with contextlib.suppress(FileNotFoundError):
            beside.chmod(stat.S_IMODE(path.stat().st_mode))
        if sync:
            _sync(beside, os.O_RDONLY)
        beside.replace(path)
        if sync:
            sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def replace_file(path: Path, text: str, *, sync: bool) -> None:
    """Replace a small file by one with this text, in UTF-8; see `replacing`."""
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
