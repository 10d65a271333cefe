"""Writing a document setting by setting, so that none is dropped in silence.

    draft = Draft(description, "FSDP2", "fsdp2")
    draft.put("precision.reduce", "mp_policy.reduce_dtype", "bfloat16")
    draft.implied("prefetch.backward")
    return draft.finish()

What nobody has spoken of when the draft finishes is lossy, unless its value asks for nothing or follows from others.
A `TerseDraft` is a draft that also leaves out what the target does without being told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.agreement import has_no_effect
from terrazzo.dialects.core.description import Description, Setting, as_text, asks_for_nothing
from terrazzo.dialects.core.dialect import Writing
from terrazzo.dialects.core.dotted_keys import split
from terrazzo.dialects.core.key_verdict import KeyVerdict, VerdictKind, worst

__all__ = ["Draft", "TerseDraft"]


class Draft:
    """A document under way.

    Args:
        description: what is to be said.
        library: the target's name in messages.
        dialect: the target's name.

    Attributes:
        document: nested, so far.
        own: the description was read from this very dialect.
    """

    def __init__(self, description: Description, library: str, dialect: str) -> None:
        self.description, self.library = description, library
        self.own = description.dialect == dialect
        self.document: dict[str, Any] = {}
        self._verdicts: dict[str, KeyVerdict] = {}
        self._missing: list[KeyVerdict] = []

    def setting(self, path: str) -> Setting[Any]:
        return self.description[path]

    def value(self, path: str, default: Any = None) -> Any:
        """The value at a path; the default where it is unset or None."""
        value = self.description[path].value
        return default if value is None else value

    def is_set(self, path: str) -> bool:
        return self.description[path].is_set

    # -- what becomes of a setting ---------------------------------------------------------------------------------

    def put(
        self, paths: str | Iterable[str], key: str, value: Any, why: str = "", kind: VerdictKind = "applied"
    ) -> None:
        """Write a key, which says one or more settings. Unset ones get no verdict."""
        self.write(key, value)
        self._mark(paths, kind, key, why)

    def copy(self, path: str, key: str) -> None:
        """Write a setting's value as it is, if it is set and not None."""
        if (value := self.value(path)) is not None:
            self.put(path, key, list(value) if isinstance(value, tuple) else value)
        else:
            self.implied(path)

    def implied(self, paths: str | Iterable[str], why: str = "", key: str = "") -> None:
        """The target does so without a key, or by `key`, already written."""
        self._mark(paths, "applied", key, why)

    def lossy(self, paths: str | Iterable[str], why: str, key: str = "") -> None:
        self._mark(paths, "lossy", key, why)

    def missing(self, path: str, key: str, why: str) -> None:
        """The target needs a key that the source leaves to code."""
        self._missing.append(KeyVerdict(path, self.description[path].value, "lossy", key, why))

    def refuse(self, paths: str | Iterable[str], why: str) -> None:
        """The target cannot do this; `why` says what to do instead."""
        self._mark(paths, "refused", "", why)

    def write(self, key: str, value: Any) -> None:
        """Write a dotted key that no setting stands behind."""
        *parents, last = split(key)
        place = self.document
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value

    def has(self, key: str) -> bool:
        place: Any = self.document
        for name in split(key):
            if not isinstance(place, dict) or name not in place:
                return False
            place = place[name]
        return True

    def has_verdict(self, path: str) -> bool:
        """Whether a setting has its verdict."""
        return path in self._verdicts

    def _mark(self, paths: str | Iterable[str], kind: VerdictKind, key: str, why: str) -> None:
        """The gravest verdict on a setting stands, in whatever order they come; of equal ones the last."""
        for path in [paths] if isinstance(paths, str) else paths:
            setting, before = self.description[path], self._verdicts.get(path)
            if setting.is_set and (before is None or worst([before.kind, kind]) == kind):
                self._verdicts[path] = KeyVerdict(path, setting.value, kind, key, why)

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> Writing:
        """The document, with a verdict for every setting that is set.

        A source of this very dialect gets its extras back, and loses nothing of what nobody has spoken of: its keys
        stand there again, and its defaults hold.
        """
        for extra in self.description.extras if self.own else ():
            if not self.has(extra.key):
                self.write(extra.key, extra.value)
        for path, setting in self.description.items():
            if not setting.is_set or path in self._verdicts:
                continue
            follows = setting.origin == "derived" or has_no_effect(self.description, path)
            if self.own or asks_for_nothing(path, setting.value) or follows:
                self.implied(path)
            else:
                self.lossy(path, f"{self.library} has nothing for {path} = {as_text(setting.value)}")
        return Writing(self.document, tuple(self._verdicts.values()), tuple(self._missing))


class TerseDraft(Draft):
    """A draft that leaves out what the target does by itself.

    Written for the dialect that the description was read from, it repeats exactly the keys that stood there.
    """

    def needs_key(self, path: str, default: Any, key: str = "") -> bool:
        """Whether a setting needs its key.

        In this very dialect: if the file gave it, by `key` or one beside it where one is named. Else: if its value is
        not what the target does without being told.
        """
        setting = self.setting(path)
        if not setting.is_set:
            return False
        if self.own and setting.origin in ("default", "derived"):
            return bool(key) and setting.origin == "derived" and key in setting.keys
        if self.own and setting.keys:
            return not key or any(_beside(source_key, key) for source_key in setting.keys)
        return bool(setting.value != default)

    def is_extra(self, key: str) -> bool:
        """Whether the source says this very key beyond the sections, so that it comes back by itself."""
        return self.own and any(extra.key == key for extra in self.description.extras)

    def own_key(self, path: str, key: str) -> str:
        """The key that the setting came from in this very dialect, if it was one, else `key`."""
        keys = self.setting(path).keys
        return keys[0] if self.own and len(keys) == 1 and _beside(keys[0], key) else key

    def option(self, path: str, key: str, default: Any, words: Mapping[Any, Any] | None = None, why: str = "") -> None:
        """Write a setting that one key says, in the target's words, unless its default says the same."""
        setting = self.setting(path)
        if words is not None and setting.value is not None and setting.value not in words:
            self.lossy(path, f"{self.library} cannot say {setting.value!r}: {_listed(words)}")
        elif self.needs_key(path, default, key) and not self.is_extra(self.own_key(path, key)):
            value = words[setting.value] if words is not None and setting.value is not None else setting.value
            self.put(path, self.own_key(path, key), list(value) if isinstance(value, tuple) else value, why)
        else:
            self.implied(path, why)


def _beside(source_key: str, key: str) -> bool:
    """Whether two keys are one, or one is a part of the other, or both are forms of one argument."""
    if source_key.startswith(f"{key}.") or key.startswith(f"{source_key}.") or source_key == key:
        return True
    return source_key.partition(".")[0] == key.partition(".")[0] == "auto_wrap_policy"


def _listed(words: Mapping[Any, Any]) -> str:
    return f"it has {', '.join(str(word) for word in dict.fromkeys(words))}"
