"""Texts of different lengths, by a model that is split over two gloo ranks, against the whole one."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from terrazzo.integrations import generation
from tests.helpers.processes import Pool
from tests.integrations.accelerating import fresh_state
from tests.integrations.trainers import PATIENCE_S, VOCABULARY, tiny_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytestmark = pytest.mark.processes


def _written(adapters: bool, plan: str) -> dict[str, Any]:
    import peft

    from terrazzo.integrations.accelerate import Accelerator

    def model() -> Any:
        lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(tiny_model(), lora) if adapters else tiny_model()

    rank = dist.get_rank()
    length = 3 + 5 * rank
    asked = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    prompt = {"input_ids": torch.arange(2 + rank, 6 + rank)[None] % VOCABULARY}
    expected = model().generate(**prompt, **asked)
    fresh_state()
    split = Accelerator(cpu=True, plan=plan).prepare(model())
    texts = [split.generate(**prompt, **asked), split.generate(**prompt, **asked, synced_gpus=False)]
    return {"length": expected.shape[1], "equal": [torch.equal(text, expected) for text in texts]}


@pytest.mark.parametrize(("adapters", "plan"), [(False, "zero3"), (True, "zero3"), (False, "zero2")])
def test_ranks_that_stop_early_wait_for_the_others(two_processes: Pool, adapters: bool, plan: str) -> None:
    found = two_processes.run(_written, adapters, plan, timeout_s=PATIENCE_S)
    assert [each["length"] for each in found] == [4 + 3, 4 + 8]
    assert all(each["equal"] == [True, True] for each in found)


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
