"""Whether a plan of tensor parallelism fits a model, by what both return."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from terrazzo.engine.model.together import all_or_none
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.parallel.face import parallelize
from terrazzo.parallel.tensor.cut import TensorPlan
from terrazzo.parallel.tensor.ranks import TensorRanks, tensor_ranks

__all__ = ["check"]


@torch.no_grad()
def check(
    model: nn.Module,
    mesh: DeviceMesh,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    tensor: TensorPlan | Literal["auto"] = "auto",
    sequence: bool = True,
    tolerance: float = 1e-3,
) -> None:
    """Compare what a model returns, cut by a plan, with what it returns whole. Collective.

    For a plan of one's own, with a small model of the same modules: styles say what modules do, and nothing else can
    tell that a block of style `sequence` mixes tokens beside its attention, or that a matrix cut by columns feeds one
    that is not cut by rows. Two copies run, in evaluation mode; the model stays as it is.

    Args:
        model: whole, with weights, which are the same on every rank.
        mesh: of `tz.mesh`, with an axis `tp`.
        inputs: of one forward, by position or by name, the same on every rank along `tp`.
        tensor, sequence: as for `tz.parallelize`.
        tolerance: of the largest difference, as a share of the largest value that is returned whole.

    Raises:
        BadInput: on every rank along `tp`: both return other values; a model without weights; as of `tz.parallelize`.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise BadInput(
            "tz.parallel.check runs the model, whose weights are on the meta device: build a small one of the same "
            "modules on a real device for it."
        )
    whole, cut = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    parallelize(cut, mesh, tensor=tensor, sequence=sequence, context=None)
    ranks = tensor_ranks(mesh)
    wanted = tree_leaves(_called(whole, inputs))
    try:
        found = tree_leaves(_called(cut, inputs))
    except TerrazzoError:
        raise
    except Exception as error:
        raise BadInput(f"Cut by this plan, the model raises {type(error).__name__}: {error}, {_HELP}") from error
    pairs = [
        (one, _together(other, one, ranks)) for one, other in zip(wanted, found, strict=True) if isinstance(one, Tensor)
    ]
    all_or_none(ranks.axes, lambda: _compare(pairs, tolerance))


def _called(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _together(found: Any, wanted: Tensor, ranks: TensorRanks) -> Any:
    """Outputs that the plan leaves apart, such as logits by vocabulary, joined. Collective where they are."""
    if not isinstance(found, Tensor) or found.shape == wanted.shape or found.shape[:-1] != wanted.shape[:-1]:
        return found
    return ranks.join_channels(found, wanted.shape[-1])


def _compare(pairs: Sequence[tuple[Tensor, Any]], tolerance: float) -> None:
    for number, (wanted, found) in enumerate(pairs):
        if not isinstance(found, Tensor) or found.shape != wanted.shape:
            raise BadInput(f"Cut by this plan, the model returns a {_form(found)} as output {number}, {_HELP}")
        if not wanted.is_floating_point() and torch.equal(found, wanted):
            continue
        most, difference = wanted.double().abs().max(), (found.double() - wanted.double()).abs().max()
        if not difference <= tolerance * most:
            raise BadInput(
                f"Cut by this plan, the model returns other values as output {number}: they differ by up to "
                f"{difference.item():.2g}, of values up to {most.item():.2g}, {_HELP}"
            )


def _form(found: Any) -> str:
    return f"tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__


_HELP = (
    "and not what it returns whole. See which module does what its style does not say: one that mixes tokens beside "
    "attention (a mean over positions, a shift) may not be inside of style 'sequence', which sequence=False leaves "
    "out; what a matrix of style 'column' computes must go to one of style 'row', or take 'column_gathered'."
)
