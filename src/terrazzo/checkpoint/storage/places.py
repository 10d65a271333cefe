"""From a path or a URL to the store that is there, and the name of a checkpoint in it."""

from __future__ import annotations

import os
from pathlib import Path

from terrazzo.checkpoint.storage.local import LocalStore
from terrazzo.checkpoint.storage.remote import RemoteStore
from terrazzo.checkpoint.storage.store import CheckpointStore, not_saved
from terrazzo.errors import BadInput
from terrazzo.files import is_url

__all__ = ["check_new", "open_store", "store_and_name"]


def open_store(where: str | os.PathLike[str]) -> CheckpointStore:
    """A local folder, or what fsspec finds behind a URL such as `s3://bucket/runs/a`."""
    _check_type(where)
    if is_url(where):
        return RemoteStore(str(where))
    return LocalStore(Path(where))


def store_and_name(path: str | os.PathLike[str]) -> tuple[CheckpointStore, str]:
    """The store that a checkpoint is in, and its name there."""
    _check_type(path)
    if is_url(path):
        parent, _, name = str(path).rstrip("/").rpartition("/")
        return open_store(parent), name
    absolute = Path(path).absolute()
    return open_store(absolute.parent), absolute.name


def _check_type(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise BadInput(
            f"The path of a checkpoint, or of a folder of them, is the {type(path).__name__} {path!r:.80}: give text,"
            " such as 'runs/a/step-00000100'."
        )


def check_new(path: str | os.PathLike[str]) -> None:
    """Raises `BadInput` for a name that something has, or no checkpoint may have; `SaveFailed` if that is not known."""
    store, name = store_and_name(path)
    if name.startswith("."):
        raise BadInput(f"A checkpoint cannot be named '{name}': hidden names are those of saves that are not finished.")
    try:
        occupied = store.occupied(name)
    except BadInput as error:
        raise not_saved(path, error) from None
    if occupied:
        raise BadInput(f"'{path}' exists already and is not replaced: remove it, or use another name.")
