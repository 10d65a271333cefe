"""Whether the folders that a run writes to are writable, and separate from the data that it reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from terrazzo.config import Config, DataConfig, without_passwords
from terrazzo.errors import BadInput
from terrazzo.files import is_url
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.train.checkpoints.local_folder import noted_run
from terrazzo.train.checkpoints.resume import resume_from
from terrazzo.train.data.datasets_folder import folder_of_source
from terrazzo.train.data.source_file import is_visible, plain_part
from terrazzo.train.data.sources import PYTHON_STDLIB, named_sources

__all__ = ["check_written"]

FILES = {
    "log.folder": tuple(map(str, RunFolder(Path()).every_file)),
    "checkpoint.folder": tuple(
        f"step-00000001/{name}" for name in ("manifest.json", "manifest.sha256", "rank-00000.safetensors")
    ),
}
"""One file of each kind that is written below a folder, to try patterns of sources on."""


def check_written(config: Config) -> None:
    """Raise `BadInput` if checkpoints or logs would be mixed with the data, or with those of another run."""
    folders = {"log.folder": config.log.folder}
    if not is_url(config.checkpoint_folder):
        folders["checkpoint.folder"] = Path(config.checkpoint_folder)
    for key, folder in folders.items():
        if str(folder).startswith("~"):
            raise BadInput(f"{key} is '{folder}', and ~ is not read as your home here: write '{folder.expanduser()}'.")
        try:
            _check_apart(key, folder, config.data)
            _check_writable(key, folder)
        except OSError as error:  # such as a name that is too long
            raise BadInput(f"{key} is '{folder}', which cannot be made: {error.strerror}. Use another.") from None
    if config.data.cache is not None:
        _check_writable("data.cache", config.data.cache.expanduser())
    log = RunFolder(config.log.folder)
    for file in (log.config, log.metrics):
        if file.exists() and not (file.is_file() and os.access(file, os.W_OK)):
            raise BadInput(f"'{file}', which the run writes, is no file that can be written to: move it away.")
    on_others = config.checkpoint.local.folder is not None and noted_run(config)  # such as a host that has been lost
    is_new = not on_others and resume_from(config) is None  # a run that goes on puts its own earlier one aside
    if config.checkpoint.save_format == "hf" and log.hf.exists() and is_new:
        raise BadInput(f"checkpoint.save_format is 'hf', and '{log.hf}' exists already: move it away.")
    anew = config.checkpoint.resume == "never" and config.checkpoint.overwrite
    if is_new and not anew:
        _check_metrics(config)


def _check_apart(key: str, folder: Path, data: DataConfig) -> None:
    """Raise `BadInput` if a folder to write to is the data, or if the next start would read files in it as data."""
    resolved = folder.resolve()
    local = [source for source in named_sources(data) if source != PYTHON_STDLIB and not is_url(source)]
    read = {path: Path(plain_part(str(path))).resolve() for path in (folder_of_source(source)[0] for source in local)}
    if resolved in read.values() or resolved == Path(resolved.anchor):
        raise BadInput(f"{key} is '{folder}', which is the data itself or the root: use a folder of its own.")
    for path, around in read.items():
        if resolved.is_relative_to(around) and _is_read(resolved.relative_to(around), FILES[key], path):
            raise BadInput(
                f"{key} is '{folder}', which is inside the data, '{around}': the next start would read what this one"
                " writes as data. Use a folder beside it."
            )


def _is_read(inside: Path, files: Sequence[str], source: Path) -> bool:
    """Whether `source`, a folder or a glob, reads any of `files` in the folder `inside` its plain part."""
    if not is_visible(inside.as_posix()):
        return False
    if source.is_dir():
        return True
    pattern = str(source).removeprefix(plain_part(str(source))).lstrip("/").split("/")
    return any(_matches([*inside.parts, *file.split("/")], pattern) for file in files)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether `glob` finds a file: a `*` is within one name, and `**` stands for any number of them."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return fnmatch(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _check_metrics(config: Config) -> None:
    """Raise `BadInput` if a new run would empty the log of another run, known by the folder of its checkpoints."""
    folder, own = config.log.folder, without_passwords(config.checkpoint_folder)
    metrics, written = RunFolder(folder).metrics, RunFolder(folder).settings()
    if not metrics.exists() or not metrics.stat().st_size:
        return
    try:
        theirs = None if written is None else str(written["checkpoint"]["folder"] or RunFolder(folder).checkpoints)
    except (KeyError, TypeError):
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
    """Raise `BadInput` unless a nameless file can be made in the folder, or in the one that it will be made in.

    Permissions alone do not tell for /proc and some network drives.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{key} is '{folder}', which is a file: use a folder.")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"{key} is '{folder}', and '{there}' is a file: use a folder.")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BadInput(
            f"{key} is '{folder}', but '{there}' cannot be written to: {error.strerror}. Make it writable, or use"
            " another."
        ) from None
