"""A pipeline's step in time: the engine's own list of actions against the published formula of its bubble."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest

import terrazzo as tz
from terrazzo.parallel.pipeline.order import Action, Kind
from terrazzo.planner.assemble import Estimate
from terrazzo.planner.report.bars import chart_of
from terrazzo.planner.report.picture import svg
from terrazzo.planner.timing.bubble import bubble
from terrazzo.planner.timing.timeline import timeline_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches"),
    [
        *(("gpipe", ranks, 1, micro_batches) for ranks, micro_batches in ((2, 2), (4, 8), (8, 9))),
        *(("1f1b", ranks, 1, micro_batches) for ranks, micro_batches in ((2, 2), (4, 5), (4, 8), (8, 32))),
        *(("1f1b", ranks, chunks, 2 * ranks) for ranks in (2, 4, 8) for chunks in (2, 3, 4)),
    ],
)
def test_equal_stages_idle_as_published(schedule: str, ranks: int, chunks: int, micro_batches: int) -> None:
    """ArXiv 2104.04473, section 2.2; a backward takes twice as long as a forward there, too."""
    step = timeline_of(schedule, micro_batches, [[(1 / chunks, 2 / chunks)] * chunks] * ranks)
    idle = bubble(ranks, micro_batches, chunks)
    assert step.seconds == pytest.approx(3 * micro_batches * (1 + idle))
    assert [step.idle_share(rank) for rank in range(ranks)] == pytest.approx([idle / (1 + idle)] * ranks)


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
            needed = Action(stage, Kind.FORWARD, number) if stage == 3 else Action(stage + 1, kind, number)
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


def test_without_stages_there_is_no_pipeline() -> None:
    assert pictured(1, 8) == []
