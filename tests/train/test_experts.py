"""The decoder's mixture of experts, against a loop over tokens in plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.engine import checkpoint_activations
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig, FeedForward
from terrazzo.train.model.experts import MixtureConfig, MixtureOfExperts, auxiliary_loss, balance_experts, grouped
from tests.helpers.threads import run_in_threads

DIM, TOKENS = 8, 24
CONFIG = MixtureConfig(count=6, top_k=2, ffn_dim=16)
SIZES = DecoderConfig(31, DIM, 2, 2, 1, 12, 16)


def mixture(config: MixtureConfig) -> MixtureOfExperts:
    torch.manual_seed(3)
    shared = FeedForward(SIZES, config.shared * config.ffn_dim) if config.shared else None
    made = MixtureOfExperts(DIM, config, shared, std=0.5, out_std=0.5)
    made.router.bias.copy_(torch.linspace(-0.3, 0.3, config.count))
    return made


def token_by_token(model: MixtureOfExperts, x: Tensor) -> Tensor:
    """What the mixture gives, one token after the other, each of its experts after the other."""
    config, experts, out = model.config, model.experts, []
    for token in x.reshape(-1, DIM):
        logits = model.router.weight @ token
        scores = logits.softmax(0) if config.scores == "softmax" else logits.sigmoid()
        best = sorted(range(config.count), key=lambda each: -float(scores.detach()[each] + model.router.bias[each]))
        chosen = best[: config.top_k]
        total = sum(scores[each] for each in chosen) if config.normalize else 1.0
        mixed = torch.zeros(DIM)
        for each in chosen:
            weight = scores[each] / total
            own = token * weight if config.apply == "before" else token
            hidden = F.silu(experts.gate[each] @ own) * (experts.up[each] @ own)
            given = experts.down[each] @ hidden
            mixed = mixed + (given * weight if config.apply == "after" else given)
        if model.shared is not None:
            mixed = mixed + model.shared(token)
        out.append(mixed)
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("apply", ["after", "before"])
@pytest.mark.parametrize(("top_k", "shared", "normalize"), [(2, 0, True), (1, 1, False), (6, 2, False)])
def test_a_mixture_is_what_each_tokens_experts_give(
    scores: Any, apply: Any, top_k: int, shared: int, normalize: bool
) -> None:
    config = replace(CONFIG, top_k=top_k, shared=shared, scores=scores, apply=apply, normalize=normalize)
    model = mixture(config)
    x = torch.randn(2, TOKENS // 2, DIM, requires_grad=True)
    found = []
    for forward in (model, lambda x: token_by_token(model, x)):
        out = forward(x)
        (out * torch.linspace(-1, 1, DIM)).sum().backward()
        found.append([out.detach(), x.grad, *(each.grad for each in model.parameters())])
        x.grad = None
        model.zero_grad()
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert int(model.router.load.sum()) == TOKENS * top_k


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_each_group_to_the_bit(counts: list[int], dtype: torch.dtype) -> None:
    matrices = torch.randn(3, 16, 8, dtype=dtype, requires_grad=True)
    rows = torch.randn(sum(counts), 8, dtype=dtype, requires_grad=True)
    found = []
    for out in (
        grouped(rows, matrices, torch.tensor(counts)),
        torch.cat([F.linear(own, each) for own, each in zip(rows.split(counts), matrices, strict=True)]),
    ):
        out.float().square().sum().backward()
        found.append([out.detach(), rows.grad, matrices.grad])
        rows.grad = matrices.grad = None
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_auxiliary_losses_are_sums_over_tokens() -> None:
    model = mixture(replace(CONFIG, balance="loss", loss_weight=0.5, z_loss=0.25))
    x = torch.randn(TOKENS, DIM)
    model(x)
    logits = x @ model.router.weight.T
    chosen = (logits.softmax(-1) + model.router.bias).topk(2).indices
    rows = torch.stack([(chosen == each).sum() for each in range(6)]) / (2 * TOKENS)
    balance = 0.5 * 6 * (rows * logits.softmax(-1).sum(0)).sum()
    expected = balance + 0.25 * logits.logsumexp(-1).square().sum()
    found = auxiliary_loss(model)
    assert found is not None
    assert torch.allclose(found, expected)
    (theirs,) = torch.autograd.grad(expected, model.router.weight)
    (mine,) = torch.autograd.grad(found, model.router.weight)
    assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_padding_is_not_counted_and_learns_nothing_however_long_it_is() -> None:
    """Against the same texts, of different lengths, one after the other without padding; and recomputed."""
    experts = replace(CONFIG, balance="loss", loss_weight=0.5, z_loss=0.25)
    torch.manual_seed(5)
    base = Decoder(replace(SIZES, experts=experts))
    texts = [torch.randint(1, 31, (length,)) for length in (3, 7, 5)]

    def learnt(width: int, recomputed: bool = False) -> tuple[Tensor, ...]:
        model = copy.deepcopy(base)
        if recomputed:
            checkpoint_activations(model, "full", units=[Block])
        rows = torch.nn.utils.rnn.pad_sequence([*texts, torch.ones(width + 1).long()], True, -100)[:3]
        inputs, targets = rows[:, :-1], rows[:, 1:]
        padding_mask = inputs == -100
        logits = model(inputs.where(~padding_mask, 0), padding_mask=padding_mask)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        auxiliary = auxiliary_loss(model)
        assert auxiliary is not None
        (loss + auxiliary).backward()
        router = model.blocks[1].feed_forward.router
        grads = torch.cat([each.grad.flatten() for each in model.parameters()])
        assert router.load.sum() == 2 * (3 + 7 + 5)  # the last token of a row is an input where there is padding
        return loss, auxiliary, grads, router.load, router.entropy

    (narrow, *others) = (learnt(*each) for each in ((8,), (15,), (15, True)))
    for other in others:
        for found, expected in zip(other, narrow, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["count", "top_k", "ffn_dim"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(tz.BadInput, match=rf"model.experts.{name} is 0"):
        replace(CONFIG, **{name: 0})


def test_a_token_has_no_more_experts_than_there_are() -> None:
    with pytest.raises(tz.BadInput, match=r"top_k = 7 experts compute each token, and there are 6"):
        replace(CONFIG, top_k=7)


def test_work_is_counted_for_the_experts_that_are_chosen() -> None:
    experts = MixtureConfig(count=6, top_k=2, ffn_dim=16, shared=1)
    dense, mixed = SIZES.matmul_numel, replace(SIZES, experts=experts).matmul_numel
    assert mixed - dense == 2 * (3 * DIM * (16 * 3 - 12) + DIM * 6)


def test_the_bias_follows_the_rows_of_all_ranks_whatever_the_mesh() -> None:
    """Against one process that counts all tokens; recomputation does not count."""
    sizes = replace(SIZES, experts=CONFIG)
    torch.manual_seed(5)
    base = Decoder(sizes)
    tokens = torch.randint(31, (4, 8), generator=torch.Generator().manual_seed(1))

    plain, bias = copy.deepcopy(base), torch.zeros(6)
    chosen = []
    plain.blocks[0].feed_forward.router.register_forward_hook(lambda *given: chosen.append(given[2][1]))
    plain(tokens)
    counts = [int((chosen[0] == each).sum()) for each in range(6)]
    mean = sum(counts) / 6
    for each in range(6):
        bias[each] += CONFIG.bias_rate * ((mean > counts[each]) - (mean < counts[each]))
    bias -= bias.mean()

    def body(rank: int, ep: int) -> tuple[Any, Tensor, int]:
        model: Any = copy.deepcopy(base)
        checkpoint_activations(model, "full", units=[Block])
        mesh = tz.mesh(ep=ep)
        model, _ = tz.shard(tz.parallelize(model, mesh), None, "zero3", units=[Block], mesh=mesh)
        model(tokens[2 * rank : 2 * rank + 2]).sum().backward()
        router = model.blocks[0].feed_forward.router
        return balance_experts(model)["blocks.0.feed_forward.router"], router.bias.clone(), int(router.load.sum())

    for ep in (1, 2):
        for load, moved, left in run_in_threads(2, lambda rank, ep=ep: body(rank, ep)):
            assert list(load.counts) == counts
            assert load.imbalance == max(counts) / mean
            assert torch.equal(moved, bias)
            assert left == 0
