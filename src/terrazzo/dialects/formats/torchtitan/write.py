"""Writing torchtitan's `Trainer.Config` from a description."""

from __future__ import annotations

from terrazzo.dialects.core.description import LOADED, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.core.meaning import left
from terrazzo.dialects.formats.shared.fsdp import TORCH_NAMES, write_offload
from terrazzo.dialects.formats.torchtitan.keys import KEYS, LOCAL_BATCH, PIPELINED_BATCH
from terrazzo.dialects.formats.torchtitan.write_plan import APART, option, write_plan

__all__ = ["write"]

_NEVER_CLIPS = 1e9
_CLASSES = {"none": None, "full": "FullAC", "selective_half": "SelectiveAC"}
"""The class that recomputes what a mode recomputes."""


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document; torchtitan's defaults are left out, save where another dialect's differ."""
    pen = Pen(description, "torchtitan", "torchtitan")
    write_plan(pen, context)
    _units(pen)
    if write_offload(pen, "training.enable_cpu_offload"):
        pen.implied("offload.pin")
    _dtypes(pen)
    _batch(pen, context)
    _optimizer(pen)
    _schedule(pen)
    _loop(pen)
    _activations(pen)
    _saving(pen)
    return pen.finish()


def _units(pen: Pen) -> None:
    paths = ("units.policy", "units.classes", "units.min_numel")
    if pen.value("units.policy", "auto") == "auto":
        pen.implied(paths)
    else:
        pen.lossy(paths, "torchtitan's models name their own units: transformer blocks, embeddings and head")
    for way, does in (("forward", 0), ("backward", 1)):
        if pen.value(f"prefetch.{way}", does) == does:
            pen.implied(f"prefetch.{way}")
        else:
            pen.lossy(f"prefetch.{way}", f"torchtitan gathers {does} units ahead in {way}")
    pen.implied("loading.low_memory", "every rank loads its own shard")
    pen.implied("loading.broadcast", "every rank loads its own shard")


# -- precision, batch ----------------------------------------------------------------------------------------------


def _dtypes(pen: Pen) -> None:
    master = pen.value("precision.master") or pen.value("precision.weight") or "fp32"  # the default of training.dtype
    words = {short: TORCH_NAMES[short] for short in ("fp32", "bf16")}
    if master == LOADED:
        pen.lossy("precision.master", "the model is built in training.dtype, float32, whatever the weights come in")
    else:
        option(pen, "precision.master", "training.dtype", words)
    _half(pen, words)
    if not pen.own and pen.value("precision.linears", "compute") != "compute":
        code = "float8 is chosen in Python there: Float8LinearConverter.Config(recipe_name=..., filter_fqns=[...])"
        pen.lossy(("precision.linears", "precision.skip"), code)
    if pen.value("precision.reduce", "fp32") == "fp32":
        option(pen, "precision.reduce", "training.mixed_precision_reduce", words)
    elif pen.value("precision.reduce") == LOADED:
        pen.lossy("precision.reduce", "torchtitan reduces in float32, whatever the weights come in")
    else:
        pen.lossy(
            "precision.reduce", "torchtitan reduces gradients in float32 only: more exact, twice the traffic of bf16"
        )
    _states(pen, "fp32" if master == LOADED else master)
    if pen.value("precision.output") == pen.value("precision.compute"):
        pen.implied("precision.output")
    if pen.value("precision.saved") == LOADED:
        pen.lossy("precision.saved", "weights are saved in checkpoint.export_dtype, float32")
        return
    option(pen, "precision.saved", "checkpoint.export_dtype", {**words, "fp16": "float16"})


def _half(pen: Pen, words: dict[str, str]) -> None:
    compute = pen.value("precision.compute", "fp32")
    if compute in ("fp16", "fp64"):
        pen.refuse(
            "precision.compute", f"torchtitan computes in bfloat16 or float32, not {compute}: choose one of them"
        )
        pen.refuse("precision.loss_scaling", "torchtitan scales no loss: compute in bfloat16")
    elif compute == LOADED:
        pen.put("precision.compute", "training.mixed_precision_param", "float32", "say --load-dtype", "lossy")
    else:
        option(pen, "precision.compute", "training.mixed_precision_param", words)


def _states(pen: Pen, master: str) -> None:
    for state in ("weight", "accumulate", "buffers"):
        path = f"precision.{state}"
        if pen.own or pen.value(path, master) == master or (state == "buffers" and pen.value(path) == LOADED):
            pen.implied(path)
        elif pen.value(path) == LOADED:
            pen.lossy(path, "the model is built in training.dtype, float32, whatever the weights come in")
        elif state == "weight":
            pen.implied(path, f"the one copy kept is the master in {master}, cast at each gather: the same numbers")
        else:
            pen.lossy(path, f"it has the dtype of the weights, {master}")
    moments = pen.value("precision.moments", master)
    key, adam = "optimizer.implementation", pen.value("optimizer.name", "AdamW") in ("Adam", "AdamW")
    if pen.own or moments == master:
        pen.implied("precision.moments")
    elif moments == "bf16" and adam:
        pen.put("precision.moments", key, "fused_opt_states_bf16")
    else:
        pen.lossy("precision.moments", f"the optimizer's state has the dtype of the weights, {master}")


def _batch(pen: Pen, context: ReadingContext) -> None:
    pipelined = pen.value("mesh.pp", 1) not in (None, 1)
    option(pen, "batch.micro_batch", PIPELINED_BATCH if pipelined else LOCAL_BATCH)
    option(pen, "batch.sequence_length", "training.seq_len")
    key = "training.global_batch_size"
    micro, count = pen.value("batch.micro_batch"), pen.value("batch.accumulation")
    ranks = left(pen.description, context.world, APART)
    if pipelined and not pen.own:
        _local_batch(pen, micro, count, ranks)
        return
    if pen.own:
        if key in pen.setting("batch.accumulation").keys and pen.setting("batch.accumulation").origin == "file":
            pen.put("batch.accumulation", key, -1)
        else:
            option(pen, "batch.global_batch", key)
    elif pen.value("batch.global_batch"):
        pen.put(("batch.global_batch", "batch.accumulation"), key, pen.value("batch.global_batch"))
    elif micro and count and count > 1 and ranks:
        pen.put("batch.accumulation", key, micro * count * ranks)
    elif count and count > 1:
        need = "the micro-batch" if not micro else "the number of ranks (--world)"
        pen.lossy("batch.accumulation", f"torchtitan counts the global batch, which needs {need} as well")
    else:
        pen.implied("batch.accumulation")


def _local_batch(pen: Pen, micro: int | None, count: int | None, ranks: int | None) -> None:
    """All micro-batches of a step go through the stages at once."""
    total, paths = pen.value("batch.global_batch"), ("batch.accumulation", "batch.global_batch")
    if micro and count:
        pen.put(paths, LOCAL_BATCH, micro * count)
    elif total and ranks:
        pen.put(paths, LOCAL_BATCH, total // ranks)
    else:
        need = "the number of ranks (--world)" if total else "the micro-batch and the number of them"
        pen.lossy(paths, f"torchtitan counts what one data rank sends through the stages, which needs {need}")


# -- optimizer, schedule, loop -------------------------------------------------------------------------------------


def _optimizer(pen: Pen) -> None:
    paths = tuple(f"optimizer.{name}" for name in ("name", "lr", "betas", "eps", "weight_decay", "options"))
    name, key = pen.value("optimizer.name"), "optimizer.param_groups"
    if pen.own or name is None:
        pen.implied(paths)
        return
    if name not in ("Adam", "AdamW"):
        muon = "of which its own code says which parameters and layouts are for it" if name == "Muon" else ""
        what = (
            f"torchtitan has Adam and AdamW, and DistMuon, {muon}"
            if muon
            else f"torchtitan has Adam, AdamW, not {name}"
        )
        pen.refuse(paths, f"{what}: choose one of the first two")
        return
    numbers = {path.partition(".")[2]: pen.value(path) for path in paths[1:-1]}
    options = {each: list(value) if each == "betas" else value for each, value in numbers.items() if value is not None}
    options |= {each: value for each, value in pen.value("optimizer.options", {}).items() if each not in options}
    group = {"pattern": ".*", "optimizer_name": name, "optimizer_kwargs": options}
    pen.put(paths, key, [group])


def _schedule(pen: Pen) -> None:
    option(pen, "schedule.total_steps", "training.steps")
    _warmup(pen)
    name, total = pen.value("schedule.name"), pen.value("schedule.total_steps")
    kind, ratio = "lr_scheduler.decay_type", "lr_scheduler.decay_ratio"
    if pen.own:
        _own_schedule(pen, name)
    elif name in ("linear", "cosine", "sqrt"):
        pen.option("schedule.name", kind, "linear")
    elif name == "constant":
        pen.put("schedule.name", ratio, 0.0)
    elif name == "wsd":
        steps = pen.value("schedule.decay_steps")
        share = steps / total if steps and total else 0.2
        pen.put(("schedule.name", "schedule.decay_steps"), ratio, share, "" if steps else "a fifth of the run")
        _decay_type(pen)
    elif name is not None:
        pen.lossy("schedule.name", f"torchtitan has no schedule {name}: it decays linearly after the warm-up")
    if name == "constant" and not pen.own:
        pen.implied("schedule.final_fraction")
    elif pen.value("schedule.final_fraction") is not None:
        option(pen, "schedule.final_fraction", "lr_scheduler.min_lr_factor")


def _decay_type(pen: Pen) -> None:
    options = pen.value("schedule.options", {})
    if options.get("decay_type") in ("linear", "sqrt", "cosine"):
        pen.put("schedule.options", "lr_scheduler.decay_type", options["decay_type"])


def _own_schedule(pen: Pen, name: str) -> None:
    kind = "lr_scheduler.decay_type"
    if kind in pen.setting("schedule.name").keys and pen.setting("schedule.name").origin == "file":
        pen.put("schedule.name", kind, name)


def _warmup(pen: Pen) -> None:
    key, share, total = (
        "lr_scheduler.warmup_steps",
        pen.value("schedule.warmup_fraction"),
        pen.value("schedule.total_steps"),
    )
    if share and total:
        pen.put("schedule.warmup_fraction", key, round(share * total))
    elif share:
        pen.lossy("schedule.warmup_fraction", "the length of the run is not known: set lr_scheduler.warmup_steps")
    if pen.value("schedule.warmup_steps") is not None and not share:
        option(pen, "schedule.warmup_steps", key)


def _loop(pen: Pen) -> None:
    if pen.is_set("training.clip") and pen.value("training.clip") is None:
        why = "torchtitan always clips: a norm that no gradient reaches"
        pen.put("training.clip", "training.max_norm", _NEVER_CLIPS, why, "renamed")
    else:
        option(pen, "training.clip", "training.max_norm")
    option(pen, "training.seed", "debug.seed")
    option(pen, "training.compile", "compile.enable")
    if pen.value("training.device") == "cpu":
        pen.refuse("training.device", "torchtitan trains on GPUs: use comm.mode fake_backend to rehearse without one")


def _activations(pen: Pen) -> None:
    path, key = "activation_checkpointing.mode", "activation_checkpoint"
    mode = pen.value(path)
    paths = (path, "activation_checkpointing.every")
    if pen.own:
        _own_activations(pen, mode)
    elif mode in _CLASSES:
        pen.put(path, key, _CLASSES[mode])
    elif mode == "every":
        pen.put(paths, key, "FullAC", "torchtitan recomputes every block, or operators of every block", "lossy")
    elif mode is not None:
        why = f"SelectiveAC keeps every second matrix product, as selective_half does; asked was {mode}"
        pen.put(path, key, "SelectiveAC", why, "lossy")
    if pen.value("activation_checkpointing.ops"):
        pen.lossy("activation_checkpointing.ops", "which operators are kept is decided in a subclass of SelectiveAC")


def _own_activations(pen: Pen, mode: str) -> None:
    path, key = "activation_checkpointing.mode", "activation_checkpoint"
    keys = pen.setting(path).keys
    if keys in ((key,), (f"{key}.type",)) and not pen.kept(keys[0]):
        pen.put(path, keys[0], _CLASSES[mode])  # MemoryBudgetAC, whose mode is none of these, is kept as it stands


# -- saving --------------------------------------------------------------------------------------------------------


def _saving(pen: Pen) -> None:
    every, key = pen.value("saving.every"), "checkpoint.interval"
    pen.implied("saving.state", "DCP: sharded, for any number of ranks")
    if pen.own:
        _own_saving(pen, every)
    elif every is not None:
        pen.put("saving.every", key, every)
        pen.write("checkpoint.enable", True)
    else:
        pen.implied("saving.every")
    export = {"hf": True, "full": True, "none": False}
    pen.option("saving.export", "checkpoint.last_save_in_hf", "none", export)
    if pen.is_set("saving.keep_last"):
        _keep_last(pen)
    if pen.value("saving.folder") is not None:
        option(pen, "saving.folder", "checkpoint.folder")
    if not pen.kept("checkpoint.async_mode"):
        pen.option("saving.background", "checkpoint.async_mode", False, {True: "async", False: "disabled"})
    else:
        pen.implied("saving.background")


def _own_saving(pen: Pen, every: int | None) -> None:
    keys = pen.setting("saving.every").keys
    if "checkpoint.enable" in keys:
        pen.put("saving.every", "checkpoint.enable", every is not None)
    if "checkpoint.interval" in keys:
        pen.write("checkpoint.interval", every)
    pen.implied("saving.every", key="checkpoint.interval")


def _keep_last(pen: Pen) -> None:
    key, keep = "checkpoint.keep_latest_k", pen.value("saving.keep_last", 0)
    if keep == 1 and not pen.own:
        pen.put("saving.keep_last", key, 2, "torchtitan keeps at least two", "lossy")
    elif pen.wanted("saving.keep_last", KEYS[key].default, key):
        pen.put("saving.keep_last", key, keep)
    else:
        pen.implied("saving.keep_last")
