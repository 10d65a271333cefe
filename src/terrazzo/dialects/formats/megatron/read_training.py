"""Reading what a step of Megatron-LM does: batch, optimizer, schedule, activations kept, checkpoints."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.keys import MISSING
from terrazzo.dialects.core.reader import Reader, derived, only_from_file
from terrazzo.dialects.formats.megatron.keys import ADAMS_SHARE, KEYS, OPTIMIZERS, OWNER_OF_BETAS

__all__ = ["read_training"]


def read_training(reader: Reader) -> SettingsByPath:
    """Batch, optimizer, schedule, clipping, seed, activations kept, checkpoints."""
    whole = reader.take("global-batch-size")
    clip = reader.take("clip-grad")
    return {
        **_batch(reader, whole),
        **_optimizer(reader),
        **_schedule(reader, whole),
        **_activations(reader),
        **_saving(reader),
        "training.clip": Setting(clip.value or None, clip.origin, clip.key),
        "training.seed": reader.take("seed"),
        **_loss(reader),
    }


def _loss(reader: Reader) -> SettingsByPath:
    """What it is the mean over, and what becomes of one that is not finite: in fp16 a dynamic scale decides."""
    each, unchecked = reader.take("calculate-per-token-loss"), reader.take("no-check-for-nan-in-loss-and-grad")
    mean = Setting("tokens" if each.value else "micro_batches", each.origin, each.key)
    if reader.take("fp16").value and not reader.take("loss-scale").value:
        _unused(reader, (unchecked,), "fp16 with a dynamic scale is not checked")
        return {"training.loss_mean": mean}
    word = "go_on" if unchecked.value else "stop"
    return {"training.loss_mean": mean, "training.nonfinite": Setting(word, unchecked.origin, unchecked.key)}


def _batch(reader: Reader, whole: Setting[Any]) -> SettingsByPath:
    micro, length = reader.take("micro-batch-size"), reader.take("seq-length")
    settings = only_from_file(
        {"batch.micro_batch": micro, "batch.sequence_length": length, "batch.global_batch": whole}
    )
    return settings if whole.value else {**settings, "batch.accumulation": Setting(1, "default")}


def _optimizer(reader: Reader) -> SettingsByPath:
    word = reader.take("optimizer")
    name = OPTIMIZERS.get(word.value, word.value)
    settings: SettingsByPath = {
        "optimizer.name": Setting(name, word.origin, word.key),
        "optimizer.weight_decay": reader.take("weight-decay"),
        "optimizer.decay": Setting("matrices", "default"),
        **only_from_file({"optimizer.lr": reader.take("lr")}),
    }
    settings |= _betas_and_eps(reader, OWNER_OF_BETAS.get(name, ""))
    momentum = reader.take("sgd-momentum")
    if name == "SGD":
        settings["optimizer.options"] = derived({"momentum": momentum.value}, momentum, origin=momentum.origin)
    else:
        _unused(reader, (momentum,), "the optimizer is not sgd")
    matrices = {key: reader.take(f"muon-{key}") for key in _OF_MATRICES}
    if name == "Muon":
        settings["optimizer.options"] = _muon(reader, settings.get("optimizer.lr"), matrices)
    else:
        _unused(reader, tuple(matrices.values()), "the optimizer is not muon")
    return settings


def _betas_and_eps(reader: Reader, owner: str) -> SettingsByPath:
    settings: SettingsByPath = {}
    eps = reader.take("adam-eps")
    for each in ("adam", "lion"):
        first, second = reader.take(f"{each}-beta1"), reader.take(f"{each}-beta2")
        if each == owner:
            origin: Any = "file" if "file" in (first.origin, second.origin) else "default"
            settings["optimizer.betas"] = derived((first.value, second.value), first, second, origin=origin)
        else:
            _unused(reader, (first, second), f"the optimizer is not {each}")
    if owner == "adam":
        return {**settings, "optimizer.eps": eps}
    _unused(reader, (eps,), "the optimizer is not adam")
    return settings


_OF_MATRICES = ("momentum", "nesterov", "num-ns-steps", "scale-mode", "extra-scale-factor")


def _muon(reader: Reader, rate: Setting[Any] | None, matrices: dict[str, Setting[Any]]) -> Setting[Any]:
    """The settings of matrices, in neutral words: their rate includes the factor that scales them."""
    momentum, nesterov, steps, mode, factor = matrices.values()
    _coefficients(reader)
    options = {"muon.momentum": momentum.value, "muon.nesterov": nesterov.value, "muon.ns_steps": steps.value}
    if mode.value not in ("match_rms_adamw", "original"):
        reader.keep(mode.key, "matrices are scaled by the root of rows over columns, also where that is below one")
        return derived(options, momentum, nesterov, steps, origin="file")
    options["muon.adjust_lr"] = mode.value
    scale = factor.value / (ADAMS_SHARE if mode.value == "match_rms_adamw" else 1.0)
    if rate is not None and scale != 1:
        options["muon.lr"] = float(f"{rate.value * scale:.12g}")
    elif scale != 1 and factor.origin == "file":
        reader.keep(factor.key, "as a rate of matrices it is known where lr is given")
    return derived(options, *matrices.values(), origin="file")


def _coefficients(reader: Reader) -> None:
    """The polynomial of the iterations: torch's is their simple, and each other one gives other updates."""
    key = "muon-coefficient-type"
    kind = reader.raw(key, KEYS[key].default)
    why = f"matrices are made orthogonal by the coefficients {kind} there, and by simple elsewhere"
    if key in reader:
        reader.keep(key, why, loss="harmless" if kind == "simple" else "lossy")
    elif kind != "simple":
        reader.mark("optimizer", "lossy", why)


def _unused(reader: Reader, settings: tuple[Setting[Any], ...], why: str) -> None:
    for setting in settings:
        if setting.origin == "file":
            reader.keep(setting.key, why, loss="harmless")


# -- schedule ------------------------------------------------------------------------------------------------------


def _schedule(reader: Reader, whole: Setting[Any]) -> SettingsByPath:
    name = reader.take("lr-decay-style")
    total = _steps(reader, whole, "train-iters", "train-samples")
    settings: SettingsByPath = {"schedule.name": name, **only_from_file({"schedule.total_steps": total})}
    settings |= _lowest(reader, name.value) | _final_decay(reader, whole, name.value)
    decay = _steps(reader, whole, "lr-decay-iters", "lr-decay-samples")
    if decay.value is not None:
        ends = decay.value == total.value or name.value == "constant"
        why = "the rate is at its lowest at the last step, wherever that is"
        reader.keep(
            decay.key.partition(", ")[0], "as long as the run" if ends else why, loss="harmless" if ends else "lossy"
        )
    settings |= _warmup(reader, whole, decay)
    warmup = settings.get("schedule.warmup_fraction") or settings["schedule.warmup_steps"]
    settings |= {"schedule.warmup_lag": derived(1, warmup), "schedule.decay_lag": derived(1, name)}
    return settings | _start(reader)


def _start(reader: Reader) -> SettingsByPath:
    """Where warm-up starts, of the peak."""
    rate, peak = reader.take("lr-warmup-init"), reader.take("lr").value
    if rate.value and not peak:
        reader.keep(rate.key, "of which peak it is a part, is not known: set lr")
        return {}
    return {"schedule.warmup_start": derived(rate.value / peak if peak else 0.0, rate, origin=rate.origin)}


def _steps(reader: Reader, whole: Setting[Any], key: str, in_samples: str) -> Setting[Any]:
    """A number of steps, also given in sequences."""
    steps, samples = reader.take(key), reader.take(in_samples)
    if steps.value or not samples.value:
        _unused(reader, (samples,), f"{key} says it" if steps.value else "it asks for nothing")
        return steps
    if whole.value:
        count = reader.quotient(samples, whole)
        return steps if count.value is None else Setting(count.value, "file", samples.key)
    reader.keep(in_samples, "in steps it is known where global-batch-size is given")
    return steps


def _lowest(reader: Reader, name: str) -> SettingsByPath:
    """The rate at the end, as a share of the peak."""
    least, peak = reader.take("min-lr"), KEYS["lr"].type.parse(reader.raw("lr"))
    peak = 0 if peak is MISSING else peak
    if name == "constant":
        _unused(reader, (least,), "the rate is constant")
        return {}
    if least.value and not peak:
        reader.keep("min-lr", "as a share of the peak it is known where lr is given")
        return {}
    if least.value > peak > 0:
        reader.refuse("min-lr", f"it is above the peak, lr {peak:g}")
        return {}
    share = least.value / peak if peak else 0.0
    return {"schedule.final_fraction": derived(share, least, origin=least.origin)}


def _final_decay(reader: Reader, whole: Setting[Any], name: str) -> SettingsByPath:
    style = reader.take("lr-wsd-decay-style")
    steps = _steps(reader, whole, "lr-wsd-decay-iters", "lr-wsd-decay-samples")
    if name != "wsd":
        _unused(reader, (style, steps), "the schedule is not WSD")
        return {}
    return {"schedule.decay_shape": style, **only_from_file({"schedule.decay_steps": steps})}


def _warmup(reader: Reader, whole: Setting[Any], decay: Setting[Any]) -> SettingsByPath:
    share = reader.take("lr-warmup-fraction")
    steps = _steps(reader, whole, "lr-warmup-iters", "lr-warmup-samples")
    if not share.value:
        _unused(reader, (share,), "it asks for nothing")
        return {"schedule.warmup_steps": steps}
    _unused(reader, (steps,), "lr-warmup-fraction says it")
    if decay.value is not None:
        return {"schedule.warmup_steps": derived(round(share.value * decay.value), share, origin="file")}
    return {"schedule.warmup_fraction": share}


# -- activations, checkpoints --------------------------------------------------------------------------------------


def _activations(reader: Reader) -> SettingsByPath:
    path = "activation_checkpointing.mode"
    short, kind = reader.take("recompute-activations"), reader.take("recompute-granularity")
    way, count = reader.take("recompute-method"), reader.take("recompute-num-layers")
    if short.value:
        _unused(reader, (kind, way, count), "recompute-activations says selective")
        return {path: Setting("selective", "file", short.key)}
    _unused(reader, (short,), "it asks for nothing")
    if kind.value != "full":
        _unused(reader, (way, count), "recompute-granularity is not full")
        return {path: Setting(kind.value or "none", kind.origin, kind.key)}
    _unused(reader, (way,), "which layers are computed again")
    if count.origin == "file":
        first = way.value == "block"
        why = (
            "those layers of a stage alone are computed again"
            if first
            else "of so many layers the first one's inputs are kept"
        )
        same = count.value == 1 and not first
        reader.keep(
            count.key,
            "each layer" if same else f"{why} there, and each block's here",
            loss="harmless" if same else "lossy",
        )
    return {path: kind}


def _saving(reader: Reader) -> SettingsByPath:
    """What is written every so many steps, and at the end; nothing without a folder."""
    folder, every, kind = (reader.take(key) for key in ("save", "save-interval", "ckpt-format"))
    if folder.value is None:
        _unused(reader, (every,), "without --save nothing is written")
        every = Setting(None, "default")
    return {
        "saving.when": derived("never" if folder.value is None else "steps", folder, every, origin=folder.origin),
        **only_from_file({"saving.folder": folder, "saving.every": every}),
        "saving.state": kind,
        "saving.background": reader.take("async-save"),
    }
