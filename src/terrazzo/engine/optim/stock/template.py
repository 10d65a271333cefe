"""What an optimizer keeps for a parameter: which states there are, and which of them have a value for each element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.plan.precision import Precision

__all__ = ["MatrixNeeds", "Template", "Templates", "drop_meta_states", "has_values", "matrix_needs", "specs_of"]


@dataclass(frozen=True)
class StateSpec:
    """One state that an optimizer keeps for a parameter.

    Attributes:
        per_element: one value per element of the parameter, in the dtype of moments; else of the shape that follows.
        device: where it lives for a parameter on the mesh's device.
        kind: Tensor, or the Python type of a plain number.
    """

    per_element: bool
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    kind: type = Tensor

    @property
    def fixed_bytes(self) -> int:
        """Memory of a state that is not per element."""
        return math.prod(self.shape) * self.dtype.itemsize if self.kind is Tensor and not self.per_element else 0

    def restored(self, flat: Tensor, device: torch.device | None) -> Any:
        """`flat` as the optimizer expects it for a parameter on `device`."""
        if self.kind is not Tensor:
            return self.kind(flat.item())
        on_cpu = self.device is None or self.device.type == "cpu"
        return flat.to(device=self.device if on_cpu else device, dtype=self.dtype).reshape(self.shape).clone()


@dataclass(frozen=True)
class MatrixNeeds:
    """The dtype and the memory that updates of whole matrices take.

    Attributes:
        wire: dtype in which they are exchanged.
        workspace_bytes: beside a matrix of a shape, where it is updated.
    """

    wire: torch.dtype
    workspace_bytes: Callable[[tuple[int, int]], int]

    def prepare_bytes(self, numel: int, precision: Precision) -> int:
        """Memory while elements are made ready to be sent: in the master's dtype, and beside that as sent."""
        lent = precision.master.itemsize * (precision.moments != precision.master)
        return numel * (precision.master.itemsize + self.wire.itemsize + lent)


def specs_of(state: Mapping[str, Any], shape: torch.Size) -> dict[str, StateSpec]:
    """The specs of the `state` that an optimizer has for a tensor of `shape`, by its own keys."""
    return {
        key: StateSpec(value.shape == shape, tuple(value.shape), value.dtype, value.device)
        if isinstance(value, Tensor)
        else StateSpec(per_element=False, kind=type(value))
        for key, value in state.items()
    }


class Template(dict[str, StateSpec]):
    """The states that an optimizer keeps for a parameter of one param group, by its own keys.

    Attributes:
        matrices: of a group whose matrices are updated whole; None for one that is stepped element by element.
        moves_zeros: whether an element of 0 whose gradient is 0, such as padding, is another number after a step.
    """

    def __init__(
        self, specs: Mapping[str, StateSpec], matrices: MatrixNeeds | None = None, moves_zeros: bool = False
    ) -> None:
        super().__init__(specs)
        self.matrices, self.moves_zeros = matrices, moves_zeros

    @property
    def per_element(self) -> list[str]:
        """Keys of what has a value for each element."""
        return [key for key, spec in self.items() if spec.per_element]

    @property
    def fixed(self) -> dict[str, StateSpec]:
        """States of the parameter as a whole, such as a count of steps."""
        return {key: spec for key, spec in self.items() if not spec.per_element}

    @property
    def fixed_numel(self) -> int:
        """Numbers kept for a parameter as a whole: elements of all that is in `fixed`."""
        return sum(math.prod(spec.shape) for spec in self.fixed.values())

    def keeps_per_element(self, key: str, value: Any, shape: torch.Size) -> bool:
        """Whether `value` under `key`, of a tensor of `shape`, has one for each element.

        Where nobody has seen the key before, its shape says so.
        """
        if (spec := self.get(key)) is not None:
            return spec.per_element
        return isinstance(value, Tensor) and value.shape == shape


Templates = Sequence[Template]
"""One template for each param group."""


def matrix_needs(templates: Templates) -> dict[int, MatrixNeeds]:
    """Needs of the param groups whose matrices are updated whole, by their numbers."""
    return {number: each.matrices for number, each in enumerate(templates) if each.matrices is not None}


def has_values(state: Mapping[str, Any]) -> bool:
    """Whether nothing of what an optimizer keeps for a parameter is on the meta device.

    Adagrad makes its states as it is built. Over meta parameters they say nothing, and are made anew in the first step.
    """
    return not any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def drop_meta_states(optimizer: Optimizer) -> None:
    """Have an optimizer make anew, in its first step, the states that have no values."""
    for parameter in [parameter for parameter, state in optimizer.state.items() if not has_values(state)]:
        del optimizer.state[parameter]
