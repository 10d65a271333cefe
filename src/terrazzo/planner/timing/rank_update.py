"""The optimizer's step of one rank along pp: on the device, of matrices that are updated whole, and away from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import chain

from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.layout.buckets import buckets, trained_unit
from terrazzo.planner.layout.placement import Placement, placed_units
from terrazzo.planner.machine.network import Network
from terrazzo.planner.machine.transfers import Link, When
from terrazzo.planner.memory.matrices import MatrixUpdates, matrix_updates
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.compute import optimizer_bytes
from terrazzo.planner.timing.rates import copy_s, memory_rate, sustained_rate
from terrazzo.planner.timing.timeline import PassSeconds
from terrazzo.planner.timing.update import AVERAGE_SHARE, UnitUpdate, exposed_s
from terrazzo.planner.traffic.volumes import unit_copies

__all__ = ["FORMULAS", "HOST_ADAM", "RankUpdate"]

HOST_ADAM = 3e9
"""Elements per second that the CPUs of one host update, all its ranks together: reported are 1.6 to 4 thousand million
(ZeRO-Offload, arXiv 2101.06840, table 4; deepspeedai/DeepSpeed blogs/deepspeed-zenflow)."""

FORMULAS = {
    "time.matrices": Formula(
        "pace * flops / rate, of bf16 products; flops of a matrix of sides m <= n are iterations * (4 m^2 n + 2 m^3), "
        "one after the other on the rank that has most of them, of each exchange",
        "Jordan et al. 2024; terrazzo/engine/optim/matrices/matrix_owners.py",
    ),
}


class RankUpdate:
    """The update of rank `pp_rank` along pp.

    Args:
        pace: see `PipelineRank`. passes_of: seconds of a unit's computation in one micro-batch, which hides updates.
    """

    def __init__(self, setup: Setup, pp_rank: int, pace: float, passes_of: Callable[[UnitShape], PassSeconds]) -> None:
        self.setup, self._pp_rank, self._pace, self._passes_of = setup, pp_rank, pace, passes_of
        self._units = placed_units(setup, pp_rank)
        self._network = Network(setup.cluster.device)

    @cached_property
    def terms(self) -> list[Term]:
        """Seconds of the update on the device, of matrices that are updated whole, and of what is away from it."""
        rows = [(unit, count, own, trained_unit(unit, own).optim_numel) for unit, count, own in self._units]
        here = sum(count * owned for _, count, placement, owned in rows if placement.tiers.optim == "device")
        moved, bandwidth = optimizer_bytes(self.setup, here, self._whole), memory_rate(self.setup.cluster.device)
        terms = [Term.seconds("optimizer step", moved / bandwidth, "time.optimizer", bytes=moved, bandwidth=bandwidth)]
        if flops := self._matrices.flops:
            rate = self._orthogonal_rate
            terms.append(
                Term.seconds(
                    "Newton-Schulz iterations", self._pace * flops / rate, "time.matrices", flops=flops, rate=rate
                )
            )
        if all(placement.tiers == ON_DEVICE for _, _, placement, _ in rows):
            return terms
        updates = [[self._update_of(unit, placement, owned)] * count for unit, count, placement, owned in rows]
        return [*terms, self._offloaded_update(list(chain.from_iterable(updates)))]

    @property
    def _whole(self) -> int:
        """Elements of the first rank that are of matrices which are updated whole, their states on the device."""
        counted = ((count, bucket) for unit, count, placement in self._units for bucket in buckets(unit, placement))
        here = ((count, bucket) for count, bucket in counted if bucket.trainable and not bucket.updated_off_device)
        return sum(count * bucket.runs.matrices for count, bucket in here)

    @cached_property
    def _matrices(self) -> MatrixUpdates:
        return matrix_updates(self.setup, self._pp_rank)

    @property
    def _orthogonal_rate(self) -> float:
        """FLOP/s of products in bf16, in which matrices are made orthogonal; where not known, of those of the model."""
        device = self.setup.cluster.device
        return sustained_rate(device, "bf16") or sustained_rate(device, self.setup.matmul) or 1.0

    def _update_of(self, unit: UnitShape, placement: Placement, owned: int) -> UnitUpdate:
        """What one unit's update takes away from the device, and its computation that it can hide behind."""
        copies = {Link.PCIE: 0.0, Link.DISK: 0.0}
        for move in unit_copies(unit, placement):
            if move.when is When.UPDATE:
                link = self._network.link(move.over)
                copies[link] += copy_s(self.setup.cluster, link, move.sent_bytes)
        elements = owned * self.setup.cluster.ranks_per_host if placement.tiers.optim != "device" else 0
        forward, backward = self._passes_of(unit)
        at_once = any(bucket.runs.matrices for bucket in buckets(unit, placement) if bucket.updated_off_device)
        host_s = elements * (1 + AVERAGE_SHARE * self.setup.ema) / HOST_ADAM
        return UnitUpdate(host_s, copies[Link.PCIE], copies[Link.DISK], forward, backward, at_once)

    @property
    def _offloaded_step(self) -> str:
        """How updates away from the device are hidden: an average of the weights is taken when all have ended."""
        return "synchronous" if self.setup.ema else self.setup.offload.step

    def _offloaded_update(self, updates: list[UnitUpdate]) -> Term:
        total, exposed = sum(each.seconds for each in updates), exposed_s(updates, self._offloaded_step)
        parts = {
            "elements": sum(each.host_s for each in updates) * HOST_ADAM,
            "rate": HOST_ADAM,
            "pcie_s": sum(each.pcie_s for each in updates),
            "disk_s": sum(each.disk_s for each in updates),
        }
        return Term.seconds(
            "update of offloaded states", exposed, "time.host", total_s=total, hidden_s=total - exposed, **parts
        )
