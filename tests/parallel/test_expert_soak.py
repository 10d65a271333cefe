"""Experts for thousands of steps with routes drawn at random: no hang, no leak, and what dense matrices learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.telemetry import resident_bytes
from tests.helpers.threads import run_in_threads
from tests.parallel.test_expert import COUNT, HIDDEN, WIDTH, Several

RANKS, MOST_ROWS, BYTES = 4, 6, 16 << 20
MESHES = [("zero3", 2), ("zero1", 4), ("zero2@cpu", 2), ("zero3", 4)]
"""One after the other goes on with the run."""


def drawn(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert, how many are for each, and what is to come of them; the same wherever it is asked."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    counts = torch.randint(0, MOST_ROWS, (COUNT,), generator=generator)
    if step % 7 == 0:
        counts[: COUNT // 2] = 0  # half of the experts have nothing from anybody
    if step % 5 == rank:
        counts.zero_()  # a rank without rows
    if step % 11 == 0:
        counts[1:] = 0  # all tokens to one expert
    rows = torch.randn(int(counts.sum()), WIDTH, generator=generator)
    return rows, counts, torch.randn(len(rows), HIDDEN, generator=generator)


def skips(step: int) -> bool:
    """Nobody calls the experts for a while."""
    return step % 50 in (20, 21, 22)


def loss_of(output: Tensor, wanted: Tensor) -> Tensor:
    return (output - wanted).square().sum()


def dense(steps: int) -> tuple[list[float], Tensor]:
    """In one process: losses over the rows of all ranks, and the matrices at the end."""
    matrix, scale = Several().stacks[0].matrix.detach().requires_grad_(), torch.ones((), requires_grad=True)
    optimizer, losses = torch.optim.SGD([matrix, scale], lr=2e-5, momentum=0.5), []
    for step in range(steps):
        total = scale * 0.0
        for rows, counts, wanted in (drawn(step, rank) for rank in range(RANKS)):
            parts = zip(rows.split(counts.tolist()), matrix.unbind(), strict=True)
            if not skips(step):
                total = total + loss_of(scale * torch.cat([F.linear(own, each) for own, each in parts]), wanted)
        (total / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(float(total.detach()))
    return losses, matrix.detach()


def trained(folder: Path, number: int, first: int, steps: int, rank: int) -> tuple[list[float], int, Tensor]:
    """Losses of this rank's rows, by how much memory has grown since the first tenth, and the matrices."""
    plan, ep = MESHES[number]
    mesh = tz.mesh(ep=ep, device="cpu")
    model: Any = tz.parallelize(Several(), mesh)
    model, optimizer = tz.shard(
        model, lambda p: torch.optim.SGD(p, lr=2e-5, momentum=0.5), plan, mesh=mesh, units=["stacks.*"]
    )
    if number:
        checkpoint.load(folder / str(number - 1), model, optimizer)
    losses, early = [], 0
    for step in range(first, first + steps):
        rows, counts, wanted = drawn(step, rank)
        loss = torch.zeros(())
        if not skips(step):
            loss = loss_of(model(rows, counts), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(float(loss.detach()))
        early = (resident_bytes() or 0) if step == first + steps // 10 else early
    grown = (resident_bytes() or 0) - early
    checkpoint.save(folder / str(number), model, optimizer)
    return losses, grown, tz.full_state_dict(model, keep=True)["stacks.0.matrix"]


def soak(folder: Path, steps: int) -> None:
    """`steps` on each of the meshes."""
    expected, matrix = dense(steps * len(MESHES))
    found: list[float] = []
    for number in range(len(MESHES)):
        ranks = run_in_threads(
            RANKS, lambda rank, number=number: trained(folder, number, number * steps, steps, rank), timeout_s=600.0
        )
        found += [sum(each) for each in zip(*(losses for losses, _, _ in ranks), strict=True)]
        assert max(grown for _, grown, _ in ranks) < BYTES
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-3)
    for _, _, whole in ranks:
        torch.testing.assert_close(whole, matrix, rtol=1e-4, atol=1e-4)


def test_experts_learn_what_dense_matrices_do(tmp_path: Path) -> None:
    soak(tmp_path, 8)


@pytest.mark.long
def test_experts_for_2000_steps(tmp_path: Path) -> None:
    soak(tmp_path, 500)
