"""Everything that can be refused before a process is started or a byte is written."""

from __future__ import annotations

import os
import tempfile
from glob import has_magic
from pathlib import Path

from terrazzo.checkpoint import clear, latest
from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.planner.model.transformers import harmless
from terrazzo.train.build import (
    batch_arithmetic,
    build_offload,
    build_plan,
    build_precision,
    check_settings,
    decoder_config,
    mesh_shape,
    vocab_size_of,
)
from terrazzo.train.data.chat import chat_fingerprint
from terrazzo.train.data.hub import folder_of_source
from terrazzo.train.data.sources import PYTHON_STDLIB, find_files
from terrazzo.train.data.stored import is_url, is_visible
from terrazzo.train.model.huggingface import read_config, weight_files
from terrazzo.train.model.lora import check_lora
from terrazzo.train.promise.room import check_plan
from terrazzo.train.promise.swap import check_folders

__all__ = ["check", "clear_checkpoints", "make_log_folder", "resume_from"]


def check(config: Config, world_size: int) -> list[str]:
    """Raise `BadInput` for anything in `config` that cannot work with `world_size` ranks. Changes nothing.

    Returns what the planner has to say of the run, a line each.
    """
    build_plan(config)
    build_precision(config)
    build_offload(config)
    mesh_shape(config.plan.mesh, world_size)
    batch_arithmetic(config.batch, world_size)
    check_settings(config.optimizer)
    _check_model(config)
    _check_data(config)
    _check_folders(config)
    notes = [f"offload: {note}" for note in check_folders(config)]
    return [*notes, *check_plan(config, world_size)]


def resume_from(config: Config) -> str | None:
    """The checkpoint to continue from, or None for a new run; raises `BadInput` as `checkpoint.resume` demands."""
    folder = config.checkpoint_folder
    newest = latest(folder)
    if config.checkpoint.resume == "required" and newest is None:
        raise BadInput(
            f"checkpoint.resume is 'required', but '{folder}' holds no complete checkpoint: correct"
            " checkpoint.folder, or use checkpoint.resume=if_exists to start anew."
        )
    if config.checkpoint.resume == "never":
        if newest is not None and not config.checkpoint.overwrite:
            raise BadInput(
                f"checkpoint.resume is 'never', but there is '{newest}' of another run, which is not"
                " overwritten: use another checkpoint.folder, checkpoint.resume=if_exists to continue it, or"
                " checkpoint.overwrite=true to remove it."
            )
        return None
    return newest


def clear_checkpoints(config: Config) -> None:
    """Remove what `checkpoint.overwrite` allows to remove. Called by one rank, just before training starts."""
    if config.checkpoint.resume == "never" and config.checkpoint.overwrite:
        clear(config.checkpoint_folder)


def _check_model(config: Config) -> None:
    if config.model.kind == "decoder":
        decoder_config(config, vocab_size_of(config))
        return
    assert config.model.path is not None
    harmless(read_config(config.model.path), f"'{config.model.path}'")
    if config.model.weights == "pretrained":
        weight_files(config.model.path)
    check_lora(config)


def _check_data(config: Config) -> None:
    data = config.data
    chat_fingerprint(data.tokenizer, data.chat_template, data.loss_on)
    find_files(data.source)
    if data.validation_source is not None:
        find_files(data.validation_source)


def _check_folders(config: Config) -> None:
    """Checkpoints and logs must not be mixed with the data that is read, nor with another run's."""
    given = [config.data.source, config.data.validation_source]
    sources = [source for one in given if one for source in ([one] if isinstance(one, str) else one)]
    local = [source for source in sources if source != PYTHON_STDLIB and not is_url(source)]
    paths = [folder_of_source(source)[0] for source in local]
    read = {_without_globs(path).resolve() for path in paths}
    whole = {path.resolve() for path in paths if path.is_dir()}  # with the folders in them
    folders = {"log.folder": config.log.folder}
    if "://" not in config.checkpoint_folder:
        folders["checkpoint.folder"] = Path(config.checkpoint_folder)
    for key, folder in folders.items():
        place = folder.resolve()
        if place in read or place == Path(place.anchor):
            raise BadInput(f"{key} is '{folder}', which is the data itself or the root: use a folder of its own.")
        around = next((one for one in whole if place.is_relative_to(one)), None)
        if around is not None and is_visible(place.relative_to(around).as_posix()):
            raise BadInput(
                f"{key} is '{folder}', which is inside the data, '{around}': the next start would read what this one"
                " writes as data. Use a folder beside it."
            )
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{key} is '{folder}', which is a file: use a folder.")
        _check_writable(key, folder)
    for name in ("config.json", "metrics.jsonl"):
        file = config.log.folder / name
        if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
            raise BadInput(f"'{file}', which the run writes, is no file that can be written to: move it away.")
    is_new = resume_from(config) is None  # a run that goes on puts its own earlier one aside
    if config.checkpoint.save_format == "hf" and (config.log.folder / "hf").exists() and is_new:
        raise BadInput(
            f"checkpoint.save_format is 'hf', and '{config.log.folder / 'hf'}' exists already: move it away."
        )


def _without_globs(path: Path) -> Path:
    """The folder that `data/*.txt` looks in; a path without wildcards is itself."""
    return next((folder for folder in (path, *path.parents) if not has_magic(str(folder))), path)


def _check_writable(key: str, folder: Path) -> None:
    """By what the system says of the folder, or of the one that it will be made in."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"{key} is '{folder}', and '{there}' is a file: use a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{key} is '{folder}', but '{there}' cannot be written to: make it writable, or use another.")


def make_log_folder(config: Config) -> None:
    """Make it, and write to it once. Called by one rank, before anything else is done."""
    folder = config.log.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" ")
            file.flush()
    except OSError as error:
        raise BadInput(
            f"log.folder is '{folder}', which cannot be written to: {error.strerror}. Make it writable, or use another."
        ) from None
