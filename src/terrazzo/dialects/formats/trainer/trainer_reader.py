"""TrainingArguments on their way in: older spellings, the files that they name, and the DeepSpeed document inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting
from terrazzo.dialects.core.dialect import ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.dotted_keys import flatten, without
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.nested import DEEPSPEED, Nested, load_named, merge, read_nested
from terrazzo.dialects.formats.trainer.keys import ALIASES, KEYS

__all__ = ["TrainerReader", "canonical_key"]

_OPAQUE: tuple[str, ...] = ("lr_scheduler_kwargs", "fsdp_config.xla_fsdp_settings", "parallelism_config.tp_handler")
_OPAQUE += ("parallelism_config.cp_handler", "parallelism_config.sp_handler", "distributed_config.fsdp_plan")
_OPAQUE += ("distributed_config.tp_plan", "distributed_config.ep_plan")
_PREFIX = "fsdp_config.fsdp_"


def canonical_key(key: str) -> str:
    """A key under the name that is used now."""
    if key.startswith(_PREFIX):
        return f"fsdp_config.{key.removeprefix(_PREFIX)}"
    head, dot, rest = key.partition(".")
    return f"{ALIASES.get(head, head)}{dot}{rest}"


class TrainerReader(Reader):
    """A reader of TrainingArguments under the names that are used now.

    Attributes:
        context: what the document does not say.
        written: the document's key by the name that is used now, where it is another.
        nested: the DeepSpeed document inside, if there is one.
    """

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        outer = {key: value for key, value in document.items() if key != "deepspeed"}
        super().__init__({**outer, **_opened(outer, context)}, "TrainingArguments", _OPAQUE, KEYS)
        self.context = context
        self.written: dict[str, str] = {}
        self.shadowed: list[KeyVerdict] = []
        self.nested: Nested | None = None
        self._rename()
        if isinstance(outer.get("fsdp_config"), str):
            self._named_file(outer["fsdp_config"])
        self._original = document
        if "deepspeed" in document:
            self._read_deepspeed(document)

    def _rename(self) -> None:
        """Keys under today's names. Of two for one, the prefixed wins, or the newer field if it is set."""
        written: dict[str, list[str]] = {}
        for key in self.flat:
            written.setdefault(canonical_key(key), []).append(key)
        flat = {}
        for name, keys in written.items():
            winner = self._winner(name, keys)
            flat[name] = self.flat[winner]
            if winner != name:
                self.written[name] = winner
            self.shadowed += [self._shadow(key, winner) for key in keys if key != winner]
        self.flat = flat

    def _winner(self, name: str, keys: list[str]) -> str:
        prefixed = [key for key in keys if key.startswith(_PREFIX)]
        present = [key for key in keys if self.flat[key] is not None] or keys
        return prefixed[0] if prefixed else name if name in present else present[0]

    def _shadow(self, key: str, winner: str) -> KeyVerdict:
        agrees = self.flat[key] in (None, self.flat[winner])
        why = f"{winner} says it too{'' if agrees else ', and wins'}"
        return KeyVerdict(key, self.flat[key], "renamed" if agrees else "refused", "", why)

    def _named_file(self, value: str) -> None:
        """All of a file's keys are reported under the key that names it."""
        self.written |= {key: "fsdp_config" for key in self.flat if key.startswith("fsdp_config")}
        self.shadowed = [verdict for verdict in self.shadowed if not verdict.key.startswith("fsdp_config")]
        _, fault = load_named(value, self.context)
        if fault:
            self.refuse("fsdp_config", fault)

    def _read_deepspeed(self, document: ConfigDocument) -> None:
        value = document["deepspeed"]
        context = replace(self.context, trainer={"output_dir": None, **dict(document), **dict(self.context.trainer)})
        if isinstance(value, Mapping) and value:
            self.nested = read_nested(DEEPSPEED, value, context, "deepspeed")
            return
        self.flat["deepspeed"] = value
        if not value:
            self.keep("deepspeed", "DeepSpeed is off", loss="harmless")
            return
        inner, fault = load_named(value, self.context)
        if fault:
            self.refuse("deepspeed", fault)
        else:
            self.nested = read_nested(DEEPSPEED, inner, context, "deepspeed", file=value)
            self.mark("deepspeed", "applied")

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, settings: Mapping[str, Setting[Any]]) -> Reading:
        """The reading, under the document's own keys."""
        reading = self.finish("trainer", settings, unknown="raises a TypeError")
        spelled = {path: replace(setting, key=self._as_written(setting)) for path, setting in settings.items()}
        by_key = {verdict.key: verdict for verdict in merge([self._respelled(each) for each in reading.verdicts])}
        by_key |= {verdict.key: verdict for verdict in self.shadowed}
        extras = reading.description.extras
        if isinstance(self._original.get("fsdp_config"), str):
            extras = tuple(extra for extra in extras if not extra.key.startswith("fsdp_config"))
        if self.nested is not None:
            by_key |= {verdict.key: verdict for verdict in self.nested.verdicts}
            extras = (*extras, *self.nested.extras)
        order = {key: place for place, key in enumerate(flatten(self._original, _OPAQUE))}
        verdicts = sorted(by_key.values(), key=lambda verdict: order.get(verdict.key, len(order)))
        refused = [verdict.key for verdict in verdicts if verdict.kind == "refused"]
        kept = without(self._original, refused)
        description = replace(reading.description.replace(spelled, extras), document=kept)
        return replace(reading, description=description, verdicts=tuple(verdicts))

    def _as_written(self, setting: Setting[Any]) -> str:
        return ", ".join(dict.fromkeys(self.written.get(key, key) for key in setting.keys))

    def _respelled(self, verdict: Any) -> Any:
        spelled = self.written.get(verdict.key)
        if spelled is None:
            return verdict
        if spelled == "fsdp_config":
            return replace(verdict, key=spelled, value=self._original["fsdp_config"])
        kind = "renamed" if verdict.kind == "applied" else verdict.kind
        why = verdict.why or f"today's word is {verdict.key}"
        return replace(verdict, key=spelled, kind=kind, why=why, target=verdict.target or verdict.key)


def _opened(outer: Mapping[str, Any], context: ReadingContext) -> dict[str, Any]:
    """`fsdp_config` as a section where it names a file."""
    if not isinstance(outer.get("fsdp_config"), str):
        return {}
    inner, fault = load_named(outer["fsdp_config"], context)
    return {"fsdp_config": inner} if inner and not fault else {}
