"""Reading batch sizes, optimizer, schedule, clipping, activation checkpointing and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.keys import BOOLEAN, number
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.deepspeed.deepspeed_reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.keys import BUILT_IN, INTERVAL, OPTIMIZER_PARAMS, argument_default
from terrazzo.dialects.formats.deepspeed.versions import REMOVED_OPTIMIZERS
from terrazzo.dialects.formats.shared.class_defaults import class_defaults
from terrazzo.documents.dotted_keys import split
from terrazzo.messages import did_you_mean

__all__ = ["read_batch", "read_optimizer", "read_training"]

_MISTAKEN = {"deepspeedcpuadam": "AdamW", "fusedadam": "AdamW", "cpuadam": "AdamW", "deepspeedcpuadagrad": "Adagrad"}
_PARAMS = "optimizer.params"
_FOR_ADAM = ("adam_w_mode", "fp32_optimizer_states")  # read elsewhere where they have an effect

_OWNER = "DeepSpeed's engine divides the loss by it and steps by itself: the loop does not"


# -- batch ---------------------------------------------------------------------------------------------------------


def read_batch(reader: DeepSpeedReader, apart: int) -> SettingsByPath:
    """Two of three sizes give the third, as far as the number of ranks is known.

    Args:
        reader: of the document.
        apart: ranks that see the same data (tensor, pipeline and sequence parallel).
    """
    total = reader.take("train_batch_size")
    micro = reader.take("train_micro_batch_size_per_gpu")
    steps = reader.take("gradient_accumulation_steps")
    if steps.origin == "file" and steps.value:
        reader.mark(steps.key, "applied", _OWNER)
    world = reader.context.world
    ranks = None if world is None else max(1, world // apart)
    open_ended = any(each.origin == "auto" and each.value is None for each in (total, micro, steps))
    if not open_ended:
        total, micro, steps = _complete(total, micro, steps, ranks)
    settings = {"batch.global_batch": total, "batch.micro_batch": micro, "batch.accumulation": steps}
    return {path: each for path, each in settings.items() if each.value is not None or each.origin == "auto"}


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


def read_optimizer(reader: DeepSpeedReader) -> SettingsByPath:
    """The optimizer that the engine builds; nothing where the code passes one."""
    name = reader.take("optimizer.type")
    if name.value is None:
        return {}
    known = _name(reader, name)
    if known.value is None:
        for key in [key for key in reader.unread() if key.startswith(f"{_PARAMS}.")]:
            reader.refuse(key, "it goes with the optimizer, which there is not")
        return {}
    built_in = str(name.value).lower() in BUILT_IN or known.value != name.value
    settings: SettingsByPath = {"optimizer.name": known, **_numbers(reader, str(known.value), built_in)}
    decay = settings.get("optimizer.weight_decay", known)
    settings["optimizer.decay"] = derived("all", decay)  # one group of all that the code passes
    matrices = _of_matrices(reader, settings) if known.value == "Muon" else {}
    options = _options(reader, str(known.value), built_in)
    options = Setting({**options.value, **matrices}, options.origin, options.key)
    return settings | ({"optimizer.options": options} if options.value else {})


def _name(reader: DeepSpeedReader, name: Setting[str]) -> Setting[Any]:
    """The name as in torch.optim; None for one that there is not."""
    word = str(name.value).lower()
    if word in REMOVED_OPTIMIZERS:
        reader.refuse(name.key, REMOVED_OPTIMIZERS[word].in_words(reader.version))
        return Setting(None, "default")
    if word in BUILT_IN:
        return _adam(reader, name) if word == "adam" else Setting(BUILT_IN[word], "file", name.key)
    if word in _MISTAKEN:
        reader.mark(name.key, "renamed", "it is a class, not a type: DeepSpeed picks it for 'AdamW' with offload")
        return Setting(_MISTAKEN[word], "file", name.key)
    if isinstance(vars(torch.optim).get(name.value), type):
        return name
    known = [*BUILT_IN.values(), "Adam", "SGD", "Adafactor", "RMSprop"]
    reader.refuse(name.key, f"neither DeepSpeed nor torch.optim has it.{did_you_mean(name.value, known)}")
    return Setting(None, "default")


def _adam(reader: DeepSpeedReader, name: Setting[str]) -> Setting[Any]:
    """Type "Adam" decouples its weight decay, as AdamW does, unless adam_w_mode is false."""
    decoupled = reader.take(f"{_PARAMS}.adam_w_mode")
    if decoupled.value:
        reader.mark(name.key, "applied", "DeepSpeed's Adam is AdamW unless adam_w_mode is false")
    return Setting("AdamW" if decoupled.value else "Adam", "file", ", ".join((*name.keys, *decoupled.keys)))


def _numbers(reader: DeepSpeedReader, name: str, built_in: bool) -> SettingsByPath:
    """Rates and factors. DeepSpeed's own classes have their defaults; torch's keep theirs."""
    settings: SettingsByPath = {}
    by_torch = BOOLEAN.parse(reader.raw(f"{_PARAMS}.torch_adam")) is True
    for argument in ("lr", "eps", "weight_decay", "betas"):
        key = f"{_PARAMS}.{argument}"
        each = _betas(reader, key) if argument == "betas" else reader.take_as(key, number())
        if each.origin == "default" and built_in:
            each = Setting(argument_default(name, argument, by_torch=by_torch), "default", each.key)
        elif each.origin == "default":
            each = class_defaults(name).get(f"optimizer.{argument}", Setting(None, "default"))
        if each.value is not None or each.origin == "auto":
            settings[f"optimizer.{argument}"] = each
    return settings


def _of_matrices(reader: DeepSpeedReader, settings: SettingsByPath) -> dict[str, Any]:
    """What Muon takes for matrices, in neutral words; `settings` then has the rate of the rest.

    DeepSpeed's scales a matrix by the root of rows over columns, with Nesterov's momentum and five iterations.
    """
    rate, own, others = (reader.take_as(f"{_PARAMS}.{key}", number()) for key in ("lr", "muon_lr", "adam_lr"))
    momentum = reader.take_as(f"{_PARAMS}.momentum", number())
    for each in (own, others, momentum):
        if each.origin == "file":
            reader.keep(each.key, "said of matrices and of the rest", loss="harmless")
    if others.origin == "file":
        if rate.origin == "file":
            reader.keep(rate.key, "each side has a rate of its own", loss="harmless")
        settings["optimizer.lr"] = others
    options = {"muon.adjust_lr": "original"}
    lr = own.value if own.value is not None else rate.value if rate.value is not None else _MATRIX_LR
    return {**options, "muon.lr": lr, **({} if momentum.value is None else {"muon.momentum": momentum.value})}


_MATRIX_LR = 0.02


def _betas(reader: DeepSpeedReader, key: str) -> Setting[Any]:
    """Two numbers from 0 to 1."""
    setting = reader.take(key)
    if setting.value is None or setting.origin == "default":
        return setting
    numbers = setting.value if isinstance(setting.value, Sequence) and not isinstance(setting.value, str) else ()
    if len(numbers) != 2 or not all(type(each) in (int, float) and 0 <= each < 1 for each in numbers):
        reader.refuse(key, f"it is {found(setting.value)}, expected two numbers from 0 to 1")
        return Setting(None, "default", key)
    return Setting((float(numbers[0]), float(numbers[1])), setting.origin, key)


def _options(reader: DeepSpeedReader, name: str, built_in: bool) -> Setting[Any]:
    """What is left of the arguments. Those of DeepSpeed's own optimizers are checked by name."""
    options: dict[str, Any] = {}
    keys: list[str] = []
    for key in [key for key in reader.unread() if key.startswith(f"{_PARAMS}.")]:
        argument = split(key)[-1]
        row = OPTIMIZER_PARAMS.get(argument)
        if argument == "max_grad_norm":
            reader.refuse(key, "DeepSpeed refuses it there: use gradient_clipping at the top")
        elif built_in and row is None:
            reader.refuse(key, f"{name} takes no such argument.{did_you_mean(argument, OPTIMIZER_PARAMS)}")
        elif row is None or not (row.loss or argument in _FOR_ADAM):
            raw = reader.flat[key]
            options[argument] = raw if row is None or raw is None else reader.take(key).value
            keys.append(key)
            reader.mark(key, "applied")
    return Setting(options, "file", ", ".join(keys))


# -- the loop ------------------------------------------------------------------------------------------------------


def read_training(reader: DeepSpeedReader) -> SettingsByPath:
    """Clipping, compilation, and where saved activations lie."""
    clip = reader.take("gradient_clipping")
    if clip.origin == "file":
        reader.mark(clip.key, "applied", "the engine clips within its step; clip_grad_norm_ there only reports")
    settings: SettingsByPath = {
        "training.clip": Setting(clip.value or None, clip.origin, clip.key),
        "training.compile": reader.take("compile.deepcompile"),
    }
    settings |= _not_finite(reader)
    cpu = reader.take_as("activation_checkpointing.cpu_checkpointing", BOOLEAN)
    settings |= {"activation_checkpointing.offload": cpu} if cpu.value is not None else {}
    return settings | _checkpointed_layers(reader)


def _not_finite(reader: DeepSpeedReader) -> SettingsByPath:
    """What becomes of a step whose gradients are not finite: in fp16 the loss scale decides, and in bf16 a key."""
    leaves_out = reader.take("bf16.check_grad_overflow")
    if reader.take("bf16.enabled").value:
        word = "skip" if leaves_out.value else "go_on"
        return {"training.nonfinite": Setting(word, leaves_out.origin, leaves_out.key)}
    if leaves_out.origin == "file":
        reader.keep(leaves_out.key, "bf16 is off", loss="harmless")
    return {}


def _checkpointed_layers(reader: DeepSpeedReader) -> SettingsByPath:
    """Activation checkpoints of a pipeline's layers, of so many at once."""
    layers = reader.take(INTERVAL)
    if layers.origin != "file":
        return {}
    if layers.value > 1:
        why = f"one in {layers.value} layers has its inputs kept there, and each block here"
        reader.mark(INTERVAL, "lossy", why)
    return {"activation_checkpointing.mode": derived("full" if layers.value else "none", layers, origin="file")}
