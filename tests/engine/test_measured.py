"""Measures of parameters at rest, against those of the same parameters in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.interception.measuring.measures import ELEMENTWISE, can_be_measured
from tests.engine.toys import EVERY_PLAN, Net, batch, loss_of, on_ranks, sharded, train
from tests.helpers.cover import mostly_long, places
from tests.helpers.fake import fake_group

MEASURES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "torch.sum in fp64": lambda p: torch.sum(p, dtype=torch.float64),
    "mean": lambda p: p.mean(),
    "std": lambda p: p.std(),
    "biased std": lambda p: p.std(unbiased=False),
    "biased std by place": lambda p: torch.std(p, False),
    "var": lambda p: p.detach().var(correction=2),
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: p.data.norm(1),
    "norm 3": lambda p: torch.norm(p, 3.0),
    "norm inf": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "norm -inf": lambda p: torch.linalg.vector_norm(p, ord=-float("inf")),
    "norm 0": lambda p: torch.linalg.vector_norm(p, 0),
    "norm of all elements": lambda p: torch.linalg.norm(p),
    "fp32 norm": lambda p: p.detach().float().norm(),
    "squares": lambda p: p.pow(2).sum() + (p**2).mean() + p.square().sum(),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "largest": lambda p: p.abs().max(),
    "amax": lambda p: torch.amax(abs(p)),
    "amin": lambda p: p.amin(),
    "is nan": lambda p: p.isnan().any(),
    "is finite": lambda p: torch.isfinite(p).all(),
    "positive": lambda p: (p > 0).sum(),
    "share of positive": lambda p: (p >= 0.1).float().mean(),
    "zeros": lambda p: (p == 0).sum(),
    "not zero": lambda p: p.count_nonzero(),
    "histogram": lambda p: p.histc(7),
    "histogram within": lambda p: torch.histc(p.detach(), bins=5, min=-0.2, max=0.2),
    "histogram with borders in one place": lambda p: p.histc(3, 0.5, 0.5),
    "highest count": lambda p: (p > 0).float().max(),
}


NAN = "blocks.1.down.weight"


def measures(model: nn.Module) -> dict[str, Tensor]:
    named = [(n, p) for n, p in model.named_parameters() if n in ("embed.weight", "blocks.0.up.bias", "head.bias", NAN)]
    pairs = [(n, p, what) for n, p in named for what in MEASURES]
    wanted = [each for each in pairs if each[0] != NAN or "histogram" not in each[2]]  # torch has none of those
    return {f"{what} of {n}": MEASURES[what](p).detach() for n, p, what in wanted}


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", [*EVERY_PLAN, "zero3@cpu", "zero3@cpu-all", "zero3@nvme-all", "zero2@cpu"])
def test_they_are_those_of_plain_torch(plan: str, tmp_path: Path) -> None:
    base = Net()
    nn.init.constant_(base.blocks[0].up.bias, 0.0)
    base.get_parameter(NAN).data[3, 4] = float("nan")
    wanted = measures(base)
    options = {"offload": tz.Offload(path=tmp_path, direct=False)} if "nvme" in plan else {}
    ranks = 4 if plan in EVERY_PLAN else 2

    def body(rank: int) -> tuple[dict[str, Tensor], bool]:
        model, _ = sharded(base, plan, ranks, **options)
        gathered = engine_of(model).traffic.bytes["all_gather"]
        return measures(model), gathered == engine_of(model).traffic.bytes["all_gather"]

    for found, nothing_gathered in on_ranks(ranks, body):
        assert nothing_gathered and found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            torch.testing.assert_close(found[name], value.detach(), equal_nan=True, rtol=2e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("plan", mostly_long(["zero3", "zero3@cpu", "zero3@cpu-all", "hpz"], "zero3", "zero3@cpu-all"))
def test_after_a_step_they_are_of_the_new_weights(plan: str) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), plan, 4 if plan == "hpz" else 2, precision="bf16")
        train(model, optimizer, 2, rank)
        found = measures(model)
        with tz.gathered(model):
            wanted = measures(model)
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            if "histogram" in name:  # which has its borders in bf16 there
                assert found[name].float().sum() == pytest.approx(value.float().sum(), rel=0.1)
                continue
            torch.testing.assert_close(found[name], value, rtol=2e-2, atol=1e-3, msg=name)
            if "max" in name or "largest" in name or "positive" in name:
                assert torch.equal(found[name], value), name

    on_ranks(4 if plan == "hpz" else 2, body)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "hpz", "zero3@cpu"])
def test_those_of_gradients_are_those_of_plain_torch(plan: str, nan: bool) -> None:
    """Of the mean over ranks, one of which may have got what is not finite."""
    base, ranks, names = Net(), 4 if plan == "hpz" else 2, ("blocks.0.up.bias", "head.weight")
    alone = copy.deepcopy(base)
    losses = [loss_of(alone, batch(0, rank)) * (float("nan") if nan and rank == 1 else 1) for rank in range(ranks)]
    torch.stack(losses).mean().backward()

    def found(model: Any) -> dict[str, Any]:
        gradients = {name: model.get_parameter(name).grad for name in names}
        asked = [what for what in MEASURES if not (nan and "histogram" in what)]
        return {f"{what} of {name}": MEASURES[what](grad) for name, grad in gradients.items() for what in asked}

    wanted = found(alone)

    def body(rank: int) -> dict[str, Any]:
        model, _ = sharded(base, plan, ranks)
        (loss_of(model, batch(0, rank)) * (float("nan") if nan and rank == 1 else 1)).backward()
        return found(model)

    for measured in on_ranks(ranks, body):
        for name, value in wanted.items():
            assert measured[name].dtype == value.dtype, name
            torch.testing.assert_close(measured[name], value, equal_nan=True, rtol=1e-5, atol=1e-7, msg=name)


def test_those_of_gradients_are_refused_while_they_are_accumulated_or_gone() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
        grad: Any = model.head.bias.grad
        assert grad.shape == (17,) and "sharded" in repr(grad)
        with pytest.raises(tz.Misuse, match="still being accumulated"):
            grad.isnan()
        loss_of(model, batch(1, rank)).backward()
        with pytest.raises(tz.Misuse, match=r"'head\.bias\.grad'.*parameter\.register_hook"):
            grad.abs()[0]
        with pytest.raises(tz.Misuse, match=r"norm\(dim=0\) of 'head\.bias\.grad'.*parameter\.register_hook"):
            grad.norm(dim=0)
        optimizer.zero_grad()
        with pytest.raises(tz.Misuse, match=r"'head\.bias\.grad' was measured after"):
            grad.isnan()

    on_ranks(2, body)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sum(dim=0": lambda p: p.sum(dim=0),
    "max(dim=1": lambda p: p.max(1),
    "norm(dim=0, keepdim=True": lambda p: p.norm(dim=0, keepdim=True),
    "sum(dim=0)": lambda p: p.sum(axis=0),
    "std(dim=0)": lambda p: p.std(axis=0),
    "var(dim=0, keepdim=True)": lambda p: p.var(axis=0, keepdims=True),
    "norm(dim=1)": lambda p: torch.linalg.vector_norm(p, axis=1),
    "mean(dtype=torch.int64)": lambda p: p.mean(dtype=torch.int64),
    "norm(dtype=torch.int64)": lambda p: p.norm(dtype=torch.int64),
    "item": lambda p: p.detach().item(),
    "torch.linalg.norm(ord=2": lambda p: torch.linalg.norm(p, 2),
    "torch.linalg.norm(ord=inf": lambda p: torch.linalg.norm(p, ord=float("inf")),
    "sum was called": lambda p: torch.sum(input=p),
    "median": lambda p: p.abs().median(),
    "mul_": lambda p: p.data.mul_(2),
    "copy_": lambda p: p.detach().copy_(torch.ones(27, 13)),
    "cpu": lambda p: p.detach().cpu(),
    "gt": lambda p: p > torch.ones(27, 13),
    "add": lambda p: p.abs() + 1,
}


@pytest.mark.parametrize("words", REFUSED)
def test_anything_else_names_the_parameter_and_the_edit(words: str) -> None:
    with fake_group(4):
        model, _ = tz.shard(Net(), None, "zero3")
        with pytest.raises(tz.Misuse, match=r"blocks\.1\.up\.weight.*'with tz\.gathered\(model\):'") as caught:
            REFUSED[words](model.blocks[1].up.weight)
        assert words in str(caught.value)


def test_what_can_be_measured_are_functions() -> None:
    """`torch.float` and `torch.double` are dtypes."""
    assert all(map(callable, ELEMENTWISE))
    assert not can_be_measured(torch.float32)


def test_what_is_called_on_something_else_is_no_measure() -> None:
    """Such as a power of two whose exponent is a parameter of no dimensions."""
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_parameter("scale", nn.Parameter(torch.tensor(3.0)))
    with fake_group(4):
        tz.shard(model, None, "zero3")
        with pytest.raises(tz.Misuse, match="pow was called on 'scale'"):
            torch.pow(2.0, model.scale)


def test_who_writes_is_told_how() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with fake_group(4):
        tz.shard(model, None, "zero3")
        for write in (model[0].weight.zero_, model[0].weight.data.zero_):
            with pytest.raises(tz.Misuse, match=r"zero_ was called on '0.weight'.*with write=True to change"):
                write()


MIXED: dict[str, Callable[[list[Any], int], Any]] = {
    "another order": lambda parameters, rank: [p.norm() for p in (parameters if rank else parameters[::-1])],
    "another measure": lambda parameters, rank: parameters[0].max() if rank else parameters[0].min(),
    "another question": lambda parameters, rank: (parameters[0].isnan() if rank else parameters[0].isinf()).any(),
    "another exponent": lambda parameters, rank: parameters[0].pow(torch.tensor(2.0 + rank)).sum(),
    "another order of a norm": lambda parameters, rank: parameters[0].norm(p=1 + rank),
    "another limit": lambda parameters, rank: (parameters[0] > 0.1 * rank).sum(),
}


@pytest.mark.parametrize(("what", "plan"), [*((what, "zero3") for what in MIXED), ("another order", "hybrid_shard")])
def test_ranks_that_measure_other_things_are_refused_on_each(what: str, plan: str) -> None:
    """Under `hybrid_shard` also in the replica whose ranks agree."""

    def body(rank: int) -> str:
        model, _ = sharded(Net(), plan, 4)
        with pytest.raises(
            tz.RanksApart, match=r"ranks?( \d,?)+ at [a-z0-9.]+(weight|bias)\.[a-z]+\(.*in the same order"
        ):
            MIXED[what](list(model.parameters()), int(rank == 0))
        with pytest.raises(tz.RanksApart) as again:
            model.embed.weight.norm()
        return str(again.value)

    assert len({*on_ranks(4, body)}) == 1, "there is nothing to go on by"


def test_ranks_that_measure_other_gradients_are_refused_in_each_replica() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "hybrid_shard", 4)
        loss_of(model, batch(0, rank)).backward()
        gradients: Any = [model.embed.weight.grad, model.head.bias.grad]
        with pytest.raises(tz.RanksApart, match=r"rank 0 at head\.bias\.grad\.sum\(\); ranks 1, 2, 3 at embed\."):
            gradients[int(rank == 0)].sum()

    on_ranks(4, body)


def test_what_is_no_number_is_compared_by_identity() -> None:
    """As loops do that ask `if p.grad == None`."""

    def body(rank: int) -> None:
        model, _ = sharded(Net())
        loss_of(model, batch(0, rank)).backward()
        weight: Any = model.blocks[0].up.weight
        for each in (weight, weight.grad, weight.abs()):
            assert (each == None) is False  # noqa: E711 (what users write)
            assert (each != None) is True  # noqa: E711
            assert each not in (None, "weight")
            with pytest.raises(TypeError):
                _ = each < None

    on_ranks(2, body)


def test_a_norm_of_a_gradient_in_fp64_is_one() -> None:
    """Of the same batch on both ranks, whose mean is exact."""
    base = Net()
    alone = copy.deepcopy(base)
    loss_of(alone, batch()).backward()

    def body(rank: int) -> list[Tensor]:
        model, _ = sharded(base)
        loss_of(model, batch()).backward()
        named: Any = dict(model.named_parameters())
        return [named[name].grad.norm(dtype=torch.float64) for name in sorted(named)]

    named: Any = dict(alone.named_parameters())
    wanted = [named[name].grad.double().norm() for name in sorted(named)]
    for found in on_ranks(2, body):
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-14, atol=0.0)


def test_a_sum_in_whole_numbers_casts_each_element_as_torch_does() -> None:
    base = Net()
    nn.init.constant_(base.embed.weight, 1.5)

    def body(rank: int) -> int:
        model, _ = sharded(base)
        return int(model.embed.weight.detach().sum(dtype=torch.int64))

    wanted = int(base.embed.weight.detach().sum(dtype=torch.int64))
    assert on_ranks(2, body) == [wanted] * 2 == [base.embed.weight.numel()] * 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_a_sum_in_narrow_whole_numbers_has_their_dtype_and_wraps_as_torch_does(dtype: torch.dtype) -> None:
    base = Net()
    nn.init.constant_(base.embed.weight, 251.0 if dtype is torch.uint8 else 32_003.0)
    wanted = base.embed.weight.detach().sum(dtype=dtype)

    def body(rank: int) -> Tensor:
        model, _ = sharded(base)
        return model.embed.weight.detach().sum(dtype=dtype)  # type: ignore[no-any-return]

    for found in on_ranks(2, body):
        assert found.dtype is dtype and torch.equal(found, wanted)
