"""Accelerate's YAML on its way in: prefixes that may be left out, and keys that fall through in silence."""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.dialects.core.dialect import ConfigDocument, ReadingContext
from terrazzo.dialects.core.keys import row_of
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.accelerate.keys import GHOSTS, KEYS, SECTIONS, TOP, canonical_key
from terrazzo.messages import did_you_mean

__all__ = ["AccelerateReader"]


class AccelerateReader(Reader):
    """A reader that finds a key with or without its section's prefix.

    Attributes:
        context: what the document does not say.
    """

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        super().__init__(document, "Accelerate", keys=KEYS, canonical=canonical_key)
        self.context = context

    def keep_rest(self, *, fp8: bool) -> None:
        """Keep every known key that nobody has read, but strangers. `fp8`: its section has an effect."""
        for key in self.unread():
            name = canonical_key(key)
            row = row_of(KEYS, name)
            if self.flat[key] in (None, {}) and (name in KEYS or key in SECTIONS or key == "megatron_lm_config"):
                self.keep(key, "it says nothing: the default holds", loss="harmless")
            elif row is not None:
                if fp8 and row.loss == "lossy":
                    self.keep_row(key)
                else:
                    self.keep(key, row.meaning, loss="harmless")
        kept = {extra.key for extra in self.extras}
        for key, verdict in list(self.verdicts.items()):
            if verdict.value is None and verdict.kind == "applied" and key not in kept:
                self.keep(key, "it says nothing: the default holds", loss="harmless")

    def stranger(self, key: str, known: list[str], unknown: str, gone: Mapping[str, str]) -> str:
        """What Accelerate does with a key that it does not know."""
        section, _, last = key.partition(".")
        if section in (*SECTIONS, "megatron_lm_config") and not last:
            return f"it is {found(self.flat[key])}, expected a section of keys"
        if section not in SECTIONS:
            near = did_you_mean(section, (*TOP, *SECTIONS, "megatron_lm_config"))
            return f"Accelerate has no '{section}' at the top and refuses the file.{near}"
        name = canonical_key(key)
        if name in GHOSTS:
            return f"nothing reads it: Accelerate drops it without a word. Did you mean '{GHOSTS[name]}'?"
        near = did_you_mean(name.partition(".")[2], SECTIONS[section])
        return f"{section} has no '{last}': Accelerate drops it without a word.{near}"
