"""What ranks send one another in a step, move by move: which bytes, for whom, when, and over which link."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

from terrazzo.engine.instrumentation.traffic import kind_of_traffic
from terrazzo.planner.machine.mesh import RankGroup

__all__ = ["Link", "TransferPurpose", "UnitTransfer", "When"]

TransferPurpose = Literal["data", "tensor", "context", "expert", "pipeline", "outer", "offload"]
"""What needs a move: a kind of parallelism, an outer step of DiLoCo, or states away from the device."""


class When(enum.StrEnum):
    """A moment of a step at which units move: before forward and before backward, after each backward that reduces,
    after the last one, and after the optimizer's step.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    LAST = "last"
    UPDATE = "update"


class Link(enum.StrEnum):
    """What bytes cross: links of a scale-up domain, those between hosts, to a host's memory, or to its disks."""

    SCALEUP = "scaleup"
    INTERNODE = "internode"
    PCIE = "pcie"
    DISK = "disk"


class UnitTransfer(NamedTuple):
    """One collective or copy of one unit.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send` or `copy`.
        what: is moved, such as `weights`.
        purpose: what needs it.
        sent_bytes: by one rank, each time.
        over: the ranks of a collective, whose link `Network.link` knows; of a copy its link.
        messages: in how many collectives.
    """

    kind: str
    what: str
    purpose: TransferPurpose
    when: When
    sent_bytes: float
    over: RankGroup | Link
    messages: int = 1

    @property
    def counts_as(self) -> str:
        """The kind of traffic, as the engine counts it."""
        return kind_of_traffic(self.kind, self.what)

    @property
    def formula(self) -> str:
        """Key of the formula that its bytes follow."""
        return f"traffic.{self.counts_as if self.purpose == 'data' else self.purpose}"
