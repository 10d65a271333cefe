"""Exchanges of activations and their gradients among the ranks along `tp`.

Each exchange in forward has one in backward: that of a gather is a sum that is scattered, and a sum needs none. Sums
run in rank order, ((r0 + r1) + r2) + ..., and those of 16-bit values in fp32. All tensors are plain, and none but that
of `copy` is a view, which torch would let no model change in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.mesh.axes import Axes
from terrazzo.parallel.exchanges import AxisRanks, Move, exchange
from terrazzo.parallel.mesh import axis_of

__all__ = ["SEQUENCE", "TensorRanks", "runs_of", "tensor_ranks"]

SEQUENCE = -2
"""The dim of sequences in activations, `[..., T, channels]`: the one that ranks split between matrices."""


def tensor_ranks(mesh: DeviceMesh) -> TensorRanks:
    """The ranks along `tp` of a mesh, for one model, or for one loss. Collective the first time."""
    axes, along = axis_of(mesh, "tp")
    return TensorRanks(along, axes)


class TensorRanks(AxisRanks):
    """The ranks along `tp` of one model; their traffic is that of the model.

    Args:
        axes: of the ranks along `tp` alone; None where there are no other ranks, and tensors have no values.
    """

    def __init__(self, along: Collectives, axes: Axes | None) -> None:
        super().__init__(along)
        self.axes = axes
        # No part of compiled graphs, whose compiler would run it to see what it does; to import that takes a second.
        self._exchange: Callable[[Tensor, Move, Move], Tensor] = torch.compiler.disable(exchange)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self

    @property
    def is_simulated(self) -> bool:
        """Whether there are no other ranks."""
        return self.axes is None

    # -- with exchanges of their gradients ---------------------------------------------------------------------------

    def copy(self, whole: Tensor) -> Tensor:
        """`whole` itself, for each rank to use in its own way. In backward gradients are summed."""
        return self._exchange(whole, lambda x: x.view_as(x), self.back._all_reduce)

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the ranks' `part`. In backward each rank has the whole gradient already."""
        return self._exchange(part, self._all_reduce, lambda grad: grad)

    def all_gather_sequence(self, own: Tensor) -> Tensor:
        """The whole sequence, for each rank to use in its own way. In backward gradients are summed and split again."""
        return self._exchange(own, lambda x: self._all_gather(x, SEQUENCE), self.back._reduce_scatter)

    def reduce_scatter_sequence(self, part: Tensor) -> Tensor:
        """This rank's part, along the sequence, of the sum of the ranks' `part`. In backward gradients are gathered."""
        return self._exchange(part, self._reduce_scatter, lambda grad: self.back._all_gather(grad, SEQUENCE))

    def scatter_sequence(self, whole: Tensor) -> Tensor:
        """This rank's part of a sequence that all ranks have whole. In backward gradients are gathered."""
        return self._exchange(
            whole, lambda x: self._own_part(x, SEQUENCE), lambda grad: self.back._all_gather(grad, SEQUENCE)
        )

    def gather_sequence(self, own: Tensor) -> Tensor:
        """The whole sequence, for all ranks to use in the same way. In backward each keeps its part of the gradient."""
        return self._exchange(own, lambda x: self._all_gather(x, SEQUENCE), lambda grad: self._own_part(grad, SEQUENCE))

    def gather_channels(self, own: Tensor, numel: int) -> Tensor:
        """All `numel` channels, for all ranks to use in the same way. In backward each keeps its gradient's part."""
        return self._exchange(own, lambda x: self._all_gather(x, -1, numel), lambda grad: self._own_part(grad, -1))

    def scatter_channels(self, whole: Tensor) -> Tensor:
        """This rank's channels of a tensor that all ranks have whole. In backward gradients are gathered."""
        numel = whole.shape[-1]
        return self._exchange(
            whole, lambda x: self._own_part(x, -1), lambda grad: self.back._all_gather(grad, -1, numel)
        )

    # -- without gradients -------------------------------------------------------------------------------------------

    def maximum(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, without a gradient."""
        rows = self._all_gather(values.detach().unsqueeze(0), 0)
        return rows.amax(dim=0)

    def _all_reduce(self, part: Tensor) -> Tensor:
        flat = part.reshape(-1)
        padding = -flat.numel() % self.size
        flat = torch.nn.functional.pad(flat, (0, padding)) if padding else flat.clone()
        total = self._exchanged(self._collectives.all_reduce(flat, _sum_dtype(part), 1)).finish()
        return total[: part.numel()].view(part.shape).to(part.dtype).detach()

    def _reduce_scatter(self, part: Tensor) -> Tensor:
        chunks = torch.stack(part.chunk(self.size, SEQUENCE))
        total = self._exchanged(self._collectives.reduce_scatter(chunks.view(-1), _sum_dtype(part))).finish()
        return total.view(chunks.shape[1:]).to(part.dtype).detach()

    def _all_gather(self, own: Tensor, dim: int, numel: int | None = None) -> Tensor:
        """All ranks' parts along `dim`, of equal sizes, or such as `runs_of` makes of `numel`."""
        sizes = None if numel is None else [stop - start for start, stop in runs_of(numel, self.size)]
        widest = own.shape[dim] if sizes is None else max(sizes)
        if own.shape[dim] < widest:  # of the last dim
            own = torch.nn.functional.pad(own, (0, widest - own.shape[dim]))
        parts = list(self.all_gather(own).unbind())
        if sizes is not None:
            parts = [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(parts, dim)

    def _own_part(self, whole: Tensor, dim: int) -> Tensor:
        start, stop = runs_of(whole.shape[dim], self.size)[self.rank]
        return whole.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def runs_of(numel: int, parts: int) -> list[tuple[int, int]]:
    """The half-open intervals of `parts` parts of `numel` things; their lengths differ by one at most."""
    return [(numel * part // parts, numel * (part + 1) // parts) for part in range(parts)]


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
