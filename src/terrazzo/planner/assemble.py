"""An estimate of one setup, put together: the one way for a plan that was named and for every plan of a search."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from terrazzo.files import GIB
from terrazzo.planner.figures import MemoryFigures, TimeFigures, TrafficFigures
from terrazzo.planner.gate.gate import objections
from terrazzo.planner.gate.rule import Objection
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.text.blocks import TableColumn, TextBlock, TextLine, TextTable, plain
from terrazzo.planner.text.terms import memory_blocks, pace_line, time_blocks, traffic_blocks
from terrazzo.planner.text.words import blocker, setup_text, verdict
from terrazzo.planner.timing.calibration import Calibration, measured_memory
from terrazzo.planner.timing.step import time_of
from terrazzo.planner.traffic.volumes import traffic_of

__all__ = ["Edit", "Estimate", "assemble", "estimate", "memory_under"]

BARE = (
    "Of a number of parameters model states alone are counted: activations, buffers and libraries come on top, and it "
    "may not fit where these do. Name a model, such as llama3-8b or a config.json, for all of it."
)
SEVERITIES = {"refuse": "known not to work", "planned": "not runnable yet", "warn": "works badly"}


@dataclass(frozen=True)
class Estimate:
    """Memory, traffic and time of a setup.

    Attributes:
        time: None with `no_time` saying why, where nothing can be said.
        objections: what is known against the setup in the framework that is to run it, by default Terrazzo.
        notes: what was assumed, and what the figures leave out.
        edits: of what does not fit, the nearest changes with which it does, if they were looked for.
    """

    setup: Setup
    memory: MemoryFigures
    traffic: TrafficFigures
    time: TimeFigures | None = None
    no_time: str = ""
    objections: tuple[Objection, ...] = ()
    notes: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Notes and objections in words."""
        return (*self.notes, *map(str, self.objections))

    def __str__(self) -> str:
        """The report that `terrazzo plan` prints."""
        return plain(self.blocks()).rstrip()

    def blocks(self) -> list[TextBlock]:
        """The whole of it: what cannot run, or not yet, stands above everything."""
        above = {"refuse": "bold red", "planned": "bold yellow"}
        halting = [one for severity in above for one in self.objections if one.severity == severity]
        others = [one for one in self.objections if one.severity not in above]
        blocks: list[TextBlock] = [
            TextLine(f"{SEVERITIES[one.severity]}: {one}", above[one.severity]) for one in halting
        ]
        blocks.append(TextLine(verdict(self.memory), _verdict_style(self.memory)))
        blocks += [TextLine(why, "bold red")] if (why := blocker(self.memory)) else []
        blocks.append(TextLine(setup_text(self.setup)))
        if self.time or self.no_time:
            blocks.append(pace_line(self.time) if self.time else TextLine(self.no_time, "yellow"))
        blocks += [TextLine(f"{SEVERITIES[one.severity]}: {one}", "yellow") for one in others]
        blocks += [TextLine(f"note: {note}", "yellow") for note in self.notes]
        blocks += [TextLine("\nwhat would run, each of them planned", "bold"), _edits(self.edits)] if self.edits else []
        blocks += memory_blocks(self.memory) + traffic_blocks(self.traffic)
        return blocks + (time_blocks(self.time) if self.time else [])


@dataclass(frozen=True)
class Edit:
    """A change of a plan.

    Attributes:
        options: of the command line, such as `--ac full`.
        estimate: of the plan with them.
        cost: what that takes against the plan without, in words.
    """

    options: str
    estimate: Estimate
    cost: str


def _edits(edits: tuple[Edit, ...]) -> TextTable:
    columns = (
        TableColumn("with"),
        TableColumn("GiB", "right", 5),
        TableColumn("upper", "right", 3),
        TableColumn("fits", keep=7),
        TableColumn("at the cost of"),
    )
    return TextTable(columns, tuple(map(_edit, edits)), wrap=True)


def _edit(edit: Edit) -> tuple[str, ...]:
    memory = edit.estimate.memory
    fits = "surely" if memory.fits_surely else "expected" if memory.fits else "?"
    expected, upper = (f"{value / GIB:,.1f}" for value in (memory.rooms[0].expected, memory.rooms[0].upper))
    return (edit.options, expected, upper, fits, edit.cost)


def _verdict_style(memory: MemoryFigures) -> str:
    if memory.fits is False:
        return "bold red"
    return "bold green" if memory.fits_surely else "bold yellow"


def estimate(setup: Setup, calibration: Calibration | None = None) -> Estimate:
    """Memory, traffic and time of one setup, with what the gate knows against it.

    Raises:
        BadInput: a setup that cannot be. What the gate refuses is estimated all the same: see `gate.objections`.
    """
    return assemble(setup, memory_under(setup, calibration), calibration, objections(setup))


def memory_under(setup: Setup, calibration: Calibration | None) -> MemoryFigures:
    """Memory of one setup, with what was measured. Raises: `BadInput` for a setup that cannot be."""
    check(setup)
    memory = memory_of(setup)
    return memory if calibration is None else measured_memory(memory, calibration, setup)


def assemble(
    setup: Setup, memory: MemoryFigures, calibration: Calibration | None, known: tuple[Objection, ...]
) -> Estimate:
    """Traffic and time of a checked setup beside its memory and what is `known` against it."""
    traffic = traffic_of(setup)
    time, notes = time_of(setup, traffic, calibration), _uncounted(setup)
    if isinstance(time, str):
        return Estimate(setup, memory, traffic, None, time, known, notes)
    return Estimate(setup, memory, traffic, time, "", known, notes)


def _uncounted(setup: Setup) -> tuple[str, ...]:
    """What figures leave out: of a model whose blocks are not known its activations, of a frozen one where they end."""
    if setup.model.bare:
        return (BARE,)
    if not setup.model.computes:
        unknown = f"What the blocks of {setup.model.name} compute is not known"
        return (f"{unknown}: activations and logits are not counted, and it may not fit where this says it does.",)
    return (*_in_front_of_trained(setup), *_shared_and_frozen(setup))


def _in_front_of_trained(setup: Setup) -> tuple[str, ...]:
    """Of blocks that train nothing, behind nothing that does: no gradient goes back through them."""
    frozen = takewhile(lambda unit: not any(tensor.trainable for tensor in unit.tensors), setup.model.blocks)
    still = sum(unit.count for unit in frozen)
    if not setup.freeze or not still:
        return ()
    first = f"Nothing is trained in the first {still} of {setup.model.layers} blocks"
    less = "no gradient goes back through them, and they take less time and memory than is counted here"
    return (f"{first}. Where the embedding is frozen too, {less}.",)


def _shared_and_frozen(setup: Setup) -> tuple[str, ...]:
    if setup.mesh.tp * setup.mesh.cp == 1 or setup.model.trainable_numel == setup.model.numel:
        return ()
    where = "how far back gradients of activations go is known once a pass of the model is run"
    return (f"Some weights are frozen, and traffic along tp and cp is given as if all were trained: {where}.",)
