"""What is raised where an exchange has failed: who has ended, or where each rank of the mesh is.

A rank sees in a message that another is at another place, or its time is over. Those that wait for it along other axes,
or in exchanges of another kind, hear nothing of that. So it leaves a report of where it is in the store by which the
default group was made, and breaks off its connections along all axes. What the others wait in fails at once; they find
its report, leave their own, and break off as well. So all raise the same, with the place of each, and nothing is
exchanged on this mesh from then on. Before that nothing is written: steps cost no more.

Several exchanges of a rank are pending at a time, in threads, and any may fail first. So its report names all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from terrazzo.engine.comm.failure_reports import FailureReports, RankReport
from terrazzo.engine.comm.tags import NEVER_SENT
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.rank_places import PlacesDiffer
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.process_groups import timeout_s_of
from terrazzo.errors import ConnectionLost, lost_a_rank, timed_out

__all__ = ["Exchange", "MeshGroups", "hang_up_gloo"]

_PATIENCE_S = 2.0
"""How long a rank waits for the reports of others; half of the group's own time, where that is shorter."""

_PENDING: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Label]] = weakref.WeakKeyDictionary()
"""What this rank has begun to exchange in a group and not ended, of any model, by its number; what has failed stays."""
_numbers = itertools.count()


class MeshGroups:
    """The process groups in which this rank exchanges along the axes of a mesh: what fails in one, fails in all.

    Args:
        shared: whether they are for several models, each of which has collectives `counted_by` its own traffic.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self._hang_ups: dict[dist.ProcessGroup, list[Callable[[], None]]] = {}

    def add(self, group: dist.ProcessGroup, *hang_ups: Callable[[], None]) -> None:
        """Take in a group, and what has its other ranks hear that nothing comes from here any more."""
        self._hang_ups.setdefault(group, []).extend(hang_ups)

    def report(self) -> RankReport:
        """What this rank has to tell of now."""
        ranks = {str(group.group_name): dist.get_process_group_ranks(group) for group in self._hang_ups}
        by_number = {
            number: (str(group.group_name), label.place())
            for group in self._hang_ups
            for number, label in [*_PENDING.get(group, {}).items()]  # which other threads change
        }
        return RankReport(ranks, [by_number[number] for number in sorted(by_number)])

    def break_off(self) -> None:
        """This rank exchanges nothing any more along any axis: others hear that at once, where a backend can."""
        for hang_ups in self._hang_ups.values():
            while hang_ups:
                hang_ups.pop()()


def hang_up_gloo(group: dist.ProcessGroup) -> None:
    """Close the connections of a group of gloo's, which says so by a message that comes too late."""
    for other in range(group.size()):  # from one that has ended it comes as an error, which nobody else is told of
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device=HOST)], other, NEVER_SENT).wait(timedelta(milliseconds=1))


class Exchange:
    """An exchange in which all ranks of a group meet, from when this rank begins it; parts may be in other threads."""

    def __init__(self, mesh_groups: MeshGroups, group: dist.ProcessGroup, label: Label) -> None:
        self._mesh_groups, self._group, self._label = mesh_groups, group, label
        self._number = next(_numbers)
        _PENDING.setdefault(group, {})[self._number] = label

    @contextlib.contextmanager
    def part(self, *, last: bool = False) -> Iterator[None]:
        """Inside, others are waited for. The exchange has ended after the `last` part.

        Raises:
            RanksApart: where ranks of the mesh are at different places.
            TimedOut: where time is over otherwise.
            ConnectionLost: where another rank has ended or failed, and neither is known of any.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, PlacesDiffer):
                raise self._explained(error) from None
            if timed_out(error) or lost_a_rank(error):
                raise self._explained(error) from error
            self._end()  # it has failed of something else
            raise
        if last:
            self._end()

    def _end(self) -> None:
        del _PENDING[self._group][self._number]

    def _explained(self, error: BaseException) -> RuntimeError:
        """What to raise in the place of `error`, after which this rank has left its report and broken off; where
        another rank has ended, and none has left a report, it has not.
        """
        reports = FailureReports(self._mesh_groups.report())
        if lost_a_rank(error) and not reports.any():
            why = str(error) if isinstance(error, ConnectionLost) else _ENDED
            return ConnectionLost(f"{why} Here it was the turn of {self._label}.")
        reports.leave(error.places if isinstance(error, PlacesDiffer) else {})
        self._mesh_groups.break_off()
        reports.read(min(_PATIENCE_S, timeout_s_of(self._group, HOST) / 2))
        return reports.apart() or reports.too_late(error)


_ENDED = "Another rank has ended or failed: see what it has printed."
