"""The engine: one table of places, running.

The core is in this folder. Read it in this order: layout, place, precision, spec, axes and recipe, what is stated;
buffer, parameter, gradient, bucket, partition and unit, what is held; order, regions, runnable, reductions and
schedule, when it moves; pass_end, scaler, saved, listeners and hooks, how a training loop drives it. Folders, from the
lowest to the highest, the core among them:

    process     threads, how things end, memory
    links       how ranks exchange
    (core)
    optim       stock optimizers over flat master weights
    offload     what is away from the device
    paper       memory and traffic of a step that has not run
    model       a sharded model: how it is made, and what can be asked of it

A module imports from its own folder and from those before it in this list, so the core knows links and nothing of
offload. `tools/lint_structure.py` checks it.
"""

from terrazzo.engine.links.transfer import Traffic
from terrazzo.engine.model.activations import checkpoint_activations, compile_units
from terrazzo.engine.model.attach import attach
from terrazzo.engine.model.engine import Engine, engine_of
from terrazzo.engine.model.shard import accumulate, clip_grad_norm_, estimate, gathered, shard
from terrazzo.engine.model.state import Piece
from terrazzo.engine.offload.settings import Offload
from terrazzo.engine.paper.bill import MemoryBill
from terrazzo.engine.place import PLANS, Place, Plan
from terrazzo.engine.precision import PRECISIONS, LossScaling, Precision

__all__ = [
    "PLANS",
    "PRECISIONS",
    "Engine",
    "LossScaling",
    "MemoryBill",
    "Offload",
    "Piece",
    "Place",
    "Plan",
    "Precision",
    "Traffic",
    "accumulate",
    "attach",
    "checkpoint_activations",
    "clip_grad_norm_",
    "compile_units",
    "engine_of",
    "estimate",
    "gathered",
    "shard",
]
