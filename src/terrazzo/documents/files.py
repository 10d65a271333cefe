"""Loading a stranger's file: plain data or `BadInput`, quickly, and nothing that a string names is run.

JSON, YAML, TOML, and shell scripts that start a program with arguments (see `shell`). What is refused: more than 1 MiB,
nesting deeper than 32, more than 20,000 values once aliases are expanded, cycles, keys given twice, NaN and infinities,
numbers beyond 64 bits, YAML's numbers in base 8 (`010`) and 60 (`1:30`), other encodings than UTF-8, control
characters, YAML tags for anything but plain values, several documents in one file, and what is no regular file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from terrazzo.documents.json_text import read_json_text, strict_json
from terrazzo.documents.limits import MAX_BYTES, check_values
from terrazzo.documents.shell.arguments import parse_arguments
from terrazzo.documents.toml_text import read_toml
from terrazzo.documents.yaml_text import IsText, never, read_yaml
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.untrusted_files import read_plain

__all__ = ["Format", "Loaded", "format_of", "load", "parse", "parse_value", "read_text"]

Format = Literal["json", "yaml", "toml", "arguments"]
_FORMATS: dict[str, Format] = {".json": "json", ".toml": "toml", ".sh": "arguments", ".args": "arguments"}


@dataclass(frozen=True)
class Loaded:
    """A file, read.

    Attributes:
        document: plain data: dicts with text keys, lists, text, numbers, booleans, None.
        text: as it stands in the file.
        relaxed: whether it is JSON with comments or commas too many, which DeepSpeed reads and Python's json refuses.
    """

    path: Path
    document: dict[str, Any]
    text: str
    format: Format
    relaxed: bool = False


def load(path: str | Path, is_text: IsText = never) -> Loaded:
    """Read a file: JSON, TOML or arguments if its name ends so, else YAML.

    Args:
        is_text: see `parse_value`.

    Raises: `BadInput` for all that the module refuses.
    """
    path = Path(path)
    text, kind = read_text(path)
    document = parse(text, kind, str(path), is_text)
    return Loaded(path, document, text, kind, kind == "json" and strict_json(text) != text)


def format_of(path: Path) -> Format:
    """What a file's name says."""
    return _FORMATS.get(path.suffix.lower(), "yaml")


def read_text(path: Path) -> tuple[str, Format]:
    """A file's text, and the format that its name says."""
    return _decode(_read(path), str(path)), format_of(path)


def parse(text: str, kind: Format, origin: str = "the text", is_text: IsText = never) -> dict[str, Any]:
    """The keys and values that a text holds; see `parse_value`."""
    document = parse_value(text, kind, origin, is_text)
    if document is None or (kind == "toml" and not document):
        raise BadInput(f"'{origin}' is empty: there is nothing to read.")
    if not isinstance(document, dict):
        raise BadInput(f"'{origin}' holds a {type(document).__name__}, expected keys with values.")
    return document


def parse_value(text: str, kind: Format, origin: str, is_text: IsText = never) -> Any:
    """Plain data from text: a value of any kind, and None for no text.

    Args:
        origin: the file's name, in messages.
        is_text: whether a key's value in YAML is text although YAML 1.1 takes it for a number, such as `2:4`.

    Raises: `BadInput` for all that the module refuses.
    """
    if bad := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x85\u2028\u2029]", text):
        line = text.count("\n", 0, bad.start()) + 1
        raise BadInput(f"'{origin}' holds the control character {bad.group()!r} in line {line}: remove it.")
    try:
        value = read_yaml(text, origin, is_text) if kind == "yaml" else _READERS[kind](text, origin)
    except BadInput:
        raise
    except (yaml.YAMLError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"'{origin}' is not valid {kind.upper()}: {_why(error, text)}.") from None
    except LookupError as error:  # of YAML's constructors, for a word that is none of the kind its tag says
        raise BadInput(f"'{origin}' is not valid {kind.upper()}: {type(error).__name__}: {error}.") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise BadInput(f"'{origin}' holds a value that cannot be read: {str(error).partition(';')[0][:200]}.") from None
    check_values(value, origin)
    return value


def _why(error: Exception, text: str) -> str:
    """What a parser says of a text, on one line, with places in it said once."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())[:300]
    mark, begun = error.problem_mark, error.context_mark
    (line,) = text.splitlines()[mark.line : mark.line + 1] or [""]  # none behind the last
    if line[mark.column :].startswith("\t"):
        return f"line {mark.line + 1} is indented with a tab: use spaces"
    within = f", {error.context}" if error.context else ""
    since = f" that begins in line {begun.line + 1}" if within and begun and begun.line != mark.line else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{within}{since}"[:300]


def _read(path: Path) -> bytes:
    try:
        return read_plain(path, MAX_BYTES)
    except FileNotFoundError:
        near = did_you_mean(path.name, _neighbours(path.parent))
        raise BadInput(f"No configuration file at '{path}'.{near}") from None


def _neighbours(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for _, entry in zip(range(1000), entries, strict=False)]
    except OSError:
        return []


def _decode(data: bytes, origin: str) -> str:
    for mark, name in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32")):
        if data.startswith(mark):
            raise BadInput(f"'{origin}' is encoded as {name}, expected UTF-8: save it again as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(
            f"'{origin}' is not UTF-8 text: byte {data[error.start]:#04x} in line {line}. Save it again as UTF-8."
        ) from None


_READERS: dict[Format, Callable[[str, str], Any]] = {
    "json": read_json_text,
    "toml": read_toml,
    "arguments": parse_arguments,
}
