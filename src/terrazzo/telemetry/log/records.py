"""The lines of a run's `metrics.jsonl`, read back for verdicts, reports and `terrazzo watch`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from terrazzo.errors import BadInput
from terrazzo.messages import counted
from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.telemetry.log.step_record import RECORD_VERSION, StepRecord

__all__ = [
    "STARTS",
    "GrowingLines",
    "all_steps_of",
    "lines_of",
    "mean_of",
    "mean_over_steps",
    "of_newest_start",
    "of_these_ranks",
    "restart_text",
    "run_lines",
    "steps_of",
    "validation_text",
]


def run_lines(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's `metrics.jsonl`.

    Args:
        run: the run's folder, or the file itself.

    Raises:
        BadInput: there is no such file, or it is empty.
    """
    path = RunFolder.of(run).metrics
    try:
        lines, strange = _parsed(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"'{path}' cannot be read ({error.strerror or error}): give the folder of a run, which `log.folder` names"
            " and where its metrics.jsonl is."
        ) from error
    left_out = f"{counted(strange, 'line')} of '{path}', which another version of Terrazzo has written"
    if not lines and strange:
        raise BadInput(f"This version cannot read {left_out}: use that one.")
    if not lines:
        raise BadInput(f"'{path}' has no line of a run yet: wait for its first log step, or lower log.every.")
    if strange:
        say_on_stderr(f"Left out: {left_out}, and this one cannot read.")
    return lines


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The file's lines, without incomplete ones, which a run leaves that is killed or writing, and without others that
    no run of this version writes.
    """
    return _parsed(path.read_bytes())[0]


def _parsed(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines that can be read, and how many objects there are beside these."""
    lines, strange = [], 0
    for line in content.splitlines():
        try:
            values = json.loads(line, parse_constant=_refuse)
        except ValueError:
            continue
        if isinstance(values, dict) and _is_whole(values):
            lines.append(values)
        else:
            strange += 1
    return lines, strange


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _is_whole(values: Mapping[str, Any]) -> bool:
    """Whether a line has what all lines have, and what readers count on in one of its kind."""
    if not isinstance(values.get("kind"), str) or type(values.get("step")) is not int:
        return False
    numbers, others = _READ_OF_KIND.get(values["kind"], ((), ()))
    if not all(type(values.get(name, 0)) in (int, float) for name in numbers):
        return False
    return all(name in values for name in others) and values.get("v", RECORD_VERSION) == RECORD_VERSION


_READ_OF_KIND: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (("loss",), ()),
    "step": (("steps", "step_s"), ()),
    "validation": (("loss", "accuracy", "bits_per_byte"), ()),
    "sample": ((), ("text",)),
    "restart": (("number", "most", "ranks"), ("number", "most", "ranks", "why")),
}
"""By kind: what is a number where it is there, and what has to be there."""


class GrowingLines:
    """The lines of a file that another process writes, each of which is read and parsed once.

    Args:
        path: of the file. If it is replaced by another one, or cut short, it is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._end = path, 0, 0
        self._lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All lines so far that are whole; raises `OSError` if there is no such file."""
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._end:
                self._inode, self._end, self._lines = status.st_ino, 0, []
            file.seek(self._end)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        if whole:
            self._lines = [*self._lines, *_parsed(whole)[0]]
        return self._lines


def steps_of(lines: Sequence[Mapping[str, Any]]) -> list[StepRecord]:
    """The step records since the ranks were last started, in order; earlier starts may have had other settings.

    The first one is left out if there are others: it includes what is done only once.
    """
    records = cast(list[StepRecord], of_newest_start(_with_steps(lines), "step"))
    return records[1:] or records


def all_steps_of(lines: Sequence[Mapping[str, Any]]) -> list[StepRecord]:
    """The step records of all starts, in order, without the first of the file if there are others."""
    records = cast(list[StepRecord], [dict(line) for line in _with_steps(lines) if line["kind"] == "step"])
    return records[1:] or records


def of_newest_start(lines: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of `kind` since the ranks were last started; if there are none, those of the start before."""
    newest: list[dict[str, Any]] = []
    anew = False
    for line in lines:
        if line["kind"] in STARTS:
            anew = True
        elif line["kind"] == kind:
            newest, anew = [] if anew else newest, False
            newest.append(dict(line))
    return newest


STARTS = ("begin", "restart")
"""Kinds of lines that mark a start which continues a run."""


def _with_steps(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines without step records that cover no steps."""
    return [line for line in lines if line["kind"] != "step" or (line.get("steps") and line.get("step_s"))]


def of_these_ranks(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The newest of these step records: those since the number of ranks last changed."""
    ranks = [max(map(len, record.get("skew", {}).values()), default=0) for record in records]
    others = [place for place, number in enumerate(ranks) if number != ranks[-1]]
    return records[others[-1] + 1 :] if others else records


def restart_text(line: Mapping[str, Any]) -> str:
    """A line of kind `restart` as a sentence."""
    return f"restart {line['number']} of {line['most']}, on {counted(line['ranks'], 'rank')}, after: {line['why']}"


def validation_text(line: Mapping[str, Any]) -> str:
    """What a line of kind `validation` says beside its loss, in words."""
    if "accuracy" in line:
        return f"held out, {line['accuracy']:.1%} of pairs in order"
    return f"held out, {line['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in line else "held out"


def mean_of(records: Sequence[StepRecord], *names: str) -> float:
    """The mean over steps of the number under these nested names, which is 0 in records that do not have it."""
    values: list[Any] = list(records)
    for name in names:
        values = [value.get(name, 0.0) if isinstance(value, Mapping) else 0.0 for value in values]
    return mean_over_steps(records, values)


def mean_over_steps(records: Sequence[StepRecord], values: Sequence[float]) -> float:
    """The mean of a value of each record, each counted as many times as its record has steps; 0 without steps."""
    steps = sum(record["steps"] for record in records)
    total = sum(value * record["steps"] for record, value in zip(records, values, strict=True))
    return total / steps if steps else 0.0
