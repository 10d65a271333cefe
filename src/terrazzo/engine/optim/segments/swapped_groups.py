"""The param groups of one optimizer that drives a model: inside its steps they hold segments, else parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.stock.stepper import bring_back
from terrazzo.errors import Misuse

__all__ = ["SwappedGroups"]


class SwappedGroups:
    """The param groups of one optimizer. They are known by their order, and so are the parameters in each.

    Args:
        first: number of the first among the param groups of all the model's optimizers.

    Attributes:
        numbers: of them among these.
        parameters: of each, as the optimizer was built over them.
        segments: of all of them.
        stepping: whether this is inside of a step.
    """

    def __init__(self, optimizer: Optimizer, first: int) -> None:
        self._listed = [*optimizer.param_groups]
        self.numbers = range(first, first + len(self._listed))
        self.parameters = [tuple(group["params"]) for group in self._listed]
        self._names = [group.get("param_names") for group in self._listed]
        self.segments: Sequence[Segment] = ()
        self.stepping = False
        self._excluded: Callable[[Segment], bool] = _is_skipped

    def set_segments(self, segments: Sequence[Segment]) -> None:
        """Have these segments, of all the groups, inside of steps."""
        self.segments = segments

    def hold_segments(self, excluded: Callable[[Segment], bool]) -> None:
        """Have each group hold its segments, none of which has a gradient.

        Args:
            excluded: whether the optimizer's own step is to leave one alone, without a gradient too: it decays all,
                perhaps.
        """
        self.stepping, self._excluded = True, excluded
        self._fill()
        self._drop_gradients()

    def skip_step(self) -> None:
        """Have the optimizer's own step leave all alone."""
        self._excluded = _is_skipped
        self._fill()

    def recut(self, parts: Sequence[Sequence[Segment]]) -> None:
        """Put `parts` in the place of the segments that they were cut from."""
        segments = [segment for pieces in parts for segment in pieces]
        if segments != self.segments:
            self.segments = segments
            self._fill()

    def hold_parameters(self) -> None:
        """A step has ended, be it by raising: groups hold what they were given, and new values are where they rest."""
        if self.stepping:
            for segment in self.segments:
                if isinstance(segment.bucket.master, Buffer):
                    bring_back(segment.parameter, segment.bucket.master.part(segment.range))
            self.stepping, self._excluded = False, _is_skipped
            self._fill()
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Segments have gradients inside a step alone."""
        for segment in self.segments:
            segment.parameter.grad = None

    def _fill(self) -> None:
        if not self.stepping:
            for parameters, names, group in zip(self.parameters, self._names, self._listed, strict=True):
                group["params"] = [*parameters]
                if names is not None:
                    group["param_names"] = names
            return
        by_group: dict[int, list[Segment]] = {number: [] for number in self.numbers}
        for segment in self.segments:
            if not self._excluded(segment):
                by_group[segment.group].append(segment)
        for own, names, group in zip(by_group.values(), self._names, self._listed, strict=True):
            group["params"] = [segment.parameter for segment in own]
            if names is not None:
                group["param_names"] = [segment.bucket.members[segment.start].name for segment in own]

    def check(self, optimizer: Optimizer) -> None:
        """Refuse groups that have been removed or reordered.

        Raises:
            Misuse: there.
        """
        now, listed = optimizer.param_groups, {id(group): index for index, group in enumerate(self._listed)}
        if len(now) != len(self._listed) or any(listed.get(id(group), i) != i for i, group in enumerate(now)):
            raise Misuse(
                f"The param groups of this {type(optimizer).__name__} were removed or reordered after sharding: it had"
                f" {len(self._listed)} and has {len(now)}. Leave optimizer.param_groups as it was, and change what is"
                " in a group, such as its 'lr'; or change the groups before tz.shard."
            )

    def check_parameters(self, optimizer: Optimizer) -> None:
        """Refuse groups that hold other parameters than they were given.

        Raises:
            Misuse: there.
        """
        for number, (parameters, group) in enumerate(zip(self.parameters, optimizer.param_groups, strict=True)):
            listed = group["params"]
            if len(listed) != len(parameters) or not all(map(operator.is_, listed, parameters)):
                raise Misuse(
                    f"The parameters in param_groups[{number}] of this {type(optimizer).__name__} were changed after "
                    "sharding, which its steps would not follow. Leave the list as it was: a parameter whose .grad is "
                    "None is not stepped, and optimizers are built anew with tz.attach."
                )


def _is_skipped(segment: Segment) -> bool:
    """Whether a step leaves a segment alone: each, outside of a step and in one that is skipped."""
    return True
