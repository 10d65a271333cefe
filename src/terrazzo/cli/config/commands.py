"""`terrazzo config VERB`: explain, check, convert and compare configurations of any stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.cli.config.options import CONTEXT_ROWS, AllOption, ContextOptions, FileArgument, FromOption
from terrazzo.cli.shared.arguments import AsJsonOption, OverridesArgument
from terrazzo.cli.shared.options import with_options
from terrazzo.cli.shared.verb import Verb

__all__ = ["config"]

config = typer.Typer(
    no_args_is_help=True,
    help="Explain, check, convert and compare configurations: DeepSpeed, FSDP, Accelerate, Trainer, Lightning,"
    " torchtitan, Megatron-LM.",
)


@config.command(cls=Verb)
@with_options(CONTEXT_ROWS, before="everything")
def explain(
    file: FileArgument,
    name: FromOption = None,
    everything: AllOption = False,
    as_json: AsJsonOption = False,
    **context: Any,
) -> None:
    """Say what a configuration means: the row of the table, and what the file sets with its effective value.

    --all adds what the library's defaults decide. --json has everything.
    """
    from terrazzo.cli.config.explain import explain_config  # imports torch, which --help can do without

    explain_config(file, name, ContextOptions(**context), everything, as_json)


@config.command(cls=Verb)
@with_options(CONTEXT_ROWS, before="as_json")
def check(
    file: FileArgument,
    overrides: OverridesArgument = None,
    name: FromOption = None,
    as_json: AsJsonOption = False,
    **context: Any,
) -> None:
    """Find what is wrong: misspelt and ignored keys, combinations that cannot work, batch arithmetic, the mesh.

    Exit code 0: no errors, though there may be warnings. 1: errors.
    """
    from terrazzo.cli.config.check import check_config  # imports torch, which --help can do without

    raise typer.Exit(check_config(file, name, ContextOptions(**context), as_json, overrides or ()))


@config.command(cls=Verb)
@with_options(CONTEXT_ROWS, before="as_json")
def convert(  # structure: signature fixed by the command line
    file: FileArgument,
    to: Annotated[str, typer.Option(metavar="DIALECT", help="the dialect to write; terrazzo is one of them")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="OUT", help="file to write, which must not exist; default: the document is printed"
        ),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="write although keys are refused, without them")] = False,
    name: FromOption = None,
    as_json: AsJsonOption = False,
    **context: Any,
) -> None:
    """Write a configuration in another dialect, and say of every key what has become of it.

    Each key is applied, renamed, defaulted, lossy or refused, the last two with why and what to do instead. Without
    -o the document is printed, and the report goes to standard error. Exit code 1: keys are refused, by themselves or
    together, and nothing was written; --partial writes what is left.
    """
    from terrazzo.cli.config.convert import Dialects, convert_config  # imports torch, which --help can do without

    options = ContextOptions(**context)
    raise typer.Exit(convert_config(file, Dialects(name, to), options, out, partial, as_json))


@config.command(cls=Verb)
@with_options(CONTEXT_ROWS, before="as_json")
def diff(  # structure: signature fixed by the command line
    a: Annotated[Path, typer.Argument(metavar="A", help="A configuration in YAML, JSON or TOML.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any dialect.")],
    from_a: Annotated[str | None, typer.Option(metavar="DIALECT", help="A's dialect; default: as it looks")] = None,
    from_b: Annotated[str | None, typer.Option(metavar="DIALECT", help="B's dialect; default: as it looks")] = None,
    as_json: AsJsonOption = False,
    **context: Any,
) -> None:
    """Compare what two configurations mean, whatever their dialects. Exit code 0: the same. 1: different."""
    from terrazzo.cli.config.diff import diff_configs  # imports torch, which --help can do without

    options = ContextOptions(**context)
    raise typer.Exit(diff_configs((a, b), (from_a, from_b), options, as_json))
