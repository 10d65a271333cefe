"""The engine: one table of places, running.

Folders, from the lowest to the highest:

    runtime          threads, devices, memory, and torch's own runtime
    labels           what each exchange between ranks is for, as its message says
    instrumentation  what is told and counted while a step runs
    comm             how ranks exchange
    mesh             the axes of the mesh, and the collectives along each
    formats          what numbers look like in fewer bits than any dtype has
    plan             what is stated: flat spaces, places, what moves
    partition        a model taken apart: its units, the parameters of each, and which part of these a rank holds
    buckets          what is in memory, and how parameters are views of it
    schedule         when it moves
    autograd         what a forward leaves behind, in autograd's graph and on modules
    progress         how far a training has come: steps, the loss scale, divisors, passes that raised
    consensus        what ranks must have alike, and where they compare it
    hooks            what torch calls while a model runs
    pipeline         a model in stages: those that this rank runs, and a step of them
    replicas         replicas that train by themselves, and the outer steps that join them
    optim            stock optimizers over flat master weights
    offload          what is away from the device
    unit_forwards    activation checkpointing and compilation: what is put around forwards of units
    dry_run          memory and traffic of a step that has not run
    model            a sharded model as one object
    states           what there is to save of it, and how it comes back
    interception     what users do with it: how it is intercepted, and what is answered
    sharding         tz.shard, and what comes before it

Four ways through it, each from its first call to its last:

    A gradient, from autograd to the optimizer
        hooks/backward_hooks        BackwardHooks.accumulate_gradient  autograd has put it into `.grad`
        buckets/gradients/gradient  Gradient.accumulate                it goes into the bucket's unreduced gradient
        schedule/backward           BackwardPass.close                 its unit is complete
        schedule/reductions         Reductions.start                   a Transfer drives what follows
        buckets/unit                Unit.reduce                        bucket by bucket, in one chain
        buckets/gradients/gradient  Gradient.reduce                    summed over ranks, axis by axis, and divided
        buckets/gradients/finished  FinishedGradient.land              at rest on its tier
        hooks/backward_hooks        BackwardHooks.end                  autograd is done: what is left is summed
        consensus/agreement         Agreement.agree_on_gradients       which gradients there are on any rank
        optim/driver                OptimizerDriver._before_step       torch's hook before `optimizer.step()`
        model/engine                Engine.before_step                 whole, and none is changed any more
        buckets/gradients/gradient  Gradient.handed_over               what this step takes of it
        optim/device_updates        DeviceUpdates.begin                `.grad` of a segment of master weights

    The gather of a unit's weights
        hooks/forward_hooks             ForwardHooks.before_unit        torch begins the unit's forward
        schedule/forward                ForwardPass.enter               which units are due: this one, those to prefetch
        schedule/gathered               GatheredWeights.gather          whether they are under way already
        buckets/unit_weights            UnitWeights.gather, then .wait  after an update; a Transfer for each bucket
        buckets/weights/full            FullWeights.gather              from rest, or from what `between` has kept
        buckets/weights/weight_gathers  WeightGather.fill               the way of what is sent: a dtype, blocks, codes
        buckets/resting/buffer          Buffer.gather                   cast, and one all-gather for each axis
        buckets/weights/full            FullWeights.install             modules may read the parameters

    A step of what is on `nvme`: the docstring of `offload`, and of all else that of `optim`

    `p.data.copy_(new)` by a user
        buckets/parameters/at_rest       AtRest._answer             values not here: `.data` is a Measured,
        interception/measuring/measured  Measured._answer           and `copy_` of that raises
        buckets/parameters/at_rest       `data` in _linked          values here: noted, or an alias that counts versions
        buckets/parameters/edits         Edits.take_written         gathered for reading: raises as they are released
        model/gathered_blocks            GatheredBlocks.block       `tz.gathered(model, write=True)`: taken over
        hooks/forward_hooks              ForwardHooks.before_model  whole weights: compared as the next pass begins,
        buckets/take_over                take_over_edits            and taken over into the master weights

A module imports from its own folder and from those before it in this list. Other packages import from here: what they
want of a sharded model, they ask its `Engine`. Open to other packages:

    runtime                                     what a device, and this process, can do and may use, CPUs too
    mesh                                        the axes of a mesh
    plan                                        what is stated, for the planner and for checkpoints
    partition                                   a model taken apart, likewise
    pipeline                                    the stages of a model, for what cuts it into these
    labels                                      what an exchange is for
    instrumentation                             where a step's time goes
    comm                                        the collectives of a group
    schedule.schedule, dry_run.counting         a dry run of a step, for the planner
    optim.segments.group_runs, optim.matrices   dry runs of updates of whole matrices, likewise
    optim.stock.template
    offload.needs                               what rests away from the device, likewise
    offload.nvme.swap_file                      swap files and their folders, for advice on them
    offload.nvme.swap_folder
    states.state_names                          names in checkpoints of what several ranks have their own of
    sharding.shared_parts_checks                whether a model was divided for a mesh
    consensus.joint_checks                      what ranks are told alike, or refuse as one
    consensus.equal_values                      tensors that all ranks have alike before a model is cut
    buckets.parameters.gradient_hooks           whose hooks are on a weight, and what replaces one
    buckets.parameters.note                     what the engine has noted on a weight
    autograd.asides                             tensors that modules have put aside in a forward
    buckets.parameters.outside_forward          what a loss may not compute with by itself

`python -m tools.lint` checks both.
"""

from terrazzo.engine.autograd.listeners import inside_backward
from terrazzo.engine.buckets.parameters.placeholder import Zeros
from terrazzo.engine.dry_run.bill import MemoryBill
from terrazzo.engine.formats.format_names import FrozenFormat, StateFormat, WireFormat
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.interception.forward_methods import register_forward_method
from terrazzo.engine.interception.sharded_module import ShardedModule
from terrazzo.engine.interception.sharded_optimizer import ShardedOptimizer
from terrazzo.engine.interception.unattached_optimizers import on_unattached_step
from terrazzo.engine.mesh.family import Family
from terrazzo.engine.mesh.meshes import data_mesh, named_mesh
from terrazzo.engine.model.ema import EMA
from terrazzo.engine.model.engine import Engine, engine_of, find_engine, is_sharded
from terrazzo.engine.model.training_calls import accumulate, clip_grad_norm_, gathered
from terrazzo.engine.model.unused_gradients import UnusedGradients, unused_gradients
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.optim.stock.elementwise import ELEMENTWISE, check_elementwise, check_narrow
from terrazzo.engine.partition.absent_parameters import give_up
from terrazzo.engine.partition.asked_units import Units
from terrazzo.engine.partition.box import Box, Owned, Record, leave_record, record_of
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.partition.unit_members import parameters_by_names
from terrazzo.engine.pipeline.stages import STAGES_OF, Stages, stages_of
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.place import OFFLOADS, PLANS, Place, Plan
from terrazzo.engine.plan.precision import DTYPE_NAMES, DTYPES, MOMENTS_NAMES, PRECISIONS, LossScaling, Precision
from terrazzo.engine.sharding.attach import attach
from terrazzo.engine.sharding.settings_checks import formats_without_messages
from terrazzo.engine.sharding.shard import estimate, shard
from terrazzo.engine.states.buffers_and_extra_state import PersistentBuffer, check_no_extra_state, persistent_buffers
from terrazzo.engine.states.model_state import ModelState, ParameterInfo
from terrazzo.engine.states.optimizer_states import OptimizerStates
from terrazzo.engine.states.parameter_table import TableRow, parameter_table
from terrazzo.engine.states.pieces import Piece
from terrazzo.engine.states.restore import StateReader
from terrazzo.engine.states.state_dict import whole_state_dict
from terrazzo.engine.states.unit_snapshot import UnitSnapshot
from terrazzo.engine.states.whole_tensors import collect_buffers, whole_weights
from terrazzo.engine.unit_forwards.activation_checkpointing import checkpoint_activations
from terrazzo.engine.unit_forwards.compiled_units import compile_units

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ELEMENTWISE",
    "EMA",
    "MOMENTS_NAMES",
    "OFFLOADS",
    "PLANS",
    "PRECISIONS",
    "STAGES_OF",
    "Box",
    "DiLoCo",
    "Engine",
    "Family",
    "FrozenFormat",
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
    "Record",
    "Rectangle",
    "ShardedModule",
    "ShardedOptimizer",
    "Stages",
    "StateFormat",
    "StateReader",
    "TableRow",
    "Traffic",
    "UnitSnapshot",
    "Units",
    "UnusedGradients",
    "WireFormat",
    "Zeros",
    "accumulate",
    "attach",
    "check_elementwise",
    "check_narrow",
    "check_no_extra_state",
    "checkpoint_activations",
    "clip_grad_norm_",
    "collect_buffers",
    "compile_units",
    "data_mesh",
    "engine_of",
    "estimate",
    "find_engine",
    "find_units",
    "formats_without_messages",
    "gathered",
    "give_up",
    "inside_backward",
    "is_sharded",
    "leave_record",
    "named_mesh",
    "on_unattached_step",
    "parameter_table",
    "parameters_by_names",
    "persistent_buffers",
    "record_of",
    "register_forward_method",
    "shard",
    "stages_of",
    "unused_gradients",
    "whole_state_dict",
    "whole_weights",
]
