"""Every plan, mesh and feature in fp32: each bit as in a single process that sums in the plan's order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.parity import CUSTOM, FEATURES, Case, check, with_feature
from tests.helpers.cover import places

ONE_AXIS = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")
TWO_AXES = ("hpz", *ONE_AXIS, "hybrid_shard", "hybrid_shard_zero2", "hfsdp", CUSTOM)
MESHES = [
    *(Case(plan, shards) for plan in ONE_AXIS for shards in (3, 2, 4)),  # of equals a cover takes the first
    *(Case(plan, 2, replicas=2) for plan in TWO_AXES),
]


def mesh_id(case: Case) -> str:
    shape = f"{case.replicas}x{case.shards}" if case.replicas else f"{case.shards}"
    return f"{case.plan if isinstance(case.plan, str) else 'custom'}-{shape}"


def keeps_whole_gradients(case: Case) -> bool:
    return case.plan in ("zero0", "zero1", CUSTOM)


def kind(case: Case) -> dict[str, object]:
    """What a feature meets: which states are whole, and along which axis others are split. The rest come in turns."""
    return {state: str(place)[0] for state, place in places(case.plan).items()}


@pytest.mark.cover(case=kind)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("case", MESHES, ids=mesh_id)
def test_fp32_is_bitwise_the_single_process(case: Case, feature: str) -> None:
    check(with_feature(case, feature))


@pytest.mark.cover(strength=1, case=lambda case: {"grad": str(places(case.plan)["grad"])[0]})
@pytest.mark.parametrize("case", [case for case in MESHES if case.ranks == 4], ids=mesh_id)
def test_the_default_of_accumulation_follows_from_the_plan(case: Case) -> None:
    """Whole gradients are added up locally, split ones are reduced by each micro-batch: so says the reference."""
    whole = keeps_whole_gradients(case)
    case = replace(case, micro_batches=3, variant="frozen")
    assert (case.recipe.sums.each == "") == whole
    check(replace(case, local=whole))
