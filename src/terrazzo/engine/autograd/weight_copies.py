"""Copies of gathered weights for whoever keeps them longer than they are here: their memory is freed under views."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.autograd.outputs import leaves_of, map_tensors
from terrazzo.engine.buckets.parameters.placeholder import Placeholder
from terrazzo.engine.buckets.weights.full_memory import Storages
from terrazzo.errors import Misuse

__all__ = ["WeightCopies"]


class WeightCopies:
    """Makes copies of gathered weights where somebody may keep them.

    Args:
        storages: that gathered weights lie in.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._latest: dict[int, tuple[str, weakref.ref[Tensor]]] = {}

    def of_output(self, output: Any) -> Any:
        """What a forward has returned, with differentiable copies in place of views of weights."""
        if not any(isinstance(leaf, Tensor) and self._is_view(leaf) for leaf in leaves_of(output)):
            return output
        return map_tensors(lambda tensor: tensor.clone() if self._is_view(tensor) else tensor, output)

    def in_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Copy the weights of `module` that its `state_dict` has just put into `state`; tied ones share their copy.

        Raises:
            Misuse: for weights that are split over ranks, which a module inside the model does not have.
        """
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if isinstance(value, Placeholder) and value is not parameter:
                raise Misuse(
                    f"state_dict() of a module inside a sharded model: {value.terrazzo_note.name!r} "
                    "is split over ranks. Call it inside 'with tz.gathered(model):', or take the names that you want "
                    "out of tz.full_state_dict(model)."
                )
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and self._is_view(value):
                other, copied = self._latest.get(id(parameter), (None, None))
                copy = copied() if copied is not None else None
                if copy is None or state.get(str(other)) is not copy:
                    copy = value.clone()
                    self._latest[id(parameter)] = (prefix + name, weakref.ref(copy))
                state[prefix + name] = copy

    def _is_view(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, Placeholder) and self._storages.unit_of(tensor) is not None
