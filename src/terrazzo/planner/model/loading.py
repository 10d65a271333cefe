"""One way in for every description of a model: a name, a config, a module, or a number of parameters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.messages import ALL, did_you_mean
from terrazzo.planner.model.closed_form import closed_form, shape_of_config
from terrazzo.planner.model.presets import PRESETS
from terrazzo.planner.model.shapes import ModelShape, TensorShape, UnitShape
from terrazzo.untrusted_files import read_json

__all__ = ["CONFIG_FILE", "config_file", "model_shape", "preset_name", "read_config"]

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 1 << 20
"""The largest published ones have some 10 kB."""

MAX_PARAMETERS = 10**15

ModelSpec = str | Path | nn.Module | int | float | Mapping[str, Any]

_NAMED = "Give a preset, or the path of a config.json or of a folder that holds one"
_ACCEPTED = f"{_NAMED}, a config as a mapping, a torch module, or a number of parameters such as 70e9"
"""What `model` may be: as text, which is all that a command line has, and as any value."""


def model_shape(spec: ModelSpec) -> ModelShape:
    """The tensors of the model that `spec` describes, grouped into the units in which the engine would shard it.

    Args:
        spec: the name of a preset (`llama3-8b`; case, `_` and `-` do not matter; at `?` the error names all); the path
            of a config.json, or of a folder with one; the contents of one; a module, best under
            `torch.device("meta")`; or a bare number of parameters, of which only model states can be said.

    Raises:
        BadInput: `spec` names nothing, or describes a model that cannot be. No code of a model is ever run, nothing is
            downloaded, and no weights are read.
    """
    if isinstance(spec, nn.Module):
        from terrazzo.planner.model.modules import shape_of_module

        return shape_of_module(spec)
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        return _bare(spec)
    if isinstance(spec, Mapping):
        return _shape_of(spec, str(spec.get("model_type", "config")))
    if isinstance(spec, Path):
        return _from_file(spec)
    if isinstance(spec, str):
        return _named(spec)
    raise BadInput(f"model is of type {type(spec).__name__}. {_ACCEPTED}.")


def _bare(numel: float) -> ModelShape:
    if not (1 <= numel <= MAX_PARAMETERS and numel == int(numel)):
        raise BadInput(
            f"The number of parameters is {numel!r}; a whole number from 1 to {MAX_PARAMETERS:.0e} is expected."
        )
    tensor = TensorShape("parameters", (int(numel),))
    return ModelShape(f"{_short_count(numel)} parameters", (UnitShape("", (tensor,)),), bare=True)


def _short_count(numel: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if numel >= scale:
            return f"{numel / scale:.4g}{letter}"
    return f"{int(numel)}"


def _named(text: str) -> ModelShape:
    name = preset_name(text)
    if name is not None:
        return _preset(name)
    if "/" in text or text.endswith(".json") or _exists(text):
        return _from_file(Path(text))
    if text == ALL:
        raise BadInput(f"'?' asks for the names of all presets:\n{textwrap.fill(', '.join(PRESETS), 100)}.")
    raise BadInput(
        f"model {_short(text)} is neither a preset nor a file here.{_hint(text)} {_NAMED}; {ALL!r} lists all "
        f"{len(PRESETS)} presets.{_of_a_number(text)}"
    )


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # a name that no file can have
        return False


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _hint(text: str) -> str:
    """The nearest preset; of a name such as `mistralai/Mistral-7B`, by its last part."""
    return did_you_mean(text.rpartition("/")[2].lower()[:100], PRESETS)


def _of_a_number(text: str) -> str:
    """How a number of parameters is given, for text that is one."""
    if re.fullmatch(r"[0-9][0-9_.,]*(e[0-9]+)?[kmbt]?", text.strip()[:100], re.IGNORECASE):
        size = text.strip().lower()
        preset = next((name for name in PRESETS if name.endswith(f"-{size}")), "llama-7b")
        return f" Did you mean a preset such as {preset}, or --params {text.strip()} (in Python, a number)?"
    return ""


def preset_name(text: str) -> str | None:
    """The preset that `text` spells, whatever its case and separators."""
    return _spellings().get(_plain(text))


@cache
def _spellings() -> dict[str, str]:
    return {_plain(name): name for name in PRESETS}


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text.lower())


@cache
def _preset(name: str) -> ModelShape:
    return shape_of_config(PRESETS[name], name)


def _shape_of(values: Mapping[str, Any], name: str) -> ModelShape:
    if closed_form(values) is not None:
        return shape_of_config(values, name)
    from terrazzo.planner.model.transformers import shape_of_built

    return shape_of_built(values, name)


def _from_file(path: Path) -> ModelShape:
    file = config_file(path)
    name = file.parent.name if file.name == CONFIG_FILE else file.stem
    return _shape_of(read_config(file), name or CONFIG_FILE)


def config_file(path: Path) -> Path:
    """The config of a model's folder; another path is that of the config itself."""
    return path / CONFIG_FILE if _exists(str(path)) and path.is_dir() else path


def read_config(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises: `BadInput` for what is not one."""
    if not _is_file(file):
        folder_or_file = file.parent if file.name == CONFIG_FILE else file
        raise BadInput(
            f"There is no model config at {_short(str(file))}.{_hint(str(folder_or_file))} {_NAMED}; models are never "
            "downloaded."
        )
    values = read_json(file, MAX_CONFIG_BYTES)
    if not isinstance(values, dict):
        raise BadInput(
            f"{str(file)!r} holds a JSON {type(values).__name__}, but a model config is an object with a model_type."
        )
    return values


def _is_file(path: Path) -> bool:
    """Whether it can be read to an end: a pipe or a device cannot."""
    try:
        return path.is_file()
    except OSError:
        return False
