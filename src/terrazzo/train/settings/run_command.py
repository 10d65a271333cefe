"""The command that a run was started with, and the one that continues it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terrazzo.config import Config
from terrazzo.shell_command import terrazzo_command

__all__ = ["RunCommand"]


@dataclass(frozen=True)
class RunCommand:
    """The command that a run was started with. Without a path it is not known: torchrun or Slurm started the run."""

    path: Path | None = None
    overrides: Sequence[str] = ()

    def going_on(self, config: Config, *, finished: bool) -> str:
        """The command that continues the run; if it has finished, for as many steps again."""
        settings = {} if config.checkpoint.resume != "never" else {"checkpoint.resume": "if_exists"}
        settings |= {"train.steps": str(2 * config.train.steps)} if finished else {}
        changed = [f"{key}={value}" for key, value in settings.items()]
        if self.path is None:
            return " ".join(["the same command", *(["with"] if changed else ["again"]), *changed])
        keys = [word.partition("=")[0] for word in self.overrides]
        unchanged = [
            word
            for index, (key, word) in enumerate(zip(keys, self.overrides, strict=True))
            if key not in settings and key not in keys[index + 1 :]  # of one key, the last counts
        ]
        return " ".join([terrazzo_command(), "train", *map(shlex.quote, [str(self.path), *unchanged, *changed])])
