"""`terrazzo config check`: finds what is wrong with a configuration of any dialect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terrazzo.cli.config.context import reading_context
from terrazzo.cli.config.options import ContextOptions
from terrazzo.cli.config.text import STYLES, say_report
from terrazzo.cli.shared.terminal import say
from terrazzo.dialects.core.dialect import Finding
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.understand import understand
from terrazzo.errors import counted

__all__ = ["check_config"]


def check_config(file: Path, dialect: str | None, options: ContextOptions, as_json: bool) -> int:
    """Print what is wrong with a configuration; returns the exit code."""
    understood = understand(file, dialect, reading_context(options))
    findings = check(understood)
    if as_json:
        say_report({"file": str(file), "dialect": understood.dialect.name, "findings": findings})
    else:
        _say_findings(str(file), understood.dialect.title, findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _say_findings(file: str, title: str, findings: Sequence[Finding]) -> None:
    """One line per finding, and a count."""
    say(f"{file}: {title}", "bold")
    for finding in findings:
        say(f"{finding.level}: {finding.key + ': ' if finding.key else ''}{finding.text}", STYLES[finding.level])
    counts = [sum(finding.level == level for finding in findings) for level in ("error", "warning")]
    say(f"{counted(counts[0], 'error')}, {counted(counts[1], 'warning')}")
