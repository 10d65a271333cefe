"""Options that are rows of a table. Each is declared once; `with_options` makes the parameters of a command from them.

A verb with a few options of its own has them as annotated parameters, as typer documents it. Rows are for options that
several verbs have, or that are more than an option: also a field of the planner's request, or a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

__all__ = ["CommandOption", "option_field", "rows_of", "with_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class CommandOption:
    """One option.

    Attributes:
        usage: its names and the metavar, as the help shows them: `--gpus --world N`.
        help: its text in the help.
        panel: the section of the help.
        kind: the type of the value; a `bool` is a switch, off by default.
        default: the value if it is not given; None leaves the choice open.
        least: the least value of a number.
    """

    usage: str
    help: str
    panel: str | None = None
    kind: Any = str
    default: Any = None
    least: int | None = None

    @cached_property
    def names(self) -> list[str]:
        """Its names, with `--`."""
        return [word for word in self.usage.split() if word.startswith("--")]

    @cached_property
    def metavar(self) -> str | None:
        """What stands for the value in the help."""
        return " ".join(word for word in self.usage.split() if word not in self.names) or None

    @cached_property
    def flag(self) -> str:
        """Its first name; of `--on/--off` the one that turns it on."""
        return self.names[0].partition("/")[0]

    @cached_property
    def argument(self) -> str:
        """The name of the command's parameter for it."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def parameter(self) -> Parameter:
        """The command's parameter, from which typer makes the option."""
        is_switch = self.kind is bool and "/" not in self.names[0]
        default = False if is_switch else self.default
        shown = typer.Option(
            *self.names,
            help=self.help,
            metavar=self.metavar,
            rich_help_panel=self.panel,
            show_default=False,
            min=self.least,
        )
        or_none = self.kind if default is not None else self.kind | None
        return Parameter(self.argument, Parameter.KEYWORD_ONLY, annotation=Annotated[or_none, shown], default=default)


def option_field(row: CommandOption) -> Any:
    """A field of a dataclass that is an option, whose `kind` is that of the field's annotation."""
    return field(metadata={"option": row})


def rows_of(arguments: type) -> list[Any]:
    """The options among the fields of a dataclass, in their order."""
    hints = get_type_hints(arguments)
    rows = []
    for each in fields(arguments):
        if (row := each.metadata.get("option")) is not None:
            kind, *_ = [kind for kind in get_args(hints[each.name]) or (hints[each.name],) if kind is not NoneType]
            rows.append(replace(row, kind=kind))
    return rows


def with_options(rows: Iterable[CommandOption], before: str = "") -> Callable[[Command], Command]:
    """A decorator that gives a function these options in place of its `**`, before its own parameter `before`."""

    def decorate(function: Command) -> Command:
        own = [each for each in signature(function, eval_str=True).parameters.values() if each.kind != each.VAR_KEYWORD]
        index = next((index for index, each in enumerate(own) if each.name == before), len(own))
        options = [row.parameter for row in rows]
        every = [each.replace(kind=each.KEYWORD_ONLY) for each in [*own[:index], *options, *own[index:]]]
        vars(function)["__signature__"] = Signature(every)
        function.__annotations__ = {each.name: each.annotation for each in every}
        return function

    return decorate
