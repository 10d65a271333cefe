"""What was wrong or slow on CUDA and is not any more. What is found next comes here first, marked as wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.engine import FrozenFormat
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.setup import Setup
from tests.helpers.cover import mostly_long
from tests.hostcuda import known
from tests.hostcuda.cases import Case, built, compare
from tests.hostcuda.ranks import Ranks
from tests.hostcuda.timeline import step_ms

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


def test_where_the_group_is_nccl_alone(tmp_path: Path) -> None:
    """Checkpoints are saved, and ranks hear of each other beside the device: the host does not wait for it."""
    with Ranks(2, backend="cuda:nccl") as ranks:
        ranks.run(known.saved, str(tmp_path))
        for counts in ranks.run(known.syncs, Case(), str(tmp_path)):
            assert not {"forward", "backward", "clip", "step"} & counts.keys()


def test_training_on_the_host_pins_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(known.pinned_on_the_host, str(tmp_path)) == [0]


def test_integers_of_16_bits_are_gathered(two_ranks: Ranks) -> None:
    assert two_ranks.run(known.integers_are_gathered) == [2.0 * sum(range(64))] * 2


def test_reductions_in_fp16_are_refused(two_ranks: Ranks) -> None:
    """NCCL sums in the dtype that is sent."""
    assert two_ranks.run(known.refuses_reductions_in_fp16) == [True, True]


def test_graphs_of_weights_that_come_and_go_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(known.refuses_graphs) == [True, True]


# -- the host waits for the device ------------------------------------------------------------------------------------

WAITS = [
    (Case(precision="fp16"), "step", 1),
    (Case(tier="@cpu", precision="fp16"), "step", 2),
    (Case(tier="@cpu"), "clip", 1),
    (Case(tier="@cpu", micro=2), "backward", 1),
    (Case(), "forward", 0),
    (Case(), "backward", 0),
    (Case(), "step", 0),
]


def test_a_learning_rate_on_the_device_is_compared_and_no_step_waits_for_it(two_ranks: Ranks, tmp_path: Path) -> None:
    for waits, said in two_ranks.run(known.of_a_rate_on_the_device, str(tmp_path)):
        assert waits == 0
        assert "param_groups[0]['lr'] = " in said
        assert "0.25 to 0.5 on all ranks" in said


@pytest.mark.parametrize(("case", "phase", "most"), WAITS)
def test_the_host_waits_no_more_than(case: Case, phase: str, most: int, two_ranks: Ranks, tmp_path: Path) -> None:
    for counts in two_ranks.run(known.syncs, case, str(tmp_path)):
        assert counts.get(phase, 0) <= most


@pytest.mark.parametrize(
    "program",
    [
        known.syncs_of_torch_s_clipping,
        known.syncs_of_a_background_save,
    ],
    ids=lambda program: program.__name__,
)
def test_the_host_waits_at_most_once(program: Callable[..., Any], two_ranks: Ranks, tmp_path: Path) -> None:
    for count in two_ranks.run(program, str(tmp_path)):
        assert count <= 1


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [form.value for form in FrozenFormat])
def test_what_decoding_takes_is_counted_to_the_byte(form: str, one_rank: Ranks) -> None:
    [(held, counted)] = one_rank.run(known.decoding_takes, form)
    assert held == counted


LATE = [
    Case("zero2", "@cpu-all", "bf16", gather="int8"),
    Case("zero2", "@cpu-all", "bf16", "backward", micro=2, gather="int8", prefetch=2),
    Case("zero1", "@nvme-all", gather="int8", prefetch=2),
]


def planned(case: Case) -> float:
    """Transient bytes by the planner."""
    plan = tz.Plan.named(case.stage + case.tier)
    offload = tz.Offload(threads=1, step=case.step, path="/nowhere", block_mib=0.0625).used_under(plan)  # type: ignore[arg-type]
    options: dict[str, Any] = {"micro_batches": case.micro, "prefetch": case.prefetch, "offload": offload}
    precision = replace(tz.Precision.named(case.precision), gather=case.gather)  # type: ignore[arg-type]
    shape, cluster = model_shape(built(case)), Cluster(Device("gpu"), 2)
    setup = Setup(shape, cluster, plan, Mesh(dp_shard=2), precision=precision, **options)
    return rank_peak(setup, 0, states_only=True).total


@pytest.mark.parametrize("case", mostly_long(LATE, LATE[0]), ids=lambda case: case.name)
def test_the_bill_has_new_weights_that_are_gathered_in_the_next_forward(
    case: Case, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Updates away from the device run on into it: what is sent in blocks comes beside full weights of other units."""
    assert planned(case) > planned(replace(case, step="synchronous"))
    for found in two_ranks.run(compare, case, str(tmp_path)):
        assert found.held == found.promised == planned(case)


# -- a step's time beside FSDP2's --------------------------------------------------------------------------------------

SLACK = 1.03
"""Of FSDP2's step: which collectives are exposed at a step's ends differs by one."""

TIMES = [("zero3", 0.2, 0.0), ("zero3", 0.6, 0.0), ("zero2", 0.6, 0.0), ("hybrid_shard", 0.1, 0.9)]


@pytest.mark.parametrize(("plan", "gather_ms", "all_reduce_ms"), mostly_long(TIMES, TIMES[1]))
def test_a_step_takes_no_longer_than_fsdp2_s(
    plan: str, gather_ms: float, all_reduce_ms: float, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if all_reduce_ms else "two_ranks")
    own = max(ranks.run(step_ms, plan, gather_ms, all_reduce_ms))
    theirs = max(ranks.run(step_ms, "fsdp2", gather_ms, all_reduce_ms))
    print(f"{plan}: {own:.2f} ms, FSDP2: {theirs:.2f} ms")
    assert own <= SLACK * theirs
