"""Ways of going wrong without a word, each of which is either right or refused."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of, estimate
from tests.engine.census import census, live_bytes
from tests.engine.toys import Net, adamw, assert_close, batch, full_parameters, loss_of, on_ranks, sharded
from tests.helpers.fake import fake_group

VALUES = {
    "constants": lambda rank: torch.full((4, 8), 1.0 + rank),
    "orders": lambda rank: torch.arange(32.0).roll(rank),
}


@pytest.mark.parametrize("values", VALUES)
def test_weights_that_differ_between_ranks_take_the_first_ranks(values: str) -> None:
    def body(rank: int) -> Tensor:
        model = nn.Linear(8, 4)
        with torch.no_grad():
            model.weight.copy_(VALUES[values](rank).reshape(4, 8))
        model, _ = tz.shard(model, None, "zero0")
        return model.weight.detach().clone()

    for weight in on_ranks(3, body):
        assert torch.equal(weight, VALUES[values](0).reshape(4, 8))


class Aside(nn.Module):
    """A block that leaves an auxiliary loss on itself, computed after its output."""

    aux: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(13, 13), nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mix(x)
        self.aux = (y * self.scale).pow(2).mean()
        return y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def aux(self) -> Tensor:
        return torch.stack([block.aux for block in self.blocks]).sum()  # type: ignore[union-attr]


@pytest.mark.parametrize("plan", ["zero1", "zero3", "shard_grad_op"])
def test_a_loss_put_aside_on_a_module_trains_as_in_one_process(plan: str) -> None:
    base, inputs = Stack(), torch.randn(4, 2, 13)

    def step(model: Any, optimizer: Any, inputs: Tensor) -> None:
        (model(inputs).mean() + model.aux()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan)
        for x in inputs:
            step(model, optimizer, x)
        return full_parameters(model)

    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for x in inputs:
        step(alone, optimizer, x)
    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()))


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_hyper_parameters_that_differ_between_ranks_are_refused(plan: str, kind: Any) -> None:
    def body(rank: int) -> None:
        model = Net()
        with pytest.raises(tz.BadInput, match="optimizer"):
            tz.shard(model, torch.optim.AdamW(model.parameters(), lr=kind(0.1 * (rank + 1))), plan)

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_learning_rates_that_come_apart_are_refused(plan: str) -> None:
    """Each rank's scheduler follows its own loss, and one of them lowers the rate."""

    def body(rank: int) -> str:
        model, optimizer = sharded(Net(), plan)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for number in range(4):
            try:
                loss_of(model, batch(number, rank)).backward()
            except tz.RanksApart as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
            plateau.step(float(number) if rank else -float(number))
        return "never noticed"

    for rank, message in enumerate(on_ranks(2, body)):
        own = 0.005 if rank else 0.01
        assert f"param_groups[0]['lr'] = {own} here, and 0.005 to 0.01 on all ranks" in message
        assert "ReduceLROnPlateau" in message


@pytest.mark.parametrize(
    ("kind", "key", "values", "place"),
    [
        (torch.optim.AdamW, "betas", [(0.9, 0.95), (0.9, 0.99)], "['betas'][1]"),
        (torch.optim.AdamW, "eps", [1e-8, 1e-6], "['eps']"),
        (torch.optim.AdamW, "weight_decay", [0.0, 0.1], "['weight_decay']"),
        (torch.optim.AdamW, "maximize", [False, True], "['maximize']"),
        (torch.optim.SGD, "momentum", [0.9, 0.8], "['momentum']"),
        (torch.optim.SGD, "lr", [torch.tensor(0.1), torch.tensor(0.2)], "['lr']"),
    ],
)
def test_hyper_parameters_that_come_apart_are_refused(kind: Any, key: str, values: list[Any], place: str) -> None:
    """A rank that sets its own after sharding trains its shards in another way."""

    def body(rank: int) -> None:
        base = Net()
        model, optimizer = tz.shard(base, kind(base.parameters(), lr=0.01), "zero2")
        loss_of(model, batch(0, rank)).backward()
        optimizer.param_groups[0][key] = values[rank]
        optimizer.step()
        with pytest.raises(tz.RanksApart, match=re.escape(f"param_groups[0]{place} = ")):
            loss_of(model, batch(1, rank)).backward()

    on_ranks(2, body)


def test_what_a_scheduler_of_one_rank_adds_to_groups_is_not_compared() -> None:
    """Ranks exchange as many numbers as before: those that the groups had when the model was sharded."""

    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        if rank:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for number in range(2):
            loss_of(model, batch(number, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert ("initial_lr" in optimizer.param_groups[0]) == bool(rank)

    on_ranks(2, body)


def test_after_a_failed_backward_no_gradient_is_left() -> None:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("injected")

    def body(rank: int) -> tuple[float, float]:
        model, _ = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        wanted = tz.clip_grad_norm_(model, 1e9).item()
        model.zero_grad()
        model.blocks[0].up.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="injected"):
            loss_of(model, batch(0, rank)).backward()
        model.blocks[0].up._forward_hooks.clear()
        loss_of(model, batch(0, rank)).backward()
        return tz.clip_grad_norm_(model, 1e9).item(), wanted

    for found, wanted in on_ranks(2, body):
        assert found == wanted


def test_conversions_and_new_groups_after_sharding_are_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero0")
        assert model.to("cpu") is model
        for convert in (model.half, model.double, lambda: model.to(torch.bfloat16)):
            with pytest.raises(tz.Misuse, match=r"before tz\.shard"):
                convert()
        with pytest.raises(tz.Misuse, match="param groups"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    on_ranks(2, body)


def test_another_memory_format_is_refused_where_parameters_would_get_it() -> None:
    with fake_group(2):
        plain, _ = tz.shard(Net(), None, "zero0")
        assert plain.to(memory_format=torch.channels_last) is plain
        convolutions, _ = tz.shard(nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(5, 5)), None, "zero0")
        with pytest.raises(tz.Misuse, match=r"in another memory format.*before tz\.shard"):
            convolutions.to(memory_format=torch.channels_last)


def test_a_conversion_that_parameters_are_in_reaches_buffers_as_in_any_module() -> None:
    def body(rank: int) -> None:
        base = Net()
        for module in (base, base.head):
            module.register_buffer("table", torch.ones(3))
        base.head.table = base.table
        base.register_buffer("count", torch.tensor(3))
        model, _ = sharded(base, "zero3", precision="bf16")
        with pytest.raises(tz.Misuse, match=r"before tz\.shard"):
            model.half()
        assert model.table.dtype == torch.float32
        model.bfloat16()
        assert model.table.dtype == torch.bfloat16 and model.count.dtype == torch.int64
        assert model.head.table is model.table

    on_ranks(2, body)


def test_the_norm_of_16_bit_gradients_is_taken_in_fp32() -> None:
    def body(rank: int) -> tuple[float, float]:
        model, _ = sharded(nn.Linear(64, 64), "zero2", precision=tz.Precision(accumulate="fp16"))  # type: ignore[arg-type]
        model(torch.full((4, 64), 30.0)).sum().backward()
        wholes = [bucket.gradient.finished.read() for bucket in engine_of(model).trainable()]
        squares = sum(whole.double().pow(2).sum().item() for whole in wholes if whole is not None)
        return tz.clip_grad_norm_(model, 1e9).item(), squares

    found = on_ranks(2, body)
    assert found[0][0] == pytest.approx(sum(squares for _, squares in found) ** 0.5, rel=1e-6)


def test_clipping_in_the_middle_of_a_step_is_refused() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero1")
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
        with pytest.raises(tz.Misuse, match="last micro-batch"):
            tz.clip_grad_norm_(model, 1.0)

    on_ranks(2, body)


@pytest.mark.parametrize("argument", ["plan", "precision"])
def test_a_plan_or_precision_of_another_kind_is_named(argument: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(tz.BadInput, match=f"{argument} is None"):
            tz.shard(Net(), None, **{argument: None})

    on_ranks(1, body)


class Lion(torch.optim.Optimizer):
    """Keeps a plain attribute, which copying an optimizer loses."""

    elementwise = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.beta = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.add_(momentum.lerp(p.grad, 1 - self.beta).sign_(), alpha=-group["lr"])
                    momentum.lerp_(p.grad, 0.01)


def test_a_users_optimizer_may_keep_plain_attributes() -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, Lion(model.parameters(), 1e-2), "zero3")
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        return full_parameters(model)

    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Lion(alone.parameters(), 1e-2)
    loss_of(alone, batch(0, 0)).backward()
    optimizer.step()
    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()))


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3"])
def test_the_estimate_before_sharding_is_the_bill_after_it(plan: str) -> None:
    with fake_group(8):
        model = Net()
        optimizer = adamw(model.parameters())
        tz.mesh(device="cpu")  # which all models share, and keeps its ranks
        with census():
            gc.collect()
            before = live_bytes()
            estimated = estimate(model, optimizer, plan, precision="bf16")
            assert live_bytes() == before
        model, _ = tz.shard(model, optimizer, plan, precision="bf16")
        assert engine_of(model).bill == estimated
