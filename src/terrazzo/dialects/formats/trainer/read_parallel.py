"""What the Trainer shards and how: `fsdp`, `fsdp_config`, `parallelism_config`, and `distributed_config`."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.keys import BOOLEAN, choice
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.shared.accelerate_stack import read_axes
from terrazzo.dialects.formats.shared.fsdp_arguments import MIN_NUMEL, offload
from terrazzo.dialects.formats.shared.fsdp_words import NUMBERED, STRATEGIES
from terrazzo.dialects.formats.shared.plan_rows import HYBRID, row_settings
from terrazzo.dialects.formats.trainer.keys import FSDP_VERSION_1
from terrazzo.dialects.formats.trainer.keys_earlier import is_before
from terrazzo.dialects.formats.trainer.trainer_reader import TrainerReader

__all__ = ["read_parallel", "stack_of"]

_VERSION = "fsdp_config.version"
_ASKS_VERSION, _ASKS_SECTION = (5, 0, 0), (5, 10, 0)
"""The first releases that ask `fsdp_config` for a version, and for what else words in `fsdp` had said alone."""
_BY_NUMBER = {str(number): row for number, row in NUMBERED.items()}


def stack_of(reader: TrainerReader) -> str:
    """What stands under the Trainer: `deepspeed`, `fsdp1`, `fsdp2`, `native` or `ddp`."""
    if reader.nested is not None:
        return "deepspeed"
    if reader.raw("fsdp"):
        return f"fsdp{fsdp_version(reader)}"
    return "native" if "distributed_config" in reader else "ddp"


def fsdp_version(reader: TrainerReader) -> int:
    """FSDP's version, as `fsdp_config` says, and transformers 4 does not ask: it knows the first alone."""
    told = None if is_before(_ASKS_VERSION, reader.context) else reader.raw(_VERSION)
    return 1 if str(reader.default(_VERSION) if told is None else told) == "1" else 2


def read_parallel(reader: TrainerReader, stack: str) -> SettingsByPath:
    """Row, mesh, units, offload, prefetch, loading and the kind of checkpoint."""
    mesh = read_axes(reader, "parallelism_config.{}_size", fsdp=stack in ("fsdp1", "fsdp2"))
    for name in ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler"):
        reader.keep(f"parallelism_config.{name}", "details of Accelerate's own axes")
    if stack in ("fsdp1", "fsdp2"):
        settings = _fsdp(reader, stack, mesh)
    else:
        _without_fsdp(reader, stack)
        settings = _native(reader) if stack == "native" else _ddp()
    return {**mesh, **settings}


def _ddp() -> SettingsByPath:
    return {
        **row_settings("zero0", Setting(None, "default")),
        **offload(Setting(False, "default")),
        "saving.state": Setting("full", "default"),
        "saving.export": Setting("hf", "default"),
    }


def _without_fsdp(reader: TrainerReader, stack: str) -> None:
    """Keys that nobody reads while FSDP is off."""
    if "fsdp" in reader.flat:
        reader.keep("fsdp", "FSDP is off", loss="harmless")
    other = "DeepSpeed is on" if stack == "deepspeed" else "FSDP is off"
    for key in reader.unread():
        if key.startswith("fsdp_config") and reader.raw(key) is not None:
            reader.refuse(key, f"{other}: TrainingArguments ignore it. Say fsdp: true, or remove it")


# -- FSDP ----------------------------------------------------------------------------------------------------------


def _fsdp(reader: TrainerReader, stack: str, mesh: SettingsByPath) -> SettingsByPath:
    version, told = fsdp_version(reader), reader.take(_VERSION)
    if told.origin == "file" and told.value != version:
        reader.refuse(_VERSION, "transformers 4 passes over it, and runs FSDP1: remove it, or take transformers 5")
    else:
        reader.keep(_VERSION, "which FSDP it is: each setting says what differs", loss="harmless")
    words = _legacy(reader)
    row = _row_of(reader, version, words)
    replicas = mesh["mesh.dp_replicate"]
    sources = [Setting(True, "file", "fsdp"), row]
    name = row.value
    if version == 2 and (replicas.value or 1) > 1 and name in HYBRID:
        name, sources = HYBRID[name], [*sources, replicas]
    units = _worded_units(reader, words) if _is_worded(reader) else _fsdp_units(reader, version)
    settings = {**row_settings(name, *sources), **units, **_offload(reader, words), **_state(reader)}
    if name.startswith("hybrid") and replicas.origin == "default":
        settings["mesh.dp_replicate"] = derived(None, row, origin="default")
    return {**settings, **_prefetch(reader, version), **_loading(reader, version)}


def _legacy(reader: TrainerReader) -> dict[str, Any]:
    """What the older form of `fsdp`, words in a text or list, says: a strategy, and offload."""
    raw = reader.raw("fsdp")
    if raw is True:
        reader.mark("fsdp", "applied")
        return {}
    words = raw.split() if isinstance(raw, str) else raw if isinstance(raw, list) else [raw]
    meanings: dict[str, Any] = {}
    wrong = [str(word) for word in words if str(word) not in (*STRATEGIES, "offload", "auto_wrap")]
    for word in map(str, words):
        if word in STRATEGIES:
            meanings["row"] = STRATEGIES[word]
        elif word == "offload":
            meanings["offload"] = True
        elif word == "auto_wrap":
            meanings["wraps"] = True
    if _is_worded(reader):
        reader.mark("fsdp", "applied")
    else:
        reader.mark("fsdp", "renamed", "words are deprecated: say fsdp: true, and the rest in fsdp_config")
    if wrong:
        reader.refuse("fsdp", f"it names {found(wrong[0])}, which is no option of FSDP: say fsdp: true")
    elif meanings.get("row") not in (None, "zero3", "shard_grad_op") and fsdp_version(reader) == 2:
        why = (
            f"{found(raw)} needs version 1 of FSDP, and TrainingArguments raise with version 2, the default: say"
            " fsdp_config: {version: 1}, or fsdp: true with parallelism_config: {dp_replicate_size: ...}"
        )
        reader.refuse("fsdp", why)
    return meanings


def _row_of(reader: TrainerReader, version: int, words: dict[str, Any]) -> Setting[Any]:
    key = "fsdp_config.reshard_after_forward"
    legacy = words.get("row")
    fallback = Setting(legacy or "zero3", "file", "fsdp")
    if is_before(_ASKS_VERSION, reader.context):  # it tells the environment
        reader.refuse(key, "transformers 4 passes over it: say fsdp: shard_grad_op or another word")
        return fallback
    if version == 1:
        return _passed_over(reader, _strategy(reader, fallback) if key in reader else fallback)
    if key in reader:
        frees = reader.take_as(key, BOOLEAN)
        return fallback if frees.value is None else Setting("zero3" if frees.value else "shard_grad_op", "file", key)
    return fallback


def _strategy(reader: TrainerReader, fallback: Setting[Any]) -> Setting[Any]:
    """Version 1's name or number of a strategy."""
    key = "fsdp_config.reshard_after_forward"
    row = reader.take_as(key, choice({**STRATEGIES, **_BY_NUMBER}))
    if row.value is None:
        named = "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2"
        reader.refuse(key, f"it is {found(reader.raw(key))}; version 1 takes the name of a strategy: {named}")
        return fallback
    return row


def _passed_over(reader: TrainerReader, row: Setting[Any]) -> Setting[Any]:
    """Accelerate 1.15 takes version 1's strategy from FSDP_SHARDING_STRATEGY, and FULL_SHARD without it."""
    if row.value != "zero3":
        instead = {
            "shard_grad_op": "version: 2 with reshard_after_forward: false",
            "zero0": "no fsdp at all",
        }.get(row.value, "version: 2 with parallelism_config: {dp_replicate_size: ..., dp_shard_size: ...}")
        why = "version 1 asks the environment for its strategy (FSDP_SHARDING_STRATEGY), and FULL_SHARD is what it gets"
        reader.refuse(row.key, f"{why}: say {instead}")
    return Setting("zero3", row.origin, row.key)


def _fsdp_units(reader: TrainerReader, version: int) -> SettingsByPath:
    section = "fsdp_config"
    policy = reader.take(f"{section}.auto_wrap_policy")
    classes = reader.take(f"{section}.transformer_layer_cls_to_wrap")
    size = reader.take(f"{section}.min_num_params")
    if policy.value != "TRANSFORMER_BASED_WRAP" and classes.value:
        reader.refuse(classes.key, f"auto_wrap_policy is {policy.value}, which ignores it: say TRANSFORMER_BASED_WRAP")
    if policy.value != "SIZE_BASED_WRAP" and size.value:
        reader.refuse(size.key, f"auto_wrap_policy is {policy.value}, which ignores it: say SIZE_BASED_WRAP")
    if policy.value == "NO_WRAP":
        return {"units.policy": derived("none", policy, origin="file")}
    if policy.value == "SIZE_BASED_WRAP":
        floor = Setting(size.value or (MIN_NUMEL if version == 1 else 0), size.origin, size.key)
        return {"units.policy": derived("min_numel", policy, origin="file"), "units.min_numel": floor}
    if classes.value:
        return {"units.policy": derived("classes", policy, classes, origin="file"), "units.classes": classes}
    return {"units.policy": derived("auto", policy, origin=policy.origin)}


def _is_worded(reader: TrainerReader) -> bool:
    return is_before(_ASKS_SECTION, reader.context)


def _worded_units(reader: TrainerReader, words: dict[str, Any]) -> SettingsByPath:
    """Units as `auto_wrap` among the words has them: without it the whole model is one."""
    classes, size = (reader.take(f"fsdp_config.{key}") for key in ("transformer_layer_cls_to_wrap", "min_num_params"))
    reader.refuse("fsdp_config.auto_wrap_policy", "before transformers 5.10 it is passed over: say auto_wrap in fsdp")
    if not words.get("wraps"):
        for told in (classes, size):
            if told.value:
                reader.refuse(told.key, "before transformers 5.10 nothing looks at it without auto_wrap in fsdp")
        return {"units.policy": Setting("none", "file", "fsdp")}
    if size.value:
        return {"units.policy": derived("min_numel", size, origin="file"), "units.min_numel": size}
    if classes.value:
        return {"units.policy": derived("classes", classes, origin="file"), "units.classes": classes}
    return {"units.policy": Setting("auto", "file", "fsdp")}


def _offload(reader: TrainerReader, words: dict[str, Any]) -> SettingsByPath:
    if _is_worded(reader):
        reader.refuse("fsdp_config.cpu_offload", "before transformers 5.10 it is passed over: say offload in fsdp")
        return offload(Setting(True, "file", "fsdp") if words.get("offload") else Setting(False, "default"))
    moved = reader.take("fsdp_config.cpu_offload")
    if moved.origin == "default" and words.get("offload"):
        moved = Setting(True, "file", "fsdp")
    return offload(moved)


def _state(reader: TrainerReader) -> SettingsByPath:
    state = reader.take("fsdp_config.state_dict_type")
    written = "hf" if state.value == "full" else "none"
    return {"saving.state": state, "saving.export": derived(written, state, origin=state.origin)}


def _prefetch(reader: TrainerReader, version: int) -> SettingsByPath:
    if version == 2:
        for name in FSDP_VERSION_1:
            key = f"fsdp_config.{name}"
            if key in reader:
                reader.refuse(key, "it is read with version 1 only: fully_shard does so by itself. Remove it")
        return {"prefetch.forward": Setting(0, "default"), "prefetch.backward": Setting(1, "default")}
    key = "fsdp_config.backward_prefetch"
    backward = reader.take(key)
    if str(reader.raw(key)).lower() == "backward_post":
        reader.keep(key, "the next unit is gathered after the gradients of this one, not before", loss="harmless")
    ahead = reader.take("fsdp_config.forward_prefetch")
    for name in ("use_orig_params", "limit_all_gathers"):
        reader.keep(f"fsdp_config.{name}", "FSDP1 only: needless elsewhere", loss="harmless")
    return {"prefetch.backward": backward, "prefetch.forward": derived(int(ahead.value), ahead, origin=ahead.origin)}


def _loading(reader: TrainerReader, version: int) -> SettingsByPath:
    low = reader.take("fsdp_config.cpu_ram_efficient_loading")
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"):
        key = f"fsdp_config.{name}"
        if reader.raw(key):
            reader.keep(key, "torch_xla shards on TPUs: another library", loss="refused")
            reader.refuse(key, "torch_xla's sharding is another library: remove it")
        else:
            reader.keep(key, "off", loss="harmless")
    sent = reader.take("fsdp_config.sync_module_states") if version == 1 else Setting(low.value, "derived", low.key)
    return {"loading.low_memory": low, "loading.broadcast": sent}


# -- transformers' own sharding ------------------------------------------------------------------------------------


def _native(reader: TrainerReader) -> SettingsByPath:
    def size(name: str) -> Setting[Any]:
        degree = reader.take(f"distributed_config.{name}")
        return Setting(degree.value or 1, degree.origin, degree.key)

    for axis in ("dp_replicate", "dp_shard", "tp"):
        reader.refuse(f"parallelism_config.{axis}_size", "distributed_config says it, and the Trainer takes that one")
    replicas, shards = size("dp_replicate_size"), size("fsdp_size")
    row = "zero0" if shards.value == 1 else "hybrid_shard" if replicas.value > 1 else "zero3"
    moved = reader.take("distributed_config.fsdp_cpu_offload")
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
