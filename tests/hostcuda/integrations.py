"""A short training by each integration, in the words of its library, on the simulated device or the host.

An integration's function gets the kind of device and a folder of its own. It returns the losses of a run that saves in
its middle; and on the device those of another one that goes on from there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz
from hostcuda.device import FAULTS, Watching, report
from tests.hostcuda.cases import WIDTH, Block

__all__ = ["INTEGRATIONS", "Passage", "through"]

Losses = tuple[list[float], list[float]]
INTEGRATIONS: dict[str, Callable[[str, Path], Losses]] = {}
STEPS, ROWS = 4, 4
ADAMW = {"lr": 1e-2, "eps": 1e-1}


def integration(function: Callable[[str, Path], Losses]) -> Callable[[str, Path], Losses]:
    INTEGRATIONS[function.__name__] = function
    return function


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))


def batches() -> list[Tensor]:
    """This rank's, on the host."""
    drawn = torch.Generator().manual_seed(dist.get_rank())
    return list(torch.randn(STEPS, ROWS, WIDTH, generator=drawn))


def halves(device: str, fresh: Callable[[], tuple[Callable[[Tensor], Tensor], Any]], save: Any, load: Any) -> Losses:
    """`fresh` makes what takes a step, and what `save` and `load` are given."""
    data, later = batches()[: STEPS // 2], batches()[STEPS // 2 :]
    step, state = fresh()
    losses = [step(x) for x in data]
    save(state)
    losses += [step(x) for x in later]
    resumed = []
    if device == "cuda":
        step, state = fresh()
        load(state)
        resumed = [step(x) for x in later]
    return [loss.item() for loss in losses], [loss.item() for loss in resumed]


@integration
def fsdp2(device: str, folder: Path) -> Losses:
    """Weights at rest on the host, which FSDP2 calls `CPUOffloadPolicy`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    asked: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy()}

    def fresh() -> Any:
        model = net()
        for block in model[:2]:
            tz.fully_shard(block, **asked)
        tz.fully_shard(model, **asked)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

        def step(x: Tensor) -> Tensor:
            loss = model(x.to(device)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, (model, optimizer)

    def load(state: Any) -> None:
        model, optimizer = state
        tz.checkpoint.load(folder / "saved", model, tz.attach(model, optimizer))

    return halves(device, fresh, lambda state: tz.checkpoint.save(folder / "saved", *state, {"step": 2}), load)


@integration
def accelerate(device: str, folder: Path) -> Losses:
    """Two micro-batches of a step, and clipping."""
    from terrazzo.integrations.accelerate import Accelerator
    from tests.integrations.accelerating import fresh_state

    def fresh() -> Any:
        fresh_state()
        accelerator = Accelerator(cpu=device == "cpu", plan="zero2", gradient_accumulation_steps=2)
        model = net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))

        def step(x: Tensor) -> Tensor:
            losses = []
            for part in x.chunk(2):
                with accelerator.accumulate(model):
                    loss = model(part.to(accelerator.device)).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return step, accelerator

    def save(accelerator: Any) -> None:
        accelerator.save_state(str(folder / "saved"))

    return halves(device, fresh, save, lambda accelerator: accelerator.load_state(str(folder / "saved")))


@integration
def deepspeed(device: str, folder: Path) -> Losses:
    """ZeRO-3 with the optimizer on the host, as a JSON says it."""
    from terrazzo.integrations import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }

    def fresh() -> Any:
        engine = deepspeed.initialize(model=net(), config=config)[0]

        def step(x: Tensor) -> Tensor:
            loss = engine(x.to(engine.device)).square().mean()
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step, engine

    with on_a_machine_without_devices() if device == "cpu" else contextlib.nullcontext():
        save, load = (lambda engine: engine.save_checkpoint(folder)), lambda engine: engine.load_checkpoint(folder)
        return halves(device, fresh, save, load)


@contextlib.contextmanager
def on_a_machine_without_devices() -> Iterator[None]:
    """The integration takes the device that there is."""
    with mock.patch.object(torch.cuda, "device_count", return_value=0):
        yield


@integration
def lightning(device: str, folder: Path) -> Losses:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = net(), list[Tensor]()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), **ADAMW)

    def fit(resume: str | None) -> list[float]:
        trainer: Any = pl.Trainer(
            strategy="terrazzo",
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=dist.get_world_size(),
            plugins=[TorchElasticEnvironment()],
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
            max_epochs=2,
            gradient_clip_val=1.0,
            **dict.fromkeys(
                ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False
            ),
        )
        module = Module()
        data = TensorDataset(torch.stack(batches()[: STEPS // 2]))
        trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=resume)
        return [loss.item() for loss in module.losses]

    import terrazzo.integrations.lightning  # noqa: F401

    return fit(None), fit(str(folder / "epoch=0.ckpt")) if device == "cuda" else []


@integration
def transformers(device: str, folder: Path) -> Losses:
    """The Trainer, which clips."""
    from tests.integrations.trainers import Run

    given = {"use_cpu": device == "cpu", "max_steps": STEPS, "save_strategy": "steps", "save_steps": STEPS // 2}
    whole = Run(folder, "zero3", given).logged()
    if device == "cpu":
        return whole, []
    return whole, Run(folder, "zero3", given, resume=str(folder / f"checkpoint-{STEPS // 2}")).logged()[STEPS // 2 :]


@dataclass
class Passage:
    """A run through an integration, as one rank sees it.

    Attributes:
        faults: what the device has found.
        waits: how often the host waits for the device, by place.
        losses, resumed: on the device; `on_host`: on the CPU.
    """

    faults: list[str]
    waits: Counter[str]
    losses: list[float]
    resumed: list[float]
    on_host: list[float]


def through(name: str, folder: str) -> Passage:
    warnings.simplefilter("ignore")
    report.take()
    with Watching():
        losses, resumed = INTEGRATIONS[name]("cuda", Path(folder, "cuda"))
    findings = report.take()
    on_host, _ = INTEGRATIONS[name]("cpu", Path(folder, "cpu"))
    report.take()
    waits: Counter[str] = Counter()
    for finding, count in findings.items():
        if finding.kind not in FAULTS:
            waits[f"{finding.kind}: {finding.text}, at {finding.where}, in {finding.thread}"] += count
    return Passage([str(each) for each in findings if each.kind in FAULTS], waits, losses, resumed, on_host)
