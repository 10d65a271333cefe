"""JSON: read also with comments and commas too many, as DeepSpeed does; written without."""

from __future__ import annotations

import json
import re
from typing import Any

from terrazzo.documents.limits import check_depth, key_twice
from terrazzo.errors import BadInput
from terrazzo.untrusted_files import brackets

__all__ = ["read_json_text", "strict_json", "write_json"]

_QUOTED = r'"(?:[^"\\]|\\.)*"?'
_BESIDES = (
    re.compile(rf"{_QUOTED}|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL),
    re.compile(rf"{_QUOTED}|,(?=\s*[}}\]])", re.DOTALL),
)
"""Text in quotes, and what strict JSON has not: comments, then commas before a closing bracket, as a comment may stand
between the two."""
_PIECE = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]|-?Infinity|NaN')
"""What decides which keys an object has, and words that Python takes for numbers."""


def strict_json(text: str) -> str:
    """The text without what strict JSON does not have; all else keeps its place."""
    for besides in _BESIDES:
        text = besides.sub(lambda piece: piece[0] if piece[0][0] == '"' else re.sub(r"[^\n]", " ", piece[0]), text)
    return text


def read_json_text(text: str, origin: str) -> Any:
    """The value; each key of an object once, and all numbers finite."""
    text = strict_json(text)
    check_depth(brackets(text), origin)
    value = json.loads(text)
    sections: list[set[str]] = []
    for piece in _PIECE.finditer(text):
        quoted, colon = piece.groups()
        if piece[0] == "{":
            sections.append(set())
        elif piece[0] == "}":
            sections.pop()
        elif not quoted:
            line = text.count("\n", 0, piece.start()) + 1
            raise BadInput(
                f"'{origin}' line {line} has {piece[0]}, which is not a number that a setting can have: write one."
            )
        elif colon:
            key = json.loads(quoted)
            if key in sections[-1]:
                raise key_twice(key, origin, text.count("\n", 0, piece.start()) + 1)
            sections[-1].add(key)
    return value


def write_json(value: Any) -> str:
    """The text of plain data."""
    return json.dumps(value, indent=2) + "\n"
