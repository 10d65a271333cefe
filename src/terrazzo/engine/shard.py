"""`tz.shard` and the functions that act on a sharded model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from terrazzo.engine.axes import Axes
from terrazzo.engine.bill import MemoryBill, PaperStep, memory_bill
from terrazzo.engine.bucket import Bucket, Member
from terrazzo.engine.checks import (
    check_agreement,
    check_device,
    check_mesh,
    check_model,
    check_offload,
    check_precision,
    model_facts,
    optimizer_facts,
    together,
)
from terrazzo.engine.engine import Engine, engine_of
from terrazzo.engine.hooks import Hooks
from terrazzo.engine.materialize import check_initializable, initializer_of, materialize, move_buffers, synchronize
from terrazzo.engine.module import adopt_model
from terrazzo.engine.needs import Templates, moment_bytes, moment_names, open_store
from terrazzo.engine.optimizer import (
    OptimizerDriver,
    adopt,
    assign_groups,
    check_optimizer,
    choose_kernel,
    clip_grad_norm,
    state_of,
)
from terrazzo.engine.order import Order
from terrazzo.engine.pages import give_back_freed, keep_freed
from terrazzo.engine.partition import Units, UnitSpec, find_units, partition
from terrazzo.engine.place import Place, Plan
from terrazzo.engine.precision import Precision
from terrazzo.engine.recipe import Recipe
from terrazzo.engine.schedule import Schedule
from terrazzo.engine.state import reading, restore_optimizer
from terrazzo.engine.store.settings import Offload
from terrazzo.engine.store.store import Store
from terrazzo.engine.unit import Unit
from terrazzo.engine.update import Updater
from terrazzo.errors import BadInput, Misuse

__all__ = ["accumulate", "attach", "clip_grad_norm_", "estimate", "gathered", "shard"]

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)
N = TypeVar("N", Plan, Precision)
OptimizerLike = Optimizer | Callable[[Any], Optimizer] | None


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
            callable that builds one from the parameters; or None.
        plan: a `Plan` or its name: `zero0` to `zero3`, `ddp`, `no_shard`, `full_shard`, `shard_grad_op`,
            `hybrid_shard`, `hybrid_shard_zero2`, `hfsdp`, `hpz`; each with `@cpu`, `@cpu-all`, `@nvme` or `@nvme-all`.
        units: module classes or name globs that are gathered and reduced as one; found by themselves if None.
        precision: a `Precision` or its name: `fp32`, `bf16`, `bf16-pure`, `fp16`.
        mesh: axes named `dp_replicate`, `dp_shard`, `cp`; by default all ranks on one `dp_shard` axis.
        prefetch: how many units ahead of the running one are gathered; 0 for none.
        offload: how states that the plan places on `cpu` or `nvme` are kept and updated; see `tz.Offload`.

    Errors: `BadInput` or `Misuse` on every rank, before anything is changed.
    """
    prepared = _prepare(model, optimizer, plan, _Options(units, precision, mesh, prefetch, offload or Offload()))
    recipe, planned, built = prepared.recipe, prepared.units, prepared.optimizer
    store = open_store(prepared.units, prepared.templates, offload or Offload())
    if store.drive is not None:
        give_back_freed()  # before anything large is built
    _build_units(model, planned, store)

    schedule = Schedule(planned, Order.of_registration(planned), prefetch)
    hooks = Hooks(planned, schedule, recipe.axes, recipe.precision, None)
    engine = Engine(prepared.plan, recipe, planned, prepared.why, schedule, hooks, store, prepared.templates)
    schedule.denominator = _weak_call(engine.gradient_denominator)
    if built is not None:
        _drive(engine, built)
    hooks.attach(model)
    adopt_model(model, engine)
    if recipe.axes.device.type == "cpu":
        bill = engine.bill
        if store.drive is None:
            keep_freed(bill.grad_bytes + bill.transient_bytes)
    return model, built


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
class _Prepared:
    """What `shard` is about to do; nothing has been allocated or changed yet."""

    plan: Plan
    recipe: Recipe
    units: list[Unit]
    why: str
    optimizer: Optimizer | None
    templates: Templates


def _prepare(model: nn.Module, optimizer: OptimizerLike, plan: Plan | str, options: _Options) -> _Prepared:
    check_model(model)
    if options.prefetch < 0:
        raise BadInput(f"prefetch is {options.prefetch}; it counts units gathered ahead, so it must be 0 or more.")
    mesh = _default_mesh() if options.mesh is None else options.mesh
    axes = Axes(mesh)
    check_mesh(mesh, axes)
    check_device(model, axes.device)
    plan = _one_of(Plan, plan, "plan").resolve(axes.names)
    precision = _one_of(Precision, options.precision, "precision")
    check_precision(precision, axes.device)
    names, why = find_units(model, options.units)
    specs = partition(model, names)
    check_initializable(model, [member for spec in specs for member in spec.members])
    built = _build_optimizer(model, optimizer, specs)
    facts = {"plan": str(plan), "precision": repr(precision), "prefetch": options.prefetch}
    facts |= {"offload step": options.offload.step, "offload block_mib": options.offload.block_mib}
    check_agreement(axes, {**facts, "parameters": model_facts(specs), "optimizer": optimizer_facts(built)})
    recipe = Recipe(axes, _live(plan, axes), precision)
    planned = _plan_units(specs, recipe)
    check_offload({tier for unit in planned for tier in unit.buckets[0].tiers}, precision, options.offload)
    templates = [state_of(built, group) for group in built.param_groups] if built is not None else []
    return _Prepared(plan, recipe, planned, why, built, templates)


def attach(model: nn.Module, optimizer: Opt) -> Opt:
    """Shard an optimizer that was built over the parameters of a model after `tz.shard(model, None)`. Collective.

    It is changed in place, as by `tz.shard`, which takes it with less host memory for states on `cpu`.

    Errors: `BadInput` as from `tz.shard`; `Misuse` for a model that has an optimizer, or with states on drives.
    """
    engine = engine_of(model)
    if engine.optimizer is not None:
        raise Misuse(
            f"A {type(engine.optimizer).__name__} drives this {type(model).__name__} already, and a model has one "
            "optimizer: give it several param groups."
        )
    if any(bucket.tiers.optim == "nvme" for bucket in engine.trainable()):
        raise Misuse("tz.attach cannot place optimizer state on drives: give the optimizer to tz.shard.")
    check_optimizer(optimizer)
    for bucket in engine.trainable():
        for member in bucket.members:
            member.group = -1
    assign_groups(optimizer, [member for bucket in engine.buckets() for member in bucket.members])
    check_agreement(engine.axes, {"optimizer": optimizer_facts(optimizer)})
    engine.templates = [state_of(optimizer, group) for group in optimizer.param_groups]
    together(engine.axes, lambda: engine.store.grow(moment_bytes(engine.trainable(), engine.templates)))
    _drive(engine, optimizer)
    return optimizer


@contextlib.contextmanager
def accumulate(model: nn.Module, *, local: bool | None = None) -> Iterator[None]:
    """Backward passes inside belong to micro-batches that are not the step's last.

    Args:
        local: add their gradients on this rank and send nothing (fewer bytes), or reduce each micro-batch to the plan's
            `grad` place (less memory). By default local where the plan does not split `grad`, else reduced.

    Errors: `BadInput` for `local=False` under a plan that keeps whole gradients.
    """
    engine = engine_of(model)
    schedule = engine.schedule
    before = schedule.accumulating, schedule.reduce_each
    schedule.accumulating, schedule.reduce_each = True, not engine.sums_locally(local)
    try:
        yield
    finally:
        schedule.accumulating, schedule.reduce_each = before


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients of all ranks by their global norm, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Call it on every rank, after the last micro-batch's backward.

    Args:
        max_norm: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`.
        norm_type: p of the p-norm; `float("inf")` for the maximum.

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
    if engine.driver is not None and engine.driver.background is not None:
        engine.driver.background.prepare_clipping(max_norm)
    return clip_grad_norm(engine.trainable(), engine.recipe, max_norm, float(norm_type))


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
    device = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()) else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def _live(plan: Plan, axes: Axes) -> Plan:
    rows = {state: Place(axes.live(place.axes), place.tier) for state, place in plan.places().items()}
    return Plan(**rows, name=plan.name)


def _build_optimizer(model: nn.Module, optimizer: OptimizerLike, specs: list[UnitSpec]) -> Optimizer | None:
    built = optimizer(model.parameters()) if callable(optimizer) and not isinstance(optimizer, Optimizer) else optimizer
    if built is None:
        return None
    if not isinstance(built, Optimizer):
        raise BadInput(
            f"optimizer is a {type(built).__name__}; pass a torch.optim.Optimizer or a callable that builds one."
        )
    check_optimizer(built)
    assign_groups(built, [member for spec in specs for member in spec.members])
    return built


def _plan_units(specs: list[UnitSpec], recipe: Recipe) -> list[Unit]:
    """The units, with nothing allocated yet."""
    units = []
    for index, spec in enumerate(specs):
        tiers = recipe.tiers(index, len(specs))
        buckets = [Bucket(group, recipe, not spec.name, tiers) for group in _bucket_groups(spec.members)]
        units.append(Unit(spec.name, index, spec.module, buckets))
    return units


def _build_units(model: nn.Module, units: list[Unit], store: Store) -> None:
    """Give every unit its values and its memory, one after the other."""
    initialize, axes = initializer_of(model), units[0].buckets[0].recipe.axes
    for unit in units:
        members = [member for bucket in unit.buckets for member in bucket.members]
        materialize(members, initialize, axes.device)
        synchronize([member.parameter for member in members], axes)
        for bucket in unit.buckets:
            bucket.build(store)
    move_buffers(model, initialize, axes)
    axes.ledger.peak_bytes = axes.ledger.live_bytes = 0
    axes.traffic.reset()


def _drive(engine: Engine, optimizer: Optimizer) -> None:
    """Put the optimizer on the engine's master weights, with whatever state it had."""
    states = {
        member.name: dict(optimizer.state.pop(member.parameter))
        for bucket in engine.trainable()
        for member in bucket.members
        if member.parameter in optimizer.state
    }
    optimizer.register_step_pre_hook(_tell(weakref.ref(engine.hooks)))
    engine.driver = OptimizerDriver(optimizer, engine.units, engine.recipe, engine.schedule, engine.publish)
    engine.hooks.scaler = engine.driver.scaler
    apart = [bucket for bucket in engine.trainable() if bucket.updated_apart]
    if apart:
        choose_kernel(optimizer)
        engine.templates = [state_of(optimizer, group) for group in optimizer.param_groups]
    for bucket in apart:
        bucket.build_moments(engine.store, moment_names(bucket, engine.templates))
    if apart:
        engine.driver.update_apart(Updater(engine.store), engine.store.settings.step)
    if states:
        restore_optimizer(engine.driver, engine.templates, reading(states))
    adopt(optimizer, engine.driver)


def _tell(hooks: weakref.ref[Hooks]) -> Callable[..., None]:
    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (live := hooks()) is not None:
            live.wanted()

    return step


def _weak_call(method: Callable[[], float]) -> Callable[[], float]:
    """`method`, without keeping its owner alive."""
    reference = weakref.WeakMethod(method)

    def call() -> float:
        live = reference()
        assert live is not None, "the model is gone"
        return live()

    return call


def _bucket_groups(members: list[Member]) -> list[list[Member]]:
    """Members that can share a flat space: trainable ones by param group, then frozen ones by dtype."""
    groups: dict[tuple[bool, str], list[Member]] = {}
    for member in sorted(members, key=lambda member: member.group if member.trainable else -1):
        dtype = member.parameter.dtype
        key = (not member.trainable, "" if dtype.is_floating_point else str(dtype))
        groups.setdefault(key, []).append(member)
    return [groups[key] for key in sorted(groups)]
