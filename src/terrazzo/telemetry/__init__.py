"""Where the time and the memory of a run went: metrics of a step, and the places they are written to.

Each folder imports from those before it in this list, and `attachment`, for a training loop of one's own, from all:

    log        what a run writes into its folder, and how it is read back
    steps      what is measured of a step
    flight     the flight recorder: what each rank has exchanged, exchange by exchange
    display    a run's records as a verdict, tables, a screen of text and a page
    watchdog   ranks that stand still
    profiling  a script of somebody else's, measured while it runs

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
    from terrazzo.telemetry.flight.folder import BlackBox, flights_of, save_flight
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
    "BlackBox",
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
