"""What the Trainer shards and how: `fsdp`, `fsdp_config`, `parallelism_config`, and `distributed_config`."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByKey
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.shared.accelerate import AXES
from terrazzo.dialects.formats.shared.fsdp import MIN_NUMEL, NUMBERED, STRATEGIES, offload
from terrazzo.dialects.formats.shared.rows import HYBRID, row_settings
from terrazzo.dialects.formats.trainer.keys import DISTRIBUTED, FSDP_KEYS, FSDP_VERSION_1
from terrazzo.dialects.formats.trainer.reader import TrainerReader
from terrazzo.errors import did_you_mean

__all__ = ["read_parallel", "stack_of"]

_BY_NUMBER = {str(number): row for number, row in NUMBERED.items()}
_MISNAMED = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "backward_prefetch_policy": "backward_prefetch",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_version": "version",
}
"""Accelerate's words, which TrainingArguments pass over."""


def stack_of(source: TrainerReader) -> str:
    """What stands under the Trainer: `deepspeed`, `fsdp1`, `fsdp2`, `native` or `ddp`."""
    if source.nested is not None:
        return "deepspeed"
    if source.get("fsdp"):
        return f"fsdp{fsdp_version(source)}"
    return "native" if "distributed_config" in source else "ddp"


def fsdp_version(source: TrainerReader) -> int:
    """FSDP's version, as `fsdp_config` says."""
    return 1 if str(source.get("fsdp_config.version", 2)) == "1" else 2


def read_parallel(source: TrainerReader, stack: str) -> SettingsByKey:
    """Row, mesh, units, offload, prefetch, loading and the kind of checkpoint."""
    mesh = _parallelism(source)
    if stack in ("fsdp1", "fsdp2"):
        found = _fsdp(source, stack, mesh)
    else:
        _without_fsdp(source, stack)
        found = _native(source) if stack == "native" else _ddp()
    _explain_strangers(source)
    return {**mesh, **found}


def _parallelism(source: TrainerReader) -> SettingsByKey:
    """Accelerate's ParallelismConfig, as a mapping."""
    found: SettingsByKey = {}
    for axis in AXES:
        found[f"mesh.{axis}"] = source.take(f"parallelism_config.{axis}_size")
    if "parallelism_config" not in source or found["mesh.dp_shard"].origin == "default":
        found["mesh.dp_shard"] = Setting(None, "default")
    for name in ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler"):
        source.keep(f"parallelism_config.{name}", "details of Accelerate's own axes")
    return found


def _ddp() -> SettingsByKey:
    return {
        **row_settings("zero0", Setting(None, "default")),
        **offload(Setting(False, "default")),
        "saving.state": Setting("full", "default"),
        "saving.export": Setting("hf", "default"),
    }


def _without_fsdp(source: TrainerReader, stack: str) -> None:
    """Keys that nobody reads while FSDP is off."""
    if "fsdp" in source.flat:
        source.keep("fsdp", "FSDP is off", loss="harmless")
    other = "DeepSpeed is on" if stack == "deepspeed" else "FSDP is off"
    for key in source.unread():
        if key.startswith("fsdp_config") and source.get(key) is not None:
            source.refuse(key, f"{other}: TrainingArguments ignore it. Say fsdp: true, or remove it")


# -- FSDP ----------------------------------------------------------------------------------------------------------


def _fsdp(source: TrainerReader, stack: str, mesh: SettingsByKey) -> SettingsByKey:
    version = source.take("fsdp_config.version")
    words = _legacy(source)
    row = _row_of(source, version.value, words)
    replicas = mesh["mesh.dp_replicate"]
    sources = [Setting(True, "file", "fsdp"), row]
    name = row.value
    if version.value == 2 and (replicas.value or 1) > 1 and name in HYBRID:
        name, sources = HYBRID[name], [*sources, replicas]
    units = _fsdp_units(source, version.value)
    found = {**row_settings(name, *sources), **units, **_offload(source, words), **_state(source)}
    if name.startswith("hybrid") and replicas.origin == "default":
        found["mesh.dp_replicate"] = derived(None, row, origin="default")
    return {**found, **_prefetch(source, version.value), **_loading(source, version.value)}


def _legacy(source: TrainerReader) -> dict[str, Any]:
    """What the older form of `fsdp`, words in a text or list, says: a strategy, and offload."""
    raw = source.get("fsdp")
    if raw is True:
        source.say("fsdp", "applied")
        return {}
    words = raw.split() if isinstance(raw, str) else raw if isinstance(raw, list) else [raw]
    found: dict[str, Any] = {}
    wrong = [str(word) for word in words if str(word) not in (*STRATEGIES, "offload", "auto_wrap")]
    for word in map(str, words):
        if word in STRATEGIES:
            found["row"] = STRATEGIES[word]
        elif word == "offload":
            found["offload"] = True
    source.say("fsdp", "renamed", "words are deprecated: say fsdp: true, and the rest in fsdp_config")
    if wrong or found.get("row") not in (None, "zero3", "shard_grad_op"):
        source.keep("fsdp", "a word of FSDP's first version")
        source.say("fsdp", "renamed", "words are deprecated: say fsdp: true, and the rest in fsdp_config")
    if wrong:
        source.refuse("fsdp", f"it names {wrong[0]!r}, which is no option of FSDP: say fsdp: true")
    elif found.get("row") not in (None, "zero3", "shard_grad_op") and fsdp_version(source) == 2:
        why = (
            f"{raw!r} needs version 1 of FSDP, and TrainingArguments raise with version 2, the default: say"
            " fsdp_config: {version: 1}, or fsdp: true with parallelism_config: {dp_replicate_size: ...}"
        )
        source.refuse("fsdp", why)
    return found


def _row_of(source: TrainerReader, version: int, words: dict[str, Any]) -> Setting[Any]:
    key = "fsdp_config.reshard_after_forward"
    legacy = words.get("row")
    fallback = Setting(legacy or "zero3", "file", "fsdp")
    if version == 1:
        return _passed_over(source, _strategy(source, fallback) if key in source.flat else fallback)
    if key in source.flat:
        kept = source.boolean(key, None)
        return fallback if kept.value is None else Setting("zero3" if kept.value else "shard_grad_op", "file", key)
    return fallback


def _strategy(source: TrainerReader, fallback: Setting[Any]) -> Setting[Any]:
    """Version 1's name or number of a strategy."""
    key = "fsdp_config.reshard_after_forward"
    found = source.choice(key, {**STRATEGIES, **_BY_NUMBER}, None)
    if found.value is None:
        named = "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2"
        source.refuse(key, f"it is {source.get(key)!r}; version 1 takes the name of a strategy: {named}")
        return fallback
    return found


def _passed_over(source: TrainerReader, asked: Setting[Any]) -> Setting[Any]:
    """Accelerate 1.15 takes version 1's strategy from FSDP_SHARDING_STRATEGY, and FULL_SHARD without it."""
    if asked.value != "zero3":
        instead = {
            "shard_grad_op": "version: 2 with reshard_after_forward: false",
            "zero0": "no fsdp at all",
        }.get(asked.value, "version: 2 with parallelism_config: {dp_replicate_size: ..., dp_shard_size: ...}")
        why = "version 1 asks the environment for its strategy (FSDP_SHARDING_STRATEGY), and FULL_SHARD is what it gets"
        source.refuse(asked.key, f"{why}: say {instead}")
    return Setting("zero3", asked.origin, asked.key)


def _fsdp_units(source: TrainerReader, version: int) -> SettingsByKey:
    section = "fsdp_config"
    policy = source.take(f"{section}.auto_wrap_policy")
    classes = source.take(f"{section}.transformer_layer_cls_to_wrap")
    size = source.take(f"{section}.min_num_params")
    if policy.value != "TRANSFORMER_BASED_WRAP" and classes.value:
        source.refuse(classes.key, f"auto_wrap_policy is {policy.value}, which ignores it: say TRANSFORMER_BASED_WRAP")
    if policy.value != "SIZE_BASED_WRAP" and size.value:
        source.refuse(size.key, f"auto_wrap_policy is {policy.value}, which ignores it: say SIZE_BASED_WRAP")
    if policy.value == "NO_WRAP":
        return {"units.policy": derived("none", policy, origin="file")}
    if policy.value == "SIZE_BASED_WRAP":
        floor = Setting(size.value or (MIN_NUMEL if version == 1 else 0), size.origin, size.key)
        return {"units.policy": derived("min_numel", policy, origin="file"), "units.min_numel": floor}
    if classes.value:
        return {"units.policy": derived("classes", policy, classes, origin="file"), "units.classes": classes}
    return {"units.policy": derived("auto", policy, origin=policy.origin)}


def _offload(source: TrainerReader, words: dict[str, Any]) -> SettingsByKey:
    moved = source.take("fsdp_config.cpu_offload")
    if moved.origin == "default" and words.get("offload"):
        moved = Setting(True, "file", "fsdp")
    return offload(moved)


def _state(source: TrainerReader) -> SettingsByKey:
    state = source.take("fsdp_config.state_dict_type")
    written = "hf" if state.value == "full" else "none"
    return {"saving.state": state, "saving.export": derived(written, state, origin=state.origin)}


def _prefetch(source: TrainerReader, version: int) -> SettingsByKey:
    if version == 2:
        for name in FSDP_VERSION_1:
            key = f"fsdp_config.{name}"
            if key in source.flat:
                source.refuse(key, "it is read with version 1 only: fully_shard does so by itself. Remove it")
        return {"prefetch.forward": Setting(0, "default"), "prefetch.backward": Setting(1, "default")}
    key = "fsdp_config.backward_prefetch"
    backward = source.take(key)
    if str(source.get(key)).lower() == "backward_post":
        source.keep(key, "the next unit is gathered after the gradients of this one, not before", loss="harmless")
    ahead = source.take("fsdp_config.forward_prefetch")
    for name in ("use_orig_params", "limit_all_gathers"):
        source.keep(f"fsdp_config.{name}", "FSDP1 only: needless elsewhere", loss="harmless")
    return {"prefetch.backward": backward, "prefetch.forward": derived(int(ahead.value), ahead, origin=ahead.origin)}


def _loading(source: TrainerReader, version: int) -> SettingsByKey:
    low = source.take("fsdp_config.cpu_ram_efficient_loading")
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"):
        key = f"fsdp_config.{name}"
        if source.get(key):
            source.keep(key, "torch_xla shards on TPUs: another library", loss="refused")
            source.refuse(key, "torch_xla's sharding is another library: remove it")
        else:
            source.keep(key, "off", loss="harmless")
    sent = source.take("fsdp_config.sync_module_states") if version == 1 else Setting(low.value, "derived", low.key)
    return {"loading.low_memory": low, "loading.broadcast": sent}


def _explain_strangers(source: TrainerReader) -> None:
    """Keys of `fsdp_config` that TrainingArguments pass over in silence."""
    for key in source.unread():
        name = key.removeprefix("fsdp_config.")
        if key.startswith("fsdp_config.") and name.partition(".")[0] not in FSDP_KEYS:
            meant = _MISNAMED.get(name)
            near = f" Did you mean '{meant}'?" if meant else did_you_mean(name, FSDP_KEYS)
            source.refuse(key, f"TrainingArguments ignore it in silence: fsdp_config has no such key.{near}")


# -- transformers' own sharding ------------------------------------------------------------------------------------


def _native(source: TrainerReader) -> SettingsByKey:
    def size(name: str) -> Setting[Any]:
        found = source.take(f"distributed_config.{name}")
        return Setting(found.value or 1, found.origin, found.key)

    replicas, shards = size("dp_replicate_size"), size("fsdp_size")
    row = "zero0" if shards.value == 1 else "hybrid_shard" if replicas.value > 1 else "zero3"
    moved = source.take("distributed_config.fsdp_cpu_offload")
    for name in DISTRIBUTED:
        key = f"distributed_config.{name}"
        if key in source.unread() and name not in ("tp_size", "ep_size", "pp_size", "fsdp_mixed_precision"):
            why = "which modules are split, and how, is transformers' own"
            same = source.get(key) == DISTRIBUTED[name].default
            source.keep(key, why, loss="harmless" if same else "lossy")
    whole = shards if row != "zero0" else Setting(replicas.value, replicas.origin, replicas.key)
    return {
        **row_settings(row, shards, *([replicas] if replicas.value > 1 else [])),
        "mesh.dp_replicate": Setting(1, "default") if row == "zero0" else replicas,
        "mesh.dp_shard": whole,
        **{f"mesh.{axis}": size(f"{axis}_size") for axis in ("tp", "ep", "pp")},
        **offload(moved),
        "units.policy": Setting("auto", "default"),
        "loading.low_memory": Setting(True, "default"),
        "saving.state": Setting("sharded", "default"),
    }
