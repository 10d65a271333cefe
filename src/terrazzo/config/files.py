"""Loading a stranger's file: plain data or `BadInput`, quickly, and nothing that a string names is run.

JSON, YAML, TOML, and shell scripts that start a program with arguments (see `arguments`). What is refused: more than
1 MiB, nesting deeper than 32, more than 20,000 values once aliases are expanded, cycles, keys given twice, NaN and
infinities, numbers beyond 64 bits, YAML's numbers in base 8 (`010`) and 60 (`1:30`, but for `ranks: 2:4`, which is
text), other encodings than UTF-8, control characters, YAML tags for anything but plain values, several documents in one
file, and what is no regular file.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from terrazzo.config.arguments import parse_arguments
from terrazzo.config.rank_range import is_range
from terrazzo.errors import BadInput, did_you_mean
from terrazzo.files import brackets, is_deeper, read_plain

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "Format",
    "Loaded",
    "format_of",
    "load",
    "parse",
    "parse_value",
    "read_text",
]

MAX_BYTES = 2**20
MAX_DEPTH = 32
_MAX_VALUES = 20_000
_MAX_NUMBER = 2**63
_MAX_DIGITS = 100  # YAML's numbers in base 60 take quadratic time

Format = Literal["json", "yaml", "toml", "arguments"]
_FORMATS: dict[str, Format] = {".json": "json", ".toml": "toml", ".sh": "arguments", ".args": "arguments"}
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where it is there: 10 times faster


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


def load(path: str | Path) -> Loaded:
    """Read a file: JSON, TOML or arguments if its name ends so, else YAML.

    Raises: `BadInput` for all that the module refuses.
    """
    path = Path(path)
    text, kind = read_text(path)
    return Loaded(path, parse(text, kind, str(path)), text, kind, kind == "json" and _strict(text) != text)


def format_of(path: Path) -> Format:
    """What a file's name says."""
    return _FORMATS.get(path.suffix.lower(), "yaml")


def read_text(path: Path) -> tuple[str, Format]:
    """A file's text, and the format that its name says."""
    return _decode(_read(path), str(path)), format_of(path)


def parse(text: str, kind: Format, origin: str = "the text") -> dict[str, Any]:
    """Plain data from text. Raises: `BadInput`, naming `origin`."""
    document = parse_value(text, kind, origin)
    if document is None or (kind == "toml" and not document):
        raise BadInput(f"'{origin}' is empty: there is nothing to read.")
    if not isinstance(document, dict):
        raise BadInput(f"'{origin}' holds a {type(document).__name__}, expected keys with values.")
    return document


def parse_value(text: str, kind: Format, origin: str) -> Any:
    """The same, where a value of any kind is taken, and None for no text."""
    if bad := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x85\u2028\u2029]", text):
        line = text.count("\n", 0, bad.start()) + 1
        raise BadInput(f"'{origin}' holds the control character {bad.group()!r} in line {line}: remove it.")
    try:
        value = _READERS[kind](text, origin)
    except BadInput:
        raise
    except (yaml.YAMLError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"'{origin}' is not valid {kind.upper()}: {_why(error)}.") from None
    except LookupError as error:  # of YAML's constructors, for a word that is none of the kind its tag says
        raise BadInput(f"'{origin}' is not valid {kind.upper()}: {type(error).__name__}: {error}.") from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise BadInput(f"'{origin}' holds a value that cannot be read: {str(error).partition(';')[0][:200]}.") from None
    _check(value, origin)
    return value


def _why(error: Exception) -> str:
    """What a parser says, on one line, with places in the file said once."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())[:300]
    mark, begun = error.problem_mark, error.context_mark
    within = f", {error.context}" if error.context else ""
    since = f" that begins in line {begun.line + 1}" if within and begun and begun.line != mark.line else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{within}{since}"[:300]


# -- the file ------------------------------------------------------------------------------------------------------


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


# -- JSON ----------------------------------------------------------------------------------------------------------


_BESIDES = re.compile(r'"(?:[^"\\]|\\.)*"?|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z)|,(?=\s*[}\]])', re.DOTALL)
"""Text in quotes, and what strict JSON has not: comments, and commas before a closing bracket."""


def _strict(text: str) -> str:
    """The text without what strict JSON does not have; all else keeps its place."""
    return _BESIDES.sub(lambda piece: piece[0] if piece[0][0] == '"' else re.sub(r"[^\n]", " ", piece[0]), text)


def _json(text: str, origin: str) -> Any:
    text = _strict(text)
    _check_depth(brackets(text), origin)

    def refuse(word: str) -> NoReturn:
        raise BadInput(f"'{origin}' holds {word}, which is not a number that a setting can have.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_key: dict[str, Any] = {}
        for key, value in pairs:
            if key in by_key:
                raise _twice(key, origin)
            by_key[key] = value
        return by_key

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


def _check_depth(steps: Iterator[int], origin: str) -> None:
    if is_deeper(steps, MAX_DEPTH):
        raise BadInput(f"'{origin}' is nested more than {MAX_DEPTH} deep; no configuration is.")


def _twice(key: str, origin: str, line: int | None = None) -> BadInput:
    where = f" (line {line})" if line else ""
    return BadInput(f"'{origin}': key '{key}' appears twice in one section{where}: keep one of them.")


# -- YAML ----------------------------------------------------------------------------------------------------------


class _Loader(_Parser):  # type: ignore[misc]
    """Plain values only. `1e-3` is a number, as in YAML 1.2; dates are text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_NUMBERS = (":int", ":float")
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-9_.]+)+)")
"""`010` and `1:30`, which are 8 and 90 to YAML 1.1 alone."""
_PLAIN = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "value")
)


def _yaml(text: str, origin: str) -> Any:
    _check_depth(_events(text, origin), origin)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _Nodes(origin).check(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _events(text: str, origin: str) -> Iterator[int]:
    """The steps in depth, read before anything is built: what is too much is refused where it starts to be."""
    documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if count > 3 * _MAX_VALUES:
            raise BadInput(f"'{origin}' holds more than {_MAX_VALUES:,} values; no configuration does.")
        if isinstance(event, yaml.CollectionStartEvent):
            yield 1
        elif isinstance(event, yaml.CollectionEndEvent):
            yield -1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise BadInput(f"'{origin}' holds several YAML documents: keep one, up to the line '---'.")


class _Nodes:
    """Checks on the tree of YAML nodes, each node once, however often aliases name it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.values: dict[int, int] = {}  # of a node and all below it, aliases expanded
        self.open: set[int] = set()

    def check(self, node: yaml.Node) -> int:
        """The number of values (and of kilobytes of text) of a node, aliases expanded."""
        if id(node) in self.open:
            raise BadInput(
                f"'{self.origin}': the alias in line {node.start_mark.line + 1} contains itself: write the values out."
            )
        if id(node) in self.values:
            return self.values[id(node)]
        if node.tag not in _PLAIN:
            raise BadInput(
                f"'{self.origin}' line {node.start_mark.line + 1} has the tag {_short(node.tag)!r}: a configuration "
                "holds plain values only, and nothing in it is called. Remove the tag."
            )
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(_NUMBERS) and len(node.value) > _MAX_DIGITS:
            raise BadInput(
                f"'{self.origin}' line {node.start_mark.line + 1} has a number of {len(node.value):,} characters."
            )
        if isinstance(node, yaml.ScalarNode) and _OTHER_BASE.fullmatch(node.value) and node.tag.endswith(_NUMBERS):
            raise BadInput(
                f"'{self.origin}' line {node.start_mark.line + 1} has the number {node.value}, which YAML 1.1 reads in"
                f" base {60 if ':' in node.value else 8}: write it in base 10, or in quotes if it is text."
            )
        self.open.add(id(node))
        count = 1 + sum(map(self.check, self._children(node)))
        self.open.discard(id(node))
        if count > _MAX_VALUES:
            raise BadInput(f"'{self.origin}' holds more than {_MAX_VALUES:,} values once aliases are expanded.")
        self.values[id(node)] = count
        return count

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.ScalarNode):
            return []
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":null"):
                raise BadInput(f"'{self.origin}' line {key.start_mark.line + 1}: a key is no text: name it.")
            if key.value in seen:
                raise _twice(key.value, self.origin, key.start_mark.line + 1)
            seen.add(key.value)
            if key.tag in _PLAIN and not key.tag.endswith(":merge"):
                key.tag = "tag:yaml.org,2002:str"  # `8:` and `on:` are the keys "8" and "on"
            if isinstance(value, yaml.ScalarNode) and is_range(key.value, value.value):
                value.tag = "tag:yaml.org,2002:str"
        return [each for pair in node.value for each in pair]


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


# -- TOML ----------------------------------------------------------------------------------------------------------


_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)|' + r"\'\'\'.*?(?:\'\'\'|\Z)|" + r'"(?:[^"\\\n]|\\.)*"?|' + r"'[^'\n]*'?|#[^\n]*",
    re.DOTALL,
)
"""Text in quotes, and comments."""
_LONG_NAME = re.compile(rf"(?:^|[{{,])(?:[^\n.,={{}}]*\.){{{MAX_DEPTH}}}", re.MULTILINE)
"""A name that goes down as deep as nothing may: each key below it would cost as much. Blanks and brackets before it
match as part of it: a pattern of their own would make the search quadratic in how many there are."""


def _toml(text: str, origin: str) -> Any:
    bare = _QUOTED.sub('""', text)
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", bare))
    too_deep = [MAX_DEPTH + 1] if _LONG_NAME.search(bare) else []
    _check_depth(itertools.chain(too_deep, steps), origin)
    if sum(map(bare.count, ",=[")) > _MAX_VALUES:  # before the parser spends its time on them
        raise BadInput(f"'{origin}' holds more than {_MAX_VALUES:,} values; no configuration does.")
    return _dates_as_text(tomllib.loads(text))


def _dates_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dates_as_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_dates_as_text(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value


_READERS: dict[Format, Callable[[str, str], Any]] = {
    "json": _json,
    "yaml": _yaml,
    "toml": _toml,
    "arguments": parse_arguments,
}


# -- all ------------------------------------------------------------------------------------------------------------


def _check(document: Any, origin: str) -> None:
    """Refuse numbers that no setting can have, and more values or text than any configuration holds."""
    budget = [_MAX_VALUES, 4 * MAX_BYTES]

    def walk(key: str, value: Any) -> None:
        budget[0] -= 1
        budget[1] -= len(value) if isinstance(value, str) else 0
        if min(budget) < 0:
            raise BadInput(f"'{origin}' holds more than {_MAX_VALUES:,} values, or text without end.")
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(key, name)
                walk(f"{key}.{name}" if key else name, inner)
        elif isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise BadInput(f"'{origin}': {key} holds half a character ({value!a:.60}), which is no text.")
        elif isinstance(value, list):
            for inner in value:
                walk(key, inner)
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"'{origin}': {key} is {value}, which is not a number that a setting can have.")
        elif isinstance(value, int) and abs(value) >= _MAX_NUMBER:
            raise BadInput(f"'{origin}': {key} is a number of {value.bit_length()} bits, more than any setting has.")

    walk("" if isinstance(document, dict) else "it", document)
