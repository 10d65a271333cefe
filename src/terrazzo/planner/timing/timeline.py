"""When each stage of a pipeline runs what: the engine's own list of actions, with the seconds of each.

All that is said of idle ranks is from here. The terms of a step and its picture play the stages with the seconds of
each; what is said of a schedule alone plays equal ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from terrazzo.parallel.pipeline.schedules import Action, ActionKind, actions_of
from terrazzo.planner.caching import once_of_few
from terrazzo.planner.setup.setup import Setup

__all__ = ["PassSeconds", "Span", "StageSchedule", "Timeline", "idle_of_equal_stages"]


class PassSeconds(NamedTuple):
    """Seconds of a forward and of a backward."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Span:
    """When one stage runs on one micro-batch, in seconds since the step began."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step, without what comes behind its last backward.

    Attributes:
        ranks: what each rank along the pipeline runs, in its order.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        return max(spans[-1].end_s for spans in self.ranks)

    def idle_share(self, rank: int) -> float:
        """The part of the step in which a rank runs nothing."""
        return 1 - sum(span.end_s - span.start_s for span in self.ranks[rank]) / self.seconds


class StageSchedule(NamedTuple):
    """In which order the ranks of a pipeline run their stages in a step.

    Attributes:
        name: `1f1b`, `gpipe` or `zero_bubble`. chunks: stages of each rank.
        whole_rounds: micro-batches go through one chunk after the other in rounds of as many as there are ranks, of
            which the last may have fewer, as in Megatron-core; else in the engine's, which are all of one size.
    """

    name: str
    ranks: int
    chunks: int
    micro_batches: int
    whole_rounds: bool = False

    @classmethod
    def of(cls, setup: Setup) -> StageSchedule:
        """The schedule of a setup."""
        return cls(setup.pipeline, setup.mesh.pp, setup.virtual_stages, setup.micro_batches, setup.as_megatron)

    @property
    def places(self) -> int:
        """Micro-batches that the order has places for: some stay empty where too few fill the ranks, or a round."""
        if self.whole_rounds and self.chunks > 1:
            return -(-self.micro_batches // self.ranks) * self.ranks
        return max(self.micro_batches, self.ranks)

    def takes_time(self, action: Action) -> bool:
        """Whether an action lasts. In places that stay empty it does where another chunk follows in the round, which
        begins no sooner than if the round were full: what it needs comes round from the last rank.
        """
        if action.micro_batch < self.micro_batches:
            return True
        chunk, last = action.stage // self.ranks, self.chunks - 1
        return chunk != (last if action.kind is ActionKind.FORWARD else 0)

    def seconds(self, passes: Sequence[Sequence[tuple[float, float]]], send_s: float = 0.0) -> float:
        """Seconds until the last backward has ended. The arguments and errors are those of `timeline`."""
        return max(self.ends_of_ranks(passes, send_s))

    def ends_of_ranks(self, passes: Sequence[Sequence[tuple[float, float]]], send_s: float = 0.0) -> list[float]:
        """Seconds until each rank has ended its last turn. The arguments and errors are those of `timeline`."""
        ends = self._ends(passes, send_s)
        return [ends[place] for place in _played(self).last]

    def timeline(self, passes: Sequence[Sequence[tuple[float, float]]], send_s: float = 0.0) -> Timeline:
        """Have each rank run its actions as soon as it has ended the one before, and what it is given has come.

        Args:
            passes: seconds of one micro-batch, for each rank and each of its stages: `PassSeconds`, or such a pair.
            send_s: from the end of a stage's pass until the next stage has what it made; the sender goes on meanwhile.

        Raises:
            BadInput: micro-batches that do not make rounds of one size.
        """
        spans: list[list[Span]] = [[] for _ in range(self.ranks)]
        lasting = self._lasting(passes)
        for turn, end_s in zip(_turns(self), self._ends(passes, send_s)[1:], strict=True):
            if turn.action.micro_batch < self.micro_batches:
                spans[turn.action.stage % self.ranks].append(Span(turn.action, end_s - lasting[turn.kind], end_s))
        return Timeline(tuple(map(tuple, spans)))

    def _ends(self, passes: Sequence[Sequence[tuple[float, float]]], send_s: float) -> list[float]:
        """When each turn ends, in the order of `_turns`, behind the 0 at which the step begins."""
        lasting, travelling = self._lasting(passes), self._travelling(send_s)
        played = _played(self)
        ends = [0.0] * (1 + len(played.kind))
        turns = zip(played.before, played.given, played.kind, strict=True)
        for place, (before, given, kind) in enumerate(turns, 1):  # nothing is called here: a search plays thousands
            free, arrived = ends[before], ends[given] + travelling[kind]
            ends[place] = (free if free > arrived else arrived) + lasting[kind]
        return ends

    def _lasting(self, passes: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
        """Seconds of a turn by its kind. Gradients of weights that are put off take half of a backward (arXiv
        2401.10241, table 2).
        """
        seconds = [0.0]
        for stage in range(self.ranks * self.chunks):
            forward_s, backward_s = passes[stage % self.ranks][stage // self.ranks]
            put_off = backward_s / 2 if self.name == "zero_bubble" else 0.0
            seconds += [forward_s, backward_s - put_off, put_off]
        return seconds

    def _travelling(self, send_s: float) -> list[float]:
        """Seconds until a turn is given what another stage made for it, by its kind."""
        last = self.ranks * self.chunks - 1
        each = [(send_s if stage else 0.0, send_s if stage < last else 0.0, 0.0) for stage in range(last + 1)]
        return [0.0, *chain.from_iterable(each)]


def idle_of_equal_stages(setup: Setup) -> float:
    """Idle time of a rank over its useful time if all stages took as long, and a backward twice what a forward does.

    With full rounds that is (pp - 1) / (virtual_stages * micro_batches), under `zero_bubble` a third of it.
    """
    schedule = StageSchedule.of(setup)
    equal = [[(1.0, 2.0)] * schedule.chunks] * schedule.ranks
    return schedule.seconds(equal) / (3 * schedule.chunks * schedule.micro_batches) - 1


class _Turn(NamedTuple):
    """An action among all of a step.

    Attributes:
        before, given: the places among all turns, counted from 1, of what its rank ran before, and of the action whose
            result it needs; 0 is the begin of the step.
        kind: 1 + 3 * stage for a forward, 1 more for a backward and 2 for gradients of weights; 0 takes no time.
    """

    action: Action
    before: int
    given: int
    kind: int


class _Played(NamedTuple):
    """All turns of a step, by attribute: small enough for the schedules of many setups to be kept.

    Attributes:
        before, given, kind: of each turn, as of `_Turn`.
        last: the place of each rank's last.
    """

    before: array[int]
    given: array[int]
    kind: array[int]
    last: list[int]


@once_of_few
def _played(schedule: StageSchedule) -> _Played:
    before, given, kind, last = array("l"), array("l"), array("l"), [0] * schedule.ranks
    for place, turn in enumerate(_turns(schedule), 1):
        before.append(turn.before)
        given.append(turn.given)
        kind.append(turn.kind)
        last[turn.action.stage % schedule.ranks] = place
    return _Played(before, given, kind, last)


_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)


def _turns(schedule: StageSchedule) -> Iterator[_Turn]:
    """All actions of a step, each behind those that it waits for."""
    ranks, places = schedule.ranks, schedule.places
    last = ranks * schedule.chunks - 1
    own, count = [0] * ranks, 0
    # Of every stage's forwards, backwards and gradients of weights, micro-batch by micro-batch: where they ended.
    ended: list[int | None] = [None] * (3 * (last + 1) * places)
    needs = [_needed_row(stage, kind, last) for stage in range(last + 1) for kind in _KINDS]
    left = [iter(order) for order in actions_of(schedule.name, ranks, schedule.chunks, places)]
    waiting = [next(order, None) for order in left]
    while any(waiting):
        for rank, order in enumerate(left):
            while (action := waiting[rank]) is not None:
                row = 3 * action.stage + _KINDS.index(action.kind)
                needed = needs[row]
                if (given := 0 if needed is None else ended[needed * places + action.micro_batch]) is None:
                    break
                yield _Turn(action, own[rank], given, 1 + row if schedule.takes_time(action) else 0)
                count += 1
                own[rank] = ended[row * places + action.micro_batch] = count
                waiting[rank] = next(order, None)


def _needed_row(stage: int, kind: ActionKind, last_stage: int) -> int | None:
    """Which actions of the same micro-batch give an action what it needs: 3 * stage of a forward, 1 more of a backward;
    None for the first forward.
    """
    if kind is ActionKind.WEIGHT:
        return 3 * stage + 1
    if kind is ActionKind.FORWARD:
        return 3 * (stage - 1) if stage else None
    return 3 * stage if stage == last_stage else 3 * (stage + 1) + 1
