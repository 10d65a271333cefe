"""What only processes of their own can show: ends of every kind, a failure that reaches the other rank, the Saver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import engine_of
from tests.engine.offload.runs import TIERS
from tests.engine.toys import Net, adamw, train
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes


def started(task: str, folder: Path, rank: int = 0, ranks: int = 1) -> subprocess.Popen[str]:
    (folder / "swap").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.engine.offload.program", task, str(folder)]
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, env=environment, stdout=out, stderr=out, text=True)


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "swap"))


def test_a_program_that_ends_right_behind_a_step_ends_well(tmp_path: Path) -> None:
    """The update is under way: it must not be cut off within a kernel, which aborts the process."""
    program = started("exit", tmp_path)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    assert left_in(tmp_path) == []


def test_a_killed_program_leaves_files_that_the_next_start_removes(tmp_path: Path) -> None:
    program = started("live", tmp_path)
    assert program.stdout is not None
    assert program.stdout.readline() == "trained\n"
    assert len(left_in(tmp_path)) == 1
    with fake_group(1):
        offload = tz.Offload(path=tmp_path / "swap", direct=False)
        beside, _ = tz.shard(Net(96), adamw, "zero3@nvme-all", offload=offload)
        assert len(left_in(tmp_path)) == 2, "it has taken the file of a living program"
        program.send_signal(signal.SIGKILL)
        program.communicate()
        assert len(left_in(tmp_path)) == 2
        model, optimizer = tz.shard(Net(96), adamw, "zero3@nvme-all", offload=offload)
        swap = [engine_of(found).store.drive.disk.paths[0].name for found in (beside, model)]  # type: ignore[union-attr]
        assert left_in(tmp_path) == sorted(swap)
        checkpoint.load(str(tmp_path / "saved"), model, optimizer)
        train(model, optimizer, 1, 0)


def test_a_drive_that_fails_one_rank_ends_all(tmp_path: Path) -> None:
    """With the reason on the rank that has it, and soon; nothing stays behind and the checkpoint loads."""
    programs = [started("fail", tmp_path, rank, 2) for rank in range(2)]
    errors = [program.communicate(timeout=60)[1] for program in programs]
    assert [program.returncode for program in programs] == [1, 1], errors
    assert "SwapFailed: The swap file" in errors[1]
    assert "No space left on device" in errors[1]
    assert "Error" in errors[0].splitlines()[-1]
    assert left_in(tmp_path) == []
    with fake_group(1):
        model, optimizer = tz.shard(Net(96), adamw, "zero1")
        checkpoint.load(str(tmp_path / "saved"), model, optimizer)
        train(model, optimizer, 1, 0)


# -- the Saver -------------------------------------------------------------------------------------------------


def save_both_ways(folder: str, tiers: str) -> None:
    """The same moments saved in the background, and at once: updates go on while copies are written."""
    torch.manual_seed(0)
    model = Net(width=96)
    offload = tz.Offload(path=tempfile.mkdtemp(dir=folder), block_mib=1 / 256, depth=2, direct=False)
    plan = tz.Plan.named("zero3").on(**TIERS[tiers])
    model, optimizer = tz.shard(
        model, adamw(model.parameters()), plan, precision="bf16", offload=offload.used_under(plan)
    )
    with checkpoint.Saver(model, optimizer) as saver:
        for index in range(3):
            saver.save(f"{folder}/background-{index}", {"step": index})
            checkpoint.save(f"{folder}/at-once-{index}", model, optimizer, {"step": index})
            train(model, optimizer, 2, dist.get_rank(), first=2 * index)


def test_a_background_save_is_of_its_moment(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(save_both_ways, str(tmp_path), "shares")
    for index in range(3):
        sources = [checkpoint.open_source(f"{tmp_path}/{how}-{index}") for how in ("background", "at-once")]
        assert sources[0].tensors == sources[1].tensors
        for name, info in sources[0].tensors.items():
            for kind in info.states:
                assert torch.equal(*(source.whole(name, kind) for source in sources)), (name, kind)
