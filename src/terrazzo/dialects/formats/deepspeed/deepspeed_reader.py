"""A DeepSpeed document on its way in: other spellings, "auto", removed keys, and what DeepSpeed does with strangers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dialects.core.description import Extra, Setting
from terrazzo.dialects.core.dialect import ConfigDocument, ReadingContext
from terrazzo.dialects.core.keys import Key, Type, matches
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.deepspeed.auto import AUTO, LITERAL, Auto, resolve
from terrazzo.dialects.formats.deepspeed.keys import ALIASES, NULLABLE, PATTERNS, SECTIONS, STRICT, TABLE
from terrazzo.dialects.formats.deepspeed.keys_zero import FLOW
from terrazzo.dialects.formats.deepspeed.versions import CODED, GHOSTS, LAST, REMOVED, default_of
from terrazzo.documents.dotted_keys import join, without

__all__ = ["DeepSpeedReader"]


class DeepSpeedReader(Reader):
    """A reader that knows DeepSpeed's other spellings and Hugging Face's "auto".

    Attributes:
        context: what the document does not say.
        version: of DeepSpeed, as numbers.
    """

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        opaque = ("optimizer.params", "scheduler.params")
        super().__init__(document, "DeepSpeed", opaque, TABLE, self._today, older=True)
        self.context, self.version = context, context.version("deepspeed", LAST)

    def leaves(self, document: ConfigDocument, opaque: Iterable[str]) -> dict[str, Any]:
        """With the arguments of optimizer and schedule one level deep: what is below an argument is its value."""
        opened: dict[str, Any] = {}
        for key, value in super().leaves(document, opaque).items():
            if key in opaque and isinstance(value, Mapping) and value:
                opened.update({join(key, name): inner for name, inner in value.items()})
            else:
                opened[key] = value
        return opened

    def _today(self, key: str) -> str:
        """Today's word, unless the document has it too. Of two names for a section, today's counts alone."""
        section = next((name for old, name in _SECTIONS.items() if key.startswith(f"{old}.")), "")
        shadowed = bool(section) and any(name == section or name.startswith(f"{section}.") for name in self.flat)
        return key if shadowed or ALIASES.get(key) in self.flat else ALIASES.get(key, key)

    # -- taking a key ----------------------------------------------------------------------------------------------

    def auto(self, key: str) -> Auto | None:
        """What "auto" stands for, if that is what the document says."""
        return resolve(key, self.context) if self.raw(key) == AUTO and key not in LITERAL else None

    def default(self, key: str) -> Any:
        """The default in this version."""
        return default_of(key, self.version, super().default(key))

    def _checked(self, key: str, default: Any, kind: Type, null: bool) -> Setting[Any]:
        if (auto := self.auto(key)) is not None:
            return self._automatic(key, auto, default)
        return super()._checked(key, default, kind, null)

    def _automatic(self, key: str, auto: Auto, default: Any) -> Setting[Any]:
        """What "auto" comes to: the rule's value, None where it is open, or the default where DeepSpeed drops it."""
        name, section = self.spelled(key), key.rpartition(".")[0]
        self._parsed[name] = auto.value if auto.rule else None
        if auto.rule:
            self.mark(name, "defaulted", auto.why)
            return Setting(auto.value, "auto", name)
        if section in STRICT:
            shown = "its default" if default is None else f"its default, {default}"
            self.mark(name, "defaulted", f"{auto.why}, and DeepSpeed drops 'auto' for {shown}")
        else:
            self.refuse(name, f"{auto.why}, and DeepSpeed has no 'auto' there: put a value")
        return Setting(default, "auto", name)

    # -- keeping a key ---------------------------------------------------------------------------------------------

    def keep_key(self, key: str, row: Key) -> None:
        """Keep a key that means something to DeepSpeed alone, under today's spelling."""
        setting, name = self.take(key), self.spelled(key)
        verdict = self.verdicts[name]
        if verdict.kind == "refused":
            return
        usual = setting.value == self.default(key)
        same = (usual and not row.lost_beside) or setting.origin == "auto" or self.raw(key) is None
        why = row.why or row.meaning
        loss = "harmless" if same else row.loss or "harmless"
        self.extras.append(Extra(key, self.raw(key), why, loss, usual, row.here))
        told = "" if same or (loss == "harmless" and not row.why) else why
        self.mark(name, verdict.kind, verdict.why or told, "" if name == key else key)

    def keep_rest(self) -> None:
        """Keep every known key that nobody has read; explain what is left."""
        for key, row in TABLE.items():
            for name in self._unread_of(key):
                if name == key:
                    self.keep_key(name, row)
                else:
                    self.keep(name, row.why or row.meaning, loss=row.loss or "lossy")
        for key in self.unread():
            if key == FLOW and self.flat[key] == {}:
                self.refuse(key, TABLE[f"{FLOW}.topk_ratio"].why)
            elif key in SECTIONS and (self.flat[key] == {} or (self.flat[key] is None and key in NULLABLE)):
                self.keep(key, "it says nothing: the defaults hold", loss="harmless")
            elif key in SECTIONS:
                self.refuse(key, f"it is {found(self.flat[key])}, expected a section of keys")
            elif key.lstrip("_/#") in ("comment", "comments") or key.startswith("_comment"):
                self.keep(key, "a remark: JSON has no comments", loss="harmless")
        kept = {self.spelled(extra.key) for extra in self.extras}
        for key, verdict in list(self.verdicts.items()):
            if verdict.value is None and verdict.kind == "applied" and key not in kept:
                self.keep(key, "it says nothing: the default holds", loss="harmless")

    def _without_refused(self) -> dict[str, Any]:
        """Without removed keys: DeepSpeed refuses them even if switched off."""
        gone = [key for key, removed in REMOVED.items() if self.version >= removed.since]
        return without(super()._without_refused(), gone)

    def _unread_of(self, pattern: str) -> list[str]:
        if pattern in PATTERNS:
            return [key for key in self.unread() if matches(key, pattern)]
        name = self.spelled(pattern)
        return [pattern] if name in self.flat and name not in self.verdicts else []

    def stranger(self, key: str, known: list[str], unknown: str, gone: Mapping[str, str]) -> str:
        """What DeepSpeed does with a key that it does not know."""
        if key in ALIASES:
            return f"it is {ALIASES[key]} by another name, which is there as well: remove one of them"
        if key in GHOSTS:
            return GHOSTS[key]
        if coded := _coded(key):
            return coded
        first, _, rest = key.partition(".")
        section = max((name for name in SECTIONS if key.startswith(f"{name}.")), key=len, default="")
        if not section:
            near = self.nearest(first, [*TOP])
            return (
                f"DeepSpeed has no '{first}' and ignores it without a word{', with all below it' * bool(rest)}.{near}"
            )
        siblings = [name for name in (*TABLE, *ALIASES) if name.startswith(f"{section}.")]
        last = key.removeprefix(f"{section}.")
        near = self.nearest(last, [name.removeprefix(f"{section}.") for name in siblings]) or _elsewhere(last)
        if section in STRICT:
            return f"{section} has no '{last}': DeepSpeed refuses the file.{near}"
        return f"{section} has no '{last}': DeepSpeed ignores it without a word.{near}"


_SECTIONS = {"bfloat16": "bf16", "tensor_parallel.tensor_parallel": "tensor_parallel.tp"}

TOP = tuple(dict.fromkeys(key.partition(".")[0] for key in (*TABLE, *ALIASES, *REMOVED)))
"""Keys that may stand at the top."""


def _coded(key: str) -> str:
    """Where a key is an argument of a class in user code: which class, and Terrazzo's key; else empty."""
    section, _, name = key.rpartition(".")
    if name not in CODED or section not in ("", "moe", "pipeline"):
        return ""
    owner, here = CODED[name]
    instead = f"; a Terrazzo configuration has {here}" if here else ""
    return f"it is an argument of {owner} in your code, and DeepSpeed ignores it in the file{instead}"


def _elsewhere(last: str) -> str:
    elsewhere = [key for key in TABLE if key.rpartition(".")[2] == last]
    return f" There is a '{elsewhere[0]}'." if elsewhere else ""
