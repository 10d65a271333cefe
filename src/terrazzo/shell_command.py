"""Commands that are printed for users to copy into their shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["fold_command", "terrazzo_command"]

_NAME = "terrazzo"


def terrazzo_command() -> str:
    """The command for this environment's `terrazzo`: its name if the shell finds it by that, else its path."""
    beside = Path(sys.executable).with_name(_NAME)
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m {_NAME}"
    on_path = shutil.which(_NAME)
    if on_path is not None and Path(on_path).samefile(beside):
        return _NAME
    if not beside.is_relative_to(Path.cwd()):
        return shlex.quote(str(beside))
    relative = str(beside.relative_to(Path.cwd()))
    return shlex.quote(relative if "/" in relative else f"./{relative}")  # a bare name is looked up on the path


def fold_command(label: str, command: str, width: int) -> str:
    """`label` and a command, folded into lines of at most `width` that a shell reads as one command."""
    first, *words = map(shlex.quote, shlex.split(command))  # a quoted word with a space stays on one line
    lines = [label + first]
    for word in words:
        if len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append(" " * len(label) + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)
