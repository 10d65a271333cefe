"""What ranks are told whose exchange has failed since one of them was late, or did not come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import terrazzo as tz
from terrazzo.engine.comm import failure_reports
from terrazzo.engine.comm.failed_exchanges import Exchange, MeshGroups
from terrazzo.engine.comm.failure_reports import FailureReports, RankReport
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.labels.rank_places import RankPlace
from terrazzo.engine.runtime.private_torch import default_store
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes
TIMEOUT_S = 2.0
NEAR = pytest.mark.parametrize("near", ["1", "0"], ids=["read memory", "sockets"])


@contextmanager
def a_mesh(near: str = "1") -> Iterator[DeviceMesh]:
    """Of a group whose ranks soon give up; `near`: whether they read each other's memory."""
    with patch.dict(os.environ, {"TERRAZZO_PEER_MEMORY": near}):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))


def not_coming(near: str) -> str:
    with a_mesh(near) as mesh:
        dist.barrier()
        if dist.get_rank() == 1:
            default_store().wait(["told"])
            return ""
        with pytest.raises(tz.TimedOut) as told:
            tz.shard(nn.Linear(2, 2), None, "zero3", mesh=mesh)
        default_store().set("told", "")
        return str(told.value)


@NEAR
def test_a_rank_that_does_not_come_to_shard_is_named(near: str) -> None:
    with Pool(2) as pool:
        said = pool.run(not_coming, near, timeout_s=60.0)[0]
    assert said.startswith("Other ranks have not come to an exchange in time") and said.endswith(
        "; of rank 1 nothing is known."
    )


def test_a_rank_is_told_of_in_its_own_words_where_another_does_not_know_its_names() -> None:
    alone, unnamed = RankPlace("model.state_dict()", "", code=3), RankPlace("the weights of unit 0", "", "8 bytes", 7)
    groups, waits = {"g": [0, 1]}, RankPlace("the weights of the root unit", "", code=7)
    reports = FailureReports(RankReport(groups, []))
    reports._reports = {
        0: RankReport(groups, [("g", alone)], {0: alone, 1: unnamed}),
        1: RankReport(groups, [("g", RankPlace("a norm", "", code=9)), ("g", waits)]),
    }
    assert "rank 0 at model.state_dict(); rank 1 at the weights of the root unit." in str(reports.apart())
    larger = waits._replace(detail="12 bytes")
    reports._reports[0] = RankReport(groups, [("g", waits)], {0: larger, 1: unnamed})
    both = "rank 0 at the weights of the root unit (12 bytes); rank 1 at the weights of the root unit (8 bytes)."
    assert both in str(reports.apart()), "and how much it has brought, as it was seen"


class CountingStore:
    """A store in this process, and how often it has been asked something."""

    def __init__(self) -> None:
        self.store, self.requests = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


@contextmanager
def as_rank(rank: int, store: CountingStore) -> Iterator[None]:
    with patch.object(failure_reports, "default_store", lambda: store), patch.object(dist, "get_rank", lambda: rank):
        yield


def test_reports_of_many_ranks_are_asked_for_at_once() -> None:
    """All ranks ask one store at the same time: one after the other, those of a thousand would take minutes."""
    store, ranks = CountingStore(), 64
    own = {rank: RankReport({"all": [*range(ranks)]}, [("all", RankPlace("a norm", ""))]) for rank in range(ranks)}
    for rank in range(ranks):
        with as_rank(rank, store):
            reports, store.requests = FailureReports(own[rank]), 0
            assert reports.any() is (rank > 0) and store.requests == 1
            if rank != 40:
                reports.leave({})
    with as_rank(1, store):
        reports, store.requests = FailureReports(own[1]), 0
        reports.leave({})
        reports.read(0.05)
        assert [*reports._missing()] == [40] and "of rank 40 nothing is known" in str(reports.too_late(TimeoutError()))
        assert store.requests < ranks


def test_the_host_of_the_store_stays_until_others_have_read() -> None:
    store, groups = CountingStore(), {"all": [0, 1]}
    reports = [FailureReports(RankReport(groups, [("all", RankPlace("a norm", ""))])) for _ in range(2)]
    for rank, each in enumerate(reports):
        with as_rank(rank, store):
            each.leave({})
    began = time.monotonic()
    with as_rank(0, store):
        reports[0].read(0.3)
    assert time.monotonic() - began >= 0.3, "rank 1 has not read"
    for rank in (1, 0):
        with as_rank(rank, store):
            reports[rank].read(60.0)
    assert time.monotonic() - began < 30.0


class Late(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))
        self.late_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(Late.apply(x, self.late_s) if index == 3 else x)  # type: ignore[no-untyped-call]
        return x


def coming_late(near: str, trials: int) -> list[tuple[str, str, list[str]]]:
    """What each of several runs ends with in which the first rank is late in a backward; run by each process."""
    told = []
    for _ in range(trials):
        with a_mesh(near) as mesh:
            try:
                model, _ = tz.shard(Layers(), None, "zero3", mesh=mesh, units=["layers.*"])
                for step in range(2):
                    model.late_s = TIMEOUT_S + 0.4 if (step, dist.get_rank()) == (1, 0) else 0.0
                    model(torch.ones(2, 4)).sum().backward()
            except Exception as error:
                told.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
        dist.barrier()
    return told


@NEAR
def test_a_rank_that_is_late_is_not_said_to_run_something_else(near: str) -> None:
    """A gather and a reduction are under way then; both fail at once, and either tells first."""
    with Pool(2) as pool:
        of_ranks = pool.run(coming_late, near, trials := 4, timeout_s=120.0)
    for told in of_ranks:
        assert len(told) == trials
        for kind, said, notes in told:
            assert kind == "TimedOut" and "Waiting: " in said and "longer timeout" in said, said
            assert not notes, "the sentence is buried under tracebacks of threads"


def failing(numbers: list[list[int]], first: list[int]) -> tuple[str, str]:
    """What a rank is told that has begun the gathers of these units, of which one fails; run by each process."""
    rank, group = dist.get_rank(), dist.new_group()
    groups = MeshGroups()
    groups.add(group)
    begun = {number: Exchange(groups, group, Label(Purpose.BACKWARD, number)) for number in (0, *numbers[rank])}
    with begun[0].part(), begun[0].part(last=True):  # has ended
        pass
    dist.barrier()
    try:
        with begun[first[rank]].part():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting 2000ms for recv")
    except RuntimeError as error:
        return type(error).__name__, str(error)


def test_ranks_with_an_exchange_in_common_have_run_the_same() -> None:
    with Pool(2) as pool:
        for first in ([1, 1], [1, 2], [2, 1], [2, 3]):
            for kind, said in pool.run(failing, [[1, 2], [1, 2, 3]], first):
                assert kind == "TimedOut" and "Waiting: ranks 0, 1 at the weights of unit 1" in said, said
        for kind, said in pool.run(failing, [[1, 2], [3, 4]], [2, 4]):
            assert kind == "RanksApart" and "rank 0 at the weights of unit 1" in said and "rank 1 at the" in said, said


def measuring_and_clipping() -> tuple[str, str]:
    """What ranks are told of which one asks for a gradient's norm, and the other clips; run by each process."""
    with a_mesh() as mesh:
        model, _ = tz.shard(Layers(), None, "zero3", mesh=mesh, units=["layers.*"])
        model(torch.ones(2, 4)).sum().backward()
        weight = model.get_parameter("layers.0.0.weight")
        weight.grad.norm(), tz.clip_grad_norm_(model, 1.0)  # type: ignore[union-attr]  # which import what they need
        dist.barrier()
        with pytest.raises(RuntimeError) as told:
            weight.grad.norm() if dist.get_rank() == 0 else tz.clip_grad_norm_(model, 1.0)  # type: ignore[union-attr]
        return told.type.__name__, str(told.value)


def test_a_norm_that_one_rank_asks_for_and_another_clips_by_are_two_things() -> None:
    with Pool(2) as pool:
        for _ in range(3):  # on a busy machine a word may come later than the other looks for it
            told = pool.run(measuring_and_clipping, timeout_s=60.0)
            if all(kind == "RanksApart" for kind, _ in told):
                break
        for kind, said in told:
            assert kind == "RanksApart", said
            assert "rank 0 at the gradients' norms of order 2; rank 1 at the norm of all gradients. " in said
            assert "on every rank, in the same order" in said and "with tz.accumulate" not in said
