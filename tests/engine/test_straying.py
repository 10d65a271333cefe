"""Units that are skipped, come late, come in another order on each rank: right, or a named error; never a mix-up."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.comm import backends
from terrazzo.engine.comm.collectives import NativeCollectives
from terrazzo.engine.runtime.private_torch import default_store
from terrazzo.engine.schedule.order import Order
from terrazzo.engine.schedule.visits import Event, Visit
from tests.engine.toys import EVERY_PLAN, Block, adamw, assert_close, batch, full_parameters, mesh_for, on_ranks
from tests.helpers.cover import places
from tests.helpers.processes import Pool

WIDTH, DEPTH = 13, 5
SPLIT = ("zero3", "shard_grad_op", "hpz", "hybrid_shard")

Route = Callable[[int, int], list[int]]
"""(step, rank) to the blocks that run, in order."""


class Routed(nn.Module):
    """Runs the blocks of its route, which may differ between steps and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 17)
        self.route: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.route:
            x = self.blocks[index](x)
        return self.head(x)


class Grouped(Routed):
    """Several blocks of the route inside of one checkpointed region.

    Args:
        size: of a region, in blocks.
        region: calls a function of one tensor, and recomputes it in backward.
    """

    def __init__(self, size: int, region: Callable[..., Tensor]) -> None:
        super().__init__()
        self.size, self.region = size, region

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for start in range(0, len(self.route), self.size):
            part = self.route[start : start + self.size]
            x = self.region(self.run, x, part) if torch.is_grad_enabled() else self.run(x, part)
        return self.head(x)

    def run(self, x: Tensor, route: list[int]) -> Tensor:
        for index in route:
            x = self.blocks[index](x)
        return x * 2


def modern(run: Callable[..., Tensor], x: Tensor, route: list[int]) -> Tensor:
    return checkpoint(run, x, route, use_reentrant=False)


def reentrant(run: Callable[..., Tensor], x: Tensor, route: list[int]) -> Tensor:
    return checkpoint(run, x, route, use_reentrant=True)


class _Own(torch.autograd.Function):
    """Recomputation written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[..., Tensor], route: list[int]) -> Tensor:
        ctx.run, ctx.route = run, route
        ctx.save_for_backward(x)
        return run(x, route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            output = ctx.run(x, ctx.route)
        torch.autograd.backward(output, gradient)
        return x.grad, None, None


def own(run: Callable[..., Tensor], x: Tensor, route: list[int]) -> Tensor:
    return _Own.apply(x, run, route)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def alone(base: Routed, route: Route, steps: int, world: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of every step and rank, and the weights in the end, in plain PyTorch."""
    model = copy.deepcopy(base)
    optimizer, losses = adamw(model.parameters()), []
    for step in range(steps):
        each = []
        for rank in range(world):
            model.route = route(step, rank)
            each.append(loss_of(model, batch(step, rank)))
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, dict(model.named_parameters())


def follows(
    route: Route, plan: str, steps: int = 5, world: int = 2, base: Routed | None = None, **options: Any
) -> None:
    """Every rank's losses and the weights are those of one process."""
    base = base or Routed()
    wanted, weights = alone(base, route, steps, world)

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, world), **options)
        losses = []
        for step in range(steps):
            model.route = route(step, rank)
            loss = loss_of(model, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert abs(loss_of(model, batch(step, rank)).item()) < 100
            losses.append(loss.item())
        return losses, full_parameters(model)

    for rank, (losses, found) in enumerate(on_ranks(world, body)):
        assert losses == pytest.approx([step[rank] for step in wanted], abs=1e-5)
        assert_close(found, weights, 1e-5)


def world_of(plan: str) -> int:
    return 4 if mesh_needed(plan) else 2


def mesh_needed(plan: str) -> bool:
    return plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")


def later(step: int, rank: int) -> list[int]:
    """The first step runs some of the units only, and later ones all."""
    return [0, 2] if step == 0 else [0, 1, 2, 3, 4]


def dropped(step: int, rank: int) -> list[int]:
    """Layer drop, another one on each rank."""
    dice = random.Random(f"{step} {rank}")
    return [index for index in range(DEPTH) if dice.random() > 0.4]


def shuffled(step: int, rank: int) -> list[int]:
    """Routes in any order, with repeats."""
    dice = random.Random(f"{step} {rank}")
    return [dice.randrange(DEPTH) for _ in range(dice.randint(0, 7))]


def early(step: int, rank: int) -> list[int]:
    """Early exit, at a depth of each rank's own."""
    return list(range(random.Random(f"{step} {rank}").randint(0, DEPTH)))


def opposite_ends(step: int, rank: int) -> list[int]:
    """All blocks, on one rank or on the other."""
    return list(range(DEPTH)) if (step + rank) % 2 else []


def opposite(step: int, rank: int) -> list[int]:
    return list(range(DEPTH)) if rank % 2 else list(reversed(range(DEPTH)))


def thrice(step: int, rank: int) -> list[int]:
    """One call against three of the same block, which nobody calls in every other step."""
    return [0, *([1] * (3 if rank else 1) if step % 2 else []), 2]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("route", [later, dropped, shuffled, early, opposite, thrice])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_units_that_come_as_they_like(plan: str, route: Route) -> None:
    follows(route, plan, world=world_of(plan))


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("route", [dropped, shuffled])
@pytest.mark.parametrize("plan", SPLIT)
def test_with_any_prefetch(plan: str, route: Route, prefetch: int) -> None:
    follows(route, plan, world=world_of(plan), prefetch=prefetch)


def in_turn() -> list[Any]:
    """Every plan with every way to recompute, and every route with each of both."""
    return [
        pytest.param(plan, (dropped, early, shuffled)[(i + j) % 3], region, (2, 5)[(i + j) % 2])
        for i, plan in enumerate(("zero2", *SPLIT))
        for j, region in enumerate((modern, reentrant, own))
    ]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(("plan", "route", "region", "size"), in_turn())
def test_regions_of_several_units(plan: str, route: Route, region: Callable[..., Tensor], size: int) -> None:
    follows(route, plan, world=world_of(plan), base=Grouped(size, region))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("region", [modern, reentrant])
def test_regions_with_any_prefetch(region: Callable[..., Tensor], prefetch: int) -> None:
    follows(dropped, "zero3", base=Grouped(3, region), prefetch=prefetch)


@pytest.mark.parametrize("region", [modern, reentrant, own])
def test_regions_of_one_unit_cost_no_memory(region: Callable[..., Tensor]) -> None:
    def peak(model: Routed) -> list[int]:
        def body(rank: int) -> int:
            sharded, _ = tz.shard(copy.deepcopy(model), None, "zero3")
            sharded.route = list(range(DEPTH))
            ledger = engine_of(sharded).tally.ledger
            ledger.peak_bytes = 0
            loss_of(sharded, batch(0, rank)).backward()
            return ledger.peak_bytes

        return on_ranks(2, body)

    assert peak(Grouped(1, region)) == peak(Routed())


def in_regions(rank_route: Route) -> list[float]:
    """Run by each process."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = Grouped(5, modern)
    model, optimizer = tz.shard(model, adamw(model.parameters()), "zero3")
    losses = []
    for step in range(3):
        model.route = rank_route(step, rank)
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.processes
def test_regions_that_only_some_ranks_run_in_processes(two_processes: Pool) -> None:
    """Gathers are waited for there while gradients of others are under way."""
    torch.manual_seed(0)
    wanted, _ = alone(Grouped(5, modern), opposite_ends, 3, 2)
    for rank, losses in enumerate(two_processes.run(in_regions, opposite_ends)):
        assert losses == pytest.approx([step[rank] for step in wanted], abs=1e-5)


@pytest.mark.parametrize("plan", ["zero3@cpu", "zero3@cpu-all", "shard_grad_op@cpu"])
def test_with_states_in_host_memory(plan: str) -> None:
    follows(shuffled, plan)


@pytest.mark.parametrize("precision", ["bf16"])
def test_bf16_comes_to_the_same_on_all_ranks(precision: str) -> None:
    base = Routed()

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), "zero3", precision=precision)
        for step in range(4):
            model.route = shuffled(step, rank)
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    first, second = on_ranks(2, body)
    assert_close(first, second, 0)


def test_accumulated_micro_batches_may_take_other_routes() -> None:
    base = Routed()
    model = copy.deepcopy(base)
    optimizer = adamw(model.parameters())
    for step in range(3):
        for rank in range(2):
            for micro in range(2):
                model.route = shuffled(10 * step + micro, rank)
                (loss_of(model, batch(10 * step + micro, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), "zero3")
        for step in range(3):
            model.route = shuffled(10 * step, rank)
            with tz.accumulate(model):
                loss_of(model, batch(10 * step, rank)).backward()
            model.route = shuffled(10 * step + 1, rank)
            loss_of(model, batch(10 * step + 1, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(model.named_parameters()), 1e-5)


def test_evaluation_may_take_other_routes() -> None:
    """Also under a plan that keeps weights after forward, and between a forward and its backward."""
    base = Routed()

    def body(rank: int, plan: str) -> list[float]:
        model, _ = tz.shard(copy.deepcopy(base), None, plan)
        losses = []
        for step in range(4):
            model.route = [0, 1, 2, 3, 4]
            training = loss_of(model, batch(step, rank))
            with torch.no_grad():
                model.route = shuffled(step, rank)
                losses.append(loss_of(model, batch(step, rank)).item())
            training.backward()
            model.zero_grad()
        return losses

    for plan in ("zero3", "shard_grad_op"):
        for rank, losses in enumerate(on_ranks(2, lambda rank, plan=plan: body(rank, plan))):
            wanted = []
            for step in range(4):
                base.route = shuffled(step, rank)
                wanted.append(loss_of(base, batch(step, rank)).item())
            assert losses == pytest.approx(wanted, abs=1e-6)


def test_an_order_that_has_settled_costs_nothing_more() -> None:
    def body(rank: int) -> list[int]:
        model, _ = tz.shard(Routed(), None, "zero3")
        engine, counts = engine_of(model), []
        for step in range(3):
            model.route = later(step, rank)
            engine.traffic.reset()
            loss_of(model, batch(step, rank)).backward()
            model.zero_grad()
            counts.append(engine.traffic.count["all_gather"])
        return counts

    for counts in on_ranks(2, body):
        assert counts == [11, 11, 11]  # unseen units kept their place: nothing was out of order


# -- mispairings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_uneven_micro_batches_are_named(plan: str) -> None:
    def body(rank: int) -> None:
        model = Routed()
        model.route = [0, 1]
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan)
        for _ in range(2 - rank):
            with tz.accumulate(model):
                loss_of(model, batch(0, rank)).backward()
        loss_of(model, batch(1, rank)).backward()
        optimizer.step()

    with pytest.raises(tz.RanksApart, match=r"accumulate.*") as caught:
        on_ranks(2, body)
    assert "gradient of" in str(caught.value) and "backward 2" in str(caught.value)


def test_a_forward_of_one_rank_alone_is_named() -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Routed(), None, "zero3")
        model.route = [0, 1]
        if rank == 0:
            with torch.no_grad():
                model(batch()[:, :-1])
        loss_of(model, batch(0, rank)).backward()

    with pytest.raises(tz.RanksApart, match=r"forward 1, without gradients"):
        on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "shard_grad_op", "zero3", "zero3@cpu"])
def test_a_step_that_one_rank_leaves_out_is_named(plan: str) -> None:
    def body(rank: int) -> None:
        model = Routed()
        model.route = [0, 1]
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan)
        for number in range(3):
            loss_of(model, batch(number, rank)).backward()
            if (number, rank) != (1, 1):
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(tz.RanksApart, match=r"optimizer\.step\(\) has been called .* times here, and from 1 to 2"):
        on_ranks(2, body)


def leaving_out(plan: str, left_out: str) -> tuple[str, float]:
    """What is said where the second rank leaves out a step or a backward, and after how long; run by each process."""
    rank, model = dist.get_rank(), Routed()
    model.route = [0, 1]
    sharded, optimizer = tz.shard(model, adamw(model.parameters()), plan)
    start = time.monotonic()
    try:
        for number in range(3):
            skipped = left_out if (number, rank) == (1, 1) else ""
            loss = loss_of(sharded, batch(number, rank))
            if skipped != "backward":
                loss.backward()
            if skipped != "step":
                optimizer.step()
    except tz.RanksApart as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize(("plan", "left_out"), [("zero1", "step"), ("zero2", "backward")])
def test_what_one_rank_leaves_out_where_weights_are_whole_is_named_at_once(
    two_processes: Pool, plan: str, left_out: str
) -> None:
    for said, seconds in two_processes.run(leaving_out, plan, left_out, timeout_s=60.0):
        assert "updated weights of" in said and "gradient of unit" in said, said
        assert seconds < 30  # nobody waits for a collective's timeout
    two_processes.close()  # their connections have broken


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "zero3@cpu"])
def test_denominators_that_differ_between_ranks_are_named(plan: str) -> None:
    """Each rank would divide its own part of the sums."""

    def body(rank: int) -> None:
        model = Routed()
        model.route = [0, 1]
        model, optimizer = tz.shard(model, adamw, plan)
        model.set_gradient_denominator([2.0, None][rank])  # None is the number of ranks: the same
        loss_of(model, batch(0, rank)).backward()
        optimizer.zero_grad()
        model.set_gradient_denominator([4.0, 1.0][rank])
        loss_of(model, batch(1, rank)).backward()

    said = r"gradients' denominator is .* here, and 1 to 4 on.*set_gradient_denominator"
    with pytest.raises(tz.RanksApart, match=said):
        on_ranks(2, body)


def uneven_without_labels(plan: str) -> str:
    """Run by each process: NCCL's part is played by gloo's own collectives, whose messages say nothing."""
    before = backends.BY_BACKEND["gloo"]
    backends.BY_BACKEND["gloo"] = NativeCollectives
    try:
        rank = dist.get_rank()
        model = Routed()
        model.route = [0, 1]
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan)
        try:
            for _ in range(2 - rank):
                with tz.accumulate(model):
                    loss_of(model, batch(0, rank)).backward()
            loss_of(model, batch(1, rank)).backward()
            optimizer.step()
        except tz.RanksApart as error:
            return str(error)
        return ""
    finally:
        backends.BY_BACKEND["gloo"] = before


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_uneven_micro_batches_are_named_where_messages_carry_no_labels(two_processes: Pool, plan: str) -> None:
    for told in two_processes.run(uneven_without_labels, plan):
        assert "gradient of" in told and "backward 2" in told and "accumulate" in told


def two_models_in_opposite_order(native: bool) -> str:
    """What a rank hears as the second one runs the models the other way round; run by each process."""
    group = dist.new_group(timeout=timedelta(seconds=SKIPPING_TIMEOUT_S))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
    kind = NativeCollectives if native else backends.BY_BACKEND["gloo"]
    with patch.dict(backends.BY_BACKEND, {"gloo": kind}):
        models = [tz.shard(nn.Linear(6, 6), None, "zero3", mesh=mesh)[0] for _ in range(2)]
    try:
        for model in reversed(models) if dist.get_rank() else models:
            model(torch.ones(2, 6))
    except tz.RanksApart as apart:
        return str(apart)
    return ""


@pytest.mark.processes
def test_ranks_that_run_two_models_in_opposite_order_hear_of_which_each_is(two_processes: Pool) -> None:
    for told in two_processes.run(two_models_in_opposite_order, True, timeout_s=60.0):
        assert (
            "rank 0 at the end of forward 1, of the first model; rank 1 at the end" in told and "second model" in told
        )
    for told in two_processes.run(two_models_in_opposite_order, False, timeout_s=60.0):
        first = "rank 0 at the weights of the root unit for training forward 1, of the first model; rank 1 at the"
        assert first in told and "forward 1, of the second model." in told, told


def test_norms_of_two_models_in_opposite_order_are_refused_on_all_ranks() -> None:
    """They are as many numbers, for the same, along the same axis."""

    def body(rank: int) -> str:
        models = [tz.shard(nn.Linear(6, 6), None, "zero3")[0] for _ in range(2)]
        for model in models:
            model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(tz.RanksApart) as apart:
            tz.clip_grad_norm_(models[rank], 1.0)
        return str(apart.value)

    for told in on_ranks(2, body):
        norm = "the norm of all gradients, of the"
        assert f"same: rank 0 at {norm} first model; rank 1 at {norm} second model. " in told, told


def test_ranks_that_meet_at_the_ends_of_other_passes_are_named() -> None:
    """Between a forward and its backward nothing is gathered here, so that only their ends are met at."""

    def body(rank: int) -> None:
        model, _ = tz.shard(nn.Sequential(nn.Linear(5, 5)), None, "shard_grad_op", units=[])
        out = model(torch.ones(2, 5))
        if rank == 1:
            model(torch.ones(2, 5))
        out.sum().backward()

    with pytest.raises(
        tz.RanksApart, match=r"same: ranks 0, 2 at the end of backward 1; rank 1 at the end of forward 2\."
    ):
        on_ranks(3, body)


class Choosy(Routed):
    """Raises at the end of a forward, when it is told to."""

    skips = False

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        if self.skips:
            raise ValueError("a batch that this rank does not like")
        return out


def skipping_a_batch(plan: str, goes_on: bool, near: str = "1") -> tuple[str, str, float]:
    """What ends a run whose second rank skips a batch, and goes on or leaves it there; run by each process."""
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=SKIPPING_TIMEOUT_S))
    model = Choosy()
    model.route = [*range(DEPTH)]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
    with patch.dict(os.environ, {"TERRAZZO_PEER_MEMORY": near}):
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh)
    start = time.monotonic()
    try:
        for step in range(3):
            model.skips = (step, rank) == (1, 1)
            try:
                loss_of(model, batch(step, rank)).backward()
            except ValueError:
                if goes_on:
                    continue
                default_store().wait([f"told by 0 of {group.group_name}", f"told by 2 of {group.group_name}"])
                return "left", "", 0.0
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        default_store().set(f"told by {rank} of {group.group_name}", "")
        return type(error).__name__, str(error), time.monotonic() - start
    return "ended", "", 0.0


SKIPPING_TIMEOUT_S = 4.0


NEAR = pytest.mark.parametrize("near", ["1", "0"], ids=["read memory", "sockets"])


@pytest.mark.processes
@NEAR
def test_a_batch_that_one_rank_skips_in_mid_forward_is_told_of_by_where_each_waits(near: str) -> None:
    """One waits in a gather, the others in a meeting: messages of different kinds, so that time alone ends it."""
    with Pool(3) as pool:
        for _ in range(3):  # on a busy machine a word may come later than the others look for it
            told = pool.run(skipping_a_batch, "zero3", True, near, timeout_s=60.0)
            if all(kind == "RanksApart" for kind, *_ in told):
                break
        for kind, said, seconds in told:
            assert kind == "RanksApart", said
            here = "ranks 0, 2 at the end of forward 2; rank 1 at the weights of the root unit for training forward 3."
            assert here in said and "same number of forwards" in said, said
            assert seconds < 2 * SKIPPING_TIMEOUT_S


@pytest.mark.processes
@NEAR
@pytest.mark.parametrize(
    ("plan", "place"), [("zero3", "the end of forward 2"), ("zero2", "the gradient of unit 'blocks.4' in backward 2")]
)
def test_a_rank_that_does_not_come_at_all_is_told_of_with_where_the_others_wait(
    plan: str, place: str, near: str
) -> None:
    with Pool(3) as pool:
        for _ in range(3):  # as above
            told = pool.run(skipping_a_batch, plan, False, near, timeout_s=60.0)
            if all("ranks 0, 2 at" in said for kind, said, _ in told if kind != "left"):
                break
    assert told.pop(1)[0] == "left"
    for kind, said, seconds in told:
        assert kind == "TimedOut" and "longer timeout" in said, said
        assert f"Waiting: ranks 0, 2 at {place}" in said and said.endswith("of rank 1 nothing is known."), said
        assert seconds < 2 * SKIPPING_TIMEOUT_S


def saving_alone() -> str:
    """What the first rank is told whose state dict the second one does not ask for; run by each process."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model, _ = tz.shard(Routed(), None, "zero3", mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
    if dist.get_rank() == 1:
        default_store().wait(["told"])
        return ""
    with pytest.raises(tz.TimedOut) as told:
        model.state_dict()
    default_store().set("told", "")
    return str(told.value)


@pytest.mark.processes
def test_a_state_dict_that_one_rank_alone_asks_for_is_named_where_time_ends_it() -> None:
    with Pool(2) as pool:
        said, _ = pool.run(saving_alone, timeout_s=60.0)
    assert said.startswith("model.state_dict() is of all ranks: call it on every rank")
    assert said.endswith("Waiting: rank 0 at model.state_dict(); of rank 1 nothing is known.")


# -- the program ------------------------------------------------------------------------------------------------


class _Unit:
    def __init__(self, index: int, name: str) -> None:
        self.index, self.name, self.is_root = index, name, not name


def order_of(visits: list[Visit], names: list[str]) -> Order:
    units: Any = [_Unit(index, name) for index, name in enumerate(names)]
    return Order.of_visits(visits, units, agreed=True)


def test_units_that_were_not_visited_keep_their_place() -> None:
    names = ["", "a", "b", "b.x", "b.y", "c"]
    visits = [
        (0, Event.ENTER),
        (1, Event.ENTER),
        (1, Event.LEAVE),
        (5, Event.ENTER),
        (5, Event.LEAVE),
        (0, Event.LEAVE),
    ]
    order = order_of(visits, names)
    assert order.forward == (0, 1, 2, 3, 4, 5)
    assert order.backward == (0, 5, 2, 4, 3, 1)
    assert order_of([], names).forward == (0, 1, 2, 3, 4, 5)
    inner = order_of(
        [(0, Event.ENTER), (2, Event.ENTER), (4, Event.ENTER), (4, Event.LEAVE), (2, Event.LEAVE), (0, Event.LEAVE)],
        names,
    )
    assert inner.forward == (0, 1, 2, 3, 4, 5)
    assert inner.leaves == ((), (), (1,), (), (3,), (4, 2), (5, 0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Around(nn.Module):
    """Has parameters of its own, which it uses before and behind what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.core = Inner()

    def forward(self, x: Tensor, inner: nn.Module | None = None) -> Tensor:
        x = self.core(x * self.before)
        return (x if inner is None else inner(x)) * self.behind


class Nested(nn.Module):
    """Calls one unit before the other, or inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.a, self.b = Inner(), Around()

    def forward(self, x: Tensor, inside: bool) -> Tensor:
        x = x * self.scale
        return self.b(x, self.a) if inside else self.b(self.a(x))


BETWEEN: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "nothing": lambda model, x: None,
    "an evaluation": lambda model, x: torch.no_grad()(model)(x, inside=False),
    "an evaluation alike": lambda model, x: torch.no_grad()(model)(x, inside=True),
    "a forward that is thrown away": lambda model, x: model(x, inside=False),
    "two of them": lambda model, x: [model(x, inside=False), model(x, inside=True)],
}


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("plan", ["zero3", "shard_grad_op"])
def test_what_runs_between_a_forward_and_its_backward_changes_nothing(what: str, plan: str) -> None:
    """Weights that a backward still needs stay, whichever forward was the last one."""
    torch.manual_seed(0)
    base, x = Nested(), torch.randn(4, 8)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            out = model(x, inside=step > 0)
            BETWEEN[what](model, x)
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = tz.shard(model, optimizer, plan, units=["a", "b", "b.core"])
        trained(model, optimizer)
        return full_parameters(model)

    plain = copy.deepcopy(base)
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    for found in on_ranks(2, body):
        assert_close(found, dict(plain.named_parameters()), 1e-5)
