"""Steps of `tz.shard` and `engine.estimate` before anything is allocated or changed: read, check, compare, lay out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket_groups import laid_out
from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.meshes import data_mesh
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.partition.asked_units import Units
from terrazzo.engine.partition.repeated_blocks import layers_in_root
from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.partition.unit_members import UnitSpec, left_without, partition
from terrazzo.engine.pipeline.stages import stages_of
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.compiled import compilation_of
from terrazzo.engine.sharding.compared_facts import (
    ComparedFacts,
    buffer_facts,
    check_versions,
    model_facts,
    optimizer_facts,
)
from terrazzo.engine.sharding.initializers import check_initializable
from terrazzo.engine.sharding.mesh_checks import check_group, check_is_mesh, check_kind, check_mesh
from terrazzo.engine.sharding.model_checks import (
    check_device,
    check_dtypes,
    check_max_norm,
    check_model,
    warn_of_layers_in_root,
    warn_of_left_without,
    warn_of_most_in_one,
)
from terrazzo.engine.sharding.optimizer_checks import assign_checked, checked_templates
from terrazzo.engine.sharding.packed_checks import check_packed
from terrazzo.engine.sharding.replica_checks import check_diloco, check_fragments
from terrazzo.engine.sharding.settings_checks import (
    check_graphs,
    check_hooks,
    check_offload,
    check_precision,
    warn_of_unused,
    warn_of_unused_formats,
)
from terrazzo.engine.sharding.shared_parts_checks import (
    check_experts_shared,
    check_parts,
    check_sequences,
    check_stages,
)
from terrazzo.engine.unit_forwards.activation_checkpointing import offloading_of
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count

__all__ = ["OptimizerLike", "Options", "Prepared", "prepare"]

N = TypeVar("N", Plan, Precision)
OptimizerLike = Optimizer | Callable[[Any], Optimizer] | Sequence[Optimizer] | None
"""One optimizer, what builds one from the parameters, several, or none."""


@dataclass(frozen=True)
class Options:
    """The arguments of `shard` beside model, optimizer and plan."""

    units: Units | None
    precision: Precision | str | torch.dtype
    mesh: DeviceMesh | None
    prefetch: int
    offload: Offload
    diloco: DiLoCo | None = None


@dataclass(frozen=True)
class _ShardArguments:
    """The arguments on this rank, read, and checked as far as one rank can."""

    plan: Plan
    precision: Precision
    specs: list[UnitSpec]
    drawn: list[UnitSpec]
    why_units: str
    optimizers: list[Optimizer]
    offloads_activations: bool


@dataclass(frozen=True)
class Prepared:
    """Plan of what `shard` is about to do; nothing has been allocated or changed yet.

    Attributes:
        mesh_axes: all of the mesh, also where replicas train by themselves.
        drawn: the units of the whole model, in whose order initial values are drawn.
        why_units: how the units were found.
    """

    mesh_axes: Axes
    sharding: ShardingSpec
    tally: Tally
    units: list[UnitLayout]
    drawn: list[UnitSpec]
    why_units: str
    optimizers: list[Optimizer]
    templates: Templates


def prepare(model: nn.Module, optimizer: OptimizerLike, plan: Plan | str, options: Options) -> Prepared:
    """Read and check all arguments. Collective: what one rank refuses all refuse."""
    check_group()
    mesh = _default_mesh() if options.mesh is None else options.mesh
    check_is_mesh(mesh)
    check_kind(mesh.device_type)
    tally = Tally()
    axes = Axes(mesh, tally)
    check_mesh(mesh, axes)
    check_versions(axes)
    all_or_none(axes, functools.partial(_check_model, model, mesh))
    arguments = all_or_none(axes, functools.partial(_read_arguments, model, optimizer, plan, options, axes))
    _facts(model, arguments, options).check_alike(axes)
    check_parts([member for spec in arguments.specs for member in spec.members], axes)
    replica = axes if options.diloco is None else axes.with_replicas_apart()
    sharding = ShardingSpec(replica, arguments.plan, arguments.precision, diloco=options.diloco)
    return all_or_none(axes, lambda: _lay_out(arguments, options, sharding, axes, tally))


def _check_model(model: nn.Module, mesh: DeviceMesh) -> None:
    check_model(model)
    check_sequences(model, mesh)
    check_stages(model, mesh)
    check_experts_shared(model, mesh)


def _read_arguments(
    model: nn.Module, optimizer: OptimizerLike, plan: Plan | str, options: Options, axes: Axes
) -> _ShardArguments:
    if not is_count(options.prefetch, least=0):
        raise BadInput(f"prefetch is {options.prefetch!r}; it counts units gathered ahead: give an int, 0 or more.")
    if not isinstance(options.offload, Offload):
        raise BadInput(
            f"offload is {options.offload!r}; pass a tz.Offload. Which states go where is the plan's to say, such as "
            "plan='zero3@cpu'."
        )
    check_device(model, axes.device)
    plan, precision = _preset_or_given(Plan, plan, "plan"), _preset_or_given(Precision, options.precision, "precision")
    if options.diloco is not None:
        check_diloco(options.diloco, plan, precision, axes, options.offload)
        axes = axes.with_replicas_apart()
    plan = plan.resolve(axes.data)
    check_precision(precision, axes)
    check_dtypes(model, precision)
    check_max_norm(model, axes)
    names, why_units = find_units(model, options.units)
    stages = stages_of(model)
    drawn = partition(model, names, None if stages is None else stages.tied_ranks)
    if options.units is None:
        if layers := layers_in_root(model, names):
            warn_of_layers_in_root(layers, why_units)
        elif stages is None and axes.live(plan.weight.axes):  # of a stage one block may be most
            warn_of_most_in_one(drawn, why_units)
    warn_of_left_without(left_without(model, names, drawn))
    specs = [spec for spec in drawn if spec.members]
    check_initializable(model)
    check_hooks((member for spec in specs for member in spec.members), precision)
    built = _build_optimizers(model, optimizer, specs, axes.device)
    return _ShardArguments(plan, precision, specs, drawn, why_units, built, bool(offloading_of(model)))


def _facts(model: nn.Module, arguments: _ShardArguments, options: Options) -> ComparedFacts:
    """What ranks were told, for them to compare."""
    told: dict[str, object] = {"plan": str(arguments.plan), "precision": repr(arguments.precision)}
    told |= {"prefetch": options.prefetch, "diloco": repr(options.diloco)}
    told |= {"offload step": options.offload.step, "offload block_mib": options.offload.block_mib}
    # Units that are compiled reduce at other points of a step.
    compiled = [each.name for each in arguments.specs if compilation_of(each.module) is not None]
    of_stage: dict[str, object] = {"parameters": model_facts(arguments.specs), "compiled units": compiled}
    of_stage["buffers"] = buffer_facts(model)
    return ComparedFacts(told, of_stage) | optimizer_facts(arguments.optimizers)


def _lay_out(
    arguments: _ShardArguments, options: Options, sharding: ShardingSpec, mesh_axes: Axes, tally: Tally
) -> Prepared:
    axes, built = sharding.axes, arguments.optimizers
    owners = [number for number, each in enumerate(built) for _ in each.param_groups]
    units = laid_out(arguments.specs, sharding, owners)
    check_packed(units, arguments.precision, axes, options.offload)
    check_graphs(units, axes.device)
    check_offload({tier for unit in units for tier in unit.buckets[0].spec.tiers}, arguments.precision, options.offload)
    warn_of_unused(arguments.plan, options.offload, arguments.offloads_activations)
    warn_of_unused_formats(sharding, [bucket for unit in units for bucket in unit.buckets])
    trainable = [bucket for unit in units for bucket in unit.trainable()]
    check_fragments(options.diloco, sum(any(unit.trainable()) for unit in units))
    templates = checked_templates(built, trainable, sharding)
    return Prepared(mesh_axes, sharding, tally, units, arguments.drawn, arguments.why_units, built, templates)


def _preset_or_given(kind: type[N], value: N | str | torch.dtype, argument: str) -> N:
    if isinstance(value, str) or (kind is Precision and isinstance(value, torch.dtype)):
        return kind.named(value)
    if not isinstance(value, kind):
        raise BadInput(f"{argument} is {value!r}; pass a tz.{kind.__name__} or the name of one.")
    return value


def _default_mesh() -> DeviceMesh:
    return data_mesh(devices.kind_of_group(), dist.get_world_size())


def _build_optimizers(
    model: nn.Module, optimizer: OptimizerLike, specs: list[UnitSpec], device: torch.device
) -> list[Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, list | tuple):
        built = list(optimizer)
    elif callable(optimizer) and not isinstance(optimizer, Optimizer):
        built = [optimizer(model.parameters())]
    else:
        built = [optimizer]
    assign_checked(built, [member for spec in specs for member in spec.members], device)
    return built
