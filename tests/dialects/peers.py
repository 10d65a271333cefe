"""What the tests of dialects share: the inventory of keys, documents from dotted keys, and round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext
from terrazzo.dialects.core.dotted_keys import flatten, split
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.understand import read_document

__all__ = [
    "assert_lossless",
    "converted",
    "described",
    "findings_by_key",
    "inventory",
    "nested",
    "precision",
    "verdicts",
]

_DATA = Path(__file__).parent / "data"
COLUMNS = ("weight", "compute", "reduce", "accumulate", "master", "saved")


def inventory(source: str) -> list[str]:
    """Every key that a library documents, by the library's name."""
    keys: list[str] = json.loads((_DATA / "inventory.json").read_text())[source]
    return keys


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """A document from dotted keys."""
    document: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = split(key)
        place = document
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return document


def reading(name: str, document: dict[str, Any], **context: Any) -> Reading:
    return read_document(dialect(name), document, ReadingContext(**context))


def described(name: str, document: dict[str, Any], **context: Any) -> Description:
    return reading(name, document, **context).description


def verdicts(name: str, document: dict[str, Any], **context: Any) -> dict[str, KeyVerdict]:
    return {verdict.key: verdict for verdict in reading(name, document, **context).verdicts}


def converted(source: str, target: str, document: dict[str, Any], **context: Any) -> Conversion:
    return convert_reading(
        dialect(source), reading(source, document, **context), dialect(target), ReadingContext(**context)
    )


def findings_by_key(name: str, document: dict[str, Any], **context: Any) -> dict[str, Finding]:
    """Findings of the dialect itself, by key."""
    findings = dialect(name).findings(document, reading(name, document, **context), ReadingContext(**context))
    return {finding.key: finding for finding in findings}


def precision(name: str, document: dict[str, Any], **context: Any) -> list[str]:
    """Storage, compute, reduce, accumulate, master (and Adam), saved: the row of the precision table."""
    description = described(name, document, **context)
    assert description.value("precision.moments") == description.value("precision.master")
    return [description.value(f"precision.{column}") for column in COLUMNS]


def assert_lossless(name: str, document: dict[str, Any], **context: Any) -> dict[str, Any]:
    """Written and read again it means the same, and what was applied stands there as it stood."""
    before = reading(name, document, **context)
    written = dialect(name).write(before.description, ReadingContext(**context)).document
    after = described(name, written, **context)
    for path, setting in before.description.items():
        assert (path, after[path].value) == (path, setting.value)
    flat = flatten(written)
    for verdict in before.verdicts:
        if verdict.kind == "applied":
            assert _at(written, flat, verdict.key) == verdict.value, verdict
    known = {verdict.key for verdict in before.verdicts} | set(flatten(document))
    if not any(verdict.kind == "renamed" for verdict in before.verdicts):
        assert set(flat) <= known
    return written


def _at(document: dict[str, Any], flat: dict[str, Any], key: str) -> Any:
    if key in flat:
        return flat[key]
    place: Any = document
    for name in split(key):
        assert isinstance(place, dict), key
        assert name in place, key
        place = place[name]
    return place
