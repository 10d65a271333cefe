"""A model's forward on a rank that has some of its stages.

The model's forward runs on every rank, up to the first module behind this rank's stage: what reaches that is sent on,
and there the forward ends. Modules of earlier stages run none of their hooks: the last of them hands out what the stage
before has sent, and the others what cannot be computed with. What the model does between two modules of the line runs
on ranks of later stages too, so a stage may begin only where it does nothing with the values: each tensor is checked to
be the one that the module before has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.engine import Stages, inside_backward
from terrazzo.engine.plan.absent import Absent
from terrazzo.engine.plan.stages import Turn
from terrazzo.engine.runtime.overrides import function_name
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel.pipeline.schedules import Action, ActionKind, actions_of

__all__ = ["ModelLine", "put_in_line"]


@dataclass(frozen=True)
class ModelLine(Stages):
    """The modules through which a model's values go one after the other, cut into stages.

    Attributes:
        names: of the modules.
        bounds: the half-open interval of modules of each stage.
        schedule: as of `Pipeline`.
        tied: names of the parameters that the model reads behind its last module, in the last stage.
    """

    names: tuple[str, ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    schedule: str = "1f1b"
    tied: tuple[str, ...] = ()
    running: _Running = field(default_factory=lambda: _Running(), compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLine:
        copied = ModelLine(self.ranks, self.rank, self.chunks, self.names, self.bounds, self.schedule, self.tied)
        memo[id(self)] = copied
        return copied

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """What this rank does in a step.

        Raises:
            BadInput: too few micro-batches.
        """
        return actions_of(self.schedule, self.ranks, len(self.chunks), micro_batches)[self.rank]

    def turns(self, micro_batches: int) -> Sequence[Turn]:
        return [
            Turn(each.stage // self.ranks, each.kind is ActionKind.FORWARD, self.is_last(each.stage))
            for each in self.actions(micro_batches)
            if each.kind is not ActionKind.WEIGHT
        ]

    def holders(self, names: Sequence[str]) -> tuple[int, ...]:
        places = [place for place, module in enumerate(self.names) if any(n.startswith(f"{module}.") for n in names)]
        stages = {stage for stage, (begin, end) in enumerate(self.bounds) for place in places if begin <= place < end}
        if any(name in self.tied for name in names):
            stages.add(len(self.bounds) - 1)
        return tuple(sorted({stage % self.ranks for stage in stages}))

    def runs(self, module: str) -> bool:
        return bool(self.chunks_of(module)) if self.has(module) else self.rank == self.ranks - 1

    def has(self, module: str) -> bool:
        return any(f"{module}.".startswith(f"{name}.") for name in self.names)

    def is_last(self, stage: int) -> bool:
        return stage == len(self.bounds) - 1

    def enter(self, stage: int, received: Tensor | None) -> None:
        """The forward that comes is of `stage`, which the stage before has sent `received`."""
        self.running.begin(stage, received)

    def leave(self) -> None:
        """It has ended."""
        self.running.end()


@dataclass
class _Running:
    """The forward that runs.

    Attributes:
        stage: None outside of one.
        come_to: how many modules of the line have been called.
        received: from the stage before.
        values: what the last of them has returned.
        version: of these then: how often they had been changed in place.
    """

    stage: int | None = None
    come_to: int = 0
    received: Any = None
    values: Any = None
    version: int = 0

    def begin(self, stage: int, received: Tensor | None) -> None:
        self.stage, self.come_to, self.received = stage, 0, received
        self.values = None

    def end(self) -> None:
        self.stage = self.received = self.values = None


class _InLine:
    """What calling a module of the line does."""

    def __init__(self, inner: Callable[..., Any], line: ModelLine, place: int) -> None:
        self.inner, self.line, self.place = inner, line, place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running, line = self.line.running, self.line
        if inside_backward():  # it is computed again
            return self.inner(*args, **kwargs)
        first, end = line.bounds[_stage_of(line)]
        if running.come_to != self.place:
            expected = line.names[running.come_to] if running.come_to < len(line.names) else "the end of the forward"
            raise BadInput(
                f"The model called {line.names[self.place]!r} where {expected!r} comes next in the pipeline: modules "
                "of the line are called once each, in its order. Give tz.Pipeline a 'line' that has them as forward "
                "calls them, or a module around those that belong together."
            )
        running.come_to += 1
        values = args[0] if args else next(iter(kwargs.values()), None)
        if self.place > 0 and (self.place <= first or self.place >= end):
            self._check(values)
        if self.place >= end:
            raise _StageEnded
        if self.place >= first:
            before = _graphs_in(args, kwargs)
            running.values = self._single(self.inner(*args, **kwargs))
            self._check_kept(before, _graphs_in(args, kwargs))
        else:  # what the stage before has sent is the output of its last module alone
            received = running.received
            running.values = received if self.place == first - 1 else _Away(line.names[self.place], received)
        if self.place + 1 in (first, end):
            running.values = _counted(running.values)
        running.version = _version_of(running.values)
        return running.values

    def _check(self, values: Any) -> None:
        """Refuse what is not the tensor that the module before has returned."""
        running = self.line.running
        if not _is_all_of(values, running.values) or _version_of(values) != running.version:
            before, name = self.line.names[self.place - 1], self.line.names[self.place]
            if _is_cut_off(values, running.values):
                raise BadInput(
                    f"The model detaches what {before!r} returns before it gives it to {name!r}, between two stages: "
                    "no gradient would come to the one before. In the place of that freeze what is in front with "
                    "requires_grad_(False), and choose tz.Pipeline(split=[...]) whose first stage trains a module too."
                )
            raise BadInput(
                f"The model changes what {before!r} returns before it gives it to {name!r} as its first argument, "
                "which each rank of a pipeline would do: no stage may begin between the two. Choose tz.Pipeline(split="
                "[...]) that keeps them in one stage, or do that inside of one of these modules."
            )

    def _check_kept(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Refuse values that go on in a dict or list which the module was given."""
        if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True)):
            raise BadInput(
                f"{self.line.names[self.place]!r} puts what it computed into a list or dict that it was given, which "
                "ranks of other stages would not see. Have modules of a pipeline's line hand on all in the tensor that "
                "they return, and losses of their own through tz.step(auxiliary=...)."
            )

    def _single(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise BadInput(
                f"{self.line.names[self.place]!r} returns a {type(output).__name__}, and modules of a pipeline's line "
                "hand one tensor to the next: have it return that alone."
            )
        return output


class _Away(Absent):
    """What a module of an earlier stage has returned, of which nothing was sent here.

    What a model does to such values on their way to the next module, each element by itself or in place, is done there:
    scaled by a number, dropped out or masked, this is what it was.
    """

    def __getattr__(self, attribute: str) -> Any:
        return self._changed if _is_in_place(attribute) else super().__getattr__(attribute)

    def _changed(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __setitem__(self, index: Any, values: Any) -> None:
        pass

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _changed

    def _scaled(self, other: Any) -> Self:
        if isinstance(other, int | float) or (isinstance(other, Tensor) and other.dim() == 0):
            return self
        raise self.refusal("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _scaled

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], cls):
            in_place = _is_in_place(function_name(func)) or (kwargs or {}).get("inplace", False)
            if in_place or func is F.dropout:
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def refusal(self, what: str) -> Misuse:
        return Misuse(
            f"{what} was called on what {self.name!r} returns, which a stage before has kept: a stage is sent what the "
            "module in front of its first one returns, and nothing else. Hand it on inside of that tensor, or choose "
            "tz.Pipeline(split=[...]) that keeps all that uses it in one stage."
        )


class _StageEnded(Exception):
    """The model's forward has come to the first module of the next stage: that and what is behind is run there."""


class _StageForward:
    """The forward of the model: that of one stage."""

    def __init__(self, inner: Callable[..., Any], line: ModelLine) -> None:
        self.inner, self.line = inner, line

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        line = self.line
        _stage_of(line)
        try:
            output = self.inner(*args, **kwargs)
        except _StageEnded:
            return line.running.values
        come_to = line.running.come_to
        if come_to < len(line.names):
            raise BadInput(
                f"The model's forward has ended without {line.names[come_to]!r}, which the pipeline's line has: "
                "modules of the line are called once each, in every forward."
            )
        return output


def _is_in_place(name: str) -> bool:
    """Whether an operation of torch is named as those are that change what they are called on: `mul_`."""
    return name.endswith("_") and not name.startswith("_")


def _is_all_of(tensor: Any, values: Any) -> bool:
    """Whether it is the same tensor, or a view of all of it: transformers has heads take `[:, 0:, :]`."""
    if tensor is values or not (type(tensor) is type(values) is Tensor):
        return tensor is values
    alike = tensor.shape == values.shape and tensor.stride() == values.stride() and tensor.dtype == values.dtype
    return alike and tensor.data_ptr() == values.data_ptr() and not _is_cut_off(tensor, values)


def _is_cut_off(tensor: Any, values: Any) -> bool:
    """Whether gradients of the one do not go on to the other."""
    return type(tensor) is type(values) is Tensor and tensor.requires_grad != values.requires_grad


def _counted(values: Any) -> Any:
    """The same as a tensor whose changes in place torch counts, which it does not of one made in inference mode."""
    if not isinstance(values, Tensor) or not values.is_inference():
        return values
    with torch.inference_mode(False):
        return values.clone()


def _version_of(values: Any) -> int:
    """How often it has been changed in place, as far as torch counts."""
    counts = type(values) is Tensor and not values.is_inference()
    return values._version if counts else 0


def _graphs_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors in what a module is given that were computed from weights."""
    leaves = tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf]


def _stage_of(line: ModelLine) -> int:
    if line.running.stage is None:
        raise Misuse(
            "A model of which ranks have stages was called by itself, and this rank has a part of it: call "
            "tz.step(model, micro_batches, loss_fn), with all micro-batches of a step, on every rank. Under "
            "torch.no_grad() it evaluates, and loss_fn is given the outputs on the ranks of the last stage. Text is "
            "written by a model without pp, which loads the same checkpoint."
        )
    return line.running.stage


def put_in_line(model: nn.Module, modules: Sequence[nn.Module], line: ModelLine) -> None:
    """Have the model run as one of the stages of `line`, whose modules these are."""
    for place, module in enumerate(modules):
        own: Any = module
        own._call_impl = _InLine(own._call_impl, line, place)  # around hooks too, which may change what it is given
    model.forward = _StageForward(model.forward, line)
    model.register_state_dict_pre_hook(_refuse_states)


def _refuse_states(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A state dict of some stages would be half a model under the names of a whole one."""
    if not keep_vars:  # else parameters are asked for, not their values
        raise Misuse(
            "state_dict() of a model of which this rank has stages: the parameters of the others are not here. "
            "After tz.shard, model.state_dict() gives all on every rank, tz.full_state_dict(model) on rank 0, and "
            "'with tz.gathered(model) as parameters:' this rank's."
        )
