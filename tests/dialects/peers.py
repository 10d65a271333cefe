"""What the tests of dialects share: the inventory of keys, documents from dotted keys, and what writers promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from terrazzo.dialects.core.agreement import agree_on, has_no_effect
from terrazzo.dialects.core.description import Description, asks_for_nothing
from terrazzo.dialects.core.dialect import Finding, Reading, ReadingContext, Writing
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.documents.dotted_keys import split

__all__ = [
    "assert_agrees_or_says",
    "assert_each_agrees_or_says",
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
    findings = dialect(name).findings(reading(name, document, **context), ReadingContext(**context))
    return {finding.key: finding for finding in findings}


def precision(name: str, document: dict[str, Any], **context: Any) -> list[str]:
    """Storage, compute, reduce, accumulate, master (and Adam), saved: the row of the precision table."""
    description = described(name, document, **context)
    assert description.value("precision.moments") == description.value("precision.master")
    return [description.value(f"precision.{column}") for column in COLUMNS]


KEPT = ("applied", "renamed", "defaulted")
_NARROW = {("bf16", "fp32"), ("fp16", "fp32")}
HELD: dict[str, set[tuple[Any, Any]]] = {
    "loading.broadcast": {(False, True), (True, False)},  # the same weights are read everywhere, or sent
    "loading.low_memory": {(False, True)},
    "mesh.dp_replicate": {(2, 1)},  # two axes are one, of a row that has one
    "mesh.dp_shard": {(4, 8), (4, None)},
    "offload.step": {("auto", "synchronous")},
    "precision.accumulate": {("bf16", "fp32")},  # until they are reduced
    "precision.buffers": {("loaded", "fp32")},  # a model that is loaded in fp32
    "precision.saved": _NARROW,  # nothing is saved
    "precision.weight": {*_NARROW, ("fp32", "bf16"), ("fp32", "fp16")},  # a copy of the masters, cast sooner or later
    "saving.export": {("full", "hf"), ("none", "full")},  # what is written has more
    "saving.state": {("full", "sharded"), ("local", "full"), ("local", "sharded"), ("sharded", "full")},
    "saving.when": {("never", "end")},
    "training.clip": {(None, 1e9)},
    "units.policy": {("classes", "auto"), ("none", "auto")},
}
"""What a setting may be, by path and as it was, where a writer says that it holds all the same. A new pair is a claim
that the document read back denies: add it if it is true."""
UNSAID: dict[str, set[str]] = {
    "batch.accumulation": {"megatron", "terrazzo", "torchtitan"},  # where the number of ranks is not known
    "batch.global_batch": {"deepspeed", "torchtitan", "trainer"},  # the same
    "loading.broadcast": {"megatron", "torchtitan"},
    "loading.low_memory": {"megatron"},
    "mesh.world": {"deepspeed", "fsdp1", "fsdp2", "terrazzo", "torchtitan", "trainer"},  # the launcher says it
    "offload.pin": {"megatron"},
    "offload.step": {"fsdp1", "fsdp2", "lightning", "megatron", "torchtitan"},
    "parallel.schedule": {"accelerate", "fsdp1"},  # without the axis
    "precision.buffers": {"megatron"},
    "precision.output": {"fsdp1", "fsdp2", "lightning", "torchtitan"},
    "prefetch.backward": {"deepspeed", "megatron"},
    "prefetch.forward": {"deepspeed", "megatron"},
    "saving.export": {"deepspeed"},
    "units.classes": {"deepspeed", "lightning", "megatron"},
    "units.policy": {"accelerate", "deepspeed", "fsdp2", "lightning", "trainer"},
}
"""Dialects that say nothing of a setting, by its path, where a writer says that it holds all the same."""


def assert_agrees_or_says(name: str, document: dict[str, Any], **context: Any) -> None:
    """A dialect's writer, held against its reader: see `assert_each_agrees_or_says`."""
    before = described(name, document, **context)
    writing = dialect(name).write(before, ReadingContext(**context))
    assert_each_agrees_or_says(before, writing, described(name, writing.document, **context))


def is_known_claim(path: str, before: Description, after: Description) -> bool:
    """Whether a setting that holds as a writer says is read back, or the claim is one that has been looked at."""
    if after[path].is_set:
        return agree_on(path, before, after) or (before.value(path), after.value(path)) in HELD.get(path, ())
    asks = not asks_for_nothing(path, before.value(path)) and not has_no_effect(before, path)
    return not asks or after.dialect in UNSAID.get(path, ())


def assert_each_agrees_or_says(before: Description, writing: Writing, after: Description) -> None:
    """What a writer calls kept is kept: the document, read back as `after`, says it too, or the writer says why not."""
    for verdict in writing.verdicts:
        path = verdict.key
        if verdict.kind not in KEPT:
            assert verdict.why, (path, verdict)
            continue
        if verdict.holds:
            assert is_known_claim(path, before, after), (path, before.value(path), after.value(path), verdict)
            continue
        assert agree_on(path, before, after), (path, before.value(path), after.value(path), verdict)
        counts = before[path].origin in ("file", "auto") and not asks_for_nothing(path, before.value(path))
        if counts and before.dialect != after.dialect:
            assert after[path].is_set or not verdict.target, (path, verdict)
