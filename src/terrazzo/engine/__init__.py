"""The engine: one table of places, running.

The core is in this folder. Read it in this order: layout, rectangles, place, family, precision, spec, scaler, progress,
phases, tally, axes and recipe, what is stated; buffer, gradient, partition, bucket and unit, what is held; order,
runnable, reductions, held and schedule, when it moves; elsewhere and stages, both of a model in stages. Folders, from
the lowest to the highest, the core among them:

    process     threads, devices, memory
    links       how ranks exchange
    border      what a user does to parameters and modules
    (core)
    loop        how a training loop drives the core
    optim       stock optimizers over flat master weights
    offload     what is away from the device
    paper       memory and traffic of a step that has not run
    model       a sharded model as one object, and what its ranks agree on
    states      what there is to save of it, and how it comes back
    answers     what its parameters, gradients and methods answer a loop that knows nothing of it
    making      tz.shard, and what comes before it

A module imports from its own folder and from those before it in this list, so the core knows links and nothing of
offload. Other packages import from here: what they want of a sharded model, they ask its `Engine`. Open to other
packages:

    offload.disk_file, offload.disk_folder            folders for swap files, for advice on them
    offload.topology                                  CPUs that a rank may use
    process.device                                    what a device can do beside arithmetic
    process.system                                    what this process may use, for those who count memory
    partition, place, spec, layout, rectangles        units, where their states rest, what moves: for the planner
    order, schedule, tally, paper.rehearsal           a step on paper, likewise
    links.side, links.transfer, links.collectives     chains of collectives on paper, likewise
    links.backends, links.label                       the collectives of a group, for what modules exchange
    phases, links.times                               where a step's time goes, for its record
    axes, family, states.materialize, making.parts    what is exchanged before a model is sharded, and of activations
    model.together                                    what ranks are told alike, or refuse as one
    border.parameter, unit                            what a forward does with a weight, whether it is compiled
    links.gloo, links.columns                         what sums receive, likewise
    offload.needs, offload.store                      what rests away from the device, likewise

`python -m tools.lint` checks both.
"""

from terrazzo.engine.answers.methods import register_forward_method
from terrazzo.engine.answers.module import ShardedModule
from terrazzo.engine.axes import data_mesh, named_mesh
from terrazzo.engine.border.parameter import Zeros
from terrazzo.engine.elsewhere import STAGES_OF, Stages, give_up, stages_of
from terrazzo.engine.family import Box, Family, Owned, Record, leave_record, record_of
from terrazzo.engine.links.transfer import Traffic
from terrazzo.engine.loop.listeners import inside_backward
from terrazzo.engine.making.attach import attach
from terrazzo.engine.making.forwards import checkpoint_activations, compile_units
from terrazzo.engine.making.shard import clip_grad_norm_, estimate, gathered, shard
from terrazzo.engine.model.accumulation import accumulate
from terrazzo.engine.model.engine import Engine, engine_of
from terrazzo.engine.model.names import PersistentBuffer, check_no_extra_state, persistent_buffers
from terrazzo.engine.offload.settings import Offload
from terrazzo.engine.optim.sharded import ShardedOptimizer
from terrazzo.engine.optim.stock import ELEMENTWISE, check_elementwise
from terrazzo.engine.optim.unattached import on_unattached_step
from terrazzo.engine.paper.bill import MemoryBill
from terrazzo.engine.partition import Units, find_units, parameter_names
from terrazzo.engine.place import OFFLOADS, PLANS, TIERS, Place, Plan
from terrazzo.engine.precision import (
    DTYPE_FIELDS,
    DTYPE_NAMES,
    DTYPES,
    PRECISION_SPELLINGS,
    PRECISIONS,
    LossScaling,
    Precision,
    dtype_named,
    preset_named,
)
from terrazzo.engine.rectangles import Rectangle
from terrazzo.engine.stages import StagedSchedule
from terrazzo.engine.states.ema import EMA
from terrazzo.engine.states.full_state import OptimizerStates
from terrazzo.engine.states.pieces import Piece
from terrazzo.engine.states.restore import Read
from terrazzo.engine.states.state import ModelState, ParameterInfo
from terrazzo.engine.states.whole import whole_weights

__all__ = [
    "DTYPES",
    "DTYPE_FIELDS",
    "DTYPE_NAMES",
    "ELEMENTWISE",
    "EMA",
    "OFFLOADS",
    "PLANS",
    "PRECISIONS",
    "PRECISION_SPELLINGS",
    "STAGES_OF",
    "TIERS",
    "Box",
    "Engine",
    "Family",
    "LossScaling",
    "MemoryBill",
    "ModelState",
    "Offload",
    "OptimizerStates",
    "Owned",
    "ParameterInfo",
    "PersistentBuffer",
    "Piece",
    "Place",
    "Plan",
    "Precision",
    "Read",
    "Record",
    "Rectangle",
    "ShardedModule",
    "ShardedOptimizer",
    "StagedSchedule",
    "Stages",
    "Traffic",
    "Units",
    "Zeros",
    "accumulate",
    "attach",
    "check_elementwise",
    "check_no_extra_state",
    "checkpoint_activations",
    "clip_grad_norm_",
    "compile_units",
    "data_mesh",
    "dtype_named",
    "engine_of",
    "estimate",
    "find_units",
    "gathered",
    "give_up",
    "inside_backward",
    "leave_record",
    "named_mesh",
    "on_unattached_step",
    "parameter_names",
    "persistent_buffers",
    "preset_named",
    "record_of",
    "register_forward_method",
    "shard",
    "stages_of",
    "whole_weights",
]
