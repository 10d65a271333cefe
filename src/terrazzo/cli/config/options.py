"""Options that several verbs of `terrazzo config` have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.cli.shared.options import CommandOption, option_field, rows_of

__all__ = ["CONTEXT_ROWS", "AllOption", "ContextOptions", "FileArgument", "FromOption"]

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A configuration in YAML, JSON or TOML, or a script of arguments.")
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="DIALECT", help="the file's dialect; default: as it looks")
]
AllOption = Annotated[
    bool, typer.Option("--all", help="also what the library's defaults decide, and what is left to code")
]


def _option(usage: str, words: str, **more: Any) -> Any:
    return option_field(CommandOption(usage, words, "What the file does not say", **more))


@dataclass(frozen=True)
class ContextOptions:
    """What the file does not say, as given on the command line; None for what was left out."""

    world: int | None = _option("--world", "number of ranks", least=1)
    model: str | None = _option("--model NAME|PATH", "a preset such as llama3-8b, or a config.json")
    load_dtype: str | None = _option("--load-dtype", "dtype in which the model is loaded: fp32, bf16 or fp16")
    trainer: Path | None = _option("--trainer FILE", "TrainingArguments that resolve 'auto'")  # noqa: RUF009 - a field
    library: list[str] | None = _option(  # noqa: RUF009 - a field
        "--library NAME=VERSION", "of the library that reads it, such as deepspeed=0.16.0: defaults have changed"
    )


CONTEXT_ROWS: list[CommandOption] = rows_of(ContextOptions)
"""The options for the fields of `ContextOptions`, which all verbs have."""
