"""Whether a plan of tensor parallelism fits a model, by what both return and by the gradients of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine import record_of
from terrazzo.engine.model.together import all_or_none
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, RanksApart, TerrazzoError
from terrazzo.parallel.input_fingerprints import described, inputs_in_number
from terrazzo.parallel.parallelize_model import parallelize
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks, tensor_ranks
from terrazzo.parallel.tensor.read_plan import TensorPlan

__all__ = ["check"]

T = TypeVar("T")


def check(
    model: nn.Module,
    mesh: DeviceMesh,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    tensor: TensorPlan | Literal["auto"] = "auto",
    sequence: bool = True,
    tolerance: float = 1e-3,
) -> None:
    """Compare what a model returns, cut by a plan, with what it returns whole, and its gradients. Collective.

    For a plan of one's own, with a small model of the same modules: styles say what modules do, and nothing else can
    tell that a block of style `sequence` mixes tokens beside its attention, or that a matrix cut by columns feeds one
    that is not cut by rows. Two copies run, in evaluation mode, forward and, where a parameter is trained, backward
    from numbers drawn at random; the model stays as it is.

    Args:
        model: whole, with weights, which are the same on every rank.
        mesh: of `tz.mesh`, with an axis `tp`.
        inputs: of one forward, by position or by name, the same on every rank along `tp`; sequences of a length that
            `tp` divides.
        tensor, sequence: as for `tz.parallelize`.
        tolerance: of the largest difference, as a share of the largest value that is returned whole; of a parameter's
            gradient as a share of its largest one, or of a thousandth of the model's.

    Raises:
        RanksApart: on every rank along `tp`: these were given other inputs.
        BadInput: on every rank along `tp`: both return other values, or have other gradients; a model without weights;
            as of `tz.parallelize`.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise BadInput(
            "tz.parallel.check runs the model, whose weights are on the meta device: build a small one of the same "
            "modules on a real device for it."
        )
    whole, cut = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    parallelize(cut, mesh, tensor=tensor, sequence=sequence, context=None)
    ranks = tensor_ranks(mesh)
    given = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
    if not ranks.equal(inputs_in_number(given)):
        raise RanksApart(
            f"tz.parallel.check was given other inputs on ranks along tp (here {described(given)}), and each computes "
            "a part of the same: give all of them the same, drawn from one seed."
        )
    with torch.set_grad_enabled(any(parameter.requires_grad for parameter in model.parameters())):
        wanted = tree_leaves(_called(whole, inputs))
        found = all_or_none(ranks.axes, lambda: _outputs_of(cut, inputs, len(wanted)))
        pairs = [
            (one, _together(other, one, ranks))
            for one, other in zip(wanted, found, strict=True)
            if isinstance(one, Tensor)
        ]
    all_or_none(ranks.axes, lambda: _compare(pairs, tolerance))
    probed = [(one, other) for one, other in pairs if one.requires_grad and one.is_floating_point()]
    if probed:
        _backward([one for one, _ in probed])
        all_or_none(ranks.axes, lambda: _tried(lambda: _backward([other for _, other in probed])))
        gradients = list(_gradients(whole, cut, ranks))
        all_or_none(ranks.axes, lambda: _compare_gradients(gradients, tolerance))


def _tried(action: Callable[[], T]) -> T:
    """What `action` returns, of the model that is cut."""
    try:
        return action()
    except TerrazzoError:
        raise
    except Exception as error:
        raise BadInput(
            f"Cut by this plan, the model raises {type(error).__name__}: {error}, and not so whole. {_HELP}"
        ) from error


def _outputs_of(cut: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], count: int) -> list[Any]:
    """What the model returns that is cut, as many outputs as it returns whole."""
    found = tree_leaves(_tried(lambda: _called(cut, inputs)))
    if len(found) != count:
        raise BadInput(f"Cut by this plan, the model returns {len(found)} outputs, and whole {count}. {_HELP}")
    return found


def _called(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _together(found: Any, wanted: Tensor, ranks: TensorRanks) -> Any:
    """Outputs that the plan leaves apart, such as logits by vocabulary, joined. Collective where they are."""
    if not isinstance(found, Tensor) or found.shape == wanted.shape or found.shape[:-1] != wanted.shape[:-1]:
        return found
    return ranks.join_channels(found, wanted.shape[-1])


def _backward(outputs: Sequence[Tensor]) -> None:
    """That of a sum of all outputs, each times a number drawn anew from one seed."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(each.shape, generator=generator) for each in outputs]
    grads = [each.to(output.device, output.dtype) for output, each in zip(outputs, drawn, strict=True)]
    torch.autograd.backward(list(outputs), grads)


def _gradients(whole: nn.Module, cut: nn.Module, ranks: TensorRanks) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each trained parameter its name, this rank's part of its gradient whole, and that cut. Collective."""
    for name, module in cut.named_modules():
        for attribute, own in module.named_parameters(recurse=False):
            record = record_of(module, attribute)
            parameter = getattr(whole.get_submodule(name), attribute)
            if record is None or not own.requires_grad:
                continue
            grad = torch.zeros_like(own) if own.grad is None else own.grad
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            summed = record.box.is_all and not record.replicated
            yield f"{name}.{attribute}".lstrip("."), record.box.of(wanted), ranks.sum(grad) if summed else grad


def _compare_gradients(gradients: Sequence[tuple[str, Tensor, Tensor]], tolerance: float) -> None:
    most = max((_highest(wanted) for _, wanted, _ in gradients), default=0.0)
    for name, wanted, found in gradients:
        own, difference = max(_highest(wanted), 1e-3 * most), _highest(found.double() - wanted.double())
        if not difference <= tolerance * own:
            raise BadInput(
                f"Cut by this plan, the model has another gradient of {name!r}: it differs by up to {difference:.2g}, "
                f"of values up to {own:.2g}. {_HELP}"
            )


def _highest(values: Tensor) -> float:
    return values.double().abs().max().item() if values.numel() else 0.0


def _compare(pairs: Sequence[tuple[Tensor, Any]], tolerance: float) -> None:
    for number, (wanted, found) in enumerate(pairs):
        if not isinstance(found, Tensor) or found.shape != wanted.shape:
            raise BadInput(
                f"Cut by this plan, the model returns a {_form(found)} as output {number}, and whole a "
                f"{_form(wanted)}. {_HELP}"
            )
        if not wanted.is_floating_point() and torch.equal(found, wanted):
            continue
        most, difference = wanted.double().abs().max(), (found.double() - wanted.double()).abs().max()
        if not difference <= tolerance * most:
            raise BadInput(
                f"Cut by this plan, the model returns other values as output {number}: they differ by up to "
                f"{difference.item():.2g}, of values up to {most.item():.2g}. {_HELP}"
            )


def _form(found: Any) -> str:
    return f"tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__


_HELP = (
    "See which module does what its style does not say: one that mixes tokens beside attention (a mean over positions, "
    "a shift) may not be inside of style 'sequence', which sequence=False leaves out; what a matrix of style 'column' "
    "computes must go to one of style 'row', or take 'column_gathered'; what has parameters and computes between the "
    "two must be inside of a module of style 'enter', in which nothing may go around them, as x + down(up(x)) does."
)
