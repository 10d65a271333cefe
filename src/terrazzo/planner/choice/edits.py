"""Of a plan that does not fit: the edit that changes the least of it, and with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from terrazzo.errors import BadInput
from terrazzo.planner.assemble import Estimate
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.text.words import room_text

__all__ = ["edit_that_fits"]

MOST = 1024
"""GPUs that are tried, by doubling."""


def edit_that_fits(request: Request, found: Estimate, estimate: Callable[[Request], Estimate]) -> str:
    """A sentence with the options that make `found`, which `request` means and which does not fit, fit.

    What costs little comes first: selective checkpointing, smaller micro-batches, full checkpointing, both, more GPUs.
    The first of these is named with which it surely fits, or else as expected.
    """
    expected = ""
    for options, changed in _edits(request, found.setup):
        try:
            other = estimate(changed)
        except BadInput:  # such as a batch that does not factor on so many ranks
            continue
        if not other.memory.fits or any(each.severity == "refuse" for each in other.objections):
            continue
        said = f"with {options}: {room_text(other.memory.rooms[0])} expected."
        if other.memory.fits_surely:
            return f"It fits {said}"
        expected = expected or f"It fits, but not surely, {said}"
    if expected:
        return expected
    tried = "smaller micro-batch, activation checkpointing or " if found.setup.model.computes else ""
    return (
        f"No {tried}number of GPUs up to {MOST} that was tried makes it fit: leave --strategy out, which compares all"
        " of them, with --offload any if states may leave the device."
    )


def _edits(request: Request, setup: Setup) -> Iterator[tuple[str, Request]]:
    """Options, and the request with them, what changes the least first."""
    least, words = request, ""
    if setup.model.computes:
        sizes = [setup.micro_batch >> shift for shift in range(1, setup.micro_batch.bit_length())]
        if setup.checkpointing == "none":
            yield "--ac selective", replace(request, checkpointing="selective")
        for size in sizes:
            yield f"--micro-batch {size}", replace(request, micro_batch=size)
        if setup.checkpointing != "full" or setup.every > 1:
            least, words = replace(request, checkpointing="full"), "--ac full"
            yield words, least
        for size in sizes:
            least, both = replace(least, micro_batch=size), f"{words} --micro-batch {size}".strip()
            if words:
                yield both, least
        words = f"{words} --micro-batch 1".strip() if sizes else words
    yield from _larger(request, "", setup.cluster.count)
    if words:
        yield from _larger(least, f"{words} ", setup.cluster.count)


def _larger(request: Request, words: str, count: int) -> Iterator[tuple[str, Request]]:
    while (count := 2 * count) <= MOST:
        yield f"{words}--gpus {count}", replace(request, gpus=count)
