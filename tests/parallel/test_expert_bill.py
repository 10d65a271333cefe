"""What a step of ranks that share experts is promised to send and to need, against what it did."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import ExpertsConfig
from tests.helpers.cover import in_turns
from tests.helpers.threads import run_in_threads

SIZES = DecoderConfig(61, 32, 2, 4, 2, 48, 16, experts=ExpertsConfig(count=8, top_k=2, ffn_dim=16, shared=1))


@cache
def base() -> Decoder:
    torch.manual_seed(1)
    return Decoder(SIZES)


CASES: list[tuple[str, dict[str, int]]] = [
    ("zero1", {"ep": 2}),
    ("zero2", {"ep": 4}),
    ("zero3", {"ep": 2}),
    ("zero3", {"ep": 4}),
    ("shard_grad_op", {"ep": 2}),
    ("zero3", {"ep": 2, "tp": 4}),  # experts are split, and nothing else
    ("zero3", {"ep": 2, "tp": 2}),
    ("hpz", {"ep": 2, "dp_replicate": 2}),  # between forward and backward experts are whole, and nothing else
    ("hpz", {"ep": 1, "tp": 2, "dp_replicate": 2}),
    ("hfsdp", {"ep": 2, "dp_replicate": 2}),
    ("zero3@cpu", {"ep": 2}),
]


@pytest.mark.parametrize(("plan", "mesh", "precision"), in_turns(CASES, ["bf16", "fp32"]), ids=str)
def test_a_step_sends_and_needs_what_was_promised(plan: str, mesh: dict[str, int], precision: str) -> None:
    start = base()

    def body(rank: int) -> tuple[Any, ...]:
        axes = tz.mesh(**mesh, device="cpu")  # type: ignore[arg-type]
        model: Any = tz.parallelize(copy.deepcopy(start), axes)
        model, optimizer = tz.shard(
            model, lambda p: torch.optim.AdamW(p), plan, units=[Block], mesh=axes, precision=precision
        )
        engine = engine_of(model)
        data = rank // mesh.get("tp", 1)
        tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(data))
        for _ in range(3):
            engine.traffic.reset()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.settle()
        sent, promised = engine.traffic, engine.promise.traffic()
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        return (
            [(kind, sent.count[kind], sent.bytes[kind]) for kind in kinds],
            [(kind, promised.count[kind], promised.bytes[kind]) for kind in kinds],
            engine.peak_transient_bytes,
            engine.bill.transient_bytes,
        )

    for sent, promised, peak, bill in run_in_threads(4, body):
        assert sent == promised
        assert peak == bill
