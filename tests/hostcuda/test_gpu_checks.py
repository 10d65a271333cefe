"""The checks of `make gpu` on the simulated device: what they do works there, and what they look for they find."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import checks
from hostcuda import memory
from terrazzo.engine.comm.collectives import Collectives
from tests.helpers.cover import mostly_long
from tests.helpers.processes import RankFailed
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

ALONE = ("training", "collectives", "offload", "clipping", "rate", "sanitizer", "syncs", "memory", "compiled")


def run(name: str) -> dict[str, float]:
    memory.begin()
    try:
        return checks.CHECKS[name]()
    finally:
        memory.end()


# Long: the sanitizer looks on real devices alone, compiled units and tiers are axes of `test_engine`.
@pytest.mark.parametrize("name", mostly_long(ALONE, "training", "clipping", "rate", "memory"))
def test_one_rank_passes(name: str, one_rank: Ranks) -> None:
    (numbers,) = one_rank.run(run, name, timeout_s=170)
    assert all(value <= checks.CLOSE for number, value in numbers.items() if "apart" in number)
    if name == "memory":
        assert 1.0 < numbers["reserved / allocated"] < 2.0


@pytest.mark.long
def test_two_ranks_pass(two_ranks: Ranks) -> None:
    for numbers in two_ranks.run(run, "ranks", timeout_s=170):
        assert len([number for number in numbers if "apart" in number]) == 5


def test_every_check_is_tried() -> None:
    assert set(checks.CHECKS) == {"ranks", *ALONE}


# -- what is wrong is found --------------------------------------------------------------------------------------------


def lossy(name: str) -> None:
    """Gathered weights lose a bit on the way, wherever there is a collective."""
    gather = Collectives.all_gather

    def losing(self: Any, full: Tensor) -> Any:
        yield from gather(self, full)
        full.data.mul_(1 + 2.0**-20)
        return full

    with mock.patch.object(Collectives, "all_gather", losing):
        run(name)


def waiting(name: str) -> None:
    """The host asks for a number in each backward."""
    backward = torch.Tensor.backward

    def asking(self: Tensor, *arguments: Any, **keywords: Any) -> None:
        backward(self, *arguments, **keywords)
        self.item()

    with mock.patch.object(torch.Tensor, "backward", asking):
        run(name)


def forgetful(name: str) -> None:
    """Loading leaves the weights as they were."""
    with mock.patch.object(checks.tz.checkpoint, "load", return_value=None):
        run(name)


@pytest.mark.parametrize(
    ("broken", "name", "told"),
    [
        pytest.param(lossy, "collectives", "zero1 in fp32: other bits", marks=pytest.mark.long),
        pytest.param(waiting, "syncs", "zero3: the host waits at ", marks=pytest.mark.long),  # as test_known has it
        (forgetful, "training", "a step after loading has other bits"),
    ],
)
def test_a_check_says_what_is_wrong(broken: Any, name: str, told: str) -> None:
    with Ranks(1) as ranks, pytest.raises(RankFailed, match=told):
        ranks.run(broken, name)
