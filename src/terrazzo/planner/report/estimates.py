"""What is said of one setup: memory, traffic, time and findings, and how they read."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.messages import GIB
from terrazzo.planner.figures import MemoryFigures, TimeFigures, TrafficFigures
from terrazzo.planner.gate.rule import PlanFinding
from terrazzo.planner.report.blocks import TableColumn, TextBlock, TextLine, TextTable, plain
from terrazzo.planner.report.terms import memory_blocks, pace_line, time_blocks, traffic_blocks
from terrazzo.planner.report.words import blocker, fits_text, setup_text, verdict
from terrazzo.planner.setup.setup import Setup

__all__ = ["Edit", "Estimate"]

SEVERITIES = {"refuse": "known not to work", "planned": "not runnable yet", "warn": "works badly"}
HALTING = {"refuse": "bold red", "planned": "bold yellow"}
"""How the severities are printed with which nothing runs."""


@dataclass(frozen=True)
class Estimate:
    """Memory, traffic and time of a setup.

    Attributes:
        time: None with `no_time` saying why, where nothing can be said.
        findings: what is known against the setup in the framework that is to run it, by default Terrazzo.
        notes: what was assumed, what the figures leave out, and what they count of frozen parts.
        edits: of what does not fit, the nearest changes with which it does, if they were looked for.
    """

    setup: Setup
    memory: MemoryFigures
    traffic: TrafficFigures
    time: TimeFigures | None = None
    no_time: str = ""
    findings: tuple[PlanFinding, ...] = ()
    notes: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()

    @property
    def runs_now(self) -> bool:
        """Whether the framework runs it as it is: nothing in `findings` but warnings."""
        return all(one.severity not in HALTING for one in self.findings)

    def __str__(self) -> str:
        """The report that `terrazzo plan` prints."""
        return plain(self.blocks()).rstrip()

    def blocks(self) -> list[TextBlock]:
        """The whole of it: what cannot run, or not yet, stands above everything."""
        return [*self.halting_lines(), self.verdict_line(), *self.detail_blocks()]

    def halting_lines(self) -> list[TextLine]:
        """Why it cannot run, or not yet; none where it does."""
        halting = [one for severity in HALTING for one in self.findings if one.severity == severity]
        return [TextLine(f"{SEVERITIES[one.severity]}: {one}", HALTING[one.severity]) for one in halting]

    def verdict_line(self) -> TextLine:
        """Whether it fits."""
        return TextLine(verdict(self.memory), _verdict_style(self.memory))

    def detail_blocks(self) -> list[TextBlock]:
        """All that stands below."""
        others = [one for one in self.findings if one.severity not in HALTING]
        blocks: list[TextBlock] = []
        blocks += [TextLine(why, "bold red")] if (why := blocker(self.memory)) else []
        blocks.append(TextLine(setup_text(self.setup)))
        if self.time or self.no_time:
            blocks.append(pace_line(self.time) if self.time else TextLine(self.no_time, "yellow"))
        blocks += [TextLine(f"{SEVERITIES[one.severity]}: {one}", "yellow") for one in others]
        blocks += [TextLine(f"note: {note}", "yellow") for note in self.notes]
        blocks += [TextLine("\nwhat would run, each of them planned", "bold"), _edits(self.edits)] if self.edits else []
        blocks += memory_blocks(self.memory, self.setup) + traffic_blocks(self.traffic)
        return blocks + (time_blocks(self.time) if self.time else [])


@dataclass(frozen=True)
class Edit:
    """A change of a setup.

    Attributes:
        options: of the command line, such as `--ac full`.
        estimate: of the setup with them.
        cost: what that takes against the setup without, in words.
    """

    options: str
    estimate: Estimate
    cost: str


def _edits(edits: tuple[Edit, ...]) -> TextTable:
    columns = (
        TableColumn("with"),
        TableColumn("GiB expected", "right", 5),
        TableColumn("at most", "right", 3),
        TableColumn("fits", keep=7),
        TableColumn("at the cost of"),
    )
    return TextTable(columns, tuple(map(_edit, edits)), wrap=True)


def _edit(edit: Edit) -> tuple[str, ...]:
    memory = edit.estimate.memory
    expected, most = (f"{value / GIB:,.1f}" for value in (memory.expected_bytes, memory.most_bytes))
    return (edit.options, expected, most, fits_text(memory), edit.cost)


def _verdict_style(memory: MemoryFigures) -> str:
    if memory.fits is False:
        return "bold red"
    return "bold green" if memory.fits_surely else "bold yellow"
