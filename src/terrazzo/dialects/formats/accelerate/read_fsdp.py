"""Reading `fsdp_config` and `parallelism_config` as `accelerate launch` passes them on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.accelerate.accelerate_reader import AccelerateReader
from terrazzo.dialects.formats.shared.fsdp_arguments import offload
from terrazzo.dialects.formats.shared.plan_rows import HYBRID, ONE_GROUP, in_one_group, row_settings

__all__ = ["VERSION", "read_fsdp"]

_F = "fsdp_config.fsdp_"
VERSION = f"{_F}version"
"""Key of FSDP's version: 1 unless the file says 2."""


def read_fsdp(reader: AccelerateReader, mesh: SettingsByPath) -> SettingsByPath:
    """Row, units, offload, prefetch, loading, checkpointing and kind of checkpoint."""
    version = reader.take(VERSION)
    row, chosen = _row(reader, version.value)
    replicas = mesh["mesh.dp_replicate"]
    settings: SettingsByPath = {}
    if version.value == 2 and (replicas.value or 1) > 1:
        row, chosen = HYBRID[row], (*chosen, replicas)
    elif row.startswith("hybrid"):
        nodes = _nodes(reader, mesh.get("mesh.world"))
        settings |= {path: setting for path, setting in nodes.items() if mesh[path].origin != "file"}
    settings |= row_settings(row, *chosen, version) if version.origin == "file" else row_settings(row, *chosen)
    if whole := in_one_group(mesh | settings):
        settings |= whole
        reader.mark(chosen[0].key, "renamed", ONE_GROUP)
    settings |= _units(reader) | offload(reader.take(f"{_F}offload_params")) | _prefetch(reader, version.value)
    return settings | _activations(reader) | _saving(reader, version.value) | _loading(reader, version.value)


def _nodes(reader: AccelerateReader, world: Setting[Any] | None) -> SettingsByPath:
    """Version 1 replicates over nodes, and splits over the ranks of each."""
    nodes = reader.take("num_machines")
    if nodes.origin == "default":
        return {"mesh.dp_replicate": Setting(None, "default")}
    ranks = world.value if world is not None else reader.context.world
    shards = None if ranks is None or ranks % nodes.value else ranks // nodes.value
    return {"mesh.dp_replicate": nodes, "mesh.dp_shard": Setting(shards, "derived" if shards else "default")}


def _row(reader: AccelerateReader, version: int) -> tuple[str, tuple[Setting[Any], ...]]:
    """Each version has a key of its own, and passes over the other's."""
    strategy, reshard = f"{_F}sharding_strategy", f"{_F}reshard_after_forward"
    mine, other = (strategy, reshard) if version == 1 else (reshard, strategy)
    if reader.raw(other) is not None:
        reader.refuse(other, _passed_over(version, reader.raw(other)))
    if version == 1:
        row = reader.take(mine)
        return row.value, (row,)
    frees = reader.take(mine)
    return ("zero3" if frees.value else "shard_grad_op"), (frees,)


def _passed_over(version: int, value: Any) -> str:
    if version == 1:
        hint = f"version 1 shards by fsdp_sharding_strategy alone: write fsdp_sharding_strategy: {value}"
        return f"{hint}. accelerate config writes this key too, and it has no effect"
    word = str(value).upper()
    instead = {"SHARD_GRAD_OP": "fsdp_reshard_after_forward: false", "2": "fsdp_reshard_after_forward: false"}
    hybrid = "parallelism_config with dp_replicate_size and dp_shard_size"
    if word.startswith("HYBRID") or word in ("4", "5"):
        return f"version 2 passes over it, and nothing is replicated: write {hybrid}"
    if word in ("NO_SHARD", "3"):
        return "version 2 passes over it, and all is split: write distributed_type: MULTI_GPU"
    return f"version 2 passes over it: write {instead.get(word, 'fsdp_reshard_after_forward: true')}"


def _units(reader: AccelerateReader) -> SettingsByPath:
    policy = reader.take(f"{_F}auto_wrap_policy")
    classes = reader.take(f"{_F}transformer_layer_cls_to_wrap")
    size = reader.take(f"{_F}min_num_params")
    for setting, wanted in ((classes, "classes"), (size, "min_numel")):
        if policy.value != wanted and setting.origin == "file" and setting.value:
            reader.keep(setting.key, "fsdp_auto_wrap_policy does not look at it", loss="harmless")
    if policy.value == "min_numel":
        return {"units.policy": policy, "units.min_numel": size}
    if policy.value != "classes" or not classes.value:
        return {"units.policy": Setting("auto" if policy.value == "classes" else "none", policy.origin, policy.key)}
    names = tuple(classes.value.split(","))
    if any(name != name.strip() for name in names):
        reader.refuse(classes.key, "a blank becomes part of a name, which no module then has: write commas alone")
    return {"units.policy": policy, "units.classes": Setting(tuple(n.strip() for n in names), "file", classes.key)}


def _prefetch(reader: AccelerateReader, version: int) -> SettingsByPath:
    """FSDP1 gathers ahead only if told; FSDP2 always does in backward."""
    backward, forward = f"{_F}backward_prefetch", f"{_F}forward_prefetch"
    if version == 2:
        for key, same in ((backward, "BACKWARD_PRE"), (forward, False)):
            if reader.raw(key) not in (None, same):
                reader.refuse(key, "version 2 passes over it: backward gathers ahead, forward does not")
        return {"prefetch.backward": Setting(1, "default"), "prefetch.forward": Setting(0, "default")}
    ahead = reader.take(backward)
    in_forward = reader.take(forward)
    return {
        "prefetch.backward": ahead,
        "prefetch.forward": derived(int(in_forward.value), in_forward, origin=in_forward.origin),
    }


def _activations(reader: AccelerateReader) -> SettingsByPath:
    on = reader.take(f"{_F}activation_checkpointing")
    away = reader.take(f"{_F}activation_checkpointing_offload")
    mode = "full" if on.value else "none"
    return {
        "activation_checkpointing.mode": Setting(mode, on.origin, on.key),
        "activation_checkpointing.offload": away,
    }


def _saving(reader: AccelerateReader, version: int) -> SettingsByPath:
    state = reader.take(f"{_F}state_dict_type")
    if state.value is None:
        state = replace(state, value="full" if version == 1 else "sharded")
    export = Setting("full" if state.value == "full" else "none", state.origin, state.key)
    return {"saving.state": state, "saving.export": export}


def _loading(reader: AccelerateReader, version: int) -> SettingsByPath:
    low = reader.take(f"{_F}cpu_ram_efficient_loading")
    sent = reader.take(f"{_F}sync_module_states")
    if version == 2:
        if sent.origin == "file":
            reader.keep(sent.key, "version 2 needs no such key", loss="harmless")
        sent = Setting(low.value, "derived")
    reader.take(f"{_F}use_orig_params")
    key = reader.spelled(f"{_F}use_orig_params")
    if key in reader.verdicts and reader.verdicts[key].kind == "applied":
        reader.keep(key, "parameters keep their names everywhere else", loss="harmless")
    ignored = reader.take(f"{_F}ignored_modules")
    units = {"units.ignored": ignored} if ignored.value is not None else {}
    return {"loading.low_memory": low, "loading.broadcast": sent, **units}
