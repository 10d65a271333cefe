"""An estimate of one setup, put together: the one way for a plan that was named and for every plan of a search."""

from __future__ import annotations

from terrazzo.planner.estimate import Estimate
from terrazzo.planner.figures import Memory
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.machine.calibration import Calibration, measured_memory
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.step import time_of
from terrazzo.planner.traffic.volumes import traffic_of

__all__ = ["assemble", "estimate", "memory_under"]


def estimate(setup: Setup, calibration: Calibration | None = None) -> Estimate:
    """Memory, traffic and time of one setup, with the warnings of the gate.

    Errors: `BadInput` for a setup that cannot be. What the gate refuses is estimated all the same: see `gate.findings`.
    """
    return assemble(setup, memory_under(setup, calibration), calibration)


def memory_under(setup: Setup, calibration: Calibration | None) -> Memory:
    """Memory of one setup, with what was measured. Errors: `BadInput` for a setup that cannot be."""
    check(setup)
    memory = memory_of(setup)
    return memory if calibration is None else measured_memory(memory, calibration, setup)


def assemble(setup: Setup, memory: Memory, calibration: Calibration | None) -> Estimate:
    """Traffic and time of a checked setup beside its memory, with what the gate and the shapes warn of."""
    traffic = traffic_of(setup)
    time = time_of(setup, traffic, calibration)
    warnings = _uncounted(setup) + tuple(str(finding) for finding in findings(setup))
    if isinstance(time, str):
        return Estimate(setup, memory, traffic, None, time, warnings)
    return Estimate(setup, memory, traffic, time, "", warnings)


def _uncounted(setup: Setup) -> tuple[str, ...]:
    """Of a model whose blocks are not known, what its memory leaves out."""
    if not setup.model.aligned or (all(unit.block for unit in setup.model.blocks) and setup.model.blocks):
        return ()
    unknown = f"What the blocks of {setup.model.name} compute is not known"
    return (f"{unknown}: activations and logits are not counted, and it may not fit where this says it does.",)
