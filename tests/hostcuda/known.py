"""Programs for what is known to be wrong or slow in the engine on CUDA: see test_known.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from hostcuda import memory
from hostcuda.device import report
from terrazzo.engine import FrozenFormat, compile_units, engine_of
from terrazzo.engine.buckets.weights.weight_gathers import unpack
from tests.hostcuda.cases import STEPS, Case, mesh_of, sharded, step, train

__all__ = [
    "decoding_takes", "integers_are_gathered", "of_a_rate_on_the_device", "pinned_on_the_host", "refuses_graphs",
    "refuses_reductions_in_fp16", "saved", "syncs", "syncs_of_a_background_save", "syncs_of_torch_s_clipping",
]  # fmt: skip


def saved(folder: str) -> None:
    model, optimizer = sharded(Case(), "cuda", folder)
    tz.checkpoint.save(f"{folder}/saved", model, optimizer, {"step": 0})


def pinned_on_the_host(folder: str) -> int:
    """Bytes that training on the CPU pins on a machine with CUDA."""
    model, _ = sharded(Case(tier="@cpu"), "cpu", folder)
    return int(engine_of(model).store.usage()["pinned_bytes"])


def decoding_takes(form: str) -> tuple[int, int]:
    """Bytes of the device while a tile and a half is decoded: the most that are held, and what is counted."""
    blocks = FrozenFormat(form).blocks
    full = torch.randn(3 * 2**20, device="cuda").bfloat16()
    codes = torch.empty(blocks.size_bytes(full.numel()), dtype=torch.uint8, device="cuda")
    for part, packed in blocks.tiles(full):
        blocks.encode(full[part].float(), codes[packed])
    unpack(codes, blocks, full)  # tables that all decoding shares are made
    memory.begin()
    unpack(codes, blocks, full)
    sizes = {event.block: event.size for event in memory.events() if event.kind == "allocate"}
    held, most = 0, 0
    for event in memory.events():
        held += {"allocate": sizes.get(event.block, 0), "free": -sizes.get(event.block, 0)}.get(event.kind, 0)
        most = max(most, held)
    memory.end()
    return most, blocks.scratch_bytes(full.numel(), "cuda")


class Table(nn.Module):
    """Looks values up by integers of 16 bits, as quantised weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(64, dtype=torch.int16), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.codes.to(x.dtype) * self.scale


def integers_are_gathered() -> float:
    model, _ = tz.shard(Table(), torch.optim.AdamW, "zero3", mesh=mesh_of(Case(), "cuda"))
    return float(model(torch.ones(2, 64, device="cuda")).sum())


def refuses_reductions_in_fp16() -> bool:
    model, precision = nn.Linear(8, 1, bias=False), tz.Precision(reduce="fp16")
    try:
        tz.shard(model, torch.optim.AdamW, "zero3", precision=precision, mesh=mesh_of(Case(), "cuda"))
    except tz.BadInput:
        return True
    return False


def refuses_graphs() -> bool:
    """Whether units that are compiled to CUDA graphs are refused where their weights come and go."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    try:
        compile_units(model, units=[nn.Linear], mode="reduce-overhead")
        tz.shard(model, torch.optim.AdamW, "zero3", units=[nn.Linear], mesh=mesh_of(Case(), "cuda"))
    except tz.BadInput:
        return True
    return False


def syncs(case: Case, folder: str) -> dict[str, float]:
    """How often a step waits for the device, by phase; the engine's own threads may."""
    report.take()
    train(case, "cuda", folder)
    counts: dict[str, float] = {}
    for finding, count in report.of("sync", "pageable").items():
        if not finding.thread.startswith("terrazzo-"):
            counts[finding.phase] = counts.get(finding.phase, 0) + count / STEPS
    report.take()
    return counts


def of_a_rate_on_the_device(folder: str) -> tuple[int, str]:
    """How often a step waits for the device, and what is said of a rate that one rank alone changes there."""
    model, rate = nn.Linear(64, 64), torch.tensor(0.5, device="cuda")
    adamw = torch.optim.AdamW(model.parameters(), rate, capturable=True)  # else torch itself waits
    model, optimizer = tz.shard(model, adamw, "zero2", mesh=mesh_of(Case(), "cuda"))
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    rate.mul_(0.5 ** dist.get_rank())
    report.take()
    optimizer.step()
    waits = report.of("sync", "pageable").total()
    try:
        model(torch.ones(8, 64, device="cuda")).sum().backward()
    except tz.RanksApart as error:
        return waits, str(error)
    return waits, "never noticed"


def syncs_of_torch_s_clipping(folder: str) -> int:
    case = Case()
    model, _ = sharded(case, "cuda", folder)
    model(torch.ones(64, 64, device="cuda")).sum().backward()
    report.take()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return report.of("sync").total()


def syncs_of_a_background_save(folder: str) -> int:
    """How often a background save waits for copies to memory that is not pinned."""
    case = Case()
    model, optimizer = sharded(case, "cuda", folder)
    step(case, model, optimizer, torch.Generator().manual_seed(dist.get_rank()), "cuda")
    report.take()
    with tz.checkpoint.Saver(model, optimizer) as saver:
        saver.save(f"{folder}/saved", {"step": 1})
        return sum(n for finding, n in report.of("sync").items() if "pageable" in finding.text)
