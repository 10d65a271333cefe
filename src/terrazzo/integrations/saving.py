"""Saving where a checkpoint of the same name may lie, which other libraries replace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from terrazzo import checkpoint
from terrazzo.exchange import gather_json, on_first
from terrazzo.files import sync_folder

__all__ = ["save_over"]


def save_over(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> None:
    """`checkpoint.save`, in place of what lies under that name, which stays until the new one is complete. Collective.

    Whether it may be replaced is for the caller to say. A kill between the two renames at the end leaves the old one as
    `.NAME.replaced` and the new one as `NAME.new-...` beside it.
    """
    path = os.fspath(path)
    if not on_first(lambda: os.path.lexists(path)):
        checkpoint.save(path, model, optimizer, extra)
        return
    fresh = f"{path}.new-{gather_json(os.urandom(4).hex())[0]}"  # nobody's own name, which would be removed
    checkpoint.save(fresh, model, optimizer, extra)
    on_first(lambda: _take_place(path, fresh))


def _take_place(path: str, fresh: str) -> None:
    folder, name = os.path.split(os.path.abspath(path))
    replaced = os.path.join(folder, f".{name}.replaced")
    _remove(replaced)
    os.rename(path, replaced)
    os.rename(fresh, path)
    sync_folder(Path(folder))
    _remove(replaced)


def _remove(path: str) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
