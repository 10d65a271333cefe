"""From one dialect to another, with one verdict for every key of the source.

In its own dialect a document is what it was, but for the keys that are refused. In another, the target's document is
read back. A setting whose key is refused there is refused, and so are those whose keys the target refuses together.
Whatever then means something else than the source, and the writer has not named it, nor said how it holds all the same,
becomes lossy: no loss goes unnamed, not even one by a writer's mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.dialects.core.agreement import agree_on, extras_by_key, has_no_effect
from terrazzo.dialects.core.description import PATHS, Description, Extra, Setting, asks_for_nothing
from terrazzo.dialects.core.dialect import Dialect, Finding, Reading, ReadingContext, Writing
from terrazzo.dialects.core.key_verdict import LOST, KeyVerdict, worst
from terrazzo.dialects.core.keys import Key
from terrazzo.dialects.core.mesh import ranks_of_all_axes
from terrazzo.dialects.core.wording import as_text, meant
from terrazzo.dialects.verbs.check import findings_of, other_world
from terrazzo.dialects.verbs.understand import Understood, read_document
from terrazzo.documents.dotted_keys import flatten, keys_in

__all__ = ["Conversion", "convert", "convert_reading"]


@dataclass(frozen=True)
class Conversion:
    """A converted configuration.

    Attributes:
        document: of the target.
        verdicts: one for every key of the source, in its order.
        unsaid: settings that the source's defaults decide and the target cannot say, their keys are paths; and what
            the target lacks or refuses that no setting has written.
        added: what holds in the target by its own defaults: the source leaves it to code, or it was refused; their
            keys are paths.
        before: what the source means.
        after: what the target's document means, read back.
        faults: errors of the target's document: it would not run, or do something else.
        findings: what `check` finds of the source's document beyond single keys, such as a default that has moved.
    """

    source: Dialect
    target: Dialect
    document: dict[str, Any]
    verdicts: tuple[KeyVerdict, ...]
    unsaid: tuple[KeyVerdict, ...]
    added: tuple[KeyVerdict, ...]
    before: Description
    after: Description
    faults: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def refused(self) -> tuple[KeyVerdict, ...]:
        return tuple(verdict for verdict in (*self.verdicts, *self.unsaid) if verdict.kind == "refused")


def convert(understood: Understood, target: Dialect) -> Conversion:
    """The same configuration in another dialect."""
    return convert_reading(understood.dialect, understood.reading, target, understood.context)


def convert_reading(source: Dialect, reading: Reading, target: Dialect, context: ReadingContext) -> Conversion:
    """As `convert`, from what has been read."""
    before = reading.description
    writing = target.written(before, context)
    launched = replace(context, world=before.value("mesh.world") or context.world)  # whoever starts them in the target
    read_back = read_document(target, writing.document, launched)
    after = read_back.description
    found = findings_of(target, read_back, launched) if before.dialect != target.name else ()
    told = dict.fromkeys([*other_world(before, context), *found])
    faults = tuple(finding for finding in told if finding.level == "error")
    fates = _Fates(before, read_back, writing, target, faults)
    verdicts = tuple(fates.of_key(verdict) for verdict in reading.verdicts)
    by_default = _by_default(source, reading, target) if source is not target else ()
    unsaid, added = (*fates.unsaid(), *by_default), tuple(fates.added())
    said = {fault.text for fault in faults}
    of_source = tuple(each for each in findings_of(source, reading, context) if each.text not in said)
    return Conversion(source, target, writing.document, verdicts, unsaid, added, before, after, faults, of_source)


def _by_default(source: Dialect, reading: Reading, target: Dialect) -> Iterable[KeyVerdict]:
    """What the source does by the defaults of keys that the document has not, and the target has no key for.

    One verdict for all beside one key. Where such a key is refused, one that the document has says it.
    """
    defaults: dict[str, list[tuple[str, Key]]] = {}
    for key, row in source.keys.items():
        if row.loss == "lossy" and row.lost_beside in reading.values and key not in reading.values:
            defaults.setdefault(row.lost_beside, []).append((key, row))
    for beside, rows in defaults.items():
        named = {f"{key} {as_text(row.default)}": row.here if target.name == "terrazzo" else "" for key, row in rows}
        absent = ", ".join(told for told, here in named.items() if not here)
        said = ", ".join(f"{told} (in Terrazzo: {here})" for told, here in named.items() if here)
        whys = (
            f"no such settings in {target.title} as hold beside it by default: {absent}" if absent else "",
            f"what holds beside it by default is not written: {said}" if said else "",
        )
        yield KeyVerdict(beside, reading.values[beside], "lossy", "", "; ".join(filter(None, whys)))


class _Fates:
    """What became of keys and settings.

    A key's fate is that of its settings, by their paths. Of `{"max_grad_norm": 0.5}`, the Trainer's, in Terrazzo:

        reading   max_grad_norm is `applied`, and the setting training.clip has it as its key
        writing   training.clip is `applied`, and train.clip is the key that says it
        read back training.clip is 0.5 there as well; else it were `lossy`, whatever the writer says
        fate      max_grad_norm is `renamed`, to train.clip

    Settings without a key of the source are `unsaid` where they are lost, and `added` where the target alone has them.
    """

    def __init__(
        self, before: Description, read_back: Reading, writing: Writing, target: Dialect, faults: Iterable[Finding]
    ) -> None:
        self.before, self.after, self.target, self.missing = before, read_back.description, target, [*writing.missing]
        self.unreadable = {each.key: each.why for each in read_back.verdicts if each.kind == "refused"}
        self.extras = extras_by_key(before)
        foreign = before.dialect != target.name
        self.partial = {extra.key: extra for extra in before.extras if foreign and extra.loss != "harmless"}
        self.own = list(flatten(writing.document)) if before.dialect == target.name else []
        self.by_path = {verdict.key: self._read_back(verdict) for verdict in writing.verdicts}
        for fault in faults:
            self._blame(fault)
        self.paths: dict[str, list[str]] = {}
        for path, setting in before.items():
            for key in setting.keys:
                self.paths.setdefault(key, []).append(path)

    def _read_back(self, verdict: KeyVerdict) -> KeyVerdict:
        """The writer's verdict; refused where the target refuses the key that was written.

        It is lossy where the document read back says otherwise, or nothing, and the writer did not say why it holds.
        """
        for target in keys_in(verdict.target) if verdict.kind != "refused" else ():
            for key, reason in self.unreadable.items():
                if key == target or key.startswith(f"{target}."):
                    return KeyVerdict(verdict.key, verdict.value, "refused", "", reason)
        if verdict.kind in ("lossy", "refused") or verdict.holds:
            return verdict
        path, title = verdict.key, self.target.title
        now, asked = meant(path, self.after.value(path)), meant(path, verdict.value)
        if self._is_gone(path):
            why = f"{title} as written says nothing of {path} = {asked}"
        elif agree_on(path, self.before, self.after):
            return verdict
        elif verdict.value is None:
            why = f"{path} is open here, and {title} takes {now}"
        else:
            why = f"{title} has {now} for {path}, not {asked}"
        return KeyVerdict(verdict.key, verdict.value, "lossy", verdict.target, "; ".join(_once([why, verdict.why])))

    def _is_gone(self, path: str) -> bool:
        """Whether a setting that asks for something is not in the document read back."""
        asks = not asks_for_nothing(path, self.before.value(path)) and not has_no_effect(self.before, path)
        if path == "mesh.world" and self.before[path].origin == "file":  # it is read back with as many
            return not self.after[path].keys and ranks_of_all_axes(self.after) is None
        return asks and not self.after[path].is_set

    def _blame(self, fault: Finding) -> None:
        """Have the settings that wrote a key say why the target refuses it, beside other keys."""
        keys = keys_in(fault.key)
        written = {path: keys_in(verdict.target) for path, verdict in self.by_path.items() if verdict.kind != "refused"}
        blamed = [path for path, targets in written.items() if not set(keys).isdisjoint(targets)]
        for path in blamed:
            verdict = self.by_path[path]
            why = "; ".join(_once([verdict.why, fault.text]))
            self.by_path[path] = replace(verdict, kind="refused", why=why)
        lacking = [each for each in self.missing if not set(keys).isdisjoint(keys_in(each.target))]
        self.missing = [replace(each, kind="refused") if each in lacking else each for each in self.missing]
        if not blamed and not lacking:
            self.missing.append(KeyVerdict(fault.key, None, "refused", fault.key, fault.text))

    def of_key(self, read: KeyVerdict) -> KeyVerdict:
        """What became of one key of the source."""
        if read.kind == "refused":
            return KeyVerdict(read.key, read.value, "refused", "", read.why)
        written = [self.by_path[path] for path in self.paths.get(read.key, ()) if path in self.by_path]
        if written:
            return self._composed(read, written)
        extra = self.extras.get(read.key) or self.extras.get(read.target)
        return (
            self._extra(read, extra) if extra is not None else KeyVerdict(read.key, read.value, read.kind, "", read.why)
        )

    def _extra(self, read: KeyVerdict, extra: Extra) -> KeyVerdict:
        """The verdict on a key that has a meaning to its own library alone."""
        if self.before.dialect == self.target.name:
            return KeyVerdict(read.key, read.value, read.kind, extra.key, read.why)
        if extra.loss == "harmless" and read.kind == "lossy":  # its own library does nothing with it
            return read
        elsewhere = extra.loss == "harmless" or (extra.here and self.target.name == "terrazzo")
        absent = "" if elsewhere else f"no such setting in {self.target.title}"
        why = "; ".join(part for part in (absent, extra.lost_in(self.target.name)) if part)
        return KeyVerdict(read.key, read.value, LOST[extra.loss], "", why, tuning=extra.loss == "harmless")

    def _composed(self, read: KeyVerdict, written: list[KeyVerdict]) -> KeyVerdict:
        direct = [verdict for verdict in written if self.before[verdict.key].origin != "derived"] or written
        targets = _once(part for verdict in direct for part in keys_in(verdict.target))
        verdicts = list(written)
        if rest := self.partial.get(read.key):  # what the key says beyond its settings
            verdicts.append(KeyVerdict(read.key, read.value, LOST[rest.loss], "", rest.lost_in(self.target.name)))
        kind = worst([read.kind, *(verdict.kind for verdict in verdicts)])
        stays = any(target == read.key or target.startswith(f"{read.key}.") for target in [*targets, *self.own])
        if kind in ("applied", "renamed") and targets:
            kind = "applied" if stays and read.kind == "applied" else "renamed"
        if kind == "renamed" and read.kind == "defaulted":
            kind = "defaulted"
        grave = [verdict for verdict in verdicts if verdict.kind == kind] if kind in ("lossy", "refused") else []
        reasons = [verdict for verdict in grave or written if verdict.why]
        several = len(reasons) < len(written) or len({verdict.why for verdict in reasons}) > 1
        why = "; ".join(_once([read.why, *_reasons(reasons, several)]))
        return KeyVerdict(read.key, read.value, kind, ", ".join(targets), why)

    def unsaid(self) -> Iterable[KeyVerdict]:
        """Losses of settings that no key of the source gave, and what the target needs beside them."""
        yield from self.missing
        for path, verdict in self.by_path.items():
            if (
                not self.before[path].key
                and verdict.kind in ("lossy", "refused")
                and not has_no_effect(self.before, path)
            ):
                yield verdict

    def added(self) -> Iterable[KeyVerdict]:
        """The target's own choices where the source makes none, or what it asks for is refused."""
        for path, now in self.after.items():
            was: Setting[Any] = self.before[path]
            open_now = not was.is_set or (self.by_path[path].kind == "refused" and now.origin == "default")
            if (
                now.is_set
                and open_now
                and not asks_for_nothing(path, now.value)
                and not has_no_effect(self.after, path)
                and path != "mesh.world"  # where no key says it, it follows from the degrees
                and not self._is_told(path, now)
            ):
                yield KeyVerdict(path, now.value, "defaulted", now.key, f"{self.target.title}'s default")

    def _is_told(self, path: str, now: Setting[Any]) -> bool:
        """Whether keys that the source's settings have written say it in other words, such as a warm-up's share.

        A word for precision is the target's choice in what it says beside the dtypes that were asked for.
        """
        section = path.partition(".")[0]
        alike = [each for where, each in self.by_path.items() if where.partition(".")[0] == section]
        written = {key for each in alike if each.kind == "applied" for key in keys_in(each.target)}
        return section != "precision" and bool(now.keys) and written.issuperset(now.keys)


def _reasons(verdicts: Iterable[KeyVerdict], several: bool) -> list[str]:
    """Why, each once, and where the key stands for several settings, of which of them."""
    paths: dict[str, list[str]] = {}
    for verdict in verdicts:
        paths.setdefault(verdict.why, []).extend([verdict.key] if several and verdict.key in PATHS else [])
    return [f"{', '.join(told)}: {why}" if told else why for why, told in paths.items()]


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))
