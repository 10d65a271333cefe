"""A unit's forward with layers around it, inside of the engine's hooks."""

from __future__ import annotations

import copy
import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

from torch import nn

from terrazzo.engine.partition.unit_choice import Units, find_units
from terrazzo.errors import BadInput

__all__ = ["Forward", "Layer", "LayerRing", "LayeredForward", "layers_of", "surround", "unit_modules"]

Forward = Callable[..., Any]


class LayerRing(enum.IntEnum):
    """Where layers stand around a forward, from the innermost, whichever came first."""

    RECOMPUTED = enum.auto()
    COMPILED = enum.auto()
    OFFLOADED = enum.auto()  # copies to the host stay out of compiled graphs


class Layer(ABC):
    """What is put around forwards of units. A deep copy of a module has the same one, unless it says otherwise."""

    ring: ClassVar[LayerRing]

    @abstractmethod
    def __call__(self, forward: Forward) -> Forward:
        """The forward with this layer around it: a function, so that the compiler sees the same code for all units."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class LayeredForward:
    """A module's forward with layers around it, which a deep copy of the module has around its own forward.

    A function in its place would be shared by both, and the copy would compute with the weights of the original. What
    the outermost function has of attributes, this object has too: they tell that it is compiled.

    Args:
        inner: a bound method, or what somebody else has put in its place.
        layers: in any order; of one ring, from the innermost.
    """

    def __init__(self, inner: Forward, layers: Iterable[Layer]) -> None:
        run, layers = inner, tuple(sorted(layers, key=lambda layer: layer.ring))
        for layer in layers:
            run = layer(run)
        functools.update_wrapper(self, run)
        self.inner, self.layers, self._run = inner, layers, run  # last: what somebody has put there may have an 'inner'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayeredForward:
        return LayeredForward(copy.deepcopy(self.inner, memo), copy.deepcopy(self.layers, memo))


def surround(module: nn.Module, *layers: Layer) -> None:
    """Put layers around a module's forward, each on its ring."""
    forward: Any = module.forward
    inner, before = (forward.inner, forward.layers) if isinstance(forward, LayeredForward) else (forward, ())
    module.forward = LayeredForward(inner, (*before, *layers))


def layers_of(module: nn.Module) -> tuple[Layer, ...]:
    """The layers around a module's forward, from the innermost; also where somebody has wrapped it since."""
    forward: Any = module.forward
    while forward is not None and not isinstance(forward, LayeredForward):
        forward = getattr(forward, "__wrapped__", None)
    return () if forward is None else forward.layers


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
