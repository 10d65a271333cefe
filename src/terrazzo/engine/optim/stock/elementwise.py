"""Which optimizers may run on flat shards: those that update each element from that element's own values alone.

Torch's are known by name. One of a user's own says so, and is held to it before any work starts: steps of a matrix are
compared with those of its flat parts, each alone, as the engine takes them. What depends on a parameter's shape, norm
or identity, or keeps tensors elsewhere than in its `state`, gives other weights there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.optim.stock.probe import OptimizerProbe
from terrazzo.engine.optim.stock.settings import snapshot
from terrazzo.engine.optim.stock.stepper import Stepper, bare_copy, is_driven, is_torchs, unhooked_step
from terrazzo.engine.optim.stock.template import Template, Templates, has_values
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.precision import Precision
from terrazzo.errors import BadInput
from terrazzo.optim import Lion, MatrixOptimizer

__all__ = ["ELEMENTWISE", "check_elementwise", "check_narrow", "check_optimizer", "check_zeros"]

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)
"""Optimizers whose update of an element depends on that element's own values alone: correct on any flat shard."""


_COUNTS_STEPS: dict[type[Optimizer], bool] = {
    torch.optim.Adam: True,
    torch.optim.AdamW: True,
    torch.optim.NAdam: True,
    torch.optim.RAdam: True,
    torch.optim.SGD: False,
    Lion: False,
}
"""Optimizers whose states may be in 8 bits, and whether each counts steps, from which stochastic rounding has its bits.
What they keep are averages that soon forget, and no sums that grow by ever smaller parts.
"""


def check_narrow(kinds: Iterable[type[Optimizer]], precision: Precision) -> None:
    """Refuse moments in 8 bits of optimizers of these classes that are not known to work with them.

    Raises:
        BadInput: there.
    """
    for kind in kinds if precision.narrow is not None else ():
        if kind not in _COUNTS_STEPS:
            raise BadInput(
                f"precision: moments in {precision.narrow}, and {kind.__name__} is not known to work with "
                f"states of 8 bits. Use one of {', '.join(sorted(each.__name__ for each in _COUNTS_STEPS))}, or leave "
                "moments out, which keeps them in fp32."
            )
        if precision.stochastic and not _COUNTS_STEPS[kind]:
            counting = sorted(each.__name__ for each, counts in _COUNTS_STEPS.items() if counts)
            raise BadInput(
                f"precision: rounding 'stochastic', whose bits follow from the number of the step, and "
                f"{kind.__name__} does not count steps. Use {', '.join(counting[:-1])} or {counting[-1]}, or leave "
                "rounding out."
            )


def check_zeros(templates: Templates, precision: Precision, diloco: DiLoCo | None) -> None:
    """Refuse optimizers that move padding, where weights travel in blocks: it would enter the scales of the weights.

    Args:
        templates: of all param groups.

    Raises:
        BadInput: there.
    """
    in_blocks = {
        f"precision: gather '{precision.gather}'": precision.gather is not None,
        "diloco: traffic 'int8'": diloco is not None and diloco.traffic == "int8",
    }
    for what in (what for what, is_so in in_blocks.items() if is_so):
        if any(template.moves_zeros for template in templates):
            raise BadInput(
                f"{what}, whose blocks have a common scale, and the optimizer moves a weight of 0 whose gradient is 0, "
                "as the padding of a block is: to NaN, where eps is 0. Give it an eps, such as its default, or send "
                "weights without blocks."
            )


def check_elementwise(optimizer: Optimizer | type[Optimizer]) -> None:
    """Refuse an optimizer, or a class of them, that is not known to update each element from its own values alone.

    Raises:
        BadInput: there.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if kind is torch.optim.Muon:
        raise BadInput(
            "torch.optim.Muon updates whole matrices and would be wrong on flat shards. Use tz.optim.Muon, which is "
            "the same bit by bit and gives each matrix whole to one rank; it takes the others too, for AdamW: "
            "matrices, others = tz.optim.hidden_matrices(model); tz.optim.Muon(matrices, others, lr=...)."
        )
    if issubclass(kind, MatrixOptimizer):
        return
    if kind.__name__.lower().endswith("8bit"):  # of bitsandbytes or torchao, whose blocks begin where a shard does
        raise BadInput(
            f"{kind.__name__} keeps blocks of a tensor in 8 bits, and on flat shards each number of ranks would make "
            "others. Use torch.optim.AdamW, or tz.optim.Lion, with moments in 8 bits: precision=dataclasses.replace("
            "tz.Precision.named('bf16'), moments='int8'), or precision.moments: int8 in a configuration."
        )
    if not (kind in ELEMENTWISE or getattr(optimizer, "elementwise", False)):
        raise BadInput(
            f"{kind.__name__} cannot run on flat shards: it is not known to update each element from that element's "
            "values alone (Adafactor, LBFGS and Shampoo do not). Use one of "
            f"{', '.join(sorted(known.__name__ for known in ELEMENTWISE))}, or Muon, which has each matrix whole; an "
            "optimizer of your own whose update is elementwise says so by 'elementwise = True' in its class."
        )


def check_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer that cannot be sharded element by element.

    Args:
        device: of the mesh.

    Raises:
        BadInput: what is no optimizer, is not known to be elementwise or says so wrongly, or has states without
            values, or such as cannot be kept as they are.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise BadInput(f"optimizer is a {name}; pass a torch.optim.Optimizer (to tz.shard also what builds one).")
    if is_driven(optimizer):
        raise BadInput(
            f"This {name} has been sharded already, by tz.shard or tz.attach, and steps flat memory of that model "
            "alone. Leave out the second call; for another model, or after release_optimizer(), build a new "
            f"{name} over model.parameters() and give that."
        )
    check_elementwise(optimizer)
    if not is_torchs(optimizer) and not all(map(has_values, optimizer.state.values())):
        raise BadInput(
            f"This {name} made its states as it was built, over parameters on the meta device, so that they have no "
            "values. Build the model on a real device for it, or take an optimizer that makes them in its first step, "
            "such as RMSprop or Adam."
        )
    if type(optimizer) not in ELEMENTWISE and not isinstance(optimizer, MatrixOptimizer):
        for group in optimizer.param_groups:
            _check_claim(optimizer, group, device)
            _check_kept(optimizer, OptimizerProbe(optimizer, group, device).template())


_STEPS = 3
_SHORTER = 7
"""Elements of the first part that the probe is cut into; the second has fewer."""
_LEAST_LR = 0.01
"""The rate that a smaller one is tried at, such as the 0 that a schedule begins with, which would hide everything."""


def _check_claim(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
    probe = OptimizerProbe(optimizer, group, device)
    try:
        with probe.undrawn():
            wanted = _steps_of_matrix(probe)
        with probe.undrawn():
            of_parts = _steps_of_parts(probe)
    except Exception as error:
        raise BadInput(
            f"{type(optimizer).__name__} says that it is elementwise, and its step raised {type(error).__name__}: "
            f"{error}, on a tensor of {_SHORTER} elements or without any, as a rank may have. {_CONTRACT}"
        ) from error
    for key, value in wanted.items():
        if (other := of_parts.get(key)) is None or not torch.allclose(
            other, value, rtol=1e-5, atol=2e-6, equal_nan=True
        ):
            what = "the weights" if key == "" else f"state {key!r}"
            raise BadInput(
                f"{type(optimizer).__name__} says that it is elementwise, but {_STEPS} steps of a tensor of "
                f"{tuple(value.shape)} and of two flat parts of it, each alone, do not agree: {what} differ"
                f"{'s' if key else ''}. {_CONTRACT}"
            )


def _check_kept(optimizer: Optimizer, template: Template) -> None:
    """Refuse states that could not be kept, saved and restored as they are: those per element are in one dtype.

    Raises:
        BadInput: there.
    """
    for key, spec in template.items():
        kept = spec.dtype if spec.kind is Tensor else spec.kind.__name__
        if spec.per_element and not spec.dtype.is_floating_point:
            raise BadInput(
                f"{type(optimizer).__name__} keeps {kept} for each element as state {key!r}, and what is kept for each "
                "is floating-point numbers, as moments are: keep these values in the dtype of the parameter."
            )
        if not issubclass(spec.kind, Tensor | int | float):
            raise BadInput(
                f"{type(optimizer).__name__} keeps a {kept} as state {key!r}, which no checkpoint has: keep a tensor "
                "or a number in self.state[parameter], and all else in the param group or on the optimizer."
            )


_CONTRACT = (
    "An elementwise update reads no norm, mean or shape of a parameter, keeps tensors for it in self.state[parameter] "
    "alone, which the first step fills, and counts steps there or once a step, outside of the loop over parameters."
)


def _steps_of_matrix(probe: OptimizerProbe) -> dict[str, Tensor]:
    """Weights, under an empty name, and states per element after steps of one column, as plain PyTorch takes them."""
    shape = (probe.numel, 1)
    matrix = nn.Parameter(_weights(probe).view(shape))
    alone = _alone(probe, [matrix])
    if begun := probe.begun():
        alone.state[matrix] = {k: v.view(shape) if probe.per_element(v) else v for k, v in begun.items()}
    for gradient in _gradients(probe):
        matrix.grad = gradient.view(shape)
        unhooked_step(alone)
    return {"": matrix.detach(), **{k: v for k, v in alone.state[matrix].items() if _is_like(v, matrix)}}


def _steps_of_parts(probe: OptimizerProbe) -> dict[str, Tensor]:
    """What `_steps_of_matrix` gives, by the steps that the engine takes: of each part alone, then one without any."""
    parts = [nn.Parameter(part) for part in _weights(probe).split(_SHORTER)]
    cut = {k: v.split(_SHORTER) if probe.per_element(v) else [v] * len(parts) for k, v in probe.begun().items()}
    states = [{key: snapshot(values[i]) for key, values in cut.items()} for i in range(len(parts))]
    alone = _alone(probe, [])
    for gradient in _gradients(probe):
        stepper = Stepper(alone)
        for i, (part, grad) in enumerate(zip(parts, gradient.split(_SHORTER), strict=True)):
            part.grad = grad
            states[i] = stepper.step(probe.number, part, states[i])
        unhooked_step(alone)
    by_key: dict[str, list[Any]] = {k: [state.get(k) for state in states] for k in states[0]}
    joined = {k: torch.cat(values).unsqueeze(1) for k, values in by_key.items() if all(map(_is_like, values, parts))}
    return {"": torch.cat([part.detach() for part in parts]).unsqueeze(1), **joined}


def _alone(probe: OptimizerProbe, parameters: list[nn.Parameter]) -> Optimizer:
    copied = bare_copy(probe.optimizer)
    copied.state = defaultdict(dict)
    copied.param_groups = [
        {**snapshot({**each, "params": None}), "params": parameters if number == probe.number else []}
        for number, each in enumerate(probe.optimizer.param_groups)
    ]
    for group in copied.param_groups:
        if isinstance(rate := group.get("lr"), int | float):
            group["lr"] = max(rate, _LEAST_LR)
    return copied


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _weights(probe: OptimizerProbe) -> Tensor:
    """Weights of either sign and many sizes, so that parts have another norm, mean and extreme than the whole."""
    order = torch.arange(probe.numel, device=probe.device)
    return torch.exp2(order * 0.5 - 3) * (1 - 2 * (order % 2))


def _gradients(probe: OptimizerProbe) -> Iterator[Tensor]:
    order = torch.arange(probe.numel, device=probe.device)
    for number in range(_STEPS):
        yield torch.cos(order * (number + 1.0) + 1) * torch.exp2(order * -0.25)
