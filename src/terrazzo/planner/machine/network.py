"""Which link a group of ranks crosses, what is sent over it, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.planner.machine.devices import Device
from terrazzo.planner.machine.mesh import HostCounts, RankGroup
from terrazzo.planner.machine.transfers import Link, UnitTransfer

__all__ = ["CALL_S", "HOP_S", "NEAR_HOP_S", "Network", "link_inside"]

SCALEUP_SHARE = 0.80
"""What ring collectives of large messages reach of a scale-up link's bandwidth: all-gather on 8 H100 361 of 450 GB/s, 8
A100 235 of 300 (stas00/ml-engineering, network/README.md)."""

MESH_SHARE = 0.75
"""What they reach of a full mesh of links: 48 of 64 GB/s of each between MI300X, so 48 GB/s for two ranks, 144 for four
and 336 for eight (rocm.blogs.amd.com, mi300x-rccl-xgmi)."""

INTERNODE_SHARE = 0.90
"""What they reach of the network cards' bandwidth: 4 nodes of 8 H200 reach 365 of 400 GB/s (stas00/ml-engineering)."""

PCIE_SHARE = 0.40
"""What they reach of a PCIe link's bandwidth, where devices talk through the host's memory: each byte crosses it
twice."""

HOP_S = 12e-6
"""Time that a ring over several nodes spends per rank beside moving bytes. It explains how MosaicML's runs slow down
from 128 to 512 ranks, and ZeRO-3's from 384 to 1,536 (arXiv 2104.04473, table 2); a fit of a measured sweep gives 13 us
on 4 nodes of 8 B200 (stas00/ml-engineering)."""

CALL_S = 8.4e-6
NEAR_HOP_S = {Link.SCALEUP: 3.4e-6, Link.PCIE: 5.7e-6}
"""Seconds that any collective takes beside moving bytes, and one inside a node for each rank more (NVIDIA/nccl
src/graph/tuning.cc, its Simple protocol). An all-reduce of 1 to 64 MiB on 8 H100 takes 42 to 79 us beside moving bytes,
56 by these (Azure/AI-benchmarking-guide)."""

LEVEL_S = 50e-6
"""Seconds that each level of a tree over nodes takes each way: an all-reduce of 16 MiB takes 190 us beside moving bytes
on 4 nodes of 8 H100, 370 on 16, 650 on 64 and 750 on 512 (arXiv 2411.13055)."""

SWITCH_MINIMUM = 6
"""Ranks from which NVSwitch sums in the switch, so that an all-reduce sends each byte about once."""

SWITCH_GAIN = 1.3
"""All-reduce of 8 H200 with it 480 GB/s, without it 367 (stas00/ml-engineering)."""


def link_inside(device: Device) -> Link:
    """What a ring over several nodes crosses inside of each: scale-up links where they join all of it, not pairs."""
    return Link.SCALEUP if device.scaleup_domain >= max(device.per_node, 2) else Link.PCIE


@dataclass(frozen=True, eq=False)
class Network:
    """The links of a device, seen by groups of ranks, which are as slow as the one that lies worst on hosts. If `free`,
    collectives take no time.
    """

    device: Device
    free: bool = False

    def _counts(self, group: RankGroup) -> HostCounts:
        """How a group lies on nodes, or on domains where these are larger."""
        return group.on_hosts(self.device.near_ranks)

    def link(self, over: RankGroup | Link) -> Link:
        """The slowest link that groups along an axis cross; a link itself, which a copy is over."""
        if isinstance(over, Link):
            return over
        if over.on_hosts(self.device.scaleup_domain).hosts == 1:
            return Link.SCALEUP
        return Link.PCIE if over.on_hosts(self.device.per_node).hosts == 1 else Link.INTERNODE

    def bandwidth(self, group: RankGroup) -> float | None:
        """Bus bandwidth of a ring, B/s: bytes that each rank sends per second. None where a link is not known.

        A ring over several nodes is many rings, each of which leaves a node through another network card, so that its
        bandwidth is that of all the cards which the group's ranks have of the node where they are fewest.
        """
        device, link = self.device, self.link(group)
        inside = device.scaleup_bandwidth and device.scaleup_bandwidth * self._links_used(group)
        if link is Link.SCALEUP:
            return inside
        through_host = device.pcie_bandwidth and device.pcie_bandwidth * PCIE_SHARE
        if link is Link.PCIE:
            return through_host
        if device.internode_bandwidth is None:
            return None
        counts = self._counts(group)
        cards = device.internode_bandwidth * INTERNODE_SHARE * counts.fewest
        if counts.most == 1:
            return cards
        within = inside if link_inside(device) is Link.SCALEUP else through_host
        return within and min(cards, within)

    def _links_used(self, group: RankGroup) -> float:
        """The share of a scale-up bandwidth that a ring reaches. In a full mesh each rank has its own link."""
        if not self.device.full_mesh or self.device.scaleup_domain == 1:
            return SCALEUP_SHARE
        counts = group.on_hosts(self.device.scaleup_domain)
        near = counts.fewest if counts.fewest > 1 else counts.most
        return MESH_SHARE * (near - 1) / (self.device.scaleup_domain - 1)

    def move_s(self, move: UnitTransfer) -> float:
        """Seconds of a collective, once. The links must be known."""
        group = move.over
        if self.free or isinstance(group, Link) or group.size <= 1 or not move.sent_bytes:
            return 0.0
        rate = self.bandwidth(group)
        assert rate is not None
        return move.sent_bytes / self._rate(move, group, rate) + move.messages * self._waits_s(move, group)

    def _rate(self, move: UnitTransfer, group: RankGroup, ring: float) -> float:
        if move.kind == "all_to_all":
            return self._scattered(group, ring)
        if move.kind == "send":
            return self._sent_on(group, ring)
        return ring * self._switch_gain(group) if move.kind == "all_reduce" else ring

    def _waits_s(self, move: UnitTransfer, group: RankGroup) -> float:
        """Seconds that one message takes beside moving bytes."""
        if (host := self.device.measured) is None:
            return CALL_S + self._usual_waits_s(move.kind, group)
        around = host.unit_s if move.purpose == "data" else host.stage_s if move.purpose == "pipeline" else 0.0
        return host.call_s + around + self._hops(move.kind, group) * host.hop_s

    def _usual_waits_s(self, kind: str, group: RankGroup) -> float:
        """Seconds around a ring, or of an all-reduce over nodes up and down a tree of them, if that is shorter."""
        link, hops = self.link(group), self._hops(kind, group)
        ring = hops * NEAR_HOP_S.get(link, HOP_S)
        if kind != "all_reduce" or link is not Link.INTERNODE:
            return ring
        counts = self._counts(group)
        levels = (counts.hosts - 1).bit_length()
        return min(ring, 2 * ((counts.most - 1) * NEAR_HOP_S[link_inside(self.device)] + levels * LEVEL_S))

    def _hops(self, kind: str, group: RankGroup) -> float:
        if kind == "all_reduce":
            return 2 * (group.size - 1) if self.device.measured is None else self._tree_hops(group)
        if kind == "send" or (kind == "all_to_all" and self.device.kind != "cpu"):
            return 1  # devices send to all others at once, a process on a CPU to one after the other
        return group.size - 1

    def _switch_gain(self, group: RankGroup) -> float:
        summed = self.device.switch_sums and group.size >= SWITCH_MINIMUM and self.link(group) is Link.SCALEUP
        return SWITCH_GAIN if summed else 1.0

    def _tree_hops(self, group: RankGroup) -> int:
        """Hops of an all-reduce: twice around a ring, or up and down a tree of nodes if that is shorter."""
        return min(2 * (group.size - 1), 2 * (group.size - 1).bit_length() + self.device.per_node)

    def _sent_on(self, group: RankGroup, ring: float) -> float:
        """Bandwidth of what a rank sends to the next, B/s: it has one network card, and in a full mesh one link."""
        device, link = self.device, self.link(group)
        if link is Link.INTERNODE and device.internode_bandwidth is not None:
            return min(ring, device.internode_bandwidth * INTERNODE_SHARE)
        if link is Link.SCALEUP and device.full_mesh and device.scaleup_bandwidth is not None:
            return device.scaleup_bandwidth * MESH_SHARE / (self.device.scaleup_domain - 1)
        return ring

    def _scattered(self, group: RankGroup, ring: float) -> float:
        """Bandwidth of an all-to-all, B/s: what goes to other nodes has each rank's own network card."""
        if self.link(group) is not Link.INTERNODE or self.device.internode_bandwidth is None:
            return ring
        away = (group.size - self._counts(group).fewest) / (group.size - 1)
        return min(ring, self.device.internode_bandwidth * INTERNODE_SHARE / away) if away else ring
