"""Reading the arguments of Lightning's Trainer and of its strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.lightning.keys import ARGUMENTS, NAMED, TRAINER, canonical_key, rows_for, strategy_of
from terrazzo.dialects.formats.lightning.precision import POLICY, precision_row
from terrazzo.dialects.formats.lightning.read_loop import arguments_of, read_loop
from terrazzo.dialects.formats.lightning.read_strategy import Strategy, read_strategy
from terrazzo.dialects.formats.shared.plan_rows import in_one_group
from terrazzo.messages import did_you_mean

__all__ = ["read"]


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    return _Read(document, context).reading()


class _LightningReader(Reader):
    """A reader that knows what the strategy's class takes."""

    def __init__(self, document: ConfigDocument, opaque: Collection[str], kind: str, prefix: str) -> None:
        super().__init__(document, "Lightning", opaque, rows_for(kind, prefix), canonical_key)
        self._kind, self._arguments = kind, f"{prefix}strategy.init_args."

    def stranger(self, key: str, known: list[str], unknown: str, gone: Mapping[str, str]) -> str:
        """As of others, but for arguments of the strategy, of which its class is named."""
        name = self.canonical(key)
        if not name.startswith(self._arguments):
            return super().stranger(key, known, unknown, gone)
        near = did_you_mean(name.removeprefix(self._arguments), ARGUMENTS[self._kind])
        return f"{self._kind} has no such argument and raises a TypeError.{near}"


class _Read:
    """One document under way."""

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        self.trainer = arguments_of(document)
        self.prefix = "" if self.trainer is document else "trainer."
        arguments = tuple(f"strategy.init_args.{name}" for name in ("auto_wrap_policy", "device_mesh"))
        opaque = tuple(f"{self.prefix}{name}" for name in (*arguments, "callbacks"))
        kind, _ = strategy_of(self.trainer.get("strategy", "auto"))
        self.reader = _LightningReader(document, opaque, kind, self.prefix)
        self.context = context

    def reading(self) -> Reading:
        reader = self.reader
        reader.keep_nulls()
        word = self._precision()
        strategy = self._strategy()
        sizes = {name: reader.take(f"{self.prefix}{name}").value for name in ("devices", "num_nodes")}
        arguments = {**self.trainer, **sizes, "precision": word.value}
        strategy_reading = read_strategy(strategy, reader, self.context, arguments)
        settings = _by_nodes(
            {**read_loop(reader, self.prefix), **strategy_reading.settings},
            reader.take(f"{self.prefix}num_nodes").value,
        )
        if strategy.kind == "SingleDeviceStrategy":
            settings["mesh.world"] = self._alone(settings.get("mesh.world"))
            settings.pop("mesh.nodes", None)
        if strategy.kind != "DeepSpeedStrategy":
            settings |= self._dtypes(strategy, word, strategy_reading.settings, settings["batch.accumulation"])
        for verdict in strategy_reading.verdicts:
            reader.mark(verdict.key, verdict.kind, verdict.why, verdict.target)
        reader.extras += [replace(extra, key=reader.spelled(extra.key)) for extra in strategy_reading.extras]
        _name_class(strategy, settings)
        prefixed = {path: self._prefixed(setting) for path, setting in settings.items()}
        return reader.finish("lightning", prefixed, unknown="raises a TypeError")

    def _prefixed(self, setting: Setting[Any]) -> Setting[Any]:
        """Keys that name a Trainer argument without its section."""
        keys = [f"{self.prefix}{key}" if key in TRAINER else key for key in setting.keys]
        present = [key for key in keys if key in self.reader]
        return Setting(setting.value, setting.origin if present or not keys else "default", ", ".join(present))

    def _precision(self) -> Setting[Any]:
        key = f"{self.prefix}precision"
        word = self.reader.take(key)
        if str(self.reader.raw(key)).startswith("transformer-engine"):
            why = "transformer_engine computes in fp8: choose bf16"
            self.reader.keep(key, why, loss="refused")
            self.reader.refuse(key, why)
        return word if word.value is not None else replace(word, value="32-true")

    def _dtypes(
        self,
        strategy: Strategy,
        word: Setting[Any],
        strategy_settings: Mapping[str, Setting[Any]],
        micro_batches: Setting[Any],
    ) -> SettingsByPath:
        """What the word says, and FSDPStrategy's own `mixed_precision` in its place."""
        policy = None
        if strategy.kind == "FSDPStrategy" and strategy.arguments.get("mixed_precision") is not None:
            told = {state: strategy_settings[f"precision.{state}"] for state in POLICY}
            policy = {state: setting for state, setting in told.items() if setting.origin == "file"}
        row, gathered = precision_row(strategy.kind, word, micro_batches, self.context, policy)
        if gathered != row["precision.compute"].value and word.value.endswith("-mixed"):
            why = f"weights are gathered in {gathered}, and autocast computes in {row['precision.compute'].value}"
            self.reader.mark(f"{self.prefix}precision", "lossy", why)
        return row

    def _strategy(self) -> Strategy:
        """The class of the strategy with its arguments; what is not known is refused."""
        raw = self.trainer.get("strategy", "auto")
        kind, arguments = strategy_of(raw)
        known: Collection[str]
        if not isinstance(raw, Mapping):
            where, known, named = f"{self.prefix}strategy", NAMED, raw
            strategy = Strategy(kind, arguments, frozenset(), where, where if where in self.reader.flat else "")
        else:
            where, known, named = f"{self.prefix}strategy.class_path", ARGUMENTS, raw.get("class_path", "")
            strategy = Strategy(kind, arguments, frozenset(map(str, arguments)), f"{self.prefix}strategy", where)
        self.reader.take_raw(where)
        for bare in (f"{strategy.where}.init_args", f"{strategy.where}.dict_kwargs"):
            if not self.reader.flat.get(bare, "none"):
                self.reader.keep(bare, "it says nothing", loss="harmless")
        if not kind:
            self.reader.keep(where, "a strategy that is not known here", loss="refused")
            last = str(named).rpartition(".")[2]
            near = did_you_mean(last.lower() if known is NAMED else last, known)
            self.reader.refuse(where, f"{found(named)} is none of the strategies that are read here.{near}")
        return strategy

    def _alone(self, world: Setting[Any] | None) -> Setting[Any]:
        """One rank, whatever `devices` and `num_nodes` say."""
        for key in world.keys if world is not None and world.value != 1 else ():
            self.reader.refuse(key, "SingleDeviceStrategy trains on one device, and Lightning passes over it: take ddp")
        return Setting(1, "derived")


def _by_nodes(settings: SettingsByPath, nodes: int) -> SettingsByPath:
    """FSDP replicates over nodes, and splits over the ranks of each, where nobody gives it a mesh."""
    replicas, world = settings.get("mesh.dp_replicate"), settings.get("mesh.world")
    if replicas is None or replicas.value is not None or world is None:
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
