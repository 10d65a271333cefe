"""What an optimizer does to a tensor of a few elements, before it is given any of a model's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.optim.stock.settings import snapshot
from terrazzo.engine.optim.stock.stepper import Stepper, is_torchs
from terrazzo.engine.optim.stock.template import MatrixNeeds, Template, has_values, specs_of
from terrazzo.engine.runtime import device as devices
from terrazzo.optim import is_matrix_group

__all__ = ["OptimizerProbe"]

_NUMEL = 13
"""Elements of the tensor that is stepped: no number that an optimizer would keep for all of them."""


class OptimizerProbe:
    """A flat tensor that is stepped by an optimizer's own code, with the hyper-parameters of one of its param groups.

    It begins without states; but with those of the first elements of a parameter where an optimizer of a user's own has
    made states already: one that makes them as it is built may not know how to go on without. Torch's classes make
    theirs in a step. Neither the optimizer nor the random generators are changed.

    Args:
        device: of the mesh.

    Attributes:
        number: of the param group.
        numel: elements of the tensor.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
        self.optimizer, self.group, self.device = optimizer, group, device
        self.number = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
        self._stateful, self._state = _with_state(optimizer, group)
        self._is_torchs = is_torchs(optimizer)
        self._begins_with = {} if self._is_torchs else self._state
        self.numel = min(_NUMEL, self._stateful.numel()) if self._begins_with and self._stateful is not None else _NUMEL

    def begun(self) -> dict[str, Any]:
        """The states that it begins with, flat where there is a value for each element; each time in new memory."""
        return {key: self._part(value) for key, value in self._begins_with.items()}

    def _part(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return snapshot(value)
        per_element = self._stateful is not None and value.shape == self._stateful.shape
        return (value.flatten()[: self.numel] if per_element else value).to(self.device, copy=True)

    def per_element(self, value: Any) -> bool:
        """Whether `value` has one value for each element."""
        return isinstance(value, Tensor) and value.shape == (self.numel,)

    def undrawn(self) -> AbstractContextManager[None]:
        """Inside, random numbers may be drawn: the generators are put back at the end."""
        return torch.random.fork_rng(devices=[self.device] if devices.is_cuda(self.device) else [])

    def step_on_zeros(self) -> dict[str, Any]:
        """States that are kept for it after a step of zeros on a gradient of zeros."""
        return self._stepped_zeros()[1]

    def _stepped_zeros(self) -> tuple[Tensor, dict[str, Any]]:
        """What such a step makes of the zeros, and the states."""
        tensor = nn.Parameter(torch.zeros(self.numel, device=self.device))
        tensor.grad = torch.zeros_like(tensor)
        if is_matrix_group(self.optimizer, self.group):
            state = self.begun()
            self.optimizer.prepare(self.group, state, tensor.grad)
            return tensor, state
        with nullcontext() if self._is_torchs else self.undrawn():
            return tensor, Stepper(self.optimizer).step(self.number, tensor, self.begun())

    def template(self) -> Template:
        """The template of what the optimizer keeps for each parameter of the group.

        Taken from a parameter that has state already, else from a step. Where a state lives may follow the parameter,
        which is not on the mesh's device yet: a fused kernel reads `step` there, so its place is that of a step.
        """
        zeros, states = self._stepped_zeros()
        specs = stepped = specs_of(states, torch.Size([self.numel]))
        if self._stateful is not None:
            known = specs_of(self._state, self._stateful.shape)
            specs = {key: replace(spec, device=stepped.get(key, spec).device) for key, spec in known.items()}
        matrices = None
        if is_matrix_group(self.optimizer, self.group):
            matrices = MatrixNeeds(self.optimizer.wire, self.optimizer.workspace_bytes)
        return Template(specs, matrices, moves_zeros=bool(zeros.any()))


def _with_state(optimizer: Optimizer, group: dict[str, Any]) -> tuple[Tensor | None, Mapping[str, Any]]:
    """The first parameter with state that has a shape, and that."""
    for parameter in group["params"]:
        if parameter.dim() and (state := optimizer.state.get(parameter)) and has_values(state):
            return parameter, state
    return None, {}
