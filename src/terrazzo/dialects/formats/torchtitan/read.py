"""Reading torchtitan's `Trainer.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByKey
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.keys import MISSING, number
from terrazzo.dialects.core.reader import Reader, derived, given_only
from terrazzo.dialects.formats.shared.fsdp import offload
from terrazzo.dialects.formats.shared.rows import row_settings
from terrazzo.dialects.formats.torchtitan.float8 import read_float8
from terrazzo.dialects.formats.torchtitan.keys import (
    DEGREES,
    KEYS,
    LOCAL_BATCH,
    OPAQUE,
    PIPELINE,
    PIPELINED_BATCH,
    REMOVED,
    SCHEDULES,
    STAGE_LAYERS,
)

__all__ = ["read"]


_ONLY_BUDGET = ("memory_budget", "visualize_memory_budget_pareto")
_BUDGET = "the compiler keeps what fits a share of the memory: nearest is selective"


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """What a config means."""
    reader = Reader(document, "torchtitan", OPAQUE, KEYS)
    reader.keep_nulls()
    given = {
        **_parallelism(reader, context),
        **_precision(reader),
        **read_float8(reader),
        **_batch(reader),
        **_optimizer(reader),
        **_schedule(reader),
        **_training(reader),
        **_saving(reader),
    }
    _explain_removed(reader)
    return reader.finish("torchtitan", given, unknown="raises a TypeError")


# -- plan ----------------------------------------------------------------------------------------------------------


def _parallelism(reader: Reader, context: ReadingContext) -> SettingsByKey:
    replicas, shards = reader.take("parallelism.data_parallel_replicate_degree"), _shards(reader)
    found = {
        **{path: reader.take(key) for path, key in DEGREES.items()},
        "units.policy": Setting("auto", "default"),
        "prefetch.forward": Setting(0, "default"),
        "prefetch.backward": Setting(1, "default"),
        "loading.low_memory": Setting(True, "default"),
    }
    found |= _row(reader, found, replicas, shards) | _pipeline(reader, found["mesh.pp"].value, context)
    found["parallel.sequence"] = reader.take("parallelism.enable_sequence_parallel")
    return {**found, **offload(reader.take("training.enable_cpu_offload"))}


def _pipeline(reader: Reader, ranks: int, context: ReadingContext) -> SettingsByKey:
    """Order of the stages, and how many each rank has: two where the order is one of several."""
    said, layers = reader.take(PIPELINE), reader.take(STAGE_LAYERS)
    order, chunks = SCHEDULES.get(said.value.lower(), (said.value, None))
    several = chunks != 1
    if layers.value is not None and several and context.layers is not None:
        chunks = max(1, -(-context.layers // (ranks * layers.value)))
    if said.origin == "file":
        reader.keep_as(said.key, said.value)
    if layers.origin == "file":
        reader.keep_as(layers.key, layers.value)
    if said.value.lower().startswith("zbv"):
        reader.say(said.key, "lossy", "the two stages of a rank lie as a V there")
    return {
        "parallel.schedule": derived(order, said, origin=said.origin),
        "parallel.chunks": derived(chunks, said, layers, origin=said.origin),
    }


def _shards(reader: Reader) -> Setting[Any]:
    key = "parallelism.data_parallel_shard_degree"
    if reader.get(key) == -1:
        reader.say(key, "applied")
        return Setting(None, "file", key)
    return reader.take(key)


def _row(
    reader: Reader, mesh: Mapping[str, Setting[Any]], replicas: Setting[Any], shards: Setting[Any]
) -> SettingsByKey:
    key = "parallelism.fsdp_reshard_after_forward"
    policy = reader.take(key)
    if reader.get(key) == "default":
        reader.keep(key, "freed after forward, unless the model is pipelined", loss="harmless")
    always = mesh["mesh.pp"].value == 1 if policy.value is None else policy.value
    if shards.value == 1 and mesh["mesh.cp"].value == 1:
        if policy.origin == "file":
            reader.keep(key, "over a single rank nothing is split", loss="harmless")
        whole = {"mesh.dp_replicate": Setting(1, "default"), "mesh.dp_shard": derived(replicas.value, replicas, shards)}
        return {**row_settings("zero0", shards, replicas), **whole}
    flat, hybrid = ("zero3", "hybrid_shard") if always else ("shard_grad_op", "hybrid_shard_zero2")
    row = row_settings(flat, policy) if replicas.value == 1 else row_settings(hybrid, policy, replicas)
    return {**row, "mesh.dp_replicate": replicas, "mesh.dp_shard": shards}


# -- precision, batch ----------------------------------------------------------------------------------------------


def _precision(reader: Reader) -> SettingsByKey:
    kept = reader.take("training.dtype")
    compute, way = reader.take("training.mixed_precision_param"), reader.take("optimizer.implementation")
    narrow = way.value == "fused_opt_states_bf16"
    if way.origin == "file":
        reader.keep(way.key, "how the step is computed", loss="harmless")
    same = derived(kept.value, kept, origin=kept.origin)
    given = {f"precision.{state}": same for state in ("weight", "master", "accumulate")}
    return {
        **given,
        "precision.compute": compute,
        "precision.reduce": reader.take("training.mixed_precision_reduce"),
        "precision.moments": derived("bf16" if narrow else kept.value, kept, way, origin=way.origin),
        "precision.saved": reader.take("checkpoint.export_dtype"),
        "precision.autocast": Setting(False, "default"),
    }


def _batch(reader: Reader) -> SettingsByKey:
    key = "training.global_batch_size"
    local, length = reader.take(LOCAL_BATCH), reader.take("training.seq_len")
    if reader.get("parallelism.pipeline_parallel_degree", 1) != 1:
        return {"batch.sequence_length": length, **_pipelined_batch(reader, local, key)}
    found = {"batch.micro_batch": local, "batch.sequence_length": length}
    if reader.get(key, -1) == -1:
        reader.say(key, "applied", "one micro-batch per rank and step")
        origin: Any = "file" if key in reader.flat else "default"
        return {**found, "batch.accumulation": Setting(1, origin, key if key in reader.flat else "")}
    return {**found, "batch.global_batch": reader.take(key)}


def _pipelined_batch(reader: Reader, local: Setting[Any], key: str) -> SettingsByKey:
    """Stages run the local batch in parts; `key` is that of the global one."""
    part = reader.take(PIPELINED_BATCH)
    reader.keep(LOCAL_BATCH, "as many sequences as go through the stages before gradients are summed", loss="harmless")
    if reader.get(key, -1) != -1:
        return {"batch.micro_batch": part, "batch.global_batch": reader.take(key)}
    reader.keep(key, "the local batch of each data rank", loss="harmless")
    return {"batch.micro_batch": part, "batch.accumulation": derived(local.value // part.value, local, part)}


# -- optimizer, schedule, loop -------------------------------------------------------------------------------------


def _optimizer(reader: Reader) -> SettingsByKey:
    key = "optimizer.param_groups"
    groups = reader.get(key)
    if groups == KEYS[key].default:
        reader.keep(key, "it says nothing: the default holds", loss="harmless")
    if not groups:
        return {}
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        reader.refuse(key, "expected a list of {pattern, optimizer_name, optimizer_kwargs}")
        return {}
    others = "" if len(groups) == 1 else f"the last of {len(groups)} groups is read; the others are for some parameters"
    reader.keep(key, others, loss="lossy" if others else "harmless")
    name, options = groups[-1].get("optimizer_name"), groups[-1].get("optimizer_kwargs")
    options = dict(options) if isinstance(options, Mapping) else {}
    found: dict[str, Any] = {"name": name if isinstance(name, str) else None}
    parse = number().parse  # as the rows of other keys do: `1e-3` may be text
    for each in ("lr", "eps", "weight_decay"):
        if (value := parse(options.get(each))) is not MISSING:
            found[each] = value
            del options[each]
    betas = options.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and MISSING not in (pair := tuple(map(parse, betas))):
        found["betas"] = pair
        del options["betas"]
    muon = next((group for group in groups if group.get("optimizer_name") == "DistMuon"), None)
    if muon is not None and groups[-1] is not muon:
        found["name"] = "Muon"
        options |= _of_matrices(muon.get("optimizer_kwargs"))
    return {f"optimizer.{each}": Setting(value, "file", key) for each, value in {**found, "options": options}.items()}


def _of_matrices(given: Any) -> dict[str, Any]:
    """What DistMuon is given, in neutral words: as torch.optim.Muon, but for the way of scaling that is left out."""
    found = {"muon.adjust_lr": "original"}
    for key, value in given.items() if isinstance(given, Mapping) else ():
        found["muon.adjust_lr" if key == "adjust_lr_fn" else f"muon.{key}"] = value
    return found


def _schedule(reader: Reader) -> SettingsByKey:
    total = reader.take("training.steps")
    kind, ratio = reader.take("lr_scheduler.decay_type"), reader.take("lr_scheduler.decay_ratio")
    found = {
        "schedule.total_steps": total,
        "schedule.warmup_steps": reader.take("lr_scheduler.warmup_steps"),
        "schedule.final_fraction": reader.take("lr_scheduler.min_lr_factor"),
        "schedule.name": derived(kind.value, kind, origin=kind.origin),
    }
    if ratio.value is None:
        return found
    reader.keep(ratio.key, "as a share of the run", loss="harmless")
    if kind.origin == "file":
        reader.keep(kind.key, "the shape of the final decay", loss="harmless")
    if ratio.value == 0:
        return {**found, "schedule.name": derived("constant", ratio, origin="file")}
    found["schedule.decay_steps"] = derived(round(total.value * ratio.value), ratio, total)
    found["schedule.name"] = derived("wsd", ratio, origin="file")
    if kind.value != "linear":
        found["schedule.options"] = derived({"decay_type": kind.value}, kind, origin="file")
    return found


def _training(reader: Reader) -> SettingsByKey:
    return {
        "training.clip": reader.take("training.max_norm"),
        "training.compile": reader.take("compile.enable"),
        **given_only({"training.seed": reader.take("debug.seed")}),
        **_checkpointing(reader),
    }


def _checkpointing(reader: Reader) -> SettingsByKey:
    section, path = "activation_checkpoint", "activation_checkpointing.mode"
    below = [key.partition(".")[2] for key in reader.flat if key.startswith(f"{section}.")]
    if section in reader.flat and reader.get(section) is None:
        return {path: Setting("none", "file", section)}
    key = f"{section}.type" if "type" in below else section
    if key in reader.flat:
        mode = reader.take(key)
        if str(reader.get(key)).lower() == "memorybudgetac":
            reader.keep(key, _BUDGET)
        return {path: mode}
    if not below:
        return {path: Setting("selective_half", "default")}
    nearest = "full"
    if any(name in below for name in _ONLY_BUDGET):
        nearest = "selective"
        for name in _ONLY_BUDGET:
            reader.keep(f"{section}.{name}", _BUDGET)
    elif "force_recompute_mm_shapes_by_fqns" in below:
        nearest = "selective_half"
    return {path: Setting(nearest, "derived", ", ".join(f"{section}.{name}" for name in below))}


def _saving(reader: Reader) -> SettingsByKey:
    enabled = reader.take("checkpoint.enable")
    found = {
        "saving.state": Setting("sharded", "default"),
        "saving.export": reader.take("checkpoint.last_save_in_hf"),
        **given_only({"saving.folder": reader.take("checkpoint.folder")}),
        "saving.background": reader.take("checkpoint.async_mode"),
    }
    if reader.get("checkpoint.async_mode") == "async_with_pinned_mem":
        reader.keep("checkpoint.async_mode", "the copy is in pinned memory", loss="harmless")
    keep = reader.take("checkpoint.keep_latest_k")
    found["saving.keep_last"] = Setting(keep.value or None, keep.origin, keep.key)
    every = reader.take("checkpoint.interval")
    if enabled.value:
        return {**found, "saving.every": derived(every.value, enabled, every, origin="file")}
    reader.keep("checkpoint.interval", "checkpoint.enable is off: nothing is written", loss="harmless")
    return {**found, "saving.every": Setting(None, enabled.origin, enabled.key)}


def _explain_removed(reader: Reader) -> None:
    for key in reader.unread():
        for name, why in REMOVED.items():
            if key == name or key.startswith(f"{name}."):
                reader.refuse(key, f"torchtitan 0.3 has no such key: {why}")
