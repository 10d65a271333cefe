"""Dotted keys such as `zero_optimization.stage`: of the leaves of a document, taken apart and put together again."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["flatten", "join", "keys_in", "put", "split", "without"]


def flatten(document: Mapping[str, Any], opaque: Iterable[str] = ()) -> dict[str, Any]:
    """Leaves by dotted key. Lists, empty sections and the keys in `opaque` are leaves."""
    flat: dict[str, Any] = {}
    leaves = frozenset(opaque)

    def walk(prefix: str, section: Mapping[str, Any]) -> None:
        for name, value in section.items():
            key = join(prefix, str(name))
            if isinstance(value, Mapping) and value and key not in leaves:
                walk(key, value)
            else:
                flat[key] = value

    walk("", document)
    return flat


def join(prefix: str, name: str) -> str:
    """A dotted key; a name that is empty, or has dots or quotes of its own or what joins keys, is quoted.

    Quotes of its own are doubled.
    """
    doubled = name.replace('"', '""')
    part = f'"{doubled}"' if not name or "." in name or '"' in name or ", " in name else name
    return f"{prefix}.{part}" if prefix else part


def split(key: str) -> list[str]:
    """The names that `join` put together."""
    parts = re.findall(r'(?:^|\.)(?:"((?:[^"]|"")*)"(?=\.|\Z)|([^.]*))', key)
    return [quoted.replace('""', '"') or plain for quoted, plain in parts]


def put(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a key in place, and make the sections that it is in, in place of what is none."""
    *parents, last = split(key)
    for name in parents:
        if not isinstance(document.get(name), dict):
            document[name] = {}
        document = document[name]
    document[last] = value


def without(document: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A copy of a document that lacks some keys, and the sections that then hold nothing."""

    def lacking(section: Mapping[str, Any], gone: Iterable[list[str]]) -> dict[str, Any]:
        below: dict[str, list[list[str]]] = {}
        for name, *rest in gone:
            below.setdefault(name, []).append(rest)
        kept = {name: value for name, value in section.items() if all(below.get(name, ()))}
        inner = {name: lacking(kept[name], below[name]) for name in below if isinstance(kept.get(name), Mapping)}
        return {name: value for name, value in {**kept, **inner}.items() if value or name not in below}

    return lacking(document, map(split, keys))


@functools.lru_cache(maxsize=4096)  # it is asked for at every setting
def keys_in(text: str) -> tuple[str, ...]:
    """The keys that `", "` joins; one with a comma of its own has quotes around the name, see `join`."""
    parts = re.findall(r'(?:^|, )((?:"[^"]*"|(?!, ).)*)', text, re.DOTALL) if '"' in text else text.split(", ")
    return tuple(part for part in parts if part)
