"""An estimate of one setup, put together: the one way for a setup that was named and for every one of a search."""

from __future__ import annotations

from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.gate.rule import PlanFinding
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration, measured_memory
from terrazzo.planner.timing.step import time_of
from terrazzo.planner.traffic.volumes import traffic_of

__all__ = ["assemble", "estimate", "memory_under"]

BARE = (
    "Of a number of parameters model states alone are counted: activations, buffers and libraries come on top, and it "
    "may not fit where these do. Name a model, such as llama3-8b or a config.json, for all of it."
)


def estimate(setup: Setup, calibration: Calibration | None = None) -> Estimate:
    """Memory, traffic and time of one setup, with what the gate knows against it.

    Raises:
        BadInput: a setup that cannot be. What the gate refuses is estimated all the same: see `gate.findings`.
    """
    return assemble(setup, memory_under(setup, calibration), calibration, findings(setup))


def memory_under(setup: Setup, calibration: Calibration | None) -> MemoryFigures:
    """Memory of one setup, with what was measured. Raises: `BadInput` for a setup that cannot be."""
    check(setup)
    memory = memory_of(setup)
    return memory if calibration is None else measured_memory(memory, calibration, setup)


def assemble(
    setup: Setup, memory: MemoryFigures, calibration: Calibration | None, known: tuple[PlanFinding, ...]
) -> Estimate:
    """Traffic and time of a checked setup beside its memory and what is `known` against it."""
    traffic = traffic_of(setup)
    time, notes = time_of(setup, traffic, calibration), _notes(setup)
    if isinstance(time, str):
        return Estimate(setup, memory, traffic, None, time, known, notes)
    return Estimate(setup, memory, traffic, time, "", known, notes)


def _notes(setup: Setup) -> tuple[str, ...]:
    """What figures leave out of a model whose blocks are not known, and what they count of one with frozen parts."""
    if setup.model.bare:
        return (BARE,)
    if not setup.model.computes:
        unknown = f"What the blocks of {setup.model.name} compute is not known"
        return (f"{unknown}: activations and logits are not counted, and it may not fit where this says it does.",)
    return (*_in_front_of_trained(setup), *_shared_and_frozen(setup))


def _in_front_of_trained(setup: Setup) -> tuple[str, ...]:
    """A note on blocks that train nothing, behind nothing that does: no gradient goes back through them."""
    if not (first := _forward_only(setup)):
        return ()
    where = f"in the first {first} of {setup.model.layers} blocks or in front of them"
    return (f"Nothing is trained {where}: they run forward alone, and keep no activations.",)


def _shared_and_frozen(setup: Setup) -> tuple[str, ...]:
    if setup.mesh.tp * setup.mesh.cp == 1 or setup.model.trainable_numel == setup.model.numel:
        return ()
    first = _forward_only(setup)
    which = f"all behind the first {first} blocks" if first else "all"
    where = "how far back gradients of activations go is known once a pass of the model is run"
    return (f"Some weights are frozen, and traffic along tp and cp is given as if {which} were trained: {where}.",)


def _forward_only(setup: Setup) -> int:
    """How many blocks no gradient goes back through, which are the first ones."""
    return sum(unit.count for unit in setup.model.repeated if unit.forward_only)
