"""Where the time and the memory of a run went: metrics of a step, and the places they are written to."""

from terrazzo.telemetry.attach import Telemetry, attach
from terrazzo.telemetry.memory import PeakMemory, allowed_bytes, available_host_bytes, resident_bytes
from terrazzo.telemetry.metrics import StepMetrics, Stopwatch
from terrazzo.telemetry.page import ReportPage
from terrazzo.telemetry.sinks import Console, JsonLines, Sink, TensorBoard
from terrazzo.telemetry.step_table import StepTable, duration
from terrazzo.telemetry.steps import StepRecorder

__all__ = [
    "Console",
    "JsonLines",
    "PeakMemory",
    "ReportPage",
    "Sink",
    "StepMetrics",
    "StepRecorder",
    "StepTable",
    "Stopwatch",
    "Telemetry",
    "TensorBoard",
    "allowed_bytes",
    "attach",
    "available_host_bytes",
    "duration",
    "resident_bytes",
]
