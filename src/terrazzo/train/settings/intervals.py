"""Whether something that is done every so many steps is due."""

from __future__ import annotations

from terrazzo.config import PlanConfig

__all__ = ["is_due"]


def is_due(plan: PlanConfig, step: int, every: int | None, since: int | None = None) -> bool:
    """Whether what is done every so many steps is due after a step; never where `every` is None.

    Where groups of ranks train by themselves (`plan.sync_every`) it waits for the end of a round, when all have the
    same weights: only the last step of a round may be asked about.

    Args:
        since: the step up to which it is done; default: the last one that was asked about.
    """
    since = step - (plan.round_steps or 1) if since is None else since
    return every is not None and step // every > since // every
