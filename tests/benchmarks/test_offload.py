"""The benchmark of offloading: its arithmetic, its report, and a small real run of each part."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cpu.models import Shape
from benchmarks.offload import adam, drive, nvme, training, turns
from benchmarks.offload.report import Target, report, targets
from benchmarks.offload.turns import Others, attempt, ratio, take_turns

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "offload"
ONE = ("device", training.PER_TENSOR)
SMALL = Shape(blocks=1, width=64, vocabulary=128, sequence=64)


def test_the_committed_report_is_what_the_record_says() -> None:
    record = json.loads((RESULTS / "record.json").read_text())
    assert (RESULTS / "report.md").read_text() == report(record)
    assert len(targets(record)) == 13
    assert all(target.value is not None for target in targets(record))


def test_turns_come_in_rounds_and_the_first_does_not_count() -> None:
    log: list[str] = []

    def act(name: str) -> float:
        log.append(name)
        return float(len(log))

    found = take_turns({"a": lambda: act("a"), "b": lambda: act("b")}, 3, Busy([0.0] * 9))
    assert [sorted(log[i : i + 2]) for i in range(0, len(log), 2)] == [["a", "b"]] * 4
    assert sorted(found["a"] + found["b"]) == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_rounds_that_others_disturb_are_repeated() -> None:
    numbers = iter(range(100))
    some, most = Busy([0.5, 0.0, 0.9, 0.1, 0.0]), Busy([0.5, 0.9, 0.4, 0.8, 0.2, 0.9])
    assert take_turns({"a": lambda: next(numbers)}, 2, some) == {"a": [2, 4]}
    assert some.kept == [0.0, 0.1]
    assert take_turns({"a": lambda: next(numbers)}, 2, most)["a"] == [10, 8]
    assert most.kept == [0.2, 0.4]


@pytest.mark.parametrize(("ranks", "cores"), [(1, 1.0), (2, 0.5)])
def test_what_all_ranks_use_is_not_counted_as_others(monkeypatch: pytest.MonkeyPatch, ranks: int, cores: float) -> None:
    read = {"_busy_s": iter([10.0, 16.0]), "_own_s": iter([1.0, 3.0]), "perf_counter": iter([0.0, 4.0])}
    for name in ("_busy_s", "_own_s"):
        monkeypatch.setattr(turns, name, partial(next, read[name]))
    monkeypatch.setattr(turns.time, "perf_counter", partial(next, read["perf_counter"]))
    assert Others(lambda own: ranks * own).cores() == cores


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([1.0, 10.0, 30.0], [2.0, 10.0, 10.0]) == 1.0


def test_a_step_cannot_be_faster_than_its_transfers_or_its_arithmetic() -> None:
    assert nvme.floor({"read": [1.0, 1.0], "write": [2.0, 1.0], "adam": [1.0, 5.0]}) == [3.0, 5.0]


def test_a_part_takes_as_long_as_its_slower_rank() -> None:
    assert training.slower([[1.0, 4.0], [2.0, 3.0]]) == [2.0, 4.0]


def test_a_target_is_met_at_its_limit_as_shown() -> None:
    assert Target("t", 0.9, 0.896, at_least=True).row() == "| t | ≥ 0.90 | 0.90 | met |"
    assert Target("t", 1.02, 1.03).row() == "| t | ≤ 1.02 | 1.03 | **missed** |"
    assert Target("t", 1.02, None).row() == "| t | ≤ 1.02 | not measured | |"


class Busy(Others):
    """As many cores as it is told, round by round; the first, which does not count, is not asked about."""

    def __init__(self, cores: list[float]) -> None:
        super().__init__()
        self._cores = iter(cores)

    def cores(self) -> float:
        return next(self._cores)


def _record() -> dict[str, Any]:
    step = {"bandwidth": [0.9], "terrazzo": [1.0], "terrazzo, copies": [2.0], "torchao, copies": [3.0]}
    return {
        "adam": {"numel": 1 << 20, "turns": {"1": step}, "missing": {"deepspeed": "no compiler"}},
        "training": {"normal, 1 rank": {"turns": {"device": [2.0], "cpu, overlapped": [2.1]}}},
    }


def test_targets_compare_speeds_and_a_missing_peer_is_not_measured() -> None:
    assert [(target.limit, target.value) for target in targets(_record())] == [
        (0.85, 0.9),
        (1.0, None),
        (1.3, 1.5),
        (1.02, 1.05),
    ]


def test_why_a_peer_does_not_run_is_noted() -> None:
    missing: dict[str, str] = {}

    def fail() -> int:
        raise ImportError("first line\nno module of that name")

    assert attempt(missing, "peer", fail) is None
    assert attempt(missing, "other", lambda: 3) == 3
    assert missing == {"peer": "ImportError: no module of that name"}


def test_torchaos_way_steps_every_tensor_like_one_flat_step() -> None:
    one, other = adam.Shard(SMALL), adam.Shard(SMALL)
    for shard in (one, other):
        torch.manual_seed(0)
        shard.weight.normal_()
        shard.device_weight.copy_(shard.weight)
        shard.device_gradient.normal_()
        shard.mean.zero_()
        shard.square.zero_()
    one.gradient.copy_(one.device_gradient)
    one.adamw(0, [one.numel]).step()
    adam.PerTensor(other).step()
    assert torch.equal(one.weight, other.device_weight)


def test_fio_is_asked_for_the_same_blocks_past_the_page_cache(tmp_path: Path) -> None:
    chosen = drive.settings(tmp_path)
    command = drive.Fio(tmp_path / "swap", 1 << 20, chosen).command("write")
    asked = {f"--bs={chosen.block_bytes}", f"--iodepth={chosen.depth}", "--direct=1", "--allow_file_create=0"}
    assert asked <= set(command)


@pytest.mark.long
@pytest.mark.processes
def test_a_small_run_of_every_part(tmp_path: Path) -> None:
    stepped = adam.measure(adam.Effort(SMALL, rounds=1, steps=1, threads=(1,), peers=False))
    assert set(stepped["turns"]["1"]) == {"bandwidth", "terrazzo", "terrazzo, copies", "torchao, copies"}
    moved = drive.measure(tmp_path, drive.Effort(1 << 20, rounds=1))
    assert {"terrazzo read", "terrazzo write"} <= set(moved["turns"])
    streamed = nvme.measure(tmp_path, nvme.Effort("tiny", blocks=2, rounds=1, threads=1, peers=()))
    assert set(streamed["turns"]) == {"read", "write", "read and write at once", "adam", "terrazzo"}
    parts = {"normal": training.Part("tiny", 2, tuple(training.PLANS), 1), "one": training.Part("tiny", 1, ONE, 1)}
    trained = training.measure(tmp_path, parts)
    assert list(trained["normal"]["turns"]) == list(training.PLANS)
    assert list(trained["one"]["turns"]) == list(ONE)
    parted = [
        *stepped["turns"].values(),
        moved["turns"],
        streamed["turns"],
        *(part["turns"] for part in trained.values()),
    ]
    assert all(len(taken) == 1 and taken[0] > 0 for turns in parted for taken in turns.values())
    assert not list(tmp_path.iterdir())
