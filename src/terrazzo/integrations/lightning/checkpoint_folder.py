"""Checkpoints of the engine as folders, under names that Lightning and Fabric give; and files that these wrote."""

from __future__ import annotations

import os
import pickle
import re
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
        BadInput: It is a folder, holds objects of classes, or cannot be read on some rank.
    """
    return together(lambda: _loaded(path), BadInput)


def _check_there(path: str) -> None:
    if not os.path.lexists(path):
        raise BadInput(f"There is no checkpoint '{path}', and every rank must see it.")


def _loaded(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        raise BadInput(f"'{path}' is a folder that is not a checkpoint of Terrazzo's: try tz.checkpoint.load_weights.")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInput(f"'{path}' {_why_not(str(error))}") from error
    return checkpoint


def _why_not(said: str) -> str:
    """What a file holds beside tensors and plain values, by torch's message, and the edit."""
    if (named := re.search(r"GLOBAL ([\w.]+)", said)) is None:
        return "is no file of tensors and plain values that torch.load(weights_only=True) reads: use another one."
    return (
        f"holds an object of {named[1]}, and loading it would run code. Give save_hyperparameters plain values, such "
        "as vars(args) for an argparse.Namespace, and save again; or, where you trust the file, allow that class "
        f"before: torch.serialization.add_safe_globals([{named[1]}])."
    )
