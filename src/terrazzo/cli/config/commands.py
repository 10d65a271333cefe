"""`terrazzo config VERB`: explain, check, convert and compare configurations of any stack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrazzo.cli.shared.verb import Verb
from terrazzo.errors import BadInput

if TYPE_CHECKING:
    from terrazzo.dialects.core.dialect import Finding, ReadingContext
    from terrazzo.dialects.verbs.convert import Conversion
    from terrazzo.dialects.verbs.understand import Understood

__all__ = ["config"]

Option = typer.Option
File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A configuration in YAML, JSON or TOML, or a script of arguments.")
]
From = Annotated[str | None, Option("--from", metavar="DIALECT", help="the file's dialect; default: as it looks")]
WITH = "What the file does not say"
World = Annotated[int | None, Option(min=1, help="number of ranks", rich_help_panel=WITH)]
Model = Annotated[
    str | None, Option(metavar="NAME|PATH", help="a preset such as llama3-8b, or a config.json", rich_help_panel=WITH)
]
All = Annotated[bool, Option("--all", help="also what the library's defaults decide, and what is left to code")]
LoadDtype = Annotated[
    str | None, Option(help="dtype in which the model is loaded: fp32, bf16 or fp16", rich_help_panel=WITH)
]
Trainer = Annotated[
    Path | None, Option(metavar="FILE", help="TrainingArguments that resolve 'auto'", rich_help_panel=WITH)
]
Library = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=VERSION",
        help="of the library that reads it, such as deepspeed=0.16.0: defaults have changed",
        rich_help_panel=WITH,
    ),
]
AsJson = Annotated[bool, Option("--json", help="print JSON")]

LOAD_DTYPES = ("fp32", "bf16", "fp16")
HELP = (
    "Explain, check, convert and compare configurations: DeepSpeed, FSDP, Accelerate, Trainer, Lightning, torchtitan,"
    " Megatron-LM."
)

config = typer.Typer(no_args_is_help=True, help=HELP)


@config.command(cls=Verb)
def explain(  # structure: signature fixed by the command line
    file: File,
    name: From = None,
    world: World = None,
    model: Model = None,
    load_dtype: LoadDtype = None,
    trainer: Trainer = None,
    library: Library = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """Say what a configuration means: the row of the table, and what the file sets with its effective value.

    --all adds what the library's defaults decide. --json has everything.
    """
    from terrazzo.cli.config import text as shown
    from terrazzo.dialects.verbs.explain import explain as page_of

    page = page_of(_understand(file, name, _context(world, model, load_dtype, trainer, library)))
    shown.say_report(page) if as_json else shown.say_page(str(file), page, everything=everything)


@config.command(cls=Verb)
def check(  # structure: signature fixed by the command line
    file: File,
    name: From = None,
    world: World = None,
    model: Model = None,
    load_dtype: LoadDtype = None,
    trainer: Trainer = None,
    library: Library = None,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong: misspelt and ignored keys, combinations that cannot work, batch arithmetic, the mesh.

    Exit code 0: no errors, though there may be warnings. 1: errors.
    """
    from terrazzo.cli.config import text as shown
    from terrazzo.dialects.verbs.check import check as findings_of

    understood = _understand(file, name, _context(world, model, load_dtype, trainer, library))
    findings = [*findings_of(understood), *_trainers_own(understood)]
    if as_json:
        shown.say_report({"file": str(file), "dialect": understood.dialect.name, "findings": findings})
    else:
        shown.say_findings(str(file), understood.dialect.title, findings)
    raise typer.Exit(1 if any(finding.level == "error" for finding in findings) else 0)


@config.command(cls=Verb)
def convert(  # structure: signature fixed by the command line
    file: File,
    to: Annotated[str, Option(metavar="DIALECT", help="the dialect to write; terrazzo is one of them")],
    out: Annotated[
        Path | None,
        Option(
            "-o", "--out", metavar="OUT", help="file to write, which must not exist; default: the document is printed"
        ),
    ] = None,
    partial: Annotated[bool, Option("--partial", help="write although keys are refused, without them")] = False,
    name: From = None,
    world: World = None,
    model: Model = None,
    load_dtype: LoadDtype = None,
    trainer: Trainer = None,
    library: Library = None,
    as_json: AsJson = False,
) -> None:
    """Write a configuration in another dialect, and say of every key what has become of it.

    Each key is applied, renamed, defaulted, lossy or refused, the last two with why and what to do instead. Without
    -o the document is printed, and the report goes to standard error. Exit code 1: keys are refused, and nothing was
    written; --partial writes what is left.
    """
    from terrazzo.cli.config import text as shown
    from terrazzo.cli.shared.terminal import say
    from terrazzo.dialects.registry import dialect
    from terrazzo.dialects.verbs.convert import convert as convert_to

    target = dialect(to)
    if out is not None:
        _check_out(out)
    understood = _understand(file, name, _context(world, model, load_dtype, trainer, library))
    conversion = convert_to(understood, target)
    written = partial or not conversion.refused
    text = _text(conversion, understood, out)
    if written and out is not None:
        _write(out, text)
    if as_json:
        shown.say_report(shown.as_json(str(file), conversion, understood.context, out if written else None))
    else:
        shown.say_conversion(str(file), conversion, understood.context, stderr=out is None)
        if written:
            say(f"written: {out}") if out is not None else print(text, end="")
    raise typer.Exit(0 if written else 1)


@config.command(cls=Verb)
def diff(  # structure: signature fixed by the command line
    a: Annotated[Path, typer.Argument(metavar="A", help="A configuration in YAML, JSON or TOML.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any dialect.")],
    from_a: Annotated[str | None, Option(metavar="DIALECT", help="A's dialect; default: as it looks")] = None,
    from_b: Annotated[str | None, Option(metavar="DIALECT", help="B's dialect; default: as it looks")] = None,
    world: World = None,
    model: Model = None,
    load_dtype: LoadDtype = None,
    trainer: Trainer = None,
    library: Library = None,
    as_json: AsJson = False,
) -> None:
    """Compare what two configurations mean, whatever their dialects. Exit code 0: the same. 1: different."""
    from terrazzo.cli.config import text as shown
    from terrazzo.dialects.verbs.diff import compare

    context = _context(world, model, load_dtype, trainer, library)
    one, other = _understand(a, from_a, context), _understand(b, from_b, context)
    found = compare(one.description, other.description)
    if as_json:
        heads = {
            "a": {"file": str(a), "dialect": one.dialect.name},
            "b": {"file": str(b), "dialect": other.dialect.name},
        }
        shown.say_report({**heads, "equal": not found, "differences": found})
    else:
        shown.say_differences((str(a), one.dialect.title), (str(b), other.dialect.title), found)
    raise typer.Exit(1 if found else 0)


# -- what is asked -------------------------------------------------------------------------------------------------


def _understand(file: Path, name: str | None, context: ReadingContext) -> Understood:
    from terrazzo.dialects.verbs.understand import understand

    return understand(file, name, context)


def _context(
    world: int | None, model: str | None, load_dtype: str | None, trainer: Path | None, library: list[str] | None
) -> ReadingContext:
    from terrazzo.config.files import load
    from terrazzo.dialects.core.dialect import ReadingContext
    from terrazzo.engine import dtype_named

    load_dtype = None if load_dtype is None else dtype_named(load_dtype)
    if load_dtype not in (None, *LOAD_DTYPES):
        raise BadInput(f"--load-dtype is '{load_dtype}'; there are: {', '.join(LOAD_DTYPES)}.")
    return ReadingContext(
        world=world,
        load_dtype=load_dtype,
        versions=_versions(library or []),
        trainer=load(trainer).document if trainer else {},
        **(_sizes(model) if model else {}),
    )


def _versions(given: list[str]) -> dict[str, str]:
    versions = {}
    for text in given:
        name, equals, version = text.partition("=")
        if not equals or not version[:1].isdigit():
            raise BadInput(f"--library is '{text}', expected NAME=VERSION such as deepspeed=0.16.0.")
        versions[name.strip().lower()] = version.strip()
    return versions


def _sizes(model: str) -> dict[str, Any]:
    """What readers and checks need of a model."""
    from terrazzo.planner import model_shape

    shape = model_shape(model)
    sizes: dict[str, Any] = {"parameters": shape.numel, "hidden_size": shape.hidden or None}
    sizes |= {"positions": shape.positions, "tied": shape.tied}
    block = next((unit.block for unit in shape.blocks if unit.block is not None), None)
    if block is None:
        return sizes
    return {
        **sizes,
        "layers": shape.layers,
        "block_numel": max(unit.numel for unit in shape.blocks),
        "heads": block.heads,
        "kv_heads": block.kv_heads,
        "experts": max(unit.block.experts for unit in shape.blocks if unit.block is not None),
    }


def _trainers_own(understood: Understood) -> list[Finding]:
    """What `terrazzo train` itself says of a file of its own."""
    if understood.dialect.name != "terrazzo":
        return []
    from terrazzo.config import config_from_dict
    from terrazzo.dialects.core.dialect import Finding

    try:
        config_from_dict(understood.loaded.document, origin="`terrazzo train`")
    except BadInput as error:
        known = {verdict.key for verdict in understood.reading.verdicts if verdict.kind == "refused"}
        return [] if known else [Finding("", "error", str(error))]
    return []


# -- what is written -----------------------------------------------------------------------------------------------


def _check_out(out: Path) -> None:
    if out.exists():
        raise BadInput(f"'{out}' exists, and is not overwritten: name another file, or move it away.")
    if not out.parent.is_dir():
        raise BadInput(f"There is no folder '{out.parent}' for '{out.name}': make it, or name another.")


def _text(conversion: Conversion, understood: Understood, out: Path | None) -> str:
    from terrazzo.config.files import format_of
    from terrazzo.dialects.verbs.emit import to_text

    named = out if out is not None and out.suffix else Path(f"document{conversion.target.suffix}")
    kind = format_of(named)
    return to_text(conversion.document, kind, understood.loaded, conversion.verdicts)


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadInput(f"'{out}' cannot be written: {error}.") from None
