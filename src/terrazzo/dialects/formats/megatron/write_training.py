"""Writing what a step of Megatron-LM does: batch, optimizer, schedule, activations kept, checkpoints."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.agreement import OF_MATRICES
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left, ranks_needed
from terrazzo.dialects.formats.megatron.keys import (
    ADAMS_SHARE,
    DECAY_SHAPES,
    DECAYS,
    KEYS,
    OPTIMIZERS,
    OWNER_OF_BETAS,
    SCALES,
)
from terrazzo.dialects.formats.shared.batch_words import ACCUMULATION_FOLLOWS, size_follows
from terrazzo.dialects.formats.shared.schedule_words import write_lags

__all__ = ["write_training"]

_ARGUMENTS = tuple(f"optimizer.{name}" for name in ("betas", "eps", "options"))


def write_training(draft: Draft, context: ReadingContext) -> None:
    """Batch, optimizer, schedule, loop, activations kept, checkpoints; and what the library does by itself."""
    _batch(draft, context)
    _optimizer(draft)
    _schedule(draft)
    _loop(draft)
    _activations(draft)
    _saving(draft)
    draft.holds(["units.policy", "units.classes", "units.min_numel"], "units are layers")
    draft.holds(["prefetch.forward", "prefetch.backward"], "how far ahead weights are gathered is the library's")
    draft.holds(["loading.low_memory", "loading.broadcast"], "each rank builds its own part")


def _batch(draft: Draft, context: ReadingContext) -> None:
    draft.option("batch.micro_batch", "micro-batch-size")
    draft.option("batch.sequence_length", "seq-length")
    whole, micro, count = (draft.value(f"batch.{name}") for name in ("global_batch", "micro_batch", "accumulation"))
    ranks = ranks_left(draft.description, context.world, SAME_DATA_AXES)
    if whole:
        draft.put("batch.global_batch", "global-batch-size", whole)
        size_follows(draft, "batch.accumulation", ACCUMULATION_FOLLOWS, "global-batch-size")
    elif micro and count and count > 1 and ranks:
        draft.put("batch.accumulation", "global-batch-size", micro * count * ranks)
    elif count and count > 1:
        missing = ranks_needed(draft.description, context.world, SAME_DATA_AXES)
        need = missing if micro else "the micro-batch"
        draft.lossy("batch.accumulation", f"Megatron-LM counts the global batch, which needs {need} as well")
    else:
        draft.implied("batch.accumulation")
    if micro is None:
        draft.missing("batch.micro_batch", "micro-batch-size", "Megatron-LM stops without it")


def _optimizer(draft: Draft) -> None:
    name = draft.value("optimizer.name")
    word = next((word for word, known in OPTIMIZERS.items() if known == name), None)
    if name is not None and word is None:
        why = f"Megatron-LM has {', '.join(OPTIMIZERS.values())}, not {name}: choose one of them"
        draft.refuse(("optimizer.name", *(path for path in _ARGUMENTS if draft.value(path))), why)
    elif word is not None and word != "adam":
        draft.put("optimizer.name", "optimizer", word)
    else:
        draft.implied("optimizer.name")
    draft.option("optimizer.lr", "lr")
    draft.option("optimizer.weight_decay", "weight-decay")
    draft.does("optimizer.decay", "matrices")
    owner = OWNER_OF_BETAS.get(name or "AdamW")
    if owner is not None:
        _betas(draft, owner)
    if owner == "adam":
        draft.option("optimizer.eps", "adam-eps")
    options = dict(draft.value("optimizer.options", {}))
    if word == "sgd":
        draft.put("optimizer.options", "sgd-momentum", options.pop("momentum", 0.0))
    if word == "muon":
        options = _muon(draft, options)
    if options and word is not None:
        draft.lossy("optimizer.options", f"{word} takes no {', '.join(options)} there")


def _muon(draft: Draft, options: dict[str, Any]) -> dict[str, Any]:
    """Write what is said of matrices; what is left of the options."""
    rate, own = draft.value("optimizer.lr"), options.pop("muon.lr", None)
    matrices = {key: options.pop(key, value) for key, value in OF_MATRICES.items()}
    scale = matrices.pop("muon.adjust_lr")
    mode = next((word for word, known in SCALES.items() if known == scale), "spectral")
    if scale not in SCALES.values():
        draft.lossy(
            "optimizer.options", f"matrices are scaled by {scale} in no way here: it is {mode}", "muon-scale-mode"
        )
    factor = (ADAMS_SHARE if mode == "spectral" else 1.0) * (own / rate if own and rate else 1.0)
    values = dict(zip(("muon-momentum", "muon-nesterov", "muon-num-ns-steps"), matrices.values(), strict=True))
    values |= {"muon-scale-mode": mode, "muon-extra-scale-factor": float(f"{factor:.12g}")}
    written = {key: value for key, value in values.items() if value != KEYS[key].default}
    draft.write("muon-coefficient-type", "simple")
    for key, value in written.items():
        draft.put("optimizer.options", key, value)
    if not written:
        draft.implied("optimizer.options")
    return options


def _betas(draft: Draft, owner: str) -> None:
    draft.implied("optimizer.betas")
    for key, value in zip((f"{owner}-beta1", f"{owner}-beta2"), draft.value("optimizer.betas") or (), strict=False):
        if value != KEYS[key].default:
            draft.put("optimizer.betas", key, value)


def _schedule(draft: Draft) -> None:
    draft.option("schedule.total_steps", "train-iters")
    draft.option("schedule.warmup_steps", "lr-warmup-iters")
    if draft.value("schedule.warmup_fraction"):
        draft.put("schedule.warmup_fraction", "lr-warmup-fraction", draft.value("schedule.warmup_fraction"))
    name, steps = draft.value("schedule.name"), draft.value("schedule.decay_steps")
    if name is not None and name not in DECAYS.values():
        draft.lossy("schedule.name", f"Megatron-LM has no schedule {name}: it decays linearly to the end")
    elif name == "wsd":
        draft.put("schedule.name", "lr-decay-style", "WSD")
        words = {known: word for word, known in DECAY_SHAPES.items()}
        draft.put("schedule.decay_shape", "lr-wsd-decay-style", words[draft.value("schedule.decay_shape", "linear")])
        _final_decay(draft, steps)
    elif name is not None:
        draft.option("schedule.name", "lr-decay-style")
    _lowest(draft, name)
    _start(draft)
    write_lags(draft, 1, 1)


def _final_decay(draft: Draft, steps: int | None) -> None:
    total = draft.value("schedule.total_steps")
    if steps or total:
        why = "" if steps else "a fifth of the run"
        draft.write(key := "lr-wsd-decay-iters", steps or max(1, total // 5))
        draft.holds("schedule.decay_steps", why, key)


def _start(draft: Draft) -> None:
    path, peak = "schedule.warmup_start", draft.value("optimizer.lr")
    share = draft.value(path)
    if not share:
        draft.implied(path)
    elif peak:
        draft.put(path, "lr-warmup-init", share * peak)
    else:
        draft.lossy(path, "Megatron-LM takes the rate itself, for which the peak is not known: set lr-warmup-init")


def _lowest(draft: Draft, name: str | None) -> None:
    path, peak = "schedule.final_fraction", draft.value("optimizer.lr")
    share = draft.value(path)
    if name == "constant" or not share:
        draft.implied(path)
    elif peak:
        draft.put(path, "min-lr", share * peak)
    else:
        draft.lossy(path, "Megatron-LM takes the lowest rate itself, for which the peak is not known: set min-lr")


def _loop(draft: Draft) -> None:
    path = "training.clip"
    if draft.is_set(path) and draft.value(path) is None:
        draft.put(path, "clip-grad", 0.0)
    else:
        draft.option(path, "clip-grad")
    _loss(draft)
    draft.option("training.seed", "seed")
    if draft.value("training.compile"):
        draft.lossy("training.compile", "torch.compile is not called; what is fused, the library says")
    if draft.value("training.device") == "cpu":
        draft.refuse("training.device", "Megatron-LM trains on GPUs: leave it out")
    else:
        draft.holds("training.device", "Megatron-LM trains on GPUs")


def _loss(draft: Draft) -> None:
    mean, word = draft.value("training.loss_mean"), draft.value("training.nonfinite")
    if mean == "tokens":
        draft.put("training.loss_mean", "calculate-per-token-loss", True)
    else:
        draft.does("training.loss_mean", "micro_batches")
    if word == "go_on" and draft.setting("training.nonfinite").origin == "file":
        draft.put("training.nonfinite", "no-check-for-nan-in-loss-and-grad", True)
    elif draft.has("fp16") and not draft.has("loss-scale") and word == "skip":
        draft.holds("training.nonfinite", "as the loss scale shrinks")
    elif draft.has("fp16") and not draft.has("loss-scale") and word is not None:
        draft.lossy("training.nonfinite", "under a dynamic loss scale such a step is left out, and training goes on")
    else:
        draft.does("training.nonfinite", "stop")


def _activations(draft: Draft) -> None:
    mode = draft.value("activation_checkpointing.mode", "none")
    paths = ["activation_checkpointing.mode", "activation_checkpointing.every"]
    key = "recompute-granularity"
    if mode == "none":
        draft.implied(paths)
    elif mode == "selective":
        draft.put(paths, key, "selective")
    else:
        why = f"each layer is computed again as a whole; asked was {mode}" if mode != "full" else ""
        draft.put(paths, key, "full", why, "lossy" if why else "applied")
        draft.write("recompute-method", "uniform")
        draft.write("recompute-num-layers", 1)
    if draft.value("activation_checkpointing.ops") is not None:
        draft.lossy(
            "activation_checkpointing.ops", "selective computes the core of attention again: see recompute-modules"
        )
    if draft.value("activation_checkpointing.offload"):
        why = "name the modules yourself: fine-grained-activation-offloading with offload-modules"
        draft.lossy("activation_checkpointing.offload", why)


def _intervals(draft: Draft) -> None:
    """Write where to and how often; every so many steps is at the end, too."""
    when, total = draft.value("saving.when"), draft.value("schedule.total_steps")
    if when == "never":
        draft.implied(("saving.when", "saving.folder", "saving.every"), "without --save nothing is written")
        return
    draft.option("saving.folder", "save")
    draft.option("saving.every", "save-interval")
    if not draft.has("save") and when is not None:
        draft.lossy("saving.when", "without a folder nothing is written: set save and save-interval")
    elif when == "end" and total:
        draft.put("saving.when", "save-interval", total, "the run's steps: one checkpoint, at the end")
    else:
        draft.implied("saving.when", key="save")


def _saving(draft: Draft) -> None:
    _intervals(draft)
    state = draft.value("saving.state", "sharded")
    if state == "local" and not draft.has("ckpt-format"):
        draft.put("saving.state", "ckpt-format", "torch")
    else:
        draft.holds("saving.state", "" if state == "sharded" else "checkpoints are sharded: torch_dist")
    if draft.value("saving.background"):
        draft.put("saving.background", "async-save", True)
        draft.write("use-persistent-ckpt-worker", True)
    if draft.value("saving.keep_last") is not None:
        draft.lossy("saving.keep_last", "all checkpoints are kept, or those at multiples of save-retain-interval")
    if draft.value("saving.export", "none") != "none":
        draft.lossy("saving.export", "weights are exported by a program of their own, from a checkpoint")
