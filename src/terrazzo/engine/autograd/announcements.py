"""What announces that backward comes to a unit: hooks on the tensors that its forward has returned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from terrazzo.engine.autograd.asides import put_aside
from terrazzo.engine.autograd.listeners import before_gradient
from terrazzo.engine.autograd.outputs import PLAIN, leaves_of
from terrazzo.engine.buckets.unit import Unit

__all__ = ["Announcements"]


class Announcements:
    """Says to which units a backward will come, from what the units of one model have returned."""

    def __init__(self, units: Sequence[Unit]) -> None:
        modules = {unit.module for unit in units}
        self._units = units
        self._inside = [_modules_inside(unit.module, modules) for unit in units]
        self._on_leaves: dict[tuple[int, int], tuple[int, RemovableHandle]] = {}

    def watch(self, unit: Unit, output: Any, hook: Callable[[Any], None]) -> tuple[bool, bool]:
        """Have the backward of `unit` announced by the tensors through which it can be reached.

        These are its outputs, and what its modules have put aside in attributes, such as an auxiliary loss.

        Args:
            hook: called as backward comes to any of them.

        Returns:
            Whether it will be announced, and whether something else may: an object of unknown kind can hide a tensor,
            and a unit that returns none has put its result where nobody can see it.
        """
        leaves = leaves_of(output)
        opaque = any(not isinstance(leaf, PLAIN) for leaf in leaves)
        opaque = opaque or not any(isinstance(leaf, Tensor) for leaf in leaves)
        differentiable = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        differentiable += put_aside([unit.module, *self._inside[unit.index]])
        for leaf in differentiable:
            if (handle := before_gradient(leaf, hook)) is not None:
                _, earlier = self._on_leaves.get((unit.index, id(leaf)), (0, None))
                if earlier is not None:
                    earlier.remove()
                self._on_leaves[unit.index, id(leaf)] = unit.weights.generation, handle
        return bool(differentiable), opaque

    def leave_leaves(self) -> None:
        """Leaves that a forward has returned, such as a parameter, may be kept: their hooks go as weights change."""
        changed = [key for key, (was, _) in self._on_leaves.items() if was != self._units[key[0]].weights.generation]
        for key in changed:
            self._on_leaves.pop(key)[1].remove()


def _modules_inside(module: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    """The modules inside `module`, without those inside one of `others`."""
    inside = []
    for child in module.children():
        if child not in others:
            inside += [child, *_modules_inside(child, others)]
    return inside
