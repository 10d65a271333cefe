"""The comparison's arithmetic, its refusal to report unequal training, and one small real run."""

from __future__ import annotations

import pytest

from benchmarks.compare import grouped, take_turns
from benchmarks.rank import Steps
from benchmarks.report import Effort, Outcome, disagreements, ratio, table

EFFORT = Effort(rounds=1, steps=2, warmup=1, ranks=2, seed=0, together=2)


def _outcome(contender: str, group: int, rounds: list[tuple[list[float], list[float]]]) -> Outcome:
    """Two ranks; each round gives the step times of both."""
    turns = [[Steps(times, [1.0] * len(times), [2.0] * len(times)) for times in turn] for turn in rounds]
    return Outcome(contender, group, turns, training_peak_bytes=3_000_000, overall_peak_bytes=4_000_000)


def test_groups_hold_all_baselines_and_every_contender_once() -> None:
    groups = list(grouped(["a", "ddp", "b", "c", "fsdp2"], ["ddp", "fsdp2"], 4))
    assert groups == [["ddp", "fsdp2", "a", "b"], ["ddp", "fsdp2", "c"]]
    assert list(grouped(["ddp", "fsdp2"], ["ddp", "fsdp2"], 4)) == [["ddp", "fsdp2"]]
    assert list(grouped(["ddp", "a"], ["ddp"], 1)) == [["ddp", "a"]]


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    assert _outcome("a", 0, [([1.0, 5.0, 2.0], [3.0, 1.0, 1.0])]).round_s() == [3.0]


def test_ratios_are_taken_within_a_round_of_one_group() -> None:
    # The machine is twice as slow in the second round, and three times in the second group.
    outcomes = [
        _outcome("ddp", 0, [([1.0], [1.0]), ([2.0], [2.0])]),
        _outcome("a", 0, [([0.5], [0.5]), ([1.0], [1.0])]),
        _outcome("ddp", 1, [([3.0], [3.0]), ([3.0], [3.0])]),
        _outcome("b", 1, [([6.0], [6.0]), ([6.0], [6.0])]),
    ]
    assert [ratio(name, "ddp", outcomes) for name in ("ddp", "a", "b")] == [1.0, 0.5, 2.0]
    rows = table(outcomes, ["ddp"]).splitlines()
    assert rows[3] == "| a | 0.50 | 750 | 500 to 1000 | 1000 | 3 | 4 |"


def test_unequal_training_is_named() -> None:
    same, other = _outcome("a", 0, [([1.0], [1.0])]), _outcome("b", 0, [([1.0], [1.0])])
    assert disagreements([same, other]) == []
    other.turns[0][1].losses[0] = 2.0001
    assert disagreements([same, other]) == ["b: losses differ from those of a by up to 5.0e-05"]
    other.turns[0][1].losses[0] = float("nan")
    assert len(disagreements([same, other])) == 1


@pytest.mark.processes
def test_a_plan_and_a_peer_take_turns_and_train_the_same() -> None:
    outcomes = take_turns("tiny", 0, ["ddp", "terrazzo-zero3"], EFFORT)
    assert [outcome.contender for outcome in outcomes] == ["ddp", "terrazzo-zero3"]
    assert [len(outcome.losses()) for outcome in outcomes] == [4, 4]
    assert disagreements(outcomes) == []
    assert all(0 < o.training_peak_bytes < 100e6 and min(o.round_s()) > 0 for o in outcomes)
