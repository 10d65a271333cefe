"""Puts stock optimizers on a sharded model, at `tz.shard` or later, one or several."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.interception.sharded_optimizer import make_sharded_optimizer
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.engine.model.engine import Engine, engine_of
from terrazzo.engine.offload.background_updates import BackgroundUpdates
from terrazzo.engine.offload.needs import further_moment_bytes, moment_windows
from terrazzo.engine.offload.updater import Updater
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.segments.swapped_groups import SwappedGroups
from terrazzo.engine.optim.stock.param_groups import choose_kernel
from terrazzo.engine.optim.stock.template import Templates, drop_meta_states
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.sharding.compared_facts import ComparedFacts, optimizer_facts
from terrazzo.engine.sharding.optimizer_checks import assign_checked, checked_templates, templates_of
from terrazzo.engine.states.restore import FullStates, restore_optimizer
from terrazzo.errors import Misuse

__all__ = ["attach", "put_on"]

Opt = TypeVar("Opt", bound=Optimizer)


@labelled(collective_call("tz.attach(model, optimizer)"))
def attach(model: nn.Module, optimizer: Opt) -> Opt:
    """Shard an optimizer that was built over parameters of a model after `tz.shard`. Collective.

    It is changed in place, as by `tz.shard`, which takes it with less host memory for states on `cpu`. A model may have
    several, over disjoint parameters: each steps, and forgets the gradients of, its own.

    Raises:
        BadInput: as from `tz.shard`, or the parameters have an optimizer; on every rank where ranks give others.
        Misuse: a model whose plan places states of optimizers on `nvme`.
    """
    engine = engine_of(model)
    engine.drivers.drop_gone()
    axes, first, earlier = engine.axes, engine.drivers.next_group, engine.drivers.templates
    members = [member for bucket in engine.buckets() for member in bucket.members]

    def check() -> Templates:
        if any(bucket.spec.tiers.optim == "nvme" for bucket in engine.trainable()):
            raise Misuse("tz.attach cannot place optimizer state on nvme: give the optimizer to tz.shard.")
        assign_checked([optimizer], members, axes.device, first)
        return checked_templates([optimizer], engine.trainable(), engine.sharding, engine.optimizers, earlier)

    try:
        templates = all_or_none(axes, check)
        stepped = [[member.name, member.group] for member in members if member.group >= first]
        (optimizer_facts([optimizer]) | ComparedFacts({}, {"parameters": stepped})).check_alike(axes)
        all_templates = [*earlier, *templates]
        all_or_none(axes, lambda: engine.store.grow(further_moment_bytes(engine.trainable(), all_templates)))
    except BaseException:
        engine.drivers.drop_gone()
        raise
    put_on(engine, optimizer, templates)
    return optimizer


def put_on(engine: Engine, optimizer: Optimizer, templates: Templates) -> None:
    """Put the optimizer on the engine's master weights, with whatever state it had.

    Args:
        templates: what is kept for a parameter of each of its param groups.
    """
    drop_meta_states(optimizer)
    groups = SwappedGroups(optimizer, engine.drivers.next_group)
    stepped = [
        bucket for bucket in engine.trainable() if any(member.group in groups.numbers for member in bucket.members)
    ]
    off_device = any(bucket.spec.updated_off_device for bucket in stepped)
    if off_device or devices.is_cuda(engine.axes.device):
        choose_kernel(optimizer)
        templates = templates_of(optimizer, engine.axes.device)
    states = {
        member.name: dict(optimizer.state.pop(member.parameter))
        for bucket in engine.buckets()
        for member in bucket.members
        if member.parameter in optimizer.state
    }
    of_all = [*engine.drivers.templates, *templates]
    for bucket in (bucket for bucket in stepped if bucket.spec.moments_apart):
        bucket.moments.make_room(engine.store, moment_windows(bucket, of_all, engine.store.settings.cell_numel))
    updates = None
    if off_device:
        updater, mode = Updater(engine.store), engine.store.settings.step
        updates = BackgroundUpdates(engine.units, engine.schedule, updater, mode, groups)
    driver = OptimizerDriver(optimizer, engine, templates, groups, updates)
    if states:
        restore_optimizer(driver, FullStates(states))
    make_sharded_optimizer(optimizer, driver)
    engine.drivers.add(driver, templates)
