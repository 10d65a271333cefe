"""JSON, also with comments and commas too many, as DeepSpeed reads it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from terrazzo.documents.limits import check_depth, key_twice
from terrazzo.errors import BadInput
from terrazzo.untrusted_files import brackets

__all__ = ["read_json_text", "strict_json"]

_BESIDES = re.compile(r'"(?:[^"\\]|\\.)*"?|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z)|,(?=\s*[}\]])', re.DOTALL)
"""Text in quotes, and what strict JSON has not: comments, and commas before a closing bracket."""


def strict_json(text: str) -> str:
    """The text without what strict JSON does not have; all else keeps its place."""
    return _BESIDES.sub(lambda piece: piece[0] if piece[0][0] == '"' else re.sub(r"[^\n]", " ", piece[0]), text)


def read_json_text(text: str, origin: str) -> Any:
    """The value; each key of an object once."""
    text = strict_json(text)
    check_depth(brackets(text), origin)

    def refuse(word: str) -> NoReturn:
        raise BadInput(f"'{origin}' holds {word}, which is not a number that a setting can have.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_key: dict[str, Any] = {}
        for key, value in pairs:
            if key in by_key:
                raise key_twice(key, origin)
            by_key[key] = value
        return by_key

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
