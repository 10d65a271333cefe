"""The files that `terrazzo plan` writes: checked before any work, written at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from terrazzo.errors import BadInput
from terrazzo.planner import Estimate
from terrazzo.planner.choice.emit import train_config
from terrazzo.planner.report.picture import SUFFIXES
from terrazzo.planner.text.words import verdict

__all__ = ["check_files", "emit", "model_text", "write_model"]


def check_files(emitted: Path | None, picture: Path | None) -> None:
    """Refuse names that cannot be written. Raises: `BadInput`."""
    for option, path, suffixes in (("--emit", emitted, (".yaml", ".yml", ".json")), ("--picture", picture, SUFFIXES)):
        if path is None:
            continue
        if path.suffix.lower() not in suffixes:
            raise BadInput(f"{option} is '{path}': its name must end with {' or '.join(suffixes)}.")
        if not path.parent.is_dir():
            raise BadInput(f"{option} is '{path}', but there is no folder '{path.parent}': make it, or name another.")
        if path.is_dir():
            raise BadInput(f"{option} is '{path}', which is a folder: name a file in it.")


def emit(estimate: Estimate, model: str, path: Path) -> None:
    """Write the configuration of a plan, and beside it the model's own where no config.json holds that.

    Args:
        model: what `--model` was.

    Raises: `BadInput` where the plan cannot fit or run, and for a folder that holds another model.
    """
    if estimate.memory.fits is False:
        raise BadInput(f"--emit: nothing is written, because the plan {verdict(estimate.memory)}.")
    folder = path.with_suffix("")
    files = train_config(estimate.setup, model, folder)
    if files.model_config is not None:
        write_model(files.model_config, folder / "config.json", "--emit")
    as_json = path.suffix.lower() == ".json"
    text = json.dumps(files.config, indent=2) + "\n" if as_json else yaml.safe_dump(files.config, sort_keys=False)
    path.write_text(text, encoding="utf-8")


def model_text(config: Mapping[str, Any]) -> str:
    """The config.json of a model."""
    return json.dumps(config, indent=2) + "\n"


def write_model(config: Mapping[str, Any], path: Path, writer: str) -> None:
    """Write a model's config.json, for which `writer` asks. Raises: `BadInput` where another model's is there."""
    text = model_text(config)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise BadInput(f"{writer} would replace '{path}', the config of another model: give FILE another name.")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
