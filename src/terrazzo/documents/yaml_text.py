"""YAML of plain values: read, nothing that a tag names is called and aliases cannot blow up; and written.

`1e-3` is a number, dates are text, and numbers in base 8 and 60 are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml

from terrazzo.documents.limits import MAX_VALUES, check_depth, key_twice, too_many
from terrazzo.errors import BadInput
from terrazzo.messages import shortened

__all__ = ["PARSER", "IsText", "comments", "never", "read_yaml", "write_yaml"]

PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where it is there: 10 times faster."""
_MAX_DIGITS = 100  # YAML's numbers in base 60 take quadratic time
IsText = Callable[[str, str], bool]
"""Whether a key's value, as it is written, is text although YAML 1.1 takes it for a number."""


def never(key: str, text: str) -> bool:
    """No value is text that YAML takes for a number."""
    return False


class _Loader(PARSER):  # type: ignore[misc]
    """Plain values only. `1e-3` is a number, as in YAML 1.2; dates are text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_WITH_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
"""`1e-3`: a number to YAML 1.2 and here, text to YAML 1.1 and its library."""
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _WITH_EXPONENT, list("-+0123456789"))
_NUMBERS = (":int", ":float")
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-9_.]+)+)")
"""`010` and `1:30`, which are 8 and 90 to YAML 1.1 alone."""
_TEXT = "tag:yaml.org,2002:str"
_PLAIN = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "value")
)


def read_yaml(text: str, origin: str, is_text: IsText = never) -> Any:
    """The value of the one document; None for none."""
    check_depth(_events(text, origin), origin)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _Nodes(origin, is_text).check(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _events(text: str, origin: str) -> Iterator[int]:
    """The steps in depth, read before anything is built: what is too much is refused where it starts to be."""
    documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if count > 3 * MAX_VALUES:
            raise too_many(origin)
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

    def __init__(self, origin: str, is_text: IsText) -> None:
        self.origin, self.is_text = origin, is_text
        self.values: dict[int, int] = {}  # of a node and all below it, aliases expanded
        self.open: set[int] = set()

    def check(self, node: yaml.Node) -> int:
        """The number of values of a node and all below it, aliases expanded."""
        if id(node) in self.open:
            raise BadInput(
                f"'{self.origin}': the alias in line {node.start_mark.line + 1} contains itself: write the values out."
            )
        if id(node) in self.values:
            return self.values[id(node)]
        if node.tag not in _PLAIN:
            raise BadInput(
                f"'{self.origin}' line {node.start_mark.line + 1} has the tag {shortened(node.tag)!r}: a configuration "
                "holds plain values only, and nothing in it is called. Remove the tag."
            )
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(_NUMBERS) and len(node.value) > _MAX_DIGITS:
            raise BadInput(
                f"'{self.origin}' line {node.start_mark.line + 1} has a number of {len(node.value):,} characters: "
                "correct it."
            )
        if isinstance(node, yaml.ScalarNode) and _OTHER_BASE.fullmatch(node.value) and node.tag.endswith(_NUMBERS):
            raise BadInput(
                f"'{self.origin}' line {node.start_mark.line + 1} has the number {node.value}, which YAML 1.1 reads in"
                f" base {60 if ':' in node.value else 8}: write it in base 10, or in quotes if it is text."
            )
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            self._keep_text(node)
        self.open.add(id(node))
        count = 1 + sum(map(self.check, _children(node)))
        self.open.discard(id(node))
        if count > MAX_VALUES:
            raise BadInput(
                f"'{self.origin}' holds more than {MAX_VALUES:,} values once aliases are expanded: name another file."
            )
        self.values[id(node)] = count
        return count

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Each key is text, and there once."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":null"):
                raise BadInput(f"'{self.origin}' line {key.start_mark.line + 1}: a key is no text: name it.")
            if key.value in seen:
                raise key_twice(key.value, self.origin, key.start_mark.line + 1)
            seen.add(key.value)

    def _keep_text(self, node: yaml.MappingNode) -> None:
        """Have the loader take keys for text, and the values that are."""
        for key, value in node.value:
            if key.tag in _PLAIN and not key.tag.endswith(":merge"):
                key.tag = _TEXT  # `8:` and `on:` are the keys "8" and "on"
            if isinstance(value, yaml.ScalarNode) and self.is_text(key.value, value.value):
                value.tag = _TEXT


def comments(text: str) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is alone there, and words of every comment: a `#` after a blank that is in no scalar."""
    inside: dict[int, list[tuple[int, int]]] = {}
    for token in yaml.scan(text, Loader=PARSER):
        if isinstance(token, yaml.ScalarToken):
            first, last = token.start_mark, token.end_mark
            for number in range(first.line, last.line + 1):
                start = first.column if number == first.line else 0
                inside.setdefault(number, []).append((start, last.column if number == last.line else len(text)))
    for number, line in enumerate(text.splitlines()):
        for mark in re.finditer(r"(?:^|(?<=\s))#", line):
            if not any(start <= mark.start() < end for start, end in inside.get(number, ())):
                words = line[mark.end() :].removeprefix(" ").rstrip()
                yield number, not line[: mark.start()].strip(), words
                break


class _Dumper(yaml.SafeDumper):
    """Block style, with lists of plain values in one line, and no aliases."""

    def represent_sequence(
        self, tag: str, sequence: Iterable[Any], flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        values = list(sequence)
        flat = not any(isinstance(value, list | tuple | dict) for value in values)
        return super().represent_sequence(tag, values, flow_style=flat)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _WITH_EXPONENT, list("-+0123456789"))


def write_yaml(value: Any) -> str:
    """The text of plain data, with keys in their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
