"""Training with matrices and sequences that ranks share, on the simulated device and on the host, in the same ranks."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import terrazzo as tz
from hostcuda.device import FAULTS, Watching, report
from terrazzo.engine import checkpoint_activations
from terrazzo.engine.comm.transfer import Handle
from terrazzo.parallel import Context, VocabularyLoss, context_of
from terrazzo.parallel.context import attention_kernels
from terrazzo.parallel.exchanges import AxisRanks
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig, auxiliary_loss
from tests.hostcuda.cases import EPS, LR, apart

__all__ = ["Found", "Shared", "compare", "faults_of_a_hasty_ring", "sharded_decoder", "waits_unplaced"]

SHAPE = DecoderConfig(vocab_size=36, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=32)
EXPERTS = MixtureConfig(count=4, top_k=2, ffn_dim=16, shared=1, z_loss=0.01)
STEPS, MICRO, ROWS = 2, 2, 2


@dataclass(frozen=True)
class Shared:
    """What is trained: a decoder, whose logits no rank has whole where it is cut; with experts if ranks share these.

    Attributes:
        documents: sequences have several.
        split: sequences are split between matrices.
    """

    tp: int = 1
    cp: int = 1
    mode: str = "gather"
    plan: str = "zero3"
    precision: str = "fp32"
    documents: bool = False
    split: bool = True
    recomputed: bool = False
    ep: int = 1

    @property
    def name(self) -> str:
        standard = Shared()
        return "-".join(f"{key}={value}" for key, value in vars(self).items() if value != getattr(standard, key))


@dataclass
class Found:
    """Both devices, seen by one rank.

    Attributes:
        weights, losses: the largest differences, of the largest value; whole weights are the first rank's.
        faults: what the device has against it.
        waits: how often the host waited for the device in the last step, by phase and place.
    """

    weights: float
    losses: float
    faults: list[str]
    waits: dict[str, int]


def compare(case: Shared) -> Found:
    """The case on both devices. Waits are those of the last step."""
    report.take()
    with Watching(), mock.patch.object(attention_kernels, "_is_cuda_flash", return_value=False):  # no host has it
        weights, losses, waits = _trained(case, "cuda")
    faults = [str(finding) for finding in report.take() if finding.kind in FAULTS]
    expected, its_losses, _ = _trained(case, "cpu")
    report.take()
    return Found(
        max((apart(weights[name], whole) for name, whole in expected.items()), default=0.0),
        apart(losses, its_losses),
        faults,
        waits,
    )


def _trained(case: Shared, device: str) -> tuple[dict[str, Tensor], Tensor, dict[str, int]]:
    torch.manual_seed(0)
    mesh = tz.mesh(tp=case.tp, cp=case.cp, ep=case.ep, device=device)
    model = Decoder(replace(SHAPE, experts=EXPERTS if case.ep > 1 else None))
    if case.recomputed:
        checkpoint_activations(model, "full", units=[Block])
    plan = model.tensor_plan(gathered=False)
    tz.parallelize(model, mesh, tensor=plan if case.tp > 1 else None, sequence=case.split, context=case.mode)
    loss_of = VocabularyLoss(mesh, SHAPE.vocab_size) if case.tp > 1 else _whole_loss
    model, optimizer = sharded_decoder(model, case.plan, case.precision, mesh)
    context, data = context_of(model), torch.Generator().manual_seed(mesh.get_local_rank("dp_shard"))
    losses, waits = list[Tensor](), Counter[str]()
    for _ in range(STEPS):
        earlier = report.of("sync", "pageable")
        for micro in range(MICRO):
            with report.phase("input"):
                tokens, targets, positions = _batch(case, data)
                inputs, targets, own = (tokens, targets, None)
                if context is not None:
                    inputs, targets = context.split(tokens, targets)
                    own = context.place(positions, torch.device(device))
                inputs, targets = (_to(each, device) for each in (inputs, targets))
            model.set_gradient_denominator(float(MICRO * ROWS * SHAPE.max_sequence_length))
            with tz.accumulate(model) if micro < MICRO - 1 else contextlib.nullcontext():
                with report.phase("forward"):
                    logits = model(inputs, own)
                    loss = loss_of(logits.flatten(0, 1), targets.flatten())
                    if (aside := auxiliary_loss(model)) is not None:
                        loss = loss + aside
                with report.phase("backward"):
                    loss.backward()
            losses.append(loss.detach())
        with report.phase("clip"):
            losses.append(tz.clip_grad_norm_(model, 1.0))
        with report.phase("step"):
            optimizer.step()
            optimizer.zero_grad()
        waits = report.of("sync", "pageable") - earlier
    with report.phase("after"):
        weights = {name: whole.cpu().clone() for name, whole in tz.full_state_dict(model).items()}
        told = torch.stack(losses).float().cpu()
    counted = {f"{each.phase}: {each.where}": n for each, n in waits.items() if not each.thread.startswith("terrazzo-")}
    return weights, told, counted


def sharded_decoder(model: Decoder, plan: str, precision: str, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """With the optimizer that both devices are compared behind."""
    adamw = functools.partial(torch.optim.AdamW, lr=LR, eps=EPS)
    return tz.shard(model, adamw, plan, units=[Block], precision=precision, mesh=mesh)


def waits_unplaced(mode: str) -> int:
    """How often the host waits to know what the tokens of one forward see, by positions that are on the device."""
    context = Context(dist.group.WORLD, mode)
    (own,) = context.split(torch.arange(16).expand(ROWS, -1).contiguous())
    there = _to(own, "cuda")
    report.take()
    for _ in range(2):  # of two layers, which ask for the same
        context.mask(there, own.shape[1])
    return report.of("sync", "pageable").total()


def faults_of_a_hasty_ring() -> list[str]:
    """What the device has against one whose ranks use keys before they are there."""
    send_to_next = AxisRanks.send_to_next

    def hasty(self: AxisRanks, own: Tensor) -> Callable[[], Tensor]:
        arrived = send_to_next(self, own)
        with mock.patch.object(Handle, "wait", return_value=None):
            received = arrived()
        return lambda: received

    with mock.patch.object(AxisRanks, "send_to_next", hasty):
        return compare(Shared(cp=2, mode="ring")).faults


def _whole_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _batch(case: Shared, data: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    length = SHAPE.max_sequence_length
    tokens = torch.randint(SHAPE.vocab_size, (ROWS, length + 1), generator=data)
    positions = torch.arange(length).expand(ROWS, -1)
    if case.documents:
        positions = torch.cat([torch.arange(n) for n in (5, length - 12, 7)]).expand(ROWS, -1)
    return tokens[:, :-1], tokens[:, 1:], positions


def _to(values: Tensor, device: str) -> Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device == "cuda" else values
