"""Activation checkpointing composed with gathering: within a unit, across units, selective, and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import checkpoint_activations
from tests.engine.toys import (
    TABLE_1D,
    Net,
    adamw,
    follows_one_process,
    mesh_for,
    on_ranks,
    plain_loop,
    sharded,
    train,
)


class Spanning(Net):
    """One checkpointed region around two units and a half of the root's own work."""

    def forward(self, tokens: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)) * 2

        x = checkpoint(inner, self.embed(tokens), use_reentrant=False)
        return self.head(self.blocks[2](x))


@pytest.mark.parametrize("plan", TABLE_1D)
def test_a_checkpointed_region_across_units(plan: str) -> None:
    follows_one_process(Spanning(), plain_loop, plan)


@pytest.mark.parametrize(
    "options", [{"mode": "full"}, {"mode": "full", "every": 2}, {"mode": "selective"}, {"mode": "none"}]
)
@pytest.mark.parametrize("plan", ["zero0", "zero3", "hpz"])
def test_checkpointed_units_train_bit_for_bit_as_without(plan: str, options: dict[str, Any]) -> None:
    base = Net()
    plain = on_ranks(4, lambda rank: train(*sharded(base, plan, 4), 3, rank))

    def body(rank: int) -> list[float]:
        model = copy.deepcopy(base)
        checkpoint_activations(model, **options)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, 4))
        return train(model, optimizer, 3, rank)

    assert on_ranks(4, body) == plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "ful"}, "Did you mean 'full'"),
        ({"mode": "full", "every": 0}, "1 or more"),
        ({"mode": "selective", "ops": ["mmm"]}, "mmm"),
    ],
)
def test_checkpointing_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(tz.BadInput, match=words):
        checkpoint_activations(Net(), **options)
