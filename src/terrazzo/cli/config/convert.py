"""`terrazzo config convert`: writes a configuration in another dialect, and says what became of every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from terrazzo.cli.config.context import reading_context
from terrazzo.cli.config.options import ContextOptions
from terrazzo.cli.config.text import cell_text, columns_text, say_findings, say_report, say_verdicts
from terrazzo.cli.shared.terminal import say
from terrazzo.cli.shared.written_files import check_file, write_output
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.key_verdict import KINDS, KeyVerdict
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion, convert
from terrazzo.dialects.verbs.emit import to_text
from terrazzo.dialects.verbs.precision_table import COLUMNS, Cost, costs, precisions
from terrazzo.dialects.verbs.understand import Understood, understand
from terrazzo.documents import format_of
from terrazzo.errors import BadInput
from terrazzo.messages import GIB, counted, listed

__all__ = ["Dialects", "convert_config"]


OF_USER = ("model", "data")
"""Sections of a configuration for `terrazzo train` that correspond to what a training script has in code."""


class Dialects(NamedTuple):
    """The name of the file's dialect (None: to be recognised), and of the dialect to write."""

    source: str | None
    target: str


def convert_config(
    file: Path, dialects: Dialects, options: ContextOptions, out: Path | None, partial: bool, as_json: bool
) -> int:
    """Write a configuration in another dialect; returns the exit code.

    Args:
        out: the file to write; None to print the document.
        partial: write even if keys are refused, without these.
    """
    target = dialect(dialects.target)
    if out is not None:
        _check_out(out)
    understood = understand(file, dialects.source, reading_context(options))
    conversion = convert(understood, target)
    is_written = partial or not conversion.refused
    text = _text(conversion, understood, out)
    if is_written and out is not None:
        write_output(out, text)
    if as_json:
        say_report(_as_json(str(file), conversion, understood.context, out if is_written else None))
    else:
        _say_conversion(str(file), conversion, understood.context, stderr=out is None)
        if is_written:
            say(f"written: {out}") if out is not None else print(text, end="")
            _say_what_is_left(conversion, stderr=out is None)
        _say_refused(conversion, out, is_written=is_written)
    return 0 if is_written else 1


# -- the document --------------------------------------------------------------------------------------------------


def _check_out(out: Path) -> None:
    if out.exists():
        raise BadInput(f"'{out}' exists, and is not overwritten: name another file, or move it away.")
    check_file("--out", out)


def _text(conversion: Conversion, understood: Understood, out: Path | None) -> str:
    named = out if out is not None and out.suffix else Path(f"document{conversion.target.suffix}")
    kind = format_of(named)
    return to_text(conversion.document, kind, understood.loaded, conversion.verdicts, conversion.target.program)


# -- the report ----------------------------------------------------------------------------------------------------


def _say_conversion(file: str, conversion: Conversion, context: ReadingContext, *, stderr: bool) -> None:
    """Every key's verdict, the precision table before and after, and what its dtypes cost."""
    source, target = conversion.source.title, conversion.target.title
    say(f"{file}: {source} -> {target}", "bold", stderr=stderr)
    say_verdicts(conversion.verdicts, stderr=stderr)
    say(_counts(conversion.verdicts), stderr=stderr)
    if conversion.findings:
        say("\nwhat `terrazzo config check` says of the file:", stderr=stderr)
        say_findings(conversion.findings, stderr=stderr)
    if conversion.unsaid:
        say(f"\nnot set in the file: what {source} does by default, and {target} cannot say:", stderr=stderr)
        say_verdicts(conversion.unsaid, stderr=stderr)
    if conversion.added:
        say(f"\nby {target}'s defaults, where {source} leaves it to code or was refused:", stderr=stderr)
        say(columns_text([[each.key, cell_text(each.value)] for each in conversion.added]), stderr=stderr)
    say("\n" + _precision_text(conversion, context), stderr=stderr)


def _say_refused(conversion: Conversion, out: Path | None, *, is_written: bool) -> None:
    """Say in a line each what has been refused, and what was therefore not written."""
    stderr, target = out is None, conversion.target.title
    if conversion.refused:
        keys = counted(len(conversion.refused), "key")
        say(f"\n{keys} refused: see above what to do instead.", "red", stderr=stderr)
    for fault in conversion.faults:
        where = f"{fault.key}: " if fault.key else ""
        say(f"{target} refuses the document as it is: {where}{fault.text}", "red", stderr=stderr)
    if not is_written:
        what = "the document was not printed" if out is None else f"{out} was not written"
        left = ", to be mended by hand" if conversion.faults else " without them"
        say(f"{what}: --partial writes what is left{left}.", "red", stderr=stderr)


def _say_what_is_left(conversion: Conversion, *, stderr: bool) -> None:
    """Say which sections the user still has to write, if the source is a configuration that goes with a script."""
    missing = [name for name in OF_USER if name not in conversion.document]
    if missing and conversion.target.name == "terrazzo" and conversion.source is not conversion.target:
        left = f"left:    {' and '.join(missing)}, which {conversion.source.title} does not have."
        say(f"{left} {_without(missing, conversion.document)}", stderr=stderr)


def _without(missing: Sequence[str], document: Mapping[str, Any]) -> str:
    """What `terrazzo train` does without sections. It has no model of its own for units of another."""
    texts = "the texts of Python's standard library"
    units = document.get("plan", {}).get("units")
    if "model" not in missing or not units:
        own = {"model": "a small decoder", "data": texts}
        return f"Without them `terrazzo train` takes {' and '.join(own[name] for name in missing)}."
    named = listed([units] if isinstance(units, str) else units)
    needed = f"plan.units names modules of the model to give, {named}: model.kind huggingface, model.path its folder."
    return f"{needed} Without data `terrazzo train` takes {texts}." if "data" in missing else needed


def _counts(verdicts: Sequence[KeyVerdict]) -> str:
    kinds = [verdict.kind for verdict in verdicts]
    tuning = sum(verdict.tuning for verdict in verdicts)
    some = f"{tuning} of them " if tuning < kinds.count("defaulted") else ""
    words = {"defaulted": f" ({some}left out: they only tune, log or evaluate)" if tuning else ""}
    return ", ".join(f"{kinds.count(kind)} {kind}{words.get(kind, '')}" for kind in KINDS if kind in kinds) or "no keys"


def _precision_text(conversion: Conversion, context: ReadingContext) -> str:
    rows = [["dtypes", *COLUMNS]]
    for label, description in (("before", conversion.before), ("after", conversion.after)):
        rows.append([label, *precisions(description).cells()])
    lines = [columns_text(rows)]
    memory = _memory_rows(conversion, context)
    if memory:
        unit = "GiB" if context.parameters else "bytes per parameter"
        lines.append(f"model states at rest, {unit} per rank, and how much of it is for dtypes wider than compute:")
        lines.append(columns_text(memory))
    return "\n".join(lines)


def _memory_rows(conversion: Conversion, context: ReadingContext) -> list[list[str]]:
    rows = [["ranks", "before", "of it wider", "after", "of it wider"]]
    pairs = zip(costs(conversion.before), costs(conversion.after, _ranks(conversion)), strict=True)
    for before, after in pairs:
        cells = [*_memory_cells(before, context), *_memory_cells(after, context)]
        if any(cell != "-" for cell in cells):
            rows.append([str(before.ranks), *cells])
    return rows if len(rows) > 1 else []


def _ranks(conversion: Conversion) -> tuple[int, ...]:
    return tuple(cost.ranks for cost in costs(conversion.before))


def _memory_cells(cost: Cost, context: ReadingContext) -> list[str]:
    scale = context.parameters / GIB if context.parameters else 1.0
    values = (cost.bytes_per_parameter, cost.upcast)
    return ["-" if value is None else f"{value * scale:.4g}" for value in values]


def _as_json(file: str, conversion: Conversion, context: ReadingContext, written: Path | None) -> dict[str, Any]:
    """The whole report as plain values."""
    sides = {"before": conversion.before, "after": conversion.after}
    ranks = _ranks(conversion)
    return {
        "file": file,
        "from": conversion.source.name,
        "to": conversion.target.name,
        "verdicts": conversion.verdicts,
        "counts": {kind: sum(verdict.kind == kind for verdict in conversion.verdicts) for kind in KINDS},
        "unsaid": conversion.unsaid,
        "added": conversion.added,
        "faults": conversion.faults,
        "findings": conversion.findings,
        "precision": {side: precisions(description) for side, description in sides.items()},
        "memory": {side: costs(description, ranks) for side, description in sides.items()},
        "parameters": context.parameters,
        "document": conversion.document,
        "written": str(written) if written else None,
    }
