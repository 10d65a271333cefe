"""Parameters that a model has and this rank has not: ranks with other stages of a pipeline have them.

Modules stay where they are, with what refuses to be read in the place of such a parameter; so names, and which modules
are units, do not depend on the mesh. What has no values yet is drawn here too, in its turn, and given up: neither do
initial values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import nn

from terrazzo.engine.plan.axes import Axes
from terrazzo.engine.runtime.overrides import function_name
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import Misuse
from terrazzo.marks import Mark

__all__ = ["STAGES_OF", "Absent", "Stages", "Turn", "as_one", "give_up", "readable", "require_whole", "stages_of"]


class Turn(NamedTuple):
    """A forward or a backward of one chunk in a step.

    Attributes:
        ends_model: whether the chunk's output is the model's.
    """

    chunk: int
    is_forward: bool
    ends_model: bool


@dataclass(frozen=True)
class Stages:
    """The stages of a model that this rank runs.

    Attributes:
        ranks: how many have stages of the model.
        rank: this one's place among them.
        chunks: for each of this rank's stages, the names of the modules that it runs.
    """

    ranks: int
    rank: int
    chunks: tuple[tuple[str, ...], ...]

    def turns(self, micro_batches: int) -> Sequence[Turn]:
        """What this rank does in a step, in its order.

        Raises:
            BadInput: too few micro-batches.
        """
        raise NotImplementedError

    def holders(self, names: Sequence[str]) -> tuple[int, ...]:
        """The ranks, in order, that have a parameter of these names; several where their stages share it."""
        raise NotImplementedError

    def runs(self, module: str) -> bool:
        """Whether this rank runs a module: in one of its stages or, where it has the last one, behind all."""
        raise NotImplementedError

    def share_out(self, units: Sequence[Iterable[str]]) -> list[list[int]]:
        """For each chunk, which of the units it uses, each given by the names of its parameters."""
        used = [set(self.chunks_of(*names)) for names in units]
        return [[place for place, chunks in enumerate(used) if chunk in chunks] for chunk in range(len(self.chunks))]

    def chunks_of(self, *names: str) -> list[int]:
        """Which chunks use a module or a parameter of these names."""
        return [
            number
            for number, modules in enumerate(self.chunks)
            if any(f"{name}.".startswith(f"{module}.") for module in modules for name in names)
        ]


STAGES_OF = Mark[Stages]("terrazzo_stages")
"""On a model of which this rank has stages: these."""


def stages_of(model: nn.Module) -> Stages | None:
    """The stages of it that this rank has; None where that is all of it."""
    return STAGES_OF.find(model)


def require_whole(axes: Axes, what: str) -> None:
    """Refuse `what` where ranks have stages of the model: it would be of one stage's parameters alone.

    Raises:
        Misuse: there, on every rank.
    """
    if axes.stages:
        raise Misuse(
            f"{what} of a model in stages (pp {axes.size(axes.stages)}) is not supported yet: this rank has the "
            "parameters of its own stages alone. Save it by tz.checkpoint.save(path, model, optimizer), or take pp 1."
        )


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
        """What `what` raises that would need its values."""
        return Misuse(
            f"{what} was called on {self.name!r}, a parameter of a stage that other ranks of the pipeline run. Read it "
            "in the forward of its own module of the line alone, or give tz.Pipeline(line=[...]) a module around all "
            "that read it."
        )


@dataclass(frozen=True)
class _Elsewhere:
    """What is known here of a parameter of other ranks.

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
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in held.items():
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
def as_one(model: nn.Module) -> Iterator[dict[nn.Parameter, bool]]:
    """Inside, the parameters of other ranks are in their places, on the meta device.

    Gives these, and for each whether it is still to be given its first values.
    """
    with contextlib.ExitStack() as until_end:
        found: dict[nn.Parameter, bool] = {}
        for module in model.modules():
            held = _ELSEWHERE.find(module) or {}
            until_end.enter_context(readable(module))
            module._parameters.update({name: each.parameter for name, each in held.items()})
            until_end.callback(module._parameters.update, dict.fromkeys(held))
            found |= {each.parameter: each.is_new for each in held.values()}
        yield found


@contextlib.contextmanager
def readable(module: nn.Module) -> Iterator[None]:
    """Inside, what is among the parameters of `module` is read as such, also where other ranks have it."""
    held = _ELSEWHERE.find(module) or {}
    for name in held:
        del vars(module)[name]
    try:
        yield
    finally:
        vars(module).update({name: each.shown for name, each in held.items()})
