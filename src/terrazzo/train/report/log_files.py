"""The files in a run's log folder: `config.json`, `plan.txt`, and the sinks that get a line for each event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrazzo.config import without_passwords
from terrazzo.engine import engine_of
from terrazzo.files import replace_file
from terrazzo.telemetry import JsonLines, ReportPage, Sink, TensorBoard, lines_of
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.telemetry.log.sinks import saying_unwritable
from terrazzo.train.model.objectives import Validation
from terrazzo.train.report.summary import summary_lines
from terrazzo.train.session.session import Session

__all__ = ["LogFiles"]


class LogFiles:
    """The log's files, on rank 0. Other ranks have none. A run that has no steps left writes none, and changes nothing.

    Args:
        title: of report.html.
    """

    def __init__(self, session: Session, title: str) -> None:
        self._session, self._title = session, title
        self._sinks: list[Sink] = []
        self._metrics: JsonLines | None = None
        self._page: ReportPage | None = None
        if session.ranks.is_first and session.step < session.config.train.steps:
            self._open()

    def _open(self) -> None:
        session, engine = self._session, engine_of(self._session.model)
        log, folder = session.config.log, RunFolder(session.config.log.folder)
        config = without_passwords(session.config.model_dump(mode="json"))
        text = json.dumps(config, indent=2, ensure_ascii=False)
        _write(folder.config, text)
        bill = engine.promise.memory(session.micro_batches)
        plan = without_passwords(f"{engine.describe()}\n\nmemory of each rank:\n{bill.table()}")
        _write(folder.plan, plan)
        self._metrics = JsonLines(folder.metrics, session.step)
        details = {"Plan": plan, "Configuration": text}
        self._page = ReportPage(folder.page, self._metrics.path, self._title, details, summary_lines)
        self._sinks += [self._metrics, self._page]
        if log.tensorboard:
            with saying_unwritable(folder.tensorboard):
                self._sinks.append(TensorBoard(folder.tensorboard, session.step))

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def log(self, kind: str, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write a line of `kind`; `step`: default is the one that has just ended."""
        for sink in self._sinks:
            sink.log(kind, self._session.step if step is None else step, values)

    def first_validation(self) -> tuple[int, Validation] | None:
        """The step and values of the first validation on the present validation data, if the log has it."""
        if self._metrics is None or not self._session.origin.same_evaluation:
            return None
        lines = lines_of(self._metrics.path)
        anew = max((index for index, line in enumerate(lines) if not line.get("same_evaluation", True)), default=0)
        line = next((line for line in lines[anew:] if line["kind"] == "validation"), None)
        return None if line is None else (line["step"], Validation.from_dict(line))

    @property
    def written_page(self) -> Path | None:
        """The report, once the files are closed; None where it could not be written, which was said."""
        return None if self._page is None or self._page.failed else self._page.path

    def lost(self) -> str | None:
        """A description of the log folder, if its files are no longer where they were opened; else None."""
        if self._metrics is None or self._metrics.in_place():
            return None
        return f"the log folder '{self._session.config.log.folder}' (log.folder), or metrics.jsonl in it,"

    def back(self) -> None:
        """Drop the lines of steps after the session's: it has gone back, and does them again."""
        if self._sinks:
            self.close()
            self._sinks = []
            self._open()

    def close(self) -> None:
        """Close all files."""
        for sink in self._sinks:
            sink.close()


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, for those who watch the run; where that fails, the run goes on."""
    with saying_unwritable(path):
        replace_file(path, text + "\n", sync=False)
