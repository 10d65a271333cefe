"""The planner: what a sharded training run takes, from shapes alone, before any hardware is booked.

It costs the same `Plan` that the engine runs. Each folder knows of those above it in this list, which is the order to
read them in (docs/concepts/planner.md):

    model        a model's tensors by unit, from a preset, a config.json or modules
    machine      devices, links, and the mesh of ranks
    setup        what is asked, and the one way of running a model that it means
    layout       which rank has what of the model
    figures      what is counted of one setup: terms with their formulas, and their sums
    memory       what the fullest rank holds
    traffic      what one rank sends
    timing       how long a step takes, and what was measured of it
    gate         what is known against a setup
    report       what is answered (`Estimate`, `Frontier`, `Sizing`), and how that reads: text, JSON, pictures, a page
    assemble     all of these for one setup, put together: its `Estimate`
    choice       the search over setups, sizing, and the configuration that runs one

`caching` lies below all, `api` above.

Five words, here and in `engine.dry_run`:

    bill         the engine's own count of what a rank holds of a model that is there; without activations
    promise      bill and traffic of a step, asked of a sharded model; of a run, the estimate that it is compared with
    estimate     the planner's answer for one setup: `Estimate`, its memory, traffic and time
    figures      the numbers of one of these three, as terms with their formulas: `MemoryFigures` and its kin
    upper        what a term, or all of them, may take at most, with other kernels and frameworks; `value` is expected

A question on its way, `terrazzo plan --model llama3-8b --gpus 8`:

    Request         arguments as they were written, each checked by itself              setup.request, setup.arguments
    ask             a strategy and a number of devices: one estimate; else a search     api
    search          candidates for all that is open                                     choice.search
      build_setup   each as a `Setup`, with a value for everything                      setup.build_setup
      assemble      its memory, traffic, time and findings: an `Estimate`             assemble
    Answer          the best, the others, and what was refused: text, JSON, pictures    report.answer

Open to other packages:

    api, figures                               questions and their answers, and what a figure is a sum of
    machine                                    devices, and how ranks lie on them
    memory.peak, memory.replay, memory.trace   the memory of a run whose model is there
    memory.states                              what is kept of it between steps
    memory.matrices                            of it, what updates of whole matrices hold
    model                                      shapes of models, and how they are read
    choice, report, setup                      questions and answers of the command line
    timing.calibration                         what was measured
    timing.compute, timing.rates, timing.measured  what a benchmark of a device is compared with
    timing.step                                the same of a step
    traffic.volumes                            what a run is to have sent
"""

from terrazzo.planner.api import ask, compare, plan
from terrazzo.planner.assemble import estimate
from terrazzo.planner.choice.fewest import min_gpus
from terrazzo.planner.choice.search import search
from terrazzo.planner.figures import MemoryFigures, TimeFigures, TrafficFigures
from terrazzo.planner.gate.gate import findings, runnable
from terrazzo.planner.gate.rule import PlanFinding
from terrazzo.planner.machine.devices import Cluster, Device, MeasuredHost, device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.report.estimates import Edit, Estimate
from terrazzo.planner.report.frontier import Frontier
from terrazzo.planner.report.sizing import Sizing
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "Cluster",
    "Device",
    "Edit",
    "Estimate",
    "Framework",
    "Frontier",
    "MeasuredHost",
    "MemoryFigures",
    "Mesh",
    "ModelShape",
    "PlanFinding",
    "Request",
    "Setup",
    "Sizing",
    "TimeFigures",
    "TrafficFigures",
    "ask",
    "build_setup",
    "compare",
    "device",
    "estimate",
    "findings",
    "min_gpus",
    "model_shape",
    "plan",
    "runnable",
    "search",
]
