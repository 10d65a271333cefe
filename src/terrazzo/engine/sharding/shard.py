"""`tz.shard`, and `tz.estimate`, which stops before anything is changed."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.buckets.unit_layout import UnitLayout, weights_are_split
from terrazzo.engine.consensus.equal_values import synchronize
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.consensus.pass_end import meet
from terrazzo.engine.dry_run.bill import MemoryBill, memory_bill
from terrazzo.engine.dry_run.step import StepSpec, parameters_of
from terrazzo.engine.interception.gradients.grad_attribute import show_gradients
from terrazzo.engine.interception.measuring.measured import let_measure
from terrazzo.engine.interception.sharded_module import make_sharded_module
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.engine.mesh.activation_axes import exchanged_along
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.offload.needs import need_of
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.offload.store import Store
from terrazzo.engine.optim.stock.param_groups import orphans
from terrazzo.engine.partition.asked_units import Units
from terrazzo.engine.pipeline.pipeline_schedule import PipelineSchedule
from terrazzo.engine.pipeline.stages import stages_of
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.progress.denominator import Denominator
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.runtime.pages import keep_freed, keeps, return_freed
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.engine.sharding.attach import put_on
from terrazzo.engine.sharding.initial_values import InitialValues
from terrazzo.engine.sharding.prepare import OptimizerLike, Options, Prepared, prepare
from terrazzo.engine.unit_forwards.activation_checkpointing import offloading_of
from terrazzo.messages import listed, warn
from terrazzo.processes.system import boot_id

__all__ = ["estimate", "shard"]

M = TypeVar("M", bound=nn.Module)


@labelled(collective_call("tz.shard(model, optimizer)"))
def shard(  # structure: signature fixed by the design
    model: M,
    optimizer: OptimizerLike = None,
    plan: Plan | str = "zero3",
    *,
    units: Units | None = None,
    precision: Precision | str | torch.dtype = "fp32",
    mesh: DeviceMesh | None = None,
    prefetch: int = 1,
    offload: Offload | None = None,
    diloco: DiLoCo | None = None,
) -> tuple[M, Any]:
    """Place a model's weights, gradients and optimizer state over ranks as `plan` says.

    Both objects are changed in place and returned: the model runs, and the optimizer steps, as before. Weights and
    buffers that differ between ranks take the first rank's values, and all buffers move to the device. A model on the
    meta device is given values unit by unit, so that no rank ever holds all of it.

    Args:
        model: any module with contiguous parameters. Freeze what is to be frozen before.
        optimizer: an elementwise `torch.optim` optimizer over `model.parameters()`, whose state is sharded with it; a
            callable that builds one from the parameters; several optimizers over disjoint parameters in a list or
            tuple, which come back in one; or None. A warning names trainable parameters that none of them has.
        plan: a `Plan` or its name: `zero0` to `zero3`, `ddp`, `no_shard`, `full_shard`, `shard_grad_op`,
            `hybrid_shard`, `hybrid_shard_zero2`, `hfsdp`, `hpz`; each with `@cpu`, `@cpu-all`, `@nvme` or `@nvme-all`,
            of all units or, as in `zero3@cpu:0.7`, of a share of them.
        units: module classes or name globs that are gathered and reduced as one; found by themselves if None.
        precision: a `Precision` or its name: `fp32`, `bf16`, `bf16-pure`, `fp16`, or another spelling of one, such as
            `bfloat16` or `torch.bfloat16`.
        mesh: axes named `dp_replicate`, `dp_shard`, `cp`, and `tp` for a model that `tz.parallelize` has cut; see
            `tz.mesh`. By default all ranks on one `dp_shard` axis.
        prefetch: how many units ahead of the running one are gathered; 0 for none. Nothing where weights are whole.
        offload: how states that the plan places on `cpu` or `nvme` are kept and updated; see `tz.Offload`.
        diloco: have the groups along `dp_replicate` train by themselves, each under the plan, and agree on weights
            every so many optimizer steps; see `tz.DiLoCo`. None: gradients are summed over them.

    Raises:
        BadInput, Misuse: on every rank, before anything is changed; after that only for modules of a model on the meta
            device that have left parameters or buffers without a value.
    """
    options = Options(units, precision, mesh, prefetch, offload or Offload(), diloco)
    prepared = prepare(model, optimizer, plan, options)
    _warn_of_orphans(prepared.units, prepared.optimizers)
    store = _open_store(model, prepared, options.offload)
    engine = _make_engine(model, prepared, _build_units(model, prepared, store), prefetch, store)
    for built in prepared.optimizers:
        first = engine.drivers.next_group
        put_on(engine, built, prepared.templates[first : first + len(built.param_groups)])
    _intercept(model, engine)
    if engine.axes.device.type == "cpu" and store.nvme is None and not keeps(_most_bytes_of_a_step(prepared.units)):
        bill = engine.bill
        keep_freed(bill.grad_bytes + bill.transient_bytes)
    return model, _in_form_of(optimizer, prepared.optimizers)


def estimate(  # structure: signature fixed by that of shard
    model: nn.Module,
    optimizer: OptimizerLike = None,
    plan: Plan | str = "zero3",
    *,
    units: Units | None = None,
    precision: Precision | str | torch.dtype = "fp32",
    mesh: DeviceMesh | None = None,
    prefetch: int = 1,
    offload: Offload | None = None,
    diloco: DiLoCo | None = None,
) -> MemoryBill:
    """The memory that `shard` with the same arguments would need on this rank; nothing is allocated or changed.

    The model may be on the meta device, and the process group may be torch's `fake` one of any size.
    """
    options = Options(units, precision, mesh, prefetch, offload or Offload(), diloco)
    prepared = prepare(model, optimizer, plan, options)
    stages = stages_of(model)
    step = StepSpec.least(prefetch, stages, 0 if stages is None else stages.buffer_bytes(model))
    return memory_bill(prepared.units, prepared.templates, options.offload, step)


def _most_bytes_of_a_step(units: Sequence[UnitLayout]) -> int:
    """More than gradients and what comes and goes in a step can take; the bill, which is exact, takes time to make."""
    return 32 * sum(bucket.spec.full_numel for unit in units for bucket in unit.buckets)


def _warn_of_orphans(units: Sequence[UnitLayout], optimizers: Sequence[Optimizer]) -> None:
    """Say which parameters get gradients that no optimizer takes."""
    names = orphans([member for unit in units for bucket in unit.buckets for member in bucket.members])
    if names and optimizers and dist.get_rank() == 0:
        warn(
            f"{len(names)} trainable parameters are in no optimizer, so that they keep their values: "
            f"{listed(names, 5)}. Give tz.shard, or tz.attach, an optimizer that has them, or freeze them with "
            "requires_grad_(False)."
        )


def _in_form_of(optimizer: OptimizerLike, built: list[Optimizer]) -> Any:
    """Optimizers as the user gave them: one, or a sequence of several."""
    if isinstance(optimizer, tuple):
        return getattr(optimizer, "_make", tuple)(built)  # a NamedTuple's constructor takes each by itself
    if isinstance(optimizer, list):
        return built
    return built[0] if built else None


def _open_store(model: nn.Module, prepared: Prepared, offload: Offload) -> Store:
    """Open host memory and files for what the model keeps there. Collective."""
    for activations in offloading_of(model):
        activations.keep_pinned(offload.pin)
    axes, buckets = prepared.sharding.axes, [bucket for unit in prepared.units for bucket in unit.buckets]
    need = need_of(buckets, prepared.templates, offload.cell_numel)
    local_ranks = _ranks_beside(prepared.mesh_axes)
    store = all_or_none(prepared.mesh_axes, lambda: Store(axes.device, offload, need, dist.get_rank(), local_ranks))
    if store.nvme is not None:
        return_freed()  # before anything large is built
    return store


def _ranks_beside(axes: Axes) -> int:
    """Number of ranks of the mesh on this host, as they hear of each other. Collective."""
    own = torch.tensor([zlib.crc32((boot_id() or socket.gethostname()).encode())], device=axes.device)
    return max(1, int((axes.rows(own, axes.whole_mesh) == own).sum()))


def _build_units(model: nn.Module, prepared: Prepared, store: Store) -> list[Unit]:
    """Make every unit: its values, and its memory, one after the other."""
    axes, laid_out = prepared.mesh_axes, {unit.name: unit for unit in prepared.units}
    values, units, ledger = InitialValues(model, axes, prepared.drawn), list[Unit](), prepared.tally.ledger
    for spec in prepared.drawn:
        fresh = values.draw(spec)
        if (unit := laid_out.get(spec.name)) is None:
            continue
        buckets: list[Bucket] = []
        for bucket in unit.buckets:
            loaded = [member.parameter for member in bucket.members if member.parameter not in fresh]
            synchronize(loaded, axes, (*bucket.spec.ranks, *bucket.axes.replica_axis))
            buckets.append(Bucket(bucket, store, ledger))
        units.append(Unit(unit, buckets))
    values.finish()
    for built in prepared.optimizers:
        values.hand_to(built)
    return units


def _make_engine(model: nn.Module, prepared: Prepared, units: Sequence[Unit], prefetch: int, store: Store) -> Engine:
    """Make the engine of these units: it moves them, and counts from here on."""
    sharding, tally = prepared.sharding, prepared.tally
    tally.traffic.count_along(exchanged_along(model))
    tally.reset()
    axes, stages = sharding.axes, stages_of(model)
    progress = Progress(Denominator(axes.size(axes.data)))
    meeting = (lambda label, number: meet(axes, progress, label, number)[0]) if weights_are_split(units) else None
    if stages is None:
        schedule = Schedule(units, prefetch, meeting, progress.denominator.divisor)
    else:
        chunks = stages.share_out([*map(parameters_of, units)])
        schedule = PipelineSchedule(units, chunks, prefetch, meeting, progress.denominator.divisor)
    return Engine(
        model=model,
        sharding=sharding,
        progress=progress,
        tally=tally,
        units=units,
        why_units=prepared.why_units,
        schedule=schedule,
        store=store,
        stages=stages,
        buffer_bytes=0 if stages is None else stages.buffer_bytes(model),
    )


def _intercept(model: nn.Module, engine: Engine) -> None:
    """Have what users do with the model, its parameters and gradients come to the engine; see `engine.interception`."""
    engine.hooks.attach(model)
    make_sharded_module(model, engine)
    show_gradients(model, engine)
    let_measure(engine)
