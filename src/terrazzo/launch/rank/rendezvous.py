"""The rendezvous of a run's ranks at the address that all were given, and which ranks have not come in time.

The store at that address may be older than the run. torchrun's agents serve it for as long as they live, and what ranks
have said there before a restart stays; the agents' counts of restarts differ, since each counts only those that its own
ranks were the cause of. So rank 0 draws a name under which everything of this run is said, and answers to each rank's
own call, which is a new one: whoever has found an older name gets no answer there, and looks again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from terrazzo.errors import BadInput
from terrazzo.messages import listed, of_ranks
from terrazzo.processes.standard_streams import say_on_stderr

__all__ = ["meet", "waiting_is_said"]

_GRACE = timedelta(seconds=10)
"""Extra time for messages that are sent at the end of the timeout."""
_LOOK_AGAIN_S = 1.0
_SAY_AFTER_S = 10.0
"""How long a rank waits without a word."""
_OTHERS_ARE_NEAR_S = 5.0
"""For so long after a rank that was told another WORLD_SIZE the rest is waited for, to be told of it."""


@contextmanager
def waiting_is_said(world_size: int, timeout_s: float, local_rank: int) -> Iterator[None]:
    """The first rank of each machine says on stderr, once, that it has waited in this context for some seconds."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = f"Waiting for the other ranks of {world_size} at {address}, up to launch.timeout_s={timeout_s:g}."
    timer = threading.Timer(_SAY_AFTER_S, say_on_stderr, [text])
    timer.daemon = True
    if local_rank == 0 and world_size > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The run's own prefix of the store at MASTER_ADDR:MASTER_PORT, once all ranks have come. Every rank calls this.

    Raises:
        BadInput: the address cannot be used; ranks, which are named, have not come within `timeout_s`, or were told
            another world size.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, which is there already
    hosts = rank == 0 and not by_agent
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            _port(os.environ["MASTER_PORT"]),
            world_size,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,  # which counts them; here they are called by their numbers
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"Rank {rank} cannot {'open' if hosts else 'reach'} {address}, where the ranks of this run meet:"
            f" {_first_line(error)}. MASTER_ADDR must name the host of rank 0, and MASTER_PORT a free port there that"
            " the other hosts can reach."
        ) from None
    if rank == 0:
        run, roll = _call_roll(store, world_size, timeout)
    else:
        run, roll = _answer(store, rank, world_size, timeout + _GRACE)
    if len(roll.sizes) > 1:
        told = " and ".join(f"{size} on {of_ranks(ranks)}" for size, ranks in roll.sizes.items())
        raise BadInput(f"WORLD_SIZE is {told}, which meet at {address}: give every rank of this run the same.")
    if roll.absent:
        who = f"Ranks {listed(roll.absent, 8)} have" if len(roll.absent) > 1 else f"Rank {roll.absent[0]} has"
        raise BadInput(
            f"{who} not come to {address}, where the {world_size} ranks of this run meet, within"
            f" {timeout.total_seconds():g} s: look at what became of them, or give them longer with launch.timeout_s."
        )
    return run


class RollCall(NamedTuple):
    """The ranks that have not come, and by each WORLD_SIZE those that were told it, where there are several."""

    absent: list[int]
    sizes: dict[str, list[int]]


class Caller(NamedTuple):
    """A rank that has come, the WORLD_SIZE that it was told, and where it is answered."""

    rank: int
    world_size: int
    call: str


def _call_roll(store: dist.Store, world_size: int, timeout: timedelta) -> tuple[dist.Store, RollCall]:
    """Rank 0's part; returns the run's store, and what it has told those that have come."""
    name = os.urandom(8).hex()
    run = dist.PrefixStore(name, store)
    store.set("run", name)
    callers = _callers(run, world_size, timeout)
    sizes: dict[str, list[int]] = {str(world_size): [0]}
    for caller in sorted(callers):
        sizes.setdefault(str(caller.world_size), []).append(caller.rank)
    present = {caller.rank for caller in callers}
    apart = sizes if len(sizes) > 1 else {}
    roll = RollCall([] if apart else [rank for rank in range(1, world_size) if rank not in present], apart)
    for caller in callers:
        run.set(f"answer/{caller.call}", json.dumps(roll))
    if (roll.absent or apart) and callers:
        _comes(run, [f"heard/{caller.call}" for caller in callers], _GRACE)
    return run, roll


def _callers(run: dist.Store, world_size: int, timeout: timedelta) -> list[Caller]:
    """The other ranks as they come, until all have or the time is over; soon after one that was told another size."""
    callers: list[Caller] = []
    deadline, expected = time.monotonic() + timeout.total_seconds(), world_size
    while not {caller.rank for caller in callers}.issuperset(range(1, expected)):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        if not _comes(run, [f"caller/{len(callers) + 1}"], left):
            break
        callers.append(Caller(*json.loads(run.get(f"caller/{len(callers) + 1}"))))
        if callers[-1].world_size != world_size:
            expected = max(expected, callers[-1].world_size)
            deadline = min(deadline, time.monotonic() + _OTHERS_ARE_NEAR_S)
    return callers


def _answer(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> tuple[dist.Store, RollCall]:
    """Any other rank's part; returns the run's store, and what rank 0 has told."""
    call, deadline = os.urandom(8).hex(), time.monotonic() + timeout.total_seconds()
    called: set[str] = set()
    while (left := deadline - time.monotonic()) > 0:
        if _comes(store, ["run"], timedelta(seconds=left)):
            name = store.get("run").decode()
            run = dist.PrefixStore(name, store)
            if name not in called:
                called.add(name)
                run.set(f"caller/{run.add('callers', 1)}", json.dumps(Caller(rank, world_size, call)))
            if _comes(run, [f"answer/{call}"], timedelta(seconds=min(left, _LOOK_AGAIN_S))):
                roll = RollCall(*json.loads(run.get(f"answer/{call}")))
                run.set(f"heard/{call}", "yes")
                return run, roll
    return store, RollCall([0], {})


def _comes(store: dist.Store, keys: list[str], timeout: timedelta) -> bool:
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        return False
    return True


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise ValueError(f"'{text}' is no port, which are whole numbers below 65536")
    return int(text)


def _first_line(error: Exception) -> str:
    """The message without the C++ stack that torch appends."""
    return str(error).partition("\n")[0].rstrip(". ")
