"""`terrazzo config check`: finds what is wrong with a configuration of any dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from terrazzo.cli.config.context import reading_context
from terrazzo.cli.config.options import ContextOptions
from terrazzo.cli.config.text import say_findings, say_report
from terrazzo.cli.shared.terminal import say
from terrazzo.config import config_from_dict
from terrazzo.dialects.core.dialect import Finding
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.understand import Understood, understand
from terrazzo.errors import BadInput
from terrazzo.messages import counted

__all__ = ["check_config"]


def check_config(
    file: Path, dialect: str | None, options: ContextOptions, as_json: bool, overrides: Sequence[str] = ()
) -> int:
    """Print what is wrong with a configuration, with settings of `terrazzo train` replaced; returns the exit code."""
    understood = understand(file, dialect, reading_context(options), overrides)
    findings = check(understood)
    findings = [*_told_by_training(understood, findings), *findings]
    findings.sort(key=lambda finding: finding.level != "error")
    if as_json:
        say_report({"file": str(file), "dialect": understood.dialect.name, "findings": findings})
    else:
        _say_all(str(file), understood.dialect.title, findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _told_by_training(understood: Understood, found: Sequence[Finding]) -> Iterator[Finding]:
    """What `terrazzo train` refuses of its configuration alone, but for sections of which an error is found; settings
    without effect, and a batch that it fills up.
    """
    try:
        config = config_from_dict(understood.loaded.document) if understood.dialect.name == "terrazzo" else None
    except BadInput:
        config = None  # the findings have it
    if config is None:
        return
    from terrazzo.train.preflight.idle_keys import idle_keys  # which loads the trainer
    from terrazzo.train.preflight.refusals import refusals
    from terrazzo.train.settings.plan import filling_note

    said = {finding.key.partition(".")[0] for finding in found if finding.level == "error"}
    world = understood.description.value("mesh.world")
    refused = list(refusals(config, world))
    for key, refusal in refused:
        if key.partition(".")[0] not in said:
            yield Finding.error(key, f"`terrazzo train`: {str(refusal).rstrip('.')}")
    if refused or said:
        return
    for idle in idle_keys(config, world):
        yield Finding.warning(", ".join(idle.keys), idle.consequence)
    if world is not None and (note := filling_note(config.batch, world, config.plan.mesh)):
        yield Finding.warning("batch.global_batch", note.removeprefix("batch: "))


def _say_all(file: str, title: str, findings: Sequence[Finding]) -> None:
    """One line per finding, and a count."""
    say(f"{file}: {title}", "bold")
    say_findings(findings)
    counts = [sum(finding.level == level for finding in findings) for level in ("error", "warning")]
    say(f"{counted(counts[0], 'error')}, {counted(counts[1], 'warning')}")
