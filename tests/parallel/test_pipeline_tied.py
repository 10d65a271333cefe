"""What several stages of a pipeline share: copies that stay equal, and count once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of, whole_weights
from terrazzo.train.model.decoder import Block
from tests.helpers.threads import run_in_threads
from tests.parallel.test_pipeline import (
    STEPS,
    Case,
    loss_of,
    masters,
    micro_batch,
    model_of,
    own_parts,
    reference,
    train,
    whole,
)

TIED = Case(tied=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("zero0", tied=True), marks=pytest.mark.long),
        Case("zero1", pp=4, micro_batches=6, tied=True),
        pytest.param(Case("zero2", schedule="gpipe", tied=True), marks=pytest.mark.long),
        Case("zero3", chunks=2, tied=True),
        pytest.param(Case("shard_grad_op", micro_batches=5, tied=True, checkpointing="full"), marks=pytest.mark.long),
        pytest.param(Case("hybrid_shard", ranks=8, tied=True), marks=pytest.mark.long),
        pytest.param(Case("zero3@cpu-all", tied=True), marks=pytest.mark.long),
        Case("zero3", schedule="zero_bubble", tied=True),
        pytest.param(Case("zero2@nvme", tied=True), marks=pytest.mark.long),
        pytest.param(Case("zero3", frozen=("embedding",), tied=True), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_tied_head_trains_as_in_one_process(case: Case, tmp_path) -> None:
    """The head's share of a gradient is added behind all of the embedding's: bits differ, and nothing else."""
    whole(case.config)
    ranks = run_in_threads(case.ranks, functools.partial(train, case, str(tmp_path)))
    expected, evaluated = reference(case)
    for step, (losses, grads, norm, weights) in enumerate(expected):
        assert set().union(*(trace[step][1] for trace, *_ in ranks)) == set(weights)
        for rank, (trace, *_) in enumerate(ranks):
            loss, own_grads, own_norm, own_weights = trace[step]
            assert loss == pytest.approx(losses[rank % case.data_ranks], rel=1e-6)
            assert own_norm == pytest.approx(norm, rel=1e-6)
            for own, wholes in ((own_grads, grads), (own_weights, weights)):
                for name, (start, values) in own.items():
                    there = wholes[name].flatten()[start : start + len(values)]
                    torch.testing.assert_close(values, there, rtol=1e-5, atol=1e-6)
        first, last = (ranks[stage * case.data_ranks][0][step][3] for stage in (0, case.pp - 1))
        if "embedding.weight" in weights:
            assert torch.equal(first["embedding.weight"][1], last["embedding.weight"][1])
    for rank, (_, found, _) in enumerate(ranks):
        assert found == pytest.approx(evaluated[rank % case.data_ranks], rel=1e-6)


class Chain(nn.Sequential):
    """Three modules of a line have one weight, one of them on the same rank as another."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(6, 6) for _ in range(8)))
        self[3].weight = self[7].weight = self[0].weight


def chain() -> Chain:
    generator = torch.Generator().manual_seed(3)
    model = Chain()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 3)
    return model


def rows(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


@pytest.mark.parametrize("pipeline", [tz.Pipeline(chunks=2), tz.Pipeline("zero_bubble")], ids=str)
def test_a_weight_of_several_modules_of_the_line(pipeline: tz.Pipeline) -> None:
    def body(rank: int):
        model, mesh = chain(), tz.mesh(pp=2, device="cpu")
        tz.parallelize(model, mesh, pipeline=pipeline)
        adamw = functools.partial(torch.optim.AdamW, lr=0.05)
        model, optimizer = tz.shard(model, adamw, "zero1", mesh=mesh, units=["*"])
        for step in range(STEPS):
            tz.step(model, [rows(10 * step + micro) for micro in range(4)], squares)
            norm = tz.clip_grad_norm_(model, 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
        return norm, own_parts(model, masters)

    expected = chain()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.05)
    for step in range(STEPS):
        for micro in range(4):
            inputs, targets = rows(10 * step + micro)
            squares(expected(inputs), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
    names = dict(expected.named_parameters())
    ranks = run_in_threads(2, body)
    for own_norm, parts in ranks:
        assert own_norm == pytest.approx(norm, rel=1e-5)
        for name, (start, values) in parts.items():
            torch.testing.assert_close(
                values, names[name].detach().flatten()[start : start + len(values)], rtol=1e-4, atol=1e-5
            )
    assert "0.weight" in ranks[0][1]
    assert torch.equal(ranks[0][1]["0.weight"][1], ranks[1][1]["0.weight"][1])


class Scaled(nn.Linear):
    """Multiplies what comes out by a weight that other modules may have too, where the step says so."""

    def __init__(self) -> None:
        super().__init__(6, 6, bias=False)
        self.scale, self.used = nn.Parameter(torch.linspace(0.5, 1.5, 6)), False

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * self.scale if self.used else super().forward(values)


def scaled_line() -> nn.Sequential:
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    with torch.no_grad():
        for each in model:
            each.weight.copy_(torch.randn(6, 6, generator=generator) / 2)
    model[3].scale = model[0].scale
    return model


def use(model: nn.Module, step: int, data_rank: int) -> None:
    """All modules use theirs, then none, then the last one alone, and on the second data rank alone."""
    for place, module in model.named_children():
        module.used = step == 0 or (step == 2 and place == "3" and data_rank == 1)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3@cpu"])
def test_one_that_no_stage_has_used_is_left_alone(plan: str) -> None:
    """As of a parameter whose gradient is None: neither weight decay nor momentum moves it."""
    adamw = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.3)

    def body(rank: int):
        model, mesh = scaled_line(), tz.mesh(pp=2, device="cpu")
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        model, optimizer = tz.shard(model, adamw, plan, mesh=mesh, units=[Scaled])
        trace = []
        for step in range(4):
            use(model, step, rank % 2)
            batches = [rows(10 * step + 2 * (rank % 2) + micro) for micro in range(2)]
            tz.step(model, batches, squares, denominator=2.0)
            absent = {name for name, each in model.named_parameters() if each.grad is None}
            optimizer.step()
            optimizer.zero_grad()
            engine_of(model).settle()
            trace.append((absent, own_parts(model, masters)))
        return trace

    ranks, model = run_in_threads(4, body), scaled_line()
    optimizer, names = adamw(model.parameters()), dict(model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        for data_rank in range(2):
            use(model, step, data_rank)
            for micro in range(2):
                inputs, targets = rows(10 * step + 2 * data_rank + micro)
                (squares(model(inputs), targets) / 2).backward()
        expected = {name for name, each in names.items() if each.grad is None}
        optimizer.step()
        for rank, trace in enumerate(ranks):
            absent, parts = trace[step]
            assert absent == expected - ({"2.scale"} if rank < 2 else {"1.scale"})
            for name, (start, values) in parts.items():
                there = names[name].detach().flatten()[start : start + len(values)]
                torch.testing.assert_close(values, there, rtol=1e-4, atol=1e-5)
                assert name not in expected or step == 0 or torch.equal(values, trace[step - 1][1][name][1])


def sharded(rank: int, plan: str = "zero2"):
    model, mesh = model_of(TIED), tz.mesh(pp=2, device="cpu")
    tz.parallelize(model, mesh, pipeline=tz.Pipeline())
    return tz.shard(model, functools.partial(torch.optim.AdamW, lr=0.01), plan, mesh=mesh, units=[Block])


def one_step(model, optimizer, step: int, data_rank: int) -> float:
    loss = tz.step(model, [micro_batch(step, data_rank, micro) for micro in range(4)], loss_of, denominator=10.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_checkpoint_holds_it_once_and_goes_on_from_other_meshes(tmp_path) -> None:
    """From two stages to whole models, and to two stages again under another plan."""

    def first(rank: int) -> list[str]:
        model, optimizer = sharded(rank)
        one_step(model, optimizer, 0, rank % 2)
        tz.checkpoint.save(tmp_path / "one", model, optimizer)
        return [name for name, _ in whole_weights(model)]

    def staged(rank: int):
        model, optimizer = sharded(rank, "zero3")
        tz.checkpoint.load(tmp_path / "one", model, optimizer)
        loss = one_step(model, optimizer, 1, rank % 2)
        return loss, own_parts(model, masters)

    def alone(rank: int):
        model, optimizer = tz.shard(model_of(TIED), functools.partial(torch.optim.AdamW, lr=0.01), "zero3")
        tz.checkpoint.load(tmp_path / "one", model, optimizer)
        before = {name: values.clone() for name, values in whole_weights(model)}
        return one_step(model, optimizer, 1, rank), before

    whole(TIED.config)
    names = run_in_threads(4, first)
    assert names[0].count("embedding.weight") == 1
    stages, single = run_in_threads(4, staged), run_in_threads(2, alone)
    for rank, (loss, parts) in enumerate(stages):
        assert loss == pytest.approx(single[rank % 2][0], rel=1e-6)
        assert "embedding.weight" in parts
    assert torch.equal(stages[0][1]["embedding.weight"][1], stages[2][1]["embedding.weight"][1])
    assert not torch.equal(single[0][1]["embedding.weight"], whole(TIED.config).embedding.weight)


def test_what_is_written_into_it() -> None:
    def first(rank: int) -> Tensor:
        model, _ = sharded(rank)
        with tz.gathered(model, write="first rank") as parameters, torch.no_grad():
            if rank == 0:
                parameters["embedding.weight"].fill_(0.5)
        return own_parts(model, masters)["embedding.weight"][1]

    def apart(rank: int) -> None:
        model, _ = sharded(rank)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            parameters["embedding.weight"].fill_(0.25 if rank < 2 else 0.75)

    whole(TIED.config)
    assert all((values == 0.5).all() for values in run_in_threads(4, first))
    with pytest.raises(tz.RanksApart, match="have not written the same"):
        run_in_threads(4, apart)


def test_the_bill_of_what_stages_share() -> None:
    def body(rank: int):
        model, optimizer = sharded(rank, "zero3")
        engine = engine_of(model)
        for step in range(2):
            one_step(model, optimizer, step, rank % 2)
        return engine.promise.memory(4).transient_bytes, engine.peak_transient_bytes

    whole(TIED.config)
    for promised, measured in run_in_threads(4, body):
        assert promised == measured
