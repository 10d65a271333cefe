"""What the planner counts of one setup: memory, traffic and time, each a sum of terms with the formula behind each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from terrazzo.planner.machine.transfers import Link, TransferPurpose

__all__ = ["SPARE", "Formula", "MemoryFigures", "Room", "Sent", "Term", "TimeFigures", "TrafficFigures"]

SPARE = 0.02
"""Share of the memory of a device, or of a host, that is left to other processes before anything is sure: a monitor's
context or a display, what the system itself needs. 1.6 GiB of 80. Nothing is left of disks, whose states are exact."""


@dataclass(frozen=True)
class Formula:
    """A formula as text. Where a name in it is a key of the term's inputs, it is that input."""

    text: str
    source: str


@dataclass(frozen=True)
class Term:
    """One addend of an estimate.

    Attributes:
        name: such as `weights`; unique within an estimate of memory, traffic or time.
        value: expected, in `unit`; never more than `upper`.
        formula: its key, such as `memory.weights`: that of one of `FORMULAS` in the module that computes it.
        inputs: the numbers that were put in.
    """

    name: str
    value: float
    upper: float
    formula: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    unit: Literal["B", "s"] = "B"

    @classmethod
    def seconds(cls, name: str, value: float, formula: str, **inputs: float) -> Term:
        """An addend of a time, which has no upper value of its own."""
        return cls(name, value, value, formula, inputs, "s")


@dataclass(frozen=True)
class Room:
    """Where bytes are kept: one device, or the host memory or the disks of one host, which its ranks share.

    Attributes:
        expected, upper: bytes kept there. `capacity`: bytes there are, None where that is not known.
        spare: of these, bytes on which nothing that is sure counts.
        terms: of one rank, what it takes there.
    """

    name: Literal["device", "host", "disk"]
    expected: float
    upper: float
    capacity: int | None
    spare: float = 0.0
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class MemoryFigures:
    """Peak memory of the fullest rank, in bytes.

    Attributes:
        terms: what tensors hold at the peak; their sum is `allocated_bytes`, as torch calls it.
        reserved_bytes: allocated, with what the caching allocator keeps.
        device_bytes: reserved, with context and communicators too, what `nvidia-smi` shows; `upper_bytes`: a bound for
            it, whatever the device has. Neither has `host`: `expected_bytes` and `most_bytes` are all that has to fit.
        host, disk: what one rank keeps there of offloaded states; `disk_writes` in each optimizer step.
        process: what a rank itself takes of its host's memory; None on a CPU, where `device_bytes` has it.
        limiting_rank: which rank is fullest and why, in words.
        per_pp_rank: allocated bytes of each rank along pp.
        ranks_per_host: that share a host, whose memory and disks are `host_capacity_bytes` and `disk_capacity_bytes`.
            Of all three capacities None means not known.
        on_host: the device is the host's own CPUs, so that `terms` and `host` take of one memory.
        uncounted: what blocks compute is not known: activations come on top, so that no bound is one.
    """

    terms: tuple[Term, ...]
    upper_bytes: float
    reserved_bytes: float
    device_bytes: float
    limiting_rank: str
    per_pp_rank: tuple[float, ...] = ()
    host: tuple[Term, ...] = ()
    disk: tuple[Term, ...] = ()
    disk_writes: tuple[Term, ...] = ()
    process: Term | None = None
    capacity_bytes: int | None = None
    ranks_per_host: int = 1
    host_capacity_bytes: int | None = None
    disk_capacity_bytes: int | None = None
    on_host: bool = False
    uncounted: bool = False

    @property
    def allocated_bytes(self) -> float:
        """What tensors hold on the device at the peak."""
        return sum(term.value for term in self.terms)

    @property
    def expected_bytes(self) -> float:
        """All that is expected in the memory of the device, which is what has to fit there."""
        return self.rooms[0].expected

    @property
    def most_bytes(self) -> float:
        """A bound for that."""
        return self.rooms[0].upper

    @property
    def near_terms(self) -> tuple[Term, ...]:
        """All that lies in the memory of the device: on a CPU, which is on its host, what is kept there too."""
        return (*self.terms, *self.host) if self.on_host else self.terms

    @property
    def host_terms(self) -> tuple[Term, ...]:
        """What a rank takes of its host's memory, where it keeps something there: that, and its process."""
        return (*self.host, self.process) if self.host and self.process else self.host

    @property
    def near_bytes(self) -> float:
        """What all of that takes, without what lies around it: the allocator's reserve, contexts, the process."""
        return sum(term.value for term in self.near_terms)

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The device, and of the host and its disks those that hold something."""
        beside = [term.value for term in self.host if self.on_host]
        expected, upper = self.device_bytes + sum(beside), self.upper_bytes + sum(beside)
        spare = SPARE * (self.capacity_bytes or 0)
        device = Room("device", expected, upper, self.capacity_bytes, spare, self.near_terms)
        host = self._of_a_host("host", () if self.on_host else self.host_terms, self.host_capacity_bytes, SPARE)
        disk = self._of_a_host("disk", self.disk, self.disk_capacity_bytes, 0.0)
        return (device, *(room for room in (host, disk) if room.expected))

    def _of_a_host(
        self, name: Literal["host", "disk"], terms: tuple[Term, ...], capacity: int | None, spare: float
    ) -> Room:
        ranks = self.ranks_per_host
        expected, upper = ranks * sum(term.value for term in terms), ranks * sum(term.upper for term in terms)
        return Room(name, expected, upper, capacity, spare * (capacity or 0), terms)

    @property
    def overfull(self) -> tuple[Room, ...]:
        """Places that are expected to hold more than they can, the fullest first."""
        overfull = [room for room in self.rooms if room.capacity is not None and room.expected > room.capacity]
        return tuple(sorted(overfull, key=lambda room: -room.expected / (room.capacity or 1)))

    @property
    def overrun(self) -> float | None:
        """The largest share of its capacity that is expected in any place; None where no capacity is known."""
        shares = [room.expected / room.capacity for room in self.rooms if room.capacity is not None]
        return max(shares, default=None)

    @property
    def fits(self) -> bool | None:
        """Whether what is expected fits in every place.

        None where the device's memory is not known and no other's is too small.
        """
        return self._holds([(room.expected, room.capacity) for room in self.rooms])

    @property
    def fits_surely(self) -> bool | None:
        """Whether the upper bounds fit too, with room to spare; None where activations are not counted, if they do."""
        fits = self._holds([(room.upper + room.spare, room.capacity) for room in self.rooms])
        return None if self.uncounted and fits else fits

    def _holds(self, needs: list[tuple[float, int | None]]) -> bool | None:
        if any(capacity is not None and needed > capacity for needed, capacity in needs):
            return False
        return None if self.capacity_bytes is None else True


@dataclass(frozen=True)
class Sent(Term):
    """What one rank sends of one thing in one way.

    Attributes:
        links: bytes by link.
        purpose: what needs it.
    """

    links: Mapping[Link, float] = field(default_factory=dict)
    purpose: TransferPurpose = "data"


@dataclass(frozen=True)
class TrafficFigures:
    """Bytes that one rank sends in one optimizer step.

    Attributes:
        collectives: by what they are for, such as `all_gather weights`.
        links: bytes by link, of those over which something is sent.
    """

    collectives: tuple[Sent, ...]
    links: Mapping[Link, float] = field(default_factory=dict)

    @property
    def total_bytes(self) -> float:
        return sum(term.value for term in self.collectives)


@dataclass(frozen=True)
class TimeFigures:
    """Seconds of one optimizer step. The terms add up to it: of communication only what nothing hides.

    Attributes:
        tokens_per_s_per_gpu: of sequences that are learnt.
        mfu: model FLOPs utilisation of the dense peak of the matmul format, causal attention and empty rows counted in
            full.
        hidden_s: communication behind computation.
        bound_by: the term that limits it: `compute`, `communication`, `memory bandwidth`, `kernel launches`,
            `pipeline bubble`, `offload`.
        calibrated: whether steps of this model under this plan were measured on this device.
        rates_measured: whether the device's rates were, be it with another model or plan.
        band: relative error to expect: what nine of ten published runs stay within, less if calibrated.
    """

    terms: tuple[Term, ...]
    tokens_per_s_per_gpu: float
    mfu: float | None
    bound_by: str
    hidden_s: float = 0.0
    flops_per_token: float = 0.0
    calibrated: bool = False
    band: float = 0.0
    cost_per_million_tokens: float | None = None
    rates_measured: bool = False

    @property
    def step_s(self) -> float:
        return sum(term.value for term in self.terms)
