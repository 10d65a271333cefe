"""Windows, strides and documents tile by tile, against plain PyTorch with a square boolean mask."""

from __future__ import annotations

from itertools import product

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
PATTERNS = [(1, None), (3, None), (11, None), (12, None), (13, None), (47, None), (48, None)]
STRIDES = [(1, 4), (4, 4), (6, 4), (13, 5), (3, 17), (20, 47), (5, 60)]


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


def worst_difference(documents: str, window: int | None, stride: int | None, dtype: torch.dtype) -> float:
    """Of outputs and gradients, relative to the largest of their kind, or to 1: some of a window of one token are 0."""
    torch.manual_seed(0)
    positions = positions_of(DOCUMENTS[documents])
    whole = [torch.randn(2, heads, TOKENS, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    out = F.scaled_dot_product_attention(*whole, attn_mask=square(positions, window, stride), enable_gqa=True)
    grad = torch.randn_like(out)
    context = Context(None)
    given = None if documents == "one" else positions
    found = context.attend(*whole, context.mask(given, TOKENS, window, stride))
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


def test_narrow_dtypes() -> None:
    assert worst_difference("several", 13, 5, torch.bfloat16) < 3e-2


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


def test_a_stride_without_a_window_is_refused() -> None:
    with pytest.raises(BadInput, match="stride 4 without a window"):
        Context(None).mask(None, 16, None, 4)
