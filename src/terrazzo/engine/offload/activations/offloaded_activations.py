"""What keeps the inputs of units' forwards in host memory, and what autograd holds in their place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from terrazzo.engine.autograd.saved_weights import others_watch
from terrazzo.engine.offload.activations.moved_tensors import Moved, Route
from terrazzo.engine.runtime.device import KINDS
from terrazzo.errors import Misuse

__all__ = ["SMALLEST_BYTES", "OffloadedActivations"]

SMALLEST_BYTES = 16 << 10
"""Tensors of fewer bytes stay: starting the copies would take longer than their memory is worth."""

_ALIGNMENT_BYTES = 16
"""Kernels choose by the alignment how they read. A copy always has it; tensors without it stay, for equal bits."""


class OffloadedActivations:
    """Of one model's units: what their forwards keep of their inputs is kept in host memory.

    Units may be called any number of times, in any number of forwards, before a backward.

    Attributes:
        pin: page-lock the host memory where CUDA is there.
    """

    def __init__(self, pin: bool = True) -> None:
        self.pin = pin
        self.routes: dict[tuple[torch.device, bool], Route] = {}
        self._shared: weakref.WeakValueDictionary[tuple[Any, ...], Moved] = weakref.WeakValueDictionary()
        self._latest: Callable[[], Call | None] = _no_call

    def keep_pinned(self, pinned: bool) -> None:
        """Page-lock host memory from now on, or do not: `tz.shard` says so by its `Offload`."""
        self.pin = pinned

    def __reduce__(self) -> tuple[Any, ...]:
        return OffloadedActivations, (self.pin,)  # a copy of the model has calls of its own

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, with what it keeps of its inputs in host memory.

        Inside a checkpointed region around the unit nothing is moved: the region keeps its own inputs, and runs this
        forward again.
        """

        run = torch.compiler.disable(functools.partial(self._run, forward))  # a compiler of the whole model steps aside

        @functools.wraps(forward)  # also what tells that it is compiled
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return wrapped

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        inputs = _computed((*args, *kwargs.values())) if torch.is_grad_enabled() and not others_watch() else frozenset()
        if not inputs:
            return forward(*args, **kwargs)
        with saved_tensors_hooks(functools.partial(self._keep, self._begin_call(), inputs), _give):
            return forward(*args, **kwargs)

    def _begin_call(self) -> Call:
        """A unit is called: the copies out of the call before have had time to finish."""
        before = self._latest()
        for moved in before.moved if before is not None else ():
            moved.leave()
        return Call(self._latest)

    def _keep(self, call: Call, inputs: frozenset[int], tensor: Tensor) -> Kept | Left:
        """The stand-in that autograd is to hold for `tensor`."""
        if tensor.untyped_storage()._cdata not in inputs or not _worth_moving(tensor):
            return Left(tensor)
        moved = self._move(tensor)
        moved.awaited += 1
        call.moved.append(moved)
        self._latest = weakref.ref(call)
        return Kept(moved, call)

    def _move(self, tensor: Tensor) -> Moved:
        # The address of a storage names it for as long as `Moved` has its weak reference.
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*where, tensor.dtype, tensor._version)
        moved = self._shared.get(key)
        if moved is None:
            way = tensor.device, self.pin
            if way not in self.routes:
                self.routes[way] = Route(*way)
            moved = self._shared[key] = Moved(tensor, self.routes[way])
        return moved


class Call:
    """One call of a unit: what it has kept, and the call before it."""

    def __init__(self, before: Callable[[], Call | None]) -> None:
        self.before = before
        self.moved: list[Moved] = []


def _no_call() -> None:
    return None


@dataclass(frozen=True, eq=False)
class Kept:
    """A stand-in that autograd holds for a tensor that has been moved, for one call of a unit."""

    moved: Moved
    call: Call

    def get(self) -> Tensor:
        """The tensor; the backward that asks for it will run the call before this one next."""
        tensor = self.moved.get()
        before = self.call.before()
        for other in before.moved if before is not None else ():
            if other.route is self.moved.route:  # each device has a thread of its own in backward
                other.fetch()
        return tensor


class Left:
    """A stand-in that autograd holds for a tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version  # itself, if an output, would never be freed

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise Misuse(
                f"A tensor that backward needs, of shape {tuple(self._tensor.shape)}, was changed in place after a "
                "checkpointed unit had begun: replace the in-place operation, or clone the tensor before."
            )
        return self._tensor


def _give(saved: Kept | Left) -> Tensor:
    return saved.get()


def _computed(inputs: Iterable[Any]) -> frozenset[int]:
    """Storages of those inputs that an operation with a gradient has made, and that are large enough."""
    tensors = [value for value in inputs if type(value) is Tensor and value.nbytes >= SMALLEST_BYTES]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if _origin(tensor).grad_fn is not None)


def _origin(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _worth_moving(tensor: Tensor) -> bool:
    """Whether a copy of `tensor` can take its place to the bit, strides included, and saves memory."""
    return (
        type(tensor) is Tensor
        and tensor.device.type in KINDS
        and tensor.is_floating_point()
        and tensor.nbytes >= SMALLEST_BYTES
        and tensor.data_ptr() % _ALIGNMENT_BYTES == 0
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # without gaps or overlap
    )
