"""Windows, strides and documents tile by tile, against plain PyTorch with a square boolean mask."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel import AttentionMask, Context
from terrazzo.parallel.context import attention_kernels, attention_masks
from terrazzo.parallel.context.chunks import TokenRun

TOKENS = 48
DOCUMENTS = {"one": [[TOKENS], [TOKENS]], "several": [[5, 30, 13], [TOKENS]], "short": [[3] * 16, [7] * 6 + [6]]}
DOCUMENTS["a block"] = DOCUMENTS["one"]  # prompts of which one ends where a block of queries does
PATTERNS = [(1, None), (3, None), (11, None), (12, None), (13, None), (47, None), (48, None)]
STRIDES = [(1, 4), (4, 4), (6, 4), (13, 5), (3, 17), (20, 47), (5, 60)]


PROMPTS = {
    "one": [[0], [20]],
    "several": [[5, 0, 7], [TOKENS]],
    "short": [[0, 3, 1] * 5 + [2], [6, 1, 0, 7, 2, 3, 4]],
    "a block": [[24], [30]],
}


def positions_of(documents: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])


def square(positions: Tensor, window: int | None, stride: int | None) -> Tensor:
    """What each token sees, pair by pair: bool `[B, 1, T, T]`."""
    places = torch.arange(positions.shape[1])
    document = (positions == 0).cumsum(dim=1)
    distance = places.unsqueeze(1) - places
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if stride is not None:
        near |= (distance >= 0) & (distance % stride == 0)
    return ((document.unsqueeze(2) == document.unsqueeze(1)) & near).unsqueeze(1)


def lengths_of(documents: list[list[int]], prompts: list[list[int]]) -> Tensor:
    """Of each token the length of its document's prompt."""
    return torch.stack(
        [torch.tensor(each).repeat_interleave(torch.tensor(row)) for each, row in zip(prompts, documents, strict=True)]
    )


def square_of_prompts(documents: list[list[int]], prompts: list[list[int]]) -> Tensor:
    """What each token sees, document by document: bool `[B, 1, T, T]`."""
    mask = torch.zeros(len(documents), 1, TOKENS, TOKENS, dtype=torch.bool)
    for row, lengths in enumerate(documents):
        first = 0
        for length, prompt in zip(lengths, prompts[row], strict=True):
            own = mask[row, 0, first : first + length, first : first + length]
            own |= torch.ones_like(own).tril()
            own[:prompt, :prompt] = True
            first += length
    return mask


def worst_difference(
    documents: str, window: int | None, stride: int | None, dtype: torch.dtype, prompts: bool = False
) -> float:
    """Of outputs and gradients, relative to the largest of their kind, or to 1: some of a window of one token are 0."""
    torch.manual_seed(0)
    positions = positions_of(DOCUMENTS[documents])
    whole = [torch.randn(2, heads, TOKENS, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    mask, prefix = square(positions, window, stride), None
    if prompts:
        mask = square_of_prompts(DOCUMENTS[documents], PROMPTS[documents])
        prefix = lengths_of(DOCUMENTS[documents], PROMPTS[documents])
    out = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
    grad = torch.randn_like(out)
    context = Context(None)
    given = None if documents in ("one", "a block") else positions
    found = context.attend(*whole, context.mask(given, TOKENS, window, stride, prefix))
    wanted, gradients = (torch.autograd.grad(each, whole, grad) for each in (out, found))
    pairs = zip((out.detach(), *wanted), (found.detach(), *gradients), strict=True)
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1.0)) for one, other in pairs)


def test_a_gradient_with_a_graph_is_refused() -> None:
    """Also behind a sum, whose gradient is a constant: torch's own check would let a penalty have no gradient."""
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    context = Context(None)
    out = context.attend(query, key, value, context.mask(None, 4))
    with pytest.raises(Misuse, match=r"create_graph=True.*without cp"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("rows", [5, 12, 256])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_pattern_is_that_of_a_square_mask(rows: int, documents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size a block of rows is longer than these sequences."""
    monkeypatch.setattr(attention_masks, "ROWS", rows)
    for window, stride in [(None, None), *PATTERNS, *STRIDES]:
        assert worst_difference(documents, window, stride, torch.float64) < 1e-14, (window, stride)


def test_without_a_flash_kernel_patterns_are_those_of_a_square_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_is_cpu_flash", lambda part: False)
    monkeypatch.setattr(attention_kernels, "ROWS", 5)
    monkeypatch.setattr(attention_masks, "ROWS", 12)
    for documents, (window, stride) in product(DOCUMENTS, [(13, None), (13, 5)]):
        assert worst_difference(documents, window, stride, torch.float32) < 3e-6, (documents, window, stride)


@pytest.mark.parametrize("rows", [5, 12, 256])
def test_prompts_are_those_of_a_square_mask(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "ROWS", rows)
    for documents in PROMPTS:
        assert worst_difference(documents, None, None, torch.float64, prompts=True) < 1e-14, documents
    monkeypatch.setattr(attention_kernels, "_is_cpu_flash", lambda part: False)
    assert worst_difference("several", None, None, torch.float32, prompts=True) < 3e-6


def test_narrow_dtypes() -> None:
    assert worst_difference("several", 13, 5, torch.bfloat16) < 3e-2
    assert worst_difference("several", None, None, torch.bfloat16, prompts=True) < 3e-2


def test_a_prompt_needs_a_mask_in_the_block_where_it_ends_alone() -> None:
    runs, prefix = [TokenRun(0, 0, 4096)], torch.full((1, 4096), 1100)
    mask = AttentionMask.of(runs, None).with_prefixes(prefix, prefix)
    tiles = list(mask.tiles(runs, torch.device("cpu")))
    masked = [(rows.start, keys.start, keys.stop) for rows, keys, seen in tiles if isinstance(seen, Tensor)]
    assert masked == [(1024, 1100, 1536)]
    assert sum(seen == "causal" for _, _, seen in tiles if isinstance(seen, str)) == 5
    computed = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in tiles)
    assert computed < 4096**2 / 2 + 1100**2 / 2 + 4096 * 512


@pytest.mark.parametrize(
    ("positions", "prefix"),
    [
        (None, [2, 2, 2, 1]),
        (None, [-1] * 4),
        (None, [5] * 4),
        ([0, 1, 0, 1], [3, 3, 0, 0]),
        ([0, 1, 0, 1], [1, 1, 1, 2]),
    ],
    ids=["other in a document", "negative", "behind the sequence", "behind its document", "other in the second"],
)
def test_impossible_prefixes_are_refused(positions: list[int] | None, prefix: list[int]) -> None:
    given = None if positions is None else torch.tensor([positions])
    with pytest.raises(Misuse, match=r"all tokens of a document have the same.*context.split"):
        Context(None).mask(given, 4, prefix=torch.tensor([prefix]))


def test_a_prefix_within_a_window_or_of_other_tokens_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a prefix and a window of 4 tokens.*give one of the two"):
        Context(None).mask(None, 16, 4, prefix=torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(Misuse, match=r"16 tokens of each sequence and prefix lengths of 8"):
        Context(None).mask(None, 16, prefix=torch.zeros(1, 8, dtype=torch.int64))


def test_a_window_computes_no_more_than_it_sees_and_needs_no_mask() -> None:
    tokens, window, cpu = 8192, 1024, torch.device("cpu")
    runs = [TokenRun(0, 0, tokens)]
    tiles = list(AttentionMask.of(runs, None, None, window).tiles(runs, cpu))
    assert not any(isinstance(seen, Tensor) for _, _, seen in tiles)
    pairs = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in tiles)
    assert pairs < tokens * (window + attention_masks.WINDOW_ROWS)


def test_a_window_as_long_as_the_sequence_is_causal() -> None:
    runs = [TokenRun(0, 0, 64)]
    assert AttentionMask.of(runs, None, None, 64, 4) == AttentionMask.of(runs, None)
    assert AttentionMask.of(runs, None, None, 63) != AttentionMask.of(runs, None)


@pytest.mark.parametrize(("window", "stride"), [(0, None), (True, None), (2.5, None), (4, 0), (4, -1)])
def test_windows_and_strides_that_count_nothing_are_refused(window: Any, stride: Any) -> None:
    with pytest.raises(BadInput, match="give an int, 1 or more, or None"):
        Context(None).mask(None, 16, window, stride)


def test_a_stride_without_a_window_is_refused() -> None:
    with pytest.raises(BadInput, match="stride 4 without a window"):
        Context(None).mask(None, 16, None, 4)
