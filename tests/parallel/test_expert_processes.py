"""Shared experts on gloo processes, each with a random generator and memory of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes

EXPERTS = MixtureConfig(count=4, top_k=2, ffn_dim=16, shared=1)
CONFIG = DecoderConfig(31, 16, 2, 4, 2, 26, 8, tie_embeddings=False, experts=EXPERTS)


def tokens(rank: int) -> Tensor:
    return torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(rank))


def trained(ep: int, tp: int, precision: str):
    """The weights that `tz.shard` draws for a model on the meta device, and losses of three steps, of one rank."""
    mesh, rank = tz.mesh(ep=ep, tp=tp, device="cpu"), torch.distributed.get_rank()
    with torch.device("meta"):
        model = Decoder(CONFIG)
    tz.parallelize(model, mesh)
    torch.manual_seed(7)
    model, optimizer = tz.shard(
        model, lambda p: torch.optim.SGD(p, lr=0.1), "zero3", mesh=mesh, units=[Block], precision=precision
    )
    weights = tz.full_state_dict(model, keep=True)
    losses = []
    for _ in range(3):
        batch = tokens(rank // tp)
        loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: each.clone() for name, each in weights.items()}, losses


def drawn(ep: int):
    """The weights that `tz.shard` draws for a model of transformers on the meta device."""
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "intermediate_size": 8, "num_key_value_heads": 2}
    model = build_model({"model_type": "mixtral", **sizes, **experts}, device="meta")
    mesh = tz.mesh(ep=ep, device="cpu")
    tz.parallelize(model, mesh)
    torch.manual_seed(7)
    model, _ = tz.shard(model, None, "zero3", mesh=mesh)
    return tz.full_state_dict(model, keep=True)


def apart(plan: str):
    """How a step ends whose second rank leaves a block out."""
    mesh, rank = tz.mesh(ep=2, device="cpu"), torch.distributed.get_rank()
    torch.manual_seed(7)
    model = tz.parallelize(Decoder(CONFIG), mesh)
    model, _ = tz.shard(model, None, plan, mesh=mesh, units=[Block])
    if rank:
        model.blocks[0].forward = lambda x, *_: x
    try:
        model(tokens(rank)).sum().backward()
    except tz.RanksApart as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


@pytest.mark.long
def test_initial_values_do_not_depend_on_the_mesh_and_experts_train_on_sockets(pool: Pool) -> None:
    (expected, losses), (_, other) = pool.run(trained, 1, 1, "fp32")
    for ep, tp in ((2, 1), (2, 2)):
        for rank, (weights, found) in enumerate(pool.run(trained, ep, tp, "fp32")):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], whole) for name, whole in expected.items())
            if tp == 1:
                assert found == pytest.approx((losses, other)[rank], rel=1e-5)


def test_so_do_those_of_transformers(pool: Pool) -> None:
    pytest.importorskip("transformers")
    expected, found = pool.run(drawn, 1)[0], pool.run(drawn, 2)
    assert all(torch.equal(own[name], whole) for own in found for name, whole in expected.items())
    assert expected["model.layers.0.mlp.experts.gate_up_proj"].std() == pytest.approx(0.02, rel=0.1)


def test_experts_train_in_16_bits_on_sockets(pool: Pool) -> None:
    alone, shared = (pool.run(trained, ep, 1, "bf16") for ep in (1, 2))
    for (_, losses), (_, expected) in zip(shared, alone, strict=True):
        assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_ranks_that_have_come_apart_hear_it_within_seconds(pool: Pool, plan: str) -> None:
    assert all("that shares experts must call every" in str(found) for found in pool.run(apart, plan))
    pool.close()  # their connections have broken
