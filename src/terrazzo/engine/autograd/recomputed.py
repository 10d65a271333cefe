"""Which units' forwards will run again together in backward: those inside of one `torch.utils.checkpoint`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.autograd.saved_weights import packed_by
from terrazzo.engine.runtime.private_torch import tree_leaves

__all__ = ["Regions", "is_differentiated"]


class Regions:
    """Follows one forward of a model.

    With `use_reentrant=False` a region has hooks of its own for what autograd keeps. With `use_reentrant=True` it is
    run without gradients, and its inputs alone require them. Other ways to recompute are not seen here.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._unit = -1
        self._region: Any = None  # of the last unit: a reference to the hook of its region, or what stands for one

    @property
    def reentrant(self) -> bool:
        """Whether the unit that began last will run again although it runs without gradients now."""
        return self._region is _REENTRANT

    def enter(self, unit: int, args: Any) -> tuple[int, int] | None:
        """Forward of `unit` begins, with these arguments; returns the last unit and this one if they share a region."""
        before, self._unit = self._unit, unit
        if torch.is_grad_enabled():
            hook = packed_by("_checkpoint_hook")
            joined = hook is not None and isinstance(self._region, weakref.ref) and self._region() is hook
            self._region = weakref.ref(hook) if hook is not None else None
        else:
            first = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(args))
            joined = self.reentrant and not first
            self._region = _REENTRANT if first or joined else None
        return (before, unit) if joined else None


_REENTRANT = object()


def is_differentiated() -> bool:
    """Whether what runs again in backward gets a backward of its own, and does not only give back what was not kept."""
    return torch.is_grad_enabled() and not packed_by("_recomputation_hook")
