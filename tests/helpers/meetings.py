"""Collectives of ranks that are threads: in n operations where torch's take n squared, and without its way from a
collective's name to the group, which takes longer than a small collective does.

Whoever comes last does the work; see `threads.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from terrazzo.engine.comm import control_exchanges

__all__ = ["OF_GROUPS", "Name", "all_gather", "all_reduce", "all_to_all", "break_off", "broken", "closed", "start"]

_RENAMED = hasattr(ProcessLocalGroup, "all_to_all_single")  # by torch 2.13
_GATHER, _EXCHANGE = ("all_gather_single", "all_to_all_single") if _RENAMED else ("_allgather_base", "alltoall_base")
_uneven = getattr(ProcessLocalGroup, _EXCHANGE)
_torchs_all_reduce, _torchs_all_gather = dist.all_reduce, control_exchanges.all_gather_single


def all_reduce(values: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """In place of `dist.all_reduce`; maxima, by which the engine's ranks agree, go straight to the group."""
    if type(group) is not ProcessLocalGroup or type(values) is not Tensor or op != dist.ReduceOp.MAX:
        return _torchs_all_reduce(values, op, group, async_op)
    work = _meet(group, _Maximum(), values)
    return work if async_op else None


def all_gather(output: Tensor, own: Tensor, group: Any, async_op: bool = False) -> Any:
    """In place of `dist.all_gather_single`."""
    if type(group) is not ProcessLocalGroup:
        return _torchs_all_gather(output, own, group=group, async_op=async_op)
    work = _meet(group, _Gather(), (output, own))
    return work if async_op else None


def all_to_all(output: Tensor, own: Tensor, group: Any) -> None:
    """In place of `dist.all_to_all_single`, of equal parts."""
    _meet(group, _Exchange(), (output, own))


class Name:
    """What a group is called, in place of `ProcessLocalGroup.pg_name`; looked up once."""

    def __get__(self, group: Any, kind: type) -> str:
        names = vars(group)
        if "name" not in names:
            names["name"] = group._world().pg_names[group]
        name: str = names["name"]
        return name


def _gather(self: Any, output: Tensor, own: Tensor, *options: Any) -> dist.Work:
    return _meet(self, _Gather(), (output, own))


def _exchange(self: Any, output: Tensor, own: Tensor, to: Sequence[int], of: Sequence[int], *options: Any) -> dist.Work:
    if to or of:
        work: dist.Work = _uneven(self, output, own, to, of, *options)
        return work
    return _meet(self, _Exchange(), (output, own))


OF_GROUPS: dict[str, Any] = {_GATHER: _gather, _EXCHANGE: _exchange, "pg_name": Name()}
"""What `ProcessLocalGroup` has instead of its own."""


broken: set[Any] = set()
"""Names of groups whose ranks have broken off, and collectives that were under way there."""
_torchs_start = ProcessLocalGroup._start_coll


def start(collective: Any, group: Any) -> Any:
    """In place of `ProcessLocalGroup._start_coll`: the collective of now in a group."""
    if group.pg_name in broken:
        raise closed()
    return _torchs_start(collective, group)


def break_off(name: str) -> None:
    """Who waits in the group of that name hears what ranks of gloo hear where a connection ends, as does who comes."""
    broken.add(name)
    if (met := ProcessLocalGroup._cur_coll_on_pgs.get(name)) is not None:
        with met._done_cond:
            broken.add(met)
            met._done_cond.notify_all()


def closed() -> RuntimeError:
    """What ranks of gloo hear."""
    return RuntimeError("[gloo/transport/threads] Connection closed by peer")


def _meet(group: Any, collective: Any, data: Any) -> dist.Work:
    met = ProcessLocalGroup._start_coll(collective, group)
    work: dist.Work = met.join(group._rank, data)
    ProcessLocalGroup._end_coll(met, group)
    return work


class _Maximum:
    @torch.no_grad()
    def work(self, data: list[Tensor]) -> None:
        highest = torch.stack(data).amax(0)
        for values in data:
            values.detach().copy_(highest)


class _Gather:
    @torch.no_grad()
    def work(self, data: list[tuple[Tensor, Tensor]]) -> None:
        whole = torch.cat([own.reshape(-1) for _, own in data])
        for output, _ in data:
            output.detach().copy_(whole.view(output.shape))


class _Exchange:
    @torch.no_grad()
    def work(self, data: list[tuple[Tensor, Tensor]]) -> None:
        rows = torch.stack([own.reshape(len(data), -1) for _, own in data], 1)
        for (output, _), row in zip(data, rows, strict=True):
            output.detach().copy_(row.view(output.shape))
