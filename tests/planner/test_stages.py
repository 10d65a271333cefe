"""Of a pipeline whose layers differ, what a few stages say of all: held against taking every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from terrazzo.planner import ModelShape, Request, Setup, build_setup, model_shape
from terrazzo.planner.layout.placement import placed_units, stand_ins
from terrazzo.planner.layout.stages import units_on
from terrazzo.planner.memory.peak import memory_of, rank_terms
from terrazzo.planner.memory.tiers import disk_writes, host_writes, on_device
from terrazzo.planner.setup.framework import TERRAZZO
from terrazzo.planner.timing.pipeline_rank import PipelineRank
from terrazzo.planner.timing.pipeline_step import PipelineStep
from terrazzo.planner.traffic.exchanges import model_parallel_moves, pipeline_moves
from terrazzo.planner.traffic.volumes import repetitions, traffic_of, unit_copies, unit_moves

PLANS = ("zero1", "zero3", "zero3@cpu:0.7", "zero2@nvme", "zero3@nvme-all")
MESHES = ((16, 1), (16, 2), (32, 1), (20, 3))
"""Pipeline stages and chunks of each."""


def zebra() -> ModelShape:
    """DeepSeek-V3 with its dense layers spread, small experts between large ones, and a lone wide layer late."""
    model = model_shape("deepseek-v3")
    root, dense, experts = model.units
    small = replace(experts, tensors=tuple(tensor for tensor in experts.tensors if "shared" not in tensor.name))
    row = ((dense, 2), (small, 17), (dense, 1), (experts, 23), (dense, 5), (experts, 13))
    return replace(model, units=(root, *(replace(unit, count=count) for unit, count in row)))


MODELS = {"deepseek-v3": model_shape("deepseek-v3"), "zebra": zebra()}


def setup(model: str, strategy: str, pp: int, chunks: int, micro_batches: int = 80) -> Setup:
    request = Request(
        MODELS[model], pp * 16, strategy=strategy, pp=pp, virtual_stages=chunks, ep=2, micro_batches=micro_batches,
        disk_bandwidth=1e10,
    )  # fmt: skip
    return build_setup(request)


def sent(setup: Setup, stage: int) -> float:
    """Bytes that a rank of a stage sends in a step."""
    total = sum(move.sent_bytes for move in pipeline_moves(setup, stage)) * setup.micro_batches
    for unit, count, placement in placed_units(setup, stage):
        repeats = repetitions(setup, unit)
        for move in (*unit_moves(setup, unit, placement), *unit_copies(unit, placement)):
            total += move.sent_bytes * count * repeats[move.when]
        total += setup.micro_batches * count * sum(move.sent_bytes for move in model_parallel_moves(setup, unit))
    return total


@pytest.mark.cover
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize(("pp", "chunks"), MESHES)
def test_a_few_stages_say_what_all_would(model: str, strategy: str, pp: int, chunks: int) -> None:
    found = setup(model, strategy, pp, chunks)
    memory, terms = memory_of(found), [rank_terms(found, stage)[0] for stage in range(pp)]
    assert memory.allocated_bytes == pytest.approx(max(sum(term.value for term in one) for one in terms), rel=1e-12)
    assert traffic_of(found).total_bytes == pytest.approx(max(sent(found, stage) for stage in range(pp)), rel=1e-12)
    passes = [PipelineRank(found, stage).passes for stage in range(pp)]
    assert [rank.passes for rank in PipelineStep(found).ranks] == passes
    written = max(sum(term.value for term in disk_writes(found, stage)) for stage in range(pp))
    assert host_writes(found) == found.cluster.ranks_per_host * written
    floor = [sum(term.value for term in on_device(found, stage)) for stage in range(pp)]
    assert max(floor) == max(floor[stage] for stage in set(stand_ins(found)))


@pytest.mark.cover
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize(("pp", "chunks"), MESHES)
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_what_each_stage_holds(model: str, strategy: str, pp: int, chunks: int, pipeline: str) -> None:
    """To the byte where a stage holds the same units as the one that stands for it; no less where it holds fewer."""
    found = replace(setup(model, strategy, pp, chunks), pipeline=pipeline if chunks == 1 else "1f1b")
    for stage, (other, told) in enumerate(zip(stand_ins(found, 1), memory_of(found).per_pp_rank, strict=True)):
        true = sum(term.value for term in rank_terms(found, stage)[0])
        alike = sorted(map(str, units_on(found, stage))) == sorted(map(str, units_on(found, other)))
        assert told == pytest.approx(true, rel=1e-9) if alike else told >= true


def test_a_model_of_equal_layers_asks_for_no_more_stages() -> None:
    found = build_setup(Request("llama3-70b", 512, strategy="zero1", pp=32, framework="megatron"))
    assert set(stand_ins(found)) == {0, 31}
    assert set(stand_ins(found, 1)) == {0, 1, 31}
    assert len(set(stand_ins(replace(found, framework=TERRAZZO)))) == 3  # some have a layer more, the head's none
    assert stand_ins(replace(found, mesh=replace(found.mesh, pp=1, dp_shard=512)), 1) == (0,)
