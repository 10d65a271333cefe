"""Reading files that a stranger may have made: plain files of a bounded size, JSON of a bounded depth."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from terrazzo.errors import BadInput

__all__ = ["brackets", "check_model_file", "is_deeper", "read_json", "read_plain", "size_inside"]

MAX_DEPTH = 64
"""Deepest nesting of JSON that is read."""


def read_plain(path: Path, limit_bytes: int) -> bytes:
    """All bytes of a plain file.

    Raises:
        BadInput: it is a pipe, a device or a folder, is larger than `limit_bytes`, or cannot be read.
        FileNotFoundError: it does not exist; callers know what should be there.
    """
    try:
        # A pipe would make open() wait for ever, and a device has no end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"'{path}' is {'a folder' if path.is_dir() else 'no regular file'}: name a file.")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            data = (file.read(limit_bytes + 1) or b"") if size_bytes <= limit_bytes else b""  # None: nothing there yet
    except (FileNotFoundError, BadInput):
        raise
    except (OSError, ValueError) as error:
        raise BadInput(f"'{path}' cannot be read: {error}.") from None
    if size_bytes > limit_bytes or len(data) > limit_bytes:
        raise BadInput(
            f"'{path}' is {max(size_bytes, len(data)):,} bytes; no file of this kind is more than {limit_bytes:,}:"
            " is it another file?"
        )
    return data


def read_json(path: Path, limit_bytes: int) -> Any:
    """The content of a JSON file. Raises what `read_plain` does, and `BadInput` for bad or too deeply nested JSON."""
    data = read_plain(path, limit_bytes)
    try:
        text = data.decode("utf-8-sig")
        if is_deeper(brackets(text), MAX_DEPTH):
            raise BadInput(f"'{path}' is nested more than {MAX_DEPTH} deep; no file of a model is.")
        return json.loads(text)
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"'{path}' is not valid JSON ({str(error)[:200]}). Copy or save it again.") from None


def brackets(text: str) -> Iterator[int]:
    """1 for each opening bracket of JSON and -1 for each closing one, without those in strings."""
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', text, re.DOTALL):
        if found[0] in "[]{}":
            yield 1 if found[0] in "[{" else -1


def is_deeper(steps: Iterable[int], limit: int) -> bool:
    """Whether the sum of the first steps ever exceeds `limit`; stops reading there."""
    return any(depth > limit for depth in accumulate(steps))


def size_inside(path: Path, folder: Path) -> int:
    """The size in bytes of a plain file in a folder that somebody else made, or in a subfolder of it.

    A link may only lead to another file beside it, or into the cache of the Hugging Face Hub: that keeps the files of a
    folder `snapshots/<revision>` in `blobs`, two folders up.

    Raises:
        BadInput: it is not a plain file, or a link to elsewhere.
        OSError: it cannot be read; callers know what should be there.
    """
    try:
        root = folder.resolve()
        beside = root / path.relative_to(folder).parent  # not resolved: a subfolder may be a link, too
        target = path.resolve(strict=True)
        status = target.stat()
    except (RuntimeError, ValueError) as error:  # links in a circle, and names with NUL
        raise OSError(str(error)) from None
    blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
    if target.parent not in (beside, *blobs):
        raise BadInput(
            f"'{path}' is a link to '{target}', outside of '{folder}', and is not followed: copy the folder with"
            " cp -rL first."
        )
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"'{path}' is not a plain file: no model and no checkpoint has one.")
    return status.st_size


def check_model_file(path: Path, limit_bytes: int, folder: Path | None = None) -> None:
    """Refuse a file in a model's folder that a library should not be given to read.

    Args:
        folder: the model's folder, if the file is in a subfolder.

    Raises:
        BadInput: as for `size_inside`; or it cannot be read, or is larger than `limit_bytes`.
    """
    try:
        size_bytes = size_inside(path, path.parent if folder is None else folder)
    except OSError as error:
        raise BadInput(f"'{path}' cannot be read: {error}.") from None
    if size_bytes > limit_bytes:
        raise BadInput(f"'{path}' is {size_bytes:,} bytes, and at most {limit_bytes:,} are read: is it another file?")
