"""Reading torchtitan's `Trainer.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.key_verdict import Loss
from terrazzo.dialects.core.keys import MISSING, number
from terrazzo.dialects.core.reader import Reader, derived, only_from_file
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.shared.class_defaults import class_defaults
from terrazzo.dialects.formats.shared.fsdp_arguments import offload
from terrazzo.dialects.formats.shared.plan_rows import row_settings
from terrazzo.dialects.formats.torchtitan.keys import (
    DEGREES,
    KEYS,
    LOCAL_BATCH,
    PIPELINE,
    PIPELINED_BATCH,
    SCHEDULES,
    STAGE_LAYERS,
)
from terrazzo.dialects.formats.torchtitan.keys_earlier import RENAMED
from terrazzo.dialects.formats.torchtitan.read_earlier import (
    BUDGET,
    read_float8,
    read_optimizer,
    read_recomputed,
    read_whole_weights,
)
from terrazzo.dialects.formats.torchtitan.stored_dtypes import stored_dtypes
from terrazzo.dialects.formats.torchtitan.torchtitan_reader import ROWS, TorchtitanReader

__all__ = ["read"]


_GROUP = ("pattern", "optimizer_name", "optimizer_kwargs")
_OF_CHECKPOINTS = ("folder", "interval", "async_mode", "keep_latest_k", "last_save_model_only", "last_save_in_hf")
_ONLY_BUDGET = ("memory_budget", "visualize_memory_budget_pareto")


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """What a config means."""
    reader = TorchtitanReader(document, context)
    reader.keep_nulls()
    parallel = _parallelism(reader, context)
    settings = {
        **parallel,
        **_precision(reader),
        **read_float8(reader),
        **_batch(reader, parallel["mesh.pp"].value),
        **(read_optimizer(reader) if reader.earlier and "optimizer.param_groups" not in reader else _optimizer(reader)),
        **_schedule(reader),
        **_training(reader),
        **_saving(reader),
    }
    settings |= read_whole_weights(reader, settings)
    reader.keep_gone()
    return reader.finish("torchtitan", settings, [*ROWS, *RENAMED], unknown="raises a TypeError")


# -- plan ----------------------------------------------------------------------------------------------------------


def _parallelism(reader: Reader, context: ReadingContext) -> SettingsByPath:
    replicas, shards = reader.take("parallelism.data_parallel_replicate_degree"), _shards(reader)
    settings = {
        **{path: reader.take(key) for path, key in DEGREES.items()},
        "units.policy": Setting("auto", "default"),
        "prefetch.forward": Setting(0, "default"),
        "prefetch.backward": Setting(1, "default"),
        "loading.low_memory": Setting(True, "default"),
    }
    settings |= _row(reader, settings, replicas, shards) | _pipeline(reader, settings["mesh.pp"].value, context)
    settings["parallel.sequence"] = reader.take("parallelism.enable_sequence_parallel")
    return {**settings, **offload(reader.take("training.enable_cpu_offload"))}


def _pipeline(reader: Reader, ranks: int, context: ReadingContext) -> SettingsByPath:
    """Order of the stages, and how many each rank has: two where the order is one of several."""
    schedule, layers = reader.take(PIPELINE), reader.take(STAGE_LAYERS)
    order, chunks = SCHEDULES.get(schedule.value.lower(), (schedule.value, None))
    several = chunks != 1
    if layers.value is not None and several and context.layers is not None:
        chunks = max(1, -(-context.layers // (ranks * layers.value)))
    if schedule.value.lower().startswith("zbv"):
        reader.mark(schedule.key, "lossy", "the two stages of a rank lie as a V there")
    return {
        "parallel.schedule": derived(order, schedule, origin=schedule.origin),
        "parallel.chunks": derived(chunks, schedule, layers, origin=schedule.origin),
    }


def _shards(reader: Reader) -> Setting[Any]:
    key = "parallelism.data_parallel_shard_degree"
    if reader.raw(key) == -1:
        reader.mark(key, "applied")
        return Setting(None, "file", key)
    return reader.take(key)


def _row(
    reader: Reader, mesh: Mapping[str, Setting[Any]], replicas: Setting[Any], shards: Setting[Any]
) -> SettingsByPath:
    key = "parallelism.fsdp_reshard_after_forward"
    policy = reader.take(key)
    if reader.raw(key) == "default":
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


def _precision(reader: Reader) -> SettingsByPath:
    stored = reader.take("training.dtype")
    compute, way = reader.take("training.mixed_precision_param"), reader.take("optimizer.implementation")
    if way.origin == "file":
        reader.keep(way.key, "how the step is computed", loss="harmless")
    return {
        **stored_dtypes(stored, way),
        "precision.compute": compute,
        "precision.reduce": reader.take("training.mixed_precision_reduce"),
        "precision.saved": reader.take("checkpoint.export_dtype"),
        "precision.autocast": Setting(False, "default"),
    }


def _batch(reader: Reader, stages: int) -> SettingsByPath:
    key = "training.global_batch_size"
    local, length = reader.take(LOCAL_BATCH), reader.take("training.seq_len")
    if stages != 1:
        return {"batch.sequence_length": length, **_pipelined_batch(reader, local, key)}
    settings = {"batch.micro_batch": local, "batch.sequence_length": length}
    if reader.raw(key, -1) == -1:
        reader.mark(key, "applied", "one micro-batch per rank and step")
        origin: Any = "file" if key in reader.flat else "default"
        return {**settings, "batch.accumulation": Setting(1, origin, key if key in reader.flat else "")}
    return {**settings, "batch.global_batch": reader.take(key)}


def _pipelined_batch(reader: Reader, local: Setting[Any], key: str) -> SettingsByPath:
    """Stages run the local batch in parts; `key` is that of the global one."""
    part = reader.take(PIPELINED_BATCH)
    reader.keep(LOCAL_BATCH, "as many sequences as go through the stages before gradients are summed", loss="harmless")
    if reader.raw(key, -1) != -1:
        return {"batch.micro_batch": part, "batch.global_batch": reader.take(key)}
    reader.keep(key, "the local batch of each data rank", loss="harmless")
    count = reader.quotient(local, part, exact=True)
    return {"batch.micro_batch": part, **({} if count.value is None else {"batch.accumulation": count})}


# -- optimizer, schedule, loop -------------------------------------------------------------------------------------


def _optimizer(reader: Reader) -> SettingsByPath:
    key = "optimizer.param_groups"
    groups = reader.raw(key)
    if groups == KEYS[key].default:
        reader.keep(key, "it says nothing: the default holds", loss="harmless")
    if not groups:
        return {}
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        reader.refuse(key, "expected a list of {pattern, optimizer_name, optimizer_kwargs}")
        return {}
    others = "" if len(groups) == 1 else f"the last of {len(groups)} groups is read; the others are for some parameters"
    if not others and groups[0].get("pattern", ".*") != ".*":
        others = f"the group is for the parameters of {found(groups[0]['pattern'])} alone, and is read as for all"
    if unknown := [str(name) for group in groups for name in group if name not in _GROUP]:
        others = "; ".join(part for part in (others, f"{found(unknown[0])} is no part of a group") if part)
    reader.keep(key, others, loss=_loss_of(groups) if others else "harmless")
    name, options = groups[-1].get("optimizer_name"), groups[-1].get("optimizer_kwargs")
    options = dict(options) if isinstance(options, Mapping) else {}
    name = name if isinstance(name, str) else None
    values: dict[str, Any] = {"name": name}
    parse = number().parse  # as the rows of other keys do: `1e-3` may be text
    for each in ("lr", "eps", "weight_decay"):
        if (value := parse(options.get(each))) is not MISSING:
            values[each] = value
            del options[each]
    betas = options.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and MISSING not in (pair := tuple(map(parse, betas))):
        values["betas"] = pair
        del options["betas"]
    muon = next((group for group in groups if group.get("optimizer_name") == "DistMuon"), None)
    if muon is not None and groups[-1] is not muon:
        values["name"] = "Muon"
        options |= _of_matrices(reader, muon.get("optimizer_kwargs"))
    settings = class_defaults(name) | {
        f"optimizer.{each}": Setting(value, "file", key) for each, value in values.items()
    }
    settings |= {"optimizer.options": Setting(options, "file", key), "optimizer.decay": Setting("all", "derived", key)}
    return settings


def _loss_of(groups: list[Mapping[str, Any]]) -> Loss:
    """What is lost of groups that are not one for all: other numbers, but where they are Muon's two."""
    pair = len(groups) == 2 and groups[0].get("optimizer_name") == "DistMuon"
    same_name = groups[-1].get("optimizer_name") == "DistMuon"
    whole = len(groups) == 1 and groups[0].get("pattern", ".*") == ".*"
    return "lossy" if whole or (pair and not same_name) else "refused"


def _of_matrices(reader: Reader, arguments: Any) -> dict[str, Any]:
    """What DistMuon is given, in neutral words: as torch.optim.Muon, but for the way of scaling that is left out."""
    given = dict(arguments) if isinstance(arguments, Mapping) else {}
    scale = given.pop("adjust_lr_fn", None) or "original"
    if scale not in ("original", "match_rms_adamw"):
        text = f"adjust_lr_fn is {found(scale)}, expected original or match_rms_adamw"
        reader.refuse("optimizer.param_groups", text)
        scale = "original"
    return {"muon.adjust_lr": scale, **{f"muon.{key}": value for key, value in given.items()}}


def _schedule(reader: Reader) -> SettingsByPath:
    """The schedule, cut as torchtitan cuts it: warm-up to the run, and the decay to what the warm-up leaves."""
    total, kind = reader.take("training.steps"), reader.take("lr_scheduler.decay_type")
    warmup, ratio = reader.take("lr_scheduler.warmup_steps"), reader.take("lr_scheduler.decay_ratio")
    if warmup.value > total.value:
        warmup = derived(total.value, warmup, total, origin=warmup.origin)
    settings = {
        "schedule.total_steps": total,
        "schedule.warmup_steps": warmup,
        "schedule.final_fraction": reader.take("lr_scheduler.min_lr_factor"),
        "schedule.warmup_start": Setting(0.0, "default"),
        "schedule.warmup_lag": Setting(0, "default"),
        "schedule.decay_lag": derived(1, kind, ratio),
    }
    if ratio.value is None and kind.value in ("linear", "cosine"):
        return {**settings, "schedule.name": kind}
    left = total.value - warmup.value
    steps = left if ratio.value is None else min(left, round(total.value * ratio.value))
    if ratio.value is not None:
        reader.keep(ratio.key, "as a share of the run", loss="harmless")
    if not steps:
        if kind.origin == "file":
            reader.keep(kind.key, "the shape of the final decay", loss="harmless")
        if ratio.value and left:
            reader.mark(ratio.key, "applied", f"it is no whole one of {total.value} steps: the rate is constant")
        return {**settings, "schedule.name": derived("constant", ratio, kind, origin="file")}
    name, decay = derived("wsd", ratio, kind, origin="file"), derived(steps, ratio, total)
    return {**settings, "schedule.name": name, "schedule.decay_steps": decay, "schedule.decay_shape": kind}


def _training(reader: TorchtitanReader) -> SettingsByPath:
    return {
        **({} if reader.mean is None else {"training.loss_mean": Setting(reader.mean, "default")}),
        "training.nonfinite": Setting("go_on" if reader.earlier else "stop", "default"),
        "training.clip": reader.take("training.max_norm"),
        "training.compile": reader.take("compile.enable"),
        **only_from_file({"training.seed": reader.take("debug.seed")}),
        **(read_recomputed(reader) or _checkpointing(reader)),
    }


def _checkpointing(reader: Reader) -> SettingsByPath:
    section, path = "activation_checkpoint", "activation_checkpointing.mode"
    below = [key.partition(".")[2] for key in reader.flat if key.startswith(f"{section}.")]
    if section in reader.flat and reader.raw(section) is None:
        return {path: Setting("none", "file", section)}
    key = f"{section}.type" if "type" in below else section
    if key in reader.flat:
        mode = reader.take(key)
        if str(reader.raw(key)).lower() == "memorybudgetac":
            reader.keep(key, BUDGET)
        return {path: mode}
    if not below:
        return {path: Setting("selective_half", "default")}
    nearest = "full"
    if any(name in below for name in _ONLY_BUDGET):
        nearest = "selective"
        for name in _ONLY_BUDGET:
            reader.keep(f"{section}.{name}", BUDGET)
    elif "force_recompute_mm_shapes_by_fqns" in below:
        nearest = "selective_half"
    return {path: Setting(nearest, "derived", ", ".join(f"{section}.{name}" for name in below))}


def _saving(reader: Reader) -> SettingsByPath:
    """What is written at each `interval`, and at the end; nothing where a switch says so, whatever the section does."""
    enabled, only_loads = reader.take("checkpoint.enable"), reader.take("checkpoint.load_only")
    settings: SettingsByPath = {"saving.state": Setting("sharded", "default")}
    if only_loads.value or not enabled.value:
        off = "load_only is on" if only_loads.value else "enable is off"
        for key in _OF_CHECKPOINTS:
            reader.take(f"checkpoint.{key}")
            reader.keep(f"checkpoint.{key}", f"checkpoint.{off}: nothing is written", loss="harmless")
        switches = (enabled, only_loads) if enabled.value else (enabled,)
        if not enabled.value:
            reader.keep("checkpoint.load_only", "checkpoint.enable is off: nothing is read or written", loss="harmless")
        return {**settings, "saving.when": derived("never", *switches, origin=enabled.origin)}
    if reader.raw("checkpoint.async_mode") == "async_with_pinned_mem":
        reader.keep("checkpoint.async_mode", "the copy is in pinned memory", loss="harmless")
    keep, every = reader.take("checkpoint.keep_latest_k"), reader.take("checkpoint.interval")
    weights = reader.take("checkpoint.last_save_model_only")
    if weights.value:
        reader.keep(weights.key, "elsewhere the last one has all that a run goes on from", loss="harmless")
    return {
        **settings,
        "saving.when": derived("steps", enabled, *(() if weights.value else (weights,)), origin=enabled.origin),
        "saving.every": derived(every.value, enabled, every, origin="file"),
        "saving.keep_last": Setting(keep.value or None, keep.origin, keep.key),
        "saving.export": reader.take("checkpoint.last_save_in_hf"),
        "saving.background": reader.take("checkpoint.async_mode"),
        **only_from_file({"saving.folder": reader.take("checkpoint.folder")}),
    }
