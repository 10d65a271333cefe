"""Whether the guard can see what it is to look at."""

from __future__ import annotations

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.settings.plan import build_plan

__all__ = ["check_guard"]


def check_guard(config: Config) -> None:
    """Raise `BadInput` for `guard.memory_every` where it would see nothing."""
    optim = build_plan(config).optim
    if config.guard.memory_every is not None and set(optim.shares) != {"device"}:
        raise BadInput(
            f"guard.memory_every is {config.guard.memory_every}, and offload.optim '{optim.tier}': states away from the"
            " device are not looked at. Set guard.memory_every=null and, for drives, offload.digest=true."
        )
