"""Ranks of one machine get connected whatever other processes do at their listeners. Ranks are threads here."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from terrazzo.engine.comm.host import neighbours as peers
from terrazzo.engine.comm.host import rendezvous
from terrazzo.engine.comm.host.neighbours import Neighbour, find_neighbours
from terrazzo.engine.labels.label import Label
from tests.helpers.threads import in_threads

KINDS = ("gather", "reduce")


class Ranks:
    """Threads that meet in an all-gather.

    Args:
        pause_s: after the first all-gather, when all listeners are open and nobody has connected yet.
    """

    def __init__(self, count: int, pause_s: float = 0.0) -> None:
        self.count, self.pause_s = count, pause_s
        self.rows: list[list[Tensor]] = [[] for _ in range(count)]
        self._barrier = threading.Barrier(count, timeout=60)

    def all_gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        def gather(values: Tensor) -> Tensor:
            self.rows[rank].append(values)
            self._barrier.wait()
            found = torch.stack([sent[-1] for sent in self.rows])
            self._barrier.wait()
            if len(self.rows[rank]) == 1:
                time.sleep(self.pause_s)
            return found

        return gather

    def find(self, timeout_s: float = 60.0) -> list[dict[int, Neighbour]]:
        def of_rank(rank: int) -> dict[int, Neighbour]:
            return find_neighbours(rank, range(self.count), self.all_gather(rank), KINDS, timeout_s)

        return in_threads(self._barrier, of_rank)


def everybody(count: int) -> list[set[int]]:
    return [set(range(count)) - {rank} for rank in range(count)]


def test_ranks_send_what_grows_with_the_ranks_and_not_with_their_square() -> None:
    ranks = Ranks(20)
    machines = iter([1, 2] * 10)
    with patch.object(peers, "_machine", lambda: next(machines)):
        found = ranks.find()
    assert sorted(map(len, found)) == [9] * 20
    assert all(sum(sent.numel() for sent in rows) == 3 + 1 for rows in ranks.rows)


FLOOD = """
import os, re, resource, socket, sys, time
if os.geteuid() == 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, 6000))
    os.setuid(65534)
lines = []
print("ready", flush=True)
while True:
    names = re.findall(r"@(terrazzo-[0-9a-f]+)", open("/proc/net/unix").read())
    for name in set(names):
        for _ in range(100 if len(lines) < 5000 else 0):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.setblocking(False)
            try:
                line.connect("\\0" + name)
                lines.append(line)
            except OSError:
                line.close()
                break
    for line in lines[:-4000]:
        line.close()
    del lines[:-4000]
    time.sleep(0.001)
"""


@pytest.fixture
def flood() -> Iterator[None]:
    """Another process, of another user where the tests may do so, keeps the queue before every listener full."""
    with subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        assert process.poll() is None, "the flood has dried up"
        process.kill()


IN_TURN = pytest.mark.xdist_group("rendezvous")
"""The flood of one worker's test is at the listeners of all others, where tests that wait in line would wait on."""


@IN_TURN
@pytest.mark.usefixtures("flood")
def test_a_flood_of_strangers_does_not_stop_a_start() -> None:
    with patch.object(rendezvous, "_QUEUE", 50):
        ranks = Ranks(3, pause_s=1.0)
        found = ranks.find()
    assert [set(near) for near in found] == everybody(3)


def knock(listener: rendezvous.Listener, times: int, message: bytes = b"") -> list[Any]:
    lines = []
    for _ in range(times):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(rendezvous._name(listener.address))
        if message:
            line.send(message)
        lines.append(line)
    return lines


@IN_TURN
@pytest.mark.parametrize(
    "message", [b"", b"x", rendezvous._HELLO.pack(1, 0, 0, 0, 0), rendezvous._HELLO.pack(1, 0, 99, 0, 0) + b"more"]
)
def test_strangers_that_say_nothing_or_nonsense_are_not_waited_for(message: bytes) -> None:
    lines: list[Any] = []

    class Watched(rendezvous.Listener):
        def __init__(self) -> None:
            super().__init__()
            lines.extend(knock(self, 300, message))

    started = time.monotonic()
    with patch.object(peers, "Listener", Watched):
        found = Ranks(3).find()
    assert [set(near) for near in found] == everybody(3)
    assert time.monotonic() - started < 60
    for line in lines:
        line.close()


def test_who_knows_the_key_must_still_make_sense() -> None:
    """A rank that names a kind that there is not, or calls twice, is hung up on."""
    lines: list[Any] = []

    class Watched(rendezvous.Listener):
        def __init__(self) -> None:
            super().__init__()
            for number in (-1, 7):
                lines.extend(knock(self, 1, rendezvous._HELLO.pack(self.address.key, 0, number, 0, 0)))

    with patch.object(peers, "Listener", Watched):
        assert [set(near) for near in Ranks(3).find()] == everybody(3)
    for line in lines:
        line.close()


def test_a_rank_that_hears_nobody_is_left_out_on_both_sides() -> None:
    """Rank 1 lets nobody in, as where a flood never ends: rank 0 gives up in time, and both know."""
    deaf = {1}

    def let_in(self: Any) -> None:
        if self.rank in deaf:
            time.sleep(0.01)
        else:
            original(self)

    original = rendezvous._Meeting._let_in
    started = time.monotonic()
    with patch.object(rendezvous._Meeting, "_let_in", let_in):
        found = Ranks(3).find(timeout_s=24.0)  # a quarter of it to get connected
    assert [set(near) for near in found] == [{2}, {2}, {0, 1}]
    assert time.monotonic() - started < 24.0


def test_who_cannot_be_read_is_left_out_on_both_sides() -> None:
    """Rank 2 does not find at rank 0 what rank 0 says is there."""
    reading = threading.local()
    original = peers._reads

    def reads(memory: Any, expected: int) -> bool:
        return False if expected == refused.get("value") and reading.rank == 2 else original(memory, expected)

    refused: dict[str, int] = {}
    met = rendezvous.connect

    def meet(rank: int, listener: Any, others: Any, kinds: Any, probe: Any, patience_s: float) -> Any:
        reading.rank = rank
        if rank == 0:
            refused["value"] = probe[1]
        return met(rank, listener, others, kinds, probe, patience_s)

    with patch.object(peers, "_reads", reads), patch.object(peers, "connect", meet):
        found = Ranks(3).find()
    assert [set(near) for near in found] == [{1}, {0, 2}, {1}]


def test_permission_to_read_is_there_while_there_is_a_neighbour() -> None:
    """The kernel is told of the parent as long as two ranks are neighbours, and of nobody otherwise."""
    told: list[int] = []

    class Kernel:
        def prctl(self, option: int, pid: Any, *rest: int) -> None:
            assert option == 0x59616D61
            told.append(pid.value)

    machines = iter([1, 2, 3, 3, 3, 3])
    nobody_else = peers._Permission()
    gc.collect()
    _until(lambda: not peers._permission._holders)  # neighbours of other tests, which tell the kernel too
    with (
        patch.object(peers, "_machine", lambda: next(machines)),
        patch.object(peers, "_libc", Kernel()),
        patch.object(peers, "_permission", nobody_else),
    ):
        Ranks(2).find()
        assert (told[0], told[-1]) == (os.getppid(), 0)
        found, others = Ranks(2).find(), Ranks(2).find()
        assert len(found) == len(others) == 2
        del found
        assert told[-1] == os.getppid()
        del others
        _until(lambda: not told[-1])
        assert told[-1] == 0
    assert nobody_else._holders == 0


def _until(holds: Callable[[], bool]) -> None:
    """Wait for it, a minute at most: a thread of its own takes leave of neighbours."""
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_errors_name_the_rank() -> None:
    near, other = Ranks(2).find(timeout_s=0.5)
    near[1].offer("gather", torch.zeros(2), Label())
    with pytest.raises(ConnectionError, match="Rank 1 has not come to this gather in time: it may have ended"):
        near[1].offered("gather", 8, Label())
    other[0].hang_up()
    with pytest.raises(ConnectionError, match="Rank 1 has ended or failed"):
        near[1].offered("reduce", 8, Label())
