"""The folders that a run writes to: apart from what it reads, and writable."""

from __future__ import annotations

import os
from pathlib import Path

from terrazzo.config import Config, without_passwords
from terrazzo.errors import BadInput
from terrazzo.files import read_json
from terrazzo.train.checkpoints.resume import resume_from
from terrazzo.train.data.datasets_folder import folder_of_source
from terrazzo.train.data.source_file import is_url, is_visible, plain_part
from terrazzo.train.data.sources import PYTHON_STDLIB, named_sources

__all__ = ["check_written"]


def check_written(config: Config) -> None:
    """Checkpoints and logs must not be mixed with the data that is read, nor with another run's."""
    local = [source for source in named_sources(config.data) if source != PYTHON_STDLIB and not is_url(source)]
    paths = [folder_of_source(source)[0] for source in local]
    read = {Path(plain_part(str(path))).resolve() for path in paths}
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
    anew = config.checkpoint.resume == "never" and config.checkpoint.overwrite
    if is_new and not anew:
        _check_metrics(config)


def _check_metrics(config: Config) -> None:
    """A new run empties what a log folder holds: never of another run, which is known by where its checkpoints are."""
    folder, own = config.log.folder, without_passwords(config.checkpoint_folder)
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or not metrics.stat().st_size:
        return
    try:
        written = read_json(folder / "config.json", 1 << 20)
        theirs = str(written["checkpoint"]["folder"] or folder / "checkpoints")
    except (OSError, BadInput, KeyError, TypeError):
        theirs = None
    if theirs is not None and os.path.realpath(theirs) == os.path.realpath(own):  # its own, before it had saved
        return
    whose = "another run" if theirs is None else f"a run with checkpoint.folder='{theirs}'"
    raise BadInput(
        f"log.folder is '{folder}', where metrics.jsonl is of {whose}, and a new run would empty it: use another"
        " log.folder, or that run's checkpoint.folder to continue it. To begin anew in its place:"
        " checkpoint.resume=never with checkpoint.overwrite=true."
    )


def _check_writable(key: str, folder: Path) -> None:
    """By what the system says of the folder, or of the one that it will be made in."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"{key} is '{folder}', and '{there}' is a file: use a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{key} is '{folder}', but '{there}' cannot be written to: make it writable, or use another.")
