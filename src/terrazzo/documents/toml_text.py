"""TOML, with dates as text."""

from __future__ import annotations

import datetime
import itertools
import re
import tomllib
from typing import Any

from terrazzo.documents.limits import MAX_DEPTH, MAX_VALUES, check_depth, too_many

__all__ = ["read_toml"]

_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)|' + r"\'\'\'.*?(?:\'\'\'|\Z)|" + r'"(?:[^"\\\n]|\\.)*"?|' + r"'[^'\n]*'?|#[^\n]*",
    re.DOTALL,
)
"""Text in quotes, and comments."""
_LONG_NAME = re.compile(rf"(?:^|[{{,])(?:[^\n.,={{}}]*\.){{{MAX_DEPTH}}}", re.MULTILINE)
"""A name that goes down as deep as nothing may: each key below it would cost as much. Blanks and brackets before it
match as part of it: a pattern of their own would make the search quadratic in how many there are."""


def read_toml(text: str, origin: str) -> Any:
    """The value; what is too much is refused before the parser spends its time on it."""
    bare = _QUOTED.sub('""', text)
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", bare))
    too_deep = [MAX_DEPTH + 1] if _LONG_NAME.search(bare) else []
    check_depth(itertools.chain(too_deep, steps), origin)
    if sum(map(bare.count, ",=[")) > MAX_VALUES:  # before the parser spends its time on them
        raise too_many(origin)
    return _dates_as_text(tomllib.loads(text))


def _dates_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dates_as_text(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_dates_as_text(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value
