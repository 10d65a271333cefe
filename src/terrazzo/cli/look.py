"""`terrazzo verdict RUN` and `terrazzo report RUN`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report", "verdict"]

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, which log.folder names, or of tz.telemetry.attach.")
]


def verdict(run: Run, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Say what bounds the step of a run, and the edit that would help.

    The run may go on meanwhile: what it has written so far counts. Tables of where the time of a step goes stand below.
    """
    from terrazzo.cli.terminal import columns, say, say_json
    from terrazzo.errors import BadInput
    from terrazzo.telemetry import run_lines, steps_of, tables_of
    from terrazzo.train.look import verdict_on  # the trainer, which other verbs do without

    found = verdict_on(run)
    if found is None:
        raise BadInput(f"'{run}' has no record of a step yet: wait for its first log step, or lower log.every.")
    if as_json:
        say_json(found.as_dict())
        return
    say(str(found), "bold")
    for table in tables_of(steps_of(run_lines(run))):
        say(f"\n{table.title}\n{columns([table.head, *table.rows], '<' + '>' * (len(table.head) - 1))}")


def report(
    run: Run,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="another run: its loss is drawn too, and its settings compared")
    ] = None,
) -> None:
    """Write report.html of a run from what it has written so far, and print its path.

    One file without scripts, which needs no network: loss, seconds of each step by cause, exchanges, memory, ranks,
    what was promised beside what was measured, plan and configuration. A run writes its own when it ends.
    """
    from terrazzo.cli.terminal import say
    from terrazzo.train.look import page_on  # the trainer, which other verbs do without

    say(str(page_on(run, against)))
