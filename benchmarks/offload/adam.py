"""The AdamW step on the CPU: one flat fp32 shard beside the machine's memory bandwidth, DeepSpeed and torchao.

A step reads 16 bytes per parameter (weight, gradient, two moments) and writes 12 (all but the gradient). The probe
moves the same bytes with next to no arithmetic. All contenders work on the same memory, far larger than the caches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.cpu.loops import HYPERPARAMETERS
from benchmarks.cpu.models import Decoder, Shape
from benchmarks.offload.turns import Others, Turns, attempt, in_fresh_process, seconds, take_turns
from terrazzo.engine.offload.host_arena import HostArena

SHAPE = Shape(blocks=5, width=1024, vocabulary=1024, sequence=64)
TORCHAO_SMALLEST = 4096  # elements of a tensor that torchao offloads; its default


@dataclass(frozen=True)
class Effort:
    """What is run: a decoder's tensors (of multiples of 64 elements each) as one flat shard, turns, steps in a turn.

    Attributes:
        peers: also those that have to be installed.
    """

    shape: Shape = SHAPE
    rounds: int = 9
    steps: int = 5
    threads: tuple[int, ...] = (1, 2)
    peers: bool = True


def measure(effort: Effort = Effort()) -> dict[str, Any]:
    """Seconds of a step by number of threads and contender."""
    return in_fresh_process(_measure, effort)


def _measure(effort: Effort) -> dict[str, Any]:
    missing: dict[str, str] = {}
    shard = Shard(effort.shape)
    acts = {
        name: partial(_turn, step, effort.steps)
        for name, step in contenders(shard, missing if effort.peers else None).items()
    }
    turns: dict[str, Turns] = {}
    others = Others()
    for count in effort.threads:
        torch.set_num_threads(count)
        turns[str(count)] = take_turns(acts, effort.rounds, others)
    if effort.peers:
        attempt(missing, "torchao's own class", _torchao)
    return {"effort": asdict(effort), "numel": shard.numel, "others": others.kept, "turns": turns, "missing": missing}


class Shard:
    """Everything that a step needs, in the host memory that the engine uses.

    Attributes:
        device_weight, device_gradient: a second memory, which stands for that of a device.
    """

    def __init__(self, shape: Shape) -> None:
        with torch.device("meta"):
            self.sizes = [parameter.numel() for parameter in Decoder(shape).parameters()]
        self.numel = sum(self.sizes)
        arena = HostArena(6 * (4 * self.numel + 4096), pin_for=None)
        parts = [arena.allocate(4 * self.numel).view(torch.float32) for _ in range(6)]
        self.weight, self.gradient, self.mean, self.square, self.device_weight, self.device_gradient = parts
        for part in parts:
            part.fill_(1e-3)  # touches every page

    def sweep(self) -> None:
        """The bytes of a step, 16 read and 12 written per element, in place: no line is fetched to be overwritten."""
        self.weight.add_(self.gradient)
        self.mean.neg_()
        self.square.abs_()

    def adamw(self, start: int, sizes: Sequence[int]) -> AdamW:
        """The fused AdamW of torch over tensors of these sizes that follow each other."""
        optimizer = AdamW(self._parameters(start, sizes), **HYPERPARAMETERS)
        self._lend(optimizer, start, torch.tensor(0.0))
        return optimizer

    def deepspeed(self) -> Optimizer:
        """DeepSpeed's, over everything as one tensor; builds its kernel where that was not done before."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        options = {key: value for key, value in HYPERPARAMETERS.items() if key != "fused"}
        optimizer: Optimizer = DeepSpeedCPUAdam(self._parameters(0, [self.numel]), **options)
        self._lend(optimizer, 0, 1)
        return optimizer

    def _parameters(self, start: int, sizes: Sequence[int]) -> list[nn.Parameter]:
        total = sum(sizes)
        weights = self.weight[start : start + total].split(list(sizes))
        gradients = self.gradient[start : start + total].split(list(sizes))
        parameters = [nn.Parameter(weight) for weight in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return parameters

    def _lend(self, optimizer: Optimizer, start: int, step: Tensor | int) -> None:
        """Give an optimizer its moments in this memory."""
        for parameter in optimizer.param_groups[0]["params"]:
            held = slice(start, start + parameter.numel())
            count = step.clone() if isinstance(step, Tensor) else step
            optimizer.state[parameter] = {
                "step": count,
                "exp_avg": self.mean[held],
                "exp_avg_sq": self.square[held],
            }
            start = held.stop


class PerTensor:
    """What torchao's CPUOffloadOptimizer does: an optimizer per tensor, its gradient in before, its weight out after.

    Tensors below `TORCHAO_SMALLEST` stay on the device, with one optimizer for all.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self.held, self.optimizers = shard, list[slice](), list[AdamW]()
        start, small = 0, []
        for size in shard.sizes:
            if size < TORCHAO_SMALLEST:
                small.append(nn.Parameter(shard.device_weight[start : start + size]))
                small[-1].grad = shard.device_gradient[start : start + size]
            else:
                self.held.append(slice(start, start + size))
                self.optimizers.append(shard.adamw(start, [size]))
            start += size
        self.small = AdamW(small, **HYPERPARAMETERS)

    def step(self) -> None:
        shard = self.shard
        for held in self.held:
            shard.gradient[held].copy_(shard.device_gradient[held])
        self.small.step()
        for held, optimizer in zip(self.held, self.optimizers, strict=True):
            optimizer.step()
            shard.device_weight[held].copy_(shard.weight[held])


def _turn(step: Callable[[], object], steps: int) -> float:
    def all_steps() -> None:
        for _ in range(steps):
            step()

    return seconds(all_steps) / steps


def contenders(shard: Shard, missing: dict[str, str] | None) -> dict[str, Callable[[], object]]:
    """One step of each; notes of peers that do not run go to `missing`, None leaves them out."""
    flat, per_tensor = shard.adamw(0, [shard.numel]), PerTensor(shard)
    deepspeed = attempt(missing, "deepspeed", shard.deepspeed) if missing is not None else None

    def copied() -> None:
        shard.gradient.copy_(shard.device_gradient)
        flat.step()
        shard.device_weight.copy_(shard.weight)

    steps: dict[str, Callable[[], object]] = {
        "bandwidth": shard.sweep,
        "terrazzo": flat.step,
        "terrazzo, copies": copied,
        "torchao, copies": per_tensor.step,
    }
    if deepspeed is not None:
        steps["deepspeed"] = deepspeed.step
    return steps


def _torchao() -> None:
    """Its own class, which asks for a GPU."""
    theirs = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    theirs([nn.Parameter(torch.zeros(TORCHAO_SMALLEST))], AdamW, fused=True)
