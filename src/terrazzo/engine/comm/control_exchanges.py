"""Exchanges of a few numbers along a mesh axis, which block: agreements, norms, what one rank tells the others.

gloo ends a process when a message is longer than the place for it, and adds up what does not belong together where it
is not. So the first message of each of them is a row of one size, whatever it is for: the code of its label, what is
done, with how many bytes, and the values themselves, where they fit. All ranks have the rows of all, and go on where
they are about to do the same; else each tells the others its place, and all raise. What does not fit in a row follows
in a collective of its own, of which then all ranks know the size. What is counted are the values, and not the rows
around them.

What is in a device's memory, NCCL exchanges, and the host does not wait to compare: that leaves a trail instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.failed_exchanges import Exchange
from terrazzo.engine.instrumentation.label import (
    NOT_THE_SAME,
    Label,
    Purpose,
    labelled,
    moving,
    places_text,
)
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart
from terrazzo.messages import shortened
from terrazzo.processes.ending import leaves_to_parent, require_own

__all__ = ["ControlExchanges", "all_gather_single", "carried", "in_turn"]

_HEAD, _ROOM_BYTES = struct.Struct("<QQ"), 1024
"""Of a row: the code of the label, a hash of what is done; and room for values."""
_PLACE_LENGTH, _PLACE_BYTES = 300, 4096
"""Of what a rank tells of its place, and of that as JSON, in which a character may take six."""
_FROM_ONE = "a broadcast"
"""Its rows go through the host of a device's memory, too: it is no part of a step, so that the host may wait."""
T = TypeVar("T")


class _HeadsDiffer(Exception):
    """Ranks along an axis are not about to do the same; all of them know."""


class ControlExchanges:
    """The exchanges of a few numbers along one mesh axis.

    Args:
        axis: by which waits are counted; empty where there are no others.
        host_group: of the same ranks, for what is in the host's memory; `group`, where that can, and by default.

    Attributes:
        traffic, ledger: where what goes through is counted, and memory that exchanges hold.
        axis: as given.
        size, rank: how many ranks the axis has, and this one's place among them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        traffic: Traffic,
        ledger: Ledger,
        axis: str = "",
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._host_group = group, group if host_group is None else host_group
        self.traffic, self.ledger, self.axis = traffic, ledger, axis
        self.size, self.rank = group.size(), group.rank()
        self._process = os.getpid()
        leaves_to_parent(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            Misuse: in a forked child, which has no part in it.
        """
        require_own(self._process)
        return self._group

    def leave_to_parent(self) -> None:
        """Keep the group, in a forked child: gloo's destructor would wait for threads that are not here."""
        for group in (self._group, self._host_group, dist.group.WORLD):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _group_for(self, values: Tensor) -> dist.ProcessGroup:
        """The process group that carries `values`."""
        group = self.group
        return group if values.is_cuda else self._host_group

    def maximum(self, values: Tensor, timeout_s: float | None = None) -> Tensor:
        """The elementwise maximum over the ranks, in place, for small control data; blocks.

        Args:
            timeout_s: how long to wait for the others, in place of the group's own time.

        Raises:
            RanksApart: on every rank, with the place of each, where they have not come to the same.
            RuntimeError: where they have not come in that time; the group is of no use then.
        """
        in_turn([self], lambda links: links.take_maximum(values, timeout_s))
        return values

    def gather_rows(self, values: Tensor) -> Tensor:
        """Every rank's `values`, stacked in rank order along a new first dim, for small control data; blocks.

        Raises:
            RanksApart: as for `maximum`.
        """
        (rows,) = in_turn([self], lambda links: links.take_rows(values))
        return rows

    def broadcast(self, values: Tensor, source: int = 0) -> None:
        """Overwrite `values` with those of one rank of the axis, by default of the first; blocks.

        Raises:
            RanksApart: as for `maximum`.
        """
        in_turn([self], lambda links: links.take_from(values, source))

    # -- of one axis among several, `in_turn` ------------------------------------------------------------------

    def take_maximum(self, values: Tensor, timeout_s: float | None = None) -> None:
        """As `maximum`, inside of `in_turn`."""
        self.traffic.record("control", values.nbytes, axis=self.axis)
        patience = None if timeout_s is None else timedelta(seconds=timeout_s)
        with self._waiting_for_all("control") if patience is None else contextlib.nullcontext():
            if (rows := self._told("a maximum", values, patience)) is not None:
                values.copy_(rows.amax(0))
            else:
                work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group_for(values), async_op=True)
                _wait(work, patience)

    def take_rows(self, values: Tensor) -> Tensor:
        """As `gather_rows`, inside of `in_turn`."""
        self.traffic.record("control", values.nbytes, axis=self.axis)
        with self._waiting_for_all("control"):
            if (rows := self._told("rows", values)) is None:
                rows = values.new_empty((self.size, *values.shape))
                all_gather_single(rows.view(-1), values.reshape(-1), group=self._group_for(values))
        return rows

    def take_from(self, values: Tensor, source: int = 0) -> None:
        """As `broadcast`, inside of `in_turn`."""
        self.traffic.record("broadcast", values.nbytes if self.rank == source else 0, axis=self.axis)
        with self._waiting_for_all("broadcast"):
            if (rows := self._told(_FROM_ONE, values)) is not None:
                values.copy_(rows[source])
            else:
                dist.broadcast(carried(values), group=self._group_for(values), group_src=source)

    def pass_on(self) -> None:
        """Tell the ranks of this axis, which come to something else, that some along another one have come apart."""
        with labelled(Label(Purpose.APART)), self._waiting_for_all("control"), contextlib.suppress(_HeadsDiffer):
            self._told("nothing", torch.empty(0, device=HOST))

    def _told(self, act: str, values: Tensor, patience: timedelta | None = None) -> Tensor | None:
        """What every rank has for `act`, `[ranks, *values.shape]`; None where that does not fit in its row.

        Raises:
            _HeadsDiffer: on every rank of the axis, where they are not about to do the same.
        """
        if values.is_cuda and act != _FROM_ONE:
            self._leave_trail()
            return None
        label, numel = moving.get(), values.numel()
        fits = not values.is_cuda and values.nbytes <= _ROOM_BYTES
        head = _HEAD.pack(label.code, zlib.crc32(f"{act} {numel} {values.dtype}".encode()))
        message = head + (_bytes_of(values) if fits else b"")
        row = torch.frombuffer(bytearray(message.ljust(_HEAD.size + _ROOM_BYTES, b"\0")), dtype=torch.uint8)
        rows = [each.tobytes() for each in self._rows_of_all(row, patience).view(self.size, -1).numpy()]
        if not all(each.startswith(head) for each in rows):
            raise _HeadsDiffer(f"{label} ({act} of {numel} {str(values.dtype).removeprefix('torch.')} numbers)")
        if not fits:
            return None
        told = bytearray().join(each[_HEAD.size : len(message)] for each in rows)
        return (torch.frombuffer(told, dtype=values.dtype) if told else values.detach()).view(self.size, *values.shape)

    def _rows_of_all(self, row: Tensor, patience: timedelta | None = None) -> Tensor:
        """Every rank's `row`, of the host's memory and as long on all of them, one after the other."""
        rows = row.new_empty(self.size * row.numel())
        require_own(self._process)
        _wait(all_gather_single(rows, row, group=self._host_group, async_op=True), patience)
        return rows

    def places_of_all(self, places: Tensor) -> Tensor:
        """What ranks tell of their places as they have come apart, after one another."""
        with self._waiting_for_all("control"):
            return self._rows_of_all(places)

    def _leave_trail(self) -> None:
        """Note what is moved now, on a transport whose messages cannot say it: see `pass_end`."""

    @contextlib.contextmanager
    def _waiting_for_all(self, kind: str) -> Iterator[None]:
        """Count what is inside, which blocks until all ranks are there, as a wait for the last one."""
        with self.traffic.times_of(self.axis, kind).waiting(late=True):
            try:
                with self._begun().part(last=True):
                    yield
            except RuntimeError as error:
                for why in self._standing_still():
                    error.add_note(why)
                raise

    def _begun(self) -> Exchange:
        """The exchange that this rank begins now."""
        return Exchange(self.group, moving.get(), self.break_off)

    def _standing_still(self) -> Iterable[str]:
        """Notes on ranks that stand still, as far as this one can see."""
        return ()

    def break_off(self) -> None:
        """This rank exchanges nothing on this axis any more: others are to hear that at once, where a backend can."""


def _bytes_of(values: Tensor) -> bytes:
    values = values.detach().contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes) if values.nbytes else b""


def _wait(work: Any, patience: timedelta | None) -> None:
    work.wait(*(() if patience is None else (patience,)))


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMBERS = (*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
"""Dtypes that NCCL and gloo both have. torch gives them complex numbers as pairs of these."""


def carried(values: Tensor) -> Tensor:
    """`values`, or a view of its bytes where NCCL or gloo has no such numbers."""
    if values.dtype in _NUMBERS or values.is_complex():
        return values
    return values.view(-1).view(torch.uint8)  # contiguous, as all that is exchanged


# torch 2.13 renamed it; the old name warns there and is the only one before.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def in_turn(axes: Sequence[ControlExchanges], exchange: Callable[[ControlExchanges], T]) -> list[T]:
    """Exchange along some axes, one after the other; returns what each exchange does.

    Raises:
        RanksApart: on every rank of the axes, with the place of each, where some along one have come to something else.
    """
    results = []
    for position, along in enumerate(axes):
        try:
            results.append(exchange(along))
        except _HeadsDiffer as differ:
            for other in axes[position + 1 :]:
                other.pass_on()
            raise _apart(axes, str(differ)) from None
    return results


def _apart(axes: Sequence[ControlExchanges], detail: str) -> RanksApart:
    """The error of ranks which have come to different exchanges, and now all tell each other where. Collective."""
    label = moving.get()
    said = [dist.get_rank(), *(shortened(each, _PLACE_LENGTH) for each in (str(label), detail)), label.edit]
    text = json.dumps(said).encode()
    rows = torch.zeros(_PLACE_BYTES, dtype=torch.uint8, device=HOST)
    rows[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for along in axes:
        rows = along.places_of_all(rows)
    told = sorted(json.loads(bytes(row).rstrip(b"\0")) for row in rows.view(-1, _PLACE_BYTES).tolist())
    places = {rank: place for rank, place, _, _ in told}
    if len({*places.values()}) == 1:  # several exchanges have one label
        places = {rank: each for rank, _, each, _ in told}
    edits = dict.fromkeys(edit for _, _, _, edit in told)
    return RanksApart(f"{NOT_THE_SAME}: {places_text(places)}. {' '.join(edits)}")
