"""What a load reads: the rank's share of the check, then what it holds, and no more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.local import LocalFolder
from terrazzo.checkpoint.manifest import BLOCK_BYTES
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


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank has read from a checkpoint's files."""
    found: Counter[int] = Counter()
    real = LocalFolder.read_into

    def counted(self: LocalFolder, file: str, offset: int, buffer: memoryview) -> None:
        found[dist.get_rank()] += len(buffer)
        real(self, file, offset, buffer)

    monkeypatch.setattr(LocalFolder, "read_into", counted)
    return found


@pytest.mark.parametrize(
    ("plan", "precision", "ranks", "edges"),
    [
        *((plan, precision, 4, 0) for plan in ("zero1", "zero3") for precision in ("fp32", "bf16")),
        ("zero1", "bf16", 2, 3),
        ("zero3", "fp32", 3, 2),
    ],
)
def test_a_rank_reads_its_own_ranges_once(
    plan: str, precision: str, ranks: int, edges: int, tmp_path: Path, read: Counter[int]
) -> None:
    """Beside them its share of the check, 64 KiB of descriptions, and at the edges of ranges whole blocks.

    A block has one digest, so that a part of one which another rank has checked is read with the rest of it. Ranks
    that are as many as they were have no such edges.
    """
    where = tmp_path / "saved"
    run_in_threads(4, lambda rank: checkpoint.save(where, *build("zero1", "bf16"), {}))

    def loaded(rank: int) -> None:
        model, optimizer = build(plan, precision)
        dist.barrier()
        read.pop(rank, None)
        checkpoint.load(where, model, optimizer)

    run_in_threads(ranks, loaded)
    checked = needed = 12 * NUMEL / ranks  # masters and two moments in fp32
    for rank in range(ranks):
        assert read[rank] <= checked + 1.1 * needed + 65536 + edges * BLOCK_BYTES, rank
