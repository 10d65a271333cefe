"""Checks regularly that ranks hold and compute the same, and puts checkpoints aside that cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.checkpoint import check_replicas, latest
from terrazzo.engine import engine_of
from terrazzo.errors import Corrupted
from terrazzo.messages import counted, listed
from terrazzo.train.session.session import Session
from terrazzo.train.settings.intervals import is_due
from terrazzo.train.steps.memory_checks import MemoryChecks
from terrazzo.train.steps.replay import Replay

__all__ = ["ReplicaChecks"]


class ReplicaChecks:
    """The checks of `train.check_replicas_every`, `guard.replay_every` and `guard.memory_every`.

    Raises:
        BadInput: ranks are not alike enough to be compared.
    """

    def __init__(self, session: Session) -> None:
        guard, before = session.config.guard, session.checkpoints.sure_step or 0
        self._session, self._replay = session, Replay(session)
        self._memory = MemoryChecks(session, guard.memory_every)
        self._replicas_every = session.config.train.check_replicas_every
        every = {"replicas": self._replicas_every, "replay": guard.replay_every, "memory": guard.memory_every}
        # the step up to which each check has found nothing
        self._clean = {name: before for name, steps in every.items() if steps is not None}
        self._update_sure_step()

    def begin_step(self) -> None:
        """A step begins: remember what will be compared before its update."""
        self._memory.begin()

    def before_update(self) -> None:
        """Check before this step's update; raises what `after_step` raises. Collective."""
        if self._memory.due:
            self._try(self._memory.check)
            self._note_clean("memory", self._session.step - self._memory.rotation)

    def after_step(self) -> None:
        """Do the checks that are due. If one fails, put checkpoints aside that were saved since all passed. Collective.

        Raises:
            Corrupted: on all ranks; it names the rank at fault, and what was put aside.
        """
        session = self._session
        replicas = is_due(session.config.plan, session.step, self._replicas_every)
        if not (replicas or self._replay.due()):
            return
        with engine_of(session.model).tally.phases.during("evaluate"):
            if replicas:
                self._try(lambda: check_replicas(session.model))
                self._note_clean("replicas", session.step)
            if self._replay.due():
                self._try(self._replay.check)
                self._note_clean("replay", session.step)

    def went_back(self) -> None:
        """The run is back at an earlier step: later steps are not checked yet."""
        self._clean = {name: min(clean, self._session.step) for name, clean in self._clean.items()}
        self._update_sure_step()

    def _try(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Corrupted as error:
            raise type(error)(f"{error} {self._put_aside()}") from None

    def _note_clean(self, name: str, until: int) -> None:
        self._clean[name] = max(until, 0)
        self._update_sure_step()

    def _update_sure_step(self) -> None:
        self._session.checkpoints.sure_step = min(self._clean.values(), default=None)

    def _put_aside(self) -> str:
        checkpoints = self._session.checkpoints
        sure, names = checkpoints.sure_step or 0, checkpoints.suspect()
        newest = latest(checkpoints.folder)
        on = "a new start begins anew" if newest is None else f"a new start goes on from '{newest}'"
        on = f"{on}, and should do so without that rank's machine"
        since = f"since step {sure}, when all was right" if sure else "so far, and nothing was known to be right before"
        if not names:
            return f"Nothing was saved {since}: {on}."
        are = "are" if len(names) > 1 else "is"
        return f"{counted(len(names), 'checkpoint')} saved {since}, {are} put aside as suspect ({listed(names)}): {on}."
