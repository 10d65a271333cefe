"""Attention over sequences that ranks share, against one softmax over whole sequences in plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine.labels.label import Label
from terrazzo.errors import BadInput, Misuse, RanksApart
from terrazzo.parallel import AttentionMask, Context, context_of, share_sequences
from terrazzo.parallel.context import attention_kernels, attention_masks
from terrazzo.parallel.context.chunks import Chunks
from terrazzo.parallel.exchanges import AxisRanks, exchange
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.helpers.threads import exclusive, run_in_threads

TOKENS = 48
DOCUMENTS = {
    "causal": [[TOKENS], [TOKENS]],
    "documents": [[5, 30, 13], [TOKENS]],
    "short documents": [[3] * 16, [7] * 6 + [6]],
}


@dataclass(frozen=True)
class Case:
    ranks: int = 2
    mode: str = "gather"
    balance: str = "head_tail"
    documents: str = "causal"
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    prompts: bool = False
    dtype: torch.dtype = torch.float32


def positions_of(documents: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])


def mask_of(positions: Tensor, window: int | None) -> Tensor:
    """What a token sees, place by place: its own document, itself and what is before it."""
    document = (positions == 0).cumsum(dim=1)
    mask = (document.unsqueeze(2) == document.unsqueeze(1)).tril()
    return mask if window is None else mask.triu(1 - window)


PROMPTS = {
    "causal": [[20], [TOKENS]],
    "documents": [[5, 26, 0], [0]],
    "short documents": [[0, 3, 1] * 5 + [2], [6, 1, 0, 7, 2, 3, 4]],
}


def lengths_of(documents: str) -> Tensor:
    """Of each token the length of its document's prompt."""
    rows = zip(PROMPTS[documents], DOCUMENTS[documents], strict=True)
    return torch.stack([torch.tensor(each).repeat_interleave(torch.tensor(row)) for each, row in rows])


def with_prompts(mask: Tensor, documents: str) -> Tensor:
    """The same, where the tokens of a prompt see each other."""
    mask = mask.clone()
    for row, lengths in enumerate(DOCUMENTS[documents]):
        for number, prompt in enumerate(PROMPTS[documents][row]):
            first = sum(lengths[:number])
            mask[row, first : first + prompt, first : first + prompt] = True
    return mask


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(dim=-1) @ value


def worst_difference(case: Case) -> float:
    """Of outputs and gradients of all ranks, relative to the largest of their kind."""
    torch.manual_seed(0)
    positions = positions_of(DOCUMENTS[case.documents])
    heads = (case.heads, case.kv_heads, case.kv_heads)
    whole = [torch.randn(2, count, TOKENS, 8, dtype=case.dtype, requires_grad=True) for count in heads]
    mask, lengths = mask_of(positions, case.window), lengths_of(case.documents)
    out = plain_attention(*whole, with_prompts(mask, case.documents) if case.prompts else mask)
    grad = torch.randn_like(out)
    expected = [out.detach(), *torch.autograd.grad(out, whole, grad)]

    def on_rank(rank: int) -> float:
        context = Context(dist.group.WORLD, case.mode, case.balance)
        own = [context.chunks.split(each.detach(), rank, dim=2).requires_grad_() for each in whole]
        its_positions, its_lengths = context.split(positions, lengths)
        prefix = its_lengths if case.prompts else None
        found = context.attend(*own, context.mask(its_positions, its_positions.shape[1], case.window, None, prefix))
        gradients = torch.autograd.grad(found, own, context.chunks.split(grad, rank, dim=2))
        parts = [context.chunks.split(each, rank, dim=2) for each in expected]
        pairs = zip((found.detach(), *gradients), parts, expected, strict=True)
        return max(float((mine - its).abs().max() / each.abs().max()) for mine, its, each in pairs)

    return max(run_in_threads(case.ranks, on_rank))


@pytest.mark.cover
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_are_the_whole(ranks: int, mode: str, balance: str, documents: str) -> None:
    assert worst_difference(Case(ranks, mode, balance, documents)) < 2e-6


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_tiles_smaller_than_chunks_are_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size a block of rows is longer than these sequences."""
    monkeypatch.setattr(attention_masks, "ROWS", 5)
    assert worst_difference(Case(mode=mode, documents="documents")) < 2e-6


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_parts_of_prompts_are_the_whole(mode: str, documents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin on one rank and end on another."""
    assert worst_difference(Case(2, mode, "none", documents, prompts=True)) < 2e-6
    monkeypatch.setattr(attention_masks, "ROWS", 5)
    assert worst_difference(Case(4, mode, documents=documents, prompts=True, dtype=torch.float64)) < 1e-14


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_without_a_flash_kernel_parts_are_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_is_cpu_flash", lambda part: False)
    monkeypatch.setattr(attention_kernels, "ROWS", 5)
    for documents in ("causal", "short documents"):
        assert worst_difference(Case(mode=mode, documents=documents)) < 2e-6


@pytest.mark.parametrize(
    "case",
    [
        Case(4, "ulysses", heads=8, kv_heads=2),  # a kv head is repeated for two ranks
        Case(4, "ulysses", heads=4, kv_heads=1),
        Case(3, "ulysses", heads=6, kv_heads=2),  # and one is shared by unequal numbers of ranks
        Case(3, "ring", heads=3, kv_heads=3, documents="documents"),
        Case(2, "gather", window=7, documents="documents"),
        Case(2, "ulysses", window=7),
    ],
    ids=str,
)
def test_heads_and_windows_that_are_shared(case: Case) -> None:
    assert worst_difference(case) < 2e-6


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_other_precisions(mode: str) -> None:
    case = Case(4, mode, documents="documents")
    assert worst_difference(replace(case, dtype=torch.float64)) < 1e-14
    assert worst_difference(replace(case, dtype=torch.bfloat16)) < 2e-2


@pytest.mark.parametrize(("mode", "inside"), [("gather", False), ("ring", True)])
def test_under_autocast_parts_are_as_close_to_the_whole_as_torchs_attention(mode: str, inside: bool) -> None:
    """Values that are wider than keys have no kernel; `inside`: backward runs in the region of autocast, too."""
    torch.manual_seed(0)
    whole = [3 * torch.randn(1, 2, TOKENS, width) for width in (16, 16, 24)]
    grad, region = torch.randn(1, 2, TOKENS, 24), functools.partial(torch.autocast, "cpu", torch.bfloat16)

    def computed(attend: Callable[..., Tensor], tensors: list[Tensor], weight: Tensor) -> list[Tensor]:
        own = [each.clone().requires_grad_() for each in tensors]
        with region():
            out = attend(*own)
            found = torch.autograd.grad(out, own, weight.to(out.dtype)) if inside else ()
        return [out.detach(), *(found or torch.autograd.grad(out, own, weight.to(out.dtype)))]

    causal = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    exact = [each.double().requires_grad_() for each in whole]
    out = causal(*exact)
    expected = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    bounds = [(mine - its).norm() for mine, its in zip(computed(causal, whole, grad), expected, strict=True)]

    def on_rank(rank: int) -> list[Tensor]:
        context = Context(dist.group.WORLD, mode)
        own = [context.chunks.split(each, rank, dim=2) for each in (*whole, grad)]
        mask = context.mask(context.positions(torch.empty(1, TOKENS)), TOKENS // 2)
        return computed(lambda *each: context.attend(*each, mask), own[:3], own[3])

    chunks = Chunks(2)
    parts = run_in_threads(2, on_rank)
    for index, (its, bound) in enumerate(zip(expected, bounds, strict=True)):
        apart = [part[index] - chunks.split(its, rank, dim=2) for rank, part in enumerate(parts)]
        assert torch.cat(apart).norm() <= 1.2 * bound, index


def test_all_backends_sum_gradients_in_rank_order() -> None:
    """Three numbers whose sum is another in another order."""
    values = [2.0**24, 1.0, -(2.0**24)]

    def on_rank(rank: int) -> float:
        ranks = AxisRanks.of_group(dist.group.WORLD).labelled(Label())
        return float(ranks.reduce_scatter(torch.full((3, 1), values[rank]), torch.float32))

    assert run_in_threads(3, on_rank) == [0.0] * 3


def test_a_second_derivative_through_an_exchange_raises() -> None:
    """The way back is not on autograd's tape: its own gradient would be silently wrong."""
    values = torch.ones(3, requires_grad=True)
    doubled = exchange(values, lambda x: 2 * x, lambda grad: 2 * grad)
    (grad,) = torch.autograd.grad(doubled.square().sum(), values, create_graph=True)
    assert grad.tolist() == [8.0] * 3
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("balance", ["head_tail", "none"])
def test_chunks_balance_and_come_back(balance: str) -> None:
    chunks = Chunks(4, balance)  # type: ignore[arg-type]
    whole = torch.arange(32).reshape(1, 32, 1)
    parts = [chunks.split(whole, rank) for rank in range(4)]
    assert all(part.flatten().tolist() == chunks.places(rank, 32).tolist() for rank, part in enumerate(parts))
    assert torch.equal(chunks.in_order(torch.stack(parts), dim=1), whole)
    assert torch.equal(chunks.by_rank(whole, dim=1), torch.stack(parts))
    seen = [int((part + 1).sum()) for part in parts]
    assert (len(set(seen)) == 1) == (balance == "head_tail")


SIZES = DecoderConfig(61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=TOKENS)


def random_decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SIZES)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_the_decoder_in_parts_has_the_logits_and_gradients_of_the_whole(mode: str) -> None:
    tokens, positions = torch.randint(61, (2, TOKENS)), positions_of(DOCUMENTS["documents"])
    model = random_decoder()
    rows = [[(0, 5), (5, 35), (35, 48)], [(0, 48)]]  # each document as a sequence of its own
    alone = [torch.cat([model(tokens[row : row + 1, slice(*each)]) for each in rows[row]], dim=1) for row in range(2)]
    logits = torch.cat(alone)
    grad = torch.randn_like(logits)
    expected = torch.autograd.grad(logits, list(model.parameters()), grad)

    def on_rank(rank: int) -> list[Tensor]:
        with exclusive():
            own = random_decoder()
        share_sequences(own, context := Context(dist.group.WORLD, mode))
        mine, its_positions, its_grad, part = context.split(tokens, positions, grad, logits.detach())
        found = own(mine, its_positions)
        assert (found - part).abs().max() < 2e-6 * logits.abs().max()
        with torch.no_grad(), context.unsplit():
            whole = own(tokens, positions)
        assert (whole - logits).abs().max() < 2e-6 * logits.abs().max()
        return list(torch.autograd.grad(found, list(own.parameters()), its_grad))

    ranks = run_in_threads(2, on_rank)
    for (name, _), one, other, each in zip(model.named_parameters(), *ranks, expected, strict=True):
        assert (one + other - each).abs().max() < 5e-6 * each.abs().max(), name


def refused(ranks: int, work: Callable[[Context], object], mode: str = "gather") -> list[str]:
    """What each rank says."""

    def on_rank(rank: int) -> str:
        with pytest.raises((BadInput, Misuse)) as caught:
            work(Context(dist.group.WORLD, mode))
        return str(caught.value)

    said = run_in_threads(ranks, on_rank)
    assert len(set(said)) == 1
    return said[0].split(". ")


def test_prefixes_that_differ_between_ranks_are_told_where_they_are_placed_too() -> None:
    def on_rank(rank: int) -> None:
        context, host = Context(dist.group.WORLD, "gather"), torch.device("cpu")
        positions, prefix = torch.arange(8).unsqueeze(0), torch.full((1, 8), 3 + rank)
        context.begin_forward()
        own = torch.randn(1, 2, 4, 4)
        its = context.place(positions, host), context.place_prefix(prefix, host)
        with pytest.raises(RanksApart):
            context.attend(own, own, own, context.mask(its[0], 4, prefix=its[1]))

    run_in_threads(2, on_rank)


def test_bad_input_is_refused_on_every_rank() -> None:
    tokens = torch.zeros(1, 50, dtype=torch.int64)
    assert "Use sequences of 48 or 52 tokens." in refused(2, lambda context: context.split(tokens))
    assert any("'gather'?" in part for part in refused(2, lambda context: Context(dist.group.WORLD, "gathr")))
    assert any(
        "Use one of: head_tail" in part
        for part in refused(2, lambda context: Context(dist.group.WORLD, "ring", "zigzag"))
    )
    assert any("5 heads do not divide" in part for part in refused(2, lambda c: c.check_heads(5), "ulysses"))
    assert any(
        "on meta" in part for part in refused(2, lambda context: context.place(tokens.to("meta"), tokens.device))
    )
    positions = torch.arange(24).unsqueeze(0)
    assert any("sliding window of 7" in part for part in refused(2, lambda c: c.mask(positions, 24, 7), "ring"))


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("other", [torch.ones(1, 24, dtype=torch.int64), torch.zeros(1, 48, dtype=torch.int64)])
def test_ranks_that_share_other_sequences_are_told_as_the_first_attention_begins(mode: str, other: Tensor) -> None:
    def on_rank(rank: int) -> str:
        context = Context(dist.group.WORLD, mode)
        tokens = torch.zeros(1, 24, dtype=torch.int64) if rank == 0 else other
        with exclusive():
            model = random_decoder()
        share_sequences(model, context)
        with pytest.raises(RanksApart) as caught:
            model(*context.split(tokens), position_ids=context.positions(tokens))
        return str(caught.value)

    assert all("other sequences" in said and "by data rank" in said for said in run_in_threads(2, on_rank))


def test_ranks_that_share_other_sequences_are_told_by_a_mask_made_outside_of_a_compiled_graph() -> None:
    """An attention that is compiled compares nothing."""

    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD)
        tokens = torch.full((1, 24), rank)
        context.split(tokens)
        with pytest.raises(RanksApart, match="other sequences"):
            context.mask(context.positions(tokens), 12)

    run_in_threads(2, on_rank)


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_sequences_are_compared_in_each_forward_and_a_bad_position_is_named_on_every_rank(mode: str) -> None:
    def on_rank(rank: int) -> str:
        context = Context(dist.group.WORLD, mode)
        with exclusive():
            model = random_decoder()
        share_sequences(model, context)
        first, second = torch.zeros(1, 24, dtype=torch.int64), torch.full((1, 24), rank)
        places = torch.arange(24).unsqueeze(0)
        for number, tokens in enumerate([first, first, second, first, first]):
            own, positions = context.split(tokens, places)
            if number == 3 and rank:  # in the place of tokens that are there
                positions += 30
            if number == 2:
                with pytest.raises(RanksApart, match="other sequences"):
                    model(own, position_ids=positions)
            elif number == 3:
                with pytest.raises(Misuse) as caught:
                    model(own, position_ids=positions)
            else:
                model(own, position_ids=positions)
        return str(caught.value)

    told = run_in_threads(2, on_rank)
    assert "run ahead" in told[1]
    assert ("run ahead" if mode == "ulysses" else "Rank 1, with which this one shares") in told[0]


def test_a_model_must_be_told_which_part_it_is_given() -> None:
    def without_positions(context: Context) -> object:
        with exclusive():
            model = random_decoder()
        share_sequences(model, context)
        assert context_of(model) is context
        return model(torch.zeros(1, 24, dtype=torch.int64))

    assert any("without position_ids" in part for part in refused(2, without_positions))
    ahead = torch.arange(24).unsqueeze(0) + 30
    assert any("run ahead" in part for part in refused(2, lambda context: context.mask(ahead, 24)))
    few = torch.arange(12).unsqueeze(0)
    assert any("split both" in part for part in refused(2, lambda context: context.mask(few, 24)))


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_placed_positions_say_what_split_ones_say_and_no_more_once_they_are_changed(mode: str) -> None:
    whole = positions_of(DOCUMENTS["documents"])

    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD, mode)
        placed, (own,) = context.place(whole, torch.device("cpu")), context.split(whole)
        assert torch.equal(placed, own)
        for window in (None, 7):
            found, expected = (context.mask(each, TOKENS // 2, window) for each in (placed, own))
            assert (found.runs, found.bounds) == (expected.runs, expected.bounds)
            assert torch.equal(found.begins, expected.begins)
        placed.copy_(context.positions(whole))
        assert context.mask(placed, TOKENS // 2).begins is None
        with context.unsplit():
            alone = context.place(whole, torch.device("cpu"))
            assert context.mask(alone, TOKENS).bounds == context.mask(whole.clone(), TOKENS).bounds

    run_in_threads(2, on_rank)


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_positions_changed_in_place_are_read_again(guard) -> None:
    """Torch counts no changes of tensors made under inference_mode."""

    def on_rank(rank: int) -> None:
        context, draw = Context(dist.group.WORLD), torch.Generator().manual_seed(0)
        rows = torch.randn(1, 2, 8, 4, generator=draw)
        with guard(), context.unsplit():
            positions = torch.arange(8).unsqueeze(0)
            for lengths in ([8], [4, 4], [3, 5]):
                positions.copy_(positions_of([lengths]))
                found = context.attend(rows, rows, rows, context.mask(positions, 8))
                wanted = plain_attention(rows, rows, rows, mask_of(positions, None))
                assert torch.allclose(found, wanted, atol=1e-6), lengths

    run_in_threads(2, on_rank)


def test_the_positions_of_a_part_are_those_of_no_whole_sequence() -> None:
    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD)
        (own,) = context.split(torch.arange(16).unsqueeze(0))
        assert context.mask(own, 8) is context.mask(own, 8)
        ahead = bool((own > torch.arange(8)).any())
        with context.unsplit(), pytest.raises(Misuse, match="run ahead") if ahead else contextlib.nullcontext():
            assert [run.place for run in context.mask(own, 8).runs] == [0]

    run_in_threads(2, on_rank)


def test_ulysses_gathers_on_all_ranks_what_one_rank_was_given_anew() -> None:
    """A rank whose part is the same as before, in the same tensor, has a mask of the other's part as it was."""
    before, after = positions_of([[16]]), positions_of([[10, 6]])  # which differ in the second half

    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD, "ulysses", "none")
        (own,), (changed,) = context.split(before), context.split(after)
        context.begin_forward()
        assert context.mask(own, 8).begins is None
        context.begin_forward()
        found = context.mask(own if rank == 0 else changed, 8)
        assert found.begins is not None
        assert found.begins.tolist() == [[0] * 10 + [10] * 6]
        assert context.mask(own if rank == 0 else changed, 8) is found

        sent = context.traffic.bytes["all_gather"]
        windowed = context.mask(own if rank == 0 else changed, 8, window=3)
        assert windowed.begins is not None
        assert windowed.begins.tolist() == found.begins.tolist()
        assert context.traffic.bytes["all_gather"] == sent > 0  # once for layers of all windows
        context.end_forward()
        assert context.mask(changed, 8) is not found  # and no forward says that others were given these again

    run_in_threads(2, on_rank)


def test_masks_of_all_micro_batches_of_a_step_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline places them all before it begins, and runs others before it recomputes a part of one."""
    given = [positions_of([lengths]) for lengths in ([16], [10, 6], [3, 13])]

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, masks: list[AttentionMask], mask: Callable[[], AttentionMask]) -> Tensor:
            ctx.masks, ctx.mask = masks, mask
            masks.append(mask())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            ctx.masks.append(ctx.mask())
            return grad, None, None

    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD, "ulysses", "none")
        placed = [context.place(each, torch.device("cpu")) for each in given]
        monkeypatch.setattr(Tensor, "cpu", lambda self: pytest.fail("the host waits"))
        x, outs = torch.ones(1, requires_grad=True), []
        pairs: list[list[AttentionMask]] = []
        for positions in placed:
            pairs.append([])
            context.begin_forward()
            outs.append(Recomputed.apply(x, pairs[-1], functools.partial(context.mask, positions, 8)))
            context.end_forward()
        for out in outs:
            out.backward()
        assert all(first is again for first, again in pairs)
        assert context.traffic.count["all_gather"] == len(given)

    run_in_threads(2, on_rank)


@pytest.mark.parametrize("how", ["numpy", "data"])
def test_positions_that_are_written_past_torchs_count_have_another_mask(how: str) -> None:
    """A loader's buffer of NumPy, or `.data`: the version of the tensor stays as it was."""
    buffer, context = positions_of([[16]]).numpy().copy(), Context(None)
    positions = torch.from_numpy(buffer)
    first, changed = context.mask(positions, 16), positions_of([[4, 12]])
    if how == "numpy":
        buffer[:] = changed.numpy()
    else:
        positions.data.copy_(changed)
    second, expected = context.mask(positions, 16), Context(None).mask(changed, 16)
    assert torch.equal(second.begins, expected.begins)
    assert first.begins is None


def test_lengths_of_prefixes_may_be_int32() -> None:
    lengths = torch.full((1, 16), 3, dtype=torch.int32)

    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD, "ulysses", "none")
        own, prefix = context.split(positions_of([[16]]), lengths)
        ends = context.mask(own, 8, prefix=prefix).prefix_ends
        assert ends is not None
        assert ends.tolist() == [[3] * 16]

    run_in_threads(2, on_rank)


def test_what_a_loader_writes_later_is_not_in_placed_positions() -> None:
    given, context = positions_of([[16]]), Context(None)
    placed = context.place(given, torch.device("cpu"))
    given.numpy()[:] = 0  # which counts as no change of the tensor
    assert placed.tolist() == positions_of([[16]]).tolist()


def test_a_model_that_cannot_share_is_refused() -> None:
    assert any("use_context(context)" in each for each in refused(2, lambda c: share_sequences(nn.Linear(2, 2), c)))

    def twice(context: Context) -> None:
        with exclusive():
            model = random_decoder()
        share_sequences(model, context)
        share_sequences(model, context)

    assert any("already" in part for part in refused(2, twice))


def test_a_cache_of_keys_is_refused() -> None:
    def with_cache(context: Context) -> object:
        query, key = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 8, 8)
        return context.attend(query, key, key, context.mask(torch.zeros(1, 4, dtype=torch.int64), 4))

    assert any("use_cache=False" in part for part in refused(2, with_cache))


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_a_mask_of_other_queries_is_refused(mode: str) -> None:
    """What it does not say would be outputs of zeros, or of queries that are not there."""

    def with_mask(make) -> list[str]:
        def attend(context: Context) -> object:
            query = torch.ones(3, 2, 8, 4)
            return context.attend(query, query, query, make(context))

        return refused(2, attend, mode)

    def of(tokens: int, batch: int = 3, of_mode: str = mode):
        def make(context: Context):
            positions = torch.arange(2 * tokens).expand(batch, -1) % 5
            return Context(dist.group.WORLD, of_mode).mask(*context.split(positions), tokens)

        return make

    def unsplit(context: Context):
        with context.unsplit():
            return context.mask(None, 8)

    for make in (of(4), of(16), of(8, batch=2), of(8, of_mode="gather" if mode == "ulysses" else "ulysses"), unsplit):
        assert any(
            "a mask that is not of its queries, which are 8 tokens each of 3" in part for part in with_mask(make)
        )


def test_heads_of_keys_that_do_not_divide_those_of_queries_are_refused() -> None:
    def attend(context: Context) -> object:
        query, key = torch.ones(1, 4, 4, 8), torch.ones(1, 3, 4, 8)
        return context.attend(query, key, key, context.mask(context.positions(torch.ones(1, 8)), 4))

    assert any("4 heads of queries, 3 of keys" in part for part in refused(2, attend))


@pytest.mark.parametrize("queries", [0, 2])
def test_parts_without_queries_or_keys_give_nothing(queries: int) -> None:
    query, key = torch.ones(1, 2, queries, 8), torch.ones(1, 2, 2 - queries, 8)
    part = attention_kernels.Part(query, key, key, "causal", 1.0)
    found = attention_kernels.attend(part)
    assert not found.out.any() and found.lse.isneginf().all()
    assert [each.shape for each in attention_kernels.backward(part, query, found)] == [
        query.shape,
        key.shape,
        key.shape,
    ]
    of_no_tokens = torch.ones(1, 2, 0, 8, requires_grad=True)
    context = Context(None)
    context.attend(of_no_tokens, of_no_tokens, of_no_tokens, context.mask(None, 0)).sum().backward()
    assert of_no_tokens.grad.shape == of_no_tokens.shape


def test_a_mesh_with_a_context_needs_one() -> None:
    def without(context: Context) -> object:
        return tz.parallelize(nn.Linear(2, 2), tz.mesh(cp=2), context=None)

    assert any("context='gather'" in part for part in refused(2, without))
