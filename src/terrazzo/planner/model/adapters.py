"""A model of which not all is trained: LoRA adapters of `peft` on a frozen base, and tensors frozen by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.name_globs import matches_any, matches_one
from terrazzo.planner.caching import once
from terrazzo.planner.model.closed_form import merged
from terrazzo.planner.model.shapes import ModelShape, TensorShape, UnitShape

__all__ = ["ALL_LINEAR", "adapter_rank", "globs", "trained", "with_adapters", "with_ends", "with_frozen"]

ALL_LINEAR = "all-linear"
"""All linear layers but the head."""
DEFAULT_RANK = 16


class Training(Protocol):
    """What a request says of what is trained."""

    @property
    def lora(self) -> int | None: ...
    @property
    def qlora(self) -> bool: ...
    @property
    def freeze(self) -> str | Sequence[str] | None: ...


def adapter_rank(training: Training) -> int | None:
    """The rank of adapters; None without."""
    return DEFAULT_RANK if training.lora is None and training.qlora else training.lora


def trained(training: Training, shape: ModelShape) -> ModelShape:
    """The model with the adapters and the frozen tensors that a request asks for.

    Raises:
        BadInput: for a bare number of parameters, as `with_frozen`, and for patterns of what adapters freeze anyway.
    """
    adapters, patterns = adapter_rank(training), globs(training.freeze)
    if shape.bare and (adapters is not None or patterns):
        raise BadInput("lora and freeze are of matrices by name, which a number of parameters has not: name a model.")
    shape = shape if adapters is None else with_adapters(shape, adapters)
    if not patterns:
        return with_ends(shape)
    frozen = with_frozen(shape, patterns)
    if adapters is not None and frozen.trainable_numel == shape.trainable_numel:
        raise BadInput(
            f"freeze: {', '.join(patterns)} name no adapter, and all else is frozen beside adapters (lora, qlora). "
            "Leave freeze out."
        )
    return with_ends(frozen)


def globs(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Each pattern by itself, also of one text with commas."""
    parts = patterns.split(",") if isinstance(patterns, str) else patterns or ()
    return tuple(part.strip() for part in parts if part.strip())


@once
def with_adapters(
    shape: ModelShape, rank: int, targets: tuple[str, ...] | str = ALL_LINEAR, bias: str = "none"
) -> ModelShape:
    """The model with all tensors frozen, and two small ones beside each target.

    Args:
        targets: names of linear layers, as peft takes them.
        bias: `none`, `all`, or `lora_only`: biases that are trained too.

    Raises:
        BadInput: a target that no matrix of the model's blocks has.
    """
    modules = {_module_of(tensor) for unit in shape.units for tensor in unit.tensors if _targetable(tensor)}
    for target in () if targets == ALL_LINEAR else targets:
        if not any(_hits(target, module) for module in modules):
            known = sorted({module.rpartition(".")[2] for module in modules})
            raise BadInput(
                f"lora.target_modules names {target!r}, which no linear layer of the model is called."
                f"{did_you_mean(target, known)} They are {', '.join(known)}; '{ALL_LINEAR}' means all of them."
            )
    return replace(shape, units=tuple(_adapted(unit, rank, targets, bias) for unit in shape.units))


def _adapted(unit: UnitShape, rank: int, targets: tuple[str, ...] | str, bias: str) -> UnitShape:
    chosen = {_module_of(tensor) for tensor in unit.tensors if _is_target(tensor, targets)}
    tensors: list[TensorShape] = []
    for tensor in unit.tensors:
        module, leaf = _module_of(tensor), tensor.name.rpartition(".")[2]
        learns = leaf == "bias" and (bias == "all" or (bias == "lora_only" and module in chosen))
        tensors.append(replace(tensor, trainable=learns))
        if module in chosen and leaf == "weight":
            out, inner = tensor.shape
            tensors.append(TensorShape(f"{module}.lora_A.default.weight", (rank, inner)))
            tensors.append(TensorShape(f"{module}.lora_B.default.weight", (out, rank)))
    return replace(unit, tensors=tuple(tensors))


def _is_target(tensor: TensorShape, targets: tuple[str, ...] | str) -> bool:
    if not _targetable(tensor):
        return False
    if targets == ALL_LINEAR:
        return tensor.role != "head"
    return any(_hits(target, _module_of(tensor)) for target in targets)


def _module_of(tensor: TensorShape) -> str:
    """The name of the module that holds it."""
    return tensor.name.rpartition(".")[0]


def _hits(target: str, module: str) -> bool:
    """Whether peft takes the module for `target`: by its whole name or the end of it."""
    return module == target or module.endswith(f".{target}")


def _targetable(tensor: TensorShape) -> bool:
    """Whether it is the matrix of a linear layer."""
    return len(tensor.shape) == 2 and tensor.role in ("matrix", "router", "head") and tensor.name.endswith(".weight")


@once
def with_frozen(shape: ModelShape, patterns: tuple[str, ...]) -> ModelShape:
    """The model with the tensors frozen whose names match any of these globs, `*` over dots too, as in `model.embed*`.

    Raises:
        BadInput: a pattern that matches nothing, or patterns that leave nothing to train.
    """
    names = [name for unit in _apart(shape) for name in _names(unit)]
    for pattern in patterns:
        if not matches_one(names, pattern):
            raise BadInput(
                f"freeze: {pattern!r} matches no parameter of {shape.name}.{did_you_mean(pattern, names)} Give a glob "
                f"over their names, such as '{names[0].partition('.')[0]}.*'."
            )
    frozen = _each(shape, lambda name: matches_any(name, patterns))
    if not frozen.trainable_numel:
        raise BadInput(f"freeze: {', '.join(patterns)} leave nothing of {shape.name} to train. Freeze less.")
    return frozen


@once
def with_ends(shape: ModelShape) -> ModelShape:
    """The model with its `forward_only` blocks marked: the first ones, as far as they and what is before train nothing.

    Where something in front of the blocks is trained there are none. Tensors of no block are behind the blocks if they
    are the head's, or a norm's without `embed` in its name, else in front.
    """
    if any(tensor.trainable and not _is_behind(tensor) for tensor in shape.root.tensors):
        return shape
    silent = len([*takewhile(lambda unit: not any(tensor.trainable for tensor in unit.tensors), shape.repeated)])
    units = (replace(unit, forward_only=index < silent) for index, unit in enumerate(shape.repeated))
    return replace(shape, units=(shape.root, *units)) if silent else shape


def _is_behind(tensor: TensorShape) -> bool:
    """Whether a tensor of no block is used behind all of them."""
    is_norm = tensor.role == "vector" and not tensor.is_table and ("norm" in tensor.name or "ln_" in tensor.name)
    return tensor.role == "head" or (is_norm and "embed" not in tensor.name)


def _each(shape: ModelShape, freezes: Callable[[str], bool]) -> ModelShape:
    units = [
        replace(
            unit,
            tensors=tuple(
                replace(tensor, trainable=tensor.trainable and not freezes(name))
                for tensor, name in zip(unit.tensors, _names(unit), strict=True)
            ),
        )
        for unit in _apart(shape)
    ]
    return replace(shape, units=(units[0], *merged(units[1:])))


def _apart(shape: ModelShape) -> list[UnitShape]:
    """Units that are counted in a row, each by itself."""
    apart = []
    for unit in shape.units:
        prefix, _, number = unit.name.rpartition(".")
        places = [f"{prefix}.{int(number) + index}" if number.isdecimal() else unit.name for index in range(unit.count)]
        apart += [replace(unit, name=place, count=1) for place in places]
    return apart


def _names(unit: UnitShape) -> Sequence[str]:
    return [f"{unit.name}.{tensor.name}" if unit.name else tensor.name for tensor in unit.tensors]
