"""Saving where a checkpoint of the same name may lie, which other libraries replace."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from terrazzo import checkpoint
from terrazzo.exchange import gather_json, on_first
from terrazzo.files import sync_folder

__all__ = ["save_over", "settle"]


def save_over(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> None:
    """`checkpoint.save`, in place of what lies under that name, which stays until the new one is complete. Collective.

    Whether it may be replaced is for the caller to say. Between the two renames at the end nothing has the name: the
    old one is `.NAME.replaced-NONCE` and the new one `NAME.new-NONCE`. After a kill just there, `settle` goes on.
    """
    path = os.fspath(path)
    if not settle(path):
        checkpoint.save(path, model, optimizer, extra)
        return
    nonce = gather_json(os.urandom(4).hex())[0]  # a fixed name might be a user's own, which would be removed
    checkpoint.save(f"{path}.new-{nonce}", model, optimizer, extra)
    on_first(lambda: _take_place(path, nonce))


def settle(path: str | os.PathLike[str]) -> bool:
    """Finish what a kill has left of `save_over`: before reading, too. Collective.

    Returns:
        Whether there is anything under the name.
    """
    return on_first(lambda: _settle(os.fspath(path)))


def _take_place(path: str, nonce: str) -> None:
    folder, name = os.path.split(os.path.abspath(path))
    os.rename(path, os.path.join(folder, f".{name}.replaced-{nonce}"))
    _settle(path)


def _settle(path: str) -> bool:
    folder, name = os.path.split(os.path.abspath(path))
    replaced = re.compile(rf"\.{re.escape(name)}\.replaced-([0-9a-f]{{8}})")
    for old in filter(replaced.fullmatch, os.listdir(folder) if os.path.isdir(folder) else ()):
        fresh = f"{path}.new-{old[-8:]}"
        if not os.path.lexists(path) and os.path.lexists(fresh):
            os.rename(fresh, path)
            sync_folder(Path(folder))
        if os.path.lexists(path):  # else somebody has removed the new one since: the old one is not ours to bring back
            _remove(os.path.join(folder, old))
    return os.path.lexists(path)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)  # what stays is removed by the next one
    else:
        os.remove(path)
