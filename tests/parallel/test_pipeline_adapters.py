"""Adapters of peft on frozen bases whose layers are in stages, against peft in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput
from terrazzo.integrations.peft import load_adapter, save_adapter, save_merged
from tests.engine.four_bits import rounded
from tests.helpers.threads import exclusive, run_in_threads

peft = pytest.importorskip("peft")
WIDTH, STEPS = 64, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)))


def adapted(frozen: str | None = None) -> Any:
    """With `frozen`, on matrices that are what comes back of 4 bits."""
    base = whole()
    for module in base.modules():
        if frozen and isinstance(module, nn.Linear):
            module.weight.data = rounded(module.weight.data, frozen)
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False))


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, WIDTH, generator=generator) for _ in range(2)) for _ in range(4)]  # type: ignore[misc]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = (output - target).square().sum()
    return loss


def trained(frozen: str | None) -> dict[str, Tensor]:
    """By plain PyTorch, one micro-batch after the other."""
    model = adapted(frozen)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for step in range(STEPS):
        for given, target in batches(step):
            (loss_of(model(given), target) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}


def in_stages(frozen: Any, schedule: str, plan: str = "zero0") -> tuple[Any, Any]:
    mesh = tz.mesh(pp=2, device="cpu")
    with exclusive():  # threads draw from one random generator
        model = adapted()
    tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule))
    precision = dataclasses.replace(tz.Precision.named("fp32"), frozen=frozen)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    return tz.shard(model, optimizer, plan, mesh=mesh, units=[Layer], precision=precision)


@pytest.mark.parametrize(
    ("frozen", "schedule", "plan"),
    [
        ("nf4", "1f1b", "zero0"),
        ("nf4-double", "zero_bubble", "zero3"),
        pytest.param(None, "gpipe", "zero2", marks=pytest.mark.long),
    ],
)
def test_stages_train_the_adapters_of_one_process(tmp_path: Path, frozen: str | None, schedule: str, plan: str) -> None:
    wanted, folder = trained(frozen), tmp_path / "adapter"

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = in_stages(frozen, schedule, plan)
        packed = [bucket for bucket in engine_of(model).buckets() if bucket.spec.packed is not None]
        assert len(packed) == (2 if frozen else 0)  # of this rank's layers
        for step in range(STEPS):
            tz.step(model, batches(step), loss_of, denominator=8.0)
            optimizer.step()
            optimizer.zero_grad()
        save_adapter(model, folder)
        tz.checkpoint.save(tmp_path / "saved", model, optimizer)
        again, its_optimizer = in_stages(frozen, schedule, plan)
        load_adapter(again, folder)
        tz.checkpoint.load(tmp_path / "saved", again, its_optimizer)
        with pytest.raises(BadInput, match=r"in stages \(pp 2\).*merge in one process"):
            save_merged(model, tmp_path / "merged")
        whole_model: dict[str, Tensor] = tz.full_state_dict(again)
        return whole_model

    found = run_in_threads(2, body)[0]
    loaded = peft.PeftModel.from_pretrained(whole(), str(folder))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert len(wanted) == 16
    for name, value in loaded.named_parameters():
        if name in wanted:
            assert torch.equal(value, found[name])
