"""Full weights by name, read from safetensors one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from terrazzo.errors import BadInput

__all__ = ["SafetensorsWeights"]


class SafetensorsWeights(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, or of all safetensors files of a folder, as a read-only mapping.

    Opening reads the files' headers only; each look-up reads that one tensor into CPU memory. Raises `BadInput` when
    there is no such file, a file is damaged, or two files hold the same name.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise BadInput(f"The folder '{path}' holds no .safetensors file. Pickled weights (.bin, .pt) are not read.")
        self._file_of: dict[str, Path] = {}
        for file in files:
            for name in _names(file):
                if name in self._file_of:
                    raise BadInput(f"'{name}' is in both '{self._file_of[name]}' and '{file}': remove one of them.")
                self._file_of[name] = file

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except FileNotFoundError:
        raise BadInput(f"There is no weights file '{file}'.") from None
    except (SafetensorError, OSError) as error:
        raise BadInput(f"'{file}' is not a readable safetensors file: {error}.") from None
