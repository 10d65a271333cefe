"""Reading a document key by key, so that none is left without a verdict.

    reader = Reader(document, "torchtitan", keys=KEYS)
    steps = reader.take("training.steps")
    ...
    return reader.finish("torchtitan", {"schedule.total_steps": steps, ...})

A value of the wrong type or out of range is a `refused` verdict and reads as the default. When the reader finishes,
what nobody has taken is kept as its row says, or is a key that the library does not know: refused, with the nearest
known one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Extra, Setting, SettingOrigin, SettingsByPath, build
from terrazzo.dialects.core.dialect import ConfigDocument, Reading
from terrazzo.dialects.core.key_verdict import TODAY, KeyVerdict, Loss, VerdictKind, worst
from terrazzo.dialects.core.keys import (
    ANY,
    MISSING,
    NAME_LIST,
    ONE_OF,
    Key,
    Type,
    row_of,
)
from terrazzo.dialects.core.wording import found
from terrazzo.documents.dotted_keys import flatten, put, without
from terrazzo.messages import did_you_mean, nearest

__all__ = ["IDLE", "Reader", "derived", "only_from_file"]

IDLE = "it has no effect there"
"""What is said of a key that asks for something, of which its reader has made no setting and said nothing."""
_SLIPS = 32
"""Unknown keys of a document for which the nearest known one is looked for: that takes milliseconds each."""


class Reader:
    """The leaves of one document, and what became of each.

    A key is looked at by `in` and `raw`, and taken, which is its verdict, by `take` and its kin.

    Args:
        document: as loaded.
        library: its name in messages.
        opaque: dotted keys whose value is one leaf although it is a mapping.
        keys: what the library knows.
        canonical: the name that a row has, of a key as a document may spell it. Of several spellings of one key the
            `winner` counts, and the others are refused, or renamed where they say the same or nothing.
        older: spellings other than a row's are older ones: such a key is renamed.

    Attributes:
        spelling: the document's key by the name that its row has.
        extras: what is kept beside the settings.
    """

    def __init__(
        self,
        document: ConfigDocument,
        library: str,
        opaque: Iterable[str] = (),
        keys: Mapping[str, Key] | None = None,
        canonical: Callable[[str], str] = str,
        *,
        older: bool = False,
    ) -> None:
        self.document, self.library, self.keys, self.canonical = document, library, keys or {}, canonical
        self.flat, self.older = self.leaves(document, opaque), older
        self.verdicts: dict[str, KeyVerdict] = {}
        self.extras: list[Extra] = []
        self._parsed: dict[str, Any] = {}
        self._strangers = 0
        self.spelling = self._elected()

    def leaves(self, document: ConfigDocument, opaque: Iterable[str]) -> dict[str, Any]:
        """Values by the document's own keys."""
        return flatten(document, opaque)

    def winner(self, name: str, keys: list[str]) -> str:
        """Which of the document's spellings of a key counts: the last."""
        return keys[-1]

    def _elected(self) -> dict[str, str]:
        """The spelling that counts by the name of the row, with a verdict for all that do not."""
        spellings: dict[str, list[str]] = {}
        for key in self.flat:
            spellings.setdefault(self.canonical(key), []).append(key)
        winners = {name: self.winner(name, keys) for name, keys in spellings.items()}
        for key, value in self.flat.items():
            if (winner := winners[self.canonical(key)]) != key:
                agrees = self.says_nothing(key) or value == self.flat[winner]
                why = f"{winner} says it too{'' if agrees else ', and wins'}"
                self.verdicts[key] = KeyVerdict(key, value, "renamed" if agrees else "refused", "", why)
        return winners

    def says_nothing(self, key: str) -> bool:
        """Whether a spelling that does not count asks for nothing."""
        return self.flat[key] is None

    def __contains__(self, key: str) -> bool:
        """Whether the document has this key, under any of its spellings, or any below it."""
        return self.spelled(key) in self.flat or any(name.startswith(f"{key}.") for name in self.flat)

    def spelled(self, key: str) -> str:
        """The key as the document spells it, where the library takes several spellings."""
        return self.spelling.get(key, key)

    def row_of(self, key: str) -> Key | None:
        """The row of a key by any of its spellings; None where the library knows no such key."""
        return row_of(self.keys, self.canonical(key))

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands there, under any of its spellings. The key is not taken."""
        return self.flat.get(self.spelled(key), default)

    # -- taking a key ----------------------------------------------------------------------------------------------

    def take(self, key: str) -> Setting[Any]:
        """A key by its row: checked as that says, else the default. A key without one is taken as it stands."""
        row = row_of(self.keys, key)
        if row is None:
            return self.take_raw(key)
        default = self.default(key)
        return self._checked(key, default or () if row.type is NAME_LIST else default, row.type, row.nullable)

    def default(self, key: str) -> Any:
        """What the library does where the document does not say it, in neutral words."""
        return self.keys[key].neutral

    def take_as(self, key: str, kind: Type, default: Any = None, *, null: bool = False) -> Setting[Any]:
        """A key as a value of a type that its row does not say. `null`: nothing at all says nothing."""
        return self._checked(key, default, kind, null)

    def take_raw(self, key: str, default: Any = None) -> Setting[Any]:
        """A key as it stands there, whatever that is; else the default."""
        key = self.spelled(key)
        if key not in self.flat:
            return Setting(default, "default", "")
        self.mark(key, "applied")
        return Setting(self.flat[key], "file", key)

    def _checked(self, key: str, default: Any, kind: Type, null: bool) -> Setting[Any]:
        key = self.spelled(key)
        if key not in self.flat:
            return Setting(default, "default", "")
        raw = self.flat[key]
        if raw is None and null:
            self._parsed[key] = None
            self.mark(key, "applied")
            return Setting(default, "default", key)
        value = kind.parse(raw)
        if value is MISSING:
            self._parsed[key] = None
            self.refuse(key, f"it is {found(raw)}, expected {_expected(kind, raw)}")
            return Setting(default, "default", key)
        self._parsed[key] = value
        self.mark(key, "applied")
        return Setting(value, "file", key)

    def quotient(self, whole: Setting[Any], part: Setting[Any], *, exact: bool = False) -> Setting[Any]:
        """How often a part goes into a whole: None, and the whole's key refused, where not once.

        A remainder is dropped: the key is lossy, or with `exact` refused.
        """
        count, rest = divmod(whole.value, part.value)
        if rest and count and not exact:
            self.mark(whole.key, "lossy", f"{whole.value} is {count} times {part.value}, and a part: {count} is taken")
        elif rest or not count:
            self.refuse(whole.key or part.key, f"{whole.value} is no multiple of {part.value}: make it one")
            return Setting(None, "default", whole.key)
        return derived(count, whole, part)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def mark(self, key: str, kind: VerdictKind, why: str = "", target: str = "") -> None:
        """What became of a key: the gravest verdict stands, in whatever order they come; of equal ones the last."""
        key = self.spelled(key)
        before = self.verdicts.get(key)
        if key in self.flat and (before is None or worst([before.kind, kind]) == kind):
            self.verdicts[key] = KeyVerdict(key, self.flat[key], kind, target, why)

    def refuse(self, key: str, why: str) -> None:
        self.mark(key, "refused", why)

    def keep(self, key: str, why: str = "", *, loss: Loss = "lossy", usual: bool = False, here: str = "") -> None:
        """Keep a key, or all below it, as it is: it means something to this library alone. See `Extra`."""
        where = self.spelled(key)
        for name in [name for name in self.flat if name == where or name.startswith(f"{key}.")]:
            self.mark(name, "applied")
            kept = self.canonical(name) if self.older else name
            self.extras.append(Extra(kept, self.flat[name], why, loss, usual, here))

    def keep_nulls(self) -> None:
        """Keep known keys that say nothing."""
        for key in [key for key, value in self.flat.items() if value is None or value == {}]:
            if self.row_of(key) is not None:
                self.keep(key, "it says nothing: the default holds", loss="harmless", usual=True)

    def keep_rows(self) -> None:
        """Keep the known keys that nobody has read as their rows say; at most defaults they are harmless."""
        for key in self.unread():
            self.keep_row(key)

    def keep_row(self, key: str) -> None:
        """Keep a key of the document as its row says."""
        key, row = self.spelled(key), self.row_of(key)
        if row is not None and row.loss:
            value = row.type.parse(self.flat[key])
            if value is not MISSING:
                self._parsed[key] = value
            value, listed = self._parsed.get(key, self.flat[key]), self.canonical(key) in self.keys
            harmless = listed and not row.lost_beside and value in (row.default, row.neutral)
            usual = listed and value == row.default
            loss = "harmless" if harmless else row.loss
            self.keep(key, row.why or row.meaning, loss=loss, usual=usual, here=row.here)

    def unread(self) -> list[str]:
        """Keys that nobody has taken yet."""
        return [key for key in self.flat if key not in self.verdicts]

    def finish(
        self,
        dialect: str,
        settings: Mapping[str, Setting[Any]],
        known: Iterable[str] | None = None,
        unknown: str = "ignores it",
        gone: Mapping[str, str] | None = None,
    ) -> Reading:
        """The reading, with a verdict for every key: what nobody has read is kept as its row says, or refused.

        Args:
            dialect: its name.
            settings: settings by path.
            known: the dialect's known keys, for the nearest one to a misspelt key; default: those of the rows.
            unknown: what the library does with a key that it does not know, after its name.
            gone: keys that it has no longer, or sections of them, and the edit.
        """
        self.keep_rows()
        names = list(self.keys if known is None else known)
        for key in self.unread():
            if self.row_of(key) is not None:
                self.refuse(key, f"it is {found(self.flat[key])}, which {self.library} does not take there")
            elif self.flat[key] == {} and any(name.startswith(f"{key}.") for name in names):
                self.mark(key, "applied", "an empty section says nothing")
            else:
                self.refuse(key, self._value_above(key, names) or self.stranger(key, names, unknown, gone or {}))
        settings = {path: self._as_spelled(setting) for path, setting in settings.items()}
        self._name_targets(settings)
        self._keep_idle(settings)
        if self.older:
            self._rename()
        ordered = tuple(self.verdicts[key] for key in self.flat)
        description = build(dialect, settings, tuple(self.extras), self._without_refused())
        return Reading(description, ordered, self.document, self._values())

    def _value_above(self, key: str, known: list[str]) -> str:
        """Why a key is none that stands below one whose value is no section; empty where it does not."""
        name = self.canonical(key)
        above = [name[:end] for end, letter in enumerate(name) if letter == "."]
        for place, row in ((place, self.keys.get(place)) for place in above):
            if row is not None and row.type is not ANY and not any(each.startswith(f"{place}.") for each in known):
                return f"{place} is a section of keys, expected {row.type.expected}"
        return ""

    def stranger(self, key: str, known: list[str], unknown: str, gone: Mapping[str, str]) -> str:
        """Why a key that the library does not know is refused: what it does with it, and what may have been meant.

        The arguments are those of `finish`.
        """
        name = self.canonical(key)
        for old, edit in gone.items():
            if name == old or name.startswith(f"{old}."):
                return f"{self.library} has no such key any more and {unknown}: {edit}"
        return f"{self.library} has no such key and {unknown}.{self.nearest(name, known)}"

    def nearest(self, key: str, known: list[str]) -> str:
        """The known key that was meant: in the same section by its last name, else anywhere.

        A document with many strangers is not one of slips: of those after the first few nothing is said.
        """
        self._strangers += 1
        if self._strangers > _SLIPS:
            return ""
        parent, _, last = key.rpartition(".")
        siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
        near = did_you_mean(last, siblings)
        if near or not parent:
            return near or did_you_mean(key, known)
        if meant := _by_level(key, known):
            return f" Did you mean '{meant}'?"
        elsewhere = [name for name in known if name.rpartition(".")[2] == last]
        return f" Did you mean '{elsewhere[0]}'?" if elsewhere else did_you_mean(key, known)

    def _as_spelled(self, setting: Setting[Any]) -> Setting[Any]:
        """The setting under the document's own keys."""
        keys = dict.fromkeys(map(self.spelled, setting.keys))
        return setting if tuple(keys) == setting.keys else replace(setting, key=", ".join(keys))

    def _rename(self) -> None:
        """Say of keys in older spellings which is today's."""
        for name, key in self.spelling.items():
            verdict = self.verdicts[key]
            if key != name:
                kind = "renamed" if verdict.kind == "applied" else verdict.kind
                why = verdict.why or f"{TODAY}{name}"
                self.verdicts[key] = replace(verdict, kind=kind, why=why, target=verdict.target or name)

    def _without_refused(self) -> dict[str, Any]:
        """The document as its own library takes it; older spellings are today's."""
        refused = [key for key, verdict in self.verdicts.items() if verdict.kind == "refused"]
        older = {key: name for name, key in self.spelling.items() if key != name} if self.older else {}
        kept = without(self.document, [*refused, *older])
        for key, name in older.items():
            if key not in refused:
                put(kept, name, self.flat[key])
        return kept

    def _keep_idle(self, settings: Mapping[str, Setting[Any]]) -> None:
        """Keep what has been read and is no setting: harmless where it is the default, or a word says why."""
        told = {key for setting in settings.values() for key in setting.keys} | {extra.key for extra in self.extras}
        told |= {self.spelled(key) for key in told}
        for key, verdict in self.verdicts.items():
            if key not in told and verdict.kind != "refused" and verdict.value != {}:
                harmless = bool(verdict.why) or self._is_default(key)
                why = verdict.why or ("" if harmless else IDLE)
                self.extras.append(Extra(key, verdict.value, why, loss="harmless" if harmless else "lossy"))

    def _is_default(self, key: str) -> bool:
        """Whether a key says what the library does where nothing is said."""
        row, value = self.row_of(key), self._parsed.get(key, self.flat[key])
        return value is None or (row is not None and value in (row.default, row.neutral))

    def _values(self) -> dict[str, Any]:
        """See `Reading.values`."""
        names = {key: self.canonical(key) for key in self.flat}
        counts = {key: name for key, name in names.items() if self.spelled(name) == key}
        return {name: self._parsed.get(key, self.flat[key]) for key, name in counts.items()}

    def _name_targets(self, settings: Mapping[str, Setting[Any]]) -> None:
        paths: dict[str, list[str]] = {}
        for path, setting in settings.items():
            for key in setting.keys:
                paths.setdefault(key, []).append(path)
        for key, targets in paths.items():
            verdict = self.verdicts.get(key)
            if verdict is not None and not verdict.target:
                self.verdicts[key] = replace(verdict, target=", ".join(targets))


def _by_level(key: str, known: Iterable[str]) -> str:
    """The known key that is near in each of its parts, of those with as many; empty where there is none."""
    parts = key.split(".")
    left = [each for each in (name.split(".") for name in known) if len(each) == len(parts)]
    for place, part in enumerate(parts):
        names = dict.fromkeys(each[place] for each in left)
        meant = part if part in names else nearest(part, names)
        left = [each for each in left if each[place] == meant]
    return ".".join(left[0]) if left else ""


def derived(value: Any, *sources: Setting[Any], origin: SettingOrigin = "derived") -> Setting[Any]:
    """A value worked out from others: under their keys; of the file if any is and `origin` is "file"."""
    keys = dict.fromkeys(key for source in sources for key in source.keys)
    return Setting(value, origin, ", ".join(keys))


def only_from_file(settings: Mapping[str, Setting[Any]]) -> SettingsByPath:
    """The settings that the file gives a value: a default that says nothing to others is left unset."""
    return {path: setting for path, setting in settings.items() if setting.origin == "file"}


def _expected(kind: Type, raw: Any) -> str:
    """What a type takes, and which of its words may have been meant; in capitals where the file has them so."""
    if not isinstance(raw, str) or not kind.expected.startswith(ONE_OF):
        return f"{kind.expected}."
    known = kind.expected.removeprefix(ONE_OF).split(", ")
    if raw.isupper():
        known = [word if kind.parse(word.upper()) is MISSING else word.upper() for word in known]
    return f"{ONE_OF}{', '.join(known)}.{did_you_mean(raw, known)}"
