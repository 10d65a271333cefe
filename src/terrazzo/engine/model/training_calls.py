"""What training loops call on a sharded model: `tz.accumulate`, `tz.clip_grad_norm_` and `tz.gathered`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from terrazzo.engine.model.engine import engine_of
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_number

__all__ = ["accumulate", "clip_grad_norm_", "gathered"]


@contextlib.contextmanager
def accumulate(model: nn.Module, *, local: bool | None = None) -> Iterator[None]:
    """Backward passes inside belong to micro-batches that are not the step's last.

    Args:
        local: add their gradients on this rank and send nothing (fewer bytes), or reduce each micro-batch to the plan's
            `grad` place (less memory). By default local where the plan does not split `grad`, else reduced.

    Raises:
        BadInput: `local=False` under a plan that keeps whole gradients, or another `local`.
    """
    if not isinstance(local, bool | None):
        raise BadInput(
            f"tz.accumulate(local={local!r}): give True to add gradients on each rank, False to reduce each "
            "micro-batch, or leave 'local' out."
        )
    engine = engine_of(model)
    before = engine.schedule.fate
    engine.schedule.set_fate(engine.sharding.fate_of(last=False, local=local))
    try:
        yield
    finally:
        engine.schedule.set_fate(before)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of all ranks by their global norm, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Call it on every rank, after the last micro-batch's backward. It takes all gradients of the model, whatever
    optimizers there are; `torch.nn.utils.clip_grad_norm_` takes those of the parameters that it is given.

    Args:
        max_norm: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`; 0 makes them 0.
        norm_type: p of the p-norm; `float("inf")` for the maximum.
        error_if_nonfinite: raise `Diverged`, and scale nothing, where the norm is infinite or not a number.

    Returns:
        The norm before clipping, 0-d and equal on all ranks: in fp32, or in fp64 where gradients are kept in that.
    """
    engine = engine_of(model)
    numbers: list[Any] = [max_norm, norm_type]
    single = [each.numel() == 1 if isinstance(each, Tensor) else is_number(each) for each in numbers]
    if not (all(single) and float(max_norm) >= 0 and float(norm_type) > 0):
        raise BadInput(
            f"clip_grad_norm_ with max_norm {max_norm!r} and norm_type {norm_type!r}: give numbers, the first 0 or "
            "more and the second positive; float('inf') as norm_type takes the maximum."
        )
    return engine.gradients.clip(max_norm, float(norm_type), error_if_nonfinite)


@contextlib.contextmanager
def gathered(model: nn.Module, *, write: bool | Literal["first rank"] = False) -> Iterator[dict[str, Tensor]]:
    """Full parameters on every rank, by original name; call it on every rank. Of those that ranks along `tp` share,
    each rank has its own part. They come in the order of `model.parameters()`, and after all of them again those that
    have further names.

    Args:
        write: take over what was written into them, which must be the same on every rank; or, by "first rank", what the
            first rank wrote, on all. Master weights change only where the value read from them was changed.

    Where the plan keeps weights whole, they are ordinary parameters: what is written stays, also without `write`, and
    also if the body raises. Where it splits them, writing without `write` is refused; what was written is lost then,
    and if the body raises.

    Inside, the model may run and train; parameters have the values of now. What is kept of them for longer, such as
    `p.detach()`, `p.detach().numpy()` or a slice, has those of the block's end; where the plan splits weights, it
    also keeps the memory of the parameter's whole unit, and writing into it then is refused. `clone()` needs no more
    than the parameter. `state_dict()`, of the model and of modules inside it, gives copies.

    Raises:
        BadInput: for another `write`.
        Misuse: at the end, for what was written without `write` under a plan that splits weights; with `write` there,
            for a forward inside. For "first rank" within a round of `DiLoCo`, where `True` is of a replica alone.
        RanksApart: at the end, on every rank, where ranks have written different values; nothing is taken over then.
    """
    if not (isinstance(write, bool) or write == "first rank"):
        raise BadInput(f"tz.gathered(write={write!r}): give True, False, or 'first rank' to take what that one writes.")
    with engine_of(model).gathered(write) as parameters:
        yield parameters
