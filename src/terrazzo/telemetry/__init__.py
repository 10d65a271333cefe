"""Where the time and the memory of a run go: what is measured in its steps, where it is written, and who reads it.

Each folder imports only from those above it in this list; `attachment` imports from all:

    log         records: what a run writes into its folder, and how it is read back
    steps       measures: the time and the memory of a step
    flight      records too: what each rank did last, exchange by exchange
    verdict     judges: what bounds a step, and which edit helps
    display     shows: tables, a screen of text, pictures and a page
    watchdog    warns: finds ranks that stand still, says why, and ends them
    profiling   measures a training script that does not use Terrazzo
    attachment  `attach`: all of this for a training loop that is not the trainer's

The way of a measurement, from the step to the file and back:

1. During a step the engine counts the seconds of each phase, and how long the host waited for each exchange
   (`engine.tally`).
2. After the step `steps.step_recorder.StepRecorder.step_done` takes the counts. The trainer calls it; in any other loop
   the optimizer hook does that `attach` sets.
3. At a log step `StepRecorder.record()` makes one `log.step_record.StepRecord` of all steps since the last one, whose
   fields `docs/concepts/step-record.md` describes. `terrazzo train` adds what each rank has measured, as `skew`; in
   other loops ranks exchange nothing for a record, and it has no `skew`.
4. On rank 0 `log.sinks.JsonLines.log("step", number, record)` writes it as a line of `metrics.jsonl`, in the folder
   whose files `log.run_folder.RunFolder` names; `TensorBoard` does the same for event files.
5. `log.records` reads the lines back; `verdict` says of them what bounds the step, and `display` turns them into
   tables, the screen of `terrazzo watch` or report.html.

A run of `terrazzo train` also writes lines of kind `train`, one for each row of its step table: the newest loss, and
rates over the steps since the row before. `train.report.log_window.LogWindow` measures them, and its `row` returns them
as `steps.metrics.StepMetrics`; some of them are columns of `display.step_table`.

To measure something new:

- Time or traffic of a step, in any loop: a number of kind `step`. Count it in `StepRecorder` (2) and put it into the
  dict (3); sinks take any number by its name. For `terrazzo train` to compare it between ranks, add it to
  `StepRecorder.numbers` and `skew`.
- How training goes, as one number for all ranks, known to the trainer's session: a number of kind `train`. It takes a
  field of `StepMetrics`, None by default, and its value in `LogWindow.row`. That puts it into the files; a `_Column` of
  `display.step_table` puts it on screen.

Independently of all this each rank writes every exchange, as it happens, into a ring buffer in shared memory:
`flight.recorder.RingRecorder`. `terrazzo trace` draws it, and the watchdog reads from it what a stuck rank waits for.

Open to other packages:

    log        the files in a run's folder, and how the run ended
    flight     what each rank has recorded
    profiling  for `terrazzo profile`
    watchdog   for the launcher, which looks after the ranks that it starts
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
    from terrazzo.telemetry.flight.folder import FlightRecorder, flights_of, save_flight
    from terrazzo.telemetry.flight.trace import trace_of
    from terrazzo.telemetry.log.records import lines_of, of_newest_start, restart_text, run_lines, steps_of
    from terrazzo.telemetry.log.sinks import JsonLines, Sink, TensorBoard
    from terrazzo.telemetry.profiling.advice import advice_for
    from terrazzo.telemetry.steps.memory import PeakMemory, allowed_bytes, available_host_bytes, resident_bytes
    from terrazzo.telemetry.steps.metrics import StepMetrics, Stopwatch
    from terrazzo.telemetry.steps.step_recorder import StepRecorder
    from terrazzo.telemetry.steps.time_left import TimeLeft
    from terrazzo.telemetry.verdict.verdict import Verdict, verdict_of
    from terrazzo.telemetry.watchdog.live_ranks import LiveRanks
else:
    __getattr__, __dir__ = lazily(__name__)

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
    "TimeLeft",
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
