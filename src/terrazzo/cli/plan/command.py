"""`terrazzo plan`: the command, whose signature is made of the rows of `options`."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.cli.plan.arguments import PlanArguments
from terrazzo.cli.plan.options import OPTIONS, PlanOption

__all__ = ["plan"]

_CONFIG = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="A file of `terrazzo train`, in place of --model and the rest.")
]
_OVERRIDES = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Settings that replace the file's, as in `terrazzo train`."),
]


def plan(invocation: typer.Context, **values: Any) -> None:
    """Will it fit, how fast, on how many GPUs, with which strategy, and what exactly to run: from shapes alone.

    With --strategy, or a configuration, it describes that plan. Without, it tries all that make sense and ranks them.
    No GPU is needed. That a plan does not fit is an answer and ends with exit code 0; impossible input ends with 2.

    terrazzo plan --params 70e9 --world 256

    terrazzo plan --model llama3-8b --gpu h100-sxm --gpus 8 --seq 8192

    terrazzo plan --model llama3-70b --gpu h100-sxm --min-gpus --picture memory.png

    terrazzo plan examples/quickstart.yaml plan.name=zero1
    """
    sources = {name: invocation.get_parameter_source(name) for name in values}
    written = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    arguments = PlanArguments.read(values, written)
    from terrazzo.cli.plan.answer import answer_plan  # imports the planner and the trainer, which --help can do without

    answer_plan(arguments)


def _parameters() -> Iterator[Parameter]:
    """What typer makes the command line of: the arguments, and the rows of `OPTIONS`."""
    yield Parameter("invocation", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    yield Parameter("config", Parameter.KEYWORD_ONLY, annotation=_CONFIG, default=None)
    yield Parameter("overrides", Parameter.KEYWORD_ONLY, annotation=_OVERRIDES, default=None)
    for panel, options in OPTIONS.items():
        for option in options:
            yield _parameter(option, panel)


def _parameter(option: PlanOption, panel: str) -> Parameter:
    is_switch = option.kind is bool and "/" not in option.names[0]
    default = False if is_switch else None if option.is_number else option.default
    read_as: Any = str if option.is_number else option.kind
    kind: Any = read_as if default is not None else read_as | None
    shown = typer.Option(
        *option.names, help=option.help, metavar=option.metavar, rich_help_panel=panel, show_default=False
    )
    return Parameter(option.argument, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, shown], default=default)


_SIGNATURE = Signature([*_parameters()])
vars(plan)["__signature__"] = _SIGNATURE
plan.__annotations__ = {name: each.annotation for name, each in _SIGNATURE.parameters.items()}
