"""Finds plans under which an operation mixes tensors with parts of a gradient and tensors with all of it.

Inside of a module of style `enter` each rank has a part of a tensor's gradient: what its own columns make of it. The
parts are summed where the input enters. Behind the sum of a `rowwise` each rank has all of the gradient. An operation
that takes a tensor of each kind gives one of them a gradient that is wrong by a factor, without an error: as where a
column follows a row, or a residual is added, inside of one module of style `enter`. First forwards are watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from terrazzo.engine.runtime.overrides import arguments, function_name, is_question
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import Misuse
from terrazzo.parallel.tensor.arguments import first_activation
from terrazzo.parallel.tensor.first_forwards import FunctionWatch, has_compiled

__all__ = ["GradientParts"]

Share = Literal["part", "all"]
"""What each rank has of a tensor's gradient."""


@dataclass(frozen=True)
class GradientParts:
    """Builds a watch of a forward with gradients, which raises `Misuse` where an operation mixes both kinds.

    Its attributes say where tensors begin to have a part of their gradient, or all of it, by names of modules.

    Attributes:
        entered: modules whose input, put together as it enters, has a part.
        summed: modules whose output has all.
        split: modules that take a part of an input which has all.
        parameters: those that have a part, as names of modules and their own.
        outside: those of modules outside of any `enter`, which have all.
    """

    entered: list[str] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    parameters: list[tuple[str, str]] = field(default_factory=list)
    outside: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, model: nn.Module) -> FunctionWatch | None:
        if has_compiled(model) or not torch.is_grad_enabled():
            return None
        watch = _Shares()
        watch.add_parameters(model, self.parameters, "part")
        watch.add_parameters(model, self.outside, "all")
        for name in self.entered:
            watch.add_entered(name, model.get_submodule(name))
        for name in self.summed:
            watch.add_summed(model.get_submodule(name))
        for name in self.split:
            watch.add_split(name, model.get_submodule(name))
        return watch


class _Shares(FunctionWatch):
    """Follows both kinds of tensors through a forward; exchanges and other autograd functions give unknown ones."""

    def __init__(self) -> None:
        super().__init__()
        self._shares: Any = WeakIdKeyDictionary()
        self._names: dict[int, str] = {}

    def add_parameters(self, model: nn.Module, names: Sequence[tuple[str, str]], share: Share) -> None:
        for name, attribute in names:
            parameter = model.get_submodule(name)._parameters[attribute]
            self._shares.setdefault(parameter, share)
            self._names[id(parameter)] = f"{name}.{attribute}".lstrip(".")

    def add_entered(self, name: str, module: nn.Module) -> None:
        self.before(module, lambda args, kwargs: self._refuse_part(name, "enter", args, kwargs), first=True)
        self.before(module, lambda args, kwargs: self._note(first_activation(args, kwargs), "part"))

    def add_summed(self, module: nn.Module) -> None:
        self.after(module, lambda output: self._note(output, "all"))

    def add_split(self, name: str, module: nn.Module) -> None:
        self.before(
            module, lambda args, kwargs: self._refuse_part(name, "rowwise_split_input", args, kwargs), first=True
        )

    def _note(self, values: Any, share: Share) -> None:
        for each in tree_leaves(values):
            if isinstance(each, Tensor) and each.requires_grad:
                self._shares[each] = share

    def _refuse_part(self, name: str, style: str, args: Any, kwargs: Any) -> None:
        values = first_activation(args, kwargs)
        if values is not None and torch.is_grad_enabled() and self._shares.get(values) == "part":
            raise Misuse(
                f"{name!r}, of style {style!r}, is given a tensor inside of another module of style 'enter', whose "
                "gradient would count once for each rank. Give one of the two modules that style, and not both."
            )

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if is_question(func) or not torch.is_grad_enabled():
            return result
        tensors = [each for each in arguments(args, kwargs) if isinstance(each, Tensor) and each.requires_grad]
        by_share = {share: each for each in tensors if (share := self._shares.get(each)) is not None}
        if len(by_share) == 2:
            name = self._names.get(id(by_share["part"]))
            what = f"{name!r}" if name else "a tensor that is computed from a module's input of style 'enter'"
            if outer := self._names.get(id(by_share["all"])):
                raise Misuse(
                    f"The model's forward computes ({function_name(func)}) with {what}, inside of a module of style "
                    f"'enter', and with {outer!r} of outside, of whose gradient each rank along tp would have another "
                    f"part. Have {outer!r} in a module inside of that one, or give no module the style 'enter', each "
                    "'colwise' then exchanging its own input."
                )
            raise Misuse(
                f"The model's forward computes ({function_name(func)}) with {what}, of whose gradient each rank along "
                "tp has a part, and with what ranks have summed, of whose gradient each has all: one of them would be "
                "wrong. Nothing may follow the sum of a 'rowwise' inside of the same module of style 'enter', such as "
                "a 'colwise' or a norm, and no residual go around it. Give that style to a module around these "
                "matrices alone, or to none, each 'colwise' then exchanging its own input."
            )
        for share in by_share:
            self._note(result, share)
        return result
