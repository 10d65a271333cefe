"""Transient bytes of a search's walk against the engine's bill, to the byte, where units have several buckets.

Nothing is built or moved. Ranks of the fake backend are as on GPUs: chains run beside the computation. To have ranks
on CPUs the host waits for each collective, and all that arrives has memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

import terrazzo as tz
from terrazzo.engine import PRECISIONS, Offload, Plan, stages_of
from terrazzo.engine.comm.collectives import NativeCollectives
from terrazzo.engine.dry_run.bill import memory_bill
from terrazzo.engine.dry_run.step import StepSpec
from terrazzo.engine.mesh import axes as engine_axes
from terrazzo.engine.sharding.prepare import Options, prepare
from terrazzo.planner.layout.placement import PlannedAxis
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.setup import Setup
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from tests.engine.toys import TABLE_2D
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

EXPERTS = MixtureConfig(count=8, top_k=2, ffn_dim=40)
SIZES = {
    "tied": DecoderConfig(64, 32, 5, 4, 2, 48, 16),
    "deep": DecoderConfig(64, 32, 13, 4, 2, 48, 16, tie_embeddings=False),  # a row of blocks is shortened
    "few": DecoderConfig(64, 32, 4, 4, 2, 48, 16, experts=MixtureConfig(count=8, top_k=2, ffn_dim=16, shared=1)),
    "wide": DecoderConfig(64, 32, 5, 4, 2, 48, 16, experts=EXPERTS),  # half of a block's gradient is that of experts
}
MESHES: dict[str, dict[str, int]] = {
    "dp": {"dp_shard": 4},
    "tp": {"tp": 4},
    "tp, dp": {"dp_shard": 2, "tp": 2},
    "tp, cp": {"cp": 2, "tp": 2},
    "tp, replicas": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "ep": {"dp_shard": 4, "ep": 2},
    "ep alone": {"dp_shard": 4, "ep": 4},
    "ep, tp": {"dp_shard": 2, "tp": 2, "ep": 2},
    "ep, tp, replicas": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    "pp, tp": {"pp": 2, "dp_shard": 2, "tp": 2},
    "pp, replicas": {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
}
PLANS = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "hpz", "hfsdp", "hybrid_shard", "zero3@cpu", "zero2@cpu")
SCHEDULES = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zero_bubble", 1))


@dataclass(frozen=True)
class Case:
    """`local` micro-batches only add their gradients; `rank` is along the pipeline."""

    size: str
    mesh: Mapping[str, int]
    plan: str
    precision: str
    micro_batches: int = 1
    local: bool = False
    prefetch: int = 1
    on_host: bool = False
    schedule: tuple[str, int] = ("1f1b", 1)
    rank: int = 0

    @property
    def setup(self) -> Setup:
        mesh, plan = Mesh(**self.mesh), Plan.named(self.plan)
        sizes: dict[str, Any] = asdict(SIZES[self.size])
        if experts := sizes.pop("experts"):
            sizes |= {"num_experts": experts["count"], "num_experts_per_tok": experts["top_k"]}
            sizes |= {"moe_intermediate_size": experts["ffn_dim"], "n_shared_experts": experts["shared"]}
        host = Device("host", kind="cpu", per_node=RANKS_OF_A_HOST)
        return Setup(
            model_shape({"model_type": "terrazzo", **sizes}),
            Cluster(host if self.on_host else Device("gpu"), mesh.world_size),
            plan,
            mesh,
            sequence=16,
            micro_batches=self.micro_batches,
            precision=PRECISIONS[self.precision],
            accumulate_locally=self.local,
            prefetch=self.prefetch,
            pipeline=self.schedule[0],  # type: ignore[arg-type]
            virtual_stages=self.schedule[1],
            offload=Offload().used_under(plan),
        )

    @property
    def bill(self) -> int:
        """By the engine's own schedule, over sizes alone."""
        sizes = Mesh(**self.mesh)
        rank = self.rank * (sizes.world_size // sizes.pp) + sizes.tp - 1
        with fake_group(sizes.world_size, rank):
            with torch.device("meta"):
                model = Decoder(SIZES[self.size])
            mesh = tz.mesh(**{axis: size for axis, size in self.mesh.items() if axis != "dp_shard"})  # type: ignore[arg-type]
            tz.parallelize(model, mesh, **({"pipeline": tz.Pipeline(*self.schedule)} if sizes.pp > 1 else {}))
            options = Options([Block], self.precision, mesh, self.prefetch, Offload())
            prepared = prepare(model, torch.optim.AdamW(model.parameters()), self.plan, options)
            stages = stages_of(model)
            adds = self.local or stages is not None or not prepared.sharding.plan.grad.axes
            buffer_bytes = 0 if stages is None else stages.buffer_bytes(model)
            step = StepSpec(self.prefetch, self.micro_batches, adds, stages, buffer_bytes)
            return memory_bill(prepared.units, prepared.templates, Offload(), step).transient_bytes


RANKS_OF_A_HOST = 991
"""As no other test has, since what follows from it is remembered."""


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on ranks are on CPUs."""

    def change() -> None:
        monkeypatch.setattr(engine_axes, "comm_streams_of", lambda *_: None)
        monkeypatch.setattr(NativeCollectives, "all_reduce_steps", 2)
        for kind in (NativeCollectives, PlannedAxis):
            monkeypatch.setattr(kind, "receive_bytes", lambda self, full_bytes: full_bytes)

    return change


def drawn(mesh: str, plan: str) -> Case:
    """With all else by chance, the same every time."""
    draw, sizes = random.Random(f"{mesh}, {plan}").choice, MESHES[mesh]
    size = draw(("few", "wide") if "ep" in sizes else ("tied", "deep") if "pp" in sizes else [*SIZES])
    case = Case(
        size, sizes, plan, draw(["fp32", "bf16"]), prefetch=draw([1, 1, 0, 2]), on_host=draw([False, True, True])
    )
    if "pp" in sizes:
        return replace(case, micro_batches=draw([2, 4, 8]), schedule=draw(SCHEDULES), rank=draw([0, 1]))
    return replace(case, micro_batches=draw([1, 2, 3]), local=draw([False, True]))


CASES = [(mesh, plan) for mesh in MESHES for plan in PLANS if plan not in TABLE_2D or "dp_replicate" in MESHES[mesh]]


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize(("mesh", "plan"), CASES)
def test_transient_bytes_are_those_of_the_bill(mesh: str, plan: str, on_host: Callable[[], None]) -> None:
    case = drawn(mesh, plan)
    if case.on_host:
        on_host()
    assert rank_peak(case.setup, case.rank, states_only=True).total == case.bill, case
