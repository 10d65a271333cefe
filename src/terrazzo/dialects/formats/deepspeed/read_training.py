"""Reading batch sizes, optimizer, schedule, clipping, activation checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.dialects.core.description import Setting, SettingsByKey
from terrazzo.dialects.core.reader import derived, split
from terrazzo.dialects.formats.deepspeed.keys import OPTIMIZER_DEFAULTS, OPTIMIZER_PARAMS
from terrazzo.dialects.formats.deepspeed.reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.versions import REMOVED_OPTIMIZERS
from terrazzo.errors import did_you_mean

__all__ = ["BUILT_IN", "INTERVAL", "read_batch", "read_optimizer", "read_training"]

BUILT_IN = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
}
"""The optimizers that DeepSpeed builds itself, by their names in lower case. Its Adam is AdamW unless told."""
_MISTAKEN = {"deepspeedcpuadam": "AdamW", "fusedadam": "AdamW", "cpuadam": "AdamW", "deepspeedcpuadagrad": "Adagrad"}
_PARAMS = "optimizer.params"
INTERVAL = "pipeline.activation_checkpoint_interval"
_FOR_ADAM = ("adam_w_mode", "fp32_optimizer_states")  # read elsewhere where they have an effect

_OWNER = "DeepSpeed's engine divides the loss by it and steps by itself: the loop does not"


# -- batch ---------------------------------------------------------------------------------------------------------


def read_batch(source: DeepSpeedReader, apart: int) -> SettingsByKey:
    """Two of three sizes give the third, as far as the number of ranks is known.

    Args:
        source: the document.
        apart: ranks that see the same data (tensor, pipeline and sequence parallel).
    """
    total = source.take("train_batch_size")
    micro = source.take("train_micro_batch_size_per_gpu")
    steps = source.take("gradient_accumulation_steps")
    if steps.origin == "file" and steps.value:
        source.say(steps.key, "applied", _OWNER)
    world = source.context.world
    ranks = None if world is None else max(1, world // apart)
    open_ended = any(each.origin == "auto" and each.value is None for each in (total, micro, steps))
    if not open_ended:
        total, micro, steps = _complete(total, micro, steps, ranks)
    found = {"batch.global_batch": total, "batch.micro_batch": micro, "batch.accumulation": steps}
    return {path: each for path, each in found.items() if each.value is not None or each.origin == "auto"}


def _complete(
    total: Setting[Any], micro: Setting[Any], steps: Setting[Any], ranks: int | None
) -> tuple[Setting[Any], Setting[Any], Setting[Any]]:
    """DeepSpeed's arithmetic: whole divisions, and accumulation 1 where only one size is given."""
    if steps.value is None and (total.value is None) != (micro.value is None):
        steps = Setting(1, "derived")
    if total.value and micro.value and steps.value is None and ranks:
        steps = derived(max(1, total.value // micro.value // ranks), total, micro)
    if total.value and steps.value and micro.value is None and ranks:
        micro = derived(max(1, total.value // ranks // steps.value), total, steps)
    if micro.value and steps.value and total.value is None and ranks:
        total = derived(micro.value * steps.value * ranks, micro, steps)
    return total, micro, steps


# -- optimizer -----------------------------------------------------------------------------------------------------


def read_optimizer(source: DeepSpeedReader) -> SettingsByKey:
    """The optimizer that the engine builds; nothing where the code passes one."""
    name = source.take("optimizer.type")
    if name.value is None:
        return {}
    known = _name(source, name)
    if known.value is None:
        for key in [key for key in source.unread() if key.startswith(f"{_PARAMS}.")]:
            source.refuse(key, "it goes with the optimizer, which there is not")
        return {}
    built_in = str(name.value).lower() in BUILT_IN or known.value != name.value
    given: SettingsByKey = {"optimizer.name": known, **_numbers(source, str(known.value), built_in)}
    matrices = _of_matrices(source, given) if known.value == "Muon" else {}
    options = _options(source, str(known.value), built_in)
    options = Setting({**options.value, **matrices}, options.origin, options.key)
    return given | ({"optimizer.options": options} if options.value else {})


def _name(source: DeepSpeedReader, name: Setting[str]) -> Setting[Any]:
    """The name as in torch.optim; None for one that there is not."""
    word = str(name.value).lower()
    if word in REMOVED_OPTIMIZERS:
        source.refuse(name.key, REMOVED_OPTIMIZERS[word].in_words(source.version))
        return Setting(None, "default")
    if word in BUILT_IN:
        return _adam(source, name) if word == "adam" else _spelt(source, name, BUILT_IN[word])
    if word in _MISTAKEN:
        source.say(name.key, "renamed", "it is a class, not a type: DeepSpeed picks it for 'AdamW' with offload")
        return Setting(_MISTAKEN[word], "file", name.key)
    if isinstance(vars(torch.optim).get(name.value), type):
        return name
    known = [*BUILT_IN.values(), "Adam", "SGD", "Adafactor", "RMSprop"]
    source.refuse(name.key, f"neither DeepSpeed nor torch.optim has it.{did_you_mean(name.value, known)}")
    return Setting(None, "default")


def _adam(source: DeepSpeedReader, name: Setting[str]) -> Setting[Any]:
    """Type "Adam" decouples its weight decay, as AdamW does, unless adam_w_mode is false."""
    decoupled = source.take(f"{_PARAMS}.adam_w_mode")
    if decoupled.value:
        source.say(name.key, "applied", "DeepSpeed's Adam is AdamW unless adam_w_mode is false")
        source.keep_as(name.key, name.value, "DeepSpeed's other word for AdamW")
        if decoupled.origin == "file":
            source.keep_as(decoupled.key, True, "the default")
    elif name.value != "Adam":
        source.keep_as(name.key, name.value, "another spelling")
    return Setting("AdamW" if decoupled.value else "Adam", "file", ", ".join((*name.keys, *decoupled.keys)))


def _spelt(source: DeepSpeedReader, name: Setting[str], known: str) -> Setting[Any]:
    if name.value != known:
        source.keep_as(name.key, name.value, "another spelling")
    return Setting(known, "file", name.key)


def _numbers(source: DeepSpeedReader, name: str, built_in: bool) -> SettingsByKey:
    """Rates and factors. DeepSpeed's own classes have their defaults; torch's keep theirs."""
    found: SettingsByKey = {}
    for argument in ("lr", "eps", "weight_decay", "betas"):
        key = f"{_PARAMS}.{argument}"
        each = _betas(source, key) if argument == "betas" else source.number(key, None)
        if each.origin == "default":
            usual = OPTIMIZER_DEFAULTS.get(name, {}).get(argument, OPTIMIZER_PARAMS[argument].default)
            each = Setting(usual if built_in else None, "default", each.key)
        if each.value is not None or each.origin == "auto":
            found[f"optimizer.{argument}"] = each
    return found


def _of_matrices(source: DeepSpeedReader, given: SettingsByKey) -> dict[str, Any]:
    """What Muon takes for matrices, in neutral words; `given` then has the rate of the rest.

    DeepSpeed's scales a matrix by the root of rows over columns, with Nesterov's momentum and five iterations.
    """
    rate, own, others = (source.number(f"{_PARAMS}.{key}", None) for key in ("lr", "muon_lr", "adam_lr"))
    momentum = source.number(f"{_PARAMS}.momentum", None)
    for each in (own, others, momentum):
        if each.origin == "file":
            source.keep(each.key, "said of matrices and of the rest", loss="harmless")
    if others.origin == "file":
        if rate.origin == "file":
            source.keep(rate.key, "each side has a rate of its own", loss="harmless")
        given["optimizer.lr"] = others
    found = {"muon.adjust_lr": "original"}
    lr = own.value if own.value is not None else rate.value if rate.value is not None else _MATRIX_LR
    return {**found, "muon.lr": lr, **({} if momentum.value is None else {"muon.momentum": momentum.value})}


_MATRIX_LR = 0.02


def _betas(source: DeepSpeedReader, key: str) -> Setting[Any]:
    """Two numbers from 0 to 1."""
    found = source.take(key)
    if found.value is None or found.origin == "default":
        return found
    numbers = found.value if isinstance(found.value, Sequence) and not isinstance(found.value, str) else ()
    if len(numbers) != 2 or not all(type(each) in (int, float) and 0 <= each < 1 for each in numbers):
        source.refuse(key, f"it is {str(found.value)[:60]}, expected two numbers from 0 to 1")
        return Setting(None, "default", key)
    return Setting((float(numbers[0]), float(numbers[1])), found.origin, key)


def _options(source: DeepSpeedReader, name: str, built_in: bool) -> Setting[Any]:
    """What is left of the arguments. Those of DeepSpeed's own optimizers are checked by name."""
    options: dict[str, Any] = {}
    keys: list[str] = []
    for key in [key for key in source.unread() if key.startswith(f"{_PARAMS}.")]:
        argument = split(key)[-1]
        row = OPTIMIZER_PARAMS.get(argument)
        if argument == "max_grad_norm":
            source.refuse(key, "DeepSpeed refuses it there: use gradient_clipping at the top")
        elif built_in and row is None:
            source.refuse(key, f"{name} takes no such argument.{did_you_mean(argument, OPTIMIZER_PARAMS)}")
        elif row is None or not (row.keep or argument in _FOR_ADAM):
            options[argument] = source.flat[key]
            keys.append(key)
            source.say(key, "applied")
    return Setting(options, "file", ", ".join(keys))


# -- the loop ------------------------------------------------------------------------------------------------------


def read_training(source: DeepSpeedReader) -> SettingsByKey:
    """Clipping, compilation, and where saved activations lie."""
    clip = source.take("gradient_clipping")
    if clip.origin == "file":
        source.say(clip.key, "applied", "the engine clips within its step; clip_grad_norm_ there only reports")
    given: SettingsByKey = {
        "training.clip": Setting(clip.value or None, clip.origin, clip.key),
        "training.compile": source.take("compile.deepcompile"),
    }
    cpu = source.boolean("activation_checkpointing.cpu_checkpointing", None)
    given |= {"activation_checkpointing.offload": cpu} if cpu.value is not None else {}
    return given | _layers_kept(source)


def _layers_kept(source: DeepSpeedReader) -> SettingsByKey:
    """Activation checkpoints of a pipeline's layers, of so many at once."""
    layers = source.take(INTERVAL)
    if layers.origin != "file":
        return {}
    source.keep_as(INTERVAL, layers.value)
    if layers.value > 1:
        why = f"one in {layers.value} layers has its inputs kept there, and each block here"
        source.say(source.spelled(INTERVAL), "lossy", why)
    return {"activation_checkpointing.mode": derived("full" if layers.value else "none", layers, origin="file")}
