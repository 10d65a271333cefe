"""The GPU benchmark on the CPU: its arithmetic, its contenders on toy shapes, its processes, and saying what is not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import measure as gpu
from benchmarks.gpu.contenders import Setup
from benchmarks.gpu.measure import FULL, TINY, Effort, measure
from benchmarks.gpu.process import Failed, Seat
from benchmarks.gpu.rank import CopyOut, NoRoom, Rank, busy_s, check_room, needed_bytes, timed
from benchmarks.gpu.report import loss_spread, step_ratio, table, targets

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what a rank changes in its process, and ends its group."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_busy_time_counts_overlapping_kernels_once_and_nothing_else() -> None:
    events = [
        {"cat": "kernel", "ts": 100.0, "dur": 50.0},
        {"cat": "gpu_memcpy", "ts": 120.0, "dur": 10.0},  # inside the kernel
        {"cat": "kernel", "ts": 140.0, "dur": 30.0},  # its last 20 are new
        {"cat": "gpu_memset", "ts": 1000.0, "dur": 5.0},
        {"cat": "gpu_user_annotation", "ts": 0.0, "dur": 9999.0},
        {"cat": "cpu_op", "ts": 0.0, "dur": 9999.0},
        {"name": "process_name", "ph": "M"},
    ]
    assert busy_s(events) == pytest.approx(75e-6)
    assert busy_s([]) == 0.0


def test_a_step_is_timed_without_what_comes_before_it() -> None:
    calls: list[str] = []

    def before() -> None:
        calls.append("before")
        time.sleep(0.05)

    times = timed(lambda: calls.append("step"), 3, CPU, before)
    assert calls == ["before", "step"] * 3
    assert len(times) == 3 and max(times) < 0.04


def test_room_is_refused_before_anything_is_allocated() -> None:
    large, small = FULL.sharded["8B"], FULL.sharded["1B"]
    needs = [needed_bytes(Setup("terrazzo", large, "cpu", world)) for world in (1, 64)]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > 16 * large.numel  # a master weight, two moments and a gradient in fp32
    assert needs[1] > needed_bytes(Setup("terrazzo", small, "cpu", 64))
    with pytest.raises(NoRoom, match=r"needs about \d+ GiB, 20 GiB are free"):
        check_room(Setup("terrazzo", large, "cpu", 8), 20 * 2**30)
    check_room(Setup("terrazzo", TINY.alone, "cpu"), 2**30)


def test_shapes_are_those_of_their_models() -> None:
    assert [round(FULL.sharded[name].numel / 1e9, 2) for name in ("1B", "8B")] == [1.24, 8.03]
    dense = FULL.blocks["dense, 8B"]
    assert sum(torch.Size(shape).numel() for shape in dense) == FULL.sharded["8B"].unit_numels()[1]
    tokens, config = FULL.alone.tokens, FULL.alone.model
    matrices = FULL.alone.numel - config.vocab_size * config.dim - (2 * config.layers + 1) * config.dim
    attention = 12 * config.layers * config.dim * config.max_sequence_length
    assert FULL.alone.flops == tokens * (6 * matrices + attention)


@pytest.mark.parametrize("name", ["fsdp2", "terrazzo"])
def test_one_alone_trains_as_plain_pytorch_does(alone: None, name: str) -> None:
    losses = []
    for contender in ("plain", name):
        rank = Rank(Setup(contender, TINY.alone, "cpu", steps=3))
        losses.append([rank.turn()["loss"] for _ in range(2)])
        dist.destroy_process_group()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][1] < losses[0][0]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("world", [8, 64])
@pytest.mark.parametrize("name", ["fsdp2", "terrazzo"])
def test_one_of_many_holds_its_share_and_computes_with_sound_weights(alone: None, name: str, world: int) -> None:
    rank = Rank(Setup(name, TINY.alone, "cpu", world, steps=2))
    turn, profile = rank.turn(), rank.profile()
    assert len(turn["step_s"]) == 2 and min(turn["step_s"]) > 0 and turn["peak_bytes"] > 0
    assert turn["loss"] == pytest.approx(torch.tensor(128.0).log().item(), rel=0.05)  # knows nothing of 128 words
    assert profile["busy_s"] is None and profile["fake_gather_s"] is not None and profile["fake_gather_s"] > 0
    held = sum(shard.numel() for shard in rank.shards())
    assert 0 < held < 2 * TINY.alone.numel / world


def test_views_share_the_gathered_memory_and_copies_sort_it_by_parameter(alone: None) -> None:
    shapes = [(16, 8), (8,), (24, 4)]
    ways = CopyOut("cpu", 8, shapes)
    ways.release()
    ways.views()
    assert [tuple(parameter.shape) for parameter in ways.parameters] == shapes
    assert {p.untyped_storage().data_ptr() for p in ways.parameters} == {ways.full.untyped_storage().data_ptr()}
    assert torch.equal(ways.parameters[0].flatten()[:16], ways.shard[:16].bfloat16())
    ways.copies()
    assert [out.numel() for out in ways.copied] == [128, 8, 96]
    # Every rank's part of every parameter: on the fake group all ranks have this one's.
    assert torch.equal(torch.cat(ways.copied, dim=1), ways.shard.bfloat16().expand(8, -1))
    assert set(ways.turn()) == {"views", "copies"}


def _turns(times: list[float], loss: float = 2.0) -> dict[str, Any]:
    return {"turns": [{"step_s": [t, t, 9.0], "peak_bytes": 100, "loss": loss} for t in times]}


def _record() -> dict[str, Any]:
    """Two rounds, the second one twice as slow for everybody."""
    about = {"world": 1, "parameters": 10, "tokens": 100, "flops": 50}
    contenders = {"plain": _turns([1.0, 2.0]), "terrazzo": _turns([1.1, 2.2], 2.02), "fsdp2": {"turns": []}}
    alone = about | {"contenders": {name: gpu.summed(each, about, 100.0) for name, each in contenders.items()}}
    alone["contenders"]["fsdp2"]["failed"] = "OutOfMemoryError: CUDA out of memory"
    contenders = {"fsdp2": _turns([1.0, 2.0]), "terrazzo": _turns([0.5, 1.0])}
    about |= {"world": 8}
    many = about | {"contenders": {name: gpu.summed(each, about, 100.0) for name, each in contenders.items()}}
    many["contenders"]["terrazzo"]["peak_bytes"] = 90
    copies = {"a": {"views": 1e-3, "copies": 2e-3, "numel": 5_000_000}, "b": {"failed": "why"}}
    record = {"device": "NVIDIA H200", "versions": {"torch": "2"}, "cases": {"alone-eager": alone, "1B-8-eager": many}}
    return record | {"copy_out": copies, "targets": []}


def test_targets_are_judged_by_ratios_within_rounds() -> None:
    record = _record()
    assert step_ratio(record["cases"]["alone-eager"], "plain") == pytest.approx(1.1)
    assert step_ratio(record["cases"]["alone-eager"], "fsdp2") is None
    assert loss_spread(record["cases"]["alone-eager"]) == pytest.approx(0.02 / 2.01)
    found = {target["what"]: (target["value"], target["met"]) for target in targets(record)}
    assert found == {
        "alone-eager: step, Terrazzo / plain PyTorch": (pytest.approx(1.1), False),
        "alone-eager: largest difference between losses": (pytest.approx(0.02 / 2.01), True),
        "1B-8-eager: step, Terrazzo / FSDP2": (0.5, True),
        "1B-8-eager: peak memory, Terrazzo / FSDP2": (0.9, True),
        "MFU of Terrazzo alone, on H200": (pytest.approx(50 / 1.65 / 100), False),
    }
    other = {target["what"]: target["met"] for target in targets(record | {"device": "NVIDIA A100"})}
    assert other["MFU of Terrazzo alone, on H200"] is None


def test_the_table_shows_what_was_measured_and_what_failed() -> None:
    record = _record()
    lines = table(record | {"targets": targets(record)}).splitlines()
    assert "| alone-eager | terrazzo | 1650.0 | 1.100 | 61 | 30.3 | 0.00 | 1.000 | - | - |" in lines
    assert any("fsdp2 (OutOfMemoryError: CUDA out of memory)" in line for line in lines)
    assert "| a | 5.0 | 1.000 | 2.000 | 0.50 |" in lines
    assert "| b | why | | | |" in lines
    assert "| 1B-8-eager: step, Terrazzo / FSDP2 | ≤ 0.97 | 0.500 | met |" in lines


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure("cuda", TINY) == {"device": "no CUDA device"}
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "record.json")])
    gpu.main()
    assert capsys.readouterr().out == "GPU benchmark: no CUDA device, nothing was measured.\n"
    assert json.loads((tmp_path / "record.json").read_text()) == {"device": "no CUDA device"}


class _Fragile:
    def fine(self) -> str:
        print("noise")
        return "answer"

    def raises(self) -> None:
        raise ValueError("first line\nsecond line")

    def dies(self) -> None:
        os.write(2, b"some words\nlast words\n")
        os._exit(3)


@pytest.mark.long
@pytest.mark.processes
def test_a_process_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with Seat(_Fragile) as seat:
        assert seat.call("fine") == "answer"
        with pytest.raises(Failed, match=r"^exit code 3: last words$"):
            seat.call("dies")
        with pytest.raises(Failed, match=r"^exit code 3"):  # and goes on saying so
            seat.call("fine")
        seat.close()  # once more when the block ends
    with Seat(_Fragile) as seat, pytest.raises(Failed, match=r"^ValueError: first line$"):
        seat.call("raises")
    assert capfd.readouterr().out == ""


@pytest.mark.processes
def test_a_contender_without_room_leaves_the_others_their_turns() -> None:
    large = replace(TINY.alone, model=replace(TINY.alone.model, dim=1 << 20, heads=1 << 13))  # 10 trillion parameters
    setups = [Setup("terrazzo", TINY.alone, "cpu", steps=2), Setup("plain", large, "cpu", steps=2)]
    case = gpu.run("toy", setups, rounds=1, peak_flops=1e12)
    assert case["contenders"]["plain"]["failed"].startswith("NoRoom: needs about")
    found = case["contenders"]["terrazzo"]
    assert "failed" not in found and found["step_s"] > 0 and 0 < found["mfu"] < 1
    assert found["host_gap_s"] is None


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_every_contender_runs_on_the_gpu() -> None:
    record = measure("cuda", replace(TINY, compiler="inductor"), Effort(rounds=1, steps=2))
    for case in record["cases"].values():
        own_and_torch = {name: found for name, found in case["contenders"].items() if name != "deepspeed"}
        for name, found in own_and_torch.items():
            assert "failed" not in found, (name, found)
            assert found["busy_s"] > 0 and found["peak_bytes"] > 0
        assert case["world"] > 1 or (loss_spread(case) or 0.0) < 0.02, case
    assert all("failed" not in found for found in record["copy_out"].values())
    assert "| target |" in table(record)
