"""How often a run saves by itself: what was published of the best interval, and a run that finds its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.telemetry import Stopwatch
from terrazzo.train.steps import cadence
from terrazzo.train.steps.cadence import SaveInterval, optimal_interval_s
from tests.helpers.cover import mostly_long
from tests.train.test_session import config_in, trained


@pytest.mark.parametrize(
    ("between_failures_min", "published_min"),
    [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")],
)
def test_the_interval_is_the_published_one(between_failures_min: float, published_min: str) -> None:
    """Daly (2006), figures 3 to 5: saves of five minutes."""
    found = optimal_interval_s(5 * 60, between_failures_min * 60) / 60
    assert float(f"{found:.{len(published_min.partition('.')[2])}f}") == float(published_min)


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 30.0, 120.0])
def test_no_other_interval_ends_earlier(cost_s: float) -> None:
    """The oracle is the exact mean of the time that a run takes whose failures come by chance (Daly, equation 20)."""
    between_s = 3600.0

    def time_taken(interval_s: float) -> float:
        return between_s * math.expm1((interval_s + cost_s) / between_s) / interval_s

    best = optimal_interval_s(cost_s, between_s)
    assert time_taken(best) < min(time_taken(best * 0.97), time_taken(best * 1.03))


def test_saves_that_take_longer_than_runs_live_come_once_in_a_life() -> None:
    assert optimal_interval_s(500.0, 200.0) == 200.0


def chosen(
    cost_s: float, step_s: float = 0.5, busy_s: float = 0.0, ranks: int = 16_384, **settings: Any
) -> SaveInterval:
    config = config_from_dict({"checkpoint": {"every": "auto", **settings}})
    return SaveInterval.of(config, ranks, cost_s=cost_s, step_s=step_s, busy_s=busy_s)


def test_steps_follow_from_ranks_and_from_what_a_save_costs() -> None:
    """Llama 3's ranks fail every 3.05 h: a save of 2 s pays after √(2 · 2 s · 3.05 h) - 2 s and a third of 2 s."""
    best_s = math.sqrt(2 * 2.0 * 50_000 / 16_384 * 3600) - 2.0 + 2.0 / 3
    assert chosen(2.0).every == pytest.approx(best_s / 0.5, abs=1)
    assert chosen(2.0, ranks=1).every == pytest.approx(best_s / 0.5 * 128, rel=0.01)
    said = "checkpoint.every auto: 417. A save takes 2 s, a step 0.5 s, and one of 16384 ranks fails every 3 h"
    assert str(chosen(2.0)) == said


def test_saves_take_no_more_of_the_time_than_is_allowed_and_do_not_wait_for_each_other() -> None:
    dear = chosen(120.0)
    assert 120.0 / (120.0 + dear.every * 0.5) <= 0.05 < 120.0 / (120.0 + (dear.every - 1) * 0.5)
    assert chosen(120.0, overhead=0.5).every < dear.every
    assert chosen(2.0, busy_s=1000.0).every == 2000
    assert chosen(1e-9, mtbf_hours=1e-9).every == 1


@pytest.mark.parametrize("every", ["often", 0, 2.5, True])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(BadInput, match=r"checkpoint\.every(: '|: True is | is )"):
        config_from_dict({"checkpoint": {"every": every}})


# -- a run ---------------------------------------------------------------------------------------------------------


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").glob("step-*"))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by whenever somebody looks: between saves, and while there is one."""
    seconds: Iterator[int] = iter(range(10**6))
    monkeypatch.setattr(cadence, "Stopwatch", lambda: Stopwatch(lambda: float(next(seconds))))


@pytest.mark.parametrize("background", mostly_long([False, True], True))
def test_a_run_finds_its_own_and_one_that_goes_on_keeps_it(
    background: bool, tmp_path: Path, ticking: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"every": "auto", "mtbf_hours": 1e-9, "overhead": 0.2, "background": background, "keep_last": None}
    config = config_in(tmp_path, train={"steps": 40}, checkpoint=settings)
    assert trained(config, stop_after=23) == 75
    (choice,) = lines(tmp_path, "cadence")
    assert choice["step"] == 10
    allowed = math.ceil(4 * choice["cost_s"] / choice["step_s"])
    assert choice["every"] == max(allowed, math.ceil(choice["busy_s"] / choice["step_s"]))
    assert bool(choice["busy_s"]) == background
    every = choice["every"]
    assert 2 <= every <= 13, choice
    multiples = {step for step in range(11, 41) if step % every == 0}
    assert set(steps_saved(tmp_path)) == {5, 10, 23} | {step for step in multiples if step < 23}
    assert capsys.readouterr().out.count("checkpoint.every auto: ") == 1

    assert trained(config) == 0
    assert set(steps_saved(tmp_path)) == {5, 10, 23, 40} | multiples
    assert "checkpoint.every auto" not in capsys.readouterr().out


def test_other_settings_are_measured_for_anew(tmp_path: Path) -> None:
    config = config_in(tmp_path, train={"steps": 12}, checkpoint={"every": "auto", "keep_last": None})
    assert trained(config) == 0
    assert [line["step"] for line in lines(tmp_path, "cadence")] == [10]
    other = config_in(tmp_path, train={"steps": 24}, checkpoint={"every": "auto", "keep_last": None, "overhead": 0.01})
    assert trained(other) == 0
    assert [(line["step"], line["overhead"]) for line in lines(tmp_path, "cadence")] == [(10, 0.05), (22, 0.01)]
    assert steps_saved(tmp_path) == [5, 10, 12, 17, 22, 24]
