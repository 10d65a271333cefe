"""Channels between a `colwise` and a `rowwise` where a number of the whole is all that a rank has, as of one head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.parallel import Colwise
from tests.helpers.threads import run_in_threads
from tests.parallel.test_channel_parts import (
    HEAD,
    B,
    Between,
    T,
    attention,
    check,
    flattened,
    heads,
    inputs,
    joined,
    run,
)

ONE = 2 * HEAD
"""Channels of one head on each of two ranks."""


def zeroed_behind(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 8:] = 0
    return x


def cached(x: Tensor) -> Tensor:
    k, places = heads(x), torch.arange(T)
    cache = torch.zeros(B, k.shape[1], T + 2, HEAD).index_copy(2, places, k)
    cache.index_copy_(2, places, k)
    return joined(F.scaled_dot_product_attention(k, cache, cache))


def scattered(x: Tensor) -> Tensor:
    fresh, places = torch.zeros(B, T, x.shape[-1]), torch.arange(T).view(1, T, 1).expand(B, T, x.shape[-1])
    return fresh.scatter(1, places, x) + fresh.index_add(1, torch.arange(T), x) + fresh.scatter_add(1, places, x)


def flattened_by_numbers(x: Tensor) -> Tensor:
    q = heads(x)
    one = q.reshape(B * q.shape[1], T, HEAD)
    scores = torch.baddbmm(torch.zeros(1, 1, 1), one, one.mT, beta=0).softmax(-1)
    return joined(torch.bmm(scores, one).view(B, q.shape[1], T, HEAD))


def grouped_by_numbers(x: Tensor) -> Tensor:
    q, k = heads(x), heads(x)
    parts = q.view(B, k.shape[1], -1, T, HEAD)
    scores = torch.einsum("bgrtd,bgsd->bgrts", parts, k).softmax(-1)
    return joined(torch.einsum("bgrts,bgsd->bgrtd", scores, k).flatten(1, 2))


def joined_by_numbers(x: Tensor) -> Tensor:
    return heads(x).tanh().transpose(1, 2).reshape(B, T, x.shape[-1]) * x.sigmoid()


RIGHT = {
    "attention": attention,
    "flattened": flattened,
    "flattened-by-numbers": flattened_by_numbers,
    "grouped-by-numbers": grouped_by_numbers,
    "joined-by-numbers": joined_by_numbers,
    "cached": cached,
    "scattered": scattered,
    "unflattened": lambda x: x.unflatten(-1, (-1, HEAD)).softmax(-1).flatten(2),
}


@pytest.mark.parametrize("channels", [ONE, 2 * ONE])
@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_heads_apart_is_as_in_one_process(name: str, channels: int) -> None:
    check(RIGHT[name], channels, "colwise", channels)


WRONG = {
    "first-channels": (lambda x: torch.cat([x[..., :8].roll(1, 1), x[..., 8:]], -1), 16, 2),
    "first-channels-4": (lambda x: torch.cat([x[..., :4].roll(1, 1), x[..., 4:]], -1), 16, 4),
    "split": (lambda x: torch.cat([x.split(8, -1)[0].roll(1, 1), x[..., 8:]], -1), 16, 2),
    "zeroed": (zeroed_behind, 16, 2),
    "past-the-end": (lambda x: torch.cat([x[..., -12:].roll(1, 1), x[..., :-12]], -1), 16, 2),
    "first-head": (lambda x: joined(heads(x) * heads(x)[:, :1]), ONE, 2),
    "last-head": (lambda x: joined(heads(x) * heads(x)[:, -1:]), ONE, 2),
    "narrow": (lambda x: joined(heads(x) * heads(x).narrow(1, 0, 1)), ONE, 2),
    "chunk": (lambda x: joined(heads(x) * heads(x).chunk(2, 1)[0]), ONE, 2),
    "every-second": (lambda x: joined(heads(x) * heads(x)[:, -2::2]), 2 * ONE, 2),
    "norm": (lambda x: F.normalize(x.view(B, T, -1, HEAD).flatten(2), dim=-1), ONE, 2),
    "norm-by-numbers": (lambda x: F.normalize(heads(x).transpose(1, 2).reshape(x.shape), dim=-1), ONE, 2),
    "norm-of-two": (lambda x: F.normalize(x.view(B, T, -1, HEAD).flatten(2), dim=-1), 2 * ONE, 2),
    "rows-by-numbers": (lambda x: x.view(B * T * 4, -1).softmax(-1).view(B, T, -1), 16, 2),
    "index-of-fewer": (lambda x: x.scatter(1, torch.zeros(B, T, 2).long(), 0.0), 16, 2),
    "index": (lambda x: torch.zeros_like(x).index_copy(-1, torch.arange(x.shape[-1]).flip(0), x), 16, 2),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_what_takes_a_number_of_the_whole_for_all_of_a_rank_is_refused(name: str, grad: bool) -> None:
    between, channels, ranks = WRONG[name]
    with torch.no_grad():
        values = Between(between, channels, channels).up(inputs())
        apart = torch.cat([between(part.contiguous()) for part in values.chunk(ranks, -1)], -1)
        assert not torch.allclose(apart, between(values))  # so without an error it would be wrong

    with pytest.raises(tz.Misuse, match=r"'up'"):
        run(between, channels, "colwise", grad, channels, ranks)


def test_rows_of_numbers_are_refused_where_the_plan_says_how_many_heads_there_are() -> None:
    between, channels, _ = WRONG["rows-by-numbers"]
    with pytest.raises(tz.Misuse, match="makes heads of channels"):
        run(between, channels, Colwise(heads=4))


def test_padded_rows_of_a_head_are_not_cut_off_by_their_number_in_the_whole() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)[..., :50]

    def body(rank: int):
        model = tz.parallelize(Padded(), tz.mesh(tp=2, device="cpu"), tensor={"head": "colwise"})
        with pytest.raises(tz.Misuse, match=r"calls getitem on what 'head'.*by their places"):
            model(inputs())

    run_in_threads(2, body)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("made", [lambda x: x.softmax(-1), lambda x: x.argmax(-1)])
def test_what_mixes_channels_is_not_returned_by_the_model(made, grad: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            return made(self.head(x))

    def body(rank: int):
        model = tz.parallelize(Head(), tz.mesh(tp=2, device="cpu"), tensor={"head": "colwise"})
        with torch.set_grad_enabled(grad), pytest.raises(tz.Misuse, match=r"on what 'head'.*all channels together"):
            model(inputs())

    run_in_threads(2, body)


def test_operators_have_the_rules_of_their_functions() -> None:
    check(lambda x: x * torch.ops.aten.softmax.int(x, 1), ONE, "colwise", ONE)
    with pytest.raises(tz.Misuse, match="calls softmax on what 'up'"):
        run(lambda x: torch.ops.aten.softmax.int(x, -1), ONE, "colwise", True, ONE)


@pytest.mark.parametrize("is_activation", [True, False])
def test_what_is_computed_outside_of_an_enter_is_refused_inside(is_activation: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), None

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * self.scale())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.factor = Inner(), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            factor = self.factor.tanh() if is_activation else self.factor
            self.inner.scale = lambda: factor
            return x + self.inner(x)

    plan = {"inner": "enter", "inner.up": "colwise", "inner.down": "rowwise"}

    def body(rank: int):
        model = tz.parallelize(Outer(), tz.mesh(tp=2, device="cpu"), tensor=plan)
        with pytest.raises(tz.Misuse, match="summed" if is_activation else r"'factor' of outside"):
            model(inputs())

    run_in_threads(2, body)
