"""Who may save in a folder of checkpoints: one run at a time."""

from __future__ import annotations

import os

from terrazzo.checkpoint.storage.local import LocalStore
from terrazzo.checkpoint.storage.lock import Lock
from terrazzo.checkpoint.storage.places import open_store
from terrazzo.errors import BadInput
from terrazzo.messages import warn

__all__ = ["claim"]


def claim(folder: str | os.PathLike[str], owner: str) -> Lock | None:
    """Keep other runs from saving in `folder` for as long as this process lives; None behind a URL.

    On a file system without locks nothing keeps them from it, which a warning says.

    Raises:
        BadInput: another run has it; the message says what its `owner` was. Or it cannot be written to.
    """
    store = open_store(folder)
    if not isinstance(store, LocalStore):
        return None
    lock = Lock(store.root / ".lock")
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        taken = lock.take(owner)
    except OSError as error:
        raise BadInput(
            f"Checkpoints cannot be saved in '{store.where}': {error.strerror}. Make the folder writable, or name"
            " another."
        ) from None
    if taken is False:
        raise BadInput(
            f"Another run saves in '{store.where}': {lock.holder()}. Wait for it, or give this run another folder."
        )
    if taken is None:
        warn(
            f"The file system of '{store.where}' has no locks: nothing keeps another run from saving there too. Give"
            " each run a folder of its own."
        )
    return lock
