"""Where the ranks of a run meet: the address that they were all given, and who has not come there in time."""

from __future__ import annotations

import json
import os
from datetime import timedelta

import torch.distributed as dist

from terrazzo.errors import BadInput

__all__ = ["meet"]

_GRACE = timedelta(seconds=10)
"""For what is said at the end of the time to arrive."""


def meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, once all ranks have come there; every rank calls this.

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
    _call_roll(store, rank, world_size, timeout, address)
    return dist.PrefixStore("run", store)


def _call_roll(store: dist.Store, rank: int, world_size: int, timeout: timedelta, address: str) -> None:
    """Rank 0 says who is missing, so that all hear the same; it leaves, and its store with it, when they have heard."""
    store.set(f"here/{rank}", "yes")
    if rank == 0:
        absent = _absent(store, world_size, timeout)
        store.set("absent", json.dumps(absent))
        present = [number for number in range(1, world_size) if number not in absent]
        if absent and present:
            _comes(store, [f"heard/{number}" for number in present], _GRACE)
    else:
        absent = json.loads(store.get("absent")) if _comes(store, ["absent"], timeout + _GRACE) else [0]
        store.set(f"heard/{rank}", "yes")
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        who = f"Ranks {shown} have" if len(absent) > 1 else f"Rank {shown} has"
        raise BadInput(
            f"{who} not come to {address}, where the {world_size} ranks of this run meet, within"
            f" {timeout.total_seconds():g} s: look at what became of them, or give them longer with launch.timeout_s."
        )


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
    """Without the C++ stack that torch appends."""
    return str(error).partition("\n")[0].rstrip(". ")
