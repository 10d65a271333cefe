"""What runs inside one process of the GPU benchmark: one contender's model, its steps, their times and their memory.

At world 1 the process group is real (NCCL on CUDA, gloo on the CPU) and the contenders train one batch over and over.
Above that it is torch's `fake` group: kernels and memory are those of one rank of many, and nothing is sent. What such
a run computes means nothing, so weights are drawn anew before each step: a GPU is faster on zeros and NaN.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks.gpu.contenders import CONTENDERS, Loop, Setup
from terrazzo.engine import checkpoint_activations, compile_units
from terrazzo.telemetry import PeakMemory
from terrazzo.train.model.decoder import Block, Decoder

WARMUP = 2
"""Steps before those that count, in each turn."""


class NoRoom(RuntimeError):
    """The device has less free memory than the contender is estimated to need."""


class Rank:
    """One contender, built, warm and ready for its turns."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.device = setup, join(setup.device, setup.world)
        check_room(setup, free_bytes(self.device))
        torch.manual_seed(0)
        self.loop = self._build()
        config = setup.workload.model
        size, generator = (setup.workload.batch, config.max_sequence_length + 1), torch.Generator().manual_seed(1)
        drawn = torch.randint(config.vocab_size, size, generator=generator)
        self.inputs, self.targets = drawn[:, :-1].to(self.device), drawn[:, 1:].to(self.device)
        self.losses: list[Tensor] = []
        self._warm_up()
        self._let_go()

    def turn(self) -> dict[str, Any]:
        """Seconds of each step, bytes of the peak over them (CPU: of the process), the last loss."""
        self._warm_up()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        step_s = timed(self._step, self.setup.steps, self.device, self._refresh)
        peak_bytes, loss = PeakMemory(self.device).peak_bytes, float(self.losses[-1])
        self._let_go()
        return {"step_s": step_s, "peak_bytes": peak_bytes, "loss": loss}

    def profile(self) -> dict[str, float | None]:
        """Seconds of a step in which the GPU was busy, and of those that a step's fake gathers take by themselves."""
        self._warm_up()
        self._refresh()
        busy_s = traced_busy_s(self._step) if self.device.type == "cuda" else None
        self._let_go()
        return {"busy_s": busy_s, "fake_gather_s": self._fake_gather_s() if self.setup.world > 1 else None}

    def _build(self) -> Loop:
        # In a large job no rank could hold the whole model, so none does here.
        with torch.device("meta" if self.setup.world > 1 else self.device):
            model = Decoder(self.setup.workload.model)
        # Blocks are treated before the contender wraps them: all of them run the same kernels.
        checkpoint_activations(model, "full" if self.setup.workload.checkpointing else "none", units=[Block])
        if self.setup.compiler is not None:
            compile_units(model, units=[Block], backend=self.setup.compiler)
        return CONTENDERS[self.setup.contender](model, self.setup)

    def _step(self) -> None:
        logits = self.loop.model(self.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        self.losses.append(loss.detach())
        del logits
        self.loop.backward(loss)
        self.loop.update()

    def _warm_up(self) -> None:
        for _ in range(WARMUP):
            self._refresh()
            self._step()

    @torch.no_grad()
    def _refresh(self) -> None:
        """After a fake reduction, draw this rank's shard of the weights anew."""
        if self.setup.world > 1:
            for shard in self.shards():
                shard.uniform_(-0.02, 0.02)

    def shards(self) -> list[Tensor]:
        """This rank's part of the weights that the optimizer steps."""
        if self.loop.shards is not None:
            return list(self.loop.shards)
        stepped = (shard for group in self.loop.optimizer.param_groups for shard in group["params"])
        return [shard.to_local() if isinstance(shard, DTensor) else shard for shard in stepped]

    def _let_go(self) -> None:
        """Keep no memory but the states: other contenders use the device now."""
        self.losses.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _fake_gather_s(self) -> float:
        """The root is gathered once, each block twice."""
        config = self.setup.workload.model
        root, block = self.setup.workload.unit_numels()
        sizes = [root] + [block] * (2 * config.layers)
        largest = torch.rand(max(sizes) + self.setup.world, dtype=torch.bfloat16, device=self.device)
        shares = [-(-size // self.setup.world) for size in sizes]

        def gather_all() -> None:
            for share in shares:
                gather(largest[: share * self.setup.world], largest[:share])

        return statistics.median(timed(gather_all, 5, self.device))


def join(device: str, world: int) -> torch.device:
    """Join a group of `world` ranks, alone in a real one or with nobody behind the others; this rank's device."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR=device)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    if world == 1:
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return torch.device("cuda", 0) if device == "cuda" else torch.device(device)


# -- memory --------------------------------------------------------------------------------------------------------


def needed_bytes(setup: Setup) -> int:
    """About what the hungriest contender needs on this rank, building included; a tenth is added for fragments."""
    workload, config = setup.workload, setup.workload.model
    root, block = workload.unit_numels()
    # bf16 and fp32 weights, Adam's two moments, gradients of 16 and 32 bit; of offloaded ones the ends
    states = (8 if setup.offload else 20) * workload.numel // setup.world
    gathered = 8 * (root + 2 * block) if setup.world > 1 else 0  # weight, gradient, and its fp32 copy to be reduced
    of_block = 2 * (16 * config.dim + 6 * config.ffn_dim)  # activations of one token, some of them in fp32
    kept = 2 * config.dim * config.layers + of_block if workload.checkpointing else of_block * config.layers
    running = gathered + workload.tokens * (kept + 16 * config.vocab_size)  # logits in bf16 and fp32, and gradients
    # Terrazzo compares the ranks' initial values, the root's first: on CUDA with two 64-bit numbers for every byte.
    building = 4 * root + 68 * config.vocab_size * config.dim if setup.world > 1 else 0
    return int(1.1 * max(states + running, building))


def free_bytes(device: torch.device) -> int:
    """Memory that a process could still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_room(setup: Setup, available_bytes: int) -> None:
    """Raises: `NoRoom` before anything is allocated."""
    needed = needed_bytes(setup)
    if needed > available_bytes:
        raise NoRoom(f"needs about {needed / 2**30:.0f} GiB, {available_bytes / 2**30:.0f} GiB are free")


# -- time ----------------------------------------------------------------------------------------------------------


def timed(
    step: Callable[[], object], count: int, device: torch.device, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds of each of `count` calls, each after an untimed `before()`.

    On CUDA the device's own clock is read, and the host never waits for it: it may run ahead as it does in training.
    """
    if device.type != "cuda":
        return [_wall_s(step, before) for _ in range(count)]
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize(device)
    for begin, end in pairs:
        before()
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def _wall_s(step: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def traced_busy_s(step: Callable[[], object]) -> float | None:
    """Seconds in which the GPU ran at least one kernel or copy of `step`; None where the profiler sees none."""
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="terrazzo-gpu-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return busy_s(json.loads(path.read_text())["traceEvents"]) or None


def busy_s(events: Iterable[dict[str, Any]]) -> float:
    """Seconds covered by at least one kernel, copy or fill in a Chrome trace, whose times are in microseconds."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in kinds)
    covered = reached = 0.0
    for start, stop in spans:
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered / 1e6


# -- copy-out against views ----------------------------------------------------------------------------------------


class CopyOut:
    """Two ways to bring a unit's parameters to its modules: from this rank's fp32 shard to all of them in bf16.

    `views`: Terrazzo gathers into memory that the parameters are views of. `copies`: FSDP2 gathers into a buffer in
    which each rank's shards lie together, and copies every parameter out of it. Both allocate what they fill.
    """

    def __init__(self, device: str, world: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self.device, self.world = join(device, world), world
        numels = [math.prod(shape) for shape in shapes]
        self.shares = [-(-numel // world) for numel in numels]
        self.shard = torch.rand(sum(self.shares), device=self.device)
        self.full = self._empty()
        parts = self.full[: sum(numels)].split(numels)
        self.parameters = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.copied = [self.full.new_empty(world, share) for share in self.shares]
        self.turn()

    def turn(self) -> dict[str, float]:
        """Seconds of each way, the median of 10 calls."""
        ways = [self.views, self.copies]
        random.shuffle(ways)
        return {way.__name__: statistics.median(timed(way, 10, self.device, self.release)) for way in ways}

    def views(self) -> None:
        self.full.untyped_storage().resize_(self.full.nbytes)
        self._gather(self.full)

    def copies(self) -> None:
        gathered = self._empty()
        self._gather(gathered)
        for out in self.copied:
            out.untyped_storage().resize_(out.nbytes)
        torch.split_with_sizes_copy(gathered.view(self.world, -1), self.shares, dim=1, out=self.copied)

    def release(self) -> None:
        """Give back what either way has filled."""
        for tensor in (self.full, *self.copied):
            tensor.untyped_storage().resize_(0)

    def _empty(self) -> Tensor:
        return torch.empty(self.world * self.shard.numel(), dtype=torch.bfloat16, device=self.device)

    def _gather(self, full: Tensor) -> None:
        own = full[: self.shard.numel()]
        own.copy_(self.shard)
        gather(full, own)


def gather(full: Tensor, own: Tensor) -> None:
    """All-gather `own` into `full`; torch 2.13 changed the name."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(full, own)
