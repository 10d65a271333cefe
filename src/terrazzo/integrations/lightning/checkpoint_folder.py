"""Checkpoints of the engine as folders, under names that Lightning and Fabric give; and files that these wrote."""

from __future__ import annotations

import os
from typing import Any

import torch

from terrazzo.checkpoint.loading.load import own_folder
from terrazzo.errors import BadInput
from terrazzo.exchange import on_first, together
from terrazzo.integrations.shared.checkpoints import settle

__all__ = ["is_folder", "read_file"]


def is_folder(path: str) -> bool:
    """Whether a checkpoint of the engine has the name; else it is for `read_file`. Collective.

    Raises:
        BadInput: Nothing has the name.
    """
    settle(path)
    together(lambda: _check_there(path), BadInput)
    return on_first(lambda: own_folder(path) is not None, BadInput)


def read_file(path: str) -> dict[str, Any]:
    """What another strategy has saved as one file, on the host; every rank reads it. Collective.

    Raises:
        BadInput: It is a folder, or cannot be read on some rank.
    """
    return together(lambda: _loaded(path), BadInput)


def _check_there(path: str) -> None:
    if not os.path.lexists(path):
        raise BadInput(f"There is no checkpoint '{path}', and every rank must see it.")


def _loaded(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        raise BadInput(f"'{path}' is a folder that is not a checkpoint of Terrazzo's: try tz.checkpoint.load_weights.")
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint
