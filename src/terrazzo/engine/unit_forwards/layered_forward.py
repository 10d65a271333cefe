"""A unit's forward with layers around it, inside of the engine's hooks."""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

from torch import nn

from terrazzo.engine.partition.asked_units import Units
from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.runtime.method_replacement import MethodReplacement, function_of, replaced_of
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
        """The forward with this layer around it. Both are functions of the module as well, as its class has them: the
        compiler sees the same code for all units, and no layer holds the module.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class LayeredForward(MethodReplacement):
    """A module's forward with layers around it.

    What the outermost function has of attributes, this object has too: they tell that it is compiled.

    Args:
        module: whose forward it is.
        replaced: what is inside of the layers, as of `replaced_of`.
        layers: in any order; of one ring, from the innermost.
    """

    def __init__(self, module: nn.Module, replaced: Forward | None, layers: Iterable[Layer]) -> None:
        run, layers = function_of(module, "forward", replaced), tuple(sorted(layers, key=lambda layer: layer.ring))
        for layer in layers:
            run = layer(run)
        functools.update_wrapper(self, run)
        super().__init__(module, "forward", replaced)  # last: what is replaced may have attributes of the same names
        self.layers, self._run = layers, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayeredForward, (self.module, self.replaced, self.layers)


def surround(module: nn.Module, *layers: Layer) -> None:
    """Put layers around a module's forward, each on its ring."""
    forward: Any = module.forward
    if isinstance(forward, LayeredForward):
        module.forward = LayeredForward(module, forward.replaced, (*forward.layers, *layers))
    else:
        module.forward = LayeredForward(module, replaced_of(module, "forward"), layers)


def layers_of(module: nn.Module) -> tuple[Layer, ...]:
    """The layers around a module's forward, from the innermost, also inside of what somebody has wrapped since."""
    found = tuple[Layer, ...]()
    forward: Any = module.forward
    while forward is not None:
        if isinstance(forward, LayeredForward):
            found, forward = (*forward.layers, *found), forward.replaced
        else:
            forward = getattr(forward, "__wrapped__", None)
    return found


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
