"""A drive that fails ends the run with a clear error, never with wrong numbers, and the last checkpoint still loads."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.errors import BadInput, SwapFailed
from tests.engine.offload.runs import MODES, SMALL_BLOCK, TIERS
from tests.engine.offload.test_swap_faults import failing
from tests.engine.toys import Net, adamw, assert_equal, batch, full_parameters, loss_of, on_ranks, sharded, train
from tests.helpers.fake import fake_group

RESTART = "Start again from the last checkpoint"


def built(folder: Path, tiers: str = "all on nvme", mode: Any = "overlapped", seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    model = Net(width=96, depth=2)
    options = {"block_mib": SMALL_BLOCK, "depth": 2, "direct": False, **settings}
    plan = tz.Plan.named("zero3").on(**TIERS[tiers])
    offload = tz.Offload(path=folder, step=mode, **options).used_under(plan)
    return tz.shard(model, adamw(model.parameters()), plan, offload=offload)


def swap_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("terrazzo-swap"))


def truncate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in swap_files(folder):
        os.truncate(path, 4096)


def corrupt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of each page."""
    for path in swap_files(folder):
        found = bytearray(path.read_bytes())
        for position in range(77, len(found), 4096):
            found[position] ^= 1
        path.write_bytes(found)  # into the same file


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, errno.ENOSPC, after=3))


def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO, after=3))


FAULTS: list[tuple[Callable[..., None], str]] = [
    (truncate, f"ends too early .* at byte 4096: .*{RESTART}"),
    (corrupt, f"holds other bytes than were written .*{RESTART}"),
    (full, rf"cannot be written at byte \d+ \(No space left on device\).*{RESTART}"),
    (broken, rf"cannot be read \(Input/output error\) at byte \d+: .*{RESTART}"),
]


PLACES = [
    ("weight on nvme", "overlapped"),
    ("grad on nvme", "overlapped"),
    *((tiers, mode) for tiers in ("optim on nvme", "all on nvme") for mode in MODES),
]
CASES = [
    pytest.param(fault, says, tiers, mode, id=f"{fault.__name__}-{tiers}-{mode}")
    for fault, says in FAULTS
    for tiers, mode in PLACES
    if (fault, tiers) != (corrupt, "grad on nvme")  # no gradient is there between steps
]


def a_step_and_a_forward(model: Any, optimizer: Any) -> None:
    train(model, optimizer, 1, 0, first=2)
    loss_of(model, batch(3))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize(("fault", "says", "tiers", "mode"), CASES)
def test_a_fault_is_an_error_within_a_step(
    fault: Callable[..., None], says: str, tiers: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from then on nothing goes on as if nothing had been; other models and checkpoints do not suffer."""
    swap, saved = tmp_path / "swap", str(tmp_path / "saved")
    swap.mkdir()
    with fake_group(1):
        model, optimizer = built(swap, tiers, mode, digest=fault is corrupt)
        train(model, optimizer, 2, 0)
        checkpoint.save(saved, model, optimizer, {})
        wanted = full_parameters(model)
        with monkeypatch.context() as patch:
            fault(swap, patch)
            with pytest.raises(SwapFailed, match=f"'{swap}/terrazzo-swap-.*{says}"):
                a_step_and_a_forward(model, optimizer)
        for _ in range(2):
            with pytest.raises((tz.TerrazzoError, RuntimeError)):
                train(model, optimizer, 2, 0, first=3)
        if tiers != "grad on nvme":  # what is saved is on the device
            with pytest.raises((tz.TerrazzoError, RuntimeError)):
                checkpoint.save(str(tmp_path / "torn"), model, optimizer, {})
            assert not (tmp_path / "torn").exists()
        other, other_optimizer = built(swap, tiers, mode, seed=1)
        checkpoint.load(saved, other, other_optimizer)
        assert_equal(full_parameters(other), wanted)
        train(other, other_optimizer, 1, 0, first=2)


def test_two_runs_in_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    """Each start removes what dead runs have left: what lives is not theirs."""

    def body(folders: list[Path]) -> list[list[float]]:
        runs = [built(folder, seed=seed) for seed, folder in enumerate(folders)]
        losses: list[list[float]] = [[] for _ in runs]
        for number in range(3):
            for (model, optimizer), found in zip(runs, losses, strict=True):
                found += train(model, optimizer, 1, 0, first=number)
        assert len({path for folder in folders for path in swap_files(folder)}) == len(runs)
        return losses

    apart = [tmp_path / "a", tmp_path / "b"]
    for folder in apart:
        folder.mkdir()
    with fake_group(1):
        assert body([tmp_path, tmp_path]) == body(apart)


def test_a_folder_without_room_is_refused_before_anything_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank, whichever it is that has no room; the model is as it was and can be sharded in another way."""
    real, made = os.posix_fallocate, []

    def allocate(descriptor: int, offset: int, length: int) -> None:
        made.append(length)
        if len(made) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    base = Net()

    def body(rank: int) -> tuple[str, list[float]]:
        model = copy.deepcopy(base)
        optimizer = adamw(model.parameters())
        with pytest.raises(BadInput) as caught:
            tz.shard(model, optimizer, "zero3@nvme-all", offload=tz.Offload(path=tmp_path, direct=False))
        return str(caught.value), train(*tz.shard(model, optimizer, "zero3"), 1, rank)

    first, second = on_ranks(2, body)
    said = sorted((first[0], second[0]), key=len)
    assert "cannot do its part" in said[0]
    assert "does not fit" in said[1]
    monkeypatch.undo()
    assert [first[1], second[1]] == on_ranks(2, lambda rank: train(*sharded(base), 1, rank))
