"""Activation checkpointing of units: what their forwards keep for backward, and what runs again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from terrazzo.engine.offload.activations.offloaded_activations import OffloadedActivations
from terrazzo.engine.partition.asked_units import Units
from terrazzo.engine.unit_forwards.layered_forward import Forward, Layer, LayerRing, layers_of, surround, unit_modules
from terrazzo.errors import BadInput, Misuse
from terrazzo.given_numbers import is_count
from terrazzo.marks import is_sharded
from terrazzo.messages import did_you_mean
from terrazzo.words import CHECKPOINT_MODES

__all__ = ["checkpoint_activations", "offloading_of"]


SAVED_OPS = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "bmm",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
)
"""Default of `selective`: results worth keeping, because recomputing them costs more than their memory."""
ATTENTION = tuple(name for name in SAVED_OPS if "attention" in name)
PRODUCTS = ("mm", "addmm", "_scaled_mm")
"""Operators of which `selective_half` keeps the first of two results; of batched products none, of attention all."""


def checkpoint_activations(
    model: nn.Module,
    mode: str,
    *,
    units: Units | None = None,
    every: int = 1,
    ops: Sequence[str] | None = None,
    offload: bool = False,
) -> None:
    """Recompute units' activations in backward instead of keeping them. Call it before `tz.shard`.

    Args:
        mode: `none`; `full`, which keeps a unit's inputs alone; `selective`, which also keeps the results of `ops`;
            `selective_half`, which also keeps those of attention and of every second matrix product, the first one
            included, as torchtitan does.
        units: as for `tz.shard`.
        every: only the first of every so many units is treated; 1 for all.
        ops: names of aten operators such as `"mm"`, every overload of which is meant, for `selective`.
        offload: keep the units' inputs in host memory; see `offload.activations`.

    Raises:
        BadInput: an unknown mode, operator or count, an offload without checkpointing, `ops` in another mode than
            `selective`, no units, or units that are checkpointed already.
        Misuse: a model that is sharded.
    """
    if any(map(is_sharded, model.modules())):
        raise Misuse("checkpoint_activations came after tz.shard: call it before, on the model that is to be sharded.")
    if mode not in CHECKPOINT_MODES:
        raise BadInput(
            f"activation checkpointing {mode!r} does not exist.{did_you_mean(str(mode), CHECKPOINT_MODES)} Modes:"
            f" {', '.join(CHECKPOINT_MODES)}."
        )
    if not is_count(every):
        raise BadInput(f"activation checkpointing on every {every!r}th unit: the count must be an integer, 1 or more.")
    if ops is not None and (isinstance(ops, str) or not isinstance(ops, Sequence)):
        raise BadInput(f"activation checkpointing: ops is {ops!r}; give names of operators in a list, such as ['mm'].")
    if ops is not None and mode != "selective":
        raise BadInput(
            f"activation checkpointing: ops {list(ops)} are kept by the mode 'selective' alone, and the mode is "
            f"{mode!r}. Choose 'selective', or leave out ops."
        )
    if mode == "none":
        if offload:
            raise BadInput(
                "Activations can be offloaded from units that are checkpointed, and the mode is 'none': choose 'full', "
                "which leaves least on the device, or 'selective'."
            )
        return
    context: Callable[[], Any] | None = None
    if mode == "selective":
        context = functools.partial(_selective_contexts, SAVED_OPS if ops is None else _checked(ops))
    elif mode == "selective_half":
        context = _half_contexts
    layers = [_Recomputed(context, offload), *([_Offloaded(OffloadedActivations())] if offload else [])]
    modules = unit_modules(model, units, "checkpoint_activations")[::every]
    if twice := next((module for module in modules if _is_recomputed(module)), None):
        raise BadInput(
            f"checkpoint_activations came to a {type(twice).__name__} that is checkpointed already, and would run it "
            "three times. Call it once for each unit: leave this call out, or name other units in one of the two."
        )
    for module in modules:
        surround(module, *layers)


def offloading_of(model: nn.Module) -> set[OffloadedActivations]:
    """What takes inputs of a model's units to the host: one for each `checkpoint_activations` with an offload."""
    layers = (layer for module in model.modules() for layer in layers_of(module))
    return {layer.activations for layer in layers if isinstance(layer, _Offloaded)}


@dataclass(frozen=True, eq=False)
class _Offloaded(Layer):
    """What units keep of their inputs is kept in host memory. A copy of the model has calls of its own."""

    ring: ClassVar[LayerRing] = LayerRing.OFFLOADED
    activations: OffloadedActivations

    def __call__(self, forward: Forward) -> Forward:
        return self.activations.around(forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Offloaded:
        return _Offloaded(copy.deepcopy(self.activations, memo))


@dataclass(frozen=True, eq=False)
class _Recomputed(Layer):
    """Units run again in backward.

    Attributes:
        context: makes the contexts of a forward and of its repetition, which say what is kept; None keeps nothing.
        keeps_keywords: let autograd keep tensors given by keyword, like the others; torch would hold them itself.
    """

    ring: ClassVar[LayerRing] = LayerRing.RECOMPUTED
    context: Callable[[], Any] | None
    keeps_keywords: bool

    def __call__(self, forward: Forward) -> Forward:
        return _checkpointed(self.context, self.keeps_keywords, forward)


def _is_recomputed(module: nn.Module) -> bool:
    return any(layer.ring is LayerRing.RECOMPUTED for layer in layers_of(module))


def _checkpointed(context: Callable[[], Any] | None, keeps_keywords: bool, forward: Forward) -> Forward:
    """`forward`, run again in backward; arguments as of `_Recomputed`."""
    options: dict[str, Any] = {"use_reentrant": False}
    if context is not None:
        options["context_fn"] = context

    @functools.wraps(forward)
    def wrapped(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        bound = {name: kwargs.pop(name) for name in _OF_CHECKPOINT & kwargs.keys()}  # else torch would take them
        called = functools.partial(forward, module, **bound)
        if not keeps_keywords:
            return checkpoint(called, *args, **options, **kwargs)
        names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        tensors = [kwargs.pop(name) for name in names]
        run = functools.partial(_run, called, len(args), names)
        return checkpoint(run, *args, *tensors, **options, **kwargs)

    return wrapped


_OF_CHECKPOINT = {"use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug", "early_stop"}


def _run(forward: Forward, count: int, names: Sequence[str], /, *values: Any, **others: Any) -> Any:
    """`forward` of `count` positional values, and of further ones by `names`."""
    return forward(*values[:count], **dict(zip(names, values[count:], strict=True)), **others)


def _selective_contexts(ops: tuple[str, ...]) -> Any:
    """Contexts for one forward, and for that which repeats it."""
    saved = _overloads(ops)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _half_contexts() -> Any:
    """The same of `selective_half`: each counts its products by itself."""
    saved, products = _overloads(ATTENTION), _overloads(PRODUCTS)
    seen = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in products:
            seen[context.is_recompute] += 1
            keeps = seen[context.is_recompute] % 2 == 1
        else:
            keeps = op in saved
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    """Operators' variants: `a + b` calls `add.Tensor`, and `mm` has its `default` alone."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def _checked(ops: Sequence[str]) -> tuple[str, ...]:
    """Names of operators that there are.

    Raises:
        BadInput: for any other.
    """
    for name in ops:
        if not (isinstance(name, str) and hasattr(getattr(torch.ops.aten, name, None), "overloads")):
            raise BadInput(
                f"activation checkpointing: torch.ops.aten has no operator {str(name)!r}. Give names such as 'mm'."
            )
    return tuple(ops)
