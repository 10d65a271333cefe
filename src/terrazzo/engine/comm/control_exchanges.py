"""Exchanges of a few numbers along a mesh axis, which block: agreements, norms, what one rank tells the others.

gloo ends a process when a message is longer than the place for it, and adds up what does not belong together where it
is not. So the first message of each of them is a row of one size, whatever it is for: the code of its label, a hash of
what is done, with how many numbers and over which axes, and the values themselves, where they fit. Rows go to the first
rank of the axis, which answers all with one: the same beginning, and what comes of the values, where all are about to
do the same; else all raise. What does not fit in a row follows in a collective of its own, of which then all ranks know
the size. What is counted are the values, and not the rows around them.

What is in a device's memory, NCCL exchanges, and the host does not wait to compare: that leaves a trail instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.links import Links
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import Label, moving
from terrazzo.engine.labels.rank_places import PlacesDiffer

__all__ = ["ControlExchanges", "all_gather_single", "carried"]

_HEAD, _ROOM_BYTES = struct.Struct("<QQ"), 1024
"""Of a row: the code of the label, a hash of what is done; and room for values."""
_APART = _HEAD.pack((1 << 64) - 1, 0)
"""How the answer begins to ranks that are not about to do the same: no label has that code."""


class _Act(NamedTuple):
    """What is done.

    Attributes:
        name: as errors say it.
        of: makes of the values of all ranks, as rows, what each of them gets; called on the first.
        like: a tensor of the shape and dtype of that.
    """

    name: str
    of: Callable[[Tensor], Tensor]
    like: Tensor


class ControlExchanges:
    """The exchanges of a few numbers along one mesh axis.

    Each may be a part of one over several axes, and is told `over` which; by default over this one alone. Ranks that
    exchange the same over other axes are apart: one would take for the whole what another has of a part.

    Attributes:
        links: to the other ranks.
        traffic, ledger: where what goes through is counted, and memory that exchanges hold.
        axis, size, rank: of the links.
        model: the number of the model that exchanges, which each label has; 0 where it is none.
    """

    def __init__(self, links: Links, traffic: Traffic, ledger: Ledger) -> None:
        self.links, self.traffic, self.ledger = links, traffic, ledger
        self.axis, self.size, self.rank, self.model = links.axis, links.size, links.rank, links.model

    @property
    def label(self) -> Label:
        """The label of the exchange that is being started, which says of which model it is."""
        return replace(moving.get(), model=self.model)

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
            act = _Act("a maximum", lambda rows: rows.amax(0), values)
            if (greatest := self._told(act, values, over, patience)) is not None:
                values.copy_(greatest)
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
            act = _Act("rows", lambda rows: rows, values.new_empty((self.size, *values.shape)))
            if (rows := self._told(act, values, over)) is None:
                rows = self._gathered(values)
        return rows

    def reduced(self, values: Tensor, reduce: Callable[..., Tensor], over: Sequence[str] = ()) -> Tensor:
        """`reduce` of every rank's `values`, stacked in rank order, along `dim=0`: of equal bits on all ranks; blocks.

        Raises:
            RanksApart: as for `maximum`, where they have come with another `reduce`, too.
        """
        self.traffic.record("control", values.nbytes, axis=self.axis)
        with self._waiting_for_all("control"):
            like = values if values.is_cuda else reduce(values.detach().unsqueeze(0), dim=0)
            act = _Act(f"a reduction ({reduce.__name__})", functools.partial(reduce, dim=0), like)
            if (told := self._told(act, values, over)) is None:
                told = reduce(self._gathered(values), dim=0)
        return told

    def _gathered(self, values: Tensor) -> Tensor:
        """Every rank's `values`, as rows, where these do not go in messages of one size."""
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
            act = _Act(f"a broadcast from rank {self.links.ranks[source]}", lambda rows: rows[source], values)
            if (sent := self._told(act, values, over, on_host=True)) is not None:
                values.copy_(sent)
            else:
                dist.broadcast(carried(values), group=self._group_for(values), group_src=source)

    def _told(
        self,
        act: _Act,
        values: Tensor,
        over: Sequence[str],
        patience: timedelta | None = None,
        on_host: bool = False,
    ) -> Tensor | None:
        """What comes of `act` with the `values` of every rank; None where these do not fit in its row.

        Args:
            on_host: whether the host compares rows of what is in a device's memory too: where it may wait, outside of
                steps.

        Raises:
            PlacesDiffer: on every rank of the axis, where they are not about to do the same.
        """
        if values.is_cuda and not on_host:
            self._leave_trail()
            return None
        label, dtype, axes = self.label, str(values.dtype).removeprefix("torch."), " and ".join(over or (self.axis,))
        detail = f"{act.name} of {values.numel()} {dtype} numbers along {axes or 'an axis'}"
        fits = not values.is_cuda and values.nbytes <= _ROOM_BYTES
        head = _HEAD.pack(label.code, zlib.crc32(detail.encode()))
        rows = self._to_first(_row(head, _bytes_of(values) if fits else b""), patience)
        alike, result = all(each.startswith(head) for each in rows), bytes(act.like.nbytes if fits else 0)
        if rows and alike and fits:
            result = _bytes_of(act.of(_values_of(rows, values)))
        answer = self._from_first(_row(head if alike else _APART, result[:_ROOM_BYTES]), patience)
        if not answer.startswith(head):
            heads = self._from_first(b"".join(each[: _HEAD.size] for each in rows or [head] * self.size), patience)
            codes = [code for code, _ in _HEAD.iter_unpack(heads)]
            places = {rank: label.of_code(code).place() for rank, code in zip(self.links.ranks, codes, strict=True)}
            raise PlacesDiffer(places | {self.links.ranks[self.rank]: label.place(detail)})
        if not fits:
            return None
        told = answer[_HEAD.size :][: len(result)]
        if len(result) > _ROOM_BYTES:
            told += self._from_first(result[_ROOM_BYTES:], patience)
        return _tensor_of(told, act.like)

    def _to_first(self, own: bytes, patience: timedelta | None) -> list[bytes]:
        """Every rank's row, of as many bytes on all of them: on the first, and none on the others; or on all of them,
        where it is not gloo that carries rows.
        """
        row, group = torch.frombuffer(bytearray(own), dtype=torch.uint8), self.links.host_group
        rows = row.new_empty(self.size if self.rank == 0 or not self.links.is_gloo else 0, row.numel())
        if self.links.is_gloo:
            places = [*rows.unbind()] if self.rank == 0 else None
            _wait(dist.gather(row, places, group=group, group_dst=0, async_op=True), patience)
        else:
            _wait(all_gather_single(rows.view(-1), row, group=group, async_op=True), patience)
        return [each.tobytes() for each in rows.numpy()]

    def _from_first(self, told: bytes, patience: timedelta | None) -> bytes:
        """What the first rank has, as many bytes as this one's; where all have every row, all have that."""
        if not self.links.is_gloo:
            return told
        message = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        _wait(dist.broadcast(message, group=self.links.host_group, group_src=0, async_op=True), patience)
        return message.numpy().tobytes()

    def _leave_trail(self) -> None:
        """Note what is moved now, on a transport whose messages cannot say it: see `pass_end`."""

    @contextlib.contextmanager
    def _waiting_for_all(self, kind: str) -> Iterator[None]:
        """Count what is inside, which blocks until all ranks are there, as a wait for the last one."""
        with self.traffic.times_of(self.axis, kind).waiting(late=True):
            try:
                with self.links.begin(self.label).part(last=True):
                    yield
            except RuntimeError as error:
                for why in self._standing_still():
                    error.add_note(why)
                raise

    def _standing_still(self) -> Iterable[str]:
        """Notes on ranks that stand still, as far as this one can see."""
        return ()


def _row(head: bytes, values: bytes) -> bytes:
    return (head + values).ljust(_HEAD.size + _ROOM_BYTES, b"\0")


def _values_of(rows: Sequence[bytes], like: Tensor) -> Tensor:
    """The values in rows, stacked, each of which is like that."""
    told = b"".join(row[_HEAD.size :][: like.nbytes] for row in rows)
    return _tensor_of(told, like.new_empty((len(rows), *like.shape)))


def _tensor_of(told: bytes, like: Tensor) -> Tensor:
    """The numbers in bytes, as a tensor like that."""
    return torch.frombuffer(bytearray(told), dtype=like.dtype).view(like.shape) if told else like.detach()


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
