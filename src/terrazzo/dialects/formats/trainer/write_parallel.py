"""Writing what the Trainer shards: `fsdp_config`, `parallelism_config`, and the switches for 16 bits."""

from __future__ import annotations

from terrazzo.dialects.core.description import (
    DATA_AXIS_PATHS,
    PATHS,
    SHARDING_PATHS,
    TIER_PATHS,
    Setting,
)
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.shared.accelerate_dtypes import write_stack_precision
from terrazzo.dialects.formats.shared.accelerate_stack import write_replica_axes
from terrazzo.dialects.formats.shared.fsdp_arguments import MIN_NUMEL, bare_classes, write_offload
from terrazzo.dialects.formats.shared.plan_rows import HYBRID_ROWS, choose_row, one_axis, shard_ranks
from terrazzo.dialects.formats.shared.saving_words import write_folder

__all__ = ["write_ddp", "write_fsdp", "write_precision"]

_ROWS = ("zero3", "shard_grad_op", *HYBRID_ROWS)
_SECTION = "fsdp_config"
_OTHERS = ("tp", "cp")


def write_ddp(draft: Draft, context: ReadingContext) -> None:
    """Nothing is split: the Trainer does so without a word."""
    draft.implied(SHARDING_PATHS, "DDP, which needs no key")
    draft.holds([path for path in PATHS if path.startswith(("units.", "prefetch."))], "nothing is gathered")
    if any(draft.value(path, "device") != "device" for path in TIER_PATHS):
        draft.refuse(TIER_PATHS, "DDP moves nothing to the CPU: shard with zero3")
    else:
        draft.implied([path for path in PATHS if path.startswith("offload.")])
    write_replica_axes(draft, "parallelism_config.tp_size", context.world)
    _no_axes(draft)
    _checkpointing(draft, "activation_checkpointing")
    if draft.value("loading.low_memory"):
        draft.lossy("loading.low_memory", "under DDP every rank loads the whole model")
    draft.holds("loading.broadcast", "every rank loads the same weights")
    write_folder(draft)
    whole = "" if draft.value("saving.state", "full") == "full" else "every rank has the whole state, and saves so"
    draft.holds("saving.state", whole)


def write_fsdp(draft: Draft, context: ReadingContext) -> None:
    """Write `fsdp` and its section. Version 1 is deprecated, and always shards over all ranks."""
    row, why = choose_row(draft, _ROWS, "zero3, shard_grad_op, hybrid_shard or zero0")
    draft.write("fsdp", True)
    if row is not None:
        keeps = row in ("shard_grad_op", "hybrid_shard_zero2")
        draft.put(SHARDING_PATHS, f"{_SECTION}.reshard_after_forward", not keeps, why, "lossy" if why else "applied")
    _axes(draft, _replicas_and_shards(draft, context) if row in HYBRID_ROWS else _beside_others(draft, context))
    _units(draft)
    write_offload(draft, f"{_SECTION}.cpu_offload")
    draft.implied("offload.pin")
    _prefetch(draft)
    _checkpointing(draft, f"{_SECTION}.activation_checkpointing")
    _loading(draft)
    _state(draft)


def _replicas_and_shards(draft: Draft, context: ReadingContext) -> dict[str, int]:
    replicas, shards = draft.value("mesh.dp_replicate"), shard_ranks(draft, context.world)
    if replicas is not None and shards is not None:
        return {"dp_replicate": replicas, "dp_shard": shards}
    why = "the sizes of both axes must be known, or nothing is replicated: write them in the file, or say --world"
    draft.refuse((*SHARDING_PATHS, *DATA_AXIS_PATHS), why)
    return {}


def _beside_others(draft: Draft, context: ReadingContext) -> dict[str, int]:
    """The data axis beside others, which has to be said: Accelerate takes a size that is not given as 1."""
    if all(draft.value(f"mesh.{axis}", 1) == 1 for axis in _OTHERS):
        return {}
    if (size := one_axis(draft, context.world)) is None:
        draft.refuse("mesh.dp_shard", "beside tp or cp its size must be known: write it in the file, or say --world")
        return {}
    return {"dp_shard": size}


def _axes(draft: Draft, data: dict[str, int]) -> None:
    for axis in _OTHERS:
        draft.option(f"mesh.{axis}", f"parallelism_config.{axis}_size")
    for axis, size in data.items():
        draft.put(f"mesh.{axis}", f"parallelism_config.{axis}_size", size)
    if "dp_replicate" not in data:
        flat = draft.value("mesh.dp_replicate", 1) == 1 and data
        draft.holds(DATA_AXIS_PATHS, "" if flat else "all data ranks are one axis")
    if draft.value("mesh.sp", 1) != 1:
        draft.refuse("mesh.sp", "Accelerate splits sequences by Ulysses under DeepSpeed alone: take mesh.cp")
    _no_axes(draft)


def _no_axes(draft: Draft) -> None:
    if draft.value("mesh.pp", 1) != 1:
        draft.refuse("mesh.pp", "the Trainer has no pipeline: set it to 1")
    if draft.value("mesh.ep", 1) != 1:
        draft.refuse("mesh.ep", "experts are split by from_pretrained(distributed_config=...): say ep_size there")


def _units(draft: Draft) -> None:
    policy = draft.value("units.policy", "auto")
    if policy == "classes":
        paths = ("units.policy", "units.classes")
        names, why = bare_classes(draft)
        draft.write(key := f"{_SECTION}.transformer_layer_cls_to_wrap", names)
        draft.holds(paths, why, key)
    elif policy == "min_numel":
        draft.put("units.policy", f"{_SECTION}.auto_wrap_policy", "SIZE_BASED_WRAP")
        draft.put("units.min_numel", f"{_SECTION}.min_num_params", draft.value("units.min_numel", MIN_NUMEL))
    elif policy == "none":
        draft.put("units.policy", f"{_SECTION}.auto_wrap_policy", "NO_WRAP")
    else:
        draft.implied("units.policy", "the model names its blocks")
    if draft.value("units.ignored"):
        draft.lossy("units.ignored", "TrainingArguments shard every parameter")


def _prefetch(draft: Draft) -> None:
    for way, does in (("forward", 0), ("backward", 1)):
        if draft.value(f"prefetch.{way}", does) == does:
            draft.implied(f"prefetch.{way}")
        else:
            draft.lossy(f"prefetch.{way}", f"FSDP2 gathers {does} units ahead in {way}, and has no key for it here")


def _checkpointing(draft: Draft, key: str) -> None:
    path, mode = "activation_checkpointing.mode", draft.value("activation_checkpointing.mode", "none")
    paths = (path, "activation_checkpointing.every", "activation_checkpointing.ops")
    if mode == "none":
        draft.implied(paths)
    elif mode == "full":
        draft.put(path, key, True)
    else:
        draft.put(paths, key, True, f"the Trainer recomputes whole blocks; asked was {mode}", "lossy")
    if draft.value("activation_checkpointing.offload"):
        draft.lossy("activation_checkpointing.offload", "what is kept stays on the device")


def _loading(draft: Draft) -> None:
    if draft.value("loading.low_memory"):
        draft.put("loading.low_memory", f"{_SECTION}.cpu_ram_efficient_loading", True)
    else:
        draft.implied("loading.low_memory")
    draft.holds("loading.broadcast", "every rank loads the same weights")


def _state(draft: Draft) -> None:
    state, export = draft.value("saving.state", "full"), draft.value("saving.export", "none")
    paths = ("saving.state", "saving.export")
    if state == "full" or export != "none":
        key, whole = f"{_SECTION}.state_dict_type", "FULL_STATE_DICT"
        if any(draft.setting(path).keys for path in paths):
            draft.put(paths, key, whole)
            write_folder(draft, key)
        else:
            draft.implied(paths, whole)
            write_folder(draft)
        return
    why = "its checkpoint resumes on any number of ranks" if state == "local" else ""
    draft.write(key := f"{_SECTION}.state_dict_type", "SHARDED_STATE_DICT")
    draft.holds(paths, why, key)


# -- precision -----------------------------------------------------------------------------------------------------


def write_precision(draft: Draft, stack: str, context: ReadingContext) -> None:
    """Write `bf16` or `fp16`, and hold every state against what the Trainer makes of it."""
    compute = draft.value("precision.compute")
    master = draft.value("precision.master") or draft.value("precision.weight")
    if compute is None:
        return
    mixed = compute in ("bf16", "fp16") and compute != master
    if mixed:
        draft.put("precision.compute", compute, True)
    half = Setting(compute if mixed else None, "file", compute if mixed else "")
    write_stack_precision(draft, stack, half, context, says_accumulation=True)
