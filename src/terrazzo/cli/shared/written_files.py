"""Files that verbs write: which are refused before any work, and the texts of those for `terrazzo train`."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terrazzo.documents import write_json, write_yaml
from terrazzo.errors import BadInput
from terrazzo.files import replace_file

__all__ = [
    "check_file",
    "make_writable_folder",
    "refuse_other",
    "with_comments",
    "write_model",
    "write_output",
    "writing",
]

WIDTH = 110


def with_comments(document: Mapping[str, Any], comments: Mapping[str, Sequence[str]]) -> str:
    """Sections as YAML, each below its comments. Comments under the empty name come first."""
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in comments.get("", ()))]
    for name, section in document.items():
        lines = [line for text in comments.get(name, ()) for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
        parts.append("\n".join([*(f"# {line}" for line in lines), write_yaml({name: section})]))
    return "\n".join(parts)


def check_file(named: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise `BadInput`, before any work, for a file that cannot be written; `named` is what has named it: `--emit`.

    Args:
        suffixes: one of which its name must have; default: any.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        raise BadInput(f"{named} is '{path}': its name must end with {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise BadInput(f"{named} is '{path}', but there is no folder '{path.parent}': make it, or name another.")
    if path.is_dir():
        raise BadInput(f"{named} is '{path}', which is a folder: name a file in it.")


def refuse_other(path: Path, text: str, problem: str) -> None:
    """Raise `BadInput` with this message if the file is there, and has another text."""
    if path.is_file() and path.read_bytes() != text.encode():
        raise BadInput(problem)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an `OSError`, which for a full disk names no file, into `BadInput`."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"'{path}' cannot be written: {error.strerror or error}.") from error


def make_writable_folder(folder: Path) -> None:
    """Make the folder, if it is not there, and see that a file can be written into it.

    Raises:
        BadInput: it cannot.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_output(path: Path, text: str) -> None:
    """Write a file as a whole, or leave what is there as it is; into a pipe or a device as it comes.

    Raises:
        BadInput: it cannot be written.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path, text, sync=False)


def write_model(config: Mapping[str, Any], path: Path, writer: str) -> None:
    """Write a model's config.json; `writer` names the command in errors.

    Raises:
        BadInput: another model's file is there.
    """
    text = write_json(config)
    refuse_other(path, text, f"{writer} would replace '{path}', the config of another model: give FILE another name.")
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_output(path, text)
