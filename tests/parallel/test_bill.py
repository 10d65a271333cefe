"""What a step of ranks that share matrices, sequences or experts is promised to send and to need, and what it did."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import terrazzo as tz
from terrazzo.engine import Precision, WireFormat, engine_of
from terrazzo.parallel import context_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from tests.helpers.cover import in_turns, places
from tests.helpers.threads import run_in_threads

SIZES = {
    "mixture": DecoderConfig(61, 32, 2, 4, 2, 48, 16, experts=MixtureConfig(count=8, top_k=2, ffn_dim=16, shared=1)),
    # of the root alone the table is the last whose gradient comes, which is the head's too
    "tied": DecoderConfig(61, 32, 3, 4, 2, 48, 16),
    "untied": DecoderConfig(61, 32, 3, 4, 2, 48, 16, tie_embeddings=False),
    # half of a block's gradient is there with its experts', before there is memory for that of the other space
    "wide": DecoderConfig(61, 32, 3, 4, 2, 48, 16, experts=MixtureConfig(count=8, top_k=2, ffn_dim=40)),
}


@cache
def base(sizes: str) -> Decoder:
    torch.manual_seed(1)
    return Decoder(SIZES[sizes])


CASES: list[tuple[str, str, dict[str, int]]] = [
    ("mixture", "zero1", {"ep": 2}),
    ("mixture", "zero2", {"ep": 4}),
    ("mixture", "zero3", {"ep": 2}),
    ("mixture", "zero3", {"ep": 4}),
    ("mixture", "shard_grad_op", {"ep": 2}),
    ("mixture", "zero3", {"ep": 2, "tp": 4}),  # experts are split, and nothing else
    ("mixture", "zero3", {"ep": 2, "tp": 2}),
    ("mixture", "hpz", {"ep": 2, "dp_replicate": 2}),  # between passes experts are whole, and nothing else
    ("mixture", "hpz", {"ep": 1, "tp": 2, "dp_replicate": 2}),
    ("mixture", "hfsdp", {"ep": 2, "dp_replicate": 2}),
    ("mixture", "zero3@cpu", {"ep": 2}),
    ("tied", "shard_grad_op", {"tp": 2}),
    ("tied", "zero2", {"tp": 2}),
    ("tied", "zero3", {"cp": 2, "tp": 2}),
    ("untied", "shard_grad_op", {"tp": 2, "dp_replicate": 2}),
    ("wide", "zero3", {"ep": 2}),
    ("wide", "zero3", {"ep": 2, "tp": 2}),
    ("wide", "zero0", {"tp": 2}),
]


IN_BLOCKS = Precision(gather=WireFormat.INT8, quantized_reduce=WireFormat.INT4)


@pytest.mark.filterwarnings("ignore:tz.Precision")  # of formats in which nothing is sent
@pytest.mark.cover(strength=1, turns=2, plan=places, mesh=dict)
@pytest.mark.parametrize(("sizes", "plan", "mesh", "precision"), in_turns(CASES, ["bf16", "fp32", IN_BLOCKS]), ids=str)
def test_a_step_sends_and_needs_what_was_promised(sizes: str, plan: str, mesh: dict[str, int], precision: Any) -> None:
    start = base(sizes)

    def body(rank: int) -> tuple[Any, ...]:
        axes = tz.mesh(**mesh, device="cpu")  # type: ignore[arg-type]
        model: Any = tz.parallelize(copy.deepcopy(start), axes)
        model, optimizer = tz.shard(
            model, lambda p: torch.optim.AdamW(p), plan, units=[Block], mesh=axes, precision=precision
        )
        engine = engine_of(model)
        data = rank // (mesh.get("tp", 1) * mesh.get("cp", 1))
        tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(data))
        positions = torch.arange(16).expand(2, -1)
        if (context := context_of(model)) is not None:
            tokens, positions = context.split(tokens, positions)
        for _ in range(3):
            engine.traffic.reset()
            F.cross_entropy(model(tokens, position_ids=positions).flatten(0, 1), tokens.flatten()).backward()
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
