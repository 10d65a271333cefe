"""Reading the arguments of Lightning's Trainer and of its strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import UNSET, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.lightning.keys import ARGUMENTS, NAMED, TRAINER, canonical_key, rows_for
from terrazzo.dialects.formats.lightning.precision import POLICY, cast_by_deepspeed, precision_row
from terrazzo.dialects.formats.lightning.read_loop import read_loop
from terrazzo.dialects.formats.lightning.read_strategy import read_strategy
from terrazzo.dialects.formats.lightning.trainer_arguments import (
    HALF_ON_CPU,
    Strategy,
    place_of_arguments,
    strategy_in,
    trainer_arguments,
)
from terrazzo.dialects.formats.shared.plan_rows import in_one_group
from terrazzo.messages import did_you_mean

__all__ = ["read"]


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    return _Read(document, context).reading()


class _LightningReader(Reader):
    """A reader that knows what the strategy's class takes."""

    def __init__(self, document: ConfigDocument, opaque: Collection[str], strategy: Strategy) -> None:
        super().__init__(document, "Lightning", opaque, rows_for(strategy.kind, strategy.section), canonical_key)
        self._kind, self._arguments = strategy.kind, f"{strategy.section}."

    def stranger(self, key: str, known: list[str], unknown: str, gone: Mapping[str, str]) -> str:
        """As of others, but for arguments of the strategy, of which its class is named."""
        name = self.canonical(key)
        if not self._kind or not name.startswith(self._arguments):
            return super().stranger(key, known, unknown, gone)
        near = did_you_mean(name.removeprefix(self._arguments), ARGUMENTS[self._kind])
        return f"{self._kind} has no such argument and raises a TypeError.{near}"


class _Read:
    """One document under way."""

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        self.prefix, arguments = place_of_arguments(document)
        strategy = strategy_in(arguments, self.prefix)
        opaque = (
            *(f"{strategy.section}.{name}" for name in ("auto_wrap_policy", "device_mesh")),
            self._key("callbacks"),
        )
        self.reader, self.context = _LightningReader(document, opaque, strategy), context
        self.reader.keep_nulls()
        self.trainer = trainer_arguments(document, lambda key: self.reader.take(key).value)

    def _key(self, argument: str) -> str:
        return f"{self.prefix}{argument}"

    def reading(self) -> Reading:
        reader, strategy = self.reader, self.trainer.strategy
        self._name_strategy()
        strategy_reading = read_strategy(self.trainer, reader, self.context)
        settings = {**read_loop(reader, self.trainer), **strategy_reading.settings}
        settings = _by_nodes(settings, self.trainer.num_nodes, self.context.world)
        if strategy.kind == "SingleDeviceStrategy":
            settings["mesh.world"] = self._alone(settings.get("mesh.world"))
            settings.pop("mesh.nodes", None)
        word = self._precision()
        if strategy.kind != "DeepSpeedStrategy":
            settings |= self._dtypes(word, strategy_reading.settings, settings["batch.accumulation"])
        elif settings.get("precision.buffers", UNSET).origin == "default" and (cast := cast_by_deepspeed(word)):
            settings["precision.buffers"] = cast
        for verdict in strategy_reading.verdicts:
            reader.mark(verdict.key, verdict.kind, verdict.why, verdict.target)
        reader.extras += [replace(extra, key=reader.spelled(extra.key)) for extra in strategy_reading.extras]
        _name_class(strategy, settings)
        prefixed = {path: self._prefixed(setting) for path, setting in settings.items()}
        return reader.finish("lightning", prefixed, unknown="raises a TypeError")

    def _prefixed(self, setting: Setting[Any]) -> Setting[Any]:
        """Keys that name a Trainer argument without its section."""
        keys = [self._key(key) if key in TRAINER else key for key in setting.keys]
        present = [key for key in keys if key in self.reader]
        return Setting(setting.value, setting.origin if present or not keys else "default", ", ".join(present))

    def _precision(self) -> Setting[Any]:
        word = self.reader.take(key := self._key("precision"))
        if str(self.reader.raw(key)).startswith("transformer-engine"):
            why = "transformer_engine computes in fp8: choose bf16"
            self.reader.keep(key, why, loss="refused")
            self.reader.refuse(key, why)
        if word.value == HALF_ON_CPU != self.trainer.precision:
            self.reader.mark(key, "lossy", f"on a CPU Lightning takes {self.trainer.precision}: say that")
        return replace(word, value=self.trainer.precision)

    def _dtypes(
        self, word: Setting[Any], strategy_settings: Mapping[str, Setting[Any]], micro_batches: Setting[Any]
    ) -> SettingsByPath:
        """What the word says, and FSDPStrategy's own `mixed_precision` in its place."""
        policy, strategy = None, self.trainer.strategy
        if strategy.kind == "FSDPStrategy" and strategy.arguments.get("mixed_precision") is not None:
            told = {state: strategy_settings[f"precision.{state}"] for state in POLICY}
            policy = {state: setting for state, setting in told.items() if setting.origin == "file"}
        row, gathered = precision_row(strategy.kind, word, micro_batches, self.context, policy)
        if gathered != row["precision.compute"].value and word.value.endswith("-mixed"):
            why = f"weights are gathered in {gathered}, and autocast computes in {row['precision.compute'].value}"
            self.reader.mark(self._key("precision"), "lossy", why)
        return row

    def _name_strategy(self) -> None:
        """The verdict on what names the strategy: what is not known is refused."""
        reader, strategy = self.reader, self.trainer.strategy
        where = strategy.name or strategy.where
        reader.take_raw(where)
        for bare in (strategy.section, f"{strategy.where}.dict_kwargs"):
            if not reader.flat.get(bare, "none"):
                reader.keep(bare, "it says nothing", loss="harmless")
        if not strategy.kind:
            reader.keep(where, "a strategy that is not known here", loss="refused")
            last = str(strategy.word).rpartition(".")[2]
            near = did_you_mean(last, ARGUMENTS) if strategy.by_class else did_you_mean(last.lower(), NAMED)
            reader.refuse(where, f"{found(strategy.word)} is none of the strategies that are read here.{near}")

    def _alone(self, world: Setting[Any] | None) -> Setting[Any]:
        """One rank, whatever `devices` and `num_nodes` say."""
        for key in world.keys if world is not None and world.value != 1 else ():
            self.reader.refuse(key, "SingleDeviceStrategy trains on one device, and Lightning passes over it: take ddp")
        return Setting(1, "derived")


def _by_nodes(settings: SettingsByPath, nodes: int, started: int | None) -> SettingsByPath:
    """FSDP replicates over nodes, and splits over the ranks of each, where nobody gives it a mesh.

    `started`: ranks, where the document does not say them.
    """
    replicas, world = settings.get("mesh.dp_replicate"), settings.get("mesh.world", Setting(started, "derived"))
    if replicas is None or replicas.value is not None or world.value is None:
        return settings
    sizes = {"mesh.dp_replicate": nodes, "mesh.dp_shard": world.value // nodes}
    settings = {**settings, **{path: Setting(size, "derived", world.key) for path, size in sizes.items()}}
    return {**settings, **in_one_group(settings)}


def _name_class(strategy: Strategy, settings: SettingsByPath) -> None:
    """Say of the plan, or of the axes where code makes the plan, that the strategy's class chose it too."""
    if not strategy.name or any(strategy.name in setting.keys for setting in settings.values()):
        return
    chosen = [path for path in settings if path.startswith("sharding.")] or [
        path for path in ("mesh.tp",) if path in settings
    ]
    for path in chosen:
        setting = settings[path]
        origin = "file" if setting.origin == "default" and path.startswith("sharding.") else setting.origin
        settings[path] = Setting(setting.value, origin, ", ".join((*setting.keys, strategy.name)))
