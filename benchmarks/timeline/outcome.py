"""Of a step that was simulated: what is exposed, what it could not be shorter than, and who it is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.timeline.machines import Cell

__all__ = ["PEERS", "Outcome", "ratios"]

PEERS = {
    "zero0": "replicate",
    "zero1": "fsdp2-keep",
    "zero2": "fsdp2-keep",
    "shard_grad_op": "fsdp2-keep",
    "zero3": "fsdp2",
    "zero3@cpu-all": "fsdp2-offload",
    "hybrid_shard": "fsdp2",
    "hybrid_shard_zero2": "fsdp2-keep",
}
"""What torch has in place of each plan: in the layout `hybrid`, FSDP2 on a mesh of two axes (HSDP)."""


@dataclass(frozen=True)
class Outcome:
    """One contender on one machine, at full size.

    Attributes:
        parts: of `forward`, `backward` and `step`, seconds of work by what does it (`spent`), and calls, seconds in all
            and the longest of collectives, by name and whether their link is `near` or `far` (`collectives`), and by
            what it waits for, seconds in which the stream that computes runs no kernel (`waits`).
        planned_s: what the planner says of the step, where it knows the plan.
    """

    contender: str
    layout: str
    gpu: str
    tokens: int
    step_s: float
    peak_bytes: int
    parts: Mapping[str, Any]
    planned_s: float | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.layout, self.gpu, self.tokens)

    @property
    def computing_s(self) -> float:
        """Seconds of kernels on the stream that computes."""
        return sum(float(part["spent"]["kernels"]) for part in self.parts.values())

    @property
    def exposed_s(self) -> float:
        """In which that stream waits."""
        return self.step_s - self.computing_s

    @property
    def moving_s(self) -> float:
        """Seconds of the busiest link."""
        return max(self._loads(*self.parts).values())

    def waited_s(self, kinds: Iterable[str], *parts: str) -> float:
        """Seconds for which that stream waits for some kinds of work, in some parts of the step."""
        return sum(float(self.parts[part]["waits"].get(kind, 0.0)) for part in parts for kind in kinds)

    @property
    def floor_s(self) -> float:
        """Of forward and of backward, the longer of computation and of any link's work, with what nothing can hide.

        That is the first gather, before anything can be computed, the last gradient's way, after all has been, and the
        optimizer's step. What a step gathers afterwards can be hidden behind the next forward. What is cast and divided
        of other units beside the first gather and the last reduction counts twice, a percent or two of a step.
        """
        first = max(self._longest("all_gather", "step", "forward").values(), default=0.0)
        forward = max(first + self._kernels("forward"), *self._loads("step", "forward").values())
        last = Counter(self._longest("reduce_scatter", "backward")) + Counter(self._longest("all_reduce", "backward"))
        chain = sum(last.values())
        loads = self._loads("backward")
        backward = max(
            self._kernels("backward") + chain, *(s + chain - last.get(link, 0.0) for link, s in loads.items())
        )
        return forward + backward + self._kernels("step")

    def _kernels(self, part: str) -> float:
        return float(self.parts[part]["spent"]["kernels"])

    def _longest(self, kind: str, *parts: str) -> dict[str, float]:
        """Seconds of the longest collective of a kind, by link."""
        longest: dict[str, float] = {}
        for part in parts:
            for name, found in self.parts[part]["collectives"].items():
                if name.startswith(kind):
                    link = name.split()[1]
                    longest[link] = max(longest.get(link, 0.0), found["longest_s"])
        return longest

    def _loads(self, *parts: str) -> dict[str, float]:
        """Seconds of each link."""
        loads = dict.fromkeys(("near", "far", "copies in", "copies out"), 0.0)
        for part in parts:
            for name, found in self.parts[part]["collectives"].items():
                loads[name.split()[1]] += found["total_s"]
            for way in ("copies in", "copies out"):
                loads[way] += self.parts[part]["spent"][way]
        return loads


def ratios(outcomes: Iterable[Outcome]) -> dict[tuple[str, Cell], float]:
    """Of every plan's step to its peer's in the same cell, by plan and cell."""
    found = {(outcome.contender, outcome.cell): outcome for outcome in outcomes}
    return {
        (plan, cell): outcome.step_s / found[PEERS[plan], cell].step_s
        for (plan, cell), outcome in found.items()
        if plan in PEERS and (PEERS[plan], cell) in found
    }
