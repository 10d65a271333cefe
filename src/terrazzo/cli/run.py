"""`terrazzo run SCRIPT ...`: a training script of the user's on several ranks, as torchrun starts it."""

from __future__ import annotations

from typing import Annotated

import typer

from terrazzo.cli.shared.arguments import whole_number
from terrazzo.cli.shared.interrupted import ending_interrupted
from terrazzo.errors import BadInput
from terrazzo.shell_command import terrazzo_command

__all__ = ["run"]

_RANKS = "--ranks"


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m a module.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT]...",
            help="The script's own, passed on untouched; only --ranks N right behind SCRIPT is taken as if before it.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(_RANKS, min=1, metavar="N", help="Processes; default: one per GPU, or one on a CPU.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False,
) -> None:
    """Run a training script of your own on several ranks of this machine, as torchrun would.

    Rank 0 prints as it is, lines of the others begin with their number. When a rank fails, its traceback is the last
    thing on screen, once, and the others are ended. Ctrl-C reaches all ranks. The exit code is the script's. Options of
    this Python (`python -X dev -m terrazzo run ...`) are those of the ranks. Under torchrun or srun the script joins
    the ranks that these have started.

    terrazzo run --ranks 2 examples/own_loop.py

    terrazzo run --ranks 2 -m package.module --lr 1e-3
    """
    from terrazzo.launch.stopping.notices import ENDED_BEFORE_SCRIPT

    rest = list(arguments or [])
    if ranks is None:
        ranks, rest = _ranks_of(target, rest)
    with ending_interrupted(ENDED_BEFORE_SCRIPT):
        from terrazzo.launch.script.start_script import Script, run_script  # imports torch

        raise typer.Exit(run_script(Script(target, rest, is_module), ranks))


def _ranks_of(target: str, arguments: list[str]) -> tuple[int | None, list[str]]:
    """The number in a `--ranks` right after the script, and the script's own arguments.

    Raises:
        BadInput: `--ranks` comes later, where it may be the script's.
    """
    first, equals, value = (arguments or [""])[0].partition("=")
    if first == _RANKS:
        text, rest = (value, arguments[1:]) if equals else ("".join(arguments[1:2]), arguments[2:])
        return whole_number(_RANKS, text), rest
    if any(argument.partition("=")[0] == _RANKS for argument in arguments):
        raise BadInput(
            f"{_RANKS} stands among the arguments of '{target}': write"
            f" `{terrazzo_command()} run {_RANKS} N {target} ...`, and what comes after the script is the script's."
        )
    return None, arguments
