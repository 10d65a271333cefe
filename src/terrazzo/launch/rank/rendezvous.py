"""The rendezvous of a run's ranks at the address that all were given, and which ranks have not come in time.

The store at that address may be older than the run. torchrun's agents serve it for as long as they live, and what ranks
have said there before a restart stays; the agents' counts of restarts differ, since each counts only those that its own
ranks were the cause of. So rank 0 draws a name under which everything of this run is said, and answers to each rank's
own call, which is a new one: whoever has found an older name gets no answer there, and looks again.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import torch.distributed as dist

from terrazzo.errors import BadInput
from terrazzo.messages import listed

__all__ = ["meet"]

_GRACE = timedelta(seconds=10)
"""Extra time for messages that are sent at the end of the timeout."""
_LOOK_AGAIN_S = 1.0


def meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The run's own prefix of the store at MASTER_ADDR:MASTER_PORT, once all ranks have come. Every rank calls this.

    Raises:
        BadInput: the address cannot be used, or ranks, which are named, have not come within `timeout_s`.
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
    run, absent = _call_roll(store, world_size, timeout) if rank == 0 else _answer(store, rank, timeout + _GRACE)
    if absent:
        who = f"Ranks {listed(absent, 8)} have" if len(absent) > 1 else f"Rank {absent[0]} has"
        raise BadInput(
            f"{who} not come to {address}, where the {world_size} ranks of this run meet, within"
            f" {timeout.total_seconds():g} s: look at what became of them, or give them longer with launch.timeout_s."
        )
    return run


def _call_roll(store: dist.Store, world_size: int, timeout: timedelta) -> tuple[dist.Store, list[int]]:
    """Rank 0's part; returns the run's store, and the missing ranks, which it tells those that have come."""
    name = os.urandom(8).hex()
    run = dist.PrefixStore(name, store)
    run.set("here/0", name)
    store.set("run", name)
    absent = _absent(run, world_size, timeout)
    present = [number for number in range(1, world_size) if number not in absent]
    for number in present:
        run.set(f"absent/{run.get(f'here/{number}').decode()}", json.dumps(absent))
    if absent and present:
        _comes(run, [f"heard/{number}" for number in present], _GRACE)
    return run, absent


def _answer(store: dist.Store, rank: int, timeout: timedelta) -> tuple[dist.Store, list[int]]:
    """Any other rank's part; returns the run's store, and the missing ranks."""
    call, deadline = os.urandom(8).hex(), time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        if _comes(store, ["run"], timedelta(seconds=left)):
            run = dist.PrefixStore(store.get("run").decode(), store)
            run.set(f"here/{rank}", call)
            if _comes(run, [f"absent/{call}"], timedelta(seconds=min(left, _LOOK_AGAIN_S))):
                absent: list[int] = json.loads(run.get(f"absent/{call}"))
                run.set(f"heard/{rank}", "yes")
                return run, absent
    return store, [0]


def _absent(store: dist.Store, world_size: int, timeout: timedelta) -> list[int]:
    keys = [f"here/{number}" for number in range(world_size)]
    if _comes(store, keys, timeout):
        return []
    return [number for number, key in enumerate(keys) if not store.check([key])]


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
