"""Looks every so many steps at copies, and at what ranks compute, and puts aside what is not to be trusted."""

from __future__ import annotations

from terrazzo.checkpoint import check_replicas, latest
from terrazzo.errors import Corrupted, counted, listed
from terrazzo.train.replay.replay import Replay
from terrazzo.train.session import Session

__all__ = ["Checks"]


class Checks:
    """Those of `train.check_replicas_every` and `guard.replay_every`.

    Raises:
        BadInput: ranks are not alike enough to be compared.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._replay = session, Replay(session)
        every = {"replicas": session.config.train.check_replicas_every, "replay": session.config.guard.replay_every}
        before = session.keeper.sure_step or 0
        self._every = {name: steps for name, steps in every.items() if steps is not None}
        self._clean = dict.fromkeys(self._every, before)  # the step up to which each has found nothing
        self._tell()

    def due(self) -> bool:
        """Whether any is, behind the step that has ended."""
        return any(self._session.step % steps == 0 for steps in self._every.values()) or self._replay.due()

    def run(self) -> None:
        """Do what is due. What was saved since the last time that all was right is put aside, if it is not. Collective.

        Raises:
            Corrupted: on all ranks; names the rank, and what was put aside.
        """
        session, step = self._session, self._session.step
        self._clean = {name: min(clean, step) for name, clean in self._clean.items()}  # it may have gone back
        try:
            if "replicas" in self._every and step % self._every["replicas"] == 0:
                check_replicas(session.model)
                self._clean["replicas"] = step
            if self._replay.due():
                self._replay.check()
                self._clean["replay"] = step
        except Corrupted as error:
            raise type(error)(f"{error} {self._put_aside()}") from None
        self._tell()

    def _tell(self) -> None:
        self._session.keeper.sure_step = min(self._clean.values(), default=None)

    def _put_aside(self) -> str:
        keeper = self._session.keeper
        sure, names = keeper.sure_step or 0, keeper.suspect()
        newest = latest(keeper.folder)
        on = "a new start begins anew" if newest is None else f"a new start goes on from '{newest}'"
        on = f"{on}, and should do so without that rank's machine"
        since = f"since step {sure}, when all was right" if sure else "so far, and nothing was known to be right before"
        if not names:
            return f"Nothing was saved {since}: {on}."
        are = "are" if len(names) > 1 else "is"
        return f"{counted(len(names), 'checkpoint')} saved {since}, {are} put aside as suspect ({listed(names)}): {on}."
