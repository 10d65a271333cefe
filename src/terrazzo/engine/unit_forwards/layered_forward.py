"""A unit's forward with layers around it, inside of the engine's hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from terrazzo.engine.offload.activations.offloaded_activations import OffloadedActivations
from terrazzo.engine.partition.unit_choice import Units, find_units
from terrazzo.errors import BadInput

__all__ = ["Forward", "Layer", "LayeredForward", "surround", "unit_modules"]

Forward = Callable[..., Any]
Layer = Callable[[Forward], Forward]


class LayeredForward:
    """A module's forward with layers around it, which a deep copy of the module has around its own forward.

    A function in its place would be shared by both, and the copy would compute with the weights of the original. What
    the outermost function has of attributes, this object has too: they tell that it is compiled.

    Args:
        inner: a bound method, or what somebody else has put in its place.
        layers: from the innermost; each makes a function of a forward.
    """

    def __init__(self, inner: Forward, layers: Sequence[Layer]) -> None:
        run = inner
        for layer in layers:
            run = layer(run)  # of functions, so that the compiler sees the same code for all units
        functools.update_wrapper(self, run)
        self.inner, self.layers, self._run = inner, layers, run  # last: what somebody has put there may have an 'inner'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayeredForward:
        return LayeredForward(copy.deepcopy(self.inner, memo), copy.deepcopy(self.layers, memo))


def surround(module: nn.Module, layer: Layer) -> None:
    """Put a layer around a module's forward, but inside of offloading: copies stay out of compiled graphs."""
    forward: Any = module.forward
    inner, layers = (forward.inner, forward.layers) if isinstance(forward, LayeredForward) else (forward, ())
    is_offloaded = bool(layers) and isinstance(layers[-1], OffloadedActivations)
    after = len(layers) - 1 if is_offloaded else len(layers)
    module.forward = LayeredForward(inner, (*layers[:after], layer, *layers[after:]))


def unit_modules(model: nn.Module, units: Units | None, asked: str) -> list[nn.Module]:
    """The modules of a model that are units, in registration order.

    Args:
        units: as for `tz.shard`.
        asked: the call that is about to treat them, for the error.

    Raises:
        BadInput: there are none, so that the call would do nothing.
    """
    names, why = find_units(model, units)
    if not names:
        kind = type(model).__name__
        raise BadInput(
            f"{asked} came to a {kind} without units (chosen were {why}), and would do nothing. Name modules with "
            f"parameters in units, or their classes in {kind}._no_split_modules; or leave {asked} out."
        )
    return [model.get_submodule(name) for name in names]
