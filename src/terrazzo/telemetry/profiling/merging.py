"""Merges what the ranks of a profiled script have written into the records of a run.

A rank knows how long it has waited, but not for whom: when the others came to the same exchange is in their files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from terrazzo.engine.instrumentation.times import Times
from terrazzo.telemetry.flight.clocks import clock_shifts
from terrazzo.telemetry.log.step_record import StepRecord
from terrazzo.telemetry.profiling.probe import EVERY
from terrazzo.telemetry.steps.step_recorder import PHASES, StepTimes, compared_seconds, exchange_row, time_fields

__all__ = ["StepMerger"]

TraceLine = Mapping[str, Any]


class StepMerger:
    """Reads the ranks' files while they are written, and makes records of steps that all ranks have finished.

    Args:
        folder: where the ranks write.

    Attributes:
        facts: what the script uses, as rank 0 has written.
        made: how many steps are in records.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self.made = 0
        self._number = self._done = 0
        self.facts: dict[str, Any] = {}

    def new(self, at_end: bool = False) -> Iterator[tuple[int, StepRecord]]:
        """New records, each with the number of its last step.

        Where the script was started again its steps count on, after the last one that all ranks had finished before.

        Args:
            at_end: the script has ended, so that the steps that are left become a record too.
        """
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            self._ranks.setdefault(int(path.stem.removeprefix("rank-")), _Rank(path)).read()
        ranks = [self._ranks[number] for number in sorted(self._ranks)]
        if not ranks or (len(ranks) < max(rank.here for rank in ranks) and not at_end):
            return
        self.facts = ranks[0].facts
        numbers = sorted({number for rank in ranks for number in rank.starts})
        for number in [each for each in numbers if each >= self._number]:
            if number != self._number:
                self._number, self._done = number, 0
            starts = [rank.starts[number] for rank in ranks if number in rank.starts]
            if len(starts) == len(ranks):  # else a rank has not ended its first step
                yield from self._of_start(starts, at_end or number != numbers[-1])

    def _of_start(self, starts: Sequence[_Start], is_over: bool) -> Iterator[tuple[int, StepRecord]]:
        while (last := self._next(starts, is_over)) is not None:
            lines = [[start.steps.pop(step) for step in range(self._done + 1, last + 1)] for start in starts]
            self.made += last - self._done
            self._done = last
            record = _of_sharded(lines) if "seconds" not in lines[0][0] else _of_script(starts, lines)
            if record is not None:
                yield self.made, record

    def _next(self, starts: Sequence[_Start], is_over: bool) -> int | None:
        """The last step of the next record: the first step, and every `EVERY` steps after it; None if not done yet."""
        done = min(start.last for start in starts)
        last = 1 if self._done == 0 else self._done + EVERY
        last = min(last, done) if is_over else last
        return last if self._done < last <= done else None


class _Start:
    """Steps of one rank from one start of the script to the next, counted from 1 on."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.steps: dict[int, TraceLine] = {}
        self.last = 0


class _Rank:
    """What has been read of one rank's file: starts by their number, which are those of the other ranks."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.facts: dict[str, Any] = {}
        self.starts: dict[int, _Start] = {}
        self.here = 1
        self._newest = -1

    def read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for text in whole.splitlines():
            with suppress(json.JSONDecodeError):  # the last line of a process that was killed while it wrote
                self._take(json.loads(text))

    def _take(self, line: TraceLine) -> None:
        if "begins" in line:
            about = line["begins"]
            self.here = about.get("here", 1)
            # torchrun counts its restarts; a rank that ended no step of one has no line of it
            self._newest = max(self._newest + 1, about.get("restart", 0))
            self.starts[self._newest] = _Start(about)
        elif "facts" in line:
            self.facts = line["facts"]
        else:
            start = self.starts[self._newest]
            start.last = line["step"]
            start.steps[start.last] = line


def _of_sharded(lines: Sequence[Sequence[TraceLine]]) -> StepRecord | None:
    """The record of a model that Terrazzo shards: its own step record, which is in the last line of each rank."""
    ends = [own[-1] for own in lines]
    if any("record" not in line for line in ends):
        return None
    names = ends[0]["skew"]
    skew = {name: [line["skew"][name][0] for line in ends] for name in names}
    return cast(StepRecord, {**ends[0]["record"], "skew": skew})


def _of_script(starts: Sequence[_Start], lines: Sequence[Sequence[TraceLine]]) -> StepRecord:
    """The mean of these steps on rank 0, and the times of all ranks to compare."""
    ends = [dict(enumerate(line["end"] for line in own)) for own in lines]
    arrived = _arrivals(lines, clock_shifts([start.about["boot"] for start in starts], ends))
    spent = [_step_times(own, arrived[index]) for index, own in enumerate(lines)]
    steps, on_cuda = len(lines[0]), bool(starts[0].about["on_cuda"])
    record = time_fields(spent[0], steps, on_cuda)
    if on_cuda:
        looks = sum(line["looks"] for line in lines[0])
        record["starved"] = sum(line["empty"] for line in lines[0]) / max(1, looks)
    else:
        record["comm"] = {
            key.strip(): exchange_row(times, steps, n=times.count / steps) for key, times in _by_key(spent[0].data)
        }
    record["memory_bytes"] = lines[0][-1]["memory"]
    compared = [compared_seconds(own, steps, on_cuda) for own in spent]
    record["skew"] = {name: [own[name] for own in compared] for name in compared[0]}
    record["skew"]["peak_bytes"] = [own[-1]["memory"]["peak"] for own in lines]
    return record


_ExchangeKey = tuple[str, str, int]
"""A group, a kind, and the ordinal among the group's exchanges of that kind: the same on all ranks of the group."""


def _arrivals(lines: Sequence[Sequence[TraceLine]], clocks: Sequence[float]) -> list[dict[_ExchangeKey, float]]:
    """When the last rank came to each exchange, by each rank's own clock; only exchanges that all ranks have noted.

    Not of `send`, in which two ranks of a group meet, each by an ordinal of its own.
    """
    came: dict[_ExchangeKey, list[float]] = defaultdict(list)
    sizes = {}
    for own, clock in zip(lines, clocks, strict=True):
        for line in own:
            for group, ordinal, kind, size, issued, *_ in line["waits"]:
                if kind != "send":
                    came[group, kind, ordinal].append(issued + clock)
                    sizes[group, kind, ordinal] = size
    known = {key: max(times) for key, times in came.items() if len(times) == sizes[key] > 1}
    return [{key: there - clock for key, there in known.items()} for clock in clocks]


def _step_times(own: Sequence[TraceLine], arrived: Mapping[_ExchangeKey, float]) -> StepTimes:
    seconds, waited = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    data: dict[tuple[str, str], Times] = defaultdict(Times)
    for line in own:
        for phase in PHASES:
            seconds[phase] += line["seconds"].get(phase, 0) / 1e9
            waited[phase] += line["waited"].get(phase, 0) / 1e9
        for group, ordinal, kind, _, _, start, end in line["waits"]:
            times = data[group, kind]
            times.count += 1
            times.exposed_s += (end - start) / 1e9
            there = arrived.get((group, kind, ordinal), end if kind == "control" else start)
            times.late_s += max(0.0, min(end, there) - start) / 1e9
    return StepTimes(seconds, waited, data, {})


def _by_key(data: Mapping[tuple[str, str], Times]) -> Iterator[tuple[str, Times]]:
    for (group, kind), times in sorted(data.items()):
        yield f"{group} {kind}", times
