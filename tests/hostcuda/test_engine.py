"""Training on the simulated device: the host's numbers, the memory that was promised, and no race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hostcuda.report import FAULTS
from tests.helpers.cover import mostly_long
from tests.hostcuda.cases import AXES, TOLERANCES, Case, Comparison, chosen, compare
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


def check(case: Case, ranks: Ranks, folder: Path) -> Sequence[Comparison]:
    """What each rank has found, if nothing speaks against it."""
    comparisons: list[Comparison] = ranks.run(compare, case, str(folder))
    in_codes = "moments" if case.rounding else "int8" if case.reduce == "int8" else "fp32"
    kinds = case.precision.removesuffix("-pure"), in_codes
    weights, losses = (max(each) for each in zip(*(TOLERANCES[kind] for kind in kinds), strict=True))
    for found in comparisons:
        assert found.faults(*FAULTS, "record_stream") == []
        assert found.held <= found.promised
        assert found.weights <= weights
        assert found.losses <= losses
    return comparisons


@pytest.mark.cover(strength=1, case=vars)
@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.name)
def test_any_two_settings_meet(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


def test_every_value_of_every_axis_is_among_them() -> None:
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in chosen()} == set(values)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", AXES["precision"])
@pytest.mark.parametrize("tier", AXES["tier"])
@pytest.mark.parametrize("stage", AXES["stage"])
def test_any_two_of_the_other_settings_meet_in_every_plan(
    stage: str, tier: str, precision: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for case in chosen(stage=stage, tier=tier, precision=precision):
        check(case, two_ranks, tmp_path)


@pytest.mark.parametrize("micro", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "plan",
    mostly_long(["hybrid_shard", "hfsdp", "hybrid_shard_zero2", "hpz"], "hfsdp"),
)
@pytest.mark.parametrize("tier", ["", pytest.param("@cpu", marks=pytest.mark.long)])
def test_two_mesh_axes(plan: str, tier: str, micro: int, four_ranks: Ranks, tmp_path: Path) -> None:
    check(Case(plan, tier, "bf16", micro=micro, mesh=(2, 2)), four_ranks, tmp_path)


FROZEN = [
    Case(frozen="nf4"),
    Case("shard_grad_op", precision="bf16", micro=2, frozen="nf4-double"),
    Case("zero2", precision="bf16", checkpointing="full", frozen="nf4"),
    Case(tier="@cpu-all", frozen="nf4"),
]


@pytest.mark.parametrize("case", mostly_long(FROZEN, FROZEN[1]), ids=lambda case: case.name)
def test_matrices_in_4_bits(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    """With what decoding takes, which tests/hostcuda/test_known.py measures."""
    for found in check(case, two_ranks, tmp_path):
        assert found.held == found.promised


SENT = [Case(gather="int8"), Case("zero2", precision="bf16", micro=2, gather="int8")]


@pytest.mark.long  # beside gradients that are sent so: below
@pytest.mark.parametrize("case", SENT, ids=lambda case: case.name)
def test_matrices_sent_in_8_bits(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


REDUCED = [
    Case(gather="int8", reduce="int8"),
    Case("zero0", precision="bf16", micro=2, reduce="int8"),
    Case("zero0", precision="bf16", micro=2, reduce="int8", feedback=True),
    Case("zero2", "@cpu", reduce="int4", feedback=True),
]


@pytest.mark.parametrize("case", mostly_long(REDUCED, REDUCED[0]), ids=lambda case: case.name)
def test_gradients_sent_in_8_bits(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


ROUNDED = [
    Case("zero1", precision="bf16-pure", micro=2, rounding="remainder"),
    Case("zero2", "@cpu", "bf16-pure", rounding="remainder"),
    Case("zero3", "@nvme", "bf16-pure", rounding="remainder", resumed="zero1"),
    Case("zero1", precision="bf16-pure", rounding="stochastic"),
]


@pytest.mark.parametrize("case", mostly_long(ROUNDED, ROUNDED[1]), ids=lambda case: case.name)
def test_masters_in_bf16_with_moments_in_8_bits(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


RESUMED = [
    Case(optimizer="fused", resumed="zero3"),
    Case(tier="@cpu", meta=True, resumed="zero1"),
]


@pytest.mark.parametrize("case", mostly_long(RESUMED, RESUMED[1]), ids=lambda case: case.name)
def test_saved_and_resumed(case: Case, two_ranks: Ranks, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("tier", ["", "@cpu-all", "@nvme"])
def test_saved_in_the_background_and_resumed(tier: str, two_ranks: Ranks, tmp_path: Path) -> None:
    check(Case(tier=tier, resumed="zero2", background=True), two_ranks, tmp_path)
