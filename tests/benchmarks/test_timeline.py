"""The suite `timeline`: floors by hand, figures at their scale, and the committed record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.timeline import bubbles, page, suite
from benchmarks.timeline.above import above_floor
from benchmarks.timeline.contenders import CONTENDERS
from benchmarks.timeline.machines import LAYOUTS, Cell
from benchmarks.timeline.model import DEPTH, SCALE, WIDTH, shape
from benchmarks.timeline.outcome import PEERS, Outcome, ratios
from benchmarks.timeline.report import outcomes_of, targets
from benchmarks.timeline.waits import waits
from hostcuda.virtual import Span
from terrazzo.parallel.pipeline.schedules import ActionKind, actions_of
from terrazzo.planner.machine.devices import device
from tests.parallel.test_pipeline_order import steps_of

RECORD = page.RECORD


def _part(
    kernels: float, copies_in: float = 0.0, copies_out: float = 0.0, **collectives: list[float]
) -> dict[str, Any]:
    spent = {"kernels": kernels, "kernels beside": 9.0, "copies in": copies_in, "copies out": copies_out}
    told = {
        name.replace("__", " "): {"calls": len(found), "total_s": sum(found), "longest_s": max(found)}
        for name, found in collectives.items()
    }
    return {"spent": spent, "collectives": told, "waits": {}}


def _outcome(step_s: float, contender: str = "zero3", **parts: dict[str, Any]) -> Outcome:
    empty = {name: _part(0.0) for name in ("forward", "backward", "step")}
    return Outcome(contender, "host", "H100", 4096, step_s, 1, {**empty, **parts})


def test_where_computation_is_longer_the_floor_is_it_and_both_ends() -> None:
    found = _outcome(
        20.0,
        forward=_part(4.0, all_gather__near=[0.25, 1.0, 1.0]),
        backward=_part(8.0, all_gather__near=[1.0, 1.0], reduce_scatter__near=[2.0, 2.0], all_reduce__far=[0.5, 0.5]),
        step=_part(1.0),
    )
    assert found.floor_s == (1.0 + 4.0) + (8.0 + 2.0 + 0.5) + 1.0
    assert (found.computing_s, found.exposed_s, found.moving_s) == (13.0, 7.0, 8.25)


def test_where_a_link_is_longer_the_floor_is_it_and_what_comes_after() -> None:
    found = _outcome(
        20.0,
        forward=_part(1.0, all_gather__near=[2.0, 2.0]),
        backward=_part(2.0, reduce_scatter__near=[2.0, 2.0], all_reduce__far=[0.5, 0.5]),
    )
    assert found.floor_s == 4.0 + (4.0 + 0.5)


def test_gathers_after_a_step_can_be_hidden_behind_the_next_forward() -> None:
    found = _outcome(20.0, forward=_part(6.0), step=_part(1.0, all_gather__near=[2.0, 2.0]))
    assert found.floor_s == (2.0 + 6.0) + 0.0 + 1.0


def test_copies_are_links_too() -> None:
    assert _outcome(20.0, forward=_part(1.0, copies_in=3.0), backward=_part(1.0, copies_out=5.0)).floor_s == 8.0


def test_plans_are_divided_by_their_peers_in_the_same_cell() -> None:
    own, peer, other = _outcome(3.0), _outcome(2.0, "fsdp2"), _outcome(1.0, "fsdp2-keep")
    assert ratios([own, peer, other]) == {("zero3", own.cell): 1.5}


def test_figures_are_the_catalogue_s_at_their_scale() -> None:
    for gpu in ("A100", "B200"):
        near, far = Cell("hybrid", gpu, 4096).figures(), Cell("network", gpu, 4096).figures()
        card, links = device(gpu).internode_bandwidth, device(gpu).scaleup_bandwidth
        assert card
        assert links
        assert near.far * SCALE**2 == far.near * SCALE**2 == pytest.approx(0.9 * card)
        assert near.near * SCALE**2 == pytest.approx(0.8 * links)
        peak = device(gpu).matmul_flops["bf16"]
        assert 0.6 * peak < near.flops * SCALE**3 < peak


def test_the_planner_is_told_of_the_same_model() -> None:
    model = shape()
    assert model.layers == DEPTH
    assert model.repeated[0].numel == 10 * WIDTH**2 + 4 * WIDTH


def test_whoever_is_named_exists() -> None:
    assert set(suite.TRAINED) == set(LAYOUTS)
    for contenders in suite.TRAINED.values():
        assert set(contenders) <= set(CONTENDERS)
        assert {PEERS[name] for name in contenders if name in PEERS} <= set(contenders)


def test_the_committed_report_is_made_from_the_record() -> None:
    record = json.loads(RECORD.read_text())
    assert RECORD.with_name("report.md").read_text() == suite.markdown(record)


def test_what_is_waited_for_is_followed_back() -> None:
    """The first kernel waits for a gather behind a cast, the second for a copy that the same stream does itself."""
    spans = [
        Span("kernels beside", True, 0.0, 1.0),
        Span("all_gather", True, 1.0, 4.0),
        Span("send", True, 4.0, 4.0),  # in no time
        Span("reduce_scatter", True, 4.0, 9.0),  # nobody waits for it
        Span("kernels", False, 4.0, 6.0),
        Span("copies in", False, 6.0, 7.0),
        Span("kernels", False, 7.0, 8.0),
    ]
    assert waits(spans, 0.5, 8.0) == {"kernels beside": 0.5, "all_gather": 3.0, "copies in": 1.0}
    assert waits(spans, 8.0, 9.0) == {"reduce_scatter": 1.0}
    with pytest.raises(ValueError, match=r"nothing ends at 7\.0"):
        waits(spans[-1:], 0.0, 7.5)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 4), (4, 8)])
def test_pipelines_wait_by_formula_as_their_order_does(ranks: int, micro_batches: int) -> None:
    """A forward takes a turn, and so does each half of a backward."""
    for schedule, backward in (("1f1b", 2), ("zero_bubble", 1)):
        orders = actions_of(schedule, ranks, 1, micro_batches)
        turns = steps_of(orders, {ActionKind.FORWARD: 1, ActionKind.BACKWARD: backward, ActionKind.WEIGHT: 1})
        assert bubbles.expected(schedule, ranks, 1, micro_batches) == pytest.approx(1 - 3 * micro_batches / turns)
    assert bubbles.expected("1f1b", 2, 2, 4) == pytest.approx(1 / 9)


def test_a_table_of_pipelines_divides_by_1f1b_on_the_same_machine() -> None:
    idle = {("1f1b", 1): (0.2, 0.4), ("1f1b", 2): (0.1, 0.3), ("zero_bubble", 1): (0.05, 0.1)}
    outcomes = [
        {"ranks": 2, "micro_batches": 4, "schedule": schedule, "chunks": chunks, "layout": layout, "idle": share}
        for (schedule, chunks), shares in idle.items()
        for layout, share in zip(("free", "host"), shares, strict=True)
    ]
    assert list(bubbles.rows(outcomes)) == [
        ["2", "4", "1F1B", "20.0%", "20.0%", "1.00", "40.0%", "1.00"],
        ["2", "4", "interleaved, 2 chunks", "11.1%", "10.0%", "0.50", "30.0%", "0.75"],
        ["2", "4", "zero-bubble", "7.7%", "5.0%", "0.25", "10.0%", "0.25"],
    ]


def test_waits_and_the_floor_add_up_to_what_a_step_has_above_it() -> None:
    found = _outcome(
        10.0,
        forward=_part(3.0, all_gather__near=[1.0, 1.0]) | {"waits": {"all_gather": 2.0}},
        backward=_part(3.0, reduce_scatter__near=[1.0]) | {"waits": {"reduce_scatter": 1.5, "kernels beside": 0.5}},
    )
    shares = above_floor(found)
    assert found.floor_s == 8.0
    assert sum(shares.values()) == pytest.approx(2.0 / 8.0)
    assert {name: share * 8.0 for name, share in shares.items() if share} == pytest.approx(
        {"gathers, forward": 2.0, "sums": 1.5, "casts, divisions": 0.5, "in the floor": -2.0}
    )
    with pytest.raises(ValueError, match="no name"):
        above_floor(replace(found, step_s=11.0))


def test_no_recorded_step_is_shorter_than_its_floor() -> None:
    for outcome in outcomes_of(json.loads(RECORD.read_text())):
        assert outcome.step_s >= 0.98 * outcome.floor_s, outcome  # casts and divisions of other units beside both ends


def test_the_page_shows_the_record_s_targets() -> None:
    assert page.section(json.loads(RECORD.read_text())) in page.PAGE.read_text()


def test_the_worst_cell_decides() -> None:
    found = [_outcome(10.0, forward=_part(10.0)), _outcome(8.0, "fsdp2", forward=_part(8.0))]
    better = [replace(found[0], gpu="A100", step_s=7.0), replace(found[1], gpu="A100")]
    told = {name: (limit, value, where) for name, limit, value, where in targets([*found, *better])}
    assert told == {
        "`zero3` / FSDP2": (1.00, 1.25, "host, H100, 4096 tokens"),
        "`zero3` / its floor": (1.03, 1.0, "host, H100, 4096 tokens"),
    }
    planned = targets([replace(found[0], planned_s=9.0), replace(better[0], planned_s=8.4)])
    assert list(planned)[-1][2] == pytest.approx(0.15)
