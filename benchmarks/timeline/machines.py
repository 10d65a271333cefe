"""GPUs of the planner's catalogue, how their ranks are linked, and what the simulated device is given of both."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from unittest import mock

from benchmarks.timeline.model import SCALE, shape
from terrazzo.engine import Plan
from terrazzo.planner.machine.devices import Cluster, Device, device
from terrazzo.planner.machine.mesh import Mesh, group_of
from terrazzo.planner.machine.network import HOP_S, Network
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing import compute, rates
from terrazzo.planner.timing.rates import PCIE_COPY_SHARE

__all__ = ["GPUS", "LAYOUTS", "TOKENS", "Cell", "Figures", "Layout"]

GPUS = ("A100", "H100", "H200", "B200")
TOKENS = (1024, 2048, 4096, 8192)
"""Of a rank in a step. Communication over computation falls with them: each doubling halves it."""


@dataclass(frozen=True)
class Layout:
    """Where the ranks are.

    Attributes:
        hosts: with `per_host` GPUs each, over which shard groups do not reach if there are several of both.
    """

    hosts: int
    per_host: int
    about: str

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def mesh(self) -> Mesh:
        hybrid = self.hosts > 1 and self.per_host > 1
        return Mesh(dp_replicate=self.hosts if hybrid else 1, dp_shard=self.per_host if hybrid else self.ranks)

    def device(self, gpu: str) -> Device:
        """The catalogue's, with no more neighbours than there are here."""
        return replace(device(gpu), per_node=self.per_host, scaleup_domain=self.per_host)


LAYOUTS = {
    "host": Layout(1, 2, "two GPUs of one host, over its scale-up links"),
    "network": Layout(2, 1, "one GPU in each of two hosts, over one network card each"),
    "offload": Layout(1, 2, "the same, with weights, gradients and optimizer in the host's memory"),
    "hybrid": Layout(2, 2, "two GPUs in each of two hosts: shards within a host, replicas between them"),
}


@dataclass(frozen=True)
class Figures:
    """Of the simulated device, in units of the simulated size: FLOP/s and B/s, and seconds of a ring's step."""

    flops: float
    memory: float
    pcie: float
    near: float
    far: float
    hop_s: float


@dataclass(frozen=True)
class Cell:
    """A machine, and how much it computes in a step."""

    layout: str
    gpu: str
    tokens: int

    def setup(self, plan: str) -> Setup:
        """A plan on it, as the planner is asked."""
        layout = LAYOUTS[self.layout]
        found = build_setup(
            Request(shape(), layout.ranks, gpu=layout.device(self.gpu), strategy=Plan.named(plan), sequence=self.tokens)
        )
        return replace(found, mesh=layout.mesh, cluster=Cluster(layout.device(self.gpu), layout.ranks))

    def figures(self) -> Figures:
        """The planner's own rates: what products of these matrices reach, and the shares of bandwidths that it takes.

        So what it says of a step differs from what is simulated in the schedule, and in kernels that it does not know.
        """
        setup = self.setup("zero3")
        found, network = setup.cluster.device, Network(setup.cluster.device)
        (block,) = setup.model.repeated
        matrices = sum(tensor.numel for tensor in block.tensors if tensor.role == "matrix")
        near = network.bandwidth(group_of(setup.mesh, "dp_shard"))
        far = network.bandwidth(group_of(setup.mesh, "dp_replicate"))
        assert near and found.pcie_bandwidth
        with free_launches():
            flops = 6 * matrices * self.tokens / compute.block_seconds(setup, block).matmul
        return Figures(
            flops=flops / SCALE**3,
            memory=rates.memory_rate(found) / SCALE**2,
            pcie=found.pcie_bandwidth * PCIE_COPY_SHARE / SCALE**2,
            near=near / SCALE**2,
            far=(far or near) / SCALE**2,
            hop_s=HOP_S,
        )

    def record(self) -> dict[str, object]:
        """For JSON, and for ranks."""
        return asdict(self)


def free_launches() -> mock._patch[float]:
    """The simulated device launches kernels in no time."""
    return mock.patch.object(compute, "LAUNCH_S", 0.0)
