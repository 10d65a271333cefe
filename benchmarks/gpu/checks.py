"""Whether training on a GPU is right: one check to a process, so that each has a device as fresh as its allocator.

    python -m benchmarks.gpu.checks NAME

A check raises, or returns numbers by name; the last line of output is both as JSON. `first.py` runs them in order.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import terrazzo as tz
from benchmarks.gpu.contenders import Workload
from benchmarks.gpu.training import SMALL, Training, apart, same
from terrazzo.engine import checkpoint_activations, compile_units
from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.meshes import data_mesh
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.device import Stream
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig

__all__ = ["CHECKS", "LARGE", "MARK"]

MARK = "RESULT "
LARGE = Workload(DecoderConfig(32_768, 2048, 8, 16, 8, 5632, 2048, tie_embeddings=False), batch=4)
"""Whose memory is looked at: 0.5 B parameters in bf16, 8 GB of states."""

CLOSE = 2.0**-18
"""Of the largest weight: how far kernels of one GPU may be apart that sum in another order, after a few steps."""

CHECKS: dict[str, Callable[[], dict[str, float]]] = {}


def check(function: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
    CHECKS[function.__name__] = function
    return function


def is_simulated() -> bool:
    return torch.cuda.get_device_name() == "Simulated CUDA"


# -- the checks, in the order of the list -----------------------------------------------------------------------------


@check
def ranks() -> dict[str, float]:
    """As many ranks as torchrun starts, on equal batches: each plan trains like one process, and each has one GPU."""
    plain = Training(None).train(3).weights()
    found = {}
    for plan in ("zero0", "zero1", "zero2", "zero3", "zero3@cpu"):
        found[f"{plan}: apart from one process"] = difference = apart(plain, Training(plan).train(3).weights())
        assert difference <= CLOSE, f"{plan}: weights are {difference:.1e} apart from those of one process"
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    gpus = _gpus_of(pids)
    assert set(gpus.values()) <= {1}, f"a rank's process stands on one GPU; these have several: {gpus}"
    found["ranks that nvidia-smi knows"] = len(gpus)
    return found


@check
def training() -> dict[str, float]:
    """`zero3` with a fused AdamW: five steps as plain PyTorch's, saved, loaded, and one more with equal bits."""
    plain, sharded = Training(None).train(5), Training("zero3").train(5)
    difference = apart(plain.weights(), sharded.weights())
    assert difference <= CLOSE, f"weights are {difference:.1e} of the largest apart from plain PyTorch's"
    with tempfile.TemporaryDirectory() as folder:
        tz.checkpoint.save(f"{folder}/saved", sharded.model, sharded.optimizer, {"step": 5})
        resumed = Training("zero3")
        tz.checkpoint.load(f"{folder}/saved", resumed.model, resumed.optimizer)
    resumed.steps = 5
    assert same(sharded.train(1).weights(), resumed.train(1).weights()), "a step after loading has other bits"
    return {"apart from plain PyTorch": difference}


@contextlib.contextmanager
def every_axis_live() -> Iterator[None]:
    """An axis of one rank takes part in collectives like any other: what one GPU can show of NCCL."""

    def complete(self: Buffer, axes: tuple[str, ...]) -> Any:
        while len(axes) > len(self.axes):
            axis, axes = axes[-1], axes[:-1]
            yield from self.space.axes.along(axis).all_gather(self.narrow(axes).data)
        return self.data

    with (
        mock.patch.object(Axes, "live", lambda self, axes: tuple(axes)),
        mock.patch.object(Buffer, "complete", complete),
    ):
        yield


class Table(nn.Module):
    """Looks values up by integers of 16 bits, parameters and buffer: NCCL has no such dtype."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(64, dtype=torch.int16), requires_grad=False)
        self.register_buffer("offsets", torch.arange(64, dtype=torch.int16))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.codes + self.offsets).to(x.dtype) * self.scale


@check
def collectives() -> dict[str, float]:
    """NCCL on axes of one rank: bits as without, in fp32 and bf16; integers of 16 bits are exchanged."""
    found: dict[str, float] = {}
    for plan, precision in product(("zero1", "zero2", "zero3"), ("fp32", "bf16")):
        quiet = Training(plan, precision).train(3).weights()
        with every_axis_live():
            assert same(quiet, Training(plan, precision).train(3).weights()), f"{plan} in {precision}: other bits"
    with every_axis_live():
        model, _ = tz.shard(Table(), torch.optim.AdamW, "zero3", mesh=data_mesh("cuda", dist.get_world_size()))
        assert float(model(torch.ones(2, 64, device="cuda")).sum().detach()) == 2 * 2 * sum(range(64))
    return found


@contextlib.contextmanager
def slow(where: str) -> Iterator[None]:
    """Milliseconds of delay on each side stream that is entered, or after a block's forward and before its backward."""
    enter = Stream.inside

    @contextlib.contextmanager
    def late(stream: Stream) -> Iterator[None]:
        with enter(stream):
            if torch.cuda.current_stream() != torch.cuda.default_stream():  # a chain's results are the computation's
                torch.cuda._sleep(5_000_000)
            yield

    def later(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(module, Block):
            torch.cuda._sleep(5_000_000)
            if output.requires_grad:
                output.register_hook(lambda gradient: torch.cuda._sleep(5_000_000))

    with contextlib.ExitStack() as patches:
        if where == "copies":
            patches.enter_context(mock.patch.object(Stream, "inside", late))
        elif where == "computation":
            patches.callback(nn.modules.module.register_module_forward_hook(later).remove)
        yield


STEP_MODES: tuple[Literal["overlapped", "synchronous", "backward"], ...] = ("overlapped", "synchronous", "backward")


@check
def offload() -> dict[str, float]:
    """States on the host and on drives, three modes of the step, late copies and late computation: equal bits.

    The update runs on the host, whose kernels round otherwise than the GPU's (docs/numerics.md): of `zero3` the weights
    are close, and of each other the offloaded runs have the bits.
    """
    near, first = Training("zero3").train(2).weights(), None
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for plan, mode in product(("@cpu", "@cpu-all", "@nvme"), STEP_MODES):
            for where in ("nowhere", "copies", "computation"):
                with slow(where):
                    settings = tz.Offload(step=mode, path=folder if plan == "@nvme" else None)
                    weights = Training("zero3" + plan, offload=settings).train(2).weights()
                first = first or weights
                assert same(first, weights), f"zero3{plan}, step {mode}, late {where}: other bits than zero3@cpu"
    assert first is not None
    found["apart from zero3"] = difference = apart(near, first)
    assert difference <= CLOSE, f"weights are {difference:.1e} of the largest apart from zero3's"
    return found


def _offloaded_activations() -> Training:
    torch.manual_seed(0)
    model = Decoder(SMALL.model)
    checkpoint_activations(model, "full", units=[Block], offload=True)
    return Training("zero3", "bf16", model=model)


@check
def sanitizer() -> dict[str, float]:
    """Two steps of `zero3@cpu` and of offloaded activations under torch's CUDA sanitizer, which raises at a race."""
    on = bool(os.environ.get("TORCH_CUDA_SANITIZER"))
    assert on or is_simulated(), "set TORCH_CUDA_SANITIZER=1 before torch is imported"
    Training("zero3@cpu", "bf16").train(2)
    _offloaded_activations().train(2)
    torch.cuda.synchronize()
    return {"under the sanitizer": float(on)}


@check
def syncs() -> dict[str, float]:
    """How often the host waits for the device in a step, by torch's sync debug mode; what is resident never does."""
    runs = {
        "zero3": Training("zero3", "bf16"),
        "offloaded activations": _offloaded_activations(),
        "zero3@cpu": Training("zero3@cpu", "bf16"),
    }
    found: dict[str, float] = {}
    for name, run in runs.items():
        run.step(clip=True, micro=2)
        places = _waits(partial(run.step, clip=True, micro=2))
        found[f"{name}: waits in a step"] = len(places)
        assert not places or name == "zero3@cpu", f"{name}: the host waits at {', '.join(sorted(set(places)))}"
    return found


def _waits(step: Callable[[], object]) -> list[str]:
    """Places in the code where the host waits for the device while `step` runs."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in told if "synchronizing CUDA operation" in str(warning.message)]
    return [f"{warning.filename}:{warning.lineno}" for warning in waits]


@check
def clipping() -> dict[str, float]:
    """Gradients of 16 bits are clipped as torch clips them with the same norm, to the bit."""
    for plan in ("zero0", "zero3", "zero3@cpu"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda().bfloat16()
        sgd = partial(torch.optim.SGD, lr=0.5)
        alone, mesh = sgd(plain.parameters()), data_mesh("cuda", dist.get_world_size())
        model, optimizer = tz.shard(copy.deepcopy(plain), sgd, plan, precision="bf16-pure", mesh=mesh)
        x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
        for each in (plain, model):
            each(x).float().square().mean().backward()
        norm = tz.clip_grad_norm_(model, 1e-3)
        nn.utils.clip_grads_with_norm_(plain.parameters(), 1e-3, norm.cuda())
        alone.step()
        optimizer.step()
        with tz.gathered(model):
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            assert all(torch.equal(one.detach(), other.detach()) for one, other in pairs), f"{plan}: other bits"
    return {"norm": float(norm)}


@check
def rate() -> dict[str, float]:
    """A learning rate in the device's memory, changed there: as plain PyTorch, and no step waits for it."""
    ways, waits = list[dict[str, Tensor]](), list[str]()
    for plan in (None, "zero3"):
        rate = torch.tensor(1e-2, device="cuda")
        run = Training(plan, adamw=partial(torch.optim.AdamW, lr=rate, eps=1e-3, capturable=True))
        run.step()
        for _ in range(3):
            rate.mul_(0.5)
            run.step(update=False)
            found = _waits(run.update)
            waits += found if plan else []
        ways.append(run.weights())
    difference = apart(*ways)
    assert difference <= CLOSE, f"weights are {difference:.1e} of the largest apart from plain PyTorch's"
    assert not waits, f"the host waits at {', '.join(sorted(set(waits)))}"
    return {"apart from plain PyTorch": difference}


@check
def memory() -> dict[str, float]:
    """What is reserved of the device's memory and allocated in it, after steps of the large model."""
    gc.collect()  # what was there before is not of this model
    torch.cuda.reset_peak_memory_stats()
    workload = SMALL if is_simulated() else LARGE
    mesh, config = data_mesh("cuda", dist.get_world_size()), workload.model
    with torch.device("meta"):
        model = Decoder(config)
    adamw = partial(torch.optim.AdamW, fused=True)
    model, optimizer = tz.shard(model, adamw, "zero3", units=[Block], precision="bf16", mesh=mesh)
    for step in range(4):
        size = (workload.batch, config.max_sequence_length + 1)
        tokens = torch.randint(config.vocab_size, size, generator=torch.Generator().manual_seed(step)).cuda()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "allocated GiB": allocated / 2**30,
        "reserved GiB": reserved / 2**30,
        "reserved / allocated": reserved / allocated,
    }


@check
def compiled() -> dict[str, float]:
    """Blocks that torch.compile has made faster train as those that it has not, with and without checkpointing."""
    backend = "aot_eager" if is_simulated() else "inductor"
    found = {}
    eager = Training("zero3").train(3)
    for checkpointing in ("none", "full"):
        torch.manual_seed(0)
        model = Decoder(SMALL.model)
        checkpoint_activations(model, checkpointing, units=[Block])
        compile_units(model, units=[Block], backend=backend)
        run = Training("zero3", model=model).train(3)
        found[f"{backend}, checkpointing {checkpointing}: apart from eager"] = difference = apart(
            eager.weights(), run.weights()
        )
        assert difference <= 16 * CLOSE, f"weights are {difference:.1e} of the largest apart from those of eager blocks"
    return found


def _gpus_of(pids: Sequence[int]) -> dict[int, int]:
    """On how many GPUs each process has a context, as the driver tells; of those that it does not know, nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    rows = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    told = Counter(int(pid) for pid, _, _ in (row.partition(",") for row in rows) if pid.strip().isdigit())
    return {pid: told[pid] for pid in pids if pid in told}


def main() -> None:
    """Join a group, of this process alone unless torchrun has started it, run the check, tell."""
    name = sys.argv[1]
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone: dict[str, Any] = {} if world > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(devices.backend_for("cuda"), **alone)
    numbers = CHECKS[name]()
    dist.destroy_process_group()
    if rank == 0:
        print(MARK + json.dumps(numbers))


if __name__ == "__main__":
    main()
