"""Lightning's strategies, each read by what stands under it: FSDP's arguments, or a DeepSpeed document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.dialects.core.description import SHARDING_PATHS, Extra, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.lightning.deepspeed_document import FP16, DeepSpeedDocument, strategy_document
from terrazzo.dialects.formats.lightning.keys import ARGUMENTS, DDP_CLASSES, DEEPSPEED_STRATEGY, SHARED
from terrazzo.dialects.formats.lightning.trainer_arguments import Strategy, TrainerArguments
from terrazzo.dialects.formats.nested import DEEPSPEED, FSDP_STRATEGY, merge, read_nested
from terrazzo.dialects.formats.shared.fsdp_arguments import offload
from terrazzo.dialects.formats.shared.plan_rows import row_settings

__all__ = ["StrategyReading", "read_strategy"]

_ASIDE = ("remote_device", "load_full_weights", "exclude_frozen_parameters", "logging_level")


@dataclass
class StrategyReading:
    """What was read of a strategy."""

    settings: SettingsByPath
    verdicts: list[KeyVerdict]
    extras: list[Extra]


def read_strategy(trainer: TrainerArguments, reader: Reader, context: ReadingContext) -> StrategyReading:
    """Everything that a strategy decides."""
    strategy = trainer.strategy
    if strategy.kind == "FSDPStrategy":
        return _fsdp(strategy, reader, context)
    if strategy.kind == "DeepSpeedStrategy":
        return _deepspeed(trainer, context)
    if strategy.kind == "ModelParallelStrategy":
        return _model_parallel(trainer, reader)
    if strategy.kind in DDP_CLASSES:
        return _ddp(strategy)
    reader.keep(strategy.section, "arguments of a strategy that is not known here", loss="refused")
    return StrategyReading({}, [], [])


def _ddp(strategy: Strategy) -> StrategyReading:
    chosen: Setting[Any] = Setting(None, "file", strategy.name) if strategy.name else Setting(None, "default")
    settings: SettingsByPath = {
        **row_settings("zero0", chosen),
        **offload(Setting(False, "default")),
        "saving.state": Setting("full", "default"),
        "saving.export": Setting("full", "default"),
    }
    return StrategyReading(settings, [], [])


# -- FSDP ----------------------------------------------------------------------------------------------------------


def _fsdp(strategy: Strategy, reader: Reader, context: ReadingContext) -> StrategyReading:
    inner = passed_on(strategy.arguments)
    section = strategy.section
    nested = read_nested(FSDP_STRATEGY, inner, context, section)
    settings = {path: _at_strategy(setting, strategy, section) for path, setting in nested.settings.items()}
    if "sharding_strategy" not in strategy.arguments:  # the name of the strategy asks for full sharding
        for path in SHARDING_PATHS:
            settings[path] = replace(settings[path], origin="file", key=strategy.name)
    verdicts = [verdict for verdict in nested.verdicts if _argument(verdict.key, section) in strategy.in_document]
    return StrategyReading(
        {**settings, **_state(reader, section), **_recomputed(reader, section)}, verdicts, list(nested.extras)
    )


def passed_on(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What FSDPStrategy passes on to FullyShardedDataParallel."""
    return {name: value for name, value in arguments.items() if name not in ARGUMENTS["FSDPStrategy"]}


def _argument(key: str, section: str) -> str:
    return key.removeprefix(f"{section}.").partition(".")[0]


def _at_strategy(setting: Setting[Any], strategy: Strategy, section: str) -> Setting[Any]:
    """A setting under the document's keys: what a strategy's name stands for is said by that name."""
    keys = [key if _argument(key, section) in strategy.in_document else strategy.name for key in setting.keys]
    return replace(setting, key=", ".join(dict.fromkeys(keys)))


def _state(reader: Reader, section: str) -> SettingsByPath:
    state = reader.take(f"{section}.state_dict_type")
    written = "full" if state.value == "full" else "none"
    return {"saving.state": state, "saving.export": Setting(written, state.origin, state.key)}


def _recomputed(reader: Reader, section: str) -> SettingsByPath:
    mode, older = "activation_checkpointing.mode", f"{section}.activation_checkpointing"
    if reader.raw(older) and reader.raw(f"{older}_policy"):
        reader.refuse(older, "activation_checkpointing_policy says it as well, and Lightning raises: remove this one")
    for name in ("activation_checkpointing_policy", "activation_checkpointing"):
        key = f"{section}.{name}"
        if reader.raw(key):
            classes = reader.take(key)
            reader.keep(key, "which blocks are recomputed", loss="harmless")
            if name == "activation_checkpointing":
                reader.mark(key, "renamed", "deprecated: today's word is activation_checkpointing_policy")
            return {mode: Setting("full" if classes.value else "none", "file", key)}
    return {mode: Setting("none", "default")}


# -- FSDP2 and tensor parallelism ----------------------------------------------------------------------------------


def _model_parallel(trainer: TrainerArguments, reader: Reader) -> StrategyReading:
    section = trainer.strategy.section
    sizes = {"data_parallel_size": trainer.num_nodes, "tensor_parallel_size": trainer.devices}
    settings: SettingsByPath = {}
    for (name, known), axis in zip(sizes.items(), ("dp_shard", "tp"), strict=True):
        key = f"{section}.{name}"
        if reader.raw(key, "auto") == "auto":
            words = "the number of nodes" if axis == "dp_shard" else "the ranks of a node"
            reader.mark(key, "defaulted", f"auto: {words}{'' if known else ', which is not said'}")
            settings[f"mesh.{axis}"] = Setting(
                known, "auto" if key in reader.flat else "default", key if key in reader.flat else ""
            )
        else:
            settings[f"mesh.{axis}"] = reader.take(key)
    whole = reader.take(f"{section}.save_distributed_checkpoint")
    return StrategyReading({**settings, "saving.state": whole}, [], [])


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def _deepspeed(trainer: TrainerArguments, context: ReadingContext) -> StrategyReading:
    if trainer.strategy.arguments.get("config") is not None:
        return _configured(trainer, context)
    handed = strategy_document(trainer, context)
    nested = read_nested(DEEPSPEED, handed.document, context, "inner")
    settings = {
        path: _by_lightning(setting, trainer.strategy, handed, "inner.")
        for path, setting in _without_loop(nested.settings, handed).items()
    }
    verdicts = _of_arguments(nested.verdicts, trainer.strategy, handed, "inner.") + _unused(trainer, handed)
    return StrategyReading(settings, merge(verdicts), [])


def _by_lightning(setting: Setting[Any], strategy: Strategy, handed: DeepSpeedDocument, inner: str) -> Setting[Any]:
    """A setting under the keys by which Lightning wrote it; `inner`: what the document's own keys begin with."""
    keys: list[str] = []
    for key in setting.keys:
        name = key.removeprefix(inner)
        if name.partition(".")[0] in handed.own or name == key:
            keys.append(key)
        else:
            keys += [strategy.key(argument) for argument in handed.source.get(name, ())] or [
                _TRAINER_KEYS.get(name, "")
            ]
    told = dict.fromkeys(key for key in keys if key)
    return replace(setting, origin=setting.origin if told else "default", key=", ".join(told))


def _of_arguments(
    verdicts: Iterable[KeyVerdict], strategy: Strategy, handed: DeepSpeedDocument, inner: str
) -> list[KeyVerdict]:
    """Verdicts on keys that Lightning writes, as those on the arguments behind them."""
    return [
        replace(verdict, key=f"{strategy.section}.{argument}", value=strategy.arguments[argument], target="")
        for verdict in verdicts
        for argument in handed.source.get(verdict.key.removeprefix(inner), ())
        if argument in strategy.in_document
    ]


_TRAINER_KEYS = {
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "gradient_clipping": "gradient_clip_val",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
}
"""Lightning's argument behind a key of the document; a prefix is added where the Trainer has a section of its own."""


def _unused(trainer: TrainerArguments, handed: DeepSpeedDocument) -> list[KeyVerdict]:
    """Arguments that the document does not have: used with offload or fp16 alone, or by Lightning itself."""
    verdicts, strategy = [], trainer.strategy
    for name in strategy.in_document:
        key, value = f"{strategy.section}.{name}", strategy.arguments[name]
        if name in ("zero_optimization", "offload_optimizer", "offload_parameters"):
            verdicts.append(KeyVerdict(key, value, "applied"))
        elif name in (*_ASIDE, *SHARED):
            verdicts.append(
                KeyVerdict(key, value, "applied", "", "Lightning's own: it does not change what is trained")
            )
        elif name in FP16 and not trainer.precision.startswith("16-"):
            verdicts.append(KeyVerdict(key, value, "refused", "", "it is read in fp16 only: remove it"))
        elif name in DEEPSPEED_STRATEGY and name not in handed.used:
            on = strategy.arguments.get("zero_optimization", True)
            why = "it is read with offload only: turn that on" if on else "zero_optimization is off: turn that on"
            verdicts.append(KeyVerdict(key, value, "refused", "", f"{why}, or remove it"))
    return verdicts


def _configured(trainer: TrainerArguments, context: ReadingContext) -> StrategyReading:
    """A whole DeepSpeed configuration: Lightning ignores the other arguments then, but for those of its own fp16."""
    strategy, where = trainer.strategy, f"{trainer.strategy.section}.config"
    config = strategy.arguments["config"]
    named = None if isinstance(config, Mapping) else config
    handed = strategy_document(trainer, context)
    if handed.fault:
        return StrategyReading({}, [KeyVerdict(where, config, "refused", "", handed.fault)], [])
    nested = read_nested(DEEPSPEED, handed.document, replace(context, fills_auto=False), where, file=named)
    added = {f"{where}.{name}" for name in set(handed.document) - handed.own}
    verdicts = [verdict for verdict in nested.verdicts if not _is_of(verdict.key, added)]
    verdicts += merge(_of_arguments(nested.inner.verdicts, strategy, handed, ""))
    settings = {
        path: _by_lightning(setting, strategy, handed, f"{where}.")
        for path, setting in _without_loop(nested.settings, handed).items()
    }
    if "gradient_accumulation_steps" in handed.own:
        key, value = (where, named) if named is not None else (f"{where}.gradient_accumulation_steps", 0)
        value = value or config["gradient_accumulation_steps"]
        verdicts = [verdict for verdict in verdicts if verdict.key != key]
        why = "Lightning raises on gradient_accumulation_steps: say accumulate_grad_batches in the Trainer"
        verdicts.append(KeyVerdict(key, value, "refused", "", why))
    verdicts += _clipped_twice(trainer, handed, settings.get("training.clip"))
    extras = [] if named is not None else [extra for extra in nested.extras if not _is_of(extra.key, added)]
    return StrategyReading(settings, verdicts + _ignored(strategy, handed), extras)


def _without_loop(settings: Mapping[str, Setting[Any]], handed: DeepSpeedDocument) -> SettingsByPath:
    """The settings without what Lightning's Trainer decides: accumulation, and clipping if it is left open."""
    trainers = {"batch.accumulation"} | (set() if "gradient_clipping" in handed.own else {"training.clip"})
    return {path: setting for path, setting in settings.items() if path not in trainers}


def _clipped_twice(trainer: TrainerArguments, handed: DeepSpeedDocument, does: Setting[Any] | None) -> list[KeyVerdict]:
    """The Trainer's clipping beside the configuration's own, by which DeepSpeed's engine clips."""
    wanted = trainer.gradient_clip_val
    if wanted is None or "gradient_clipping" not in handed.own:
        return []
    norm, key = (does.value if does is not None else None) or 0, f"{trainer.prefix}gradient_clip_val"
    if wanted == norm:
        return [KeyVerdict(key, wanted, "applied", "", "DeepSpeed's gradient_clipping decides")]
    why = f"DeepSpeed clips at its own gradient_clipping, {norm:g}, and Lightning passes over this one: remove either"
    return [KeyVerdict(key, wanted, "refused", "", why)]


def _is_of(key: str, sections: set[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _ignored(strategy: Strategy, handed: DeepSpeedDocument) -> list[KeyVerdict]:
    """The other arguments beside a whole configuration."""
    aside = strategy.in_document & {*_ASIDE, *SHARED}
    verdicts = [KeyVerdict(f"{strategy.section}.{name}", strategy.arguments[name], "applied") for name in sorted(aside)]
    why = "config is given, and Lightning ignores it: say it there"
    void = sorted(strategy.in_document - aside - handed.used - {"config"})
    return verdicts + [
        KeyVerdict(f"{strategy.section}.{name}", strategy.arguments[name], "refused", "", why) for name in void
    ]
