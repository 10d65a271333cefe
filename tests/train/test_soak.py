"""`terrazzo train` killed at random moments, again and again, until it is done.

    TERRAZZO_SOAK_KILLS=30 pytest tests/train/test_soak.py     the long form; without it there are a few kills only

A kill is SIGKILL, to every process of the run or to one rank alone. The oracle is the run that nobody touched.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo import checkpoint

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("TERRAZZO_SOAK_KILLS", "1"))
STEPS = 12 if KILLS == 1 else 250
CONFIG: dict[str, Any] = {
    "model": {"dim": 32, "layers": 2, "heads": 2, "dropout": 0.2},
    "data": {"source": "python-stdlib", "max_bytes": 60_000},
    "batch": {"global_batch": 12, "micro_batch": 2, "sequence_length": 64},
    "optimizer": {"lr": 0.003},
    "train": {"steps": STEPS, "sample_tokens": 0, "eval_every": 25},
    "launch": {"device": "cpu", "threads": 1, "timeout_s": 30},
    "log": {"every": 1, "tensorboard": False},
}


def command(folder: Path, ranks: int) -> list[str]:
    path = folder / "config.json"
    every = {"every": 3, "background": True, "keep_last": 2}
    log = CONFIG["log"] | {"folder": str(folder / "run")}
    data = CONFIG["data"] | {"cache": str(folder.parent / "cache")}
    path.write_text(json.dumps(CONFIG | {"log": log, "data": data, "checkpoint": every}))
    return [sys.executable, "-m", "terrazzo", "train", str(path), f"launch.ranks={ranks}"]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"}


def untouched(folder: Path, ranks: int) -> None:
    folder.mkdir()
    subprocess.run(command(folder, ranks), check=True, capture_output=True, env=environment(), timeout=600)


def killed(folder: Path, ranks: list[int], kills: int, seed: int) -> list[tuple[int, int]]:
    """Train to the end through `kills` kills; at each restart the next number of ranks. The (step, ranks) of starts."""
    folder.mkdir()
    moments, starts = random.Random(seed), []
    for attempt in range(10 * kills + 10):
        count = ranks[attempt % len(ranks)]
        newest = checkpoint.latest(folder / "run" / "checkpoints")
        starts.append((int(newest[-8:]) if newest else 0, count))
        process = subprocess.Popen(
            command(folder, count),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        if attempt < kills:
            _kill(process, moments)
            continue
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
        return starts
    raise AssertionError("never done")


def _kill(process: subprocess.Popen[str], moments: random.Random) -> None:
    """At some moment after training has begun, mostly."""
    assert process.stdout is not None
    steps = moments.randrange(12 if KILLS > 1 else 8)
    for line in process.stdout:
        if line.startswith("step") and "| loss" in line and (steps := steps - 1) < 0:
            break
    time.sleep(moments.random() * 0.3)
    victims = _children(process.pid)
    if victims and moments.random() < 0.5:  # one rank alone: the others must not go on, nor hang
        os.kill(moments.choice(victims), signal.SIGKILL)
        process.stdout.read()
        process.wait(60)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    process.stdout.close()


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return [int(child) for children in lists for child in children.read_text().split()]
    except OSError:
        return []


def state(folder: Path) -> dict[tuple[str, str], Tensor]:
    path = checkpoint.latest(folder / "run" / "checkpoints")
    assert path is not None
    assert path.endswith(f"step-{STEPS:08d}")
    source = checkpoint.open_source(path)
    return {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


def curve(folder: Path) -> dict[int, tuple[float, int]]:
    """Loss and targets so far by step, as they were last measured."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["tokens"]) for line in lines if line["kind"] == "train"}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in (folder / "run" / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.timeout(3600)
def test_the_same_ranks_end_with_the_same_bits(tmp_path: Path) -> None:
    untouched(tmp_path / "expected", 2)
    starts = killed(tmp_path / "found", [2], KILLS, seed=0)
    expected, found = state(tmp_path / "expected"), state(tmp_path / "found")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert curve(tmp_path / "found") == curve(tmp_path / "expected")
    assert hidden(tmp_path / "found") == []
    print(starts)


@pytest.mark.timeout(3600)
def test_other_ranks_at_every_start_see_the_same_samples(tmp_path: Path) -> None:
    """Without dropout, whose generators are each rank's own, the loss of a step tells which samples it was of."""
    CONFIG["model"] = CONFIG["model"] | {"dropout": 0.0}
    untouched(tmp_path / "expected", 2)
    starts = killed(tmp_path / "found", [2, 1, 3], KILLS, seed=1)
    expected, found = curve(tmp_path / "expected"), curve(tmp_path / "found")
    assert found.keys() == expected.keys()
    assert [found[step][1] for step in sorted(found)] == [expected[step][1] for step in sorted(expected)]
    for step, (loss, _) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=2e-3), f"step {step}"
    assert hidden(tmp_path / "found") == []
    print(starts)
