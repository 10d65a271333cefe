"""A training program for tests of what a process leaves behind: python -m tests.engine.offload.program TASK FOLDER."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import terrazzo as tz
from terrazzo import checkpoint
from tests.engine.offload.test_swap_faults import failing
from tests.engine.toys import Net, adamw, batch, loss_of, train

PLANS = {"exit": "zero3@cpu", "live": "zero3@nvme-all", "fail": "zero3@nvme-all"}


def main(task: str, folder: Path) -> None:
    """`exit`: end right behind a step. `live`: train until killed. `fail`: the second rank's drive is full one day."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    model = Net(width=640 if task == "exit" else 96)
    plan = tz.Plan.named(PLANS[task])
    offload = tz.Offload(path=folder / "swap", block_mib=1 / 256, direct=False).used_under(plan)
    model, optimizer = tz.shard(model, adamw(model.parameters()), plan, offload=offload)
    train(model, optimizer, 2, rank)
    if task == "exit":
        loss_of(model, batch(2)).backward()
        optimizer.step()
        return
    checkpoint.save(str(folder / "saved"), model, optimizer, {})
    print("trained", flush=True)
    if task == "fail" and rank == 1:
        os.pwritev = failing(os.pwritev, errno.ENOSPC, after=50)
    train(model, optimizer, 10_000, rank, first=2)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
