"""What bounds a step whose states are in host memory: copies, the update on the CPU, computation, or waits.

    python -m benchmarks.gpu.offloaded [--modes overlapped,backward] [--threads 8] [--out offloaded.json]

Two steps are looked at: kernels and copies by torch's profiler, updates by the engine's own clock. What covers a moment
of a step is told for each of them, alone and together, and how fast copies and updates were while they ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import terrazzo as tz
from benchmarks.cpu.loops import HYPERPARAMETERS
from benchmarks.environment import versions
from benchmarks.gpu.measure import FULL, TINY
from benchmarks.gpu.rank import join
from terrazzo.engine.offload.store import UpdateCounts
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.topology import step_threads
from terrazzo.train.model.decoder import Block, Decoder

__all__ = ["Span", "covered", "measure", "parts"]

Span = tuple[float, float]
"""Begin and end in seconds."""

COPIES = {"HtoD": "to the device", "DtoH": "from the device"}
STEP_BYTES = 28
"""Of an AdamW step in fp32 for each element: 16 read, 12 written."""


class Run:
    """The benchmark's model alone, under `zero3@cpu`."""

    def __init__(self, device: torch.device, settings: tz.Offload, tiny: bool) -> None:
        workload = (TINY if tiny else FULL).alone
        torch.manual_seed(0)
        with torch.device(device):
            model = Decoder(workload.model)
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
        adamw = partial(torch.optim.AdamW, **HYPERPARAMETERS)
        self.model, self.optimizer = tz.shard(
            model, adamw, "zero3@cpu", units=[Block], precision="bf16", mesh=mesh, offload=settings
        )
        size = (workload.batch, workload.model.max_sequence_length + 1)
        self.tokens = torch.randint(workload.model.vocab_size, size, device=device)
        self.device, self.numel = device, workload.numel

    def step(self) -> None:
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> float:
        """Seconds of each of so many, with what they leave to do."""
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return (time.perf_counter() - begun) / count

    def wait(self) -> None:
        """Until all updates are carried out, and the device has nothing to do."""
        with tz.gathered(self.model):
            pass
        devices.synchronize(self.device)


# -- what covers a step ------------------------------------------------------------------------------------------------


def covered(spans: Iterable[Span], within: Sequence[Span] | None = None) -> float:
    """Seconds in which at least one span is; of `within`, spans that do not meet, only what lies there."""
    return sum(end - begin for begin, end in _both(_merged(spans), within))


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _both(one: Sequence[Span], other: Sequence[Span] | None) -> list[Span]:
    if other is None:
        return list(one)
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(begin, end) for begin, end in pairs if begin < end]


def parts(found: dict[str, list[Span]], whole: Span) -> dict[str, float]:
    """Seconds of `whole` by who is at work in it: each, each alone, and nobody."""
    cut = {name: _both(_merged(spans), [whole]) for name, spans in found.items()}
    told = {name: covered(spans) for name, spans in cut.items()}
    for name in cut:
        others = _merged(span for other, spans in cut.items() if other != name for span in spans)
        told[f"{name} alone"] = told[name] - covered(cut[name], others)
    anybody = covered(span for spans in cut.values() for span in spans)
    return told | {"nobody": whole[1] - whole[0] - anybody}


def spans_of(trace: dict[str, Any]) -> tuple[dict[str, list[Span]], dict[str, int]]:
    """Kernels and copies of a Chrome trace, by seconds of the system's clock; bytes of copies, by direction."""
    zero = trace.get("baseTimeNanoseconds", 0) / 1e9
    found: dict[str, list[Span]] = {"computation": [], **{name: [] for name in COPIES.values()}}
    moved = dict.fromkeys(COPIES.values(), 0)
    for event in trace["traceEvents"]:
        direction = next((told for key, told in COPIES.items() if key in event.get("name", "")), None)
        if event.get("cat") == "kernel":
            what = "computation"
        elif event.get("cat") == "gpu_memcpy" and direction:
            what = direction
            moved[what] += event["args"].get("bytes", 0)
        else:
            continue
        begin = zero + event["ts"] / 1e6
        found[what].append((begin, begin + event["dur"] / 1e6))
    return found, moved


def look(run: Run, count: int = 2) -> dict[str, Any]:
    """Of `count` steps after each other: who was at work, and how fast."""
    updates: list[tuple[float, float, int]] = []
    took, offset = UpdateCounts.took, time.time() - time.perf_counter()

    def noted(self: UpdateCounts, values: torch.Tensor, since: float) -> None:
        updates.append((offset + since, offset + time.perf_counter(), values.numel()))
        took(self, values, since)

    kinds = [torch.profiler.ProfilerActivity.CUDA if run.device.type == "cuda" else torch.profiler.ProfilerActivity.CPU]
    run.wait()
    with mock.patch.object(UpdateCounts, "took", noted), torch.profiler.profile(activities=kinds) as profiler:
        begun = time.time()
        for _ in range(count):
            run.step()
        run.wait()
        whole = begun, time.time()
    with tempfile.TemporaryDirectory(prefix="terrazzo-gpu-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found, moved = spans_of(json.loads(path.read_text()))
    found["update"] = [(begin, end) for begin, end, _ in updates]
    seconds = parts(found, whole)
    rates = {f"{way}: GB/s": bytes_ / seconds[way] / 1e9 for way, bytes_ in moved.items() if seconds[way]}
    if seconds["update"]:
        rates["update: GB/s"] = STEP_BYTES * sum(numel for *_, numel in updates) / seconds["update"] / 1e9
    each = {name: value / count for name, value in seconds.items()}
    return {"step_s": (whole[1] - whole[0]) / count, "seconds": each, "rates": rates, "updates": len(updates) / count}


def link(device: torch.device, size: int = 1 << 30) -> dict[str, float]:
    """GB/s of one large copy each way between pinned memory and the device, by themselves and at once."""
    here = [torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(ways: Sequence[int]) -> float:
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    (there if way == 0 else here)[way].copy_((here if way == 0 else there)[way], non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return size * len(ways) / min(seconds) / 1e9

    return {"to the device": rate([0]), "from the device": rate([1]), "both at once": rate([0, 1])}


def measure(device: str, modes: Sequence[str], threads: Sequence[int | None]) -> dict[str, Any]:
    """A record by mode and threads, that JSON can hold."""
    where, tiny = join(device, 1), device == "cpu"
    count, cpus = step_threads(where, 1)
    record: dict[str, Any] = {"versions": versions("torch", "terrazzo"), "threads": count, "cpus": sorted(cpus)}
    record["device"] = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    record["link"] = link(where) if device == "cuda" else {}
    for mode in modes:
        for number in threads:
            run = Run(where, tz.Offload(step=mode, threads=number), tiny)  # type: ignore[arg-type]
            run.steps(2)
            step_s = statistics.median(run.steps(4) for _ in range(1 if tiny else 3))
            told = record[f"{mode}, {number or count} threads"] = {"numel": run.numel, "step_s": step_s}
            told["looked"] = look(run)
            print(json.dumps({f"{mode}, {number or count} threads": told}), flush=True)
            del run
            gc.collect()
    return record


def main() -> None:
    """Measure, print each line as it is there, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.offloaded", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: toy sizes, to try it")
    parser.add_argument("--modes", default="overlapped,backward,synchronous")
    parser.add_argument("--threads", default="", help="of the update, such as 8,16; by default the engine's own choice")
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    options = parser.parse_args()
    threads: list[int | None] = [int(number) for number in options.threads.split(",") if number]
    record = measure(options.device, options.modes.split(","), threads or [None])
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
