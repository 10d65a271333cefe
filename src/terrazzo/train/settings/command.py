"""The command that goes on with a run, as the user's shell understands it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terrazzo.config import Config

__all__ = ["Command", "folded", "program"]


@dataclass(frozen=True)
class Command:
    """What a run was started with. Without a path, torchrun or Slurm has started it, and knows the whole of it."""

    path: Path | None = None
    overrides: Sequence[str] = ()

    def going_on(self, config: Config, *, finished: bool) -> str:
        """What continues the run; one that has finished, for as many steps again."""
        settings = {} if config.checkpoint.resume != "never" else {"checkpoint.resume": "if_exists"}
        settings |= {"train.steps": str(2 * config.train.steps)} if finished else {}
        changed = [f"{key}={value}" for key, value in settings.items()]
        if self.path is None:
            return " ".join(["the same command", *(["with"] if changed else ["again"]), *changed])
        unchanged = [word for word in self.overrides if word.partition("=")[0] not in settings]
        return " ".join([program(), "train", *map(shlex.quote, [str(self.path), *unchanged, *changed])])


def program(name: str = "terrazzo") -> str:
    """The command of this environment: its name alone where this shell finds it by that, else its path."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m {name}"
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).samefile(beside):
        return name
    return shlex.quote(str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside))


def folded(label: str, command: str, width: int) -> str:
    """`label` and a command, over as many lines of `width` as it takes, which a shell reads as one."""
    first, *words = map(shlex.quote, shlex.split(command))  # a quoted word with a space stays on one line
    lines = [label + first]
    for word in words:
        if len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append(" " * len(label) + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)
