"""Runs the programs of the rules."""

from __future__ import annotations

import torch
import torch.distributed as dist

import tests.hostcuda.rules_of_collectives  # noqa: F401
from hostcuda.device import FAULTS, Watching, report
from tests.hostcuda.rules import RULES

__all__ = ["RULES", "attempt"]


def attempt(name: str, wrong: bool) -> list[str]:
    """Kinds of what the device finds, and errors."""
    torch.cuda.synchronize()
    report.take()
    errors = []
    with Watching():
        try:
            returned = RULES[name][0](wrong)
        except (RuntimeError, TypeError) as error:
            errors, returned = [str(error)], None
    if isinstance(returned, str):
        errors.append(returned)
    torch.cuda.synchronize()
    dist.barrier()
    # Found in both programs, and no fault: the host waits for the device, at the end.
    return errors + [finding.kind for finding in report.take() if finding.kind in (*FAULTS, "pageable")]
