"""What a model folder of transformers says besides its weights: the model's config, and the files of its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.hub_names import HubTensor
from terrazzo.errors import BadInput
from terrazzo.untrusted_files import check_model_file, read_json, read_plain

__all__ = ["CONFIG_FILE", "ModelDescription", "describe_folder", "read_model_config", "tokenizer_files"]

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.*",
)
MAX_CONFIG_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 28  # of one other file; the largest vocabularies have some 30 MB


@dataclass(frozen=True)
class ModelDescription:
    """What a Hugging Face model folder says besides its weights.

    Attributes:
        config: the contents of config.json.
        files: further files by name, such as tokenizer.json.
        rename: from a tensor's name in the checkpoint to its name in `transformers`.
        tensors: what `transformers` has of a tensor, by the name in the checkpoint, where that is more than one.
    """

    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    rename: Callable[[str], str] = str
    tensors: Mapping[str, Sequence[HubTensor]] = field(default_factory=dict)

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[HubTensor]:
        """What a folder has of a tensor of the checkpoint."""
        return self.tensors.get(name) or [HubTensor(self.rename(name), shape)]


def describe_folder(folder: Path) -> ModelDescription:
    """The description in the Hugging Face folder that a model was built from.

    Raises: `BadInput` for a bad config, and for files that are links to elsewhere, too large or no plain files.
    """
    return ModelDescription(read_model_config(folder), _read_files(folder, (GENERATION_FILE, *TOKENIZER_PATTERNS)))


def read_model_config(folder: Path) -> dict[str, Any]:
    """The contents of a model folder's config.json. Raises: `BadInput` where there is none, or it is something else."""
    path = folder / CONFIG_FILE
    if not os.path.lexists(path):
        raise BadInput(
            f"The model folder {str(folder)!r} has no readable {CONFIG_FILE}. Give a local folder as 'save_pretrained' "
            "writes it; models are never downloaded."
        )
    check_model_file(path, MAX_CONFIG_BYTES)
    values = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(values, dict):
        raise BadInput(
            f"{path} holds a JSON {type(values).__name__}, but a model config is an object with a model_type."
        )
    return values


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer in a Hugging Face folder, by name. Raises: those of `describe_folder`."""
    return _read_files(folder, TOKENIZER_PATTERNS)


def _read_files(folder: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """Files that go into what is exported, so none that the folder only links to: it may be somebody else's."""
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if not path.is_dir()]
    for path in paths:
        check_model_file(path, MAX_FILE_BYTES)
    return {path.name: read_plain(path, MAX_FILE_BYTES) for path in paths}
