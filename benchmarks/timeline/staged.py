"""A step of a pipeline, in its ranks: for how long the streams that compute have nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from benchmarks.timeline.measure import become
from benchmarks.timeline.model import DEPTH, SCALE, WIDTH, Block
from benchmarks.timeline.waits import waits
from hostcuda.device import report, virtual

__all__ = ["idle", "stages"]


def stages(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each schedule, number of micro-batches and cell."""
    for schedule in job["schedules"]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(SCALE, WIDTH // SCALE), *(Block(WIDTH // SCALE) for _ in range(DEPTH)))
        mesh = tz.mesh(pp=job["ranks"], device="cuda")
        tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule["schedule"], schedule["chunks"]))
        model, _ = tz.shard(model, torch.optim.AdamW, "zero0", units=[Block], precision="bf16", mesh=mesh)
        for cell in job["cells"]:
            for micro_batches in job["micro_batches"]:
                become(cell["figures"])
                found = idle(model, micro_batches, int(cell["cell"]["tokens"]) // SCALE)
                yield {**schedule, "ranks": job["ranks"], "micro_batches": micro_batches, **cell["cell"], **found}
        if report.faults:
            raise RuntimeError(f"{schedule}: " + "\n".join(map(str, report.faults)))


def idle(model: nn.Module, micro_batches: int, tokens: int) -> dict[str, Any]:
    """Of `tz.step`, from when all ranks begin until the last one ends.

    Args:
        tokens: of a micro-batch.

    Returns:
        `step_s`; `idle`, the share of it in which the stream that computes runs no kernel, over all ranks; and
        `waits_s`, of this rank, by what is waited for.
    """
    batches = [(torch.arange(tokens, device="cuda") % SCALE, None) for _ in range(micro_batches)]

    def loss_of(output: Tensor, target: None) -> Tensor:
        return output.float().square().mean()

    tz.step(model, batches, loss_of)  # the first of a form sends shapes
    model.zero_grad()
    torch.cuda.synchronize()
    dist.all_reduce(torch.ones(1, device="cuda"))  # from here on all clocks are alike
    torch.cuda.synchronize()
    begun_s, before_s = virtual.now_s(), virtual.spent_s()["kernels"]
    with virtual.tracing() as spans:
        tz.step(model, batches, loss_of)
        ended_s = virtual.queued_s()
        torch.cuda.synchronize()
    model.zero_grad()
    told = torch.tensor([ended_s - begun_s, virtual.spent_s()["kernels"] - before_s], dtype=torch.float64)
    rows = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, told)
    steps, busy = torch.stack(rows).unbind(1)
    step_s = float(steps.max())
    share = 1 - float(busy.mean()) / step_s
    return {"step_s": step_s, "idle": share, "waits_s": waits(spans, begun_s, ended_s)}
