"""State dict of a sharded model, as the model would have it unsharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.engine.states.whole_tensors import collect_buffers, whole_weights

__all__ = ["shows_all", "whole_state_dict"]


def shows_all(model: nn.Module) -> bool:
    """Whether a state dict of the parameters as they are has all there is of the weights; the same on every rank.

    It has not where values are split over ranks, or cut along `tp` or `ep`, or in other stages, nor where 16 or
    8 bits are what is left of master weights. Inside `tz.gathered` parameters are what the user reads and writes there.
    """
    engine = engine_of(model)
    if engine.axes.stage_axis or any(engine.axes.cut_along(bucket.family) for bucket in engine.buckets()):
        return False
    return engine.blocks.is_open or all(bucket.spec.resident and not _is_rounded(bucket) for bucket in engine.buckets())


def _is_rounded(bucket: Bucket) -> bool:
    """Whether weights have less than the master weights."""
    spec = bucket.spec
    return spec.trainable and (spec.weight_dtype != spec.precision.exact_master or spec.update_wire.rounds)


def whole_state_dict(
    model: nn.Module, device: torch.device, *, keep: bool = True, **options: Any
) -> dict[str, Any] | None:
    """Return what `model.state_dict()` would be if the model were not sharded, in memory of its own. Collective.

    Memory: the result where it is kept; one unit on the mesh's device, whatever the size of the model.

    Args:
        device: where the result is.
        keep: whether this rank keeps it; None otherwise.
        options: of torch's `state_dict`, such as `prefix`.

    Returns:
        Full tensors under every name that the model's own `state_dict()` has, in its order. Trained weights are the
        master weights, in their dtype; frozen ones have the wider of their dtypes at rest and in modules; tied ones
        share memory. Buffers are this rank's own, or those of the stage that runs their modules.

    Raises:
        Misuse: for a model that is not sharded.
    """
    before = dict(options.get("destination") or {})  # what other calls have put there stays
    collect_buffers(model)
    with absent_in_place(model):
        state: dict[str, Any] = model.state_dict(**options, keep_vars=True)  # which asks no parameter for its values
        named = dict(model.named_parameters())
    whole: dict[int, Tensor] = {}
    for name, values in whole_weights(model):
        if keep:
            own = named[name]
            # frozen codes come as bf16, and weights that are computed with in 16 bits alone keep the bits at rest
            dtype = values.dtype if own.requires_grad else torch.promote_types(values.dtype, own.dtype)
            whole[id(own)] = values.to(device, dtype, copy=True)
    if not keep:
        return None
    for name, value in state.items():
        if isinstance(value, nn.Parameter) and id(value) in whole:
            state[name] = whole[id(value)]
        elif isinstance(value, Tensor) and value is not before.get(name):
            state[name] = value.detach().to(device, copy=True)
    return state
