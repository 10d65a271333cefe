"""Weights that a step has updated, touched while they are still on their way to this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import terrazzo as tz
from hostcuda.device import FAULTS, Watching, report
from terrazzo.engine.buckets.parameters.at_rest import Arriving
from tests.hostcuda.cases import STEPS, Case, sharded, step

__all__ = ["TOUCHES", "touched"]

TOUCHES: dict[str, Callable[[nn.Module], Any]] = {
    "nobody": lambda model: None,
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "detach": lambda model: [p.detach().clone() for p in model.parameters()],
    "a list": lambda model: torch._foreach_norm(list(model.parameters())),
    "a vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "a part": lambda model: model[1].up.weight @ model[1].up.weight.T,  # type: ignore[operator, index]
    "the host": lambda model: [p.tolist() for p in model.parameters()],
    "the memory": lambda model: [p.untyped_storage() for p in model.parameters()],
    "gathered": lambda model: _gathered(model),
    "another step": lambda model: None,
    "an edit": lambda model: _halved(model.parameters()),
    "an edit of data": lambda model: _halved(parameter.data for parameter in model.parameters()),
}
"""What is done between a step and the next forward."""


def _gathered(model: nn.Module) -> list[Tensor]:
    with tz.gathered(model) as parameters:
        return [parameter.detach().clone() for parameter in parameters.values()]


@torch.no_grad()
def _halved(tensors: Any) -> None:
    for tensor in tensors:
        tensor.mul_(0.5)


def touched(plan: str, precision: str, touch: str, folder: str) -> tuple[list[str], int, float]:
    """Faults that the device finds, how many parameters were on their way, and how far apart weights end on both."""
    report.take()
    case, found, arriving = Case(plan, precision=precision), [], 0
    for device in ("cuda", "cpu"):
        data = torch.Generator().manual_seed(7)
        with Watching():
            model, optimizer = sharded(case, device, folder)
            for _ in range(STEPS):
                step(case, model, optimizer, data, device)
                arriving += sum(isinstance(parameter, Arriving) for parameter in model.parameters())
                if touch == "another step":
                    optimizer.step()
                TOUCHES[touch](model)
            found.append(_gathered(model))
    apart = max(float((a.cpu().float() - b.float()).abs().max()) for a, b in zip(*found, strict=True))
    return [str(finding) for finding in report.take() if finding.kind in FAULTS], arriving, apart
