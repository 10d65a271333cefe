"""A model that ranks share more of than states, in integrations: refused by name, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.errors import BadInput
from terrazzo.integrations import deepspeed
from terrazzo.integrations.fsdp2 import fully_shard
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.helpers.threads import run_in_threads

SIZES = DecoderConfig(16, dim=8, layers=1, heads=2, kv_heads=2, ffn_dim=8, max_sequence_length=4)


def by_fully_shard(model: nn.Module, mesh: Any) -> None:
    fully_shard(model, mesh=None)
    model(torch.zeros(1, 4, dtype=torch.int64))


def by_setup(model: nn.Module, mesh: Any) -> None:
    """As accelerate, Lightning, DeepSpeed and the Trainer do, whose users may name a mesh."""
    EngineSetup(TerrazzoArguments("zero3", "fp32", mesh=mesh)).shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_deepspeed(model: nn.Module, mesh: Any) -> None:
    try:
        deepspeed.initialize(
            model=model,
            config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}},
            dist_init_required=False,
        )
    finally:
        assert {each.dtype for each in model.parameters()} == {torch.float32}, "a refusal leaves the model as it was"


@pytest.mark.parametrize("integration", [by_fully_shard, by_setup, by_deepspeed])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_model_that_went_through_parallelize_is_refused(
    axis: str, integration: Callable[[nn.Module, Any], None]
) -> None:
    with torch.device("cpu"):
        models = [Decoder(SIZES) for _ in range(2)]

    def body(rank: int) -> None:
        mesh = tz.mesh(**{axis: 2})
        with pytest.raises(BadInput, match=rf"went through tz\.parallelize, so ranks along {axis} .*tz\.shard\(model"):
            integration(tz.parallelize(models[rank], mesh), mesh)

    run_in_threads(2, body)
