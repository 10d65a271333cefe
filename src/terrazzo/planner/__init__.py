"""The planner: what a sharded training run takes, from shapes alone, before any hardware is booked.

It costs the same `Plan` that the engine runs. Read setup, figures, memory, traffic, timing, estimate, search, in order.

Open to other packages:

    api, formulas                                  `tz.plan`, and what a figure is a sum of
    machine                                        devices, and what was measured on them
    memory.peak, memory.replay, memory.trace       the memory of a run whose model is there
    model                                          shapes of models, and how they are read
    report, search, setup                          questions and answers of the command line
    timing.compute, timing.measured, timing.step   what a benchmark of a device is compared with
"""

from terrazzo.planner.api import estimate, estimate_request, plan
from terrazzo.planner.estimate import Estimate
from terrazzo.planner.figures import Memory, Time, Traffic
from terrazzo.planner.gate.gate import findings, runnable
from terrazzo.planner.gate.stack import Finding, Stack
from terrazzo.planner.machine.devices import Cluster, Device, device
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.search.frontier import Frontier
from terrazzo.planner.search.search import search
from terrazzo.planner.search.sizing import Sizing, min_gpus
from terrazzo.planner.setup.request import Request, build_setup
from terrazzo.planner.setup.setup import Mesh, Setup

__all__ = [
    "Cluster",
    "Device",
    "Estimate",
    "Finding",
    "Frontier",
    "Memory",
    "Mesh",
    "ModelShape",
    "Request",
    "Setup",
    "Sizing",
    "Stack",
    "Time",
    "Traffic",
    "build_setup",
    "device",
    "estimate",
    "estimate_request",
    "findings",
    "min_gpus",
    "model_shape",
    "plan",
    "runnable",
    "search",
]
