"""What lies between a step and its floor: what the stream that computes waits for, less what the floor has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.timeline.outcome import PEERS, Outcome

__all__ = ["HEAD", "above_floor", "rows", "worst"]

FORWARD, BACKWARD = ("step", "forward"), ("backward",)
"""What the optimizer's step begins is waited for in the forward behind it."""

GATHERS, SUMS = ("all_gather",), ("reduce_scatter", "all_reduce")
BESIDE, COPIES = ("kernels beside",), ("copies in", "copies out")

PARTS = {
    "gathers, forward": (GATHERS, FORWARD),
    "gathers, backward": (GATHERS, BACKWARD),
    "sums": (SUMS, FORWARD + BACKWARD),
    "casts, divisions": (BESIDE, FORWARD + BACKWARD),
    "copies": (COPIES, FORWARD + BACKWARD),
}
"""Kinds of work, and the parts of a step in which it is waited for."""

HEAD = ("plan", "where", *PARTS, "in the floor", "step / floor", "peer / that floor")


def above_floor(outcome: Outcome) -> dict[str, float]:
    """Shares of the floor: those of `PARTS`, and what the floor has of them already, which counts as negative.

    They add up to what the step has above the floor. Raises: `ValueError` where a wait is of no part.
    """
    floor_s = outcome.floor_s
    found = {name: outcome.waited_s(kinds, *parts) for name, (kinds, parts) in PARTS.items()}
    if abs(sum(found.values()) - outcome.exposed_s) > 1e-6:
        raise ValueError(f"{outcome.contender} on {outcome.cell} waits for what has no name here: {outcome.parts}")
    found["in the floor"] = outcome.computing_s - floor_s
    return {name: seconds / floor_s for name, seconds in found.items()}


def worst(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """The outcome of each plan that is furthest above its floor."""
    for plan in PEERS:
        own = [outcome for outcome in outcomes if outcome.contender == plan]
        if own:
            yield max(own, key=lambda outcome: outcome.step_s / outcome.floor_s)


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """Of a table under `HEAD`, in percent of the floor; the last two are ratios."""
    steps = {(outcome.contender, outcome.cell): outcome.step_s for outcome in outcomes}
    for own in worst(outcomes):
        peer = steps.get((PEERS[own.contender], own.cell))
        yield [
            f"`{own.contender}`",
            f"{own.layout}, {own.gpu}, {own.tokens} tokens",
            *(f"{share:+.1%}" if share else "" for share in above_floor(own).values()),
            f"{own.step_s / own.floor_s:.3f}",
            "" if peer is None else f"{peer / own.floor_s:.3f}",
        ]
