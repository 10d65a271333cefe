"""Arguments and options that several verbs take, and whole numbers that are not options of typer's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrazzo.errors import BadInput
from terrazzo.telemetry.log.run_folder import RunFolder

__all__ = ["AsJsonOption", "OverridesArgument", "RunArgument", "whole_number"]


def _folder(run: Path) -> Path:
    """The folder of a run that is given as the folder or as its `metrics.jsonl`."""
    return RunFolder.of(run).path


AsJsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Settings that replace the file's, as in `terrazzo train`."),
]

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        callback=_folder,
        help="Folder of a run, which log.folder names, or of tz.telemetry.attach; or the metrics.jsonl in it.",
    ),
]


def whole_number(named: str, text: str, most: int | None = None) -> int:
    """The whole number above 0 that `text` is, at most `most`; `named` is what has it: `--ranks`.

    Raises:
        BadInput: it is none.
    """
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    if number < 1 or (most is not None and number > most):
        bounds = "above 0" if most is None else f"from 1 to {most:,}"
        raise BadInput(f"{named} is '{text}', expected a whole number {bounds}.")
    return number
