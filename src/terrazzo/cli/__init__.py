"""The command line: `terrazzo VERB`. Each verb is the file or the folder of its name, and this file only puts them
together.

    train       trains what a configuration describes
    run         starts a script on several ranks
    init        asks a few questions, and writes a configuration
    plan        memory, traffic and time of a model before it runs
    config      configurations of any dialect: explained, checked, converted, compared
    checkpoint  checkpoints of any format: shown, verified, compared, pruned, converted
    watch       a run while it runs
    report      report.html of a run
    verdict     what bounds a run's step, and the edit that would help
    trace       the last steps of all ranks, for Perfetto
    profile     a script of somebody else's, measured while it runs
    bench       Terrazzo timed beside FSDP2, DeepSpeed and others
    shared      what all verbs have

How a verb is made:

- A function with annotated parameters, of which typer makes the options: its docstring is what `--help` says. It stands
  in the file of the verb's name, of a folder in `command` or `commands`. Of `plan` and `init` the options are rows of a
  table, `plan.options` and `init.questions`, and `shared.parameters` makes parameters of them.
- That file imports no torch, so that `--help` comes at once. What the verb does is imported inside the function, which
  hands on typed values: options that belong together as one object (`PlanArguments`, `ContextOptions`,
  `HuggingFaceOptions`). In `checkpoint` and `config` each verb has a file of its name, with one function that does it:
  `VERB_checkpoint` or `VERB_config`, in the plural where it takes several (`diff_configs`), and `prune_folder`.
- It raises `BadInput` for what is wrong with its arguments, and ends by `typer.Exit(code)`. `main` prints the message
  of an error that says all, of others the traceback, and ends with the error's exit code, one of
  `terrazzo.exit_codes`. A verb that answers a question, such as `config check` or
  `checkpoint verify`, says in its docstring what its 1, or 2, answers.

To add one: write the function, give it a row in `VERBS`, and name it in the list above. `python -m
tools.reference_pages` writes its page.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from terrazzo import __version__
from terrazzo.cli.bench import bench
from terrazzo.cli.checkpoint.commands import checkpoint
from terrazzo.cli.config.commands import config
from terrazzo.cli.init.command import init
from terrazzo.cli.plan.command import plan
from terrazzo.cli.plan.values import answer_plan_option
from terrazzo.cli.profile import profile
from terrazzo.cli.report import report
from terrazzo.cli.run import run
from terrazzo.cli.shared.unread import ending_unread
from terrazzo.cli.shared.verb import (
    SCRIPTS_OWN,
    OptionAnswer,
    Verb,
    answer_init_option,
    answer_run_option,
    answer_train_option,
    verb_answering,
)
from terrazzo.cli.trace import trace
from terrazzo.cli.train import train
from terrazzo.cli.verdict import verdict
from terrazzo.cli.watch import watch
from terrazzo.config import without_passwords
from terrazzo.errors import TerrazzoError, printable
from terrazzo.exit_codes import FAILED, exit_codes_text

__all__ = ["VERBS", "VerbRow", "app", "main"]

app = typer.Typer(
    name="terrazzo",
    help="One sharded-training engine for PyTorch: every ZeRO stage and FSDP strategy is a row of one table.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a rank's traceback is shown as Python prints it
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"terrazzo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that stand before the verb."""


class VerbRow(NamedTuple):
    """A verb, and what `main` knows of it.

    Attributes:
        function: its name is the verb's.
        answer: to an option that it does not have; None: in typer's words.
        takes_script: what stands behind its first argument is a script's, options too.
        outlives_reader: it is not over when nobody reads its lines; others end with `UNREAD`.
        epilog: what `--help` ends with.
    """

    function: Callable[..., Any]
    answer: OptionAnswer | None = None
    takes_script: bool = False
    outlives_reader: bool = False
    epilog: str | None = None


VERBS = (
    VerbRow(init, answer_init_option),
    VerbRow(train, answer_train_option, outlives_reader=True, epilog=f"Exit codes: {exit_codes_text()}."),
    VerbRow(run, answer_run_option, takes_script=True, outlives_reader=True),
    VerbRow(profile, takes_script=True, outlives_reader=True),
    VerbRow(plan, answer_plan_option),
    VerbRow(verdict),
    VerbRow(report),
    VerbRow(watch),
    VerbRow(trace),
    VerbRow(bench),
)
"""In the order of `--help`."""

for row in VERBS:
    app.command(
        cls=Verb if row.answer is None else verb_answering(row.answer),
        context_settings=SCRIPTS_OWN if row.takes_script else None,
        epilog=row.epilog,
    )(row.function)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(config, name="config")


def main() -> None:
    """Run the command line and end the process with its exit code."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    outlives_reader = any(row.outlives_reader for row in VERBS if row.function.__name__ == verb)
    with contextlib.nullcontext() if outlives_reader else ending_unread():
        _run()


def _run() -> None:
    try:
        app()
    except TerrazzoError as error:
        if error.says_all:
            message = printable(without_passwords(str(error)))  # names in it may come from a stranger's file
            print(f"Error: {message}", file=sys.stderr)
        else:
            _print_traceback(error)
        sys.exit(error.exit_code)
    except Exception as error:
        _print_traceback(error)
        sys.exit(FAILED)


def _print_traceback(error: Exception) -> None:
    """As Python would show it, but for passwords."""
    print(without_passwords("".join(traceback.format_exception(error))), end="", file=sys.stderr)
