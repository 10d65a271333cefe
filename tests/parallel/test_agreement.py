"""What one rank alone is told, or has, is refused by `tz.parallelize` on every rank, before a model is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import terrazzo as tz
from terrazzo.train.model.decoder import Decoder, DecoderConfig, MixtureConfig
from tests.helpers.threads import run_in_threads

SIZES = DecoderConfig(31, 16, 2, 4, 2, 26, 8, tie_embeddings=False)


def hooked(model: Decoder) -> None:
    model.blocks[0].feed_forward.up.weight.register_hook(lambda grad: grad)


def with_gradient(model: Decoder) -> None:
    weight = model.blocks[0].feed_forward.down.weight
    weight.grad = torch.zeros_like(weight)


def wider(model: Decoder) -> None:
    model.blocks[0].feed_forward.up = torch.nn.Linear(16, 28, bias=False)


@pytest.mark.parametrize(
    ("axis", "others", "change", "match"),
    [
        ("tp", {}, hooked, "'blocks.0.feed_forward.up.weight' has a hook"),
        ("tp", {}, with_gradient, "'blocks.0.feed_forward.down.weight' has a gradient"),
        ("tp", {}, wider, "different things about: parameters"),
        ("tp", {"sequence": False}, None, "different things about: sequence"),
        ("tp", {"tensor": None}, None, "different things about: tensor"),
        ("cp", {"context": "ring"}, None, "different things about: context"),
        ("cp", {"context": "rings"}, None, "no context mode"),
        ("cp", {"context": None}, None, "context is None"),
        ("cp", {"balance": "none"}, None, "different things about: balance"),
        ("cp", {}, wider, "different things about: parameters"),
        ("pp", {"pipeline": None}, None, "nothing says how its ranks share"),
        ("pp", {"pipeline": tz.Pipeline("gpipe")}, None, "different things about: pipeline"),
    ],
)
def test_what_one_rank_alone_has_is_refused_on_all(
    axis: str, others: dict[str, Any], change: Callable[[Decoder], None] | None, match: str
) -> None:
    torch.manual_seed(0)
    base = Decoder(SIZES)

    def body(rank: int) -> str:
        model, mesh = copy.deepcopy(base), tz.mesh(**{axis: 2}, device="cpu")
        given: dict[str, Any] = {"pipeline": tz.Pipeline() if axis == "pp" else None} | (others if rank else {})
        if rank and change is not None:
            change(model)
        kept = copy.deepcopy(model)
        with pytest.raises(tz.BadInput) as caught:
            tz.parallelize(model, mesh, **given)
        assert str(model) == str(kept)
        assert tz.parallel.context_of(model) is None
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), kept.parameters(), strict=True))
        return str(caught.value)

    first, second = run_in_threads(2, body)
    assert match in second
    assert match in first or "Rank 1 cannot do its part" in first


def test_numbers_of_experts_are_compared() -> None:
    def body(rank: int) -> str:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(31, 16, 1, 4, 2, 26, 8, experts=MixtureConfig(2 + 2 * rank, 1, 8)))
        with pytest.raises(tz.BadInput) as caught:
            tz.parallelize(model, tz.mesh(ep=2, device="cpu"))
        return str(caught.value)

    assert all("different things about: experts" in told for told in run_in_threads(2, body))
