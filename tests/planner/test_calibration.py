"""Calibration records: kept, found, ignored where they do not belong, and what predictions make of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.cli import app
from terrazzo.config import config_from_dict, load_config
from terrazzo.engine import PRECISIONS, Offload, Plan, StateFormat, WireFormat
from terrazzo.errors import BadInput
from terrazzo.planner.assemble import estimate
from terrazzo.planner.figures import TimeFigures
from terrazzo.planner.machine.devices import Cluster, Device, MeasuredHost, device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.optimizers import OPTIMIZERS
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import (
    OF_ANY_RUN,
    Calibration,
    Software,
    calibration_folder,
    figures_of,
    find_calibration,
    load_calibration,
    measured_memory,
    processor,
    run_of,
)
from terrazzo.planner.timing.measured import fitted_pace
from terrazzo.planner.timing.step import BAND, time_of
from terrazzo.train.calibration.calibrate import calibrate, record_of
from terrazzo.train.calibration.trial import Trial, _with_half
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.planning.run_estimate import estimate_run
from tests.helpers import programs
from tests.planner.subjects import llama


def lora_of(name: str) -> ModelShape:
    return build_setup(Request(name, 8, lora=8)).model


HOST = Device("a host", kind="cpu", memory_bytes=2**33, per_node=1)
SETUP = Setup(
    model_shape({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
                 "num_hidden_layers": 2, "num_attention_heads": 4}),
    Cluster(HOST, 2), Plan.named("zero3"), Mesh(dp_shard=2), sequence=16,
)  # fmt: skip
RECORD = Calibration(
    device=HOST.name,
    figures=figures_of(HOST),
    processor=processor("cpu"),
    software=Software.here(),
    world_size=2,
    matmul="fp32",
    flops_per_s=2e9,
    bandwidth=5e8,
    overhead_s=0.25,
    memory_offset_bytes=1000,
    step_s=1.0,
    tokens=16,
    flops=1e9,
    traffic_bytes=100,
    steps=5,
)


def test_a_record_is_found_again(tmp_path: Path) -> None:
    assert find_calibration(SETUP, tmp_path) == (None, "")
    path = RECORD.save(tmp_path)
    assert load_calibration(path) == RECORD
    assert find_calibration(SETUP, tmp_path) == (RECORD, "")
    faster = RECORD.model_copy(update={"flops_per_s": 4e9})
    assert faster.save(tmp_path) == path
    assert find_calibration(SETUP, tmp_path) == (faster, "")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "other",
    [
        {"cluster": Cluster(replace(HOST, name="another host"), 2)},
        {"cluster": Cluster(HOST, 4), "mesh": Mesh(dp_shard=4)},
        {"matmul": "bf16"},
    ],
)
def test_it_counts_for_its_device_ranks_and_format_alone(tmp_path: Path, other: dict[str, Any]) -> None:
    RECORD.save(tmp_path)
    assert find_calibration(replace(SETUP, **other), tmp_path) == (None, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"software": {"terrazzo": "0.0.1", "torch": "1.0", "driver": ""}}, "measured with terrazzo 0.0.1, torch 1.0"),
        ({"processor": "an abacus"}, "measured on an abacus"),
        ({"version": 99}, "no calibration record of version 2: version"),
        ({"flops_per_s": -1}, "flops_per_s"),
        ({"flops_per_s": "NaN"}, "flops_per_s"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_a_foreign_or_broken_record_is_left_alone_with_a_line(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = RECORD.save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    record, line = find_calibration(SETUP, tmp_path)
    assert record is None
    assert line.startswith("calibration not used: ")
    assert said in line


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"version": 1}'])
def test_what_is_no_record_is_bad_input_where_it_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"record\.json"):
        load_calibration(path)
    with pytest.raises(BadInput, match="cannot be read"):
        load_calibration(tmp_path / "absent.json")


def test_records_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_folder() == tmp_path / "terrazzo" / "calibration"
    assert RECORD.save().parent == calibration_folder()
    assert find_calibration(SETUP)[0] == RECORD


# -- what a record changes ---------------------------------------------------------------------------------------------


def seconds(setup: Setup, record: Calibration | None = None) -> dict[str, float]:
    answer = time_of(setup, calibration=record)
    assert isinstance(answer, TimeFigures), answer
    return {term.name: term.value for term in answer.terms}


def test_a_device_without_figures_has_the_rate_the_bandwidth_and_the_constant() -> None:
    """By hand: 22,528 elements of matrices, 12 * 2 * 32 * 16 of attention; fp32, split in two and sent three times."""
    assert estimate(SETUP).time is None
    flops = 16 * (6 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 64 * 32) + 12 * 2 * 32 * 16)
    once, root = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 64 * 32 + 32, 2 * 64 * 32 + 32
    found = seconds(SETUP, RECORD)
    assert found["computation"] == pytest.approx(flops / 2e9)
    assert found["overhead"] == 0.25
    assert found["communication"] == pytest.approx(4 * (3 * once - root) / 2 / 5e8, rel=0.02)  # padding
    assert seconds(replace(SETUP, micro_batches=2), RECORD)["computation"] == pytest.approx(2 * flops / 2e9)
    time = estimate(SETUP, RECORD).time
    assert time is not None and time.mfu is None


def test_copies_to_disk_are_not_collectives() -> None:
    """Weights and 8 bytes of moments come and go over the disks, at the disks' speed, and nothing else changes."""
    plan = Plan("D@nvme", "D@nvme", "D@cpu", "D@nvme")
    assert "disks" in str(time_of(replace(SETUP, plan=plan), calibration=RECORD))
    slow, fast = (
        seconds(replace(SETUP, plan=plan, cluster=replace(SETUP.cluster, disk_bandwidth=rate)), RECORD)
        for rate in (1e6, 2e6)
    )
    assert slow.pop("copies to host and disk") == pytest.approx(2 * fast.pop("copies to host and disk"))
    assert slow == fast
    assert slow == pytest.approx(seconds(SETUP, RECORD))


H100 = Setup(
    model_shape("llama3-8b"), Cluster(device("h100-sxm"), 8, disk_bandwidth=1e9), Plan.named("zero3"),
    Mesh(dp_shard=8), sequence=4096, precision=PRECISIONS["bf16"], matmul="bf16",
)  # fmt: skip
ON_H100 = RECORD.model_copy(
    update={
        "device": H100.cluster.device.name, "figures": figures_of(H100.cluster.device),
        "world_size": 8, "matmul": "bf16", "run": run_of(H100),
        "flops_per_s": 3e14, "bandwidth": None, "overhead_s": 0.05, "memory_offset_bytes": -(2**30),
    }
)  # fmt: skip
PLANS = {
    "zero0": Plan.named("zero0"),
    "zero3": Plan.named("zero3"),
    "zero3@cpu": Plan("D", "D", "D@cpu", "D@cpu"),
    "zero3@nvme": Plan("D@nvme", "D@nvme", "D@nvme", "D@nvme"),
}


@pytest.mark.parametrize("bandwidth", [None, 2e11])
def test_one_measurement_leaves_the_differences_between_plans(bandwidth: float | None) -> None:
    record = ON_H100.model_copy(update={"bandwidth": bandwidth})
    found = {name: time_of(replace(H100, plan=plan), calibration=record) for name, plan in PLANS.items()}
    times = {name: time for name, time in found.items() if isinstance(time, TimeFigures)}
    assert len({round(time.step_s, 6) for time in times.values()}) == 4
    assert times["zero3@cpu"].step_s > 2 * times["zero3"].step_s
    assert times["zero3@nvme"].step_s > 10 * times["zero3"].step_s
    assert times["zero3@nvme"].bound_by != "compute"
    assert {name for name, time in times.items() if time.calibrated} == {"zero3"}
    assert all(time.rates_measured for time in times.values())
    assert times["zero3"].band < times["zero0"].band == BAND


@pytest.mark.parametrize(
    "change",
    [
        {"plan": Plan.named("zero2")},
        {"model": model_shape("llama-7b")},
        {"mesh": Mesh(dp_shard=4, tp=2)},
        {"checkpointing": "full"},
        {"compile": True},
        {"attention": "math"},
        {"optimizer": OPTIMIZERS["lion"]},
        {"optimizer_kernel": "foreach"},
        {"loss": "chunked"},
        {"model": lora_of("llama3-8b")},
        {"pipeline": "zero_bubble"},
        {"virtual_stages": 2},
        {"context": "ring"},
        {"sequence_parallel": False},
        {"offload_activations": True},
        {"prefetch": 0},
        {"offload": Offload(step="synchronous")},
        {"precision": replace(PRECISIONS["bf16"], quantized_reduce=WireFormat.INT4)},
        {"precision": replace(PRECISIONS["bf16"], moments=StateFormat.INT8)},
    ],
)
def test_only_the_run_that_was_measured_is_calibrated(change: dict[str, Any]) -> None:
    assert ON_H100.measured(replace(H100, sequence=2048, micro_batches=2))
    assert not ON_H100.measured(replace(H100, **change))
    time = time_of(replace(H100, **change), calibration=ON_H100)
    assert isinstance(time, TimeFigures)
    assert (time.calibrated, time.rates_measured, time.band) == (False, True, BAND)


def test_every_choice_of_a_setup_is_part_of_the_run_that_was_measured() -> None:
    assert {field.name for field in fields(Setup)} == {*run_of(H100).choices, *OF_ANY_RUN}


def test_a_configuration_is_the_run_that_a_request_names() -> None:
    """The same words on both sides, so that what was measured of one is known of the other."""
    own = {"dim": 64, "layers": 2, "heads": 4, "vocab_size": 512, "ffn_dim": 128}
    run = setup_of(config_from_dict({"model": own, "plan": {"name": "zero1"}, "precision": {"name": "fp32"}}), 2)
    asked = Request(run.model, 2, gpu="cpu", strategy="zero1", precision="fp32")
    assert run_of(build_setup(asked)).choices == run_of(run).choices


@pytest.mark.parametrize("figure", ["peak_flops", "memory_bandwidth", "launch_s"])
def test_what_was_measured_beside_other_figures_does_not_count(figure: str, tmp_path: Path) -> None:
    """A pace is by how much longer computation takes than these say."""
    ON_H100.save(tmp_path)
    asked = Request("llama3-8b", 8, strategy="zero3", gpu="h100-sxm")
    assert find_calibration(build_setup(asked), tmp_path)[0] == ON_H100
    hosts_of_one = replace(asked, memory_bytes=5e10, per_node=1)  # as this machine would say
    assert find_calibration(build_setup(hosts_of_one), tmp_path)[0] == ON_H100
    record, line = find_calibration(build_setup(replace(asked, **{figure: 2e12})), tmp_path)
    assert record is None
    assert figure in line


def test_a_slower_device_computes_longer_and_sends_as_fast() -> None:
    setup = replace(H100, mesh=Mesh(pp=2, dp_shard=4), micro_batches=8, plan=Plan.named("zero1"))
    plain = seconds(setup)
    slower = seconds(setup, ON_H100.model_copy(update={"pace": 2.0, "overhead_s": 0.5}))
    for name in ("matrix products", "attention", "memory-bound operations"):
        assert slower[name] == pytest.approx(2 * plain[name])
    assert slower["optimizer step"] == plain["optimizer step"]
    assert 0 < slower["pipeline communication"] <= plain["pipeline communication"] * (1 + 1e-9)  # more is hidden
    assert slower["overhead"] == 0.5
    assert slower["pipeline bubble"] == pytest.approx(2 * plain["pipeline bubble"])


@pytest.mark.parametrize("seconds_of", [(1.0, 0.6), (0.9, 0.5), (0.8, 0.9), (0.8, 0.79)])
@pytest.mark.parametrize("setup", [H100, replace(H100, plan=Plan.named("zero0"), checkpointing="full")])
def test_a_fit_gives_back_the_steps_that_it_was_made_of(setup: Setup, seconds_of: tuple[float, float]) -> None:
    setups = [setup, replace(setup, sequence=setup.sequence // 2)]
    pace, overhead = fitted_pace(setups, seconds_of, waits=True)
    record = ON_H100.model_copy(update={"pace": pace, "overhead_s": overhead})
    assert sum(seconds(setups[0], record).values()) == pytest.approx(seconds_of[0], rel=1e-6)
    if overhead:
        assert sum(seconds(setups[1], record).values()) == pytest.approx(seconds_of[1], rel=1e-6)


ON_TWO_CORES = Setup(
    llama(4, 256, 512, 4, 4, 512),
    Cluster(
        Device(
            "host", "cpu", {"fp32": 1e11}, memory_bandwidth=1e10, launch_s=1e-3, scaleup_bandwidth=1e18,
            scaleup_domain=4, per_node=4, measured=MeasuredHost(cores=2),
        ),
        4,
    ),
    Plan.named("zero1"), Mesh(dp_shard=4), sequence=256, micro_batches=2, precision=PRECISIONS["fp32"],
)  # fmt: skip


def test_ranks_that_take_turns_compute_at_the_pace_that_was_measured() -> None:
    """On half as many cores as ranks a step takes twice what one would alone, at any pace."""
    slower = ON_H100.model_copy(update={"pace": 3.0, "overhead_s": 0.0, "run": None})
    device = replace(ON_TWO_CORES.cluster.device, measured=MeasuredHost(cores=None))
    alone = replace(ON_TWO_CORES, cluster=replace(ON_TWO_CORES.cluster, device=device))
    for record in (None, slower):
        once = sum(seconds(alone, record).values())
        assert sum(seconds(ON_TWO_CORES, record).values()) == pytest.approx(2 * once)


@pytest.mark.parametrize("waits", [True, False])
def test_a_fit_on_shared_cores_gives_back_the_step_that_it_was_made_of(waits: bool) -> None:
    setups = [ON_TWO_CORES, replace(ON_TWO_CORES, sequence=128)]
    pace, overhead = fitted_pace(setups, (4.0, 2.5), waits)
    record = ON_H100.model_copy(update={"pace": pace, "overhead_s": overhead, "bandwidth": None if waits else 1e9})
    for setup, measured in zip(setups, (4.0, 2.5), strict=True):
        found = seconds(setup, record)
        assert sum(found.values()) - found.get("communication", 0.0) == pytest.approx(measured, rel=1e-6)


def test_the_planner_and_the_command_answer_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options: dict[str, Any] = {"gpu": "h100-sxm", "sequence": 4096}
    plain = tz.plan("llama3-8b", 8, strategy="zero3", **options)
    ON_H100.save()
    found = tz.plan("llama3-8b", 8, strategy="zero3", **options)
    assert isinstance(found, Estimate) and isinstance(plain, Estimate)
    assert found.time is not None and plain.time is not None
    assert found.time.step_s != plain.time.step_s and found.time.rates_measured
    ranked = tz.plan("llama3-8b", 8, **options)
    assert isinstance(ranked, Frontier)
    assert all(one.time is not None and one.time.rates_measured for one in ranked.ranked)
    with pytest.raises(SystemExit):
        app(["plan", "--model", "llama3-8b", "--gpus", "8", "--strategy", "zero3", "--gpu", "h100-sxm",
             "--seq", "4096", "--json"])  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert told["time"]["step_s"] == found.time.step_s
    assert told["memory"]["device_gib"] * 2**30 == pytest.approx(found.memory.device_bytes)


def test_the_measured_offset_is_device_memory_and_not_tensors() -> None:
    plain = memory_of(SETUP)
    measured = measured_memory(plain, RECORD, SETUP)
    assert measured.allocated_bytes == plain.allocated_bytes
    assert measured.device_bytes == plain.allocated_bytes + 1000  # in place of the process, as it was expected
    assert measured.upper_bytes >= measured.device_bytes


def test_what_one_run_on_a_gpu_was_wrong_by_says_nothing_of_another() -> None:
    assert estimate(H100, ON_H100).memory.device_bytes == memory_of(H100).device_bytes - 2**30
    other = replace(H100, plan=Plan.named("zero2"))
    assert estimate(other, ON_H100).memory == memory_of(other)


# -- from steps to a record --------------------------------------------------------------------------------------------

TINY = {
    "model": {"dim": 32, "layers": 2, "heads": 2, "vocab_size": 64},
    "batch": {"global_batch": 4, "micro_batch": 2, "sequence_length": 32},
    "launch": {"device": "cpu"},
}


def trial(length: int, step_s: float, wait_s: float | None = 0.1) -> Trial:
    return Trial(length, steps=5, step_s=step_s, wait_s=wait_s, traffic_bytes=1000, peak_bytes=10**9)


def test_two_lengths_tell_the_rate_from_what_a_step_costs_anyway() -> None:
    """Half the tokens, and less attention with each: somewhat less than half the work."""
    config = config_from_dict(TINY)
    record = record_of(config, 2, [trial(32, 1.1), trial(16, 0.7)])
    half = record_of(config_from_dict({**TINY, "batch": {**TINY["batch"], "sequence_length": 16}}), 2, [trial(16, 1.1)])
    assert 0.45 < half.flops / record.flops < 0.5
    assert record.flops / record.flops_per_s + record.overhead_s == pytest.approx(1.0)
    assert half.flops / record.flops_per_s + record.overhead_s == pytest.approx(0.6)
    assert record.bandwidth == pytest.approx(10_000)
    assert 0 < record.memory_offset_bytes < 10**9


@pytest.mark.parametrize("shorter_s", [0.1, 1.2])
def test_what_two_lengths_cannot_tell_is_left_at_no_overhead(shorter_s: float) -> None:
    """Less work that took as long, or so much less time that a step without work would take less than none."""
    record = record_of(config_from_dict(TINY), 2, [trial(32, 1.1), trial(16, shorter_s)])
    assert record.overhead_s == 0
    assert record.flops / record.flops_per_s == pytest.approx(1.0)


def test_a_device_that_waits_by_itself_has_no_bandwidth() -> None:
    record = record_of(config_from_dict(TINY), 2, [trial(32, 1.1, None), trial(16, 0.7, None)])
    assert record.bandwidth is None
    assert record.flops / record.flops_per_s + record.overhead_s == pytest.approx(1.1)


@pytest.mark.parametrize(("times", "run_known"), [((0.1, 0.07), True), ((1e-6, 5e-7), False)])
def test_steps_on_a_device_with_figures_give_a_pace(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], run_known: bool
) -> None:
    """Steps that no pace explains, shorter than what they send takes, calibrate nothing."""
    monkeypatch.setattr("terrazzo.train.planning.as_setup.machine_of", lambda *_: Cluster(device("h100"), 2))
    monkeypatch.setattr("terrazzo.train.calibration.calibrate.processor", lambda kind: "H100")
    settings: dict[str, Any] = {**TINY, "precision": "bf16"}
    config = config_from_dict(settings)
    record = record_of(config, 2, [trial(32, times[0], None), trial(16, times[1], None)])
    assert record.pace is not None
    assert (record.run is not None) == run_known
    if run_known:
        time = time_of(setup_of(config, 2), calibration=record)
        assert isinstance(time, TimeFigures) and time.calibrated
        assert time.step_s == pytest.approx(times[0], rel=0.01)


@pytest.mark.parametrize(("cp", "length", "lengths"), [(2, 36, []), (2, 32, [16]), (1, 36, [18]), (1, 3, [])])
def test_sequences_of_half_the_length_are_tried_where_ranks_can_share_them(
    cp: int, length: int, lengths: list[int]
) -> None:
    """Two ranks along cp hold two chunks each: 36 tokens divide by four, and 18 do not."""
    batch = {"global_batch": 4, "micro_batch": 2, "sequence_length": length}
    config = config_from_dict({**TINY, "batch": batch, "plan": {"name": "zero3", "mesh": {"cp": cp}}})
    assert config.parallel.context.balance == "head_tail"
    assert [half.batch.sequence_length for half in _with_half(config)] == lengths


def forked(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
    """What `subprocess.run` would return of this tethered program, which has torch already."""
    return programs.run(*words[3:], env=env)


@pytest.mark.long
@pytest.mark.processes
def test_real_steps_make_predictions_that_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = SimpleNamespace(run=forked, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(sys.modules[calibrate.__module__], "subprocess", seen)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(3000)))
    path = tmp_path / "config.yaml"
    settings = {**TINY, "data": {"source": str(text)}, "launch": {"ranks": 2, "device": "cpu", "threads": 1}}
    path.write_text(json.dumps({**settings, "log": {"folder": str(tmp_path / "run"), "tensorboard": False}}))
    overrides = ["model.vocab_size=null"]
    config = load_config(path, overrides)
    assert estimate_run(config, 2).time is None

    record, kept = calibrate(path, overrides)
    assert load_calibration(kept) == record
    assert kept.parent == calibration_folder()
    assert (record.world_size, record.matmul, record.tokens) == (2, "fp32", 64)
    assert not (tmp_path / "run").exists(), "the run's own folder must stay as it was"

    time, twice = (
        estimate_run(load_config(path, [*overrides, *more]), 2).time for more in ([], ["batch.global_batch=8"])
    )
    assert time is not None
    assert twice is not None
    assert time.calibrated
    assert time.step_s == pytest.approx(record.step_s, rel=0.02)  # the steps it was made of
    assert time.step_s < twice.step_s < 2.01 * time.step_s
    assert estimate_run(config, 4 // 2).memory.device_bytes > estimate_run(config, 2).memory.allocated_bytes


def test_a_configuration_that_cannot_run_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({**TINY, "data": {"source": str(tmp_path / "nothing.txt")}}))
    with pytest.raises(BadInput, match=r"nothing\.txt"):
        calibrate(path)
