"""The network between two machines is cut while a step is under way: two network namespaces, and a link that goes down.

Each node has a namespace of processes and a name of its own, too, so that nothing of one shows to the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import ADDRESSES, LINK, Impossible, Nodes, two_nodes

pytestmark = [pytest.mark.processes, pytest.mark.long]

STALL_S = 3
CONFIG = """
model: {dim: 32, layers: 2, heads: 2}
data: {source: python-stdlib, max_bytes: 200_000}
plan: zero3
precision: fp32
batch: {global_batch: 4, micro_batch: 2, sequence_length: 32}
train: {steps: 100000, eval_every: null, eval_batches: 1, sample_tokens: 0}
checkpoint: {resume: never, overwrite: true}
log: {every: 5, tensorboard: false}
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    try:
        with two_nodes(1000, 0.1) as found:
            yield found
    except Impossible as reason:
        pytest.skip(str(reason))


def rank_on(nodes: Nodes, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    """One rank of a training, alone on its node."""
    (folder / "train.yaml").write_text(CONFIG)
    train = f"{sys.executable} -m terrazzo train train.yaml launch.stall_s={STALL_S} log.folder=run"
    node = f"hostname node{rank} && exec {train} launch.device=cpu launch.threads=1"
    command = [
        "ip",
        "netns",
        "exec",
        nodes.names[rank],
        "unshare",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    ours = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    ours |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": LINK}
    environment = os.environ | ours | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with (folder / f"said{rank}").open("wb") as said:
        return subprocess.Popen([*command, "sh", "-c", node], cwd=folder, env=environment, stdout=said, stderr=said)


def test_a_cut_network_ends_both_sides_within_seconds_and_is_named(nodes: Nodes, tmp_path: Path) -> None:
    ranks = [rank_on(nodes, rank, tmp_path) for rank in (0, 1)]
    try:
        metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
        begun = 0.0
        while not begun or time.monotonic() < begun + 30:  # wardens have started, and found each other
            assert time.monotonic() < deadline
            assert all(rank.poll() is None for rank in ranks)
            begun = begun or (time.monotonic() if metrics.exists() and metrics.read_bytes() else 0.0)
            time.sleep(0.1)
        subprocess.run(["ip", "-n", nodes.names[0], "link", "set", LINK, "down"], check=True)
        cut = time.monotonic()
        for rank in ranks:
            rank.wait(timeout=60)
        took_s = time.monotonic() - cut
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        said = [(tmp_path / f"said{rank}").read_text() for rank in (0, 1)]
    print(f"ended {took_s:.1f} s after the cut\n", *said, sep="\n")
    assert took_s < STALL_S + 20
    for own, text in enumerate(said):
        assert f"Host node{1 - own}, of rank {1 - own}, is cut off from this one" in text
        assert "the network between" in text
    assert [rank.returncode for rank in ranks] == [81, 81]
    kept = {path.name for path in (tmp_path / "run/stall").iterdir()}
    assert len([name for name in kept if "0" in name or "1" in name]) >= 2
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == 81
