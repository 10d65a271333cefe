"""`terrazzo trace RUN`: the last steps of all ranks, exchange by exchange, for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.shared.arguments import RunArgument

__all__ = ["trace"]


def trace(
    run: RunArgument,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="the last ones, as far as they are recorded")] = 5,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="where to; default: trace.json in RUN")] = None,
) -> None:
    """Write the last steps of all ranks, exchange by exchange, for https://ui.perfetto.dev, and print the file's path.

    Units, gathers, reductions, moves between tiers, waits, input, checkpoints and transient memory; each rank is a
    process. The run may go on meanwhile. Ranks record all the time: the last 32,000 events each, which is a few steps
    of a large model and many of a small one.
    """
    import json

    from terrazzo.cli.shared.terminal import say
    from terrazzo.cli.shared.written_files import write_output
    from terrazzo.telemetry import flights_of, trace_of
    from terrazzo.telemetry.log.run_folder import RunFolder

    events = trace_of(flights_of(run), steps)
    path = out or RunFolder(run).trace
    write_output(path, json.dumps(events))
    say(str(path))
