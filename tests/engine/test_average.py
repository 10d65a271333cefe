"""Moving averages of sharded weights against torch's `AveragedModel` of a plain one that is given the same weights."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import terrazzo as tz
from terrazzo.engine import ModelState, engine_of
from terrazzo.engine.states.restore import FullStates
from tests.engine.toys import (
    EVERY_PLAN,
    Net,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    on_ranks,
    sharded,
    train,
)
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

DECAY = 0.9
TIERS = ("zero3@cpu", "zero1@cpu", "zero3@cpu-all", "zero3@nvme-all", "zero3@nvme:0.5")


def options_for(plan: str, folder: Path) -> dict[str, Any]:
    return {"offload": tz.Offload(path=folder, direct=False)} if "nvme" in plan else {}


def states(model: Any) -> dict[str, Tensor]:
    return tz.full_state_dict(model, keep=True)


@pytest.mark.parametrize(("plan", "host"), [("zero0", False), ("zero2", False), ("zero3", False), ("zero3@cpu", True)])
def test_the_bill_has_it(plan: str, host: bool) -> None:
    def body(rank: int) -> None:
        base = Net()
        base.blocks[1].up.requires_grad_(False)
        model, optimizer = sharded(base, plan)
        engine = engine_of(model)
        before = engine.bill
        tz.EMA(model, DECAY)
        train(model, optimizer, 1, rank)
        bill = engine.bill
        kept = 4 * sum(average.data.numel() for average in engine.averages.values())
        assert kept > 0
        assert (bill.average_bytes, bill.host_bytes - before.host_bytes) == ((0, kept) if host else (kept, 0))
        assert bill.total_bytes == before.total_bytes + bill.average_bytes
        states = bill.weight_bytes + bill.master_bytes + bill.moments_bytes + bill.average_bytes
        assert engine.state_bytes() == states

    on_ranks(2, body)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        *(("zero0", "bf16"), ("zero1", "fp32"), ("zero2", "bf16"), ("zero3", "fp32"), ("zero3", "bf16")),
        *(("hybrid_shard", "bf16"), ("hfsdp", "bf16"), ("hpz", "fp32")),
        *((plan, "bf16" if plan == "zero1@cpu" else "fp32") for plan in TIERS),
    ],
)
def test_each_bit_is_that_of_torch(plan: str, precision: str, tmp_path: Path) -> None:
    base = Net()
    base.blocks[1].up.requires_grad_(False)
    ranks = 4 if plan in EVERY_PLAN else 2

    def body(rank: int) -> None:
        model, optimizer = sharded(base, plan, ranks, precision=precision, **options_for(plan, tmp_path))
        plain = copy.deepcopy(base)
        plain.load_state_dict(states(model))
        wanted = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        wanted.update_parameters(plain)
        ema = tz.EMA(model, DECAY)
        for step in range(3):
            train(model, optimizer, 1, rank, step)
            ema.update()
            plain.load_state_dict(states(model))
            wanted.update_parameters(plain)
        before = states(model)
        with ema.swapped():
            assert_equal(states(model), wanted.module.state_dict())
            if precision == "fp32":
                with torch.no_grad():
                    assert torch.allclose(loss_of(model, batch(7)), loss_of(wanted.module, batch(7)), rtol=1e-5)
            found = full_parameters(model)
            assert torch.equal(found["head.bias"], wanted.module.head.bias.to(found["head.bias"].dtype))
        assert_equal(states(model), before)
        train(model, optimizer, 1, rank, 3)

    on_ranks(ranks, body)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_written_into_weights_is_averaged(precision: str) -> None:
    with fake_group(1):
        model, optimizer = sharded(Net(), "zero2", 1, precision=precision)
        train(model, optimizer, 1, 0)
        with torch.no_grad():
            model.head.bias.fill_(7)
        ema = tz.EMA(model, 0.5)
        with torch.no_grad():
            model.head.bias.fill_(9)
        ema.update()
        with ema.swapped():
            assert states(model)["head.bias"].eq(8).all()
        assert states(model)["head.bias"].eq(9).all()


def write_on_one(model: Any, rank: int) -> None:
    if rank == 1:
        model.head.bias.detach().fill_(5)


WRITES: dict[str, Any] = {
    "in place": lambda model: model.head.bias.detach().fill_(7),
    "other data": lambda model: setattr(model.head.bias, "data", torch.full_like(model.head.bias, 7)),
    "seen in between": lambda model: (model.head.bias.detach().fill_(7), states(model)),
    "through data": lambda model: model.head.bias.data.fill_(7),
}


@pytest.mark.parametrize(
    ("precision", "write"), [*(("bf16", write) for write in WRITES), *(("fp32", write) for write in [*WRITES][:3])]
)
def test_what_is_written_inside_an_average_is_said_on_every_rank(precision: str, write: str) -> None:
    """On one alone, too. Weights are back by then; the average has it, as `AveragedModel` would."""

    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero0", precision=precision)
        train(model, optimizer, 1, rank)
        with torch.no_grad():
            model.head.weight.fill_(1)  # outside, which is no matter
        ema, before = tz.EMA(model, DECAY), states(model)
        with pytest.raises(tz.Misuse, match=r"written to inside 'with ema\.swapped.*'head\.bias'"), ema.swapped():
            WRITES[write](model)
        assert_equal(states(model), before)
        with ema.swapped():
            assert states(model)["head.bias"].eq(7).all()
        with pytest.raises((tz.Misuse, tz.BadInput), match="Rank 1 cannot" if rank == 0 else "head"), ema.swapped():
            write_on_one(model, rank)

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("zero1", "zero3", marks=pytest.mark.long),
        ("zero3@nvme-all", "hpz"),
        pytest.param("hfsdp", "zero3@cpu", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_has_it(saved: str, loaded: str, tmp_path: Path) -> None:
    base = Net()

    def body(rank: int) -> None:
        model, optimizer = sharded(base, saved, 4, **options_for(saved, tmp_path))
        ema = tz.EMA(model, DECAY)
        train(model, optimizer, 2, rank)
        ema.update()
        tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        other, others = sharded(Net(), loaded, 4, **options_for(loaded, tmp_path))
        again = tz.EMA(other, DECAY)
        tz.checkpoint.load(tmp_path / "a", other, others)
        assert_equal(states(other), states(model))
        with ema.swapped(), again.swapped():
            assert_equal(states(other), states(model))
        without, its = sharded(Net(), "zero2", 4)
        tz.checkpoint.load(tmp_path / "a", without, its)
        tz.checkpoint.save(tmp_path / "b", without, its, {})
        with pytest.raises(tz.BadInput, match=r"'?head\.bias'? has no average \(load first, then make tz\.EMA"):
            tz.checkpoint.load(tmp_path / "b", other, others)
        tz.checkpoint.load(tmp_path / "b", other, None)

    with pytest.warns(UserWarning, match=r"has the average of the weights \(tz\.EMA\), which nothing keeps") as caught:
        on_ranks(4, body)
    assert len(caught) == 1  # of rank 0, where there is no tz.EMA


def test_averages_that_have_come_apart_are_refused_on_every_rank(tmp_path: Path) -> None:
    """By a decay that was set on one rank, also where it is the same again, or an update that one has left out."""

    def decays_apart(ema: tz.EMA, rank: int) -> None:
        ema.decay = 0.5 + rank / 10

    def decays_once(ema: tz.EMA, rank: int) -> None:
        ema.decay = 0.5 + rank / 10
        ema.update()
        ema.decay = DECAY

    def update_of_one(ema: tz.EMA, rank: int) -> None:
        if rank:
            ema.update()

    def body(rank: int) -> None:
        folder = tmp_path / "a"
        for apart, word in ((decays_apart, "decay"), (decays_once, "updates"), (update_of_one, "updates")):
            model, optimizer = tz.shard(Net(), lambda p: torch.optim.SGD(p, lr=0.1), "zero2")
            ema = tz.EMA(model, DECAY)
            apart(ema, rank)
            save = functools.partial(tz.checkpoint.save, folder, model, optimizer, {})
            for use in (ema.swapped().__enter__, save):
                with pytest.raises(tz.BadInput, match=rf"different things about: {word}.*ema\.update\(\)"):
                    use()
        assert not folder.exists()

    on_ranks(2, body)


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    def steps_inside(model: Any, optimizer: Any, ema: tz.EMA) -> None:
        with ema.swapped():
            train(model, optimizer, 1, 0)

    with fake_group(2):
        model, optimizer = tz.shard(Net(), lambda p: torch.optim.SGD(p, lr=0.1), "zero2")
        with pytest.raises(tz.Misuse, match=r"tz\.EMA\(model, decay\)"):
            AveragedModel(model)
        with pytest.raises(tz.BadInput, match=r"decay 1\.5"):
            tz.EMA(model, 1.5)
        with pytest.raises(tz.BadInput, match="decay True"):
            tz.EMA(model, True)
        with pytest.raises(tz.Misuse, match="not sharded"):
            tz.EMA(Net())
        ema = tz.EMA(model)
        with pytest.raises(tz.Misuse, match="has an average already"):
            tz.EMA(model)
        with pytest.raises(tz.Misuse, match=r"optimizer\.step\(\) inside"):
            steps_inside(model, optimizer, ema)
        with pytest.raises(tz.BadInput, match=r"decay 7\.0"):
            ema.decay = 7.0
        with ema.swapped():
            inside = states(model)
            weights = model.state_dict()
            for wrong in (
                *(ema.update, ema.swapped().__enter__),
                lambda: tz.checkpoint.save(tmp_path / "a", model, optimizer, {}),
                lambda: ModelState(model).restore(FullStates({})),
                lambda: model.load_state_dict(weights),
            ):
                with pytest.raises(tz.Misuse, match=r"inside 'with ema\.swapped.*call it outside"):
                    wrong()
            assert_equal(states(model), inside)
        ema.update()
        half, _ = tz.shard(Net(), None, "zero3", precision="bf16-pure")
        with pytest.raises(tz.BadInput, match="precision='bf16'"):
            tz.EMA(half)
        assert engine_of(half).averages == {}
