"""What a rank is told that is started again after a failure; refuses restarts where another program starts ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from terrazzo.config import LaunchConfig
from terrazzo.errors import BadInput
from terrazzo.launch.environment import starter

__all__ = ["Restart", "refuse_restarts", "take_restart_note"]

_NOTE = "TERRAZZO_RESTARTED"
"""The environment variable that tells a rank of its restart."""


@dataclass(frozen=True)
class Restart:
    """A restart of a run's ranks: its `number`, of `most` that are allowed, and `why` the ranks before failed."""

    number: int
    most: int
    why: str

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variable that tells ranks of it."""
        return {_NOTE: json.dumps(asdict(self))}


def take_restart_note() -> Restart | None:
    """The restart that started this rank; None at the first start of a run."""
    note = os.environ.pop(_NOTE, None)  # what this rank starts is not this rank
    return None if note is None else Restart(**json.loads(note))


def refuse_restarts(launch: LaunchConfig) -> None:
    """Raise `BadInput` for `launch.restarts` if another program has started the ranks, which would have to do it."""
    restarts, number = launch.restarts, " launch.ranks=null" if isinstance(launch.ranks, str) else ""
    if not restarts:
        return
    use = f"Use launch.restarts=0{number} here."
    who, how = starter(), {"torchrun": f"--max-restarts {restarts}", "Slurm": "sbatch --requeue"}
    raise BadInput(
        f"launch.restarts is {restarts}, but {who} has started these ranks, so that it is not for `terrazzo train` to"
        f" start them again{f': {who} does so by {how[who]}' if who in how else ''}. {use}"
    )
