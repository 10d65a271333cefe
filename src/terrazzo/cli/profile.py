"""`terrazzo profile -- COMMAND ...`: any training script, measured while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terrazzo.shell_command import terrazzo_command

if TYPE_CHECKING:
    from terrazzo.telemetry.profiling.command import ProfiledScript

__all__ = ["profile"]

_UNSEEN = "A Python that is started with -I, -E or -S, or without PYTHONPATH, is not looked into."


def profile(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What starts the script.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="for the records; default: runs/profile-DATE-TIME")
    ] = None,
) -> None:
    """Run a training script of anybody's, unchanged, and say what bounds its step.

    Plain PyTorch, DDP, FSDP2 or Terrazzo, started by python, torchrun or terrazzo run. What the script computes, prints
    and returns stays as it is; signals reach it. The verdict comes last, on standard error, and `terrazzo verdict`,
    `watch` and `report` read the records, in the folder that it names.

    terrazzo profile -- python train.py --lr 1e-3

    terrazzo profile -- torchrun --nproc-per-node 2 train.py
    """
    import sys
    import time

    from terrazzo.telemetry.profiling.command import profile as run

    folder = out or Path("runs") / time.strftime("profile-%Y%m%d-%H%M%S")
    outcome = run(command, folder)
    for line in _lines(outcome, outcome.own or folder):
        print(f"terrazzo profile: {line}", file=sys.stderr)
    raise typer.Exit(outcome.code)


def _lines(outcome: ProfiledScript, folder: Path) -> list[str]:
    """What is said after the script has ended, however it ended."""
    if not outcome.steps:
        unseen = [] if outcome.code else [_UNSEEN]
        return ["no step of a torch.optim optimizer was seen, so there is nothing to say.", *unseen]
    from terrazzo.errors import BadInput
    from terrazzo.messages import counted
    from terrazzo.train.report.run_review import RunReview  # it imports torch and the trainer

    try:
        verdict = RunReview(folder).verdict()
    except BadInput:  # the script wrote no record of them
        verdict = None
    seen = f"{counted(outcome.steps, 'step')} seen"
    if verdict is None:
        return [f"{seen}, and no record of one was written in {folder}, so there is nothing to say: run it for longer."]
    return [str(verdict), f"{seen}; {terrazzo_command()} verdict|watch|report {folder}"]
