"""What torch's FSDP2 lets a program do to single units by hand: gather, put back, say which backward reduces."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.engine import Engine

__all__ = ["gather", "gather_ahead", "has_replicas", "put_back", "reduces", "set_reduces"]


def gather(engine: Engine, module: object) -> Callable[[], None]:
    """Gather the weights of a module's own unit, before its next forward, which frees them; every rank must.

    Returns:
        Waits until they are here.
    """
    for unit in (unit for unit in engine.units if unit.module is module):
        engine.schedule.gather_early(unit)
        return unit.weights.wait
    return lambda: None


def put_back(engine: Engine, module: object) -> None:
    """Give back the memory of the gathered weights of a module's own unit."""
    for unit in (unit for unit in engine.units if unit.module is module):
        engine.schedule.put_back(unit)


def gather_ahead(engine: Engine, count: int) -> None:
    """From now on, gather at least so many units ahead of the running one."""
    engine.schedule.gather_ahead(count)


def reduces(engine: Engine) -> bool:
    """Whether the next backward pass is that of a step's last micro-batch."""
    return engine.schedule.fate is engine.sharding.fate_of(last=True)


def set_reduces(engine: Engine, required: bool, *, each: bool) -> None:
    """Say what backward passes are from now on.

    Args:
        required: of a step's last micro-batch, which finishes its gradients; else of one before.
        each: reduce every micro-batch before the last, too, where `grad` is split; else add it up on this rank.
    """
    engine.schedule.set_fate(engine.sharding.fate_of(required, not each))


def has_replicas(engine: Engine) -> bool:
    """Whether several ranks hold the same part of the optimizer state."""
    return len(engine.sharding.plan.optim.axes) < len(engine.axes.live(engine.axes.data))
