"""A look at a run by what is in its folder, while it goes on or when it has ended: its verdict, and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.config import flatten, load_config
from terrazzo.errors import BadInput
from terrazzo.planner import estimate
from terrazzo.telemetry import (
    FACTS,
    VERDICT,
    Table,
    Verdict,
    advice_for,
    flights_of,
    page_of,
    run_lines,
    steps_of,
    table_of_units,
    verdict_of,
)
from terrazzo.train.plan import empty_rows
from terrazzo.train.promise.as_setup import setup_of
from terrazzo.train.promise.summary import summary_lines
from terrazzo.train.sizing import Sizing, sizing_of

__all__ = ["page_on", "sizing_on", "units_on", "verdict_on"]

Lines = Sequence[Mapping[str, Any]]


def verdict_on(run: Path) -> Verdict | None:
    """What bounds the step of the run in this folder; None where it has no record of a step yet.

    An edit is named only if its configuration is valid, and by the planner's formulas fits and has nothing against it.

    Raises:
        BadInput: no run is there.
    """
    return _verdict(run, run_lines(run))


def page_on(run: Path, against: Path | None = None) -> Path:
    """Write `report.html` of a run anew from its records, or for the first time while it goes on; its path.

    Args:
        run: folder of the run.
        against: that of another run, whose loss is drawn too, and whose settings are compared.

    Raises:
        BadInput: no run is there, or the page cannot be written.
    """
    lines = run_lines(run)
    verdict = _verdict(run, lines)
    details = {VERDICT: str(verdict)} if verdict is not None else {}
    tables = units_on(run)
    if (sizing := _sizing(run, lines)) is not None:
        details["How many ranks"] = sizing.sentence
        tables += [sizing.table] if sizing.table is not None else []
    others: Lines = ()
    if against is not None:
        others = run_lines(against)
        details |= _compared(run, against, _verdict(against, others))
    if summary := next((line for line in reversed(lines) if line["kind"] == "summary"), None):
        details["Promised and measured"] = _summary(summary)
    for heading, name in (("Plan", "plan.txt"), ("Configuration", "config.json")):
        if (text := _text(run / name)) is not None:
            details[heading] = text
    path = (run if run.is_dir() else run.parent) / "report.html"
    try:
        path.write_text(page_of(run.name, lines, details, others, tables), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"'{path}' cannot be written ({error.strerror or error}): free it, or copy the run.") from error
    return path


def sizing_on(run: Path) -> Sizing | None:
    """What half and twice as many ranks would do, by the planner and this run's pace; None for a loop of one's own."""
    return _sizing(run, run_lines(run))


def _sizing(run: Path, lines: Lines) -> Sizing | None:
    path = run / "config.json"
    return sizing_of(path, lines, _ranks(steps_of(lines))) if path.is_file() else None


def _ranks(records: Lines) -> int:
    return max([1, *(len(values) for values in (records[-1].get("skew", {}) if records else {}).values())])


def units_on(run: Path) -> list[Table]:
    """Seconds of a step by unit on the first rank that has recorded any; of a script that has no units nothing."""
    try:
        flights = flights_of(run)
    except BadInput:
        return []
    found = table_of_units(flights[0])
    return [found] if found is not None else []


def _summary(summary: Mapping[str, Any]) -> str:
    try:
        return "\n".join(summary_lines(summary))
    except KeyError as missing:
        return f"This run was written by another version of Terrazzo, whose summary has no {missing}."


def _verdict(run: Path, lines: Lines) -> Verdict | None:
    records, path = steps_of(lines), run / "config.json"
    text = _text(path)
    if text is None:
        return _of_script(verdict_of(records), _text(run / FACTS))
    ranks = _ranks(records)

    def admits(edit: str) -> bool:
        try:
            config = load_config(path, [edit])
            if empty_rows(config.batch, ranks, config.plan.mesh):
                return False
            found = estimate(setup_of(config, ranks))
        except Exception:  # anything: an edit that cannot be judged is not named
            return False
        return found.memory.fits is not False and all(one.severity != "refuse" for one in found.objections)

    return verdict_of(records, json.loads(text), admits)


def _of_script(verdict: Verdict | None, facts: str | None) -> Verdict | None:
    """In words of what a script uses, if `terrazzo profile` has looked at one."""
    if verdict is None or facts is None:
        return verdict
    return replace(verdict, edit=advice_for(verdict.bound, json.loads(facts)))


def _compared(run: Path, against: Path, verdict: Verdict | None) -> dict[str, str]:
    """What the other run says of itself, and settings that differ."""
    texts = [_text(folder / "config.json") for folder in (run, against)]
    found = {f"{VERDICT} of {against}": str(verdict)} if verdict is not None else {}
    if None not in texts:
        one, other = (flatten(json.loads(text or "{}")) for text in texts)
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        said = [f"{key}: {one.get(key)} | {other.get(key)}" for key in keys]
        found[f"Settings here, and of {against}"] = "\n".join(said) or "the same"
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
