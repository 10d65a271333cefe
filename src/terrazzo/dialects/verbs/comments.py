"""Comments of a YAML file, taken from one text and put into another, key by key."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import yaml

from terrazzo.documents import PARSER
from terrazzo.documents import comments as all_comments
from terrazzo.documents.dotted_keys import join

__all__ = ["Comment", "comments_of", "insert_comments"]


@dataclass
class Comment:
    """What stands with one key, without `#`: whole lines above it, and the end of its own line."""

    above: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [*self.above, *self.beside]


def comments_of(text: str) -> dict[str, Comment]:
    """Comments by dotted key: whole lines are the next key's, ends of lines the last key's before them.

    Those above the first key and below the last are of the whole file, under the empty key.
    """
    spots = list(_keys(text))
    lines = [spot.line for spot in spots]
    first = {spot.line: spot.name for spot in reversed(spots)}
    comments: dict[str, Comment] = {}
    for line, alone, words in all_comments(text):
        after = bisect_right(lines, line)
        if not alone:
            key = first[lines[after - 1]] if after else ""
            comments.setdefault(key, Comment()).beside.append(words)
        else:
            key = spots[after].name if 0 < after < len(spots) else ""
            comments.setdefault(key, Comment()).above.append(words)
    return comments


def insert_comments(text: str, comments: Mapping[str, Comment]) -> str:
    """The text of plain block YAML with comments at its keys; those of keys that it has not are put at its head."""
    spots = {spot.name: spot for spot in _keys(text)}
    lines = text.splitlines()
    above: dict[int, list[str]] = {}
    head: list[str] = []
    for key, comment in comments.items():
        if key not in spots:
            head += [f"# {words}".rstrip() for words in comment.lines()]
            continue
        _, line, column, goes_on = spots[key]
        above.setdefault(line, []).extend(f"{' ' * column}# {words}".rstrip() for words in comment.above)
        if comment.beside and not goes_on and re.search(r":( \S.*)?$", lines[line]):
            lines[line] += f"  # {'; '.join(comment.beside)}"
        else:
            above[line] += [f"{' ' * column}# {words}".rstrip() for words in comment.beside]
    body = [each for number, own in enumerate(lines) for each in (*above.get(number, ()), own)]
    return "\n".join([*head, *body]) + "\n"


class _Spot(NamedTuple):
    """Where a dotted key stands; `goes_on` if its value begins on that line and ends on a later one."""

    name: str
    line: int
    column: int
    goes_on: bool


def _keys(text: str) -> Iterator[_Spot]:
    """Every key, in order. The text has been loaded: it is small, plain, acyclic."""
    root = yaml.compose(text, Loader=PARSER)

    def walk(prefix: str, node: yaml.Node) -> Iterator[_Spot]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = join(prefix, key.value)
            line = key.start_mark.line
            yield _Spot(name, line, key.start_mark.column, value.start_mark.line == line < value.end_mark.line)
            if value.start_mark.index >= key.start_mark.index:  # else an alias of what stands elsewhere
                yield from walk(name, value)

    return walk("", root) if root is not None else iter(())
