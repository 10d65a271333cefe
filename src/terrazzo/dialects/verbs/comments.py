"""Comments of a YAML file, taken from one text and put into another, key by key."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
    lines = [line for line, _, _ in spots]
    first = {line: name for line, _, name in reversed(spots)}
    comments: dict[str, Comment] = {}
    for line, alone, words in all_comments(text):
        after = bisect_right(lines, line)
        if not alone:
            key = first[lines[after - 1]] if after else ""
            comments.setdefault(key, Comment()).beside.append(words)
        else:
            key = spots[after][2] if 0 < after < len(spots) else ""
            comments.setdefault(key, Comment()).above.append(words)
    return comments


def insert_comments(text: str, comments: Mapping[str, Comment]) -> str:
    """The text of plain block YAML with comments at its keys; those of keys that it has not are put at its head."""
    spots = {name: (line, column) for line, column, name in _keys(text)}
    lines = text.splitlines()
    above: dict[int, list[str]] = {}
    head: list[str] = []
    for key, comment in comments.items():
        if key not in spots:
            head += [f"# {words}".rstrip() for words in comment.lines()]
            continue
        line, column = spots[key]
        above.setdefault(line, []).extend(f"{' ' * column}# {words}".rstrip() for words in comment.above)
        if (
            comment.beside
            and re.search(r":( \S.*)?$", lines[line])
            and not lines[line].endswith(("|", ">", "|-", ">-"))
        ):
            lines[line] += f"  # {'; '.join(comment.beside)}"
        else:
            above[line] += [f"{' ' * column}# {words}".rstrip() for words in comment.beside]
    body = [each for number, own in enumerate(lines) for each in (*above.get(number, ()), own)]
    return "\n".join([*head, *body]) + "\n"


def _keys(text: str) -> Iterator[tuple[int, int, str]]:
    """Line, column and dotted name of every key, in order. The text has been loaded: it is small, plain, acyclic."""
    root = yaml.compose(text, Loader=PARSER)

    def walk(prefix: str, node: yaml.Node) -> Iterator[tuple[int, int, str]]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = join(prefix, key.value)
            yield key.start_mark.line, key.start_mark.column, name
            if value.start_mark.index >= key.start_mark.index:  # else an alias of what stands elsewhere
                yield from walk(name, value)

    return walk("", root) if root is not None else iter(())
