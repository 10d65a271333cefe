"""Writing what the Trainer shards: `fsdp_config`, `parallelism_config`, and the switches for 16 bits."""

from __future__ import annotations

from terrazzo.dialects.core.description import DATA_AXES, LOADED, PATHS, SHARDING, TIERS, Setting
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.formats.shared.accelerate import AUTOCAST, kept_as_loaded, stack_precision
from terrazzo.dialects.formats.shared.fsdp import MIN_NUMEL, write_offload
from terrazzo.dialects.formats.shared.rows import HYBRID_ROWS, choose_row, shard_ranks

__all__ = ["write_ddp", "write_fsdp", "write_precision"]

_ROWS = ("zero3", "shard_grad_op", *HYBRID_ROWS)
_SECTION = "fsdp_config"


def write_ddp(pen: Pen) -> None:
    """Nothing is split: the Trainer does so without a word."""
    pen.implied((*SHARDING, *DATA_AXES), "DDP, which needs no key")
    pen.implied([path for path in PATHS if path.startswith(("units.", "prefetch."))], "nothing is gathered")
    if any(pen.value(path, "device") != "device" for path in TIERS):
        pen.refuse(TIERS, "DDP moves nothing to the CPU: shard with zero3")
    else:
        pen.implied([path for path in PATHS if path.startswith("offload.")])
    _axes(pen, {})
    _checkpointing(pen, "activation_checkpointing")
    pen.implied(("loading.low_memory", "loading.broadcast", "saving.export"))
    whole = "" if pen.value("saving.state", "full") == "full" else "every rank has the whole state, and saves so"
    pen.implied("saving.state", whole)


def write_fsdp(pen: Pen, context: ReadingContext) -> None:
    """Write `fsdp` and its section. Version 1 is deprecated, and always shards over all ranks."""
    row, why = choose_row(pen, _ROWS, "zero3, shard_grad_op, hybrid_shard or zero0")
    if row is None:
        return
    pen.write("fsdp", True)
    replicas, shards = pen.value("mesh.dp_replicate"), pen.value("mesh.dp_shard")
    if row in HYBRID_ROWS and not pen.own:
        shards = shard_ranks(pen, context.world)
    if row in HYBRID_ROWS and None in (replicas, shards):
        why = "the sizes of both axes must be known, or nothing is replicated: write them in the file, or say --world"
        pen.refuse((*SHARDING, *DATA_AXES), why)
    else:
        kept = row in ("shard_grad_op", "hybrid_shard_zero2")
        pen.put(SHARDING, f"{_SECTION}.reshard_after_forward", not kept, why, "lossy" if why else "applied")
        _axes(pen, {"dp_replicate": replicas, "dp_shard": shards} if row in HYBRID_ROWS else {})
    _units(pen)
    write_offload(pen, f"{_SECTION}.cpu_offload")
    pen.implied("offload.pin")
    _prefetch(pen)
    _checkpointing(pen, f"{_SECTION}.activation_checkpointing")
    _loading(pen)
    _state(pen)


def _axes(pen: Pen, data: dict[str, int | None]) -> None:
    for axis in ("tp", "cp", "sp"):
        if pen.value(f"mesh.{axis}", 1) != 1:
            pen.put(f"mesh.{axis}", f"parallelism_config.{axis}_size", pen.value(f"mesh.{axis}"))
    for axis, size in data.items():
        pen.put(f"mesh.{axis}", f"parallelism_config.{axis}_size", size)
    if not data:
        pen.implied(DATA_AXES, "all data ranks are one axis")
    if pen.value("mesh.pp", 1) != 1:
        pen.refuse("mesh.pp", "the Trainer has no pipeline: set it to 1")
    if pen.value("mesh.ep", 1) != 1:
        pen.refuse("mesh.ep", "experts are split by from_pretrained(distributed_config=...): say ep_size there")


def _units(pen: Pen) -> None:
    policy = pen.value("units.policy", "auto")
    if policy == "classes":
        paths = ("units.policy", "units.classes")
        pen.put(paths, f"{_SECTION}.transformer_layer_cls_to_wrap", list(pen.value("units.classes", ())))
    elif policy == "min_numel":
        pen.put("units.policy", f"{_SECTION}.auto_wrap_policy", "SIZE_BASED_WRAP")
        pen.put("units.min_numel", f"{_SECTION}.min_num_params", pen.value("units.min_numel", MIN_NUMEL))
    elif policy == "none":
        pen.put("units.policy", f"{_SECTION}.auto_wrap_policy", "NO_WRAP")
    else:
        pen.implied("units.policy", "the model names its blocks")
    if pen.value("units.ignored"):
        pen.lossy("units.ignored", "TrainingArguments shard every parameter")


def _prefetch(pen: Pen) -> None:
    for way, does in (("forward", 0), ("backward", 1)):
        if pen.value(f"prefetch.{way}", does) == does:
            pen.implied(f"prefetch.{way}")
        else:
            pen.lossy(f"prefetch.{way}", f"FSDP2 gathers {does} units ahead in {way}, and has no key for it here")


def _checkpointing(pen: Pen, key: str) -> None:
    path, mode = "activation_checkpointing.mode", pen.value("activation_checkpointing.mode", "none")
    paths = (path, "activation_checkpointing.every", "activation_checkpointing.ops")
    if mode == "none":
        pen.implied(paths)
    elif mode == "full":
        pen.put(path, key, True)
    else:
        pen.put(paths, key, True, f"the Trainer recomputes whole blocks; asked was {mode}", "lossy")
    if pen.value("activation_checkpointing.offload"):
        pen.lossy("activation_checkpointing.offload", "what is kept stays on the device")


def _loading(pen: Pen) -> None:
    if pen.value("loading.low_memory"):
        pen.put("loading.low_memory", f"{_SECTION}.cpu_ram_efficient_loading", True)
    else:
        pen.implied("loading.low_memory")
    pen.implied("loading.broadcast", "every rank loads the same weights")


def _state(pen: Pen) -> None:
    state, export = pen.value("saving.state", "full"), pen.value("saving.export", "none")
    paths = ("saving.state", "saving.export")
    if state == "full" or export != "none":
        key, whole = f"{_SECTION}.state_dict_type", "FULL_STATE_DICT"
        pen.put(paths, key, whole) if any(pen.setting(path).keys for path in paths) else pen.implied(paths, whole)
        return
    why = "its checkpoint resumes on any number of ranks" if state == "local" else ""
    pen.put(paths, f"{_SECTION}.state_dict_type", "SHARDED_STATE_DICT", why)


# -- precision -----------------------------------------------------------------------------------------------------


def write_precision(pen: Pen, stack: str, deferred: bool, context: ReadingContext) -> None:
    """Write `bf16` or `fp16`, and hold every state against what the Trainer makes of it."""
    compute = pen.value("precision.compute")
    master = pen.value("precision.master") or pen.value("precision.weight")
    if compute is None:
        return
    mixed = compute in ("bf16", "fp16") and compute != master
    if mixed:
        pen.put("precision.compute", compute, True)
    half = Setting(compute if mixed else None, "file", compute if mixed else "")
    row = stack_precision(stack, half, deferred, context)
    for path, does in row.items():
        asked = pen.setting(path)
        if not asked.is_set or pen.own:
            continue
        if asked.value == does.value or (path == "precision.compute" and mixed):
            pen.implied(path, key=compute if mixed else "")
        elif path == "precision.autocast":
            pen.lossy(path, AUTOCAST if does.value else "without bf16 or fp16 there is none", compute if mixed else "")
        elif does.value == LOADED and path not in ("precision.buffers", "precision.loss_scaling"):
            pen.lossy(path, kept_as_loaded(asked.value))
        else:
            pen.lossy(path, _difference(stack, does.value))
    if pen.value("precision.static_loss_scale"):
        pen.lossy("precision.static_loss_scale", "the loss scale is dynamic")
    if not mixed:
        pen.implied("precision.output")


def _difference(stack: str, does: str | None) -> str:
    """Why a dtype is another one, and there is no key for it."""
    if does == LOADED:
        return "it keeps the dtype in which the model is loaded: cast it in the model"
    return f"{_words(stack)} has {does or 'none'} for it, and no key"


def _words(stack: str) -> str:
    return {"ddp": "DDP under autocast", "fsdp1": "FSDP under Accelerate", "fsdp2": "FSDP2 under Accelerate"}[stack]
