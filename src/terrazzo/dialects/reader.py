"""Reading a document key by key, so that none is left without a verdict.

    reader = Reader(document, "DeepSpeed")
    stage = reader.integer("zero_optimization.stage", 0, low=0, high=3)
    ...
    reader.keep("steps_per_print", why="how often a line is printed", harmless=True)
    return reader.finish("deepspeed", {"mesh.tp": tp, ...}, known_keys)

A value of the wrong type or out of range is a `refused` verdict and reads as the default. What nobody has taken when
the reader finishes is a key that the library does not know: refused, with the nearest known one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from terrazzo.dialects.description import Extra, Origin, Setting, build
from terrazzo.dialects.dialect import Document, Reading
from terrazzo.dialects.verdict import Kind, Verdict
from terrazzo.errors import did_you_mean

__all__ = ["Reader", "derived", "flatten", "given_only", "join", "keep_nulls", "matches", "refuse_rest", "split"]

_MISSING = object()


def flatten(document: Document, opaque: Iterable[str] = ()) -> dict[str, Any]:
    """Leaves by dotted key. Lists, empty sections and the keys in `opaque` are leaves."""
    flat: dict[str, Any] = {}
    whole = frozenset(opaque)

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value and prefix not in whole:
            for name, inner in value.items():
                walk(join(prefix, str(name)), inner)
        elif prefix:
            flat[prefix] = value

    walk("", document)
    return flat


def matches(key: str, pattern: str) -> bool:
    """Whether a dotted key is one of a pattern's: `<...>` is any one name, `.*` at the end anything below."""
    parts = [r"[^.]+" if part.startswith("<") else re.escape(part) for part in pattern.removesuffix(".*").split(".")]
    below = r"(\..+)?" if pattern.endswith(".*") else ""
    return re.fullmatch(r"\.".join(parts) + below, key) is not None


def join(prefix: str, name: str) -> str:
    """A dotted key; a name with dots of its own is quoted."""
    part = f'"{name}"' if "." in name else name
    return f"{prefix}.{part}" if prefix else part


def split(key: str) -> list[str]:
    """The names that `join` put together."""
    return [part.strip('"') for part in re.findall(r'"[^"]*"|[^.]+', key)]


class Reader:
    """The leaves of one document, and what became of each.

    Args:
        document: as loaded.
        library: its name in messages.
        opaque: dotted keys whose value is one leaf although it is a mapping.
    """

    def __init__(self, document: Document, library: str, opaque: Iterable[str] = ()) -> None:
        self.library = library
        self.flat = flatten(document, opaque)
        self.verdicts: dict[str, Verdict] = {}
        self._extras: list[Extra] = []

    def __contains__(self, key: str) -> bool:
        """Whether the document has this key, or any below it."""
        return key in self.flat or any(name.startswith(f"{key}.") for name in self.flat)

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, without taking it."""
        return self.flat.get(key, default)

    # -- taking a key ----------------------------------------------------------------------------------------------

    def any(self, key: str, default: Any = None) -> Setting[Any]:
        """Whatever stands there: from the file, else the default."""
        if key not in self.flat:
            return Setting(default, "default", "")
        self.say(key, "applied")
        return Setting(self.flat[key], "file", key)

    def integer(
        self, key: str, default: int | None = None, *, low: int = 0, high: int | None = None, null: bool = False
    ) -> Setting[Any]:
        """A whole number, also written `8.0` or `5e8`; with `null`, also nothing at all."""
        top = "" if high is None else f" to {high}"
        return self._checked(
            key, default, f"a whole number from {low}{top}", lambda value: _integer(value, low, high), null
        )

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float | None = None, null: bool = False
    ) -> Setting[Any]:
        top = "" if high is None else f" to {high:g}"
        return self._checked(key, default, f"a number from {low:g}{top}", lambda value: _number(value, low, high), null)

    def boolean(self, key: str, default: bool | None = None, *, null: bool = False) -> Setting[Any]:
        """True or false, also as the words."""
        words = {"true": True, "false": False}

        def parse(value: Any) -> Any:
            return value if isinstance(value, bool) else words.get(str(value).lower(), _MISSING)

        return self._checked(key, default, "true or false", parse, null)

    def text(self, key: str, default: str | None = None, *, null: bool = False) -> Setting[Any]:
        return self._checked(key, default, "text", lambda value: value if isinstance(value, str) else _MISSING, null)

    def choice(
        self, key: str, choices: Mapping[Any, Any], default: Any = None, *, fold: bool = True, null: bool = False
    ) -> Setting[Any]:
        """One of some words or numbers, as what it stands for. `fold`: upper case is as lower case; keys are lower."""
        expected = f"one of {', '.join(str(each) for each in choices)}"

        def parse(value: Any) -> Any:
            word = value.lower() if fold and isinstance(value, str) else value
            return choices.get(word, _MISSING) if isinstance(word, str | int | float) else _MISSING

        return self._checked(key, default, expected, parse, null)

    def names(self, key: str, default: Sequence[str] = (), *, null: bool = True) -> Setting[Any]:
        """A list of names, or one text with commas, as a tuple."""
        return self._checked(key, tuple(default), "a list of names", _names, null)

    def section(self, key: str, default: Mapping[str, Any] | None = None) -> Setting[Any]:
        """Everything below a key, as a mapping; each of its leaves is taken."""
        below = {name: value for name, value in self.flat.items() if name.startswith(f"{key}.")}
        whole = self.flat.get(key)
        if isinstance(whole, Mapping):
            return self.any(key)
        if key in self.flat and whole is not None:
            self.refuse(key, f"it is {_shown(whole)}, expected a section of keys")
        if not below:
            return Setting(dict(default or {}), "default", "")
        nested: dict[str, Any] = {}
        for name, value in below.items():
            self.say(name, "applied")
            _put(nested, split(name.removeprefix(f"{key}.")), value)
        return Setting(nested, "file", ", ".join(below))

    def _checked(self, key: str, default: Any, expected: str, parse: Any, null: bool) -> Setting[Any]:
        if key not in self.flat:
            return Setting(default, "default", "")
        raw = self.flat[key]
        if raw is None and null:
            self.say(key, "applied")
            return Setting(default, "default", key)
        value = parse(raw)
        if value is _MISSING:
            near = did_you_mean(raw, expected.removeprefix("one of ").split(", ")) if isinstance(raw, str) else ""
            self.refuse(key, f"it is {_shown(raw)}, expected {expected}.{near}")
            return Setting(default, "default", key)
        self.say(key, "applied")
        return Setting(value, "file", key)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def say(self, key: str, kind: Kind, why: str = "", target: str = "") -> None:
        """What became of a key; a later word replaces an earlier one."""
        if key in self.flat:
            self.verdicts[key] = Verdict(key, self.flat[key], kind, target, why)

    def refuse(self, key: str, why: str) -> None:
        self.say(key, "refused", why)

    def keep(self, key: str, why: str = "", *, refused: bool = False, harmless: bool = False) -> None:
        """Keep a key, or all below it, as it is: it means something to this library alone. See `Extra`."""
        for name in [name for name in self.flat if name == key or name.startswith(f"{key}.")]:
            self.say(name, "applied")
            self._extras.append(Extra(name, self.flat[name], why, refused, harmless))

    def unread(self) -> list[str]:
        """Keys that nobody has taken yet."""
        return [key for key in self.flat if key not in self.verdicts]

    def finish(
        self, dialect: str, given: Mapping[str, Setting[Any]], known: Iterable[str], unknown: str = "ignores it"
    ) -> Reading:
        """The reading, with a verdict for every key.

        Args:
            dialect: its name.
            given: settings by path.
            known: the dialect's known keys, for the nearest one to a misspelt key.
            unknown: what the library does with a key that it does not know, after its name.
        """
        names = list(known)
        for key in self.unread():
            if self.flat[key] == {} and any(name.startswith(f"{key}.") for name in names):
                self.say(key, "applied", "an empty section says nothing")
                continue
            near = _nearest(key, names)
            self.refuse(key, f"{self.library} has no such key and {unknown}.{near}")
        self._name_targets(given)
        ordered = tuple(self.verdicts[key] for key in self.flat)
        return Reading(build(dialect, given, tuple(self._extras)), ordered)

    def _name_targets(self, given: Mapping[str, Setting[Any]]) -> None:
        paths: dict[str, list[str]] = {}
        for path, setting in given.items():
            for key in setting.keys:
                paths.setdefault(key, []).append(path)
        for key, found in paths.items():
            verdict = self.verdicts.get(key)
            if verdict is not None and not verdict.target:
                self.verdicts[key] = Verdict(key, verdict.value, verdict.kind, ", ".join(found), verdict.why)


def derived(value: Any, *sources: Setting[Any], origin: Origin = "derived") -> Setting[Any]:
    """A value worked out from others: under their keys; of the file if any is and `origin` is "file"."""
    keys = dict.fromkeys(key for source in sources for key in source.keys)
    return Setting(value, origin, ", ".join(keys))


def keep_nulls(reader: Reader, known: Iterable[str]) -> None:
    """Keep known keys that say nothing, so that the same document can be written again."""
    patterns = tuple(known)
    for key in [key for key, value in reader.flat.items() if value is None or value == {}]:
        if any(matches(key, pattern) for pattern in patterns):
            reader.keep(key, "it says nothing: the default holds", harmless=True)


def refuse_rest(reader: Reader, known: Iterable[str]) -> None:
    """Refuse known keys that nobody has taken: their value has a shape that nobody reads."""
    patterns = tuple(known)
    for key in reader.unread():
        if any(matches(key, pattern) for pattern in patterns):
            reader.refuse(key, f"it is {str(reader.get(key))[:60]!r}, which {reader.library} does not take there")


def given_only(settings: Mapping[str, Setting[Any]]) -> dict[str, Setting[Any]]:
    """Those that the file gives a value: a default that says nothing to others is left unset."""
    return {path: setting for path, setting in settings.items() if setting.origin == "file"}


def _nearest(key: str, known: list[str]) -> str:
    """The known key that was meant: in the same section by its last name, else anywhere."""
    parent, _, last = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    near = did_you_mean(last, siblings)
    if near or not parent:
        return near or did_you_mean(key, known)
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    return f" Did you mean '{elsewhere[0]}'?" if elsewhere else did_you_mean(key, known)


def _put(nested: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        nested = nested.setdefault(name, {})
    nested[path[-1]] = value


def _integer(value: Any, low: int, high: int | None) -> Any:
    number = _number(value, low, high)
    return int(number) if number is not _MISSING and number == int(number) else _MISSING


def _number(value: Any, low: float, high: float | None) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][-+]?[0-9]{1,2})?\s*", value):
        value = float(value)  # what YAML 1.1 takes for text, such as 1e-3, and every library here for a number
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value in (_INF, -_INF):
        return _MISSING
    return value if value >= low and (high is None or value <= high) else _MISSING


_INF = float("inf")


def _names(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Sequence) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return _MISSING


def _shown(value: Any) -> str:
    text = "empty" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
