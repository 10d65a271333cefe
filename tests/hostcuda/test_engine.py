"""Training on the simulated device: the host's numbers, the memory that was promised, and no race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hostcuda.report import FAULTS
from tests.hostcuda.cases import AXES, TOLERANCES, Case, Comparison, chosen, compare, grid
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


def check(case: Case, ranks: Ranks, folder: Path) -> Sequence[Comparison]:
    """What each rank has found, if nothing speaks against it."""
    comparisons: list[Comparison] = ranks.run(compare, case, str(folder))
    weights, losses = TOLERANCES[case.precision.removesuffix("-pure")]
    for found in comparisons:
        assert found.faults(*FAULTS, "record_stream") == []
        assert found.held <= found.promised
        assert found.weights <= weights
        assert found.losses <= losses
    return comparisons


@pytest.mark.parametrize("case", chosen(grid()), ids=lambda case: case.name)
def test_any_two_settings_meet(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


def test_every_value_of_every_axis_is_among_them() -> None:
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in chosen(grid())} == set(values)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", AXES["precision"])
@pytest.mark.parametrize("tier", AXES["tier"])
@pytest.mark.parametrize("stage", AXES["stage"])
def test_any_two_of_the_other_settings_meet_in_every_plan(
    stage: str, tier: str, precision: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    cases = [case for case in grid() if (case.stage, case.tier, case.precision) == (stage, tier, precision)]
    for case in chosen(cases):
        check(case, two_ranks, tmp_path)


TWO_AXES = [
    Case("hybrid_shard", precision="bf16", micro=2, mesh=(2, 2)),
    Case("hybrid_shard", "@cpu", mesh=(2, 2)),
    Case("hybrid_shard_zero2", mesh=(2, 2)),
    Case("hfsdp", precision="bf16", mesh=(2, 2)),
    Case("hpz", precision="bf16", mesh=(2, 2)),
]


@pytest.mark.long
@pytest.mark.parametrize("case", TWO_AXES, ids=lambda case: case.name)
def test_two_mesh_axes(case: Case, four_ranks: Ranks, tmp_path: Path) -> None:
    check(case, four_ranks, tmp_path)


RESUMED = [
    Case(resumed=True),
    Case(meta=True, resumed=True),
    Case(tier="@cpu", meta=True, resumed=True),
    Case(optimizer="fused", resumed=True),
]


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_saved_and_resumed(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


@pytest.mark.parametrize("case", [Case(optimizer="fused"), Case(meta=True)], ids=lambda case: case.name)
def test_fused_kernels_and_models_without_values(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)
