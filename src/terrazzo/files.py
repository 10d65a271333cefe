"""Reading small files that a stranger may have made: plain files of a bounded size, JSON of a bounded depth."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from terrazzo.errors import BadInput

__all__ = ["check_model_file", "read_json", "read_plain"]

MAX_DEPTH = 64


def read_plain(path: Path, limit_bytes: int) -> bytes:
    """All bytes of a plain file.

    Raises:
        BadInput: it is a pipe, a device or a folder, is larger than `limit_bytes`, or cannot be read.
        FileNotFoundError: there is none; callers know what should be there.
    """
    try:
        # A pipe would make open() wait for ever, and a device has no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"'{path}' is {'a folder' if path.is_dir() else 'no regular file'}: name a file.")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            data = (file.read(limit_bytes + 1) or b"") if size_bytes <= limit_bytes else b""  # None: nothing there yet
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"'{path}' cannot be read: {error}.") from None
    if size_bytes > limit_bytes or len(data) > limit_bytes:
        raise BadInput(
            f"'{path}' is {max(size_bytes, len(data)):,} bytes; no file of this kind is more than {limit_bytes:,}:"
            " is it another file?"
        )
    return data


def read_json(path: Path, limit_bytes: int) -> Any:
    """What a JSON file holds. Errors: those of `read_plain`; `BadInput` where it is no JSON, or is nested too deep."""
    data = read_plain(path, limit_bytes)
    try:
        text = data.decode("utf-8-sig")
        _check_depth(text, path)
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"'{path}' is not valid JSON ({str(error)[:200]}). Copy or save it again.") from None


def _check_depth(text: str, path: Path) -> None:
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MAX_DEPTH:
            raise BadInput(f"'{path}' is nested more than {MAX_DEPTH} deep; no file of a model is.")


def check_model_file(path: Path, limit_bytes: int) -> None:
    """That a file in a model's folder can be given to a library that reads all of it.

    A link may lead to another file of the folder, or of the Hugging Face cache that the folder is in.

    Raises:
        BadInput: it is no plain file, is larger than `limit_bytes`, or a link to elsewhere.
    """
    folder = path.parent.resolve()
    inside = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]
    try:
        target = path.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadInput(f"'{path}' cannot be read: {error}.") from None
    if target.parent not in inside:
        raise BadInput(
            f"'{path}' is a link to '{target}', outside of its folder, and is not followed: copy the folder with"
            " cp -rL first."
        )
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"'{path}' is not a plain file: no model has one.")
    if status.st_size > limit_bytes:
        raise BadInput(
            f"'{path}' is {status.st_size:,} bytes, and at most {limit_bytes:,} are read: is it another file?"
        )
