"""Optimizers whose update of a matrix needs all of it at once.

A step has three parts, of which only the second needs the whole matrix. So ranks can each have some of its elements:

1. `prepare` runs on each rank's elements. The results go to one rank, the owner of the matrix.
2. `whole` runs on the owner. Its update is sent back.
3. `apply` runs on each rank's elements.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, MutableMapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.optim.optimizer_step import ParamGroup, loss_of, refuse_sparse

__all__ = ["MatrixOptimizer", "is_matrix_group"]


class MatrixOptimizer(Optimizer):
    """Some of its param groups hold matrices, the others what it steps element by element.

    A parameter of more than two dims is many matrices, of its last two, each for itself: experts in one tensor, say.

    Attributes:
        wire: dtype in which matrices go to their owners and come back; `prepare` and `whole` return it.
    """

    wire = torch.bfloat16

    @abstractmethod
    def is_of_matrices(self, group: ParamGroup) -> bool:
        """Whether `group` holds matrices."""

    @abstractmethod
    def prepare(self, group: ParamGroup, state: MutableMapping[str, Any], gradient: Tensor) -> Tensor:
        """The values from which the owner computes, one for each element of `gradient`, in the dtype `wire`.

        Each is computed from its own element alone. `state`, empty before the first step, is changed in place.
        """

    @abstractmethod
    def whole(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        """The update of a whole matrix; `matrix`, `[rows, columns]` of what `prepare` returned, may be overwritten."""

    @abstractmethod
    def apply(self, group: ParamGroup, values: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        """Change `values`, elements of a matrix of `shape`, by the elements of `whole`'s result for them."""

    @abstractmethod
    def workspace_bytes(self, shape: tuple[int, int]) -> int:
        """The most bytes that `whole` holds beside its argument, for a matrix of `shape`."""

    @abstractmethod
    def step_elements(self, group: ParamGroup) -> None:
        """Step a group that is not of matrices."""

    def may_be_fused(self, group: ParamGroup) -> bool:
        """Whether `group` takes `fused=True`, as those of torch's AdamW do."""
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups."""
        loss = loss_of(closure)
        refuse_sparse(self)
        for group in self.param_groups:
            if not self.is_of_matrices(group):
                self.step_elements(group)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrices(group, parameter)
        return loss

    def _step_matrices(self, group: ParamGroup, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        update = self.prepare(group, self.state[parameter], gradient)
        *outer, rows, columns = parameter.shape
        if parameter.numel() == 0:
            return
        for place in itertools.product(*map(range, outer)):  # in any memory format
            self.apply(group, parameter[place], self.whole(group, update[place]), (rows, columns))


def is_matrix_group(optimizer: Optimizer, group: ParamGroup) -> TypeGuard[MatrixOptimizer]:
    """Whether `optimizer` steps `group` matrix by matrix."""
    return isinstance(optimizer, MatrixOptimizer) and optimizer.is_of_matrices(group)
