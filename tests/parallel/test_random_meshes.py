"""Decoders and meshes drawn from a seed, stages, matrices and experts shared: against one process in plain PyTorch."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads
from tests.parallel.test_training_in_parts import loss_of, optimizer_of

ROWS, TOKENS, VOCABULARY, STEPS = 4, 8, 29, 2


@dataclass(frozen=True)
class Drawn:
    """What one seed says: a decoder, a mesh, and how it is trained."""

    config: DecoderConfig
    axes: dict[str, int]
    pipeline: tz.Pipeline | None
    plan: str
    sequence: bool

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)
        experts = MixtureConfig(
            count=4, top_k=draw.choice([1, 2]), ffn_dim=8, shared=draw.choice([0, 1]),
            scores=draw.choice(["softmax", "sigmoid"]), apply=draw.choice(["after", "before"]), balance="none",
        )  # fmt: skip
        mixes, tied = draw.random() < 0.7, draw.random() < 0.3
        layers = draw.choice([2, 3])
        config = DecoderConfig(
            VOCABULARY, 16, layers, 4, draw.choice([1, 2, 4]), 21, TOKENS,
            tie_embeddings=tied, experts=experts if mixes else None,
        )  # fmt: skip
        pp, tp, shards = draw.choice([(2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
        axes = {"pp": pp, "tp": tp, "dp_shard": shards}
        if mixes:
            axes["ep"] = draw.choice([size for size in (1, 2, 4) if tp * shards % size == 0])
        schedule, chunks = draw.choice([("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zero_bubble", 1)])
        plan = draw.choice(["zero0", "zero1", "zero2", "zero3", "shard_grad_op"])
        return cls(config, axes, tz.Pipeline(schedule, chunks) if pp > 1 else None, plan, mixes or draw.random() < 0.5)

    @property
    def ranks(self) -> int:
        return self.axes["pp"] * self.axes["tp"] * self.axes["dp_shard"]

    def model(self) -> Decoder:
        torch.manual_seed(1)
        model = Decoder(self.config)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.6 if "router" in name else 0.1)
        return model


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (STEPS, ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def in_one_process(model: Decoder) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for tokens, targets in batches():
        loss = loss_of(model(tokens), targets)
        (loss / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def on_a_mesh(base: Decoder, drawn: Drawn) -> tuple[list[float], dict[str, Tensor]]:
    """The sums of the losses of this rank's reader, and the whole weights on rank 0."""
    model: Any = copy.deepcopy(base)
    mesh = tz.mesh(**drawn.axes, device="cpu")
    tz.parallelize(model, mesh, sequence=drawn.sequence, pipeline=drawn.pipeline)
    model, optimizer = tz.shard(model, optimizer_of(model), drawn.plan, units=[Block], mesh=mesh)
    readers, reader = drawn.axes["dp_shard"], mesh.get_local_rank("dp_shard")
    losses = []
    for tokens, targets in batches():
        own = [(tokens[row : row + 1], targets[row : row + 1]) for row in range(reader, ROWS, readers)]
        losses.append(float(tz.step(model, own, loss_of, denominator=targets.numel())))
        optimizer.step()
        optimizer.zero_grad()
    return losses, tz.full_state_dict(model, keep=torch.distributed.get_rank() == 0)


@pytest.mark.parametrize("seed", mostly_long(range(100), 0))
def test_a_drawn_mesh_trains_as_one_process(seed: int) -> None:
    drawn = Drawn.of(seed)
    base = drawn.model()
    found = run_in_threads(drawn.ranks, lambda rank: on_a_mesh(base, drawn), timeout_s=20.0)
    plain = copy.deepcopy(base)
    expected = in_one_process(plain)
    each = drawn.ranks // drawn.axes["dp_shard"]
    assert [sum(step) / each for step in zip(*(losses for losses, _ in found), strict=True)] == pytest.approx(
        expected, rel=1e-5
    ), drawn
    for name, weight in plain.state_dict().items():
        assert (found[0][1][name] - weight).abs().max() <= 2e-5 * weight.abs().max(), (name, drawn)
