"""Rows that go to the ranks that have their experts, and come back: against one process, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.parallel import Experts
from tests.helpers.threads import run_in_threads

COUNT, WIDTH, HIDDEN = 8, 16, 16  # rows of 64 bytes: what MKL rounds depends on where operands begin


class Stack(nn.Module):
    """Experts of one matrix each, `[experts, out, in]`, that compute rows one group after the other."""

    experts: Experts | None = None

    def __init__(self, seed: int) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(seed)  # ranks are threads, which share torch's
        self.matrix = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH, generator=own))

    def stacked(self) -> tuple[str, ...]:
        return ("matrix",)

    def use_experts(self, experts: Experts) -> None:
        self.experts = experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert self.experts is not None
        arrived, route = self.experts.dispatch(rows, counts)
        parts = zip(arrived.split(route.counts.tolist()), self.matrix.unbind(), strict=True)
        back: Tensor = self.experts.combine(torch.cat([F.linear(own, each) for own, each in parts]), route)
        return back


class Several(nn.Module):
    """`stacks` of experts, each computed by a method of its own."""

    def __init__(self, stacks: int = 1) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(Stack(seed) for seed in range(stacks))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.scale * self.stacks[0](rows, counts)


ROUTES = {
    "even": lambda rank, ranks: [3] * COUNT,
    "uneven": lambda rank, ranks: [(5 * each + 3 * rank) % 4 for each in range(COUNT)],
    "all to one expert": lambda rank, ranks: [0] * (COUNT - 1) + [7 + rank],
    "a rank without rows": lambda rank, ranks: [0] * COUNT if rank == ranks - 1 else [1 + rank] * COUNT,
    "nobody has rows": lambda rank, ranks: [0] * COUNT,
}


def rows_of(route: str, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(ROUTES[route](rank, ranks))
    return torch.randn(int(counts.sum()), WIDTH, generator=torch.Generator().manual_seed(rank)), counts


def grouped(route: str, ranks: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What plain PyTorch gives where each expert computes the rows of all ranks at once, those of one behind another's.

    Outputs and gradients of the inputs by rank, and of the matrix, of the sum of squares of all outputs.
    """
    matrix = Several().stacks[0].matrix.detach().requires_grad_()  # type: ignore[union-attr, operator]
    given = [rows_of(route, rank, ranks) for rank in range(ranks)]
    inputs = [rows.requires_grad_() for rows, _ in given]
    parts = [rows.split(counts.tolist()) for rows, (_, counts) in zip(inputs, given, strict=True)]
    outputs: list[list[Tensor]] = [[] for _ in range(ranks)]
    for expert, own in enumerate(matrix.unbind()):
        together = F.linear(torch.cat([part[expert] for part in parts]), own)
        for rank, piece in enumerate(together.split([len(part[expert]) for part in parts])):
            outputs[rank].append(piece)
    found = [torch.cat(each) for each in outputs]
    torch.stack([each.square().sum() for each in found]).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs]
    assert matrix.grad is not None
    return [each.detach() for each in found], gradients, matrix.grad


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("route", ROUTES)
def test_experts_compute_the_rows_of_all_ranks_to_the_bit(route: str, ranks: int) -> None:
    def body(rank: int) -> tuple[Tensor, Tensor, Tensor, int]:
        model = tz.parallelize(Several(), tz.mesh(ep=ranks))
        rows, counts = rows_of(route, rank, ranks)
        out = model.stacks[0](rows.requires_grad_(), counts)
        out.square().sum().backward()
        matrix: Any = model.stacks[0].matrix
        assert rows.grad is not None
        traffic = model.stacks[0].experts.ranks.traffic  # type: ignore[union-attr]
        return out.detach(), rows.grad, matrix.grad, traffic.bytes["all_to_all"]

    found = run_in_threads(ranks, body)
    outputs, gradients, matrix = grouped(route, ranks)
    for rank, (out, grad, own, sent) in enumerate(found):
        assert torch.equal(out, outputs[rank])
        assert torch.equal(grad, gradients[rank])
        assert torch.equal(own, matrix.chunk(ranks)[rank])
        table = torch.tensor([ROUTES[route](each, ranks) for each in range(ranks)]).view(ranks, ranks, -1).sum(-1)
        away = int(table[rank].sum() - table[rank, rank])
        arrived = int(table[:, rank].sum() - table[rank, rank])
        assert sent == 4 * (WIDTH + HIDDEN) * (away + arrived)


def trained(rank: int, calls: Any, plan: str = "zero3", **options: Any) -> None:
    """One step of two stacks as units, which `calls(model, rank)` runs in its own way."""
    mesh = tz.mesh(ep=2)
    model = Several(2)
    model.forward = lambda: calls(model, rank)  # type: ignore[assignment]
    tz.parallelize(model, mesh)
    units: Any = options.get("units", [Stack])
    model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, units=units, mesh=mesh)
    model().backward()  # type: ignore[operator]
    optimizer.step()


def one(model: Several, stack: int, rank: int) -> Tensor:
    rows, counts = rows_of("even", rank, 2)
    return model.scale * model.stacks[stack](rows, counts).sum()


def none(model: Several, stack: int) -> Tensor:
    rows = torch.zeros(0, WIDTH)
    return model.scale * model.stacks[stack](rows, torch.zeros(COUNT, dtype=torch.int64)).sum()


WAYS: dict[str, Any] = {
    "one call against three": lambda model, rank: sum(one(model, 0, rank) for _ in range(3 if rank else 1)),
    "one skips a module": lambda model, rank: sum(one(model, each, rank) for each in range(2 - rank)),
    "in another order": lambda model, rank: sum(one(model, each, rank) for each in ((0, 1) if rank else (1, 0))),
    "one calls none": lambda model, rank: model.scale * 1 if rank else one(model, 0, rank) + one(model, 1, rank),
    "one forgets what came of it": lambda model, rank: (
        one(model, 0, rank) + one(model, 1, rank) * rank if rank else one(model, 0, rank) + one(model, 1, rank).detach()
    ),
}


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_call_experts_otherwise_hear_it(way: str, plan: str) -> None:
    with pytest.raises(tz.RanksApart, match=r"have not run the same: rank.*shares experts.*calls that with no rows"):
        run_in_threads(2, lambda rank: trained(rank, WAYS[way], plan), timeout_s=20)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_a_rank_that_needs_a_module_less_often_calls_it_with_no_rows(plan: str) -> None:
    def calls(model: Several, rank: int) -> Any:
        more = [one(model, 0, rank) if rank else none(model, 0) for _ in range(2)]
        return one(model, 0, rank) + sum(more) + (none(model, 1) if rank else one(model, 1, rank))

    run_in_threads(2, lambda rank: trained(rank, calls, plan), timeout_s=20)


def test_experts_that_nobody_calls_for_a_while() -> None:
    """They get no gradient, as in one process, and the ranks do not wait for each other."""

    def body(rank: int) -> list[Tensor]:
        mesh, model = tz.mesh(ep=2), Several(2)
        start = model.stacks[1].matrix.detach().clone()  # type: ignore[union-attr, operator]
        model.forward = lambda: one(model, 0, rank)  # type: ignore[assignment, method-assign]
        tz.parallelize(model, mesh)
        model, optimizer = tz.shard(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), "zero3", units=[Stack], mesh=mesh
        )
        for _ in range(3):
            model().backward()  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        full = tz.full_state_dict(model)
        return [start, full["stacks.1.matrix"]] if rank == 0 else []

    start, end = run_in_threads(2, body)[0]
    assert torch.equal(start, end)


def refused(match: str, body: Any, ranks: int = 2) -> None:
    with pytest.raises((tz.BadInput, tz.Misuse), match=match):
        run_in_threads(ranks, body)


def test_ep_divides_the_experts_and_the_ranks() -> None:
    refused(r"'stacks.0.matrix' has 8 experts, of which 3 ranks", lambda _: tz.parallelize(Several(), tz.mesh(ep=3)), 3)
    refused(r"ep 3, which does not divide the 4 ranks", lambda _: tz.mesh(ep=3), 4)
    refused(r"ep 4, which does not divide the 2 ranks", lambda _: tz.mesh(ep=4, dp_replicate=2), 4)


def test_a_model_without_experts_is_refused() -> None:
    refused(r"ep 2, and Linear has no module of experts", lambda _: tz.parallelize(nn.Linear(2, 2), tz.mesh(ep=2)))
    refused(r"ep 2, .* has cut none", lambda _: tz.shard(nn.Linear(2, 2), None, "zero3", mesh=tz.mesh(ep=2)))


def test_a_model_is_sharded_on_the_mesh_that_its_experts_are_shared_on() -> None:
    def other_mesh(_: int) -> None:
        tz.shard(tz.parallelize(Several(), tz.mesh(ep=2)), None, "zero3", mesh=tz.mesh())

    def twice(_: int) -> None:
        tz.parallelize(tz.parallelize(Several(), tz.mesh(ep=2)), tz.mesh(ep=2))

    refused(r"The model was cut by tz.parallelize", other_mesh)
    refused(r"shared by ranks along ep already", twice)


def test_experts_among_ranks_that_have_the_same_tokens_are_refused() -> None:
    plan = {"stacks.0": "replicate"}
    refused(
        r"same tokens for the experts of .*stacks.0",
        lambda _: tz.parallelize(Several(), tz.mesh(ep=2, tp=2), tensor=plan),
    )


def test_weights_that_differ_between_ranks_take_the_first_ones_values() -> None:
    def body(rank: int) -> Tensor:
        model, mesh = Several(), tz.mesh(ep=2)
        with torch.no_grad():
            model.stacks[0].matrix.fill_(rank)  # type: ignore[union-attr, operator]
        model, _ = tz.shard(tz.parallelize(model, mesh), None, "zero3", units=[Stack], mesh=mesh)
        full = tz.full_state_dict(model)
        return full["stacks.0.matrix"] if rank == 0 else torch.zeros(())

    assert not run_in_threads(4, body)[0].any()


def test_the_mesh_names_ranks_that_share_experts() -> None:
    from terrazzo.engine.mesh.meshes import expert_mesh

    def body(_: int) -> list[list[int]]:
        mesh = tz.mesh(dp_replicate=2, tp=2, ep=2)
        assert mesh is tz.mesh(dp_replicate=2, tp=2, ep=2)
        along = expert_mesh(mesh)
        assert along is not None
        return [dist.get_process_group_ranks(along.get_group(axis)) for axis in ("edp", "ep")]

    found = run_in_threads(8, body)
    assert found[0] == [[0, 2], [0, 1]]
    assert found[7] == [[5, 7], [6, 7]]
