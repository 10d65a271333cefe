"""Ranks by host, and how hosts reach each other: a socket that listens, and the address that others find it at."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from terrazzo.errors import TerrazzoError
from terrazzo.exchange import gather_json, together

__all__ = ["Hosts", "open_listener", "own_address"]

T = TypeVar("T")


@dataclass(frozen=True)
class Hosts:
    """Which ranks are on which host.

    Attributes:
        ranks: the ranks of each host, ascending; hosts are in the order of their first ranks.
        own: the number of this rank's host.
    """

    ranks: Sequence[Sequence[int]]
    own: int

    @classmethod
    def that_share(cls, what: str) -> Hosts:
        """Ranks that give the same `what` count as one host. Collective."""
        told = gather_json(what)
        names = list(dict.fromkeys(told))
        ranks = [[rank for rank, theirs in enumerate(told) if theirs == name] for name in names]
        return cls(ranks, names.index(what))

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.ranks)

    @property
    def here(self) -> Sequence[int]:
        """The ranks of this host."""
        return self.ranks[self.own]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its host."""
        return self.here[0] == dist.get_rank()

    @property
    def before(self) -> int:
        """The host before this one, which is its partner: each host keeps a copy of what the one before it has."""
        return (self.own - 1) % self.count

    def on_firsts(self, work: Callable[[], T], failed: type[TerrazzoError]) -> T | None:
        """Do `work` on the first rank of each host, which gets the result; others get None. Collective: `together`."""
        return together(lambda: work() if self.is_first else None, failed)


def open_listener() -> socket.socket:
    """A socket that listens for connections of other hosts, at any free port."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel has it, and no interface
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def own_address() -> str:
    """This host's address for other hosts: the one from which it reaches MASTER_ADDR, or MASTER_ADDR itself."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            found = str(probe.getsockname()[0])
            if not ipaddress.ip_address(found).is_loopback:
                return found
    return master
