"""What a model is made of, and what it is given to: said at `tz.shard`, or in one sentence later."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine.sharding import compared_facts
from tests.engine.toys import Net, adamw, assert_close, assert_equal, batch, full_parameters, loss_of, on_ranks, step
from tests.helpers.fake import fake_group

# -- dtypes ----------------------------------------------------------------------------------------------------


def frozen_in_float64(model: Net) -> Net:
    model.embed.double().requires_grad_(False)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16", tz.Precision(master="fp64")])  # type: ignore[arg-type]
def test_float64_parameters_are_refused_where_they_would_be_rounded(precision: Any) -> None:
    with fake_group(2):
        for model, names in (
            (Net().double(), "embed.weight, .* and 12 more"),
            (frozen_in_float64(Net()), "embed.weight"),
        ):
            with pytest.raises(tz.BadInput, match=rf"^{names}: float64.*model\.float\(\)"):
                tz.shard(model, adamw, "zero3", precision=precision)
            assert type(model) is Net and model.embed.weight.dtype == torch.float64


@pytest.mark.parametrize("dtypes", [["fp64"] * 2 + ["fp32"] + ["fp64"] * 3, ["fp64"] * 5 + ["fp32"]])
def test_float64_parameters_are_refused_where_their_gradients_or_moments_would_be_rounded(dtypes: list[Any]) -> None:
    named = dict(zip(("weight", "compute", "reduce", "accumulate", "master", "moments"), dtypes, strict=True))
    (narrower,) = (name for name, dtype in named.items() if dtype == "fp32")
    with fake_group(2), pytest.raises(tz.BadInput, match=rf"without a word: its {narrower} is fp32\. Call model"):
        tz.shard(Net().double(), adamw, "zero3", precision=tz.Precision(*dtypes))


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_float64_is_kept_by_a_precision_of_float64(plan: str) -> None:
    base, limit = Net().double(), 0.01
    alone = copy.deepcopy(base)
    optimizer, wanted = adamw(alone.parameters()), list[Tensor]()
    for number in range(3):
        logits = alone(torch.cat([batch(number, 0), batch(number, 1)])[:, :-1])
        logits.square().mean().backward()
        wanted.append(nn.utils.clip_grad_norm_(alone.parameters(), limit))
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, plan, precision=tz.Precision(*["fp64"] * 6))  # type: ignore[arg-type]
        norms = []
        for number in range(3):
            model(batch(number, rank)[:, :-1]).square().mean().backward()
            own = number % 2 == 0
            norms.append(
                tz.clip_grad_norm_(model, limit) if own else nn.utils.clip_grad_norm_(model.parameters(), limit)
            )
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model), norms

    assert min(wanted) > limit
    for weights, norms in on_ranks(2, body):
        assert_close(weights, dict(alone.named_parameters()), 1e-12)
        torch.testing.assert_close(torch.stack(norms), torch.stack(wanted), rtol=1e-12, atol=0.0)


def test_trainable_parameters_in_several_dtypes_are_said() -> None:
    with fake_group(2):
        model = Net()
        model.blocks.bfloat16()
        with pytest.warns(UserWarning, match=r"several dtypes \(float32: embed\.weight, .*bfloat16: blocks\.0"):
            tz.shard(model, adamw, "zero2", precision="bf16")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_loaded_in_bf16_or_frozen_in_another_dtype_is_normal(precision: str) -> None:
    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(13, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("mask", torch.ones(13, dtype=torch.bool))
            self.register_buffer("scale", torch.full((13,), 2.0, dtype=torch.float64))

        def forward(self, tokens: Tensor) -> Tensor:
            x = super().forward(tokens)
            return x + (self.table * self.mask * self.scale).sum().to(x.dtype)

    def body(rank: int) -> None:
        model = Quantised().bfloat16()
        model.table.data = torch.arange(13, dtype=torch.uint8)
        model.scale = torch.full((13,), 2.0, dtype=torch.float64)
        model.embed.float().requires_grad_(False)  # as adapters beside what they adapt
        trained = [each for each in model.parameters() if each.requires_grad]
        model, optimizer = tz.shard(model, adamw(trained), "zero3", precision=precision)
        step(model, optimizer, loss_of(model, batch(0, rank)))
        assert (model.table.dtype, model.mask.dtype, model.scale.dtype) == (torch.uint8, torch.bool, torch.float64)

    on_ranks(2, body)


# -- what cannot be sharded ------------------------------------------------------------------------------------


def test_sparse_gradients_are_refused() -> None:
    with fake_group(2):
        for kind in (nn.Embedding, nn.EmbeddingBag):
            model = nn.Sequential(nn.Linear(3, 3), kind(5, 3, sparse=True))
            with pytest.raises(tz.BadInput, match=r"1: .*sparse=False"):
                tz.shard(model, None, "zero2")
            model[1].requires_grad_(False)
            tz.shard(model, None, "zero2")


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3"])
def test_embeddings_that_scale_the_rows_of_a_batch_are_refused_where_ranks_have_batches(plan: str) -> None:
    for ranks in (1, 2):
        with fake_group(ranks):
            model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 3))
            with pytest.raises(tz.BadInput, match=r"0: .*max_norm=None") if ranks > 1 else contextlib.nullcontext():
                tz.shard(model, None, plan)


def test_a_model_and_an_optimizer_the_wrong_way_round() -> None:
    with fake_group(2):
        model = Net()
        with pytest.raises(tz.BadInput, match=r"AdamW in place of a model.*tz\.shard\(model, optimizer"):
            tz.shard(adamw(model.parameters()), model)  # type: ignore[type-var]
        with pytest.raises(tz.BadInput, match=r"dict in place of a model"):
            tz.shard({}, None)  # type: ignore[type-var]


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_pickling_names_what_saves(plan: str) -> None:
    with fake_group(1):
        for each in tz.shard(Net(), adamw, plan):
            for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO()), copy.copy):
                with pytest.raises(tz.Misuse, match=r"cannot be pickled.*tz\.checkpoint\.save"):
                    save(each)


# -- versions --------------------------------------------------------------------------------------------------


def test_code_that_is_not_installed_shards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(compared_facts, "version", version)
    monkeypatch.setattr(
        compared_facts, "_own_version", compared_facts._own_version.__wrapped__
    )  # as where nobody has asked yet
    assert compared_facts.versions()["terrazzo version"] == "source"
    with fake_group(1):
        tz.shard(Net(), adamw, "zero2")


def test_versions_that_differ_between_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own, ranks = compared_facts.versions, {}

    def versions() -> dict[str, object]:
        return own() | {"torch version": f"2.{ranks[threading.get_ident()]}"}

    monkeypatch.setattr(compared_facts, "versions", versions)
    base = Net()

    def body(rank: int) -> str:
        ranks[threading.get_ident()] = rank
        with pytest.raises(tz.BadInput) as caught:
            tz.shard(model := copy.deepcopy(base), adamw, "zero2")
        assert_equal(dict(model.named_parameters()), dict(base.named_parameters()))
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "torch version ('2.0' on rank 0; '2.1' on rank 1). Install the same on every machine." in text
