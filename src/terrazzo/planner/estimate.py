"""What the planner says of one setup, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.planner.figures import Memory, Time, Traffic
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.gate.stack import Finding
from terrazzo.planner.report.blocks import Block, Line, plain
from terrazzo.planner.report.text import memory_blocks, pace_line, time_blocks, traffic_blocks
from terrazzo.planner.report.words import setup_text, verdict
from terrazzo.planner.setup.setup import Setup

__all__ = ["Estimate"]

SEVERITIES = {"refuse": "known not to work", "planned": "not runnable yet", "warn": "works badly"}


@dataclass(frozen=True)
class Estimate:
    """Memory, traffic and time of a setup; `time` is None with `no_time` saying why, where nothing can be said."""

    setup: Setup
    memory: Memory
    traffic: Traffic
    time: Time | None = None
    no_time: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The report that `terrazzo plan` prints."""
        return plain(self.blocks(findings(self.setup))).rstrip()

    def blocks(self, found: Sequence[Finding]) -> list[Block]:
        """The whole of it, and what the gate found against it: what cannot work stands above everything."""
        blocks: list[Block] = [
            Line(f"{SEVERITIES['refuse']}: {one}", "bold red") for one in found if one.severity == "refuse"
        ]
        blocks += [Line(verdict(self.memory), _verdict_style(self.memory)), Line(setup_text(self.setup))]
        if self.time or self.no_time:
            blocks.append(pace_line(self.time) if self.time else Line(self.no_time, "yellow"))
        blocks += [Line(f"{SEVERITIES[one.severity]}: {one}", "yellow") for one in found if one.severity != "refuse"]
        blocks += [Line(f"note: {warning}", "yellow") for warning in self.warnings if warning not in map(str, found)]
        blocks += memory_blocks(self.memory) + traffic_blocks(self.traffic)
        return blocks + (time_blocks(self.time) if self.time else [])


def _verdict_style(memory: Memory) -> str:
    if memory.fits is False:
        return "bold red"
    return "bold green" if memory.fits_surely else "bold yellow"
