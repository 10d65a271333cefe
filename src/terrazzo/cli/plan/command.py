"""`terrazzo plan`: the command, whose options are the rows of `options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.cli.plan.options import OPTION_ROWS
from terrazzo.cli.plan.values import read_arguments
from terrazzo.cli.shared.arguments import OverridesArgument
from terrazzo.cli.shared.options import with_options

__all__ = ["plan"]


@with_options(OPTION_ROWS)
def plan(
    invocation: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A file of `terrazzo train`, in place of --model and the rest."),
    ] = None,
    overrides: OverridesArgument = None,
    **options: Any,
) -> None:
    """Will it fit, how fast, on how many GPUs, with which strategy, and what exactly to run: from shapes alone.

    With --strategy, or a configuration, it describes that plan. Without, it tries all that make sense and ranks them.
    No GPU is needed. That a plan does not fit is an answer and ends with exit code 0; impossible input ends with 2.

    terrazzo plan --params 70e9 --world 256

    terrazzo plan --model llama3-8b --gpu h100-sxm --gpus 8 --seq 8192

    terrazzo plan --model llama3-70b --gpu h100-sxm --min-gpus --picture memory.png

    terrazzo plan examples/quickstart.yaml plan.name=zero1
    """
    values = {"config": config, "overrides": overrides, **options}
    sources = {name: invocation.get_parameter_source(name) for name in values}
    written = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    arguments = read_arguments(values, written)
    from terrazzo.cli.plan.answer import answer_plan  # imports the planner and the trainer, which --help can do without

    answer_plan(arguments)
