"""Counters, the prediction against numbers worked by hand, the table, and one tiny run over a real slow link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from benchmarks import namespaces, network
from benchmarks.cpu.models import Block, Decoder, Shape
from benchmarks.namespaces import Impossible, run_ranks, two_nodes
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.plan.place import Plan
from tests.helpers import programs
from tests.helpers.fake import fake_group

AXES = {"dp_shard": 2, "dp_replicate": 2}
DENSE = "ignore:Initializing zero-element tensors:UserWarning"


def test_bytes_are_read_by_device() -> None:
    devices = [
        {"ifname": "lo", "stats64": {"rx": {"bytes": 7, "packets": 1}, "tx": {"bytes": 7, "packets": 1}}},
        {"ifname": "slow", "stats64": {"rx": {"bytes": 11, "packets": 2}, "tx": {"bytes": 13, "packets": 3}}},
    ]
    assert network.parse_sent(json.dumps(devices)) == {"lo": 7, "slow": 13}


def test_only_ranks_of_the_other_node_are_far() -> None:
    assert network.far_share([0, 1, 2, 3], 0) == pytest.approx(2 / 3)
    assert network.far_share([2, 3], 1) == 0
    assert network.far_share([1, 3], 0) == 1


@pytest.mark.parametrize(
    ("plan", "sent"),
    [
        # 1,024 elements, 4 bytes each: halves inside a node, quarters over both axes.
        # Two gathers and one reduction, each 512 elements inside and 256 across.
        ("zero3", {"all_gather": (4096, 2048), "reduce_scatter": (2048, 1024)}),
        # The node holds all weights. Half a gradient is summed across: 256 elements there, 256 back.
        ("hybrid_shard", {"all_gather": (4096, 0), "reduce_scatter": (2048, 0), "all_reduce": (0, 2048)}),
        # The first gather of a step crosses, the second stays inside.
        ("hpz", {"all_gather": (4096, 1024), "reduce_scatter": (2048, 1024)}),
        # Gradients out, updated weights back.
        ("zero1", {"all_gather": (2048, 1024), "reduce_scatter": (2048, 1024)}),
    ],
)
def test_prediction_by_hand(plan: str, sent: dict[str, tuple[int, int]]) -> None:
    found = network.sent_by_axis(Plan.named(plan).resolve(list(AXES)), 1024, AXES)
    expected = {(kind, axis): count for kind, row in sent.items() for axis, count in zip(AXES, row, strict=True)}
    assert {key: count for key, count in found.items() if count} == {k: v for k, v in expected.items() if v}


@pytest.mark.parametrize("plan", ["zero3", "hybrid_shard", "hpz", "zero1"])
@pytest.mark.filterwarnings(DENSE)
def test_prediction_adds_up_to_what_the_engine_promises(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = Decoder(Shape(2, 64, 64, 16))
        model, _ = tz.shard(model, torch.optim.AdamW(model.parameters()), plan, units=[Block], mesh=mesh)
        engine = engine_of(model)
        numel = sum(bucket.space.layout.numel for bucket in engine.buckets())
        root = engine.units[0].numel
        # Across, in elements per rank: zero3 keeps the root's weights from forward to backward, so gathers them once.
        quarters = {"zero3": 3 * numel - root, "hybrid_shard": 2 * numel, "hpz": 2 * numel, "zero1": 2 * numel}
        assert network.predicted_bytes(engine) == quarters[plan]  # a quarter of 4-byte elements
        monkeypatch.setattr(network, "FP32_BYTES", 2)
        with pytest.raises(RuntimeError, match="the engine promises"):
            network.predicted_bytes(engine)


def test_disagreements_are_relative_and_nan_is_one() -> None:
    assert network.worst_disagreement([[[2.0], [4.0]], [[2.0], [4.0 + 4e-6]]]) == pytest.approx(1e-6)
    worst = network.worst_disagreement([[[2.0]], [[float("nan")]]])
    assert not worst <= network.LOSS_TOLERANCE


@pytest.mark.filterwarnings(DENSE)
def test_without_root_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    record = network.measure()
    assert not record["possible"]
    assert network.table(json.loads(json.dumps(record))).endswith("takes Linux, root, and the programs ip and tc.")


def test_ratios_in_the_table_are_medians_within_turns() -> None:
    slow = {"step_s": [4.0, 8.0, 2.0], "median_step_s": 4.0, "link_bytes": 2e6, "link_s": 0.5}
    fast = {"step_s": [1.0, 4.0, 1.0], "median_step_s": 1.0, "link_bytes": 1.02e6, "link_s": 0.25}
    record = {
        "possible": True,
        "shaping": "1 Mbit/s",
        "case": "tiny",
        "contenders": {
            "zero3": {**slow, "predicted_bytes": 2_000_000, "measured_to_predicted": 1.0},
            "FSDP2, HSDP": {**fast, "predicted_bytes": None, "measured_to_predicted": None},
        },
    }
    rows = network.table(record).splitlines()[4:6]
    assert rows[0] == "| Terrazzo `zero3` | 4.00 | 1.00 | 2.00 | 2.0 | 2.0 | 1.000 | 0.50 |"
    assert rows[1] == "| FSDP2, HSDP | 1.00 | 0.50 | 1.00 | 1.0 |  |  | 0.25 |"


def _namespaces() -> list[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if line.startswith(f"terrazzo-{os.getpid()}-")]


@pytest.mark.processes
def test_a_failing_rank_ends_the_others_and_leaves_no_namespace() -> None:
    def arguments(report: Path) -> list[str]:
        return ["-c", f"import time; {report.name} == 2 and exit('this one'); time.sleep(600)"]

    try:
        with two_nodes(1000, 0.5) as nodes:
            assert len(_namespaces()) == 2
            with pytest.raises(RuntimeError, match=r"Rank 2 failed:\nthis one"):
                run_ranks(nodes, 2, arguments, 30)
    except Impossible as reason:
        pytest.skip(str(reason))
    assert _namespaces() == []


class Inside(programs.Program):
    """`subprocess.Popen` of `ip netns exec NODE python -m MODULE ...`, as a fork that enters the node: it has torch."""

    def __init__(self, words: list[str], *, cwd: Path, env: dict[str, str], stdout: Any, **options: Any) -> None:
        *_, node, _, _, module = words[:7]
        super().__init__("-c", ENTER, node, stdout.name, module, *words[7:], cwd=cwd, env=env)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = 20.0) -> int:
        self.close()
        return super().wait(timeout_s)


ENTER = """
import ctypes, os, runpy, sys
_, node, log, module, *arguments = sys.argv
with open(log, "ab") as file, open(f"/run/netns/{node}") as space:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    assert ctypes.CDLL(None).setns(space.fileno(), 0) == 0
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.filterwarnings(DENSE)
def test_what_crosses_a_real_link_is_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "subprocess", SimpleNamespace(Popen=Inside, run=subprocess.run))
    contenders = ("zero3", "hybrid_shard", "FSDP2, HSDP")
    record = network.measure(network.Setup(Shape(2, 256, 64, 16), turns=1, contenders=contenders, limit_s=90))
    if not record["possible"]:
        pytest.skip(record["reason"])
    zero3, hybrid, peer = (record["contenders"][name] for name in contenders)
    for own in (zero3, hybrid):
        assert 1 <= own["measured_to_predicted"] < 1.05
        assert own["inside_bytes"] < 0.1 * own["link_bytes"]  # inside a node, memory is read and only words are sent
    assert hybrid["link_bytes"] < 0.8 * zero3["link_bytes"]
    assert peer["predicted_bytes"] is None
    assert _namespaces() == []
