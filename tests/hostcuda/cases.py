"""Training of a small model on the simulated device and on the host, in the same ranks, and what both say."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import terrazzo as tz
from hostcuda.device import FAULTS, Finding, Watching, report
from terrazzo.engine import checkpoint_activations, compile_units, engine_of
from terrazzo.engine.comm.transfer import Handle, Transfer
from terrazzo.engine.runtime.device import Stream
from terrazzo.engine.runtime.worker import Worker
from tests.helpers.cover import cover, places

TOLERANCES = {
    "fp32": (2.0**-20, 2.0**-20), "fp16": (2.0**-6, 2.0**-10), "bf16": (2.0**-5, 2.0**-6), "int8": (2.0**-6, 2.0**-12),
    "moments": (2.0**-4, 2.0**-6),
}  # fmt: skip
"""For weights and for losses, of the largest of them. The host sums gradients in fp32. NCCL sums them in the dtype
that they are sent in, which rounds each once more, by up to half of 2^-10 (fp16) or 2^-7 (bf16); the first steps of
AdamW make of a small gradient a large step. In fp32 there is only the order of sums within a kernel, which processors
differ in: its last bit decides between two codes of a gradient that is sent so, of int8 1/127 of the block's largest
apart; that of a gradient in bf16 also between two codes of a moment, a tenth of it apart."""

__all__ = ["AXES", "TOLERANCES", "Case", "Outcome", "chosen", "compare", "train"]

WIDTH, ROWS, STEPS = 64, 64, 2  # a block's input is as large as what `checkpoint_activations` takes to the host
LR, EPS = 1e-1, 1e-1  # with a small eps, where a gradient rounds otherwise a step goes the other way

AXES: dict[str, tuple[Any, ...]] = {
    "stage": ("zero0", "zero1", "zero2", "zero3", "shard_grad_op"),
    "tier": ("", "@cpu", "@cpu-all", "@nvme", "@nvme-all", "@cpu:0.5"),
    "precision": ("fp32", "bf16", "bf16-pure", "fp16"),
    "step": ("overlapped", "synchronous", "backward"),
    "checkpointing": ("", "full", "offload"),
    "micro": (1, 2),
    "local": (False, True),
    "prefetch": (1, 0, 2),
    "compiled": (False, True),
    "side": ("", "computing", "copying"),
    "optimizer": ("foreach", "fused"),
    "meta": (False, True),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        micro: micro-batches of a step.
        local: all but the last of them only add on their rank, whatever the plan would do.
        side: what is done on a stream of the user's own.
        resumed: the plan of another model and optimizer which load what was saved, and train on.
        background: it is saved while the first ones train on.
        delays: seed of random pauses before collectives and copies; None for no pauses.
        frozen: in which the blocks' matrices are kept, which are not trained; empty: they are.
        gather: in which matrices are sent as they are gathered; empty: as they are computed with.
        reduce: in which their gradients are sent; empty: in the precision's dtype.
        feedback: what codes of these lose is added to the next ones.
        rounding: of master weights in bf16, with moments in 8 bits; empty: moments in the masters' dtype.
    """

    stage: str = "zero3"
    tier: str = ""
    precision: str = "fp32"
    step: str = "overlapped"
    checkpointing: str = ""
    micro: int = 1
    local: bool = False
    prefetch: int = 1
    compiled: bool = False
    side: str = ""
    optimizer: str = "foreach"
    meta: bool = False
    mesh: tuple[int, ...] = ()
    resumed: str = ""
    background: bool = False
    delays: int | None = None
    frozen: str = ""
    gather: str = ""
    reduce: str = ""
    feedback: bool = False
    rounding: str = ""

    @property
    def allowed(self) -> bool:
        """Whether it makes sense: steps have modes only where something is offloaded, and no scaling within one."""
        if not self.tier:
            return self.step == "overlapped"
        return self.step != "backward" or self.precision != "fp16"

    @property
    def name(self) -> str:
        standard = Case()
        values = {key: value for key, value in vars(self).items() if value != getattr(standard, key)}
        stage, tier = values.pop("stage", standard.stage), values.pop("tier", "")
        return "-".join([stage + tier, *(key if value is True else f"{key}={value}" for key, value in values.items())])


@cache
def chosen(count: int = 500, **fixed: Any) -> list[Case]:
    """Cases in which any two values of two axes meet, out of some that are drawn: there are a quarter of a million."""
    chance = random.Random(0)
    axes = AXES | {axis: (value,) for axis, value in fixed.items()}
    drawn = [Case(**{axis: chance.choice(values) for axis, values in axes.items()}) for _ in range(count)]
    allowed = [case for case in drawn if case.allowed]
    return [allowed[index] for index in cover([_axes(case) for case in allowed])]


def _axes(case: Case) -> dict[str, object]:
    """What a case is for a cover: which axes its states are split over, on which tiers they are, and all else of it."""
    split, moved = places(case.stage), tz.Plan.named(case.stage + case.tier)
    tiers = {f"{state} tier": getattr(moved, state).tier for state in split}
    return {**split, **tiers, **{axis: getattr(case, axis) for axis in AXES if axis not in ("stage", "tier")}}


@dataclass
class Outcome:
    """What a training came to on one device.

    Attributes:
        promised, held: most transient bytes, as the bill says and as counted.
    """

    weights: dict[str, Tensor]
    losses: list[float]
    promised: int = 0
    held: int = 0


@dataclass
class Comparison:
    """Both devices, seen by one rank.

    Attributes:
        weights, losses: the largest differences, of the largest value.
        promised, held: most transient bytes on the device, as the bill says and as counted.
    """

    weights: float
    losses: float
    promised: int
    held: int
    findings: Counter[Finding] = field(default_factory=Counter)

    def faults(self, *kinds: str) -> list[str]:
        """Of these kinds, or of all."""
        return [str(finding) for finding in self.findings if finding.kind in (kinds or FAULTS)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if case.meta else "cpu"):
        model = nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 8))
    for layer in model.modules() if case.frozen else ():
        if isinstance(layer, nn.Linear) and layer is not model[-1]:
            layer.weight.requires_grad_(False)
    if case.checkpointing:
        checkpoint_activations(model, "full", units=[Block], offload=case.checkpointing == "offload")
    if case.compiled:
        compile_units(model, units=[Block], backend="aot_eager")
    return model


def mesh_of(case: Case, device: str) -> DeviceMesh:
    shape = case.mesh or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])


def sharded(case: Case, device: str, folder: str) -> tuple[nn.Module, Any]:
    """Of the case's plan. A fused optimizer on the host's CPU takes the same steps as on its CUDA."""
    plan = tz.Plan.named(case.stage + case.tier)
    cells = 1 if case.rounding else 0.0625  # what is in blocks needs whole pages of codes
    offload = tz.Offload(threads=1, step=case.step, path=folder, block_mib=cells)
    formats: dict[str, Any] = {"frozen": case.frozen or None, "gather": case.gather or None}
    formats |= {"quantized_reduce": case.reduce or None, "error_feedback": case.feedback}
    formats |= {"moments": "int8", "rounding": case.rounding} if case.rounding else {}
    options = {"fused": True} if case.optimizer == "fused" else {"foreach": device == "cuda"}
    return tz.shard(
        built(case),
        lambda parameters: torch.optim.AdamW(parameters, lr=LR, eps=EPS, **options),
        plan,
        units=[Block],
        precision=replace(tz.Precision.named(case.precision), **formats),
        mesh=mesh_of(case, device),
        prefetch=case.prefetch,
        offload=offload.used_under(plan),
    )


def train(case: Case, device: str, folder: str) -> Outcome:
    """A few steps on one device; losses and norms come with the losses."""
    with report.phase("setup"):
        model, optimizer = sharded(case, device, folder)
    data, losses = torch.Generator().manual_seed(100 + dist.get_rank()), list[Tensor]()
    with on_a_side_stream() if case.side == "computing" and device == "cuda" else contextlib.nullcontext():
        for _ in range(STEPS):
            losses += step(case, model, optimizer, data, device)
    with report.phase("after"):
        bill = engine_of(model).promise.memory(case.micro, case.local or None).transient_bytes
        outcome = Outcome({}, [], bill, engine_of(model).peak_transient_bytes)
    if case.resumed:
        losses += save(case, model, optimizer, data.clone_state(), device, f"{folder}/{device}")
        case = replace(case, stage=case.resumed, tier="")
        model, optimizer = sharded(case, device, folder)
        tz.checkpoint.load(f"{folder}/{device}", model, optimizer)
        losses += step(case, model, optimizer, data, device)
    with report.phase("after"), tz.gathered(model) as parameters:
        outcome.weights = {key: parameter.detach().cpu().clone() for key, parameter in parameters.items()}
    outcome.losses = [float(loss) for loss in losses]
    return outcome


def save(case: Case, model: nn.Module, optimizer: Any, *beside: Any) -> list[Tensor]:
    """`beside`: data and device of a step that changes what is being saved in the background, and where to save."""
    *rest, folder = beside
    if not case.background:
        tz.checkpoint.save(folder, model, optimizer, {"step": STEPS})
        return []
    with tz.checkpoint.Saver(model, optimizer) as saver:
        saver.save(folder, {"step": STEPS})
        return step(case, model, optimizer, *rest)


def step(case: Case, model: nn.Module, optimizer: Any, data: torch.Generator, device: str) -> list[Tensor]:
    losses = []
    for micro in range(case.micro):
        last = micro == case.micro - 1
        with report.phase("input"):
            x = torch.randn(ROWS, WIDTH, generator=data)
            x = copied_aside(x) if case.side == "copying" and device == "cuda" else x.to(device)
        with contextlib.nullcontext() if last else tz.accumulate(model, local=case.local or None):
            with report.phase("forward"):
                loss = model(x).square().mean()
            with report.phase("backward"):
                loss.backward()
        losses.append(loss.detach())
    if case.step != "backward":  # which has stepped already
        with report.phase("clip"):
            losses.append(tz.clip_grad_norm_(model, 1.0))
    with report.phase("step"):
        optimizer.step()
        optimizer.zero_grad()
    return losses


def copied_aside(x: Tensor) -> Tensor:
    """As loaders that are ahead do it."""
    stream, computing = _copying(), torch.cuda.current_stream()
    stream.wait_stream(computing)  # which may still read what this memory held before
    with torch.cuda.stream(stream):
        there = x.pin_memory().to("cuda", non_blocking=True)
    computing.wait_stream(stream)
    return there


@cache
def _copying() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_a_side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


_COMPILING = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20, "fail_on_recompile_limit_hit": True}
"""A rank serves many cases, and past its limit dynamo runs units as they are."""


@torch._dynamo.config.patch(_COMPILING)
def compare(case: Case, folder: str) -> Comparison:
    """The case on both devices."""
    report.take()
    with Watching(), delayed(case.delays):
        cuda = train(case, "cuda", folder)
    findings = report.take()
    cpu = train(case, "cpu", folder)
    weights = max(apart(cuda.weights[key], cpu.weights[key]) for key in cpu.weights)
    losses = apart(torch.tensor(cuda.losses), torch.tensor(cpu.losses))
    report.take()
    return Comparison(weights, losses, cuda.promised, cuda.held, findings)


@contextlib.contextmanager
def delayed(seed: int | None) -> Iterator[None]:
    """Ranks and threads are late by chance, and another time each."""
    if seed is None:
        yield
        return
    chance = random.Random(seed + dist.get_rank())

    def late(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *arguments: Any) -> Any:
            time.sleep(chance.random() * 0.01)
            return original(self, *arguments)

        return method

    with contextlib.ExitStack() as patches:
        for owner, name in ((Handle, "wait"), (Stream, "completing"), (Transfer, "_start_next"), (Worker, "submit")):
            patches.enter_context(mock.patch.object(owner, name, late(getattr(owner, name))))
        yield


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest value; infinite where one is a number and the other is not."""
    apart = (one.float() - other.float()).abs().nan_to_num(nan=float("inf")).max()
    return float(apart / other.float().abs().max())
