"""What is raised where an exchange has failed: who has ended, or, where its time is over, where each rank has waited.

Ranks that wait in exchanges of different kinds hear nothing of each other: one in a meeting, say, which is an
all-reduce of gloo's, and the other in a gather. So whose time is over first leaves word in the store by which the
process group was made, and breaks its connections off: what the others wait in fails at once, and they leave word as
well. Before that nothing is written: steps cost no more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from terrazzo.engine.instrumentation.label import RUN_THE_SAME, Label, places_text
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import default_store
from terrazzo.engine.runtime.process_groups import timeout_s_of
from terrazzo.errors import ConnectionLost, RanksApart, TimedOut, lost_a_rank, timed_out
from terrazzo.messages import of_ranks

__all__ = ["explained"]

_WORD_S = 2.0
"""How long a rank looks for the words of others; half of the group's own time, where that is shorter."""


def explained(
    error: BaseException, label: Label, group: dist.ProcessGroup, break_off: Callable[[], None]
) -> BaseException:
    """What to raise where the exchange of `label` in `group` has failed with `error`, which is its cause.

    Args:
        break_off: has the other ranks hear that nothing comes from here; called where they are asked for word.

    Returns:
        RanksApart: where all ranks of the group have waited, and not for the same.
        TimedOut: where time is over otherwise.
        ConnectionLost: where another rank has ended or failed, and none has run out of time.
        BaseException: `error`, if it is of anything else.
    """
    if not (timed_out(error) or lost_a_rank(error)):
        return error
    words = _Words(group)
    failed: BaseException
    if timed_out(error) or words.any():
        words.leave(str(label))
        break_off()
        failed = _of_time(error, {dist.get_rank(): str(label), **words.read()}, words.ranks)
    else:
        why = str(error) if isinstance(error, ConnectionLost) else _ENDED
        failed = ConnectionLost(f"{why} Here it was the turn of {label}.")
    failed.__cause__ = error
    return failed


def _of_time(error: BaseException, places: Mapping[int, str], ranks: Sequence[int]) -> TimedOut | RanksApart:
    """The error of ranks whose time is over, of which some have said at which places."""
    silent = [rank for rank in ranks if rank not in places]
    where = places_text(places)
    if not silent and len({*places.values()}) > 1:
        return RanksApart(
            "The ranks have not run the same, and have waited for each other until the time of their process group "
            f"was over: {where}. {RUN_THE_SAME}"
        )
    why = str(error) if isinstance(error, TimedOut) else _LATE
    nowhere = f"; of {of_ranks(silent)} nothing is known" if silent else ""
    return TimedOut(f"{why} Waiting: {where}{nowhere}.")


_ENDED = "Another rank has ended or failed: see what it has printed."
_LATE = (
    "Other ranks have not come to an exchange in time: they may have ended, or run something else: see what they have "
    "printed. Where one is only slow, give init_process_group a longer timeout."
)


class _Words:
    """Where the ranks of a group have waited, as each has left word of it once; none where the store is gone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._keys = {rank: f"terrazzo/waited/{group.group_name}/{rank}" for rank in self.ranks}
        self._patience_s = min(_WORD_S, timeout_s_of(group, HOST) / 2)

    def any(self) -> bool:
        """Whether one has."""
        with contextlib.suppress(RuntimeError):
            return any(default_store().check([key]) for key in self._keys.values())
        return False

    def leave(self, place: str) -> None:
        """This rank has waited there. Its first word stays: it has begun to wait for that before anything else."""
        with contextlib.suppress(RuntimeError):
            default_store().compare_set(self._keys[dist.get_rank()], "", place)

    def read(self) -> dict[int, str]:
        """Of each rank whose word comes in time."""
        places: dict[int, str] = {}
        until = time.monotonic() + self._patience_s
        with contextlib.suppress(RuntimeError):
            while len(places) < len(self.ranks) and time.monotonic() < until:
                for rank in (rank for rank in self.ranks if rank not in places):
                    if default_store().check([self._keys[rank]]):
                        places[rank] = default_store().get(self._keys[rank]).decode()
                time.sleep(0.02)
        return places
