"""A pipeline's step in time: the engine's own list of actions against the formula of its bubble."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import terrazzo as tz
from terrazzo.parallel.pipeline.schedules import Action, ActionKind
from terrazzo.planner.assemble import estimate
from terrazzo.planner.report.bars import chart_of
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.picture import svg
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.bubble import idle_share
from terrazzo.planner.timing.timeline import timeline_of
from terrazzo.words import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"


def played(schedule: str, ranks: int, chunks: int, micro_batches: int) -> None:
    """ArXiv 2104.04473, section 2.2; a backward takes twice as long as a forward there, too."""
    step = timeline_of(schedule, micro_batches, [[(1 / chunks, 2 / chunks)] * chunks] * ranks)
    idle = idle_share(engine(schedule, ranks, chunks, micro_batches))
    assert step.seconds == pytest.approx(3 * micro_batches * (1 + idle))
    assert [step.idle_share(rank) for rank in range(ranks)] == pytest.approx([idle / (1 + idle)] * ranks)


def engine(schedule: str, ranks: int, chunks: int, micro_batches: int) -> Setup:
    """A pipeline of the engine's."""
    request = Request(
        "llama3-8b", ranks, gpu="h100-sxm", pp=ranks, virtual_stages=chunks, pipeline=schedule, micro_batch=1,
        global_batch=micro_batches, strategy="zero1",
    )  # fmt: skip
    return build_setup(request)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_equal_stages_idle_as_the_actions_of_the_engine_leave_them(ranks: int) -> None:
    """Under every schedule, with every number of micro-batches that it takes, a multiple of the ranks or not."""
    for micro_batches in range(ranks, 3 * ranks + 2):
        for schedule in SCHEDULES:
            played(schedule, ranks, 1, micro_batches)
        for chunks in (2, 3, 4):
            if micro_batches % (micro_batches // ranks) == 0:
                played("1f1b", ranks, chunks, micro_batches)


def test_six_micro_batches_on_four_ranks_of_two_stages_idle_a_quarter() -> None:
    """The engine runs all six through a stage before the next; Megatron-core four, and two with gaps between."""
    setup = engine("1f1b", 4, 2, 6)
    assert idle_share(setup) == 0.25
    assert idle_share(replace(setup, framework=Framework("megatron"))) == pytest.approx(5 / 12)


def test_a_slow_stage_is_never_idle_between_its_first_and_its_last() -> None:
    step = timeline_of("1f1b", 16, [[(1.0, 2.0)], [(2.0, 4.0)], [(1.0, 2.0)]])
    slow = step.ranks[1]
    assert slow[-1].end_s - slow[1].start_s == pytest.approx(sum(span.end_s - span.start_s for span in slow[1:]), abs=3)
    assert step.seconds >= 16 * 6.0


def test_nothing_runs_before_what_it_needs_has_come_and_one_thing_at_a_time() -> None:
    step = timeline_of("1f1b", 8, [[(1.0, 2.0)] * 2, [(1.5, 2.5)] * 2], send_s=0.25)
    found = {span.action: span for spans in step.ranks for span in spans}
    assert len(found) == 4 * 2 * 8
    for spans in step.ranks:
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(spans))
    for (stage, kind, number), span in found.items():
        if kind == "F" and stage:
            assert span.start_s >= found[Action(stage - 1, kind, number)].end_s + 0.25
        elif kind == "B":
            needed = Action(stage, ActionKind.FORWARD, number) if stage == 3 else Action(stage + 1, kind, number)
            assert span.start_s >= found[needed].end_s + 0.25 * (stage < 3)


def pictured(pp: int, micro_batches: int) -> list[ET.Element]:
    batch = micro_batches * (8 // pp)
    found = tz.plan("llama3-8b", 8, gpu="h100-sxm", strategy="zero1", pp=pp, micro_batch=1, global_batch=batch)
    assert isinstance(found, Estimate)
    picture = svg(chart_of([found], found))
    boxes = [each for each in ET.fromstring(picture).iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    return [box for box in boxes if "of micro-batch" in (box.find(f"{SVG}title").text or "")]  # type: ignore[union-attr]


def test_a_picture_has_each_pass_of_each_stage() -> None:
    boxes = pictured(4, 8)
    assert len(boxes) == 2 * 4 * 8
    assert all(float(box.attrib["width"]) > 0 and float(box.attrib["x"]) < 1000 for box in boxes)


def test_the_picture_goes_at_the_pace_that_was_measured() -> None:
    found = estimate(engine("1f1b", 2, 1, 4))
    assert found.time is not None
    slow = [replace(term, inputs={**term.inputs, "pace": 2.0}) for term in found.time.terms]
    slower = replace(found, time=replace(found.time, terms=tuple(slow)))
    plain, drawn = (chart_of([each], each).pipeline for each in (found, slower))
    assert plain is not None
    assert drawn is not None
    assert plain.seconds < drawn.seconds <= 2 * plain.seconds
    assert drawn.ranks[0][0].end_s == pytest.approx(2 * plain.ranks[0][0].end_s)


def test_without_stages_there_is_no_pipeline() -> None:
    assert pictured(1, 8) == []
