"""Whether one of torch's functions computes element by element, as its operators say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.parallel.tensor.channels.cut_dim import ChannelCuts, FunctionCall, Mixed, merged

__all__ = ["OperatorWatch"]

_UNTAGGED = (
    "detach", "alias", "lift_fresh", "_to_copy", "copy_", "fill", "fill_", "zero_", "empty_like", "zeros_like",
    "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal_",
    "uniform_", "exponential_", "native_dropout", "_fused_dropout", "rrelu_with_noise", "_prelu_kernel",
    "log_sigmoid_forward", "hardswish", "floor_divide", "polar", "complex", "mse_loss", "smooth_l1_loss",
    "huber_loss", "binary_cross_entropy",
)  # fmt: skip
"""Operators that compute element by element, or of sizes alone, and lack torch's tag for that."""


class OperatorWatch(TorchDispatchMode):
    """Sees the operators by which a function computes with tensors that ranks have in parts.

    Attributes:
        mixing: one that does not say that it computes element by element.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._behind = {id(each): each for each in tensors}
        self.mixing: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if made and any(id(each) in self._behind for each in tree_leaves((args, kwargs))):
            self._behind |= {id(each): each for each in made}
            if not _is_elementwise(func):
                self.mixing = self.mixing or str(func)
        return result

    def rule(self, call: FunctionCall) -> ChannelCuts:
        """The results of the function, which are broadcast."""
        given = [(each, cut) for each in call.tensors if (cut := call.cut_of(each)) is not None]
        if self.mixing is not None:
            raise Mixed(given[0][1], f"computes by {self.mixing}, which is not known to keep channels apart")
        found = []
        for result in call.results:
            cuts = []
            for each, cut in given:
                shift = result.dim() - each.dim()
                if shift < 0 or any(
                    own not in (1, size) for own, size in zip(each.shape, result.shape[shift:], strict=True)
                ):
                    raise Mixed(cut, "gives a result in which its channels are not found")
                cuts.append(replace(cut, dim=cut.dim + shift))
            found.append((result, merged(cuts, result)))
        return found


def _is_elementwise(operator: Any) -> bool:
    packet = operator.overloadpacket
    tagged = (torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())
    return packet.__name__ in _UNTAGGED or any(tagged)
