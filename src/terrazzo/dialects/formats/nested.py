"""A configuration inside another's, such as the DeepSpeed document that TrainingArguments and Lightning carry.

The one place where a dialect meets another: those that carry one ask for it here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from terrazzo.dialects.core.description import Extra, Setting
from terrazzo.dialects.core.dialect import ConfigDocument, Dialect, Finding, Reading, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import KeyVerdict, worst
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.deepspeed.auto import resolve as resolve_auto
from terrazzo.dialects.formats.deepspeed.dialect import DIALECT as DEEPSPEED
from terrazzo.dialects.formats.fsdp1.dialect import DIALECT as FSDP1
from terrazzo.dialects.formats.fsdp1.write import write as write_fsdp1
from terrazzo.documents import load
from terrazzo.documents.dotted_keys import flatten, keys_in
from terrazzo.errors import BadInput

__all__ = [
    "DEEPSPEED",
    "FSDP_STRATEGY",
    "Nested",
    "filled",
    "joined",
    "load_named",
    "merge",
    "nested_findings",
    "placed",
    "read_nested",
    "resolve_auto",
]

FSDP_STRATEGY = replace(FSDP1, write=partial(write_fsdp1, library="FSDPStrategy"))
"""The arguments that Lightning's strategy passes on to FSDP1, which messages call by its name."""


@dataclass(frozen=True)
class Nested:
    """An inner document, read, with its keys as the outer document has them.

    Attributes:
        settings: by path.
        document: the inner document itself.
        inner: its own reading, under its own keys.
    """

    settings: Mapping[str, Setting[Any]]
    verdicts: tuple[KeyVerdict, ...]
    extras: tuple[Extra, ...]
    document: ConfigDocument
    inner: Reading


def read_nested(
    dialect: Dialect, document: ConfigDocument, context: ReadingContext, section: str, file: Any = None
) -> Nested:
    """Read a document of `dialect` that stands at the key `section` of another.

    Args:
        file: the name of the file where the document is one that `section` names; all is reported under that key.
    """
    reading = dialect.read(document, context)

    def key(inner: str) -> str:
        return section if file is not None else f"{section}.{inner}"

    settings = {
        path: replace(setting, key=", ".join(dict.fromkeys(key(each) for each in setting.keys)))
        for path, setting in reading.description.items()
        if setting.is_set
    }
    verdicts = [replace(verdict, key=key(verdict.key)) for verdict in reading.verdicts]
    if file is not None:
        verdicts = merge([replace(verdict, value=file) for verdict in verdicts])
    extras = tuple(replace(extra, key=f"{section}.{extra.key}") for extra in reading.description.extras)
    return Nested(settings, tuple(verdicts), extras, document, reading)


def nested_findings(
    dialect: Dialect,
    document: ConfigDocument,
    context: ReadingContext,
    section: str,
    *,
    named: bool = False,
    leave: Collection[str] = (),
) -> Iterator[Finding]:
    """What `dialect` finds in a document that stands at the key `section` of another.

    Args:
        named: `section` names the document's file: all is reported under that key, and the inner one is in the text.
        leave: inner keys that the outer library sets itself; nothing is said of them.
    """
    for finding in dialect.findings(dialect.read(document, context), context):
        if finding.key not in leave:
            key = section if named else join_keys(section, finding.key)
            text = f"{finding.key}: {finding.text}" if named and finding.key else finding.text
            yield Finding(key, finding.level, text)


def filled(document: ConfigDocument) -> set[str]:
    """Keys of a DeepSpeed document that say "auto", for which the outer library puts a value."""
    return {key for key, value in flatten(document).items() if value == "auto"}


def join_keys(section: str, keys: str) -> str:
    """Each of some keys, joined by `", "`, below a section."""
    return ", ".join(f"{section}.{key}" for key in keys_in(keys)) or section


def placed(verdict: KeyVerdict, section: str) -> KeyVerdict:
    """A writer's verdict, with its keys below a section."""
    return replace(verdict, target=join_keys(section, verdict.target) if verdict.target else "")


def joined(draft: Draft, inner: Writing, section: str, own: Collection[str]) -> Writing:
    """The document of a draft with what became of each setting, there or in the document inside it.

    The outer verdict stands where a key is written for the setting, or it is refused; else the inner one does, with its
    keys below `section`.

    Args:
        own: beginnings of paths that the outer library decides, whatever the inner document says.
    """
    outer = draft.finish()
    verdicts = {
        verdict.key: verdict
        for verdict in outer.verdicts
        if verdict.target or verdict.kind == "refused" or verdict.key.startswith(tuple(own))
    }
    for verdict in inner.verdicts:
        verdicts.setdefault(verdict.key, placed(verdict, section))
    for verdict in outer.verdicts:
        verdicts.setdefault(verdict.key, verdict)
    return Writing(outer.document, tuple(verdicts.values()))


def merge(verdicts: list[KeyVerdict]) -> list[KeyVerdict]:
    """One verdict for each key: the gravest, with the words of all that are not simply applied."""
    by_key: dict[str, list[KeyVerdict]] = {}
    for verdict in verdicts:
        by_key.setdefault(verdict.key, []).append(verdict)
    return [_gravest(key, verdicts_of_key) for key, verdicts_of_key in by_key.items()]


def _gravest(key: str, verdicts: list[KeyVerdict]) -> KeyVerdict:
    kind = worst(verdict.kind for verdict in verdicts)
    targets = dict.fromkeys(path for verdict in verdicts for path in keys_in(verdict.target))
    words = dict.fromkeys(verdict.why for verdict in verdicts if verdict.why and verdict.kind == kind)
    return KeyVerdict(key, verdicts[0].value, kind, ", ".join(targets), "; ".join(words))


def load_named(value: Any, context: ReadingContext) -> tuple[dict[str, Any], str]:
    """The file that a key names, from the configuration's folder on; and why it cannot be read, if so."""
    if not isinstance(value, str) or not value:
        return {}, f"it is {found(value)}, expected a section of keys or the name of a file"
    path = (context.folder / value) if context.folder is not None else None
    try:
        return load(path if path is not None else value).document, ""
    except (BadInput, OSError) as error:
        return {}, f"the file that it names cannot be read: {error}"
