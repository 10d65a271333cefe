"""Programs for virtual time, and what they take: see test_times.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from hostcuda.device import virtual
from terrazzo.engine import engine_of

__all__ = ["collectives", "kernels", "meetings", "traced_message", "updates_on_the_host"]

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
    shares, to_next = torch.empty_like(whole), [64 * (each == (dist.get_rank() + 1) % ranks) for each in range(ranks)]
    of_last = [64 * (each == (dist.get_rank() - 1) % ranks) for each in range(ranks)]
    with _speeds():
        dist.all_reduce(whole)  # the ranks' clocks are those of the last of them
        torch.cuda.synchronize()
        with virtual.listening() as heard:
            begun_s = virtual.now_s()
            dist.all_gather_into_tensor(whole, own)
            dist.reduce_scatter_tensor(own, whole)
            dist.all_reduce(whole)
            dist.all_reduce(whole, group=far)
            dist.all_to_all_single(shares, whole)
            dist.all_to_all_single(torch.empty_like(own), own, of_last, to_next)
            torch.cuda.synchronize()
            took_s = virtual.now_s() - begun_s
    dist.all_reduce(own)  # nobody listens
    return [(each.name, each.near, each.seconds * SPEED) for each in heard], took_s * SPEED


def meetings() -> dict[str, float]:
    """Seconds after which a rank of two has ended programs in which it meets the other one.

    A message of 64 elements takes a second, and so does their sum.
    """
    first, peer = dist.get_rank() == 0, 1 - dist.get_rank()
    own, into = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")

    def work(seconds: int) -> None:
        torch.cuda._sleep(seconds * 10**9)

    def send() -> Any:
        return dist.isend(own, peer)

    def receive() -> Any:
        return dist.irecv(into, peer)

    def late_sender() -> None:
        if first:
            work(3)
            send()
        else:
            message = receive()
            work(1)
            message.wait()
            work(2)

    def late_receiver() -> None:
        if first:
            send()
        else:
            work(3)
            receive().wait()
            work(2)

    def receiver_at_work() -> None:
        if first:
            send()
        else:
            message = receive()
            work(3)
            message.wait()
            work(2)

    def ping_pong() -> None:
        work(1)
        if first:
            send()
            receive().wait()
            work(1)
        else:
            receive().wait()
            work(2)
            send()

    def second_first() -> None:
        if first:
            work(3)
            send()
            send()
        else:
            receive()
            receive().wait()

    def late_rank() -> None:
        work(3 if first else 1)
        total = dist.all_reduce(own, async_op=True)
        work(2 * (not first))
        total.wait()
        work(1)

    def uneven() -> None:
        work(2 * (not first))
        coming, going = ([0, 0], [0, 64]) if first else ([64, 0], [0, 0])
        dist.all_to_all_single(into[: sum(coming)], own[: sum(going)], coming, going)

    ends = {}
    with _speeds():
        virtual.LINKS.near, virtual.LINKS.hop_s = own.nbytes, 0.0
        virtual.set_speeds(memory=1e30)
        for program in (
            late_sender, late_receiver, receiver_at_work, ping_pong, second_first, late_rank, uneven,
        ):  # fmt: skip
            dist.all_reduce(own)
            torch.cuda.synchronize()
            begun_s = virtual.now_s()
            program()
            torch.cuda.synchronize()
            ends[program.__name__] = round(virtual.now_s() - begun_s, 9)
    return ends


def traced_message() -> list[tuple[str, float, float]]:
    """What the second of two ranks does, in seconds since they met: it is sent something late, and goes on."""
    own = torch.ones(64, device="cuda")
    with _speeds():
        virtual.LINKS.near, virtual.LINKS.hop_s = own.nbytes, 0.0
        dist.all_reduce(own)
        torch.cuda.synchronize()
        begun_s = virtual.now_s()
        with virtual.tracing() as spans:
            if dist.get_rank() == 0:
                torch.cuda._sleep(3 * 10**9)
                dist.send(own, 1)
            else:
                dist.recv(own, 0)
                torch.cuda._sleep(2 * 10**9)
    return [(span.what, round(span.begin_s - begun_s, 9), round(span.end_s - begun_s, 9)) for span in spans]


def updates_on_the_host(precision: str) -> tuple[int, int, bool]:
    """Bytes that an update brings to the device; elements of the weights; whether these are the masters, rounded, and
    host memory is what the bill has promised.
    """
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    offload = tz.Offload(block_mib=4 / 1024)  # cells of 1,024 elements: several of them, and a rest
    model, optimizer = tz.shard(model, optimizer, "zero1@cpu", precision=precision, offload=offload)
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    engine = engine_of(model)
    with _speeds():
        before_s = virtual.spent_s()["copies in"]
        optimizer.step()
        engine.settle()
        moved = round((virtual.spent_s()["copies in"] - before_s) * SPEED)
    (bucket,) = engine.buckets()
    whole, host = bucket.space.layout.whole, torch.device("cpu")
    weights, masters = bucket.weight.copied(whole, host), bucket.master.copied(whole, host)
    billed = engine.bill.host_bytes == engine.store.usage()["host_bytes"]
    return moved, whole.numel, billed and torch.equal(weights, masters.to(weights.dtype))
