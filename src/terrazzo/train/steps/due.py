"""What a run says and saves after a step. What it checks of its ranks, `replica_checks` knows by itself.

Whether a multiple of an interval has come is decided by `settings.intervals`, which knows about rounds of groups that
train by themselves. `cadence` and the checks of ranks ask it, too.
"""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.train.session.session import Session
from terrazzo.train.settings.intervals import is_due
from terrazzo.train.steps.cadence import Cadence

__all__ = ["DueWork", "due_work"]


class DueWork(NamedTuple):
    """What to do after a step that was taken.

    Attributes:
        row: a row of the log: after the first step of each start, which shows that the run works and where its loss
            begins; after every log step, and after the next step that is taken where that one was left out.
        evaluation: the validation loss.
        save: a checkpoint.
        local_save: a local checkpoint, where no other is saved.
        sample: a text.
    """

    row: bool
    evaluation: bool
    save: bool
    local_save: bool
    sample: bool


def due_work(
    session: Session, cadence: Cadence, *, newest: int | None, row_step: int, is_first_row: bool, stopped: bool
) -> DueWork:
    """What is due after the session's step.

    Args:
        newest: the newest step that was taken, and not left out.
        row_step: the step of the last row of the log; the step that this start began at where there is none yet.
        is_first_row: there has been no row since this start.
        stopped: the run ends with this step, since somebody has asked for it.
    """
    config, step = session.config, session.step
    plan, train = config.plan, config.train
    finished = step == train.steps
    last = stopped or finished
    logs = newest == step and (is_first_row or is_due(plan, step, config.log.every, row_step))
    save = last or cadence.due(step)
    return DueWork(
        row=newest is not None and newest > row_step and (last or logs),
        evaluation=finished or is_due(plan, step, train.eval_every),
        save=save,
        local_save=not save and session.checkpoints.local_due(step),
        sample=bool(session.sampling.prompt) and (finished or is_due(plan, step, train.sample_every)),
    )
