"""Sequences in parts from block to block: what blocks, and models between them, may do with tokens, and what not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.parallel import Colwise
from tests.helpers.threads import run_in_threads
from tests.parallel.test_tensor_models import check, refused, seeded


class FlatMlp(nn.Module):
    """Of one row per token, whichever sequence it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.flatten(0, 1)))).unflatten(0, (x.shape[0], -1))


class Attention(nn.Module):
    """`flat`: as attention over packed sequences has its tokens."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat, (self.q, self.k, self.v, self.out) = flat, (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, x = x.shape[0], x.flatten(0, 1) if self.flat else x
        parts = [part(x).unflatten(-1, (-1, 4)) for part in (self.q, self.k, self.v)]
        q, k, v = ((part.unflatten(0, (batch, -1)) if self.flat else part).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(mixed.flatten(0, 1)).unflatten(0, (batch, -1)) if self.flat else self.out(mixed)


class Block(nn.Module):
    """`again`: a half of it runs again in backward."""

    def __init__(self, flat: bool = False, again: bool = False) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp, self.again = nn.LayerNorm(8), Attention(flat), FlatMlp(), again

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.again else self.mlp(x))


def plan(*runs: str, enter: bool = True) -> dict[str, object]:
    styles: dict[str, object] = {}
    for run in runs:
        styles |= dict.fromkeys((f"{run}.attention", f"{run}.mlp"), "enter") if enter else {}
        styles |= {run: "sequence", f"{run}.attention.[qkv]": Colwise(heads=2), f"{run}.mlp.up": "colwise"}
        styles |= {f"{run}.attention.out": "rowwise", f"{run}.mlp.down": "rowwise"}
    return styles


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def squares(model: nn.Module, x: object) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("enter", [True, False])
def test_tokens_that_are_flattened_inside_of_a_block_stay_with_their_sequences(enter: bool) -> None:
    base = seeded(lambda: nn.Sequential(Block(flat=True), Block(flat=True, again=True)))
    check(base, [randn(3, 4, 8)], squares, 2, tensor=plan("*", enter=enter))


class Both(nn.Module):
    """Runs a model on two batches before either's backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(again=again), Block(again=again))

    def forward(self, batches: list[Tensor]) -> Tensor:
        return sum(self.blocks(each).square().mean() for each in batches)


def test_batches_of_equally_many_tokens_are_told_apart_or_refused_where_they_run_again() -> None:
    batches = [randn(2, 6, 8), randn(3, 4, 8)]
    loss = lambda model, batches: model(batches)  # noqa: E731
    check(seeded(lambda: Both(False)), [batches], loss, 2, tensor=plan("blocks.*", enter=False))

    def body(rank: int) -> None:
        model = tz.parallelize(Both(True), tz.mesh(tp=2, device="cpu"), tensor=plan("blocks.*", enter=False))
        with pytest.raises(tz.Misuse, match=r"the sequences there are \[2, \d, channels\] or \[3, \d, channels\]"):
            model(batches).backward()

    run_in_threads(2, body)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = (nn.Sequential(Block(), Block()) for _ in range(2))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        text, image = inputs
        return self.text(text).mean(1) @ self.image(image).mean(1).T


class Pyramid(nn.Module):
    """Pools tokens between its halves, and between these and what is before and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.narrow, self.last = Block(), nn.Sequential(Block()), nn.Sequential(Block()), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.stem(x))
        x = x.unflatten(1, (-1, 2)).flip(2).mean(2) + x.mean(1, keepdim=True)
        return self.last(self.narrow(x) + x.mean(1, keepdim=True)).mean(1)


@pytest.mark.parametrize(
    ("make", "data", "runs"),
    [
        (Towers, (randn(3, 4, 8), randn(3, 6, 8)), ("text.*", "image.*")),
        (Pyramid, randn(3, 8, 8), ("stem", "wide.*", "narrow.*", "last")),
    ],
)
def test_blocks_of_several_runs_have_their_own_sequences(make, data, runs: tuple[str, ...]) -> None:
    check(seeded(make), [data], squares, 2, tensor=plan(*runs))


class Loop(nn.Module):
    """Runs blocks in a way of its own."""

    def __init__(self, run: Callable[[list[nn.Module], Tensor], Tensor], *blocks: nn.Module) -> None:
        super().__init__()
        self.run, self.blocks = run, nn.ModuleList(blocks or [Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.run([*self.blocks], x)


class Pooling(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class Chosen(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x[:, :1])


@pytest.mark.parametrize(
    ("base", "match"),
    [
        (
            Loop(lambda b, x: b[1](b[0](x).unflatten(1, (-1, 2)).mean(2))),
            r"'blocks.1'.*was given \[3, 2, c.*no part \[3, 4",
        ),
        (Loop(lambda b, x: b[1](b[0](x) + x[:, :4])[:, :4] * b[0](x)), "and ended without 'blocks.1', their last one"),
        (Loop(lambda b, x: b[1](x)), "'blocks.1' computes a part .* outside of the blocks .* from 'blocks.0'"),
        (Loop(lambda b, x: b[0].mlp(x)), "'blocks.0.mlp' computes a part .* outside of the blocks"),
        (
            Loop(lambda b, x: b[1](b[0](x)), Block(), Pooling()),
            r"'blocks.1'.*returns \[3, channels\], which is no part",
        ),
        (
            Loop(lambda b, x: b[1](b[0](x)), Block(), Chosen()),
            r"'blocks.1.mlp'.*computes with \[3, 1, ch.*are \[3, 4, ch",
        ),
    ],
    ids=["pooled-between", "last-not-run", "first-not-run", "part-of-a-block", "pooled-inside", "some-tokens"],
)
def test_what_is_no_part_of_the_sequences_is_refused_by_name(base: Loop, match: str) -> None:
    def body(rank: int) -> None:
        model = tz.parallelize(copy.deepcopy(base), tz.mesh(tp=2, device="cpu"), tensor=plan("blocks.*"))
        for _ in range(2):  # nothing is left of the first
            with pytest.raises(tz.Misuse, match=match):
                model(randn(3, 8, 8))

    run_in_threads(2, body)


def test_a_residual_around_a_block_has_an_error_that_says_where_it_belongs() -> None:
    base = Loop(lambda blocks, x: functools.reduce(lambda values, block: values + block(values), blocks, x))

    def body(rank: int) -> None:
        model = tz.parallelize(copy.deepcopy(base), tz.mesh(tp=2, device="cpu"), tensor=plan("blocks.*"))
        with pytest.raises(RuntimeError, match="must match the size") as error:
            model(randn(3, 8, 8))
        (note,) = error.value.__notes__
        assert note.startswith("Between 'blocks.0' and 'blocks.1', of style 'sequence', ")
        assert "put a residual around such a block into the block" in note

    run_in_threads(2, body)


def test_blocks_of_blocks_are_refused() -> None:
    styles = {**plan("*"), "*.mlp": "sequence"}
    refused(nn.Sequential(Block()), "'0.mlp' as 'sequence' inside of '0', which is so too", tensor=styles)


class Beside(Block):
    """With one more module in a block, of which its class alone says what it does with positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class SeqNorm(nn.LayerNorm):
    """Over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.std(1, keepdim=True)


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


@pytest.mark.parametrize("inner", [nn.GroupNorm(2, 8), SeqNorm(8), nn.InstanceNorm1d(8), nn.AvgPool1d(3, 1, 1)])
def test_a_module_that_may_compute_over_positions_is_not_given_a_part_unasked(inner: nn.Module) -> None:
    match = rf"'0.inner', a {type(inner).__name__}, is neither cut .*\('replicate', if it computes each position"
    refused(nn.Sequential(Beside(inner)), match, tensor=plan("*"))


@pytest.mark.parametrize("inner", [nn.RMSNorm(8), OwnRMSNorm()], ids=["torch", "own"])
def test_a_norm_over_channels_is_known_by_its_class(inner: nn.Module) -> None:
    check(seeded(lambda: nn.Sequential(Beside(inner))), [randn(3, 4, 8)], squares, 2, tensor=plan("*"))
