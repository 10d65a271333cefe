"""Training in stages on the simulated device and on the host, in the same ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from hostcuda.device import FAULTS, Watching, report
from terrazzo.engine import checkpoint_activations
from terrazzo.engine.comm.collectives import MessageRoute, NativeCollectives
from terrazzo.engine.comm.transfer import Handle
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.hostcuda.cases import apart
from tests.hostcuda.shared import sharded_decoder

__all__ = ["Found", "Staged", "compare", "faults_of_hasty_stages"]

SHAPE = DecoderConfig(
    vocab_size=36, dim=32, layers=6, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=16, tie_embeddings=False
)
STEPS, MICRO, ROWS = 2, 4, 2


@dataclass(frozen=True)
class Staged:
    """What is trained: a decoder of which each rank along pp has stages."""

    pp: int = 2
    plan: str = "zero3"
    schedule: str = "1f1b"
    chunks: int = 1
    precision: str = "fp32"
    recomputed: bool = False
    tied: bool = False

    @property
    def name(self) -> str:
        standard = Staged()
        return (
            "-".join(f"{key}={value}" for key, value in vars(self).items() if value != getattr(standard, key)) or "1f1b"
        )


@dataclass
class Found:
    """Both devices, seen by one rank: the largest differences, of the largest value, and what the device has found."""

    weights: float
    losses: float
    faults: list[str]


def compare(case: Staged) -> Found:
    """The case on both devices."""
    report.take()
    with Watching():
        weights, losses = _trained(case, "cuda")
    faults = [str(finding) for finding in report.take() if finding.kind in FAULTS]
    expected, its_losses = _trained(case, "cpu")
    report.take()
    differences = [apart(weights[name], whole) for name, whole in expected.items()]
    return Found(max(differences, default=0.0), apart(losses, its_losses), faults)


def faults_of_hasty_stages(tied: bool) -> list[str]:
    """What the device has against stages that use activations before they are there, or tied gradients of others."""
    receive = NativeCollectives.receive

    def hasty(links: NativeCollectives, into: Tensor, route: MessageRoute, tag: int) -> Handle:
        handle = receive(links, into, route, tag)
        return Handle() if handle.queued and (route.kind == "tied") is tied else handle

    with mock.patch.object(NativeCollectives, "receive", hasty):
        report.take()
        with Watching(), contextlib.suppress(ValueError, RuntimeError):
            _trained(Staged(tied=tied), "cuda")
        return [str(finding) for finding in report.take() if finding.kind in FAULTS]


def _trained(case: Staged, device: str) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    mesh = tz.mesh(pp=case.pp, device=device)
    model = Decoder(replace(SHAPE, tie_embeddings=case.tied))
    if case.recomputed:
        checkpoint_activations(model, "full", units=[Block])
    tz.parallelize(model, mesh, pipeline=tz.Pipeline(case.schedule, case.chunks))
    model, optimizer = sharded_decoder(model, case.plan, case.precision, mesh)
    data, losses = torch.Generator().manual_seed(mesh.get_local_rank("dp_shard")), list[Tensor]()
    for _ in range(STEPS):
        with report.phase("input"):
            pairs = [_pair(data, device) for _ in range(MICRO)]
        with report.phase("forward"):
            losses.append(tz.step(model, pairs, _loss_of, denominator=float(MICRO * ROWS * 16)))
        with report.phase("clip"):
            losses.append(tz.clip_grad_norm_(model, 1.0))
        with report.phase("step"):
            optimizer.step()
            optimizer.zero_grad()
    with report.phase("after"):
        weights = {name: whole.cpu().clone() for name, whole in tz.full_state_dict(model).items()}
        return weights, torch.stack(losses).float().cpu()


def _pair(data: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SHAPE.vocab_size, (ROWS, SHAPE.max_sequence_length + 1), generator=data).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
