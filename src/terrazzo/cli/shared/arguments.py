"""Arguments and options that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.telemetry.log.run_folder import RunFolder

__all__ = ["AsJsonOption", "RunArgument"]


def _folder(run: Path) -> Path:
    """The folder of a run that is given as the folder or as its `metrics.jsonl`."""
    return RunFolder.of(run).path


AsJsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        callback=_folder,
        help="Folder of a run, which log.folder names, or of tz.telemetry.attach; or the metrics.jsonl in it.",
    ),
]
