"""A pipeline's step in time, against a schedule that is played here by the rules of its paper."""

from __future__ import annotations

import itertools
import random
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

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
from terrazzo.planner.timing.overlap import CONTENTION
from terrazzo.planner.timing.pipeline_step import PipelineStep
from terrazzo.planner.timing.timeline import StageSchedule, idle_of_equal_stages
from terrazzo.words import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"


Passes = list[list[tuple[float, float]]]


def interleaved(micro_batches: int, passes: Passes) -> float:
    """Seconds of 1F1B, with several stages of each rank interleaved (Megatron-LM, arXiv 2104.04473, figures 3 and 4).

    Each rank runs groups of as many micro-batches as there are ranks through one chunk after the other, forward and
    backward in turn after a warm-up, and waits for what the neighbours have not sent yet.
    """
    pp, virtual = len(passes), len(passes[0])
    groups = [range(first, min(first + pp, micro_batches)) for first in range(0, micro_batches, pp)]
    table = [(batch, chunk) for group in groups for chunk in range(virtual) for batch in group]
    todo, clock = [], [0.0] * pp
    done: dict[tuple[str, int, int, int], float] = {}
    for rank in range(pp):
        ahead = [("forward", batch, chunk) for batch, chunk in table]
        back = [("backward", batch, virtual - 1 - chunk) for batch, chunk in table]
        warm = min(2 * (pp - rank - 1) + (virtual - 1) * pp if virtual > 1 else pp - rank - 1, len(table))
        turns = [step for pair in zip(ahead[warm:], back, strict=False) for step in pair]
        todo.append([*ahead[:warm], *turns, *back[len(table) - warm :]])
    while any(todo):
        before = len(done)
        for rank in range(pp):
            while todo[rank]:
                kind, batch, chunk = todo[rank][0]
                step = 1 if kind == "forward" else -1
                near, wraps = rank - step, rank - step not in range(pp)
                needed = (kind, batch, chunk - step if wraps else chunk, near % pp)
                if wraps and chunk - step not in range(virtual):
                    needed = ("forward", batch, chunk, rank) if kind == "backward" else ("", 0, 0, 0)
                if needed[0] and needed not in done:
                    break
                clock[rank] = max(clock[rank], done.get(needed, 0.0)) + passes[rank][chunk][kind == "backward"]
                done[kind, batch, chunk, rank] = clock[rank]
                todo[rank].pop(0)
        assert len(done) > before, "a deadlock"
    return max(clock)


def unequal(ranks: int, chunks: int) -> Passes:
    """Stages of which some take three times as long as others, and backwards that are no fixed share of them."""
    draw = random.Random(7 * ranks + chunks)
    return [[(draw.uniform(1, 3), draw.uniform(1, 6)) for _ in range(chunks)] for _ in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "chunks"),
    [(2, 2, 1), (3, 10, 1), (4, 8, 1), (5, 21, 1), (8, 64, 1), (4, 8, 2), (4, 12, 3), (2, 6, 4), (8, 8, 2), (4, 4, 3)],
)
@pytest.mark.parametrize("whole_rounds", [False, True])
def test_unequal_stages_take_what_the_schedule_played_by_hand_does(
    ranks: int, micro_batches: int, chunks: int, whole_rounds: bool
) -> None:
    passes = unequal(ranks, chunks)
    found = StageSchedule("1f1b", ranks, chunks, micro_batches, whole_rounds)
    if chunks == 1 or whole_rounds or micro_batches < 2 * ranks:  # the engine's rounds are those of Megatron-core
        assert found.seconds(passes) == pytest.approx(interleaved(micro_batches, passes))
    assert found.timeline(passes).seconds == found.seconds(passes)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 7), (4, 9), (4, 13), (4, 21), (8, 9), (2, 5)])
def test_a_last_round_that_is_not_full_leaves_gaps(ranks: int, micro_batches: int) -> None:
    """Nearly as played: by the paper's rules alone some of such schedules, as nine on four ranks of three, stand."""
    passes = [[(0.5, 1.0)] * 2] * ranks
    found, full = (StageSchedule("1f1b", ranks, 2, count, True).seconds(passes) for count in (micro_batches, 8 * ranks))
    assert found == pytest.approx(interleaved(micro_batches, passes), rel=0.03)
    assert found / micro_batches > 1.05 * full / (8 * ranks)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 1), (4, 2), (8, 3), (8, 7)])
def test_too_few_micro_batches_to_fill_the_ranks(ranks: int, micro_batches: int) -> None:
    passes = unequal(ranks, 1)
    found = StageSchedule("1f1b", ranks, 1, micro_batches).seconds(passes)
    assert found == pytest.approx(interleaved(micro_batches, passes))


def test_a_slow_stage_takes_its_own_time_and_what_one_micro_batch_takes_through_the_others() -> None:
    """All wait for it: 20 times 6 seconds, and the first forward and the last backward through three others of 3; not
    three times 6, as if all were as slow. Under 1F1B those behind it run beside it.
    """
    for slow in range(4):
        passes = [[(2.0, 4.0) if rank == slow else (1.0, 2.0)] for rank in range(4)]
        assert StageSchedule("gpipe", 4, 1, 20).seconds(passes) == 20 * 6 + 3 * 3
        assert 20 * 6 + 3 * slow <= StageSchedule("1f1b", 4, 1, 20).seconds(passes) <= 20 * 6 + 3 * 3


def played(schedule: str, ranks: int, chunks: int, micro_batches: int) -> None:
    """ArXiv 2104.04473, section 2.2, and 2401.10241, table 2; a backward takes twice as long as a forward."""
    step = StageSchedule(schedule, ranks, chunks, micro_batches).timeline([[(1 / chunks, 2 / chunks)] * chunks] * ranks)
    idle = (ranks - 1) / (chunks * micro_batches) * (1 / 3 if schedule == "zero_bubble" else 1)
    assert idle_of_equal_stages(engine(schedule, ranks, chunks, micro_batches)) == pytest.approx(idle)
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
def test_equal_stages_idle_as_their_papers_say(ranks: int) -> None:
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
    assert idle_of_equal_stages(setup) == pytest.approx(0.25)
    assert idle_of_equal_stages(replace(setup, framework=Framework("megatron"))) == pytest.approx(5 / 12)


@pytest.mark.parametrize(("pp", "chunks", "pipeline"), [(3, 1, "1f1b"), (3, 2, "1f1b"), (5, 1, "zero_bubble")])
def test_the_table_and_the_picture_of_unequal_stages_have_one_answer(pp: int, chunks: int, pipeline: str) -> None:
    found = estimate(engine(pipeline, pp, chunks, 2 * pp))
    assert found.time is not None
    after = ("optimizer step", "data-parallel communication", "contention")
    table = sum(term.value for term in found.time.terms if term.name not in after)
    picture = chart_of([found], found).pipeline
    assert picture is not None
    assert table == pytest.approx(picture.seconds)
    assert {term.name for term in found.time.terms} >= {"pipeline bubble", "pipeline communication"}
    busy = sum(
        term.value
        for term in found.time.terms
        if term.name not in (*after, "pipeline bubble", "pipeline communication")
    )
    last = max(picture.ranks, key=lambda spans: spans[-1].end_s)
    assert busy == pytest.approx(sum(span.end_s - span.start_s for span in last))


@pytest.mark.parametrize("strategy", ["zero1@cpu", "zero1"])
def test_a_step_ends_with_the_sums_and_the_update_of_the_rank_that_ends_last(strategy: str) -> None:
    """It is not the one that computes longest: the middle ones of four have a layer more than the first."""
    request = Request("llama3-8b", 32, gpu="h100-sxm", pp=4, micro_batches=4, strategy=strategy, sequence=4096)
    step = PipelineStep(replace(build_setup(request), framework=Framework(clip=False)))
    ends = [
        spans[-1].end_s
        + rank.exposure.exposed
        + CONTENTION * rank.exposure.hidden
        + sum(term.value for term in rank.update_terms)
        for spans, rank in zip(step.timeline.ranks, step.ranks, strict=True)
    ]
    assert max(step.ranks, key=lambda rank: rank.busy_s) is step.ranks[1] and ends.index(max(ends)) == 0
    assert sum(term.value for term in step.terms()) == pytest.approx(ends[0])


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}], ids=["clipped", "scaled"])
def test_an_update_that_waits_for_all_ranks_is_the_longest_of_any(options: dict[str, Any]) -> None:
    """The first of two ranks ends last and has least to update, half of its layers being frozen. A norm, or whether
    there are infinite gradients, is of both.
    """
    frozen = {"freeze": "model.layers.[0-7].*", **options}
    request = Request("llama3-8b", 8, "h100-sxm", "zero1@cpu", pp=2, micro_batches=4, sequence=4096, **frozen)
    setup = replace(build_setup(request), framework=Framework(clip=not options))
    step = PipelineStep(setup)
    summed = [
        spans[-1].end_s + rank.exposure.exposed + CONTENTION * rank.exposure.hidden
        for spans, rank in zip(step.timeline.ranks, step.ranks, strict=True)
    ]
    updates = [sum(term.value for term in rank.update_terms) for rank in step.ranks]
    assert summed[0] > summed[1] and updates[0] < updates[1]
    assert sum(term.value for term in step.terms()) == pytest.approx(summed[0] + updates[1])


def test_a_slow_stage_is_never_idle_between_its_first_and_its_last() -> None:
    step = StageSchedule("1f1b", 3, 1, 16).timeline([[(1.0, 2.0)], [(2.0, 4.0)], [(1.0, 2.0)]])
    slow = step.ranks[1]
    assert slow[-1].end_s - slow[1].start_s == pytest.approx(sum(span.end_s - span.start_s for span in slow[1:]), abs=3)
    assert step.seconds >= 16 * 6.0


def test_nothing_runs_before_what_it_needs_has_come_and_one_thing_at_a_time() -> None:
    passes = [[(1.0, 2.0)] * 2, [(1.5, 2.5)] * 2]
    step = StageSchedule("1f1b", 2, 2, 8).timeline(passes, send_s=0.25)
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
