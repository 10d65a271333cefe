"""Arguments that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Run"]

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, which log.folder names, or of tz.telemetry.attach.")
]
