"""`terrazzo init`: a few questions, and a configuration of `terrazzo train` that fits the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from terrazzo.cli.init.questions import QUESTIONS
from terrazzo.cli.shared.options import with_options
from terrazzo.errors import BadInput

if TYPE_CHECKING:
    from terrazzo.cli.init.answers import InitAnswers

__all__ = ["init"]

T = TypeVar("T")


@with_options(QUESTIONS, before="yes")
def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="The YAML file to write; default train.yaml.")
    ] = Path("train.yaml"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given takes its default.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE, if it is there.")] = False,
    **texts: str | None,
) -> None:
    """Write a configuration of `terrazzo train`: what is not given as an option is asked for.

    The planner chooses plan, offload, micro-batch, activation checkpointing and precision for the machine. Comments in
    the file say why. Enter takes the default in brackets. No GPU is needed, and nothing is downloaded.

    terrazzo init

    terrazzo init mine.yaml --yes --model llama3-8b --gpu h100-sxm --ranks 8
    """
    file = _checked_file(file)
    _check_askable(texts, yes)
    from terrazzo.cli.init.document import write_config  # imports the planner and the trainer

    write_config(_free_file(file, yes, overwrite), _answers(texts, yes))


def _check_askable(texts: Mapping[str, str | None], yes: bool) -> None:
    """Refuse open questions if there is no terminal to ask them on."""
    missing = [question.flag for question in QUESTIONS if texts[question.argument] is None]
    if missing and not yes and not _can_ask():
        raise BadInput(
            f"There is no terminal to ask on, and these are not given: {', '.join(missing)}. Give them, or --yes for"
            " their defaults."
        )


def _free_file(file: Path, yes: bool, overwrite: bool) -> Path:
    """`file`, or another one that is asked for if it exists and is not to be replaced."""
    while file.exists() and not overwrite:
        if yes or not _can_ask():
            raise BadInput(f"'{file}' exists, and is not replaced: name another file, or give --overwrite.")
        if typer.confirm(f"Replace '{file}'?"):
            break
        names = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
        free = next(name for name in names if not name.exists())
        file = _ask_until_read("Another file to write", str(free), lambda text: _checked_file(Path(text or "")))
    return file


def _answers(texts: Mapping[str, str | None], yes: bool) -> InitAnswers:
    """The answers to all questions: from options, else typed, or with `yes` the defaults."""
    from terrazzo.cli.init.answers import ANSWERS, answer  # imports the planner and the trainer

    by_name: dict[str, Any] = {}
    answers = cast("InitAnswers", by_name)
    for question in QUESTIONS:
        text, read = texts[question.argument], partial(answer, question, answers=answers)
        if text is None and not yes:
            default = ANSWERS[question.argument].default(answers)
            by_name[question.argument] = _ask_until_read(question.text, default, read)
        else:
            by_name[question.argument] = read(text)
    return answers


def _ask_until_read(text: str, default: str | None, read: Callable[[str | None], T]) -> T:
    """Ask until `read` accepts what is typed, or the default; returns what `read` does."""
    while True:
        typed = input(f"{text}{'' if default is None else f' [{default}]'}: ").strip()
        try:
            return read(typed or default)
        except BadInput as error:
            print(f"  {error}", file=sys.stderr)


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _checked_file(file: Path) -> Path:
    """`file`; raises `BadInput` if it cannot be written."""
    from terrazzo.cli.shared.written_files import check_file  # what writes YAML, which --help does without

    check_file("FILE", file, (".yaml", ".yml"))
    return file
