"""What a picture of memory shows, before it is drawn: a bar for each strategy, cut into kinds of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.words import (
    ByteUnit,
    axes_text,
    checkpointing_text,
    parameters_text,
    precision_name,
    units,
)
from terrazzo.planner.timing.pipeline_step import PipelineStep
from terrazzo.planner.timing.timeline import Timeline

__all__ = ["KINDS", "PICTURE_SUFFIXES", "Chart", "MemoryBar", "MemoryKind", "chart_of", "parts_of"]


@dataclass(frozen=True)
class MemoryKind:
    """A kind of memory: its colour in pictures, its letter where there are no colours.

    Attributes:
        terms: names of the terms that are of it.
    """

    name: str
    colour: str
    letter: str
    terms: tuple[str, ...] = ()


OVERHEAD = MemoryKind("allocator, context, libraries", "#a9adb5", "x", ("workspace",))
OTHER = MemoryKind("other", "#6d6f76", "o")
KINDS = (
    MemoryKind("weights", "#1f4e82", "w", ("weights",)),
    MemoryKind("gradients", "#4a86c5", "g", ("gradients",)),
    MemoryKind("optimizer", "#8fb8de", "s", ("master", "moments", "outer", "residuals", "average")),
    MemoryKind(
        "gathered weights, buffers",
        "#3f8f6b",
        "t",
        ("gathered", "unreduced", "receive", "staging", "messages", "buffers", "transient"),
    ),
    MemoryKind("activations", "#dd8a2e", "a", ("activations", "working")),
    MemoryKind("logits and loss", "#f2c572", "l", ("logits",)),
    OTHER,
    OVERHEAD,
)
"""All kinds, from the left of a bar."""

PICTURE_SUFFIXES = (".png", ".svg")
"""Of files that a picture may be written to."""

NEAR, CUT = 2.0, 2.0
"""A capacity is shown up to twice the longest bar, and bars are cut at twice the capacity."""


@dataclass(frozen=True)
class MemoryBar:
    """One strategy.

    Attributes:
        parts: bytes by name of a kind, from the left.
        upper: bytes, None if there is no bound.
        chosen: the report is about it.
    """

    label: str
    parts: Mapping[str, float]
    upper: float | None = None
    chosen: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Chart:
    """Bars against the memory of a device, in bytes; None where it is not known.

    Attributes:
        pipeline: a step of it, drawn below; None without stages, or where nothing is known of their times.
    """

    title: str
    subtitle: str
    bars: tuple[MemoryBar, ...]
    capacity: float | None = None
    measures: str = "expected on the device of the fullest rank"
    pipeline: Timeline | None = None

    @property
    def limit(self) -> float:
        """Where the scale ends, bytes: at the capacity or the longest bar, as far as short ones stay readable."""
        longest = max(bar.upper or bar.total for bar in self.bars)
        if self.capacity is None or self.capacity > NEAR * longest:
            return longest
        return min(max(longest, self.capacity), CUT * self.capacity)

    @property
    def unit(self) -> ByteUnit:
        return units(self.limit)[0]

    @property
    def kinds(self) -> list[MemoryKind]:
        """The kinds that occur, in the order of the bars' parts."""
        seen = {name for bar in self.bars for name, value in bar.parts.items() if value > 0}
        return [kind for kind in KINDS if kind.name in seen]


def chart_of(estimates: Sequence[Estimate], chosen: Estimate) -> Chart:
    """A bar for each estimate; all are of one model on one cluster."""
    setup = chosen.setup
    return Chart(
        title=f"{setup.model.name} on {setup.cluster.count} × {setup.cluster.device.name}",
        subtitle=(
            f"{parameters_text(setup.model)}, {setup.micro_batch} × {setup.sequence:,} tokens on each rank"
            f", {precision_name(setup)}, checkpointing {checkpointing_text(setup)}, {axes_text(setup)}"
        ),
        bars=tuple(_bar(estimate, chosen) for estimate in estimates),
        capacity=chosen.memory.capacity_bytes,
        pipeline=_pipeline(chosen),
    )


def _pipeline(estimate: Estimate) -> Timeline | None:
    if estimate.setup.mesh.pp == 1 or estimate.time is None:
        return None
    terms = estimate.time.terms
    if (pace := next((term.inputs["pace"] for term in terms if "pace" in term.inputs), None)) is None:
        return None  # a device without known figures, of which a whole step was measured
    waits = all(term.formula != "time.waited" for term in terms)  # else what collectives take is a term of its own
    return PipelineStep(estimate.setup, pace, waits).timeline


def _bar(estimate: Estimate, chosen: Estimate) -> MemoryBar:
    memory = estimate.memory
    return MemoryBar(
        label=estimate.setup.plan.name,
        parts=parts_of(memory),
        upper=memory.most_bytes,
        chosen=estimate.setup == chosen.setup,
    )


def parts_of(memory: MemoryFigures) -> dict[str, float]:
    """What the memory of the device holds, in bytes by name of a kind."""
    parts = dict.fromkeys((kind.name for kind in KINDS), 0.0)
    for term in memory.near_terms:
        parts[kind_of(term.name).name] += term.value
    parts[OVERHEAD.name] += max(0.0, memory.expected_bytes - memory.near_bytes)
    return {name: value for name, value in parts.items() if value > 0}


def kind_of(name: str) -> MemoryKind:
    """The kind of a term."""
    return next((kind for kind in KINDS if name in kind.terms), OTHER)
