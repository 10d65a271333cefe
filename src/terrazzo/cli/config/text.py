"""Printing that the verbs of `terrazzo config` share: reports as JSON, keys with their verdicts, cells of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.cli.shared import terminal
from terrazzo.cli.shared.terminal import say, say_json
from terrazzo.dialects.core.dialect import Finding
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.wording import as_text
from terrazzo.dialects.verbs.emit import plain
from terrazzo.messages import printable

__all__ = ["cell_text", "columns_text", "say_findings", "say_report", "say_verdicts"]

_STYLES = {"refused": "red", "lossy": "yellow", "error": "red", "warning": "yellow", "defaulted": "cyan"}


def say_report(value: Any) -> None:
    """Print a report as JSON."""
    say_json(plain(value))


def say_findings(findings: Sequence[Finding], *, stderr: bool = False) -> None:
    """Print a line for each finding."""
    for finding in findings:
        where = f"{finding.key}: " if finding.key else ""
        say(f"{finding.level}: {where}{finding.text}", _STYLES[finding.level], stderr=stderr)


def say_verdicts(verdicts: Sequence[KeyVerdict], *, stderr: bool = False) -> None:
    """Print a line for each key, and below it why, if there is more to say."""
    rows = [[verdict.kind, f"{verdict.key} = {cell_text(verdict.value)}", _becomes(verdict)] for verdict in verdicts]
    if not rows:
        return
    following = [*(verdict.why for verdict in verdicts[1:]), ""]
    for verdict, line, ahead in zip(verdicts, columns_text(rows).splitlines(), following, strict=True):
        style = _STYLES.get(verdict.kind, "")
        say(line, style, stderr=stderr)
        if verdict.why and not verdict.tuning and verdict.why != ahead:  # of several with one reason, once below them
            say(f"{' ' * 11}{verdict.why}", style, stderr=stderr)


def _becomes(verdict: KeyVerdict) -> str:
    if verdict.tuning:
        return f"left out, changes no result{f' ({verdict.why})' if verdict.why else ''}"
    return verdict.target


def columns_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned lines."""
    return terminal.columns(rows, cell=lambda text: printable(text).replace("\n", " "))


def cell_text(value: Any) -> str:
    """A value as a cell of a table."""
    return as_text(plain(value))
