"""`terrazzo report RUN`: writes report.html from what a run has written so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.shared.arguments import RunArgument

__all__ = ["report"]


def report(
    run: RunArgument,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="another run: its loss is drawn too, and its settings compared")
    ] = None,
) -> None:
    """Write report.html of a run from what it has written so far, and print its path.

    One file without scripts, which needs no network: loss, seconds of each step by cause, exchanges, memory, ranks,
    what was promised beside what was measured, plan and configuration. A run writes its own when it ends.
    """
    from terrazzo.cli.shared.terminal import say
    from terrazzo.train.report.run_review import RunReview  # the trainer, which other verbs do without

    say(str(RunReview(run).write_page(against)))
