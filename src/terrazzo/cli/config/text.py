"""What `terrazzo config` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrazzo.cli.shared import terminal
from terrazzo.cli.shared.terminal import say, say_json
from terrazzo.dialects.core.description import shown
from terrazzo.dialects.core.dialect import Finding, ReadingContext
from terrazzo.dialects.core.key_verdict import KINDS, LOST, KeyVerdict
from terrazzo.dialects.verbs.convert import Conversion
from terrazzo.dialects.verbs.diff import SettingDifference
from terrazzo.dialects.verbs.emit import plain
from terrazzo.dialects.verbs.explain import Option, Page, origin_words
from terrazzo.dialects.verbs.precision_table import COLUMNS, Cost, costs, precisions
from terrazzo.errors import printable
from terrazzo.files import GIB

__all__ = ["as_json", "say_conversion", "say_differences", "say_findings", "say_page", "say_report"]

STYLES = {"refused": "red", "lossy": "yellow", "error": "red", "warning": "yellow", "defaulted": "cyan"}


def say_report(value: Any) -> None:
    """Print a report as JSON."""
    say_json(plain(value))


# -- explain -------------------------------------------------------------------------------------------------------


def say_page(file: str, page: Page, *, everything: bool) -> None:
    """The plan in words, then what the file sets, and with `everything` also what it does not."""
    say(f"{file}: {page.title}", "bold")
    say("\n".join(page.plan))
    said = [option for option in page.options if option.key]
    default = [option for option in page.options if not option.key]
    if said:
        say("\n" + _columns([["option", "value", "set by", "meaning"], *map(_option_row, said)]))
    if everything:
        if default:
            say(f"\nby default:\n{_columns([[row[0], row[1], row[3]] for row in map(_option_row, default)])}")
        if page.left:
            say(f"\nleft to code: {', '.join(page.left)}")
    else:
        say(f"\n{len(default)} more by default, {len(page.left)} left to code: --all lists them")
    if page.own:
        rows = [[LOST[extra.loss], extra.key, _cell(extra.value), extra.why] for extra in page.own]
        say(f"\nonly {page.title} has these; in another dialect they are:\n" + _columns(rows))
    if page.unsettled:
        say("\nkeys that are not taken as they stand:")
        _say_verdicts(page.unsettled, stderr=False)


def _option_row(option: Option) -> list[str]:
    open_ended = option.value is None and option.origin == "auto"
    return [option.path, "open" if open_ended else _cell(option.value), origin_words(option), option.meaning]


# -- check ---------------------------------------------------------------------------------------------------------


def say_findings(file: str, title: str, findings: Sequence[Finding]) -> None:
    """One line per finding, and a count."""
    say(f"{file}: {title}", "bold")
    for finding in findings:
        say(f"{finding.level}: {finding.key + ': ' if finding.key else ''}{finding.text}", STYLES[finding.level])
    counts = [sum(finding.level == level for finding in findings) for level in ("error", "warning")]
    say(f"{_count(counts[0], 'error')}, {_count(counts[1], 'warning')}")


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


# -- convert -------------------------------------------------------------------------------------------------------


def say_conversion(file: str, conversion: Conversion, context: ReadingContext, *, stderr: bool) -> None:
    """Every key's verdict, the precision table before and after, and what its dtypes cost."""
    source, target = conversion.source.title, conversion.target.title
    say(f"{file}: {source} -> {target}", "bold", stderr=stderr)
    _say_verdicts(conversion.verdicts, stderr=stderr)
    say(_counts(conversion.verdicts), stderr=stderr)
    if conversion.unsaid:
        say(f"\nnot set in the file: what {source} does by default, and {target} cannot say:", stderr=stderr)
        _say_verdicts(conversion.unsaid, stderr=stderr)
    if conversion.added:
        say(f"\nby {target}'s defaults, where {source} leaves it to code or was refused:", stderr=stderr)
        say(_columns([[each.key, _cell(each.value)] for each in conversion.added]), stderr=stderr)
    say("\n" + _precision_text(conversion, context), stderr=stderr)
    if conversion.refused:
        say(f"\n{_count(len(conversion.refused), 'key')} refused: see above what to do instead.", "red", stderr=stderr)


def _say_verdicts(verdicts: Sequence[KeyVerdict], *, stderr: bool) -> None:
    rows = [[verdict.kind, f"{verdict.key} = {_cell(verdict.value)}", _becomes(verdict)] for verdict in verdicts]
    if not rows:
        return
    for verdict, line in zip(verdicts, _columns(rows).splitlines(), strict=True):
        style = STYLES.get(verdict.kind, "")
        say(line, style, stderr=stderr)
        if verdict.why and not verdict.tuning:
            say(f"{' ' * 11}{verdict.why}", style, stderr=stderr)


def _becomes(verdict: KeyVerdict) -> str:
    if verdict.tuning:
        return f"left out, changes no result{f' ({verdict.why})' if verdict.why else ''}"
    return verdict.target


def _counts(verdicts: Sequence[KeyVerdict]) -> str:
    kinds = [verdict.kind for verdict in verdicts]
    tuning = sum(verdict.tuning for verdict in verdicts)
    some = f"{tuning} of them " if tuning < kinds.count("defaulted") else ""
    words = {"defaulted": f" ({some}left out: they only tune or log)" if tuning else ""}
    return ", ".join(f"{kinds.count(kind)} {kind}{words.get(kind, '')}" for kind in KINDS if kind in kinds) or "no keys"


def _precision_text(conversion: Conversion, context: ReadingContext) -> str:
    rows = [["dtypes", *COLUMNS]]
    for label, description in (("before", conversion.before), ("after", conversion.after)):
        rows.append([label, *precisions(description).cells()])
    lines = [_columns(rows)]
    memory = _memory_rows(conversion, context)
    if memory:
        unit = "GiB" if context.parameters else "bytes per parameter"
        lines.append(f"model states at rest, {unit} per rank, and how much of it is for dtypes wider than compute:")
        lines.append(_columns(memory))
    return "\n".join(lines)


def _memory_rows(conversion: Conversion, context: ReadingContext) -> list[list[str]]:
    rows = [["ranks", "before", "upcast", "after", "upcast"]]
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


def as_json(file: str, conversion: Conversion, context: ReadingContext, written: Path | None) -> dict[str, Any]:
    """The whole report."""
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
        "precision": {side: precisions(description) for side, description in sides.items()},
        "memory": {side: costs(description, ranks) for side, description in sides.items()},
        "parameters": context.parameters,
        "document": conversion.document,
        "written": str(written) if written else None,
    }


# -- diff ----------------------------------------------------------------------------------------------------------


def say_differences(a: tuple[str, str], b: tuple[str, str], found: Sequence[SettingDifference]) -> None:
    """A line per difference."""
    say(f"A  {a[0]}: {a[1]}\nB  {b[0]}: {b[1]}")
    if not found:
        say("They mean the same.")
        return
    rows = [["option", "A", "B", "meaning"]]
    for each in found:
        sides = [_cell(side.value) if side.is_set else "left to code" for side in (each.a, each.b)]
        rows.append([each.path, *sides, each.meaning])
    say("\n" + _columns(rows))
    say(_count(len(found), "difference"))


# -- cells ---------------------------------------------------------------------------------------------------------


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned lines."""
    return terminal.columns(rows, cell=lambda text: printable(text).replace("\n", " "))


def _cell(value: Any) -> str:
    return shown(plain(value))
