"""Reviews a run from what is in its folder, while it is running or after it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.config import load_config, setting_texts
from terrazzo.errors import BadInput
from terrazzo.files import replace_file
from terrazzo.planner import estimate
from terrazzo.telemetry import (
    VERDICT,
    Table,
    Verdict,
    advice_for,
    flights_of,
    page_of,
    run_lines,
    steps_of,
    table_of_units,
    tables_of,
    verdict_of,
)
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.report.rank_count import RankCount, sizing_of
from terrazzo.train.report.summary import summary_lines
from terrazzo.train.settings.plan import empty_rows

__all__ = ["RunReview", "differing_settings"]

Lines = Sequence[Mapping[str, Any]]


class RunReview:
    """What a run's folder says about it. The folder is read once.

    Args:
        run: folder of the run, or its `metrics.jsonl`.
        lines: of its `metrics.jsonl`, if they have been read already.

    Raises:
        BadInput: there is no run.
    """

    def __init__(self, run: Path, lines: Lines | None = None) -> None:
        self._folder = RunFolder.of(run)
        self.run = self._folder.path
        self.lines: Lines = run_lines(self.run) if lines is None else lines
        self.records = steps_of(self.lines)

    @property
    def ranks(self) -> int:
        """The number of ranks in the newest record."""
        skew = self.records[-1].get("skew", {}) if self.records else {}
        return max([1, *(len(values) for values in skew.values())])

    def verdict(self) -> Verdict | None:
        """What bounds the step of the run; None if it has no step record yet.

        An edit is named only if the configuration stays valid with it, and the planner says that it fits and refuses
        nothing.
        """
        settings = self._folder.settings()
        if settings is None:
            return _of_script(verdict_of(self.records), self._folder.read(self._folder.script))
        return verdict_of(self.records, settings, self._admits)

    def _admits(self, edit: str) -> bool:
        try:
            config = load_config(self._folder.config, [edit])
            if empty_rows(config.batch, self.ranks, config.plan.mesh):
                return False
            estimated = estimate(setup_of(config, self.ranks))
        except Exception:  # anything: an edit that cannot be judged is not named
            return False
        return estimated.memory.fits is not False and all(one.severity != "refuse" for one in estimated.findings)

    def sizing(self) -> RankCount | None:
        """What half and twice as many ranks would do, by the planner and the run's pace; None for a run without a
        configuration, and before the first log step.
        """
        config = self._folder.config
        return sizing_of(config, self.lines, self.ranks) if config.is_file() else None

    def tables(self) -> list[Table]:
        """Tables of where the time of a step goes, and what was exchanged; one of them by unit, if the first rank has
        recorded units.
        """
        return [*tables_of(self.records), *self._units()]

    def _units(self) -> list[Table]:
        try:
            flights = flights_of(self.run)
        except BadInput:
            return []
        table = table_of_units(flights[0])
        return [table] if table is not None else []

    def write_page(self, against: Path | None = None) -> Path:
        """Write `report.html` from the run's records; returns its path.

        Args:
            against: folder of another run, whose loss is drawn too, and whose settings are compared.

        Raises:
            BadInput: the other run does not exist, or the page cannot be written.
        """
        verdict, sizing, tables = self.verdict(), self.sizing(), self._units()
        other = None if against is None else RunReview(against)
        details = {VERDICT: str(verdict)} if verdict is not None else {}
        if sizing is not None:
            details["How many ranks"] = sizing.sentence
            tables += [sizing.table] if sizing.table is not None else []
        details |= {} if other is None else self._compared(other)
        if summary := next((line for line in reversed(self.lines) if line["kind"] == "summary"), None):
            details["Promised and measured"] = _summary(summary)
        for heading, file in (("Plan", self._folder.plan), ("Configuration", self._folder.config)):
            if (text := _text(file)) is not None:
                details[heading] = text
        path = self._folder.page
        page = page_of(self.run.absolute().name, self.lines, details, () if other is None else other.lines, tables)
        try:
            replace_file(path, page, sync=False)
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"'{path}' cannot be written ({why}): free it, or copy the run.") from error
        return path

    def _compared(self, other: RunReview) -> dict[str, str]:
        """The other run's verdict, and the settings that differ."""
        settings, verdict = [review._folder.settings() for review in (self, other)], other.verdict()
        texts = {f"{VERDICT} of {other.run}": str(verdict)} if verdict is not None else {}
        if None not in settings:
            one, theirs = (each or {} for each in settings)
            lines = [f"{key}: {here} | {there}" for key, here, there in differing_settings(one, theirs)]
            texts[f"Settings here, and of {other.run}"] = "\n".join(lines) or "the same"
        return texts


def differing_settings(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str | None, str | None]]:
    """The settings that differ between two configurations: the key, and the text of each value."""
    here, there = setting_texts(one), setting_texts(other)
    keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    return [(key, here.get(key), there.get(key)) for key in keys]


def _summary(summary: Mapping[str, Any]) -> str:
    try:
        return "\n".join(summary_lines(summary))
    except KeyError as missing:
        return f"This run was written by another version of Terrazzo, whose summary has no {missing}."


def _of_script(verdict: Verdict | None, facts: Mapping[str, Any] | None) -> Verdict | None:
    """The verdict with advice in terms of the script, if `terrazzo profile` has measured one."""
    if verdict is None or facts is None:
        return verdict
    return replace(verdict, edit=advice_for(verdict.bound, facts))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
