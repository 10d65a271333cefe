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
from tests.helpers.programs import Program, on_ranks

pytestmark = pytest.mark.processes


ROOT = Path(__file__).parents[3]


def words(task: str, folder: Path) -> list[str]:
    (folder / "swap").mkdir(exist_ok=True)
    return ["-m", "tests.engine.offload.program", task, str(folder)]


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "swap"))


@pytest.mark.long
def test_a_program_that_ends_right_behind_a_step_ends_well(tmp_path: Path) -> None:
    """The update is under way: it must not be cut off within a kernel, which aborts the process."""
    command = [sys.executable, *words("exit", tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert left_in(tmp_path) == []


def test_a_killed_program_leaves_files_that_the_next_start_removes(tmp_path: Path) -> None:
    program = Program(*words("live", tmp_path), cwd=ROOT)
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
        swap = [engine_of(found).store.nvme.swap.paths[0].name for found in (beside, model)]  # type: ignore[union-attr]
        assert left_in(tmp_path) == sorted(swap)
        checkpoint.load(str(tmp_path / "saved"), model, optimizer)
        train(model, optimizer, 1, 0)


def test_a_drive_that_fails_one_rank_ends_all(tmp_path: Path) -> None:
    """With the reason on the rank that has it, and soon; nothing stays behind and the checkpoint loads."""
    ranks = on_ranks(2, *words("fail", tmp_path), cwd=ROOT)
    errors = [rank.stderr for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    assert "SwapFailed: The swap file" in errors[1]
    assert "No space left on device" in errors[1]
    assert "ConnectionLost: Rank 1 has ended or failed" in errors[0].splitlines()[-1]
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
