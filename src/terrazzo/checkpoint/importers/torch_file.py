"""Files of `torch.save`: a model's state dict, or a program's with the optimizer's and more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.importers.parts.numbering import NOT_KNOWN, ModelNames
from terrazzo.checkpoint.importers.parts.optimizer import add_program
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource
from terrazzo.checkpoint.importers.parts.tree import as_tree
from terrazzo.checkpoint.importers.parts.unpickle import load_torch_file
from terrazzo.errors import BadInput

__all__ = ["TorchFile", "read_torch_file"]


class TorchFile(StateDictSource):
    """A file that `torch.save` wrote, of dense tensors and plain values. Its tensors are mapped, not read.

    Tensors that share their memory are tied. Raises `BadInput`.
    """

    format = "torch.save"

    def __init__(self, path: Path, names: ModelNames = NOT_KNOWN) -> None:
        super().__init__(str(path))
        tree = read_torch_file(path)
        if not isinstance(tree, Mapping):
            raise BadInput(f"'{path}' holds a {type(tree).__name__}, not a state dict: save model.state_dict().")
        add_program(self, {str(key): value for key, value in tree.items()}, names)


def read_torch_file(path: Path) -> Any:
    """What a file holds, as a tree. Raises `BadInput`."""
    return as_tree(load_torch_file(path, {}), str(path))
