"""What a search recommends is what somebody who knows would run."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from terrazzo.planner import Estimate, Request, ask, build_setup, search
from terrazzo.planner.choice.ranking import NOISE
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.report.blocks import plain
from terrazzo.planner.setup.choice_names import TRIED_MODES

SEARCHES = {
    "small on one": Request("llama3.2-1b", 1, gpu="h100", sequence=2048),
    "small on a host": Request("gpt2", 8, gpu="a100", sequence=1024),
    "8B on a host": Request("llama3-8b", 8, gpu="h100", sequence=8192),
    "8B on hosts": Request("llama3-8b", 64, gpu="h100", sequence=8192),
    "70B on hosts": Request("llama3-70b", 64, gpu="h100", sequence=8192, parallel=True),
    "mixture": Request("qwen3-30b-a3b", 64, gpu="h100", sequence=4096),
    "long": Request("llama3-8b", 8, gpu="h100", sequence=131_072, parallel=True),
    "CPU": Request("gpt2", 1, gpu="cpu", sequence=512, memory_bytes=24e9, precision="fp32"),
    "two CPUs": Request("gpt2", 2, gpu="cpu", sequence=512, memory_bytes=24e9, precision="fp32"),
}


@functools.cache
def recommended(name: str) -> tuple[Estimate, tuple[Estimate, ...]]:
    found = search(SEARCHES[name])
    assert found.best is not None
    return found.best, found.ranked


@pytest.mark.parametrize("name", SEARCHES)
def test_nothing_is_recomputed_where_memory_is_left(name: str) -> None:
    """Full checkpointing only where the same plan with less of it does not surely fit, or is slower."""
    best, _ = recommended(name)
    if best.setup.checkpointing == "none":
        return
    assert best.memory.expected_bytes > 0.4 * (best.memory.capacity_bytes or 0)


@pytest.mark.parametrize("name", [name for name in SEARCHES if "CPU" not in name])
def test_nothing_that_surely_fits_is_faster_beyond_noise(name: str) -> None:
    best, ranked = recommended(name)
    speeds = [each.time.tokens_per_s_per_gpu for each in ranked if each.memory.fits_surely and each.time]
    assert best.memory.fits_surely
    assert best.time is not None
    assert best.time.tokens_per_s_per_gpu >= (1 - NOISE) * max(speeds)


@pytest.mark.parametrize("name", [name for name in SEARCHES if "CPU" not in name])
def test_among_what_is_as_fast_the_fewest_kinds_of_parallelism_win(name: str) -> None:
    best, ranked = recommended(name)
    assert best.time is not None

    def axes(found: Estimate) -> int:
        mesh = found.setup.mesh
        return sum(size > 1 for size in (mesh.tp, mesh.pp, mesh.cp, mesh.ep))

    alike = [
        each
        for each in ranked
        if each.memory.fits_surely
        and each.time
        and each.time.tokens_per_s_per_gpu
        >= (1 - NOISE) * max(one.time.tokens_per_s_per_gpu for one in ranked[:2] if one.time)
    ]
    assert axes(best) == min(map(axes, alike))
    least = min(TRIED_MODES.index(each.setup.checkpointing) for each in alike if axes(each) == axes(best))
    groups = [each for each in alike if axes(each) == axes(best) and not each.setup.plan.groups]
    if groups and not best.setup.plan.groups:
        least = min(TRIED_MODES.index(each.setup.checkpointing) for each in groups)
    assert TRIED_MODES.index(best.setup.checkpointing) == least


def test_plain_data_parallelism_is_taken_where_a_mesh_gains_only_a_percent() -> None:
    best, ranked = recommended("70B on hosts")
    fastest = max(
        (each for each in ranked if each.memory.fits_surely and each.time),
        key=lambda each: each.time.tokens_per_s_per_gpu,
    )  # type: ignore[union-attr]
    assert fastest.setup.mesh.tp == 2
    assert best.setup.mesh.tp == 1
    assert best.setup.plan.name == "zero3"


SLOW_LINKS = Request(
    "llama3-8b", 8, gpu="h100", per_node=1, internode_bandwidth=5e9, parallel=True, strategy="zero1", sequence=4096,
    checkpointing="full", micro_batch=1,
)  # fmt: skip
"""Where stages, which have run on CPUs alone, would be the fastest."""


def test_what_cannot_run_yet_stands_behind_what_does_and_says_so() -> None:
    found = search(SLOW_LINKS)
    assert [each.runs_now for each in found.ranked] == sorted((each.runs_now for each in found.ranked), reverse=True)
    assert found.best is not None
    assert found.best.time is not None
    assert found.best.runs_now
    planned = next(each for each in found.ranked if not each.runs_now)
    assert planned.time is not None
    assert planned.time.tokens_per_s_per_gpu > found.best.time.tokens_per_s_per_gpu
    rows = [line for line in str(found).splitlines() if line.startswith("zero1 ")]
    assert [line.endswith("surely, planned") for line in rows] == [not each.runs_now for each in found.leaders]


def test_a_plan_of_stages_alone_says_above_all_that_it_does_not_run() -> None:
    asked = Request("llama3-8b", "2..8", gpu="h100", pp=2, checkpointing="full", strategy="zero1")
    for answer in (ask(replace(asked, gpus=4, parallel=True, strategy=None)), ask(asked, fewest=True)):
        assert plain(answer.blocks()).startswith("not runnable yet: Pipelines have run on CPUs alone yet (pp 2).")


def test_plans_of_different_batches_say_that_they_are() -> None:
    """8 sequences in a step of data ranks, and 8 of each of a pipeline's stages: nobody sees that in tokens/s alone."""
    said = str(search(SLOW_LINKS))
    assert "Each plan is rated at a batch of its own" in said
    assert "such as --global-batch 64." in said
    assert "a batch of its own" not in str(search(replace(SLOW_LINKS, global_batch=64)))


def test_on_one_gpu_nothing_is_split() -> None:
    assert recommended("small on one")[0].setup.plan.name == "zero0"


@pytest.mark.parametrize("name", ["CPU", "two CPUs"])
def test_where_no_speed_is_known_nothing_is_recomputed_without_need(name: str) -> None:
    assert recommended(name)[0].setup.checkpointing == "none"


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hfsdp", "hpz"])
def test_hybrid_plans_split_over_the_ranks_that_share_a_sequence_too(strategy: str) -> None:
    """16 GPUs: groups of 8, whether a group has 8 sequences or shares one."""
    states = {}
    for cp in (1, 2, 8):
        setup = build_setup(Request("llama3-8b", 16, gpu="h100", strategy=strategy, sequence=8192, cp=cp))
        assert setup.mesh.shard_ranks == 8
        terms = {term.name: term.value for term in memory_of(setup).terms}
        states[cp] = terms["weights"] + terms["moments"]
    assert states[2] == pytest.approx(states[1], rel=0.01)
    assert states[8] == pytest.approx(states[1], rel=0.01)
