"""What pydantic says of a configuration in plain words: the key, what was found, and what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from terrazzo.config.keys import CONFIG_KEYS, keys_meant
from terrazzo.config.schema import Config
from terrazzo.config.secrets import without_passwords
from terrazzo.config.section import KeyDisagreement, KeysDisagree
from terrazzo.documents import parse_value
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, nearest, shortened

__all__ = ["KeyPath", "placed", "sentences", "wrong_keys", "wrong_value"]

KeyPath = tuple[int | str, ...]
"""The names from the root down to a key, as pydantic gives them."""

# How pydantic's kinds of error read in plain words: bounds by (name of the limit, comparison), types by their
# family.
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a section of keys",
    "model": "a section of keys",
    "path": "a path",
}
_NEARLY_EQUAL = 0.85  # as step and steps are


def sentences(invalid: ValidationError) -> list[tuple[str, str]]:
    """Pairs of a dotted key and a sentence about it."""
    lines: list[tuple[str, str]] = []
    for place, errors in wrong_keys(invalid).items():
        told = [why for error in errors if isinstance(why := error.get("ctx", {}).get("error"), KeysDisagree)]
        lines += [placed(_dotted(place), disagreement) for error in told for disagreement in error.told]
        lines += [] if told else [(_dotted(place), words) for words in wrong_value(place, errors)]
    return lines


def wrong_keys(invalid: ValidationError) -> dict[KeyPath, list[dict[str, Any]]]:
    """The errors of each key, or of what is no key of the schema.

    Where a key takes several kinds of values, pydantic has errors for each, with the kind in their location. Those of
    the kind that the value is stay, if its entries are wrong alone; else those of all kinds.
    """
    by_key: dict[KeyPath, list[dict[str, Any]]] = {}
    for detail in invalid.errors():
        place = detail["loc"]
        depths = range(1, len(place))
        key = next((place[:depth] for depth in depths if _dotted(place[:depth]) in CONFIG_KEYS), place)
        kind = 1 if key != place and CONFIG_KEYS[_dotted(key)].several else 0
        by_key.setdefault(key, []).append({**detail, "loc": (*key, *place[len(key) + kind :])})
    return {
        key: [error for error in errors if len(error["loc"]) > len(key)] or errors for key, errors in by_key.items()
    }


def wrong_value(place: KeyPath, errors: Sequence[dict[str, Any]], subject: str = "") -> list[str]:
    """Sentences about a key, or about each of its entries that is wrong; `subject` stands for the whole key."""
    if len(errors) == 1 or len(errors[0]["loc"]) > len(place):
        return [_sentence(error, subject if error["loc"] == place else "") for error in errors]
    key, value = _dotted(place), errors[0]["input"]
    kinds = " or ".join(_expected(error["type"], error.get("ctx", {})) for error in errors)
    return [f"{subject or key} is {_value_text(value)}, expected {kinds}{_or_null(key)}."]


def _dotted(place: KeyPath) -> str:
    return ".".join(map(str, place))


def placed(section: str, disagreement: KeyDisagreement) -> tuple[str, str]:
    """The whole dotted key of a disagreement, and its sentence, behind the name of the section that says so."""
    key = f"{section}.{disagreement.key}".strip(".")
    return key, f"{section}: {disagreement}" if section else str(disagreement)


def _sentence(error: dict[str, Any], subject: str) -> str:
    """One pydantic error in plain words: key, or `subject` in its place, what was found, what was expected."""
    where = _dotted(error["loc"])
    value, kind, context = error["input"], error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"])
    if kind == "value_error":
        return f"{where}: {context['error']}" if where and not subject else str(context["error"])
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        near = did_you_mean(str(value), choices)
        return f"{subject or where} is {value!r}, expected one of {', '.join(choices)}{_or_null(where)}.{near}"
    expected = f"{_expected(kind, context)}{_or_null(where)}"
    edit = _keys_of(where) or _one_name(where, value) or _edit(kind, value)
    return f"{subject or where} is {_value_text(value)}, expected {expected}.{edit}"


def _one_name(where: str, value: Any) -> str:
    """The edit where a glob's dots were taken for sections: `parallel.tensor.plan.layers.*.mlp=enter`; else empty."""
    key = next((key for key, known in CONFIG_KEYS.items() if known.kind is dict and where.startswith(f"{key}.")), "")
    if not key or not isinstance(value, dict):
        return ""
    name, inner = where.removeprefix(f"{key}."), value
    while isinstance(inner, dict) and inner:
        below, inner = next(iter(inner.items()))
        name = f"{name}.{below}"
    return f' Write one name in quotes, {{{name!r}: {inner}}}; as an override {key}="{{{name!r}: {inner}}}".'


def _edit(kind: str, value: Any) -> str:
    """The edit for a number or switch that is text (`'12'`, `'off'`), or a word in place of a list; else empty."""
    if isinstance(value, str) and kind == "list_type":
        return f" Write {json.dumps([value], ensure_ascii=False)}."
    if isinstance(value, float) and kind == "int_type" and value.is_integer():
        return " Write all of its digits, without a point or an exponent: as it stands it is rounded."
    if not isinstance(value, str) or kind not in ("int_type", "float_type", "bool_type"):
        return ""
    try:
        meant = parse_value(value, "yaml", "it")
    except BadInput:
        return ""
    right = isinstance(meant, bool) if kind == "bool_type" else type(meant) in (int, float)
    return f" Write {json.dumps(meant)}, without quotes." if right else ""


def _keys_of(where: str) -> str:
    """The edit where one value was given for a section: the keys that it has; else empty."""
    keys = [key.removeprefix(f"{where}.") for key in CONFIG_KEYS if key.startswith(f"{where}.")]
    return f" It has {', '.join(keys)}." if keys else ""


def _or_null(where: str) -> str:
    """`, or null: MEANING` for a key that may be null, as its description says; else empty."""
    known = CONFIG_KEYS.get(where)
    meaning = known.meaning.partition("null: ")[2].partition(";")[0] if known is not None and known.null else ""
    return f", or null: {meaning}" if meaning else ""


def _expected(kind: str, context: dict[str, Any]) -> str:
    if kind in _BOUNDS:
        limit, comparison = _BOUNDS[kind]
        return f"a number {comparison} {context[limit]:g}"
    if kind == "literal_error":
        return " or ".join(re.findall(r"'([^']*)'", context["expected"]))
    return "a finite number" if kind == "finite_number" else _KINDS.get(kind.split("_")[0], "another value")


def _value_text(value: Any) -> str:
    return "empty" if value is None else shortened(without_passwords(repr(value)))


def _unknown_key(location: tuple[int | str, ...]) -> str:
    *parents, key = (str(part) for part in location)
    section: type[BaseModel] = Config
    for name in parents:
        section = cast(type[BaseModel], section.model_fields[name].annotation)
    known = list(section.model_fields)
    place = f"section '{'.'.join(parents)}'" if parents else "the configuration"
    name, colon, value = key.partition(":")
    if colon and name in known:  # in braces YAML takes both for a key
        return f"unknown key '{key}' in {place}. Write a space behind the colon: {name}: {value}."
    meant = keys_meant(key)
    elsewhere = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    is_key = any(each.rpartition(".")[2] == key for each in meant)  # of another section
    near = elsewhere if is_key else did_you_mean(key, known) or elsewhere
    if is_key and (same := nearest(key, known, _NEARLY_EQUAL)):
        near = f" Did you mean {' or '.join(map(repr, [same, *meant]))}?"
    return f"unknown key '{key}' in {place}.{near or ' Known: ' + ', '.join(known) + '.'}"
