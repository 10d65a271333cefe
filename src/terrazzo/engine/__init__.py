"""The engine: one table of places, running. Read layout, place, buffer, bucket, schedule, in that order."""

from terrazzo.engine.activations import checkpoint_activations, compile_units
from terrazzo.engine.attach import attach
from terrazzo.engine.bill import MemoryBill
from terrazzo.engine.engine import Engine, engine_of
from terrazzo.engine.place import PLANS, Place, Plan
from terrazzo.engine.precision import PRECISIONS, LossScaling, Precision
from terrazzo.engine.shard import accumulate, clip_grad_norm_, estimate, gathered, shard
from terrazzo.engine.state import Piece
from terrazzo.engine.store.settings import Offload
from terrazzo.engine.transfer import Traffic

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
