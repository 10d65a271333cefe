"""Writing torchtitan's `Trainer.Config` from a description."""

from __future__ import annotations

from terrazzo.dialects.core.description import LOADED, PATHS, Description, Setting
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import ranks_left, ranks_needed
from terrazzo.dialects.formats.shared.batch_words import ACCUMULATION_FOLLOWS, size_follows
from terrazzo.dialects.formats.shared.fsdp_arguments import write_offload
from terrazzo.dialects.formats.shared.fsdp_words import TORCH_NAMES
from terrazzo.dialects.formats.shared.saving_words import write_folder
from terrazzo.dialects.formats.shared.schedule_words import warmup_steps, write_lags
from terrazzo.dialects.formats.torchtitan.keys import DECAY_SHAPES, KEYS, LOCAL_BATCH, PIPELINED_BATCH
from terrazzo.dialects.formats.torchtitan.stored_dtypes import NARROW_MOMENTS, stored_dtypes
from terrazzo.dialects.formats.torchtitan.write_plan import TAKEN_AXES, write_plan

__all__ = ["write"]

_ACTIVATIONS, _DECAY_TYPE = "activation_checkpoint", "lr_scheduler.decay_type"
_GLOBAL_BATCH, _ENABLE = "training.global_batch_size", "checkpoint.enable"
_EXPORT, _WEIGHTS_ALONE = "checkpoint.last_save_in_hf", "checkpoint.last_save_model_only"
_OPTIMIZER = tuple(f"optimizer.{name}" for name in ("name", "lr", "betas", "eps", "weight_decay", "options"))
"""Settings that are one key, `optimizer.param_groups`."""
_CLASSES = {"none": None, "full": "FullAC", "selective_half": "SelectiveAC"}
"""The class that recomputes what a mode recomputes."""
_NEVER_CLIPS = 1e9


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document; torchtitan's defaults are left out, save where another dialect's differ."""
    draft = Draft(description, "torchtitan", KEYS)
    write_plan(draft, context)
    _units(draft)
    if write_offload(draft, "training.enable_cpu_offload"):
        draft.implied("offload.pin")
    _dtypes(draft)
    _sequences(draft)
    _batch(draft, context)
    _optimizer(draft)
    draft.option("schedule.total_steps", "training.steps")
    _warmup(draft)
    _schedule(draft)
    _loop(draft)
    _activations(draft)
    _saving(draft)
    return draft.finish()


def _units(draft: Draft) -> None:
    paths = ("units.policy", "units.classes", "units.min_numel")
    if draft.value("units.policy", "auto") == "auto":
        draft.implied(paths)
    else:
        draft.lossy(paths, "torchtitan's models name their own units: transformer blocks, embeddings and head")
    for way, does in (("forward", 0), ("backward", 1)):
        if draft.value(f"prefetch.{way}", does) == does:
            draft.implied(f"prefetch.{way}")
        else:
            draft.lossy(f"prefetch.{way}", f"torchtitan gathers {does} units ahead in {way}")
    draft.holds("loading.low_memory", "every rank loads its own shard")
    draft.holds("loading.broadcast", "every rank loads its own shard")


# -- precision, batch ----------------------------------------------------------------------------------------------


def _dtypes(draft: Draft) -> None:
    master = (
        draft.value("precision.master") or draft.value("precision.weight") or "fp32"
    )  # the default of training.dtype
    words = {short: TORCH_NAMES[short] for short in ("fp32", "bf16")}
    if master == LOADED:
        draft.lossy("precision.master", "the model is built in training.dtype, float32, whatever the weights come in")
    else:
        draft.option("precision.master", "training.dtype", words)
    _half(draft, words)
    if draft.value("precision.linears", "compute") != "compute":
        code = "float8 is chosen in Python there: Float8LinearConverter.Config(recipe_name=..., filter_fqns=[...])"
        draft.lossy(("precision.linears", "precision.skip"), code)
    if draft.value("precision.reduce", "fp32") == "fp32":
        draft.option("precision.reduce", "training.mixed_precision_reduce", words)
    elif draft.value("precision.reduce") == LOADED:
        draft.lossy("precision.reduce", "torchtitan reduces in float32, whatever the weights come in")
    else:
        draft.lossy(
            "precision.reduce", "torchtitan reduces gradients in float32 only: more exact, twice the traffic of bf16"
        )
    _states(draft, "fp32" if master == LOADED else master)
    if draft.value("saving.when") == "never":
        draft.holds("precision.saved", "nothing is written")
        return
    if draft.value("precision.saved") == LOADED:
        draft.lossy("precision.saved", "weights are saved in checkpoint.export_dtype, float32")
        return
    draft.option("precision.saved", "checkpoint.export_dtype", {**words, "fp16": "float16"})


def _half(draft: Draft, words: dict[str, str]) -> None:
    compute = draft.value("precision.compute", "fp32")
    if compute in ("fp16", "fp64"):
        draft.refuse(
            "precision.compute", f"torchtitan computes in bfloat16 or float32, not {compute}: choose one of them"
        )
        draft.refuse("precision.loss_scaling", "torchtitan scales no loss: compute in bfloat16")
    elif compute == LOADED:
        draft.put("precision.compute", "training.mixed_precision_param", "float32", "say --load-dtype", "lossy")
    else:
        draft.option("precision.compute", "training.mixed_precision_param", words)


def _states(draft: Draft, master: str) -> None:
    """A verdict on every state that is kept, by the row that the document is read as."""
    moments, adam = (
        draft.value("precision.moments", master),
        draft.value("optimizer.name", "AdamW") in ("Adam", "AdamW"),
    )
    way = NARROW_MOMENTS if moments == "bf16" != master and adam else None
    if way is not None:
        draft.put("precision.moments", "optimizer.implementation", way)
    for path, does in stored_dtypes(Setting(master), Setting(way)).items():
        value = draft.value(path, does.value)
        if value == does.value:
            if not draft.has_verdict(path):
                draft.implied(path)
        elif path == "precision.buffers" and value == master:
            draft.holds(path, f"the model is built in {master}")
        elif path == "precision.buffers":
            draft.lossy(path, "buffers keep the dtype that the model gives them")
        elif path == "precision.moments":
            draft.lossy(path, f"the optimizer's state has the dtype of the weights, {master}")
        elif value == LOADED:
            draft.lossy(path, "the model is built in training.dtype, float32, whatever the weights come in")
        elif path == "precision.weight":
            draft.holds(path, f"the one copy kept is the master in {master}, cast at each gather: the same numbers")
        elif path == "precision.accumulate":
            draft.lossy(path, f"it has the dtype of the weights, {master}")


def _sequences(draft: Draft) -> None:
    draft.option("batch.micro_batch", PIPELINED_BATCH if _is_pipelined(draft) else LOCAL_BATCH)
    draft.option("batch.sequence_length", "training.seq_len")


def _is_pipelined(draft: Draft) -> bool:
    return draft.value("mesh.pp", 1) not in (None, 1)


def _batch(draft: Draft, context: ReadingContext) -> None:
    micro, count = draft.value("batch.micro_batch"), draft.value("batch.accumulation")
    ranks = ranks_left(draft.description, context.world, TAKEN_AXES)
    if _is_pipelined(draft):
        _local_batch(draft, context, micro, count)
    elif draft.value("batch.global_batch"):
        draft.put("batch.global_batch", _GLOBAL_BATCH, draft.value("batch.global_batch"))
        size_follows(draft, "batch.accumulation", ACCUMULATION_FOLLOWS, _GLOBAL_BATCH)
    elif micro and count and count > 1 and ranks:
        draft.put("batch.accumulation", _GLOBAL_BATCH, micro * count * ranks)
    elif count and count > 1:
        need = ranks_needed(draft.description, context.world, TAKEN_AXES) if micro else "the micro-batch"
        draft.lossy("batch.accumulation", f"torchtitan counts the global batch, which needs {need} as well")
    else:
        draft.implied("batch.accumulation")


def _local_batch(draft: Draft, context: ReadingContext, micro: int | None, count: int | None) -> None:
    """All micro-batches of a step go through the stages at once."""
    ranks = ranks_left(draft.description, context.world, TAKEN_AXES)
    total, paths = draft.value("batch.global_batch"), ("batch.accumulation", "batch.global_batch")
    if micro and count:
        draft.write(LOCAL_BATCH, micro * count)
        draft.holds(paths, "what one data rank takes in a step", LOCAL_BATCH)
    elif total and ranks and total % (ranks * (micro or 1)) == 0:
        draft.put(paths, LOCAL_BATCH, total // ranks)
    elif total and ranks:
        parts = f"{ranks} data ranks" + (f" with micro-batches of {micro}" if micro else "")
        draft.lossy(paths, f"torchtitan fills every micro-batch, and {total} samples do not come out whole on {parts}")
    else:
        missing = ranks_needed(draft.description, context.world, TAKEN_AXES)
        need = missing if total else "the micro-batch and the number of them"
        draft.lossy(paths, f"torchtitan counts what one data rank sends through the stages, which needs {need}")


# -- optimizer, schedule, loop -------------------------------------------------------------------------------------


def _optimizer(draft: Draft) -> None:
    paths, name = _OPTIMIZER, draft.value("optimizer.name")
    if name is None:
        draft.implied(paths)
        return
    if name not in ("Adam", "AdamW"):
        muon = "of which its own code says which parameters and layouts are for it" if name == "Muon" else ""
        what = (
            f"torchtitan has Adam and AdamW, and DistMuon, {muon}"
            if muon
            else f"torchtitan has Adam, AdamW, not {name}"
        )
        draft.refuse(paths, f"{what}: choose one of the first two")
        return
    numbers = {path.partition(".")[2]: draft.value(path) for path in paths[1:-1]}
    options = {each: list(value) if each == "betas" else value for each, value in numbers.items() if value is not None}
    options |= {each: value for each, value in draft.value("optimizer.options", {}).items() if each not in options}
    group = {"pattern": ".*", "optimizer_name": name, "optimizer_kwargs": options}
    draft.put(paths, "optimizer.param_groups", [group])
    draft.does("optimizer.decay", "all")


def _schedule(draft: Draft) -> None:
    write_lags(draft, 0, 1)
    name, total, ratio = draft.value("schedule.name"), draft.value("schedule.total_steps"), "lr_scheduler.decay_ratio"
    if name in ("linear", "cosine"):
        draft.option("schedule.name", _DECAY_TYPE)
    elif name == "constant":
        draft.put("schedule.name", ratio, 0.0)
    elif name == "wsd":
        steps = draft.value("schedule.decay_steps")
        share = steps / total if steps and total else 0.2
        fifth = "" if steps else "a fifth of the run"
        draft.write(ratio, share)
        draft.holds(("schedule.name", "schedule.decay_steps"), fifth, ratio)
        draft.option("schedule.decay_shape", _DECAY_TYPE, {shape: shape for shape in DECAY_SHAPES})
    elif name is not None:
        draft.lossy("schedule.name", f"torchtitan has no schedule {name}: it decays linearly after the warm-up")
    if name == "constant":
        draft.implied("schedule.final_fraction")
    else:
        draft.option("schedule.final_fraction", "lr_scheduler.min_lr_factor")


def _warmup(draft: Draft) -> None:
    key, share, total = (
        "lr_scheduler.warmup_steps",
        draft.value("schedule.warmup_fraction"),
        draft.value("schedule.total_steps"),
    )
    if share and total:
        draft.write(key, warmup_steps(share, total))
        draft.holds("schedule.warmup_fraction", "in steps", key)
    elif share:
        draft.lossy("schedule.warmup_fraction", "the length of the run is not known: set lr_scheduler.warmup_steps")
    if not share:
        draft.option("schedule.warmup_steps", key)


def _loop(draft: Draft) -> None:
    if draft.is_set("training.clip") and draft.value("training.clip") is None:
        why = "torchtitan always clips: a norm that no gradient reaches"
        draft.write("training.max_norm", _NEVER_CLIPS)
        draft.holds("training.clip", why, "training.max_norm")
    else:
        draft.option("training.clip", "training.max_norm")
    draft.does("training.loss_mean", "tokens")
    draft.does("training.nonfinite", "stop")
    draft.option("training.seed", "debug.seed")
    draft.option("training.compile", "compile.enable")
    if draft.value("training.device") == "cpu":
        draft.refuse("training.device", "torchtitan trains on GPUs: use comm.mode fake_backend to rehearse without one")


def _activations(draft: Draft) -> None:
    path, key = "activation_checkpointing.mode", _ACTIVATIONS
    mode = draft.value(path)
    if mode in _CLASSES:
        draft.put(path, key, _CLASSES[mode])
    elif mode == "every":
        paths = (path, "activation_checkpointing.every")
        draft.put(paths, key, "FullAC", "torchtitan recomputes every block, or operators of every block", "lossy")
    elif mode is not None:
        why = f"SelectiveAC keeps every second matrix product, as selective_half does; asked was {mode}"
        draft.put(path, key, "SelectiveAC", why, "lossy")
    if draft.value("activation_checkpointing.ops") is not None:
        draft.lossy("activation_checkpointing.ops", "which operators are kept is decided in a subclass of SelectiveAC")


# -- saving --------------------------------------------------------------------------------------------------------


def _saving(draft: Draft) -> None:
    draft.holds("saving.state", "DCP: sharded, for any number of ranks")
    when, exports = draft.value("saving.when"), draft.value("saving.export", "none") != "none"
    if when == "never":
        draft.implied([path for path in PATHS if path.startswith("saving.")], "checkpoint.enable is off by default")
        return
    if when is not None or exports:
        draft.write(_ENABLE, True)
        _intervals(draft)
    if draft.value("saving.export") == "full":
        draft.write(_EXPORT, True)
        write_folder(draft, _EXPORT)
    else:
        draft.option("saving.export", _EXPORT, {"hf": True, "none": False})
    if when is not None and exports:
        why = "the last checkpoint is that folder, of weights alone: no run goes on from the end"
        draft.lossy("saving.export", why, _EXPORT)
    elif when is not None:
        draft.write(_WEIGHTS_ALONE, False)
    if draft.is_set("saving.keep_last"):
        _keep_last(draft)
    draft.option("saving.folder", "checkpoint.folder")
    draft.option("saving.background", "checkpoint.async_mode", {True: "async", False: "disabled"})


def _intervals(draft: Draft) -> None:
    """Write how often; an interval as long as the run leaves the checkpoint at its end."""
    key, every = "checkpoint.interval", draft.value("saving.every")
    draft.implied("saving.when", key=_ENABLE)
    if draft.value("saving.when") == "end":
        steps = draft.value("schedule.total_steps", KEYS["training.steps"].default)
        draft.put("saving.when", key, steps, "the run's steps: one checkpoint, at the end")
        draft.implied("saving.every")
    elif every is not None:
        draft.put("saving.every", key, every)
    elif draft.value("saving.when") == "steps":
        draft.lossy("saving.when", f"how often is not known: set {key}, which is 500 by default", _ENABLE)


def _keep_last(draft: Draft) -> None:
    key, keep = "checkpoint.keep_latest_k", draft.value("saving.keep_last", 0)
    if keep == 1:
        draft.put("saving.keep_last", key, 2, "torchtitan keeps at least two", "lossy")
    elif keep == KEYS[key].default:
        draft.implied("saving.keep_last")
    else:
        draft.put("saving.keep_last", key, keep)
