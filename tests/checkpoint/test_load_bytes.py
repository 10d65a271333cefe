"""What a load reads: the rank's share of the check, then what it holds, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.format.manifest import BLOCK_BYTES
from terrazzo.checkpoint.storage import rank_file
from terrazzo.checkpoint.storage.local import LocalFolder
from tests.helpers.threads import exclusive, run_in_threads

WIDTH, LAYERS = 1100, 3
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)


def build(plan: str, precision: str) -> tuple[nn.Module, Any]:
    with exclusive():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model, optimizer = tz.shard(model, lambda p: torch.optim.Adam(p, lr=1e-3), plan, precision=precision)
    model(torch.ones(1, WIDTH)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks under zero1."""
    where = tmp_path_factory.mktemp("saved") / "saved"
    run_in_threads(4, lambda rank: checkpoint.save(where, *build("zero1", "bf16"), {}))
    return where


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank has read from a checkpoint's files."""
    found: Counter[int] = Counter()
    real = LocalFolder.read_each

    def counted(self: LocalFolder, file: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        found[dist.get_rank()] += sum(len(buffer) for _, buffer in parts)
        real(self, file, parts)

    monkeypatch.setattr(LocalFolder, "read_each", counted)
    return found


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank has compared with their digests."""
    found: Counter[int] = Counter()
    real = rank_file.digest

    def counted(data: memoryview) -> str:
        found[dist.get_rank()] += len(data)
        return real(data)

    monkeypatch.setattr(rank_file, "digest", counted)
    return found


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("caches", ["one", "each its own", "not known"])
@pytest.mark.parametrize(
    ("plan", "precision", "ranks", "edges"),
    [
        *((plan, precision, 4, 0) for plan in ("zero1", "zero3") for precision in ("fp32", "bf16")),
        ("zero1", "bf16", 2, 3),
        ("zero3", "fp32", 3, 2),
    ],
)
def test_a_rank_reads_its_own_ranges_once(
    plan: str,
    precision: str,
    ranks: int,
    edges: int,
    caches: str,
    saved: Path,
    read: Counter[int],
    hashed: Counter[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside them its share of the check, 64 KiB of descriptions, and at the edges of ranges whole blocks.

    A block has one digest, so that a part of one which a rank elsewhere has checked is read with the rest of it, and
    compared again: what is read here may be other bytes. Ranks that are as many as they were have no such edges, nor
    have those that read from the memory of one kernel.
    """
    if caches != "one":
        own: Callable[[LocalFolder], Any] = lambda _: [dist.get_rank()] if caches == "each its own" else None  # noqa: E731
        monkeypatch.setattr(LocalFolder, "cache", own)

    def loaded(rank: int) -> None:
        model, optimizer = build(plan, precision)
        dist.barrier()
        read.pop(rank, None)
        hashed.pop(rank, None)
        checkpoint.load(saved, model, optimizer)

    run_in_threads(ranks, loaded)
    checked = needed = 12 * NUMEL / ranks  # masters and two moments in fp32
    for rank in range(ranks):
        extra = 0 if caches == "one" else edges * BLOCK_BYTES
        assert read[rank] <= checked + 1.1 * needed + 65536 + extra, rank
    again = sum(hashed[rank] for rank in range(ranks)) - 12 * NUMEL
    assert again <= 65536 if caches == "one" or ranks == 4 else again > NUMEL
