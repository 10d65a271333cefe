"""The command line: `terrazzo VERB`. Each verb is the file or the folder of its name; this file puts them together.

    train       trains what a configuration describes
    run         starts a training script on several ranks
    init        asks a few questions, and writes a configuration
    plan        memory, traffic and time of a model before it runs
    config      explains, checks, converts and compares configurations of any dialect
    checkpoint  shows, verifies, compares, prunes and converts checkpoints of any format
    watch       shows a run while it runs
    report      writes report.html of a run
    verdict     says what bounds a run's step, and the edit that would help
    trace       writes the last steps of all ranks, for Perfetto
    profile     measures a training script that does not use Terrazzo
    bench       times Terrazzo beside FSDP2, DeepSpeed and others
    shared      what several verbs use

How a verb is written:

- It is a function with annotated parameters, which typer turns into options; its docstring is what `--help` prints. It
  is in the verb's file, or in `command` or `commands` of its folder. Options that several verbs have, or that are more
  than an option, are rows of a table: `config.options`, `plan.options`, `init.questions`; see `shared.options`.
- Its file does not import torch, so that `--help` comes at once. The function imports what does the work, and passes on
  typed values; options that belong together are one object (`PlanArguments`, `ContextOptions`, `HuggingFaceOptions`).
  In `checkpoint` and `config` each verb has a file of its name with one function that does the work:
  `VERB_checkpoint(s)`, `VERB_config(s)`, or `prune_folder`.
- It raises `BadInput` for wrong arguments, and ends by `typer.Exit(code)`. `main` prints the message of an error that
  `says_all`, and the traceback of any other; the process ends with the error's exit code, one of `terrazzo.exit_codes`.
  A verb that answers a question, such as `config check`, says in its docstring what its exit code 1 means; in these
  folders a bug ends with `BROKEN`.

To add a verb: write the function, give it a row in `VERBS`, and name it in the list above. `python -m
tools.reference_pages` writes its page.
"""

from __future__ import annotations

import contextlib
import io
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
from terrazzo.errors import TerrazzoError
from terrazzo.exit_codes import BROKEN, FAILED, exit_codes_text
from terrazzo.messages import printable
from terrazzo.processes.standard_streams import open_missing

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
    """Options before the verb."""


class VerbRow(NamedTuple):
    """A verb, and what `main` needs to know about it.

    Attributes:
        function: does it; its name is the verb's.
        answer: answers an option that the verb does not have; None leaves that to typer.
        takes_script: whether all that follows its first argument belongs to a script, options included.
        outlives_reader: whether it goes on when nobody reads its output; others end with `UNREAD`.
        epilog: the last lines of `--help`.
    """

    function: Callable[..., Any]
    answer: OptionAnswer | None = None
    takes_script: bool = False
    outlives_reader: bool = False
    epilog: str | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def asks_help(self, words: list[str]) -> bool:
        """Whether the verb only shows its options; behind a script `--help` is the script's."""
        return "--help" in (words[2:3] if self.takes_script else words)


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
"""The verbs that are functions, in the order of `--help`."""

for row in VERBS:
    app.command(
        cls=Verb if row.answer is None else verb_answering(row.answer),
        context_settings=SCRIPTS_OWN if row.takes_script else None,
        epilog=row.epilog,
    )(row.function)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(config, name="config")


_ANSWERING = ("checkpoint", "config")
"""Verbs of which some answer a question by exit code 1."""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    open_missing()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # ASCII has no ×, and shows ? for it
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    outlives_reader = any(row.outlives_reader and not row.asks_help(sys.argv) for row in VERBS if row.name == verb)
    failed = BROKEN if verb in _ANSWERING else FAILED
    with contextlib.nullcontext() if outlives_reader else ending_unread(failed):
        _run(failed)


def _run(failed: int) -> None:
    """Run the command line; `failed`: the exit code of an error that is not the user's."""
    try:
        app()
    except TerrazzoError as error:
        if error.says_all:
            message = printable(without_passwords(str(error)))  # names in it may come from a stranger's file
            print(f"Error: {message}", file=sys.stderr)
        else:
            _print_traceback(error)
        sys.exit(failed if error.exit_code == FAILED else error.exit_code)
    except Exception as error:
        _print_traceback(error)
        sys.exit(failed)


def _print_traceback(error: Exception) -> None:
    """Print the traceback as Python would, without passwords."""
    print(without_passwords("".join(traceback.format_exception(error))), end="", file=sys.stderr)
