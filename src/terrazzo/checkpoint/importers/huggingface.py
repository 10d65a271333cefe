"""Folders of the Hugging Face libraries: the Trainer's `checkpoint-N`, and what Accelerate's `save_state` writes.

Both are weights in one of several formats, the optimizer's state beside them, and small files about the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.importers.dcp import read_dcp, tie
from terrazzo.checkpoint.importers.deepspeed import DeepSpeedCheckpoint
from terrazzo.checkpoint.importers.deepspeed import recognises as is_deepspeed
from terrazzo.checkpoint.importers.parts.numbering import NOT_KNOWN, ModelNames
from terrazzo.checkpoint.importers.parts.optimizer import add_optimizer, add_scaler, optimizer_in
from terrazzo.checkpoint.importers.parts.paths import size_of_plain_file, subfolder
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource, add_extra, divide
from terrazzo.checkpoint.importers.parts.tree import as_tree
from terrazzo.checkpoint.importers.safetensors import add_safetensors
from terrazzo.checkpoint.importers.torch_file import read_torch_file
from terrazzo.checkpoint.source import Source
from terrazzo.errors import BadInput

__all__ = ["open_folder", "recognises"]

STATE_FILE = "trainer_state.json"
FSDP_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
FSDP_FILE, PICKLED_FILE = "pytorch_model_fsdp.bin", "pytorch_model.bin"
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
SCHEDULER_FILES = ("scheduler.pt", "scheduler.bin")
SCALER_FILE = "scaler.pt"

_MARKS = (STATE_FILE, FSDP_FOLDER, FSDP_FILE, OPTIMIZER_FOLDER, *OPTIMIZER_FILES, PICKLED_FILE)
_TAKEN = {*_MARKS, *SCHEDULER_FILES, SCALER_FILE}
_FOREIGN = re.compile(r"\.(bin|pt|pth|pkl)$|^(pytorch_model_fsdp|optimizer)_\d+$")


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder. Weights in safetensors alone are not."""
    return any((path / name).exists() for name in _MARKS)


def open_folder(path: Path, names: ModelNames = NOT_KNOWN) -> Source:
    """The checkpoint in such a folder.

    Raises:
        BadInput: there are no weights, a file is damaged or not inside, or the optimizer's state does not fit.
    """
    source: Source
    if is_deepspeed(path):
        source = DeepSpeedCheckpoint(path)
    else:
        source = (TrainerFolder if (path / STATE_FILE).exists() else AccelerateFolder)(path, names)
    for key, value in _about(path, source.file_notes):
        add_extra(source, {key: value})
    step = source.extra.get("trainer_state", {}).get("global_step")
    source.step = step if type(step) is int and step > 0 else source.step
    own = () if is_deepspeed(path) else _weights_in(path)[:1]
    if further := [name for name in _weights_in(path) if name not in own]:
        where = own[0] if own else "DeepSpeed's folder"
        source.file_notes.append(f"not read: {', '.join(further)}, as the weights are in {where}")
    if left := sorted(file.name for file in path.iterdir() if _FOREIGN.search(file.name) and file.name not in _TAKEN):
        source.file_notes.append(f"not read: {', '.join(left)} (pickled settings, random states, or a further model's)")
    return source


class _Folder(StateDictSource):
    def __init__(self, path: Path, names: ModelNames) -> None:
        super().__init__(str(path))
        self._add_weights(path, names.order)
        state = _first_of(path, OPTIMIZER_FILES)
        if (folder := subfolder(path, OPTIMIZER_FOLDER)) is not None:
            state = read_dcp(folder)
        if state is not None:
            add_optimizer(self, optimizer_in(state, str(path)), names)
            tie(self)
            add_scaler(self, _first_of(path, [SCALER_FILE]))

    def _add_weights(self, path: Path, names: Sequence[str]) -> None:
        found = _weights_in(path)
        if not found:
            raise BadInput(
                f"'{path}' holds no weights: there is neither a .safetensors file nor {FSDP_FOLDER}, {FSDP_FILE} or"
                f" {PICKLED_FILE}. A file for each rank (use_dcp=False) is not read: save with torch's DCP."
            )
        if found[0] == _SAFETENSORS:
            add_safetensors(self, path, names)
        elif (folder := subfolder(path, found[0])) is not None:
            self.add_model(divide(read_dcp(folder), str(folder)).model, names)
        else:
            self.add_model(divide(_mapping(path, found[0]), str(path / found[0])).model, names)


_SAFETENSORS = ".safetensors files"


def _weights_in(path: Path) -> list[str]:
    """What there is of weights in such a folder, by name. The first is read."""
    there = {name: (path / name).exists() for name in (FSDP_FOLDER, FSDP_FILE, PICKLED_FILE)}
    there[_SAFETENSORS] = any(path.glob("*.safetensors"))
    return [name for name in (FSDP_FOLDER, FSDP_FILE, _SAFETENSORS, PICKLED_FILE) if there[name]]


class TrainerFolder(_Folder):
    """A `checkpoint-N` of transformers' Trainer."""

    format = "transformers Trainer"


class AccelerateFolder(_Folder):
    """A folder of Accelerate's `save_state`; of several models the first."""

    format = "Accelerate"


def _about(path: Path, notes: list[str]) -> Iterator[tuple[str, Any]]:
    """What the small files say of the run. Those that cannot be read are not worth failing for."""
    try:
        if (path / STATE_FILE).exists():
            size_of_plain_file(path, STATE_FILE)
            state = as_tree(json.loads((path / STATE_FILE).read_text(encoding="utf-8")), str(path / STATE_FILE))
            yield "trainer_state", {key: value for key, value in state.items() if key != "log_history"}
    except (UnicodeError, json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise BadInput(f"'{path / STATE_FILE}' is not what the Trainer writes: {error}.") from None
    try:
        if (scheduler := _first_of(path, SCHEDULER_FILES)) is not None:
            yield "scheduler", scheduler
    except BadInput as error:
        notes.append(f"the scheduler's state is not taken over: {error}")


def _mapping(path: Path, name: str) -> dict[str, Any]:
    tree = _first_of(path, [name])
    if not isinstance(tree, dict):
        raise BadInput(f"'{path / name}' holds a {type(tree).__name__}, not a state dict: save model.state_dict().")
    return tree


def _first_of(path: Path, names: Sequence[str]) -> Any:
    """What the first of the files that exists holds; None where there is none."""
    for name in names:
        if (path / name).exists():
            size_of_plain_file(path, name)
            return read_torch_file(path / name)
    return None
