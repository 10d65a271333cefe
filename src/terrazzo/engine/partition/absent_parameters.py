"""Parameters that a model has and this rank lacks: the ranks that run other stages of a pipeline hold them.

Modules stay in the model, so that names and units do not depend on the mesh. An `Absent`, which refuses to be read,
takes the place of each such parameter. Every rank still draws its initial values, in the order of units, and drops
them: initial values do not depend on the mesh either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import nn

from terrazzo.engine.runtime.overrides import function_name
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import Misuse
from terrazzo.marks import Mark

__all__ = ["Absent", "absent_in_place", "give_up", "readable"]


class Absent:
    """Stands where a parameter of a stage that other ranks run would be read. It is no tensor: it has no memory.

    Args:
        name: of the parameter in the model.
        like: what it is the shape, dtype and device of.
    """

    def __init__(self, name: str, like: torch.Tensor) -> None:
        self.name = name
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise self.refusal(attribute)

    def __getitem__(self, index: Any) -> NoReturn:
        raise self.refusal("indexing")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).refusal(function_name(func))

    def refusal(self, what: str) -> Misuse:
        """The error of `what`, which would need the parameter's values."""
        return Misuse(
            f"{what} was called on {self.name!r}, a parameter of a stage that other ranks of the pipeline run. Read it "
            "in the forward of its own module of the line alone, or give tz.Pipeline(line=[...]) a module around all "
            "that read it; change it before tz.parallelize."
        )


@dataclass(frozen=True)
class _Elsewhere:
    """A parameter of other ranks, as far as it is known here.

    Attributes:
        parameter: on the meta device.
        is_new: whether it is still to be given its first values.
        shown: the attribute in its place.
    """

    parameter: nn.Parameter
    is_new: bool
    shown: Absent


_ELSEWHERE = Mark[dict[str, _Elsewhere]]("terrazzo_elsewhere")


def give_up(module: nn.Module, path: str, away_for: dict[nn.Parameter, nn.Parameter | None]) -> None:
    """Have `module`, of a stage that other ranks run, be without its own parameters.

    Args:
        path: its name.
        away_for: what stands for each parameter that has been given up, to which those of `module` are added, and None
            for those that stay here. So names that are tied stay tied.
    """
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in parameters.items():
        if parameter not in away_for:
            like = torch.empty_like(parameter, device="meta")
            away_for[parameter] = nn.Parameter(like, requires_grad=parameter.requires_grad)
        if (away := away_for[parameter]) is None:
            continue
        module._parameters[name] = None
        shown = Absent(f"{path}.{name}", parameter)
        absent = _Elsewhere(away, parameter.is_meta, shown)
        _ELSEWHERE.leave(module, {**(_ELSEWHERE.find(module) or {}), name: absent})
        vars(module)[name] = shown


@contextlib.contextmanager
def absent_in_place(model: nn.Module) -> Iterator[dict[nn.Parameter, bool]]:
    """Have the parameters of other ranks in their places, on the meta device, inside.

    Gives these, and for each whether it is still to be given its first values.
    """
    with contextlib.ExitStack() as until_end:
        absent: dict[nn.Parameter, bool] = {}
        for module in model.modules():
            if not (elsewhere := _ELSEWHERE.find(module)):
                continue
            until_end.enter_context(readable(module))
            module._parameters.update({name: each.parameter for name, each in elsewhere.items()})
            until_end.callback(module._parameters.update, dict.fromkeys(elsewhere))
            absent |= {each.parameter: each.is_new for each in elsewhere.values()}
        yield absent


@contextlib.contextmanager
def readable(module: nn.Module) -> Iterator[None]:
    """Have what is among the parameters of `module` read as such inside, also where other ranks have it."""
    elsewhere = _ELSEWHERE.find(module) or {}
    for name in elsewhere:
        del vars(module)[name]
    try:
        yield
    finally:
        vars(module).update({name: each.shown for name, each in elsewhere.items()})
