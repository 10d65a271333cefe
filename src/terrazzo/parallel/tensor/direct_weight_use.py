"""Finds models that compute with the weights of a module outside of where these are what the plan takes them for.

`F.linear(x, self.down.weight)` would take this rank's part for the whole matrix, and miss the sum over ranks that is
around the forward of `self.down`: a number that is wrong, without an error. So would `self.table.weight.shape[0]`, as
the number of words. And the gradient of a norm in a block of
style `sequence`, which ranks sum, would count once for each of them where it is used outside of the block. First
forwards are watched. What a loss computes behind them is watched always, by the engine
(`terrazzo.engine.buckets.parameters.outside_forward`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.runtime.overrides import arguments, asks_size, function_name, is_question
from terrazzo.errors import Misuse
from terrazzo.parallel.tensor.first_forwards import FunctionWatch, has_compiled

__all__ = ["DirectUse"]


@dataclass(frozen=True)
class DirectUse:
    """Builds a watch of a forward, which raises `Misuse` there.

    Attributes:
        cut: attributes of modules, by name, that hold parts: these modules alone may compute with them, or ask their
            sizes.
        used_in_part: likewise, that hold whole matrices of which a rank computes some outputs.
        users: names of the modules that may compute with any of these, too.
        summed: attributes of modules, by name, of whose gradients ranks compute parts; with the name of the module
            inside of which they do.
    """

    cut: Mapping[str, Sequence[str]]
    used_in_part: Mapping[str, Sequence[str]]
    users: Sequence[str]
    summed: Mapping[str, tuple[Sequence[str], str]]

    def __call__(self, model: nn.Module) -> FunctionWatch | None:
        if has_compiled(model):
            return None
        watch = _DirectUse()
        for name, attributes in self.cut.items():
            watch.add(model, name, attributes, name, _CUT, _SIZE)
        for name, attributes in self.used_in_part.items():
            watch.add(model, name, attributes, name, _CUT)
        if torch.is_grad_enabled():
            for name, (attributes, region) in self.summed.items():
                watch.add(model, name, attributes, region, _SUMMED)
        for name in self.users:
            watch.allow(model.get_submodule(name))
        return watch


_SIZE = (
    "outside of that module: this rank has a part of it, and the size is that part's. Take the whole size from the "
    "model's configuration or from attributes of {region!r}, such as out_features, and a part's from the activation "
    "that it returns; or give {region!r} no style in the tensor-parallel plan."
)
_CUT = (
    "and does not call the module: this rank has a part of it, and the exchange with the ranks that have the rest is "
    "in the module's call. Call {region!r} there, or give it no style in the tensor-parallel plan."
)
_SUMMED = (
    "outside of {region!r}, inside of which each rank along tp computes a part of its gradient: here it would count "
    "once for each of them. Do that in {region!r}, or give that no style in the tensor-parallel plan (sequence=False "
    "leaves the style 'sequence' out)."
)


class _DirectUse(FunctionWatch):
    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, tuple[str, str]] = {}  # the parameter's name, and the end of the error's message
        self._of_size: dict[int, tuple[str, str]] = {}  # likewise, where its size is asked
        self._running: Counter[int] = Counter()
        self._users = 0

    def add(  # structure: what an error says
        self, model: nn.Module, name: str, attributes: Sequence[str], region: str, text: str, of_size: str = ""
    ) -> None:
        """Parameters that may be computed with while the module `region` runs.

        Args:
            of_size: the end of an error's message where its size is asked elsewhere; empty: that is let be.
        """
        module, around = model.get_submodule(name), model.get_submodule(region)
        own = {id(module._parameters[attribute]): f"{name}.{attribute}" for attribute in attributes}
        self._texts |= {key: (full, text.format(region=region)) for key, full in own.items()}
        if of_size:
            self._of_size |= {key: (full, of_size.format(region=region)) for key, full in own.items()}
        self.before(around, lambda *_: self._running.update(own.keys()), first=True)
        self.after(around, lambda _: self._running.subtract(own.keys()), always=True)

    def allow(self, module: nn.Module) -> None:
        """A module that may compute with all of them."""

        def count(by: int) -> None:
            self._users += by

        self.before(module, lambda *_: count(1), first=True)
        self.after(module, lambda _: count(-1), always=True)

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        size = asks_size(func)
        if not self._users and (size or not is_question(func)):
            texts, does = (self._of_size, "asks the size of") if size else (self._texts, "computes with")
            for each in arguments(args, kwargs):
                if isinstance(each, Tensor) and (known := texts.get(id(each))) and not self._running[id(each)]:
                    name, text = known
                    raise Misuse(f"The model's forward {does} {name!r} ({function_name(func)}) {text}")
        return func(*args, **kwargs)
