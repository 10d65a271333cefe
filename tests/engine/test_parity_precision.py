"""Reduced precision: each bit as in a single process that casts by hand where the precision's dtypes say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.parity import CUSTOM, Case, axes, check, with_feature

PLANS = [
    *(Case(plan, 3) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")),
    *(Case(plan, 2, replicas=2) for plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", CUSTOM)),
]
FEATURES = ("tied", "unused_and_reordered", "accumulating", "checkpointed")
PRECISIONS = ("bf16", "bf16-pure", "fp16")


def plan_id(case: Case) -> str:
    return case.plan if isinstance(case.plan, str) else "custom"


@pytest.mark.cover(case=axes, strength=1)  # pairs meet in test_parity, and precisions with places in what is billed
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", PLANS, ids=plan_id)
def test_reduced_precision_is_bitwise_the_casts_by_hand(case: Case, precision: str, feature: str) -> None:
    check(replace(with_feature(case, feature), precision=precision))
