"""Runs the programs of the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tests.hostcuda.rules_of_collectives  # noqa: F401
from hostcuda.device import FAULTS, Watching, report
from tests.hostcuda.rules import RULES, here, pinned

__all__ = ["NOTES", "RULES", "attempt", "noted"]


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


NOTES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], list[str]]] = {
    "a value that the host asks for": (lambda x, on_host: x[0].item(), ["sync"]),
    "a condition": (lambda x, on_host: bool(x[0] > 0), ["sync"]),
    "a result whose size depends on values": (lambda x, on_host: x.nonzero(), ["sync"]),
    "a mask as an index": (lambda x, on_host: x[x > 0], ["sync"]),
    "a comparison of whole tensors": (lambda x, on_host: torch.equal(x, x), ["sync"]),
    "a copy to the host": (lambda x, on_host: on_host.copy_(x), ["sync"]),
    "a copy from the host": (lambda x, on_host: x.copy_(on_host), ["sync"]),
    "a copy to memory that is not pinned": (lambda x, on_host: torch.empty(64).copy_(x, non_blocking=True), ["sync"]),
    "the device's synchronize": (lambda x, on_host: torch.cuda.synchronize(), ["sync"]),
    "a stream's": (lambda x, on_host: torch.cuda.current_stream().synchronize(), ["sync"]),
    "an event's": (lambda x, on_host: torch.cuda.current_stream().record_event().synchronize(), ["sync"]),
    "a kernel": (lambda x, on_host: x.mul_(2.0), []),
    "a copy that is asked not to wait": (lambda x, on_host: on_host.copy_(x, non_blocking=True), []),
    "a stream that waits": (lambda x, on_host: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), []),
    "record_stream": (lambda x, on_host: x.record_stream(torch.cuda.Stream()), ["record_stream"]),
}
"""What is done with a tensor on the device and a pinned one, and what the device notes of it."""


def noted(name: str) -> list[str]:
    x, on_host = here(64), pinned(64)
    report.take()
    NOTES[name][0](x, on_host)
    kinds = sorted({finding.kind for finding in report.take()})
    torch.cuda.synchronize()
    report.take()
    return kinds
