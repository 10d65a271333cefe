"""A model's forward on a rank that has some of its stages.

The model's own forward runs on every rank, and the modules of its line are called as follows:

- A module of an earlier stage does not run. The last of these returns what the stage before has sent, and the others
  return `AbsentValues`.
- A module of this rank's stage runs.
- The first module of the next stage ends the forward: its input is this stage's output.

What the model computes between two modules of the line runs on ranks of later stages too. So a stage may begin only
where it computes nothing between: each input is checked to be the tensor that the module before has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine import inside_backward
from terrazzo.engine.runtime.method_replacement import MethodReplacement, replaced_of
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel.pipeline.absent_values import AbsentValues
from terrazzo.parallel.pipeline.pipeline_stages import PipelineStages

__all__ = ["put_in_line"]

_CALL = "_call_impl"


class _ModuleCall(MethodReplacement):
    """The call of a module of the line, around hooks too, which may change what it is given."""

    def __init__(
        self, module: nn.Module, replaced: Callable[..., Any] | None, stages: PipelineStages, place: int
    ) -> None:
        super().__init__(module, _CALL, replaced)
        self.stages, self.place = stages, place

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleCall, (self.module, self.replaced, self.stages, self.place)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running, stages = self.stages.running, self.stages
        if inside_backward():  # it is computed again
            return self.bound()(*args, **kwargs)
        first, end = stages.bounds[_stage_of(stages)]
        if running.come_to != self.place:
            expected = stages.line[running.come_to] if running.come_to < len(stages.line) else "the end of the forward"
            raise BadInput(
                f"The model called {stages.line[self.place]!r} where {expected!r} comes next in the pipeline: modules "
                "of the line are called once each, in its order. Give tz.Pipeline a 'line' that has them as forward "
                "calls them, or a module around those that belong together."
            )
        running.come_to += 1
        values = args[0] if args else self._named(kwargs)
        if self.place > 0 and (self.place <= first or self.place >= end):
            self._check(values)
        if self.place >= end:
            raise _StageEnded
        if self.place >= first:
            before = _graphs_in(args, kwargs)
            running.values = self._single(self.bound()(*args, **kwargs))
            self._check_kept(before, _graphs_in(args, kwargs))
        else:  # what the stage before has sent is the output of its last module alone
            received = running.received
            running.values = received if self.place == first - 1 else AbsentValues(stages.line[self.place], received)
        if self.place + 1 in (first, end):
            running.values = _counted(running.values)
        running.version = _version_of(running.values)
        return running.values

    def _named(self, kwargs: Mapping[str, Any]) -> Any:
        """Of what a module is given by name, what the module before has returned; else what is named first."""
        given = list(kwargs.values())
        return next((each for each in given if _is_all_of(each, self.stages.running.values)), next(iter(given), None))

    def _check(self, values: Any) -> None:
        """Refuse what is not the tensor that the module before has returned."""
        running = self.stages.running
        if not _is_all_of(values, running.values) or _version_of(values) != running.version:
            before, name = self.stages.line[self.place - 1], self.stages.line[self.place]
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
                f"{self.stages.line[self.place]!r} puts what it computed into a list or dict that it was given, which "
                "ranks of other stages would not see. Have modules of a pipeline's line hand on all in the tensor that "
                "they return, and losses of their own through tz.step(auxiliary=...)."
            )

    def _single(self, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise BadInput(
                f"{self.stages.line[self.place]!r} returns a {type(output).__name__}, and modules of a pipeline's line "
                "hand one tensor to the next: have it return that alone."
            )
        return output


class _StageEnded(Exception):
    """The model's forward has come to the first module of the next stage: that and what is behind is run there."""


class _StageForward(MethodReplacement):
    """The forward of the model: that of one stage."""

    def __init__(self, model: nn.Module, replaced: Callable[..., Any] | None, stages: PipelineStages) -> None:
        super().__init__(model, "forward", replaced)
        self.stages = stages

    def __reduce__(self) -> tuple[Any, ...]:
        return _StageForward, (self.module, self.replaced, self.stages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self.stages
        _stage_of(stages)
        try:
            output = self.bound()(*args, **kwargs)
        except _StageEnded:
            return stages.running.values
        come_to = stages.running.come_to
        if come_to < len(stages.line):
            raise BadInput(
                f"The model's forward has ended without {stages.line[come_to]!r}, which the pipeline's line has: "
                "modules of the line are called once each, in every forward."
            )
        return output


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


def _stage_of(stages: PipelineStages) -> int:
    if stages.running.stage is None:
        raise Misuse(
            "A model of which ranks have stages was called by itself, and this rank has a part of it: call "
            "tz.step(model, micro_batches, loss_fn), with all micro-batches of a step, on every rank. Under "
            "torch.no_grad() it evaluates, and loss_fn is given the outputs on the ranks of the last stage. Text is "
            "written by a model without pp, which loads the same checkpoint."
        )
    return stages.running.stage


def put_in_line(model: nn.Module, modules: Sequence[nn.Module], stages: PipelineStages) -> None:
    """Have the model run as one of the stages of `stages`, whose line these modules are."""
    for place, module in enumerate(modules):
        vars(module)[_CALL] = _ModuleCall(module, replaced_of(module, _CALL), stages, place)
    model.forward = _StageForward(model, replaced_of(model, "forward"), stages)
    model.register_state_dict_pre_hook(_refuse_states)


def _refuse_states(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A state dict of some stages would be half a model under the names of a whole one."""
    if not keep_vars:  # else parameters are asked for, not their values
        raise Misuse(
            "state_dict() of a model of which this rank has stages: the parameters of the others are not here. "
            "After tz.shard, model.state_dict() gives all on every rank, tz.full_state_dict(model) on rank 0, and "
            "'with tz.gathered(model) as parameters:' this rank's."
        )
