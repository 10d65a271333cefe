"""Calls that must all be made, and the one that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["do_all", "do_nothing"]


def do_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, also after one that has raised.

    Raises:
        Exception: the first of their errors, with a note of each other.
    """
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"After that, {type(other).__name__}: {other}")
    if errors:
        raise errors[0]


def do_nothing(*_: object) -> None:
    """Take any arguments and do nothing: what is called where nobody wants to know."""
