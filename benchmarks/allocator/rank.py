"""One of eight ranks on the simulated CUDA device: it trains, records what it allocates, and replays that.

    python -m benchmarks.allocator.rank FILE JOBS

A small model is trained, and each size is multiplied by `SCALE`: weights and activations are products of two sizes, so
that is a model whose width, vocabulary and sequences are `SCALE ** 0.5` times as long. The other ranks
are not there: what is allocated does not depend on what arrives.
"""

from __future__ import annotations

import hostcuda

hostcuda.load()

# isort: split
import gc
import json
import random
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F

import terrazzo as tz
from benchmarks.allocator.jobs import LONGEST, MODEL, RANKS, SCALE, Job
from hostcuda import caching, collectives, memory
from hostcuda.device import start
from terrazzo.engine.mesh.meshes import data_mesh
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig


class OneOfMany(collectives._Nccl):
    """A communicator whose other ranks have what this one has, and are not there."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(dist.HashStore(), 0, 1, options)
        self._ranks = size

    def size(self) -> int:
        return self._ranks

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        return self._ranks * [collectives._alias(tensor).clone().view(-1)]


CONFIG = DecoderConfig(**MODEL)


def sharded(plan: str, axes: int, folder: str) -> tuple[nn.Module, Any]:
    """The model by a plan of the table, or by FSDP2; bf16, gradients summed in fp32, a fused AdamW."""
    mesh = data_mesh("cuda", *((2, RANKS // 2) if axes == 2 else (RANKS,)))
    torch.manual_seed(0)
    with torch.device("cpu" if plan == "fsdp2" else "meta"):
        model = Decoder(CONFIG)
    adamw = partial(torch.optim.AdamW, fused=True)
    if plan != "fsdp2":
        offload = tz.Offload(threads=1, path=folder).used_under(tz.Plan.named(plan))
        return tz.shard(model, adamw, plan, units=[Block], precision="bf16", mesh=mesh, offload=offload)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model, adamw(model.parameters())


def trained(job: Job, folder: str) -> list[int]:
    """Trains as the job says; the number of events after the building and after each step."""
    model, optimizer = sharded(job.plan, job.axes, folder)
    lengths, marks = random.Random(0), [memory.count()]
    for _ in range(job.steps):
        length = lengths.randint(LONGEST // 4, LONGEST) if job.varied else LONGEST
        tokens = torch.randint(CONFIG.vocab_size, (1, length + 1)).to("cuda")
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
        marks.append(memory.count())
    return marks


def measured(job: Job, folder: str) -> dict[str, Any]:
    """Peaks of a job, in bytes, with segments of fixed size and with expandable ones."""
    memory.begin()
    marks = trained(job, folder)
    gc.collect()
    memory.end()
    events = [event._replace(size=event.size * SCALE) for event in memory.events()]
    found = asdict(job) | {"events_a_step": (marks[-1] - marks[1]) // (job.steps - 1)}
    return found | {kind: held(events, marks, kind == "expandable", not job.varied) for kind in ("fixed", "expandable")}


def held(events: list[caching.Event], marks: list[int], expandable: bool, squeezed: bool) -> dict[str, Any]:
    """Of one kind of segments: the peaks, what is reserved after each step; and the smallest device, to 1 %."""
    series = list(caching.replay(events, expandable))
    peak = caching.peak(series)
    found = {**peak._asdict(), "reserved_after": [series[mark - 1].reserved for mark in marks]}
    return found | {"least": least(events, expandable, peak)} if squeezed else found


def least(events: list[caching.Event], expandable: bool, peak: caching.Held) -> int:
    """Bytes of a device on which all of it just succeeds."""
    few, enough = peak.requested, peak.reserved
    while enough - few > 0.01 * peak.requested:
        middle = (few + enough) // 2
        try:
            caching.peak(caching.replay(events, expandable, middle))
            enough = middle
        except caching.NoMemory:
            few = middle
    return enough


def main() -> None:
    """Run the jobs, each in a file of its rows as soon as it is done."""
    out, jobs = Path(sys.argv[1]), [Job(**job) for job in json.loads(sys.argv[2])]
    start(home=0, devices=RANKS)
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d.ProcessGroupNCCL = OneOfMany  # type: ignore[misc, assignment]
    dist.init_process_group("cpu:fake,cuda:nccl", store=FakeStore(), rank=0, world_size=RANKS)
    rows: list[dict[str, Any]] = []
    for job in jobs:
        with tempfile.TemporaryDirectory(prefix="terrazzo-allocator-") as folder:
            rows.append(measured(job, folder))
        print(f"{job.plan}, {job.steps} steps", file=sys.stderr, flush=True)
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
