"""`tz.parallel.check`: whether a model that is cut by a plan has the outputs and gradients of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine import record_of
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.labels.label import Label
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, RanksApart, TerrazzoError
from terrazzo.parallel.input_fingerprints import fingerprint_of, inputs_as_text, looked_into
from terrazzo.parallel.mesh import axes_of
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
    """Compare the outputs and gradients of a model that is cut by a plan with those of the whole model. Collective.

    Use it for a plan of your own, with a small model of the same modules. The plan's styles say what modules do, and
    nothing else shows that a block of style `sequence` mixes tokens beside its attention. Two copies of the model run
    in evaluation mode, forward and, if a parameter is trained, backward from random numbers. The model stays as it is.
    Of the mesh the ranks along `tp` alone are looked at: copies have whole sequences and all experts and layers.

    Args:
        model: the whole model, with the same weights on every rank.
        mesh: that of `tz.mesh`, with an axis `tp`.
        inputs: of one forward, by position or by name, the same on every rank along `tp`. `tp` must divide the length
            of sequences.
        tensor, sequence: as for `tz.parallelize`.
        tolerance: the largest difference that is accepted, as a share of the largest value of the output; for a
            gradient of its own largest value, or of a thousandth of the largest of all gradients if that is more.

    Raises:
        RanksApart: on every rank along `tp`, if these were given different inputs.
        BadInput: on every rank along `tp`, if outputs or gradients differ, or the model has no weights or returns no
            tensors, alone or in tuples, dicts and dataclasses; as for `tz.parallelize`.
        Misuse: where an operation mixes parts of a gradient with all of it.
    """
    if "tp" not in (dims := mesh.mesh_dim_names or ()):
        raise BadInput(
            f"tz.parallel.check compares a model that is cut along tp, and the mesh has the axes {', '.join(dims)}: "
            "make it with tz.mesh(tp=2)."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise BadInput(
            "tz.parallel.check runs the model, whose weights are on the meta device: build a small one of the same "
            "modules on a real device for it."
        )
    whole, cut = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    alone = mesh["tp"]
    parallelize(cut, alone, tensor=tensor, sequence=sequence)
    axes, ranks = axes_of(alone), tensor_ranks(alone).labelled(Label())
    arguments = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
    if not ranks.agree_on(fingerprint_of(arguments)):
        raise RanksApart(
            f"tz.parallel.check was given other inputs on ranks along tp (here {inputs_as_text(arguments)}), and each "
            "computes a part of the same: give all of them the same, drawn from one seed."
        )
    with torch.set_grad_enabled(any(parameter.requires_grad for parameter in model.parameters())):
        expected = tree_leaves(looked_into(_called(whole, inputs)))
        _check_compared(expected)
        outputs = all_or_none(axes, lambda: _outputs_of(cut, inputs, len(expected)))
        pairs = [
            (one, _together(other, one, ranks))
            for one, other in zip(expected, outputs, strict=True)
            if isinstance(one, Tensor)
        ]
    all_or_none(axes, lambda: _compare(pairs, tolerance))
    probed = [(one, other) for one, other in pairs if one.requires_grad and one.is_floating_point()]
    if probed:
        _backward([one for one, _ in probed])
        all_or_none(axes, lambda: _tried(lambda: _backward([other for _, other in probed])))
        gradients = list(_gradients(whole, cut, ranks))
        all_or_none(axes, lambda: _compare_gradients(gradients, tolerance))


def _tried(action: Callable[[], T]) -> T:
    """What `action` returns; errors of the cut model become `BadInput`."""
    try:
        return action()
    except TerrazzoError:
        raise
    except Exception as error:
        raise BadInput(
            f"Cut by this plan, the model raises {type(error).__name__}: {error}, and not so whole. {_HELP}"
        ) from error


def _outputs_of(cut: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], count: int) -> list[Any]:
    """The outputs of the cut model, which must be `count`."""
    outputs = tree_leaves(looked_into(_tried(lambda: _called(cut, inputs))))
    if len(outputs) != count:
        raise BadInput(f"Cut by this plan, the model returns {len(outputs)} outputs, and whole {count}. {_HELP}")
    return outputs


def _check_compared(outputs: Sequence[Any]) -> None:
    """Check that the model returns something that can be compared."""
    if not any(isinstance(each, Tensor) for each in outputs):
        raise BadInput(
            f"tz.parallel.check has nothing to compare: the model returns {_kinds(outputs)}. Let its forward return "
            "tensors, alone or in tuples, dicts and dataclasses."
        )


def _kinds(outputs: Sequence[Any]) -> str:
    return ", ".join(sorted({type(each).__name__ for each in outputs})) or "nothing"


def _called(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _together(output: Any, expected: Tensor, ranks: TensorRanks) -> Any:
    """An output of the cut model; of one whose channels ranks have in parts, such as logits, all. Collective."""
    if not isinstance(output, Tensor) or output.shape == expected.shape or output.shape[:-1] != expected.shape[:-1]:
        return output
    return ranks.gather_channels(output, expected.shape[-1])


def _backward(outputs: Sequence[Tensor]) -> None:
    """Backward of the sum of all outputs, each element times a number that is drawn from one seed."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(each.shape, generator=generator) for each in outputs]
    grads = [each.to(output.device, output.dtype) for output, each in zip(outputs, drawn, strict=True)]
    torch.autograd.backward(list(outputs), grads)


def _gradients(whole: nn.Module, cut: nn.Module, ranks: TensorRanks) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, expected gradient and gradient of this rank's part of each trained parameter. Collective."""
    for name, module in cut.named_modules():
        for attribute, own in module.named_parameters(recurse=False):
            record = record_of(module, attribute)
            parameter = getattr(whole.get_submodule(name), attribute)
            if record is None or not own.requires_grad:
                continue
            grad = torch.zeros_like(own) if own.grad is None else own.grad
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            summed = record.box.is_all and not record.replicated
            yield f"{name}.{attribute}".lstrip("."), record.box.of(expected), ranks.all_reduce(grad) if summed else grad


def _compare_gradients(gradients: Sequence[tuple[str, Tensor, Tensor]], tolerance: float) -> None:
    most = max((_highest(expected) for _, expected, _ in gradients), default=0.0)
    for name, expected, actual in gradients:
        own, difference = max(_highest(expected), 1e-3 * most), _highest(actual.double() - expected.double())
        if not difference <= tolerance * own:
            raise BadInput(
                f"Cut by this plan, the model has another gradient of {name!r}: it differs by up to {difference:.2g}, "
                f"of values up to {own:.2g}. {_HELP}"
            )


def _highest(values: Tensor) -> float:
    return values.double().abs().max().item() if values.numel() else 0.0


def _compare(pairs: Sequence[tuple[Tensor, Any]], tolerance: float) -> None:
    for number, (expected, actual) in enumerate(pairs):
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            raise BadInput(
                f"Cut by this plan, the model returns a {_form(actual)} as output {number}, and whole a "
                f"{_form(expected)}. {_HELP}"
            )
        most, difference = _highest(expected), _highest(actual.double() - expected.double())
        allowed = tolerance * most if expected.is_floating_point() or expected.is_complex() else 0.0
        if not difference <= allowed:
            raise BadInput(
                f"Cut by this plan, the model returns other values as output {number}: they differ by up to "
                f"{difference:.2g}, of values up to {most:.2g}. {_HELP}"
            )


def _form(value: Any) -> str:
    return f"tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


_HELP = (
    "See which module does what its style does not say: one that mixes tokens beside attention (a mean over positions, "
    "a shift) may not be inside of style 'sequence', which sequence=False leaves out; what a matrix of style 'colwise' "
    "computes must go to one of style 'rowwise', or take 'colwise_gather_output'; what has parameters and computes "
    "between the two must be inside of a module of style 'enter', in which nothing may go around them, as "
    "x + down(up(x)) does."
)
