"""`terrazzo config diff`: compares what two configurations mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terrazzo.cli.config.context import reading_context
from terrazzo.cli.config.options import ContextOptions
from terrazzo.cli.config.text import cell_text, columns_text, say_report
from terrazzo.cli.shared.terminal import say
from terrazzo.dialects.verbs.diff import SettingDifference, compare
from terrazzo.dialects.verbs.understand import understand
from terrazzo.messages import counted

__all__ = ["diff_configs"]


def diff_configs(
    files: tuple[Path, Path], dialects: tuple[str | None, str | None], options: ContextOptions, as_json: bool
) -> int:
    """Compare what two configurations mean and print it; returns the exit code."""
    context = reading_context(options)
    one, other = (understand(file, name, context) for file, name in zip(files, dialects, strict=True))
    differences = compare(one.description, other.description)
    if as_json:
        sides = zip("ab", files, (one, other), strict=True)
        heads = {side: {"file": str(file), "dialect": each.dialect.name} for side, file, each in sides}
        say_report({**heads, "equal": not differences, "differences": differences})
    else:
        _say_differences((str(files[0]), one.dialect.title), (str(files[1]), other.dialect.title), differences)
    return 1 if differences else 0


def _say_differences(a: tuple[str, str], b: tuple[str, str], differences: Sequence[SettingDifference]) -> None:
    """Print a line per difference."""
    say(f"A  {a[0]}: {a[1]}\nB  {b[0]}: {b[1]}")
    if not differences:
        say("They mean the same.")
        return
    rows = [["option", "A", "B", "meaning"]]
    for each in differences:
        sides = [cell_text(side.value) if side.is_set else "left to code" for side in (each.a, each.b)]
        rows.append([each.path, *sides, each.meaning])
    say("\n" + columns_text(rows))
    say(counted(len(differences), "difference"))
