"""How much of an update away from the device computation hides.

The CPU updates unit after unit, while reads, writes and copies of others are under way, so that a unit takes what its
slowest part takes. `overlapped`: in the order of forward, in which each unit waits for its own update alone; what is
hidden is hidden behind the first forward of the next step, and with clipping and loss scaling nothing is lost.
`backward`: in the order of backward, each as soon as its gradient is final; the first layers' come last, and find none
of it left. `synchronous`: nothing is hidden. All three update the same way. Matrices that are updated whole are
exchanged between ranks, and the step waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.planner.figures import Formula

__all__ = ["AVERAGE_SHARE", "FORMULAS", "UnitUpdate", "exposed_s"]

AVERAGE_SHARE = 12 / 28
"""Bytes that an average of the weights moves of an element on a host, of those that an update of Adam moves in fp32."""

FORMULAS = {
    "time.host": Formula(
        "total_s - hidden_s; total_s sums max(elements / rate, pcie_s, disk_s) over units, elements of all ranks of a "
        "host; hidden_s is what the next step's first forward (overlapped), or the rest of backward (backward), is "
        "long enough for, and nothing of units with matrices that are updated whole, nor where an average of the "
        f"weights is taken, which counts as {AVERAGE_SHARE:.2g} times as many elements more",
        "ZeRO-Offload, arXiv 2101.06840, table 4; ZeRO-Infinity, arXiv 2104.07857; GreedySnake, arXiv 2512.17570",
    ),
}


@dataclass(frozen=True)
class UnitUpdate:
    """Seconds of one unit's update, and of its computation.

    Attributes:
        host_s: what the CPUs update for; pcie_s, disk_s: what its copies take.
        forward_s, backward_s: its computation in one micro-batch.
        at_once: whether it has matrices that are updated whole, for which the step waits.
    """

    host_s: float
    pcie_s: float
    disk_s: float
    forward_s: float
    backward_s: float
    at_once: bool = False

    @property
    def seconds(self) -> float:
        return max(self.host_s, self.pcie_s, self.disk_s)


def exposed_s(updates: Sequence[UnitUpdate], step: str) -> float:
    """Seconds by which a step is longer for the update of its units, given in the order of forward.

    Forward of a unit needs the updates of all units up to it, and comes after the computation of those before it. In
    backward, turned round, the updates of a unit and of those before it begin when its gradient is final, and what is
    left to compute then is the backward of those before it. Either way the longest such lag is what is not hidden.
    """
    if step == "synchronous":
        return sum(each.seconds for each in updates)
    longest = updated = computed = 0.0
    for each in updates:
        updated += each.seconds * (not each.at_once)
        longest = max(longest, updated - computed)
        computed += each.forward_s if step == "overlapped" else each.backward_s
    return longest + sum(each.seconds for each in updates if each.at_once)
