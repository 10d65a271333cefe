"""Programs for virtual time, and what they take: see test_times.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from hostcuda.device import virtual

__all__ = ["collectives", "kernels"]

SPEED = 2.0**30  # of everything, so that seconds times it are bytes or FLOPs


@contextlib.contextmanager
def _speeds() -> Iterator[None]:
    before = vars(virtual.LINKS).copy()
    virtual.set_speeds(SPEED, SPEED, SPEED)
    vars(virtual.LINKS).update(near=SPEED, far=SPEED / 4, hop_s=16 / SPEED)
    try:
        yield
    finally:
        vars(virtual.LINKS).update(before)
        virtual.set_speeds()


def kernels() -> dict[str, dict[str, int]]:
    """FLOPs or bytes of a few programs, by kind of work."""
    x, y, out = (torch.ones(8, 8, device="cuda") for _ in range(3))
    host, side = torch.empty(8, 8).pin_memory(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def beside() -> None:
        with torch.cuda.stream(side):
            x.mul(2)

    programs: dict[str, Callable[[], object]] = {
        "product": lambda: x @ y,
        "sum": lambda: x + y,
        "sum in place": lambda: x.add_(y),
        "sum out of place": lambda: torch.add(x, y, out=out),
        "clearing": lambda: x.zero_(),
        "beside": beside,
        "copy": lambda: x.copy_(y),
        "copy in": lambda: x.copy_(host),
        "copy out": lambda: host.copy_(x),
    }
    found = {}
    with _speeds():
        for name, program in programs.items():
            before = virtual.spent_s()
            program()
            spent = {kind: round((after - before[kind]) * SPEED) for kind, after in virtual.spent_s().items()}
            found[name] = {kind: amount for kind, amount in spent.items() if amount}
    return found


def collectives() -> tuple[list[tuple[str, bool, float]], float]:
    """Of four ranks: name, whether among neighbours, bytes' worth of seconds; and of the step in which they were."""
    ranks = dist.get_world_size()
    far = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)][dist.get_rank() % 2]
    own, whole = torch.ones(64, device="cuda"), torch.ones(64 * ranks, device="cuda")
    with _speeds(), virtual.listening() as heard:
        torch.cuda.synchronize()
        begun_s = virtual.now_s()
        dist.all_gather_into_tensor(whole, own)
        dist.reduce_scatter_tensor(own, whole)
        dist.all_reduce(whole)
        dist.all_reduce(whole, group=far)
        torch.cuda.synchronize()
        took_s = virtual.now_s() - begun_s
    dist.all_reduce(own)  # nobody listens
    return [(each.name, each.near, each.seconds * SPEED) for each in heard], took_s * SPEED
