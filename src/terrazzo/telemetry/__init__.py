"""Where the time and the memory of a run went: metrics of a step, and the places they are written to."""

from terrazzo.telemetry.memory import PeakMemory, allowed_bytes, available_host_bytes, resident_bytes
from terrazzo.telemetry.metrics import StepMetrics, Stopwatch
from terrazzo.telemetry.sinks import Console, JsonLines, Sink, TensorBoard

__all__ = [
    "Console",
    "JsonLines",
    "PeakMemory",
    "Sink",
    "StepMetrics",
    "Stopwatch",
    "TensorBoard",
    "allowed_bytes",
    "available_host_bytes",
    "resident_bytes",
]
