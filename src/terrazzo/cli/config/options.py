"""Options that several verbs of `terrazzo config` have."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from terrazzo.cli.shared.parameters import option_parameter

__all__ = ["CONTEXT_PARAMETERS", "AllOption", "ContextOptions", "FileArgument", "FromOption"]

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A configuration in YAML, JSON or TOML, or a script of arguments.")
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="DIALECT", help="the file's dialect; default: as it looks")
]
AllOption = Annotated[
    bool, typer.Option("--all", help="also what the library's defaults decide, and what is left to code")
]


class ContextOptions(NamedTuple):
    """What the file does not say, as given on the command line; None for what was left out."""

    world: int | None
    model: str | None
    load_dtype: str | None
    trainer: Path | None
    library: list[str] | None


def _context_parameter(name: str, kind: Any, help: str, **more: Any) -> Parameter:
    return option_parameter(name, kind, typer.Option(help=help, rich_help_panel="What the file does not say", **more))


CONTEXT_PARAMETERS = (
    _context_parameter("world", int, "number of ranks", min=1),
    _context_parameter("model", str, "a preset such as llama3-8b, or a config.json", metavar="NAME|PATH"),
    _context_parameter("load_dtype", str, "dtype in which the model is loaded: fp32, bf16 or fp16"),
    _context_parameter("trainer", Path, "TrainingArguments that resolve 'auto'", metavar="FILE"),
    _context_parameter(
        "library",
        list[str],
        "of the library that reads it, such as deepspeed=0.16.0: defaults have changed",
        metavar="NAME=VERSION",
    ),
)
"""The parameters for the fields of `ContextOptions`, which all verbs have."""
