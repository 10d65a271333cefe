"""The options that several verbs of `terrazzo config` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

__all__ = [
    "AllOption",
    "ContextOptions",
    "FileArgument",
    "FromOption",
    "LibraryOption",
    "LoadDtypeOption",
    "ModelOption",
    "TrainerOption",
    "WorldOption",
]

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A configuration in YAML, JSON or TOML, or a script of arguments.")
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="DIALECT", help="the file's dialect; default: as it looks")
]
_PANEL = "What the file does not say"
WorldOption = Annotated[int | None, typer.Option(min=1, help="number of ranks", rich_help_panel=_PANEL)]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="NAME|PATH", help="a preset such as llama3-8b, or a config.json", rich_help_panel=_PANEL),
]
AllOption = Annotated[
    bool, typer.Option("--all", help="also what the library's defaults decide, and what is left to code")
]
LoadDtypeOption = Annotated[
    str | None, typer.Option(help="dtype in which the model is loaded: fp32, bf16 or fp16", rich_help_panel=_PANEL)
]
TrainerOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TrainingArguments that resolve 'auto'", rich_help_panel=_PANEL)
]
LibraryOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VERSION",
        help="of the library that reads it, such as deepspeed=0.16.0: defaults have changed",
        rich_help_panel=_PANEL,
    ),
]


class ContextOptions(NamedTuple):
    """What the file does not say, as it is written on the command line."""

    world: int | None
    model: str | None
    load_dtype: str | None
    trainer: Path | None
    library: list[str] | None
