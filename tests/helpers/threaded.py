"""The engine's collectives over torch's in-process group, whose ranks are threads."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from terrazzo.engine.comm.collectives import Collectives, MessageRoute
from terrazzo.engine.comm.sums import add_in_order
from terrazzo.engine.comm.transfer import Handle, Moves
from tests.helpers import meetings, turns

__all__ = ["ThreadedCollectives"]

_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many exchanges there have been in a group, by whatever model."""


class ThreadedCollectives(Collectives):
    """Blocking, and summed in rank order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store = dist.distributed_c10d._get_default_store()
        self.links.mesh_groups.add(self.group, functools.partial(meetings.break_off, self.group.pg_name))

    @contextlib.contextmanager
    def _waiting_for_all(self, kind: str) -> Iterator[None]:
        with super()._waiting_for_all(kind):
            if kind not in ("control", "broadcast"):
                self._compare_labels()
            yield

    def _compare_labels(self) -> None:
        """The first rank that comes writes down what it moves, and the others compare."""
        count = _compared[self.group] = _compared.get(self.group, 0) + 1
        label = self.label
        key = f"terrazzo/{self.group.group_name}/{count}"
        rank, code = self._store.compare_set(key, "", f"{dist.get_rank()} {label.code}").split()
        label.check(0, int(rank), int(code), 0)

    def _all_gather(self, full: Tensor, kind: str) -> Moves:
        own = self._chunks(full)[self.rank]
        with self._waiting_for_all(kind):
            meetings.all_gather(full, own, self.group)
        yield Handle()
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype, kind: str) -> Moves:
        received = torch.empty_like(full)
        with self.ledger.holding(received.nbytes):
            with self._waiting_for_all(kind):
                meetings.all_to_all(received, full, self.group)
            yield Handle()
            total = full.new_empty(full.numel() // self.size, dtype=dtype)
            add_in_order(self._chunks(received), total)
            return total

    def _all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int], kind: str
    ) -> Moves:
        with self._waiting_for_all(kind):
            dist.all_to_all_single(received, sent, list(received_numels), list(sent_numels), group=self.group)
        yield Handle()

    def send(self, values: Tensor, route: MessageRoute, tag: int) -> Handle:
        """By the store, through which torch's group of threads has no messages of its own."""
        self.traffic.record(route.counts_as, values.nbytes, axis=self.axis)
        self._store.set(self._letter(route, tag), values.detach().view(-1).view(torch.uint8).numpy().tobytes())  # type: ignore[arg-type]
        return Handle()

    def receive(self, into: Tensor, route: MessageRoute, tag: int) -> Handle:
        letter = _Letter(self._store, self._letter(route, tag), into)
        return Handle([letter], times=self.traffic.times_of(self.axis, route.counts_as))

    def _letter(self, route: MessageRoute, tag: int) -> str:
        return f"terrazzo/{self.group.group_name}/from {route.source} to {route.to}/{tag}"

    def receive_bytes(self, full_bytes: int) -> int:
        return full_bytes


_LOOKS_S = timedelta(milliseconds=100)
"""Between two looks whether another rank has failed, which ends no wait for a message."""


class _Letter:
    """A message on its way."""

    def __init__(self, store: dist.Store, key: str, into: Tensor) -> None:
        self._store, self._key, self._into = store, key, into

    def wait(self, patience: timedelta | None = None) -> None:
        until = None if patience is None else time.monotonic() + patience.total_seconds()
        while not self._store.check([self._key]):
            if until is not None and time.monotonic() > until:
                raise RuntimeError("gloo/transport: it has not come in time")
            if ProcessLocalGroup._terminate.is_set():
                sys.exit("another rank has failed")
            with turns.waiting(), contextlib.suppress(dist.DistStoreError):  # it has not come in this time
                self._store.wait([self._key], _LOOKS_S)
        sent = bytearray(self._store.get(self._key))
        self._store.delete_key(self._key)
        self._into.view(-1).view(torch.uint8).copy_(torch.frombuffer(sent, dtype=torch.uint8))
