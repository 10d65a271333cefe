"""TrainingArguments on their way in: older spellings, the file of `fsdp_config`, the DeepSpeed document inside."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting
from terrazzo.dialects.core.dialect import ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.keys import MISSING
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.nested import Nested, load_named, merge
from terrazzo.dialects.formats.trainer.deepspeed_inside import read_completed
from terrazzo.dialects.formats.trainer.keys import FIELDS, FSDP_KEYS, KEYS, MISNAMED
from terrazzo.dialects.formats.trainer.keys_earlier import GONE, MOVED, PREFIX, RENAMED, canonical_key, is_before
from terrazzo.documents.dotted_keys import flatten, without
from terrazzo.messages import did_you_mean

__all__ = ["TrainerReader", "default_of"]

_OPAQUE: tuple[str, ...] = ("lr_scheduler_kwargs", "fsdp_config.xla_fsdp_settings", "parallelism_config.tp_handler")
_OPAQUE += ("parallelism_config.cp_handler", "parallelism_config.sp_handler", "distributed_config.fsdp_plan")
_OPAQUE += ("distributed_config.tp_plan", "distributed_config.ep_plan")
_SEQUENCE = "parallelism_config.sp_size"


def default_of(key: str, context: ReadingContext) -> Any:
    """The default of a key in the context's release."""
    since, before = MOVED.get(key, ((0, 0, 0), None))
    return before if is_before(since, context) else KEYS[key].neutral


class TrainerReader(Reader):
    """A reader of TrainingArguments under the names that are used now.

    Attributes:
        context: what the document does not say.
        nested: the DeepSpeed document inside, if there is one.
    """

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        outer = {key: value for key, value in document.items() if key != "deepspeed"}
        named = document.get("fsdp_config")
        inner, fault = load_named(named, context) if isinstance(named, str) else ({}, "")
        opened = {**outer, "fsdp_config": inner} if inner and not fault else outer
        super().__init__(opened, "TrainingArguments", _OPAQUE, KEYS, canonical_key, older=True)
        self.context, self._original = context, document
        self.nested: Nested | None = None
        if fault:
            self.refuse("fsdp_config", fault)
        if "deepspeed" in document:
            self._read_deepspeed(document)

    @property
    def _names_file(self) -> bool:
        """Whether `fsdp_config` is the name of a file: all of its keys are reported under that one."""
        return isinstance(self._original.get("fsdp_config"), str)

    def winner(self, name: str, keys: list[str]) -> str:
        """The one with a prefix, or the newer field if it is set; of two for the warm-up the one that asks for any."""
        if name == "warmup_steps":
            return next((key for key in sorted(keys, key=name.__ne__) if self.flat[key] not in (None, 0)), keys[-1])
        prefixed = [key for key in keys if key.startswith(PREFIX)]
        present = [key for key in keys if self.flat[key] is not None] or keys
        return prefixed[0] if prefixed else name if name in present else present[0]

    def _read_deepspeed(self, document: ConfigDocument) -> None:
        value = document["deepspeed"]
        context = replace(self.context, trainer={**self._fields(), **dict(self.context.trainer)})
        if isinstance(value, Mapping) and value:
            self.nested = read_completed(value, context, self._sequence())
            return
        self.flat["deepspeed"] = value
        if not value:
            self.keep("deepspeed", "DeepSpeed is off", loss="harmless")
            return
        inner, fault = load_named(value, self.context)
        if fault:
            self.refuse("deepspeed", fault)
        else:
            self.nested = read_completed(inner, context, self._sequence(), value)
            self.mark("deepspeed", "applied")

    def _sequence(self) -> int:
        """How many ranks share sequences."""
        size = KEYS[_SEQUENCE].type.parse(self.raw(_SEQUENCE, 1))
        return 1 if size in (MISSING, None) else max(1, size)

    def _fields(self) -> dict[str, Any]:
        """The fields that say something, by today's names: what "auto" in the DeepSpeed document stands for."""
        rows = {name: FIELDS[name].type.parse(self.flat[key]) for name, key in self.spelling.items() if name in FIELDS}
        return {"output_dir": None, **{name: value for name, value in rows.items() if value not in (MISSING, None)}}

    def says_nothing(self, key: str) -> bool:
        return super().says_nothing(key) or (self.canonical(key) == "warmup_steps" and self.flat[key] == 0)

    def keep_gone(self) -> None:
        """Fields that transformers 5 raises at: harmless where they asked for nothing."""
        for key in [key for key in self.unread() if key in GONE]:
            self.keep_row(key)
            if self.extras[-1].loss == "harmless":
                self.mark(key, "defaulted", "transformers 5 has no such argument; what is trained is the same")
            else:
                self.refuse(key, f"transformers 5 has no such argument and raises a TypeError: {GONE[key].why}")

    def stranger(self, key: str, known: list[str], unknown: str, gone: Mapping[str, str]) -> str:
        """As of others, but for what TrainingArguments pass over in `fsdp_config`."""
        name = self.canonical(key).removeprefix("fsdp_config.")
        if not key.startswith("fsdp_config."):
            return super().stranger(key, known, unknown, gone)
        meant = MISNAMED.get(name)
        near = f" Did you mean '{meant}'?" if meant else did_you_mean(name, FSDP_KEYS)
        return f"TrainingArguments ignore it in silence: fsdp_config has no such key.{near}"

    def default(self, key: str) -> Any:
        """The default in this release."""
        return default_of(key, self.context)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, settings: Mapping[str, Setting[Any]]) -> Reading:
        """The reading, with that of the DeepSpeed document, and a named file's keys under the one that names it."""
        reading = self.finish("trainer", settings, unknown="raises a TypeError")
        verdicts, description = list(reading.verdicts), reading.description
        extras = description.extras
        if self._names_file:
            value = self._original["fsdp_config"]
            within = {verdict.key for verdict in verdicts if verdict.key.startswith("fsdp_config")}
            verdicts = merge([replace(v, key="fsdp_config", value=value) if v.key in within else v for v in verdicts])
            extras = tuple(extra for extra in extras if extra.key not in within)
            description = description.replace(
                {path: _under("fsdp_config", within, description[path]) for path in settings}
            )
        by_key = {verdict.key: verdict for verdict in verdicts}
        if self.nested is not None:
            by_key |= {verdict.key: verdict for verdict in self.nested.verdicts}
            extras = (*extras, *self.nested.extras)
        order = {key: place for place, key in enumerate(flatten(self._original, _OPAQUE))}
        ordered = tuple(sorted(by_key.values(), key=lambda verdict: order.get(verdict.key, len(order))))
        refused = {verdict.key for verdict in ordered if verdict.kind == "refused"}
        kept = without(self._original, [*refused, *GONE, *RENAMED])
        kept |= {RENAMED[key]: self.flat[key] for key in RENAMED if key in self.flat and self._counts(key, refused)}
        description = replace(description.replace({}, extras), document=kept)
        return replace(reading, description=description, verdicts=ordered, document=self._original)

    def _counts(self, key: str, refused: Collection[str]) -> bool:
        """Whether a field of transformers 4 says what holds."""
        return key not in refused and self.spelled(self.canonical(key)) == key


def _under(name: str, within: Collection[str], setting: Setting[Any]) -> Setting[Any]:
    """A setting of a file's keys under the key that names the file."""
    keys = dict.fromkeys(name if key in within else key for key in setting.keys)
    return replace(setting, key=", ".join(keys))
