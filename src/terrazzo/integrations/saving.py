"""Saving where a checkpoint of the same name may lie, which other libraries replace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from terrazzo import checkpoint
from terrazzo.checkpoint.exchange import gather_json, together
from terrazzo.errors import SaveFailed
from terrazzo.files import sync_folder

__all__ = ["on_first", "save_over"]


def save_over(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any]
) -> None:
    """`checkpoint.save`, in place of what lies under that name, which stays until the new one is complete. Collective.

    Whether it may be replaced is for the caller to say. A kill between the two renames at the end leaves the old one as
    `.NAME.replaced` and the new one as `NAME.new-...` beside it.
    """
    path = os.fspath(path)
    if not gather_json(os.path.lexists(path))[0]:
        checkpoint.save(path, model, optimizer, extra)
        return
    fresh = f"{path}.new-{gather_json(os.urandom(4).hex())[0]}"  # nobody's own name, which would be removed
    checkpoint.save(fresh, model, optimizer, extra)
    on_first(lambda: _take_place(path, fresh))


def on_first(work: Callable[[], object]) -> None:
    """Rank 0 works; what it raises is raised on every rank, `SaveFailed` where it is no error of ours. Collective."""
    together(lambda: work() if dist.get_rank() == 0 else None, SaveFailed)


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
