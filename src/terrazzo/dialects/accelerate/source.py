"""Accelerate's YAML on its way in: prefixes that may be left out, and keys that fall through in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.accelerate.keys import GHOSTS, KNOWN, PREFIXES, SECTIONS, TOP
from terrazzo.dialects.description import Extra, Setting
from terrazzo.dialects.dialect import Context, Document
from terrazzo.dialects.reader import Reader, matches
from terrazzo.errors import did_you_mean

__all__ = ["Source"]


class Source(Reader):
    """A reader that finds a key with or without its section's prefix.

    Attributes:
        context: what the document does not say.
    """

    def __init__(self, document: Document, context: Context) -> None:
        super().__init__(document, "Accelerate")
        self.context = context

    def spelled(self, key: str) -> str:
        """The key as the document spells it. With both spellings there, the later one holds, as in Accelerate."""
        section, _, name = key.partition(".")
        short = f"{section}.{name.removeprefix(PREFIXES.get(section, ' '))}"
        found = [each for each in self.flat if each in (key, short)]
        return found[-1] if found else key

    def raw(self, key: str) -> Any:
        return self.flat.get(self.spelled(key))

    def _checked(self, key: str, default: Any, expected: str, parse: Any, null: bool) -> Setting[Any]:
        name = self.spelled(key)
        found = super()._checked(name, default, expected, parse, null)
        if found.origin == "file" and isinstance(self.flat[name], str) and found.value != self.flat[name]:
            self.keep_as(name, self.flat[name])
        return found

    def choice(  # the word comes back as it was: upper or lower case, or a number
        self, key: str, choices: Mapping[Any, Any], default: Any = None, *, fold: bool = True, null: bool = False
    ) -> Setting[Any]:
        """See `Reader.choice`."""
        found = super().choice(key, choices, default, fold=fold, null=null)
        if found.origin == "file":
            self.keep_as(self.spelled(key), self.raw(key))
        return found

    def default(self, key: str) -> Any:
        """The launcher's default."""
        section, _, name = key.partition(".")
        return SECTIONS[section][name][0] if name else TOP[section][0]

    # -- keeping -----------------------------------------------------------------------------------------------------

    def keep_as(self, key: str, value: Any, why: str = "another way to write the same") -> None:
        """Keep a key's value as it stands, beside the setting that it gave."""
        if all(extra.key != key for extra in self._extras):
            self._extras.append(Extra(key, value, why, harmless=True))

    def keep_rest(self, why: dict[str, str]) -> None:
        """Keep every known key that nobody has read, and explain the others.

        Args:
            why: what is lost with some of them, by the beginning of their keys; the rest is harmless.
        """
        for key in self.unread():
            name = self.canonical(key)
            reason = next((words for start, words in why.items() if name.startswith(start)), "")
            if self.flat[key] in (None, {}) and (name in KNOWN or key in SECTIONS or key == "megatron_lm_config"):
                self.keep(key, "it says nothing: the default holds", harmless=True)
            elif any(matches(name, pattern) for pattern in KNOWN):
                section, _, last = name.partition(".")
                meaning = SECTIONS.get(section, {}).get(last, ("", ""))[1] if last else TOP[section][1]
                self.keep(key, reason or meaning, harmless=not reason)
            else:
                self.refuse(key, self._stranger(key))
        for key in [key for key, value in self.flat.items() if value is None and self.verdicts[key].kind == "applied"]:
            self.keep_as(key, None, "it says nothing: the default holds")

    def canonical(self, key: str) -> str:
        """A key with its section's prefix."""
        section, dot, name = key.partition(".")
        prefix = PREFIXES.get(section, "")
        return f"{section}.{prefix}{name.removeprefix(prefix)}" if dot else key

    def _stranger(self, key: str) -> str:
        """What Accelerate does with a key that it does not know."""
        section, _, last = key.partition(".")
        if section in (*SECTIONS, "megatron_lm_config") and not last:
            return f"it is {str(self.flat[key])[:40]!r}, expected a section of keys"
        if section not in SECTIONS:
            near = did_you_mean(section, (*TOP, *SECTIONS, "megatron_lm_config"))
            return f"Accelerate has no '{section}' at the top and refuses the file.{near}"
        name = self.canonical(key)
        if name in GHOSTS:
            return f"nothing reads it: Accelerate drops it without a word. Did you mean '{GHOSTS[name]}'?"
        near = did_you_mean(name.partition(".")[2], SECTIONS[section])
        return f"{section} has no '{last}': Accelerate drops it without a word.{near}"
