"""Texts of different lengths, by a model that is split over two gloo ranks, against the whole one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import terrazzo as tz
from terrazzo.integrations.shared import generation
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.integrations.accelerating import fresh_state
from tests.integrations.trainers import PATIENCE_S, VOCABULARY, tiny_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytestmark = pytest.mark.processes


def _with_adapters() -> Any:
    import peft

    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(tiny_model(), lora)


def _accelerate(plan: str) -> Callable[[Any], Any]:
    from terrazzo.integrations.accelerate import Accelerator

    fresh_state()
    return Accelerator(cpu=True, plan=plan).prepare


def _deepspeed() -> Callable[[Any], Any]:
    from terrazzo.integrations import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    return lambda model: deepspeed.initialize(model=model, config=config)[0].module


def _fabric() -> Callable[[Any], Any]:
    from terrazzo.integrations.lightning.fabric import TerrazzoStrategy
    from tests.integrations.test_fabric import fabric

    def prepared(model: Any) -> Any:
        model = fabric(TerrazzoStrategy("zero3")).setup(model)
        model.mark_forward_method("generate")
        return model

    return prepared


def _fully_shard() -> Callable[[Any], Any]:
    def prepared(model: Any) -> Any:
        for layer in model.model.layers:
            tz.fully_shard(layer)
        return tz.fully_shard(model)

    return prepared


def _lightning() -> Callable[[Any], Any]:
    """The model is a part of what is split, and writes within a step."""
    from lightning.pytorch import LightningModule

    from terrazzo.integrations.lightning import TerrazzoStrategy
    from tests.integrations.test_lightning import trainer

    def prepared(model: Any) -> Any:
        def generate(**asked: Any) -> Any:
            texts = []

            class Writer(LightningModule):
                def __init__(self) -> None:
                    super().__init__()
                    self.inner = model

                def validation_step(self, batch: Any, index: int) -> None:
                    texts.append(self.inner.generate(**asked))

            writer = Writer()
            trainer(TerrazzoStrategy("zero3")).validate(writer, DataLoader(torch.zeros(2, 1)), verbose=False)
            return texts[0]

        return SimpleNamespace(generate=generate)

    return prepared


INTEGRATIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], Callable[[], Any]]] = {
    "accelerate": (functools.partial(_accelerate, "zero3"), tiny_model),
    "accelerate, adapters": (functools.partial(_accelerate, "zero3"), _with_adapters),
    "accelerate, weights whole": (functools.partial(_accelerate, "zero2"), tiny_model),
    "deepspeed": (_deepspeed, tiny_model),
    "fabric": (_fabric, tiny_model),
    "fully_shard": (_fully_shard, tiny_model),
    "lightning": (_lightning, tiny_model),
}
"""What splits a model, and which."""


def _written(name: str, synced: list[dict[str, bool]]) -> dict[str, Any]:
    integration, model = INTEGRATIONS[name]
    rank = dist.get_rank()
    length = 3 + 5 * rank
    asked = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    asked["input_ids"] = torch.arange(2 + rank, 6 + rank)[None] % VOCABULARY
    expected = model().generate(**asked)
    split = integration()(model())
    texts = [split.generate(**asked, **each) for each in synced]
    return {"length": expected.shape[1], "equal": [torch.equal(text, expected) for text in texts]}


@pytest.mark.parametrize("integration", mostly_long(INTEGRATIONS, *list(INTEGRATIONS)[::3]))
def test_ranks_that_stop_early_wait_for_the_others(two_processes: Pool, integration: str) -> None:
    if integration in ("fabric", "lightning"):
        pytest.importorskip("lightning")
    once = integration == "lightning"  # each call splits a model of its own
    found = two_processes.run(
        _written, integration, [{}] if once else [{}, {"synced_gpus": False}], timeout_s=PATIENCE_S
    )
    assert [each["length"] for each in found] == [4 + 3, 4 + 8]
    assert all(all(each["equal"]) for each in found)


class _Writes(nn.Module):
    def generate(self, inputs: Any = None, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        return inputs, synced_gpus, kwargs


@pytest.mark.parametrize("override", [False, True])
def test_generate_may_be_overridden_and_take_its_arguments_by_place(
    monkeypatch: pytest.MonkeyPatch, override: bool
) -> None:
    split = SimpleNamespace(plan=SimpleNamespace(weight=SimpleNamespace(axes=("data",))))
    monkeypatch.setattr(generation, "engine_of", lambda model: split)
    model: Any = _Writes()
    if override:
        model.generate = functools.partial(model.generate, max_new_tokens=3)
    generation.generate_together(model)
    more = {"max_new_tokens": 3} if override else {}
    for args, kwargs in (((1,), {}), ((1, False), {}), ((1,), {"synced_gpus": False})):
        assert model.generate(*args, **kwargs) == (1, True, more)
