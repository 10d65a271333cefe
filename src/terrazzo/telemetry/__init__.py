"""Where the time and the memory of a run went: metrics of a step, and the places they are written to.

Open to other packages:

    exit_note   how a run has ended
    flight      what each rank has recorded
    outside     a script of somebody else's, looked at while it runs
    watchdog    whether ranks stand still, for whoever has started them
"""

from terrazzo.telemetry.attach import Telemetry, attach
from terrazzo.telemetry.flight.folder import BlackBox, flights_of, save_flight
from terrazzo.telemetry.flight.trace import trace_of
from terrazzo.telemetry.memory import PeakMemory, allowed_bytes, available_host_bytes, resident_bytes
from terrazzo.telemetry.metrics import StepMetrics, Stopwatch
from terrazzo.telemetry.outside.advice import advice_for
from terrazzo.telemetry.outside.merging import FACTS
from terrazzo.telemetry.page import VERDICT, ReportPage, page_of
from terrazzo.telemetry.records import lines_of, of_newest_start, restart_text, run_lines, steps_of
from terrazzo.telemetry.screen import has_ended, rows_of, screen_of
from terrazzo.telemetry.sinks import Console, JsonLines, Sink, TensorBoard
from terrazzo.telemetry.step_table import StepTable, duration
from terrazzo.telemetry.steps import StepRecorder
from terrazzo.telemetry.tables import Table, table_of_units, tables_of
from terrazzo.telemetry.verdict import Verdict, verdict_of
from terrazzo.telemetry.watchdog.whereabouts import Whereabouts

__all__ = [
    "FACTS",
    "VERDICT",
    "BlackBox",
    "Console",
    "JsonLines",
    "PeakMemory",
    "ReportPage",
    "Sink",
    "StepMetrics",
    "StepRecorder",
    "StepTable",
    "Stopwatch",
    "Table",
    "Telemetry",
    "TensorBoard",
    "Verdict",
    "Whereabouts",
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
