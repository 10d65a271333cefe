"""A run as its newest checkpoint has it: taken up where a run is opened, and again where it goes back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from terrazzo.checkpoint import Resumed
from terrazzo.errors import BadInput
from terrazzo.train.checkpoints.resume import data_changes, saying_what_differs
from terrazzo.train.optimizer import resume_schedule
from terrazzo.train.session import Judged, Session

__all__ = ["Restored", "restore", "seed_of"]

EXTRA = ("step", "tokens", "best", "schedule", "data", "evaluation", "config")
"""What a checkpoint of a run has beside model and optimizer, at the least."""


class Restored(NamedTuple):
    """What was taken up.

    Attributes:
        rate: the learning rate of the next step, as the run that saved it had it.
        tp: ranks that cut matrices together in that run.
        draws_anew: whether random generators were seeded for these ranks: those saved are of others.
    """

    resumed: Resumed
    rate: float
    tp: int
    draws_anew: bool


def restore(session: Session) -> Restored:
    """Have model, optimizer, schedule, data and counters be those of the newest whole checkpoint. Collective."""
    config, resumed = session.config, _resumed(session)
    extra = resumed.extra
    session.step, session.tokens = extra["step"], extra["tokens"]
    session.skipped = list(extra.get("skipped", ()))
    session.judged = Judged(**extra.get("judged", {}))
    session.cadence = extra.get("cadence") or session.cadence
    session.validations.best = extra["best"]
    rate = session.optimizer.param_groups[0]["lr"]
    resume_schedule(session.schedule, extra["schedule"])
    why = data_changes(config, extra, session.data.files)
    session.loader.load_state_dict(extra["data"], config.checkpoint.allow_changed_data, why)
    tp = extra["config"]["plan"].get("mesh", {}).get("tp", 1)
    draws_anew = not resumed.generators or tp != config.plan.mesh.tp  # ranks along tp draw alike, and others did
    if draws_anew:
        torch.manual_seed(seed_of(session, session.step))
    return Restored(resumed, rate, tp, draws_anew)


def _resumed(session: Session) -> Resumed:
    """The newest whole checkpoint, once model and optimizer have taken it up; it is one of a run. Collective."""
    folder = session.keeper.folder
    with saying_what_differs(session.config, folder):
        resumed = session.keeper.resume(session.model, session.optimizer)
    if resumed is None:  # it was there, and so nothing else has given the model its weights
        raise BadInput(
            f"{folder} had a checkpoint when this run began, and has none that can be read now: put it back, or start"
            " anew with checkpoint.resume=never."
        )
    if missing := sorted(set(EXTRA) - resumed.extra.keys()):
        raise BadInput(
            f"The newest checkpoint in {folder} is not of 'terrazzo train': its extra has no {', '.join(missing)}. Go"
            " on with it by tz.checkpoint.load in a loop of your own, or use another checkpoint.folder."
        )
    return resumed


def seed_of(session: Session, step: int) -> int:
    """For what ranks draw each for itself from `step` on; those along tp draw alike, as `Parts.drawer` says."""
    return session.config.train.seed + 1 + session.parts.drawer + step * 1_000_003
