"""Exchanges of a few numbers along a mesh axis, which block: agreements, norms, what one rank tells the others.

gloo ends a process when a message is longer than the place for it, and adds up what does not belong together where it
is not. So the first message of each of them is a row of one size, whatever it is for: the code of its label, what is
done, with how many numbers and over which axes, and the values themselves, where they fit. All ranks have the rows of
all, and go on where they are about to do the same; else all raise. What does not fit in a row follows in a collective
of its own, of which then all ranks know the size. What is counted are the values, and not the rows around them.

What is in a device's memory, NCCL exchanges, and the host does not wait to compare: that leaves a trail instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.links import Links
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import moving
from terrazzo.engine.labels.rank_places import PlacesDiffer

__all__ = ["ControlExchanges", "all_gather_single", "carried"]

_HEAD, _ROOM_BYTES = struct.Struct("<QQ"), 1024
"""Of a row: the code of the label, a hash of what is done; and room for values."""


class ControlExchanges:
    """The exchanges of a few numbers along one mesh axis.

    Each may be a part of one over several axes, and is told `over` which; by default over this one alone. Ranks that
    exchange the same over other axes are apart: one would take for the whole what another has of a part.

    Attributes:
        links: to the other ranks.
        traffic, ledger: where what goes through is counted, and memory that exchanges hold.
        axis, size, rank: of the links.
    """

    def __init__(self, links: Links, traffic: Traffic, ledger: Ledger) -> None:
        self.links, self.traffic, self.ledger = links, traffic, ledger
        self.axis, self.size, self.rank = links.axis, links.size, links.rank

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            Misuse: in a forked child, which has no part in it.
        """
        return self.links.group

    def _group_for(self, values: Tensor) -> dist.ProcessGroup:
        """The process group that carries `values`."""
        return self.links.group if values.is_cuda else self.links.host_group

    def maximum(self, values: Tensor, timeout_s: float | None = None, over: Sequence[str] = ()) -> Tensor:
        """The elementwise maximum over the ranks, in place, for small control data; blocks.

        Args:
            timeout_s: how long to wait for the others, in place of the group's own time.

        Raises:
            RanksApart: on every rank of the mesh, with the place of each, where they have not come to the same.
            RuntimeError: where they have not come in that time; the group is of no use then.
        """
        self.traffic.record("control", values.nbytes, axis=self.axis)
        patience = None if timeout_s is None else timedelta(seconds=timeout_s)
        with self._waiting_for_all("control") if patience is None else contextlib.nullcontext():
            if (rows := self._told("a maximum", values, over, patience)) is not None:
                values.copy_(rows.amax(0))
            else:
                work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group_for(values), async_op=True)
                _wait(work, patience)
        return values

    def gather_rows(self, values: Tensor, over: Sequence[str] = ()) -> Tensor:
        """Every rank's `values`, stacked in rank order along a new first dim, for small control data; blocks.

        Raises:
            RanksApart: as for `maximum`.
        """
        self.traffic.record("control", values.nbytes, axis=self.axis)
        with self._waiting_for_all("control"):
            if (rows := self._told("rows", values, over)) is None:
                rows = values.new_empty((self.size, *values.shape))
                all_gather_single(rows.view(-1), values.reshape(-1), group=self._group_for(values))
        return rows

    def broadcast(self, values: Tensor, source: int = 0, over: Sequence[str] = ()) -> None:
        """Overwrite `values` with those of one rank of the axis, by default of the first; blocks.

        Raises:
            RanksApart: as for `maximum`.
        """
        self.traffic.record("broadcast", values.nbytes if self.rank == source else 0, axis=self.axis)
        with self._waiting_for_all("broadcast"):
            act = f"a broadcast from rank {self.links.ranks[source]}"
            if (rows := self._told(act, values, over, on_host=True)) is not None:
                values.copy_(rows[source])
            else:
                dist.broadcast(carried(values), group=self._group_for(values), group_src=source)

    def _told(
        self,
        act: str,
        values: Tensor,
        over: Sequence[str],
        patience: timedelta | None = None,
        on_host: bool = False,
    ) -> Tensor | None:
        """What every rank has for `act`, `[ranks, *values.shape]`; None where that does not fit in its row.

        Args:
            on_host: whether the host compares rows of what is in a device's memory too: where it may wait, outside of
                steps.

        Raises:
            PlacesDiffer: on every rank of the axis, where they are not about to do the same.
        """
        if values.is_cuda and not on_host:
            self._leave_trail()
            return None
        label, dtype, axes = moving.get(), str(values.dtype).removeprefix("torch."), " and ".join(over or (self.axis,))
        detail = f"{act} of {values.numel()} {dtype} numbers along {axes or 'an axis'}"
        fits = not values.is_cuda and values.nbytes <= _ROOM_BYTES
        head = _HEAD.pack(label.code, zlib.crc32(detail.encode()))
        message = head + (_bytes_of(values) if fits else b"")
        rows = self._rows_of_all(message.ljust(_HEAD.size + _ROOM_BYTES, b"\0"), patience)
        if not all(each.startswith(head) for each in rows):
            codes = [_HEAD.unpack_from(each)[0] for each in rows]
            places = {rank: label.of_code(code).place() for rank, code in zip(self.links.ranks, codes, strict=True)}
            raise PlacesDiffer(places | {self.links.ranks[self.rank]: label.place(detail)})
        if not fits:
            return None
        told = bytearray().join(each[_HEAD.size : len(message)] for each in rows)
        return (torch.frombuffer(told, dtype=values.dtype) if told else values.detach()).view(self.size, *values.shape)

    def _rows_of_all(self, own: bytes, patience: timedelta | None = None) -> list[bytes]:
        """Every rank's row, of as many bytes on all of them.

        They go by way of the first rank: all-gathers of gloo's go once around, which takes as many turns as ranks.
        """
        row, group = torch.frombuffer(bytearray(own), dtype=torch.uint8), self.links.host_group
        rows = row.new_empty(self.size, row.numel())
        if self.links.is_gloo:
            places = [*rows.unbind()] if self.rank == 0 else None
            _wait(dist.gather(row, places, group=group, group_dst=0, async_op=True), patience)
            _wait(dist.broadcast(rows.view(-1), group=group, group_src=0, async_op=True), patience)
        else:
            _wait(all_gather_single(rows.view(-1), row, group=group, async_op=True), patience)
        return [each.tobytes() for each in rows.numpy()]

    def _leave_trail(self) -> None:
        """Note what is moved now, on a transport whose messages cannot say it: see `pass_end`."""

    @contextlib.contextmanager
    def _waiting_for_all(self, kind: str) -> Iterator[None]:
        """Count what is inside, which blocks until all ranks are there, as a wait for the last one."""
        with self.traffic.times_of(self.axis, kind).waiting(late=True):
            try:
                with self.links.begin().part(last=True):
                    yield
            except RuntimeError as error:
                for why in self._standing_still():
                    error.add_note(why)
                raise

    def _standing_still(self) -> Iterable[str]:
        """Notes on ranks that stand still, as far as this one can see."""
        return ()


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
