"""What becomes of every key of a dialect in Terrazzo's YAML: each is converted beside a small configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Dialect, Reading, ReadingContext
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.keys import Key
from terrazzo.dialects.formats.deepspeed.keys import ALIASES
from terrazzo.dialects.formats.trainer.keys_earlier import ALIASES as FIELDS_OF_BEFORE
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.documents.dotted_keys import flatten, split
from tools.migration.examples import BESIDE, CONCRETE, VALUES

__all__ = ["ELSEWHERE", "Fate", "fates", "in_yaml", "spellings"]

RANKS = 8
WORLD = ReadingContext(world=RANKS, folder=Path(__file__).parents[2] / "examples" / "migration")
OTHER_WORLDS = (2, 16)
"""Numbers of ranks for keys that do not fit 8, such as an axis of 2 by itself."""
ELSEWHERE = ("deepspeed.*", "megatron_lm_config.*")
"""Another dialect's keys, and an engine's that is refused."""
KINDS: tuple[Any, ...] = (2, 0.5, True, False, ["Block"], "x")
BOILERPLATE = re.compile(r"^(changes no result, and is left out|no such setting in Terrazzo YAML)(; )?")


@dataclass(frozen=True)
class Fate:
    """What becomes of one key.

    Attributes:
        key: as the dialect lists it.
        value: an example; None where it would tell nothing.
        kind: of the verdict.
        target: Terrazzo's keys with the values that the example gives them, apart by semicolons.
        why: the verdict's, without what the kind says already.
        meaning: what the key does, in the dialect's words.
    """

    key: str
    value: Any
    kind: str
    target: str
    why: str
    meaning: str


def fates(name: str) -> list[Fate]:
    """Of every key that the dialect of that name knows, in its order; a section's keys with one prefix or without."""
    known = [key for key in dialect(name).keys if key not in spellings(name)]
    found = [_fate_of(name, key) for key in known if not _again(name, key, known) and key not in ELSEWHERE]
    said = {_said_of(each) for each in found}
    return [each for each in found if (each.key.removesuffix(".*"), each.kind, each.why) not in said - {_said_of(each)}]


def _said_of(fate: Fate) -> tuple[str, str, str]:
    return fate.key, fate.kind, fate.why


def spellings(name: str) -> dict[str, str]:
    """Keys that a dialect reads as another one."""
    return {"deepspeed": ALIASES, "trainer": FIELDS_OF_BEFORE}.get(name, {})


def _again(name: str, key: str, known: list[str]) -> bool:
    """Whether a key of Accelerate lacks the section's prefix, or one of the Trainer's has it: both are read."""
    section, _, last = key.partition(".")
    if name == "trainer":
        return last.startswith("fsdp_") and f"{section}.{last.removeprefix('fsdp_')}" in known
    return f"{section}.{section.removesuffix('config')}{last}" in known


def _fate_of(name: str, key: str) -> Fate:
    """Of a key at the top that its library alone has: as of the first whose row is the same, default aside."""
    rows = dialect(name).keys
    if name != "megatron" or not rows[key].loss or key in VALUES[name] or _beside(name, key) != BESIDE[name][""]:
        return _fate(name, key)
    row = replace(rows[key], default=rows[key].default is None)
    return replace(_fate(name, _first_of(name)[row]), key=key)


@cache
def _first_of(name: str) -> dict[Key, str]:
    """The first key with each row, default aside."""
    found: dict[Key, str] = {}
    for key, row in dialect(name).keys.items():
        if key not in VALUES[name] and _beside(name, key) == BESIDE[name][""]:
            found.setdefault(replace(row, default=row.default is None), key)
    return found


@cache
def _fate(name: str, key: str) -> Fate:
    """Told by the first value that changes what the configuration means, or else by the first that is taken."""
    beside = _beside(name, key)
    plain = _plain(name, _prefix(name, key))
    taken = _taken(name, key, beside, (VALUES[name][key],) if key in VALUES[name] else _tried(name, key, beside))
    first = next(taken, None)
    if first is None:
        raise ValueError(f"{name} takes none of the values tried for {key}: give one in tools/migration/examples.py")
    telling = next((each for each in chain([first], taken) if _tells(key, each[1], plain)), None)
    value, reading = telling or first
    shows = key in VALUES[name] or (telling is not None and not _is_one_of_any(name, key, beside, value))
    conversion, verdict = _converted(name, key, reading)
    flat = flatten(conversion.document) | flatten(conversion.document, ("optimizer.options",))
    target = _target(verdict.target, flat)
    why, meaning = _said(key, verdict.why), dialect(name).meaning(key)
    return Fate(key, value if shows else None, verdict.kind, target, why, meaning)


@cache
def _terrazzo() -> Dialect:
    """Which reads a document again that another key has given, as most do, from memory."""
    target, read = dialect("terrazzo"), dict[str, Reading]()

    def remembered(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        asked = repr((document, context))
        if asked not in read:
            read[asked] = target.read(document, context)
        return read[asked]

    return replace(target, read=remembered)


def _converted(name: str, key: str, reading: Reading) -> tuple[Conversion, KeyVerdict]:
    """With the first number of ranks that the key fits; with that of all others, where none does."""

    def among(world: int, read: Reading) -> tuple[Conversion, KeyVerdict]:
        conversion = convert_reading(dialect(name), read, _terrazzo(), replace(WORLD, world=world))
        return conversion, next(each for each in conversion.verdicts if _is(each.key, key))

    found = among(RANKS, reading)
    if found[1].kind != "refused":
        return found
    others = (among(world, _read(name, reading.document, world)) for world in OTHER_WORLDS)
    return next((each for each in others if each[1].kind != "refused"), found)


def _tells(key: str, reading: Reading, plain: list[Any]) -> bool:
    """Whether a value changes a setting, or is something that no other dialect has."""
    grave = any(_is(each.key, key) and each.kind in ("refused", "lossy") for each in reading.verdicts)
    own = any(_is(extra.key, key) and extra.loss != "harmless" for extra in reading.description.extras)
    return grave or own or _values(reading) != plain


def _is_one_of_any(name: str, key: str, beside: dict[str, Any], value: Any) -> bool:
    """Whether a value tells nothing, since any other would do: a word that is none is taken, too."""
    is_any = isinstance(value, bool | int | float | list) or value == "x"
    return is_any and next(_taken(name, key, beside, ("x",)), None) is not None


def _prefix(name: str, key: str) -> str:
    return max((prefix for prefix in BESIDE[name] if key.startswith(prefix)), key=len)


def _beside(name: str, key: str) -> dict[str, Any]:
    return BESIDE[name][_prefix(name, key)]


@cache
def _plain(name: str, prefix: str) -> list[Any]:
    """What the configuration means without the key."""
    return _values(_read(name, BESIDE[name][prefix]))


def _tried(name: str, key: str, beside: dict[str, Any]) -> tuple[Any, ...]:
    return *_words(name, key, beside), *KINDS


def _taken(name: str, key: str, beside: dict[str, Any], values: Iterable[Any]) -> Iterator[tuple[Any, Reading]]:
    """Those of the values that the reader takes for a key, and what it makes of them."""
    for value in values:
        reading = _read(name, _with(beside, key, value))
        verdict = next((each for each in reading.verdicts if _is(each.key, key)), None)
        if verdict is not None and not (verdict.kind == "refused" and _is_no_value(verdict.why)):
            yield value, reading


def _is_no_value(why: str) -> bool:
    return "expected" in why or "does not take there" in why


def in_yaml(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()


def _target(keys: str, written: dict[str, Any]) -> str:
    """Terrazzo's keys, with what the example made of them."""
    found = [key for key in keys.split(", ") if key]
    return "; ".join(f"{key}: {in_yaml(written[key])}" if key in written else key for key in found)


def _said(key: str, why: str) -> str:
    """The reason, without what its kind says, and without the example's own name and value."""
    last = key.rpartition(".")[2]
    said = re.sub(rf"(know|has) no {re.escape(last)}( \S+)?$", r"\1 no such argument", BOILERPLATE.sub("", why))
    return said.removesuffix(f": {last.replace('_', ' ')}")


def _words(name: str, key: str, beside: dict[str, Any]) -> list[str]:
    """The words that a key takes, as the reader's own message lists them."""
    for verdict in _read(name, _with(beside, key, "no such word")).verdicts:
        if _is(verdict.key, key) and (match := re.search(r"expected one of ([^.]*)", verdict.why)):
            return [word.strip() for word in match[1].split(",")]
    return []


def _with(beside: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The configuration with one more key."""
    document = copy.deepcopy(beside)
    inner = document
    *parents, last = split(_concrete(key))
    for part in parents:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[last] = value
    return document


def _concrete(key: str) -> str:
    """A key in place of a pattern."""
    return CONCRETE.get(key) or ".".join("any" if part == "*" or part[0] == "<" else part for part in key.split("."))


def _is(read: str, key: str) -> bool:
    """Whether a key as it was read is the one that was tried, or the section that a pattern stands for."""
    concrete = _concrete(key)
    return read == concrete or (key != concrete and concrete.startswith(f"{read}.")) or read.startswith(f"{concrete}.")


def _read(name: str, document: ConfigDocument, world: int = RANKS) -> Reading:
    return read_document(dialect(name), document, replace(WORLD, world=world))


def _values(reading: Reading) -> list[Any]:
    return [(path, setting.value) for path, setting in reading.description.items()]
