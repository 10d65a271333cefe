"""Weights that autograd has kept for backward: gathered again, by whatever way backward comes to them.

Hooks on a unit's outputs announce its backward. A loss can reach the inside of a unit past them: through a list that
its forward appends to, say. So while the order of units is not settled yet, and from then on in models where it has
happened, what autograd keeps of a unit's weights asks for them when it is used. That takes some microseconds for every
tensor that is kept, which is why it is not done always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from terrazzo.engine.buckets.weights.full_memory import Storages
from terrazzo.engine.runtime.private_torch import SavedHooks

__all__ = ["SavedWeights", "others_watch", "packed_by"]

_Packed = tuple[Any, int, int | None, Callable[[Any], Tensor] | None]
"""A tensor, or what the user's own hooks made of it; its version; the unit whose weights it is a view of; what undoes
those hooks.
"""


class SavedWeights:
    """Watches what autograd keeps between `begin` and `end`.

    Args:
        storages: that gathered weights lie in.
        use: called with a unit whose weights are about to be read; returns when they are there.
    """

    def __init__(self, storages: Storages, use: Callable[[int], None]) -> None:
        self._storages, self._use = storages, use
        self._outer: Any = None
        self._watching = False

    def begin(self) -> None:
        """Watch from now on, but not inside a region of `torch.utils.checkpoint`: that keeps no weights, and counts all
        that it is given.
        """
        if not self._storages or self._watching or packed_by("_checkpoint_hook") is not None:
            return
        if SavedHooks.are_on():
            self._outer = _top_hooks(ignore_is_tracing=False)
            SavedHooks.push(self._pack, self._unpack)
            self._watching = True

    def end(self) -> None:
        if self._watching:
            SavedHooks.pop()
            self._outer, self._watching = None, False

    def _pack(self, tensor: Tensor) -> _Packed:
        unit = self._storages.unit_of(tensor)
        if unit is None and self._outer is not None:
            pack, unpack = self._outer
            return pack(tensor), 0, None, unpack
        return tensor.detach(), tensor._version, unit, None  # an operation's own output would hold the operation

    def _unpack(self, packed: _Packed) -> Tensor:
        saved, version, unit, unpack = packed
        if unpack is not None:
            return unpack(saved)
        if unit is not None:
            self._use(unit)
        if saved._version != version:  # torch leaves this check to whoever sets hooks
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(saved.shape)} is at version {saved._version}; expected version {version} instead."
            )
        tensor: Tensor = saved
        return tensor


def _top_hooks(ignore_is_tracing: bool = True) -> Any:
    """(pack, unpack) of whoever decides what becomes of tensors that autograd keeps now; None for nobody."""
    return SavedHooks.top(ignore_is_tracing)


def others_watch() -> bool:
    """Whether hooks of somebody else decide what becomes of tensors that autograd keeps now."""
    top = _top_hooks()
    return top is not None and not isinstance(getattr(top[0], "__self__", None), SavedWeights)


def packed_by(kind: str) -> Any:
    """The function that packs what autograd keeps, if it is that of `torch.utils.checkpoint`'s class of hooks."""
    top = _top_hooks()
    return top[0] if top is not None and getattr(top[0], "__qualname__", "").startswith(kind + ".") else None
