"""The schema key by key, for those who read a document that it would refuse as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from terrazzo.config.schema import Config
from terrazzo.config.section import Named, Section
from terrazzo.messages import nearest

__all__ = ["CONFIG_KEYS", "SHORTHANDS", "keys_meant"]

_MOST_MEANT = 3
"""More keys that end alike, such as `name`, are no answer."""


@dataclass(frozen=True)
class ConfigKey:
    """What may stand at one key.

    Attributes:
        default: as a file would say it.
        kind: `bool`, `int`, `float`, `str`, `Path`, `list` or `dict`; of several, the first that the schema names.
        choices: the only words, if it is one of some.
        several: whether it takes several kinds beside null.
        null: whether it may be null.
        meaning: in a few words, or the choices.
    """

    default: Any
    kind: Any
    choices: tuple[str, ...]
    several: bool
    null: bool
    meaning: str


def _key(field: FieldInfo, default: Any) -> ConfigKey:
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (UnionType, Union) else (field.annotation,)
    kind, *others = [kind for kind in kinds if kind is not NoneType]
    choices = get_args(kind) if get_origin(kind) is Literal and not others else ()
    meaning = field.description or ", ".join(choices)
    return ConfigKey(default, get_origin(kind) or kind, choices, bool(others), NoneType in kinds, meaning)


def _walk(section: Section, defaults: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, ConfigKey]]:
    for name, field in type(section).model_fields.items():
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from _walk(inner, defaults[name], f"{prefix}{name}.")
        else:
            yield prefix + name, _key(field, defaults[name])


CONFIG_KEYS: dict[str, ConfigKey] = dict(_walk(Config(), Config().model_dump(mode="json")))
"""Every leaf of the schema by its dotted key, in the schema's order."""

SHORTHANDS = tuple(name for name in Config.model_fields if isinstance(getattr(Config(), name), Named))
"""Sections that may be given as just their name."""


def keys_meant(word: str) -> list[str]:
    """The dotted keys that `word` may mean: itself; those that end like it, the shortest first; or one that nearly
    does.
    """
    if word in CONFIG_KEYS or word in SHORTHANDS:
        return [word]
    last = word.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for key in CONFIG_KEYS:
        ends.setdefault(key.rpartition(".")[2], []).append(key)
    near = last if last in ends else nearest(last, ends, 0.75)
    meant = sorted(ends[near], key=lambda key: key.count(".")) if near else []
    return meant if len(meant) <= _MOST_MEANT else []
