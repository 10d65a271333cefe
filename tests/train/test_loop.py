"""Training from the command line: resuming, stopping, agreement. Few starts: each takes seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.exchange import agree, broadcast_json, gather_json
from terrazzo.launch.rank.process_group import agree_on_config
from terrazzo.telemetry import flights_of
from terrazzo.telemetry.flight.ring import EventKind
from tests.helpers import programs
from tests.helpers.threads import run_in_threads

CONFIG = """
model: {dim: 32, layers: 2, heads: 2, dropout: 0.1}
data: {source: SOURCE, validation_fraction: 0.2, cache: FOLDER/cache}
plan: zero3
batch: {global_batch: 8, micro_batch: 2, sequence_length: 32}
optimizer: {lr: 1.0e-2}
train: {steps: 6, eval_every: 3, eval_batches: 2, sample_tokens: 4}
checkpoint: {every: 3, keep_last: null}
launch: {ranks: 2, device: cpu, threads: 1}
log: {every: 1, folder: FOLDER/run, tensorboard: false}
"""


def command(folder: Path, *overrides: str) -> list[str]:
    text = folder / "text.txt"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(1500)))
    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("SOURCE", str(text)).replace("FOLDER", str(folder)))
    return ["-m", "terrazzo", "train", str(config), *overrides]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def curve(folder: Path) -> list[tuple[float, ...]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["learning_rate"], m["tokens"]) for m in metrics(folder, "train")]


@pytest.mark.processes
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    done = programs.run(*command(tmp_path), env=environment())
    assert done.returncode == 0, done.stderr
    expected, validation = curve(tmp_path), metrics(tmp_path, "validation")
    assert [point[0] for point in expected] == [1, 2, 3, 4, 5, 6]
    assert expected[-1][1] < expected[0][1]
    assert "done      step 6 of 6" in done.stdout
    assert re.search(r"\ncontinue  .*\btrain\.steps=12\n$", done.stdout, re.DOTALL)
    summary = metrics(tmp_path, "summary")[0]
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]
    assert summary["transient_bytes_measured"] == summary["transient_bytes_promised"]
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006")

    first, second = programs.on_ranks(2, *command(tmp_path, "checkpoint.resume=required"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "resumed at step 3" in first.stdout
    assert curve(tmp_path) == expected
    assert metrics(tmp_path, "validation") == validation


def one_rank_of(launcher: programs.Program) -> int:
    """The last rank that `launcher` started; the launcher itself, which tells them all, where there is no /proc."""
    lists = Path(f"/proc/{launcher.pid}/task").glob("*/children")
    return max((int(pid) for children in lists for pid in children.read_text().split()), default=launcher.pid)


@pytest.mark.processes
def test_sigterm_to_one_rank_saves_the_same_step_on_all_and_has_its_own_exit_code(tmp_path: Path) -> None:
    words = command(tmp_path, "train.steps=100000", "checkpoint.every=null", "schedule.name=constant")
    program = programs.Program(*words, env=environment())
    for line in program.stdout:
        if re.match(r" +\d+ +\d+\.\d{4}", line):
            break
    start = time.monotonic()
    os.kill(one_rank_of(program), signal.SIGTERM)
    done = program.communicate(120)
    assert done.returncode == 75, done.stderr
    assert time.monotonic() - start < 100
    assert "stopped   step" in done.stdout
    assert re.search(r"\ncontinue  .* schedule\.name=constant\n$", done.stdout, re.DOTALL)
    saved = list((tmp_path / "run" / "checkpoints").iterdir())
    assert len(saved) == 1
    assert json.loads((saved[0] / "manifest.json").read_text())["step"] == metrics(tmp_path, "train")[-1]["step"]
    flights = flights_of(tmp_path / "run")  # which the launcher has kept
    assert {told.ordinal for flight in flights for told in flight.events[-40:] if told.kind == EventKind.STEP}
    assert [flight.table["rank"] for flight in flights] == [0, 1]
    note = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert note == {
        "code": 75,
        "reason": "preempted",
        "cause": "asked to stop, and saved",
        "rank": None,
        "step": note["step"],
    }
    assert note["step"] == metrics(tmp_path, "train")[-1]["step"]


def test_settings_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    def body(rank: int) -> str:
        agree_on_config(config_from_dict({"train": {"steps": 5}}))
        config = config_from_dict({"train": {"steps": 5 + (rank == 2)}, "optimizer": {"options": {"eps": 1e-6}}})
        with pytest.raises(BadInput) as caught:
            agree_on_config(config)
        return str(caught.value)

    messages = run_in_threads(3, body)
    assert len(set(messages)) == 1
    assert "train.steps (5 on ranks 0, 1; 6 on rank 2)" in messages[0]
    assert "options" not in messages[0]


def test_values_of_any_length_travel_between_ranks() -> None:
    def body(rank: int) -> list[Any]:
        assert agree(None) is None
        assert agree(f"rank {rank} says no" if rank else None) == "rank 1 says no"
        assert broadcast_json("ü" * 50 if rank == 0 else object()) == "ü" * 50, "what other ranks give is not looked at"
        return gather_json(["ü" * 50 * rank, {"rank": rank}])

    expected = [["ü" * 50 * rank, {"rank": rank}] for rank in range(3)]
    assert run_in_threads(3, body) == [expected] * 3
