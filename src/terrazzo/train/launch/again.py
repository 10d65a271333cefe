"""Ranks that are started again after a failure: whether that may mend it, and what the new ones are told.

Only ranks that this package's own launcher has started. torchrun and Slurm start theirs again themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from terrazzo.errors import BadInput, counted
from terrazzo.train.launch.here import starter

__all__ = ["Again", "Ended", "Restart", "Saved", "Start", "refuse_restarts", "told_of_restart"]

_GIVEN = "TERRAZZO_RESTARTED"
"""What a rank that is started again is told, in its environment."""


class Ended(NamedTuple):
    """How ranks that were started together have ended.

    Attributes:
        code: the exit code that says so.
        why: what failed first, in a line; empty where nothing did.
        lasts: it would end so again, whoever starts it.
    """

    code: int
    why: str = ""
    lasts: bool = True


class Saved(NamedTuple):
    """The newest checkpoint that a run can go on from: its step, and where it is; none at all is step 0."""

    step: int = 0
    path: str = ""


@dataclass(frozen=True)
class Restart:
    """That ranks are not the first of their run: the `number` of this start, of `most`, and `why` the last failed."""

    number: int
    most: int
    why: str


@dataclass(frozen=True)
class Start:
    """What is started: so many ranks of `python WORDS`, with more in their environment."""

    ranks: int
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Again:
    """Decides after each failure whether all ranks are started again, and says so, or why not.

    Args:
        most: restarts of the run.
        newest: what there is to go on from now. Raises: `BadInput` where it cannot be gone on from, and why.
        words: of the ranks that go on from there.
        say: told of each restart.
    """

    def __init__(
        self,
        most: int,
        newest: Callable[[], Saved],
        words: Callable[[Saved], Sequence[str]],
        say: Callable[[str], object],
    ) -> None:
        self._most, self._newest, self._words, self._say = most, newest, words, say
        self._number = 0
        self._before: tuple[Saved, str] | None = None  # at the failure before: what was saved, and what had failed

    def after(self, start: Start, ended: Ended) -> Start | None:
        """What is started next, once `start` has ended in a failure; None where the run has ended."""
        if ended.lasts:
            _refuse("it would end so again")
            return None
        try:
            saved = self._newest()
        except BadInput as error:
            _refuse(str(error))
            return None
        if self._before is not None and saved.step <= self._before[0].step:
            at = f"the newest is {saved.path}" if saved.path else "there is none"
            _refuse(f"no checkpoint was saved since the failure before ({at}), which was: {self._before[1]}")
            return None
        if self._number == self._most:
            _refuse(f"launch.restarts is {self._most}")
            return None
        self._number, self._before = self._number + 1, (saved, ended.why)
        restart = Restart(self._number, self._most, ended.why)
        where = f"from {saved.path}" if saved.path else "from the beginning: there is no checkpoint yet"
        self._say(f"restart {restart.number} of {restart.most}: starting {counted(start.ranks, 'rank')} again, {where}")
        return Start(start.ranks, self._words(saved), {_GIVEN: json.dumps(asdict(restart))})


def _refuse(why: str) -> None:
    print(f"\nNot started again: {why.rstrip('.')}.", file=sys.stderr)


def told_of_restart() -> Restart | None:
    """The restart that this rank is of; None for the first start of a run."""
    given = os.environ.pop(_GIVEN, None)  # what this rank starts is not this rank
    return None if given is None else Restart(**json.loads(given))


def refuse_restarts(restarts: int) -> None:
    """Raise `BadInput` for restarts of ranks that others have started, whose task it then is."""
    if not restarts:
        return
    who, how = starter(), {"torchrun": f"--max-restarts {restarts}", "Slurm": "sbatch --requeue"}
    raise BadInput(
        f"launch.restarts is {restarts}, but {who} has started these ranks, so that it is not for `terrazzo train` to"
        f" start them again{f': {who} does so by {how[who]}' if who in how else ''}. Use launch.restarts=0 here."
    )
