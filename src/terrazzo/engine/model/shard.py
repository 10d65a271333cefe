"""`tz.shard` and the functions that act on a sharded model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terrazzo.engine import device as devices
from terrazzo.engine.axes import Axes, data_mesh
from terrazzo.engine.bucket import Bucket
from terrazzo.engine.loop.hooks import Hooks
from terrazzo.engine.loop.pass_end import meet, meets
from terrazzo.engine.model.attach import check_several, put_on
from terrazzo.engine.model.checks import (
    check_agreement,
    check_device,
    check_dtypes,
    check_graphs,
    check_group,
    check_kind,
    check_mesh,
    check_model,
    check_offload,
    check_precision,
    check_versions,
    model_facts,
    optimizer_facts,
    together,
)
from terrazzo.engine.model.engine import Engine, engine_of
from terrazzo.engine.model.materialize import (
    check_initializable,
    initializer_of,
    materialize,
    materialize_buffers,
    move_buffers,
    synchronize,
)
from terrazzo.engine.model.module import make_sharded_module
from terrazzo.engine.model.stand_in import show_gradients
from terrazzo.engine.offload.needs import Templates, need_of
from terrazzo.engine.offload.settings import Offload
from terrazzo.engine.offload.store import Store
from terrazzo.engine.optim.clipping import clip_grad_norm
from terrazzo.engine.optim.foreign import watch_steps
from terrazzo.engine.optim.stock import assign_groups, check_optimizer, orphans, state_of
from terrazzo.engine.paper.bill import MemoryBill, memory_bill
from terrazzo.engine.paper.rehearsal import PaperStep
from terrazzo.engine.partition import Member, Units, UnitSpec, find_units, partition
from terrazzo.engine.place import Plan
from terrazzo.engine.precision import Precision
from terrazzo.engine.process.pages import give_back_freed, keep_freed
from terrazzo.engine.recipe import Recipe
from terrazzo.engine.schedule import Schedule
from terrazzo.engine.unit import Unit
from terrazzo.errors import BadInput, Misuse

__all__ = ["accumulate", "clip_grad_norm_", "estimate", "gathered", "shard"]

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", Plan, Precision)
OptimizerLike = Optimizer | Callable[[Any], Optimizer] | Sequence[Optimizer] | None


def shard(  # structure: signature fixed by the design
    model: M,
    optimizer: OptimizerLike = None,
    plan: Plan | str = "zero3",
    *,
    units: Units | None = None,
    precision: Precision | str = "fp32",
    mesh: DeviceMesh | None = None,
    prefetch: int = 1,
    offload: Offload | None = None,
) -> tuple[M, Any]:
    """Place a model's weights, gradients and optimizer state over ranks as `plan` says.

    Both objects are changed in place and returned: the model runs, and the optimizer steps, as before. Weights that
    differ between ranks take the first rank's values. A model on the meta device is given values unit by unit, so that
    no rank ever holds all of it.

    Args:
        model: any module with contiguous parameters. Freeze what is to be frozen before.
        optimizer: an elementwise `torch.optim` optimizer over `model.parameters()`, whose state is sharded with it; a
            callable that builds one from the parameters; several optimizers over disjoint parameters in a list, which
            come back in a list; or None. A warning names trainable parameters that none of them has.
        plan: a `Plan` or its name: `zero0` to `zero3`, `ddp`, `no_shard`, `full_shard`, `shard_grad_op`,
            `hybrid_shard`, `hybrid_shard_zero2`, `hfsdp`, `hpz`; each with `@cpu`, `@cpu-all`, `@nvme` or `@nvme-all`,
            of all units or, as in `zero3@cpu:0.7`, of a share of them.
        units: module classes or name globs that are gathered and reduced as one; found by themselves if None.
        precision: a `Precision` or its name: `fp32`, `bf16`, `bf16-pure`, `fp16`.
        mesh: axes named `dp_replicate`, `dp_shard`, `cp`; by default all ranks on one `dp_shard` axis.
        prefetch: how many units ahead of the running one are gathered; 0 for none.
        offload: how states that the plan places on `cpu` or `nvme` are kept and updated; see `tz.Offload`.

    Raises: `BadInput` or `Misuse` on every rank, before anything is changed.
    """
    options = _Options(units, precision, mesh, prefetch, offload or Offload())
    prepared = _prepare(model, optimizer, plan, options)
    recipe, planned = prepared.recipe, prepared.units
    _warn_of_orphans(planned, prepared.optimizers)
    store = _open_store(planned, prepared.templates, options.offload)
    if store.drive is not None:
        give_back_freed()  # before anything large is built
    _build_units(model, planned, store)

    meeting = (lambda label, number: meet(recipe.axes, label, [number])[0]) if meets(recipe) else None
    schedule = Schedule(planned, prefetch, meeting, recipe.axes.denominator)
    hooks = Hooks(planned, schedule, recipe.axes, recipe.precision)
    engine = Engine(
        plan=prepared.plan,
        recipe=recipe,
        units=planned,
        why_units=prepared.why,
        schedule=schedule,
        hooks=hooks,
        store=store,
        templates=prepared.templates,
    )
    for built in prepared.optimizers:
        put_on(engine, built, sum(len(driver.groups) for driver in engine.drivers))
    hooks.attach(model)
    make_sharded_module(model, engine)
    show_gradients(model, engine)
    watch_steps()
    if recipe.axes.device.type == "cpu":
        bill = engine.bill
        if store.drive is None:
            keep_freed(bill.grad_bytes + bill.transient_bytes)
    return model, _in_form_of(optimizer, prepared.optimizers)


def estimate(  # structure: signature fixed by that of shard
    model: nn.Module,
    optimizer: OptimizerLike = None,
    plan: Plan | str = "zero3",
    *,
    units: Units | None = None,
    precision: Precision | str = "fp32",
    mesh: DeviceMesh | None = None,
    prefetch: int = 1,
    offload: Offload | None = None,
) -> MemoryBill:
    """The memory that `shard` with the same arguments would need on this rank; nothing is allocated or changed.

    The model may be on the meta device, and the process group may be torch's `fake` one of any size.
    """
    options = _Options(units, precision, mesh, prefetch, offload or Offload())
    prepared = _prepare(model, optimizer, plan, options)
    return memory_bill(prepared.units, prepared.templates, options.offload, PaperStep(prefetch))


@dataclass(frozen=True)
class _Options:
    units: Units | None
    precision: Precision | str
    mesh: DeviceMesh | None
    prefetch: int
    offload: Offload


@dataclass(frozen=True)
class _Asked:
    """What this rank was told, checked as far as it can be alone."""

    plan: Plan
    precision: Precision
    specs: list[UnitSpec]
    why: str
    optimizers: list[Optimizer]


@dataclass(frozen=True)
class _Prepared:
    """What `shard` is about to do; nothing has been allocated or changed yet."""

    plan: Plan
    recipe: Recipe
    units: list[Unit]
    why: str
    optimizers: list[Optimizer]
    templates: Templates


def _prepare(model: nn.Module, optimizer: OptimizerLike, plan: Plan | str, options: _Options) -> _Prepared:
    """Collective: what one rank refuses all refuse."""
    check_group()
    mesh = _default_mesh() if options.mesh is None else options.mesh
    check_kind(mesh.device_type)
    axes = Axes(mesh)
    check_mesh(mesh, axes)
    check_versions(axes)
    asked = together(axes, functools.partial(_read, model, optimizer, plan, options, axes))
    facts = {"plan": str(asked.plan), "precision": repr(asked.precision), "prefetch": options.prefetch}
    facts |= {"offload step": options.offload.step, "offload block_mib": options.offload.block_mib}
    facts |= {"parameters": model_facts(asked.specs)}
    check_agreement(axes, {**facts, "optimizer": [optimizer_facts(each) for each in asked.optimizers]})
    return together(axes, lambda: _plan(asked, options, axes))


def _read(model: nn.Module, optimizer: OptimizerLike, plan: Plan | str, options: _Options, axes: Axes) -> _Asked:
    check_model(model)
    if options.prefetch < 0:
        raise BadInput(f"prefetch is {options.prefetch}; it counts units gathered ahead, so it must be 0 or more.")
    check_device(model, axes.device)
    plan = _one_of(Plan, plan, "plan").resolve(axes.names)
    precision = _one_of(Precision, options.precision, "precision")
    check_precision(precision, axes)
    check_dtypes(model, precision)
    names, why = find_units(model, options.units)
    specs = partition(model, names)
    check_initializable(model)
    return _Asked(plan, precision, specs, why, _build_optimizers(model, optimizer, specs))


def _plan(asked: _Asked, options: _Options, axes: Axes) -> _Prepared:
    recipe, built = Recipe(axes, asked.plan.over(axes.live(axes.names)), asked.precision), asked.optimizers
    planned = _plan_units(asked.specs, recipe, [number for number, each in enumerate(built) for _ in each.param_groups])
    check_graphs(planned, axes.device)
    check_offload({tier for unit in planned for tier in unit.buckets[0].tiers}, asked.precision, options.offload)
    check_several(len(built), [bucket for unit in planned for bucket in unit.trainable()], asked.precision)
    templates = [state_of(each, group, axes.device) for each in built for group in each.param_groups]
    return _Prepared(asked.plan, recipe, planned, asked.why, built, templates)


def _open_store(units: Sequence[Unit], templates: Templates, offload: Offload) -> Store:
    """Host memory and files for what these units keep there. Collective."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    axes = buckets[0].recipe.axes
    need = need_of(buckets, templates, offload.cell_numel)
    return together(axes, lambda: Store(axes.device, offload, need, dist.get_rank()))


@contextlib.contextmanager
def accumulate(model: nn.Module, *, local: bool | None = None) -> Iterator[None]:
    """Backward passes inside belong to micro-batches that are not the step's last.

    Args:
        local: add their gradients on this rank and send nothing (fewer bytes), or reduce each micro-batch to the plan's
            `grad` place (less memory). By default local where the plan does not split `grad`, else reduced.

    Raises: `BadInput` for `local=False` under a plan that keeps whole gradients.
    """
    engine = engine_of(model)
    before = engine.schedule.this_pass
    engine.sync(False, each=not engine.sums_locally(local))
    try:
        yield
    finally:
        engine.schedule.turn_to(before)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of all ranks by their global norm, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Call it on every rank, after the last micro-batch's backward. It takes all gradients of the model, whatever
    optimizers there are; `torch.nn.utils.clip_grad_norm_` takes those of the parameters that it is given.

    Args:
        max_norm: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`.
        norm_type: p of the p-norm; `float("inf")` for the maximum.
        error_if_nonfinite: raise `Diverged`, and scale nothing, where the norm is infinite or not a number.

    Returns:
        The norm before clipping, a 0-d fp32 tensor equal on all ranks.
    """
    engine = engine_of(model)
    if not max_norm > 0 or not norm_type > 0:
        raise BadInput(f"clip_grad_norm_ with max_norm {max_norm} and norm_type {norm_type}: both must be positive.")
    if any(bucket.gradient.unfinished for bucket in engine.trainable()):
        raise Misuse(
            "tz.clip_grad_norm_ was called while gradients were still being accumulated. Run the last micro-batch's "
            "backward outside 'with tz.accumulate(model)' first."
        )
    engine.hooks.wanted()
    for driver in engine.drivers:
        if driver.background is not None:
            driver.background.prepare_clipping(max_norm)
    return clip_grad_norm(engine.trainable(), engine.recipe, max_norm, float(norm_type), error_if_nonfinite)


@contextlib.contextmanager
def gathered(model: nn.Module, *, write: bool = False) -> Iterator[dict[str, Tensor]]:
    """Full parameters on every rank, by original name; call it on every rank.

    Args:
        write: take over what was written into them, which must be the same on every rank. Master weights change only
            where the value read from them was changed.
    """
    with engine_of(model).gathered(write) as parameters:
        yield parameters


def _one_of(kind: type[N], value: N | str, argument: str) -> N:
    if isinstance(value, str):
        return kind.named(value)
    if not isinstance(value, kind):
        raise BadInput(f"{argument} is {value!r}; pass a tz.{kind.__name__} or the name of one.")
    return value


def _default_mesh() -> DeviceMesh:
    return data_mesh(devices.kind_of_group(), dist.get_world_size())


def _build_optimizers(model: nn.Module, optimizer: OptimizerLike, specs: list[UnitSpec]) -> list[Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, list | tuple):
        built = list(optimizer)
    elif callable(optimizer) and not isinstance(optimizer, Optimizer):
        built = [optimizer(model.parameters())]
    else:
        built = [optimizer]
    for each in built:
        if not isinstance(each, Optimizer):
            raise BadInput(
                f"optimizer is a {type(each).__name__}; pass a torch.optim.Optimizer, a list of them or a callable "
                "that builds one."
            )
        check_optimizer(each)
    assign_groups(built, [member for spec in specs for member in spec.members])
    return built


def _warn_of_orphans(units: Sequence[Unit], optimizers: Sequence[Optimizer]) -> None:
    """Say which parameters get gradients that no optimizer takes."""
    names = orphans([member for unit in units for bucket in unit.buckets for member in bucket.members])
    if names and optimizers and dist.get_rank() == 0:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{len(names)} trainable parameters are in no optimizer, so that they keep their values: {listed}. Give "
            "tz.shard, or tz.attach, an optimizer that has them, or freeze them with requires_grad_(False).",
            stacklevel=3,
        )


def _in_form_of(given: OptimizerLike, built: list[Optimizer]) -> Any:
    """As the user gave them: one optimizer or a sequence of several."""
    if isinstance(given, list | tuple):
        return type(given)(built)
    return built[0] if built else None


def _plan_units(specs: list[UnitSpec], recipe: Recipe, owners: Sequence[int]) -> list[Unit]:
    """The units, with nothing allocated yet.

    Args:
        owners: for each param group the number of its optimizer.
    """
    units, names = [], tuple(spec.name for spec in specs)
    for index, spec in enumerate(specs):
        tiers = recipe.plan.tiers_of(index, len(specs))
        buckets = [Bucket(group, recipe, not spec.name, tiers) for group in _bucket_groups(spec.members, owners)]
        units.append(Unit(names, index, spec.module, buckets))
    return units


def _build_units(model: nn.Module, units: list[Unit], store: Store) -> None:
    """Give every unit its values and its memory, one after the other."""
    initialize, axes = initializer_of(model), units[0].buckets[0].recipe.axes
    bare = materialize_buffers(model, axes.device)
    for unit in units:
        members = [member for bucket in unit.buckets for member in bucket.members]
        materialize(members, initialize, axes.device)
        synchronize([member.parameter for member in members], axes)
        for bucket in unit.buckets:
            bucket.build(store)
    for module in bare:
        initialize(module, ())
    move_buffers(model, axes)
    axes.ledger.peak_bytes = axes.ledger.live_bytes = 0
    axes.traffic.reset()


def _bucket_groups(members: list[Member], owners: Sequence[int]) -> list[list[Member]]:
    """Members that can share a flat space: trainable ones by optimizer, in order of their param groups, then frozen
    ones by dtype.
    """
    groups: dict[tuple[bool, int, str], list[Member]] = {}
    for member in sorted(members, key=lambda member: member.group if member.trainable else -1):
        dtype = member.parameter.dtype
        owner = owners[member.group] if member.trainable and member.group >= 0 else -1
        key = (not member.trainable, owner, "" if dtype.is_floating_point else str(dtype))
        groups.setdefault(key, []).append(member)
    return [groups[key] for key in sorted(groups)]
