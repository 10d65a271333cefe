"""A folder that appears under its name when all of its files are on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from terrazzo.checkpoint.storage.local import HiddenFolder
from terrazzo.errors import BadInput, SaveFailed

__all__ = ["new_file", "new_folder"]


@contextlib.contextmanager
def new_folder(out: Path, size_bytes: int) -> Iterator[Path]:
    """A hidden folder beside `out` to write `size_bytes` into; it gets the name `out` when the block has succeeded.

    Raises:
        BadInput: `out` exists, the folder that it shall be in does not, or that has too little space.
        SaveFailed: a file could not be written; nothing is left. What a kill leaves, the next export or save removes.
    """
    out = Path(os.path.abspath(out))
    _check(out, size_bytes)
    hidden = HiddenFolder(out, os.urandom(4).hex())
    try:
        hidden.begin()
        yield hidden.path
        hidden.commit()
    except BaseException as error:
        hidden.abandon()
        if isinstance(error, OSError):
            raise SaveFailed(f"The export to '{out}' failed, and nothing of it is left: {error}.") from error
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, on the disk when the block has succeeded."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _check(out: Path, size_bytes: int) -> None:
    if os.path.lexists(out):
        raise BadInput(f"'{out}' exists already and is not replaced: remove it, or export to another name.")
    if not out.parent.is_dir():
        raise BadInput(f"There is no folder '{out.parent}' to export '{out.name}' into: create it, or use another one.")
    free_bytes = shutil.disk_usage(out.parent).free
    if free_bytes < size_bytes:
        raise BadInput(
            f"The export to '{out}' needs {size_bytes / 1e9:.3f} GB, and there are {free_bytes / 1e9:.3f} GB free: make"
            " room, or export to another disk."
        )
