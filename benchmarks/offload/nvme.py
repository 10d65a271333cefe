"""The optimizer's step from drives: the engine's beside what the disk and the CPU need, and DeepSpeed's ZeRO-Infinity.

One process, one decoder in bf16 whose fp32 master weights and moments lie in files. The gradients of each step come
from a short backward, which is not timed. DeepSpeed keeps its gradients in files too, and reads them within the step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import terrazzo as tz
from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.loops import HYPERPARAMETERS
from benchmarks.cpu.models import UNITS
from benchmarks.cpu.rank import join
from benchmarks.offload.drive import settings
from benchmarks.offload.turns import Others, Turns, attempt, in_fresh_process, seconds, take_turns
from terrazzo.engine import engine_of
from terrazzo.engine.offload.host_arena import HostArena
from terrazzo.engine.offload.nvme.swap_space import SwapSpace

STATE_BYTES = 12  # of a parameter in files: master and two moments
SEQUENCE = 8  # short: a backward only has to leave gradients


@dataclass(frozen=True)
class Effort:
    """What is run: a case's model, steps of each contender, threads of the process, and which of `PEERS`."""

    case: str = "traffic"
    blocks: int = 7
    rounds: int = 9
    threads: int = 2
    peers: tuple[str, ...] = ("deepspeed", "deepspeed, tuned")

    def model(self) -> Case:
        """The case, cut to `blocks` blocks and short sequences, in bf16."""
        case = CASES[self.case]
        return replace(case, shape=replace(case.shape, blocks=self.blocks, sequence=SEQUENCE), precision="bf16")


@dataclass(frozen=True)
class Peer:
    """How DeepSpeed is set up: elements that are stepped on at once, and how files are read.

    Attributes:
        buffers: of `group` elements, in memory; a pipelined step needs those of two groups at least.
    """

    group: int
    buffers: int
    pipeline: bool
    block_bytes: int = 1 << 20
    depth: int = 8
    submitters: int = 1


PEERS = {
    "deepspeed": Peer(1_000_000_000, 5, pipeline=False),
    "deepspeed, tuned": Peer(16_000_000, 16, pipeline=True, block_bytes=4 << 20),
}
"""Its defaults (one group where the model is smaller than 1e9 elements), and the fastest found on a local disk."""


def measure(folder: Path, effort: Effort = Effort()) -> dict[str, Any]:
    """Seconds of a step, and of what bounds it."""
    with tempfile.TemporaryDirectory(prefix="terrazzo-bench-", dir=folder) as scratch:
        return in_fresh_process(_measure, Path(scratch), effort)


def _measure(folder: Path, effort: Effort) -> dict[str, Any]:
    join(0, 1, str(folder / "store"), limit_s=300)
    torch.set_num_threads(effort.threads)
    missing: dict[str, str] = {}
    case = effort.model()
    numel = sum(parameter.numel() for parameter in case.model("meta").parameters())
    floor, own = Floor(folder, -(-numel // 1024) * 1024), Own(case, folder)
    acts = {**floor.acts(), "terrazzo": own.step}
    for name in effort.peers:
        found = attempt(missing, name, partial(ZeroInfinity, case, folder / name, PEERS[name]))
        if found is not None:
            acts[name] = found.step
    others = Others()
    turns = take_turns(acts, effort.rounds, others)
    before = device_bytes()
    own.step()
    read, written = (after - then for after, then in zip(device_bytes(), before, strict=True))
    floor.disk.close()
    own.close()
    dist.destroy_process_group()
    return {
        "effort": asdict(effort),
        "about": case.describe(),
        "numel": numel,
        "direct": floor.disk.direct,
        "step_device_bytes": [read, written],
        "peers": {name: asdict(PEERS[name]) for name in effort.peers},
        "others": others.kept,
        "turns": turns,
        "missing": missing,
    }


def floor(turns: Turns) -> list[float]:
    """What a step cannot beat without reading and writing at once: by round, the transfers or the arithmetic."""
    rounds = zip(turns["read"], turns["write"], turns["adam"], strict=True)
    return [max(read + write, adam) for read, write, adam in rounds]


def device_bytes() -> tuple[int, int]:
    """Bytes that this process had the disk read and write, without the page cache (Linux: man 5 proc_pid_io)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


class Floor:
    """The same bytes through the same kind of file, and the same arithmetic in memory."""

    def __init__(self, folder: Path, numel: int) -> None:
        self.disk = SwapSpace(settings(folder), 0, STATE_BYTES * numel)
        arena = HostArena((STATE_BYTES + 16) * numel, pin_for=None)
        self.memory = arena.allocate(STATE_BYTES * numel)
        parts = [arena.allocate(4 * numel).view(torch.float32).fill_(1e-3) for _ in range(4)]
        parameter = nn.Parameter(parts[0])
        parameter.grad = parts[1]
        self.optimizer = AdamW([parameter], **HYPERPARAMETERS)
        self.optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": parts[2], "exp_avg_sq": parts[3]}

    def acts(self) -> dict[str, Callable[[], float]]:
        """Everything read, everything written, both at once, everything stepped."""
        half = self.memory.numel() // 8192 * 4096

        def both() -> None:
            transfers = [
                act(at, part)
                for at, part in ((0, self.memory[:half]), (half, self.memory[half:]))
                for act in (self.disk.read, self.disk.write)
            ]
            for transfer in transfers:
                transfer.wait()

        return {
            "read": lambda: seconds(lambda: self.disk.read(0, self.memory).wait()),
            "write": lambda: seconds(lambda: self.disk.write(0, self.memory).wait()),
            "read and write at once": lambda: seconds(both),
            "adam": lambda: seconds(self.optimizer.step),
        }


class Own:
    """`zero3@nvme`, updated within `optimizer.step()`."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, model = case, case.model()
        optimizer = AdamW(model.parameters(), **HYPERPARAMETERS)
        offload = tz.Offload(path=folder, step="synchronous")
        self.model, self.optimizer = tz.shard(
            model, optimizer, plan="zero3@nvme", units=[UNITS[0]], precision=case.precision, offload=offload
        )

    def step(self) -> float:
        _loss(self.model, self.case).backward()
        taken = seconds(self.optimizer.step)
        self.optimizer.zero_grad()
        return taken

    def close(self) -> None:
        engine_of(self.model).close()


class ZeroInfinity:
    """DeepSpeed's stage 3 with its optimizer state in files, and its own CPU AdamW."""

    def __init__(self, case: Case, folder: Path, peer: Peer) -> None:
        import deepspeed

        model, self.case = case.model(), case
        self.engine = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=infinity_config(folder, peer),
            dist_init_required=False,
        )[0]

    def step(self) -> float:
        self.engine.backward(_loss(self.engine, self.case))
        return seconds(self.engine.step)


def infinity_config(folder: Path, peer: Peer) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    options = {key: value for key, value in HYPERPARAMETERS.items() if key != "fused"}
    offload = {
        "device": "nvme",
        "nvme_path": os.fspath(folder),
        "buffer_count": peer.buffers,
        "pipeline_read": peer.pipeline,
        "pipeline_write": peer.pipeline,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": options},
        "zero_optimization": {"stage": 3, "sub_group_size": peer.group, "offload_optimizer": offload},
        "aio": {
            "block_size": peer.block_bytes,
            "queue_depth": peer.depth,
            "intra_op_parallelism": peer.submitters,
        },
        "steps_per_print": 1_000_000,
    }


def _loss(model: Callable[[Tensor], Tensor], case: Case) -> Tensor:
    tokens, targets = case.tokens(0, 0)
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
