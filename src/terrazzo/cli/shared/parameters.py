"""Turns rows of a table into the parameters from which typer makes a command's options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar

__all__ = ["option_parameter", "with_parameters"]

Command = TypeVar("Command", bound=Callable[..., Any])


def option_parameter(name: str, kind: Any, option: Any, default: Any = None) -> Parameter:
    """A keyword parameter of type `kind` (or None, if that is the default) with a `typer.Option`."""
    or_none: Any = kind if default is not None else kind | None
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[or_none, option], default=default)


def with_parameters(parameters: Iterable[Parameter], before: str = "") -> Callable[[Command], Command]:
    """A decorator that gives a function these parameters in place of its `**`, before its own parameter `before`."""

    def decorate(function: Command) -> Command:
        own = [each for each in signature(function, eval_str=True).parameters.values() if each.kind != each.VAR_KEYWORD]
        place = next((place for place, each in enumerate(own) if each.name == before), len(own))
        every = [each.replace(kind=each.KEYWORD_ONLY) for each in [*own[:place], *parameters, *own[place:]]]
        vars(function)["__signature__"] = Signature(every)
        function.__annotations__ = {each.name: each.annotation for each in every}
        return function

    return decorate
