"""Where the time and the memory of a run go: what is measured of its steps, where that is written, and who reads it.

Each folder imports from those before it in this list, and `attachment`, for a training loop of one's own, from all:

    log         what a run writes into its folder, and how it is read back
    steps       what is measured of a step
    flight      the flight recorder: what each rank has exchanged, exchange by exchange
    display     a run's records as a verdict, tables, a screen of text and a page
    watchdog    ranks that stand still
    profiling   a script of somebody else's, measured while it runs
    attachment  `attach`: all of this for a training loop of one's own

How a measurement goes, from the step to the file and back:

1. In a step the engine counts: seconds of each phase, and of each exchange how long the host waited (`engine.tally`).
2. Behind the step `steps.step_recorder.StepRecorder.step_done` takes the counts. The training loop calls it, of one's
   own loop the optimizer's hook that `attach` has set.
3. At a log step `StepRecorder.record()` makes one dict of all steps since the last: the record of a step, whose fields
   `docs/concepts/step-record.md` has. `terrazzo train` adds what each rank has measured, as its `skew`; ranks of a loop
   of one's own exchange nothing for it.
4. On rank 0 `log.sinks.JsonLines.log("step", number, record)` writes it as a line of `metrics.jsonl`, in the folder
   whose files `log.run_folder.RunFolder` names; `TensorBoard` does the same for event files.
5. Whoever looks reads the lines by `log.records`, and makes of them `display.verdict`, `display.tables`,
   `display.screen` (`terrazzo watch`) or `display.page` (report.html).

A run of `terrazzo train` also writes lines of kind `train`, a row of its step table each: the newest loss, and rates
over the steps since the row before. The loop measures into `train.report.log_window.LogWindow`, whose `row` makes a
`steps.metrics.StepMetrics` of it; some of its numbers are columns of `display.step_table`.

To measure one thing more:

- Where the time or the traffic of a step goes, of a loop of one's own too: a number of kind `step`. Count it in
  `StepRecorder` (2), put it into the dict (3); sinks take any number by its name. To have `terrazzo train` compare it
  between ranks, add it to `StepRecorder.numbers` and `skew`.
- How training itself goes, which needs the session, and which one number tells for all ranks: a number of kind `train`.
  Two edits: a field of `StepMetrics`, None by default, and its value in `LogWindow.row`. Files have it then; a
  `_Column` of `display.step_table` puts it on screen.

Beside that each rank writes single exchanges, as they happen, into a ring in memory: `flight.recorder.RingRecorder`.
`terrazzo trace` draws it, and the watchdog reads from it what a rank that stands still waits for.

Open to other packages:

    log        the files of a run's folder, and how it has ended
    flight     what each rank has recorded
    profiling  a script of somebody else's
    watchdog   whether ranks stand still, for whoever has started them
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.telemetry.attachment import Telemetry, attach
    from terrazzo.telemetry.display.console import RunConsole
    from terrazzo.telemetry.display.page import VERDICT, ReportPage, page_of
    from terrazzo.telemetry.display.screen import has_ended, rows_of, screen_of
    from terrazzo.telemetry.display.step_table import StepTable, duration
    from terrazzo.telemetry.display.tables import Table, table_of_units, tables_of
    from terrazzo.telemetry.display.verdict import Verdict, verdict_of
    from terrazzo.telemetry.flight.folder import FlightRecorder, flights_of, save_flight
    from terrazzo.telemetry.flight.trace import trace_of
    from terrazzo.telemetry.log.records import lines_of, of_newest_start, restart_text, run_lines, steps_of
    from terrazzo.telemetry.log.sinks import JsonLines, Sink, TensorBoard
    from terrazzo.telemetry.profiling.advice import advice_for
    from terrazzo.telemetry.steps.memory import PeakMemory, allowed_bytes, available_host_bytes, resident_bytes
    from terrazzo.telemetry.steps.metrics import StepMetrics, Stopwatch
    from terrazzo.telemetry.steps.step_recorder import StepRecorder
    from terrazzo.telemetry.watchdog.live_ranks import LiveRanks
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "VERDICT",
    "FlightRecorder",
    "JsonLines",
    "LiveRanks",
    "PeakMemory",
    "ReportPage",
    "RunConsole",
    "Sink",
    "StepMetrics",
    "StepRecorder",
    "StepTable",
    "Stopwatch",
    "Table",
    "Telemetry",
    "TensorBoard",
    "Verdict",
    "advice_for",
    "allowed_bytes",
    "attach",
    "available_host_bytes",
    "duration",
    "flights_of",
    "has_ended",
    "lines_of",
    "of_newest_start",
    "page_of",
    "resident_bytes",
    "restart_text",
    "rows_of",
    "run_lines",
    "save_flight",
    "screen_of",
    "steps_of",
    "table_of_units",
    "tables_of",
    "trace_of",
    "verdict_of",
]
