"""Whether ranks are started again after a failure, and from which checkpoint they continue.

This is for ranks of Terrazzo's own launcher only. torchrun and Slurm restart theirs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from terrazzo.errors import BadInput
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.rank_slots import RankSlots
from terrazzo.launch.launcher.run_end import RunEnd
from terrazzo.launch.rank.restart_note import Restart
from terrazzo.messages import counted
from terrazzo.processes.standard_streams import say_on_stderr

__all__ = ["RestartPoint", "RestartPolicy"]


class RestartPoint(NamedTuple):
    """The step and path of the newest checkpoint that a run can continue from; step 0 if there is none."""

    step: int = 0
    path: str = ""


class RestartPolicy:
    """Decides after each failure whether all ranks are started again, and says so, or why not.

    Args:
        most: the most restarts of the run.
        newest: returns the newest checkpoint; raises `BadInput` if the run cannot continue from it.
        words: the command of the ranks that continue from a checkpoint.
        say: is called with a line about each restart.
        slots: which there are for the ranks, if these may become fewer or more; default: as many ranks as before.
    """

    def __init__(
        self,
        most: int,
        newest: Callable[[], RestartPoint],
        words: Callable[[RestartPoint], Sequence[str]],
        say: Callable[[str], object],
        slots: RankSlots | None = None,
    ) -> None:
        self._most, self._newest, self._words, self._say, self._slots = most, newest, words, say, slots
        self._number = 0
        self._environment: Mapping[str, str] = {}  # of the first start
        # At the failure before: what was saved, and what had failed.
        self._before: tuple[RestartPoint, str] | None = None

    def after(self, start: LaunchSpec, end: RunEnd) -> LaunchSpec | None:
        """What to start after `start` has ended in a failure; None if the run is over."""
        if end.lasts:
            _refuse("it would end so again")
            return None
        try:
            changed = self._changed(end)
            saved = self._newest()
        except BadInput as error:
            _refuse(str(error))
            return None
        if self._before is not None and saved.step <= self._before[0].step and not changed:
            at = f"the newest is {saved.path}" if saved.path else "there is none"
            _refuse(f"no checkpoint was saved since the failure before ({at}), which was: {self._before[1]}")
            return None
        if self._number == self._most:
            _refuse(f"launch.restarts is {self._most}")
            return None
        if self._number == 0:
            self._environment = start.environment
        self._number, self._before = self._number + 1, (saved, end.why)
        restart = Restart(self._number, self._most, end.why)
        where = f"from {saved.path}" if saved.path else "from the beginning: there is no checkpoint yet"
        ranks, environment = start.ranks, {**self._environment, **restart.environment}
        if self._slots is not None:
            ranks, environment = self._slots.ranks, {**environment, **self._slots.environment}
        starting = f"starting {counted(ranks, 'rank')}{'' if changed else ' again'}, {where}"
        self._say(f"restart {restart.number} of {restart.most}: {f'{changed}; ' if changed else ''}{starting}")
        return LaunchSpec(ranks, self._words(saved), environment)

    def _changed(self, end: RunEnd) -> str:
        """The slots that were lost or came, in words. A rank that fails at its start again gives up its slot."""
        if self._slots is None:
            return ""
        return self._slots.follow(end.rank if end.failed_at_start and self._number else None)


def _refuse(why: str) -> None:
    say_on_stderr(f"\nNot started again: {why.rstrip('.')}.")
