"""Runs whose states lie on other tiers: how they are asked for, what is refused before they start, and what they do."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import latest, open_source
from terrazzo.config import Config, config_from_dict
from terrazzo.engine import Plan
from terrazzo.engine.offload.nvme.swap_space import SwapSpace
from terrazzo.engine.offload.options import Offload
from terrazzo.errors import BadInput
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.planner.memory.peak import memory_of
from terrazzo.telemetry import allowed_bytes
from terrazzo.telemetry.steps import memory
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.planning.run_estimate import estimate_run
from terrazzo.train.preflight import check
from terrazzo.train.preflight import device_memory as fit
from terrazzo.train.preflight import offload_room as offload
from terrazzo.train.preflight.device_memory import check_plan
from terrazzo.train.preflight.offload_room import check_folders, host_lacks_room, offload_notes
from terrazzo.train.report.summary import bytes_line, summary_lines
from terrazzo.train.session.build_session import open_session
from terrazzo.train.settings.folders import make_swap_folders, swap_folders
from terrazzo.train.settings.plan import build_offload, build_plan
from tests.helpers import programs
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads

GIB = 2**30
ALONE = Ranks(0, 1, torch.device("cpu"))


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {"model": {"dim": 64, "layers": 3, "heads": 4, "vocab_size": 128}}
    return config_from_dict({**base, "launch": {"device": "cpu"}, **sections})


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "places"),
    [
        ({"plan": "zero3@cpu"}, "D D D@cpu D@cpu"),
        ({"plan": "zero2@nvme-all"}, "-@nvme - D@cpu D@nvme"),
        ({"offload": {"grad": "cpu", "optim": "cpu"}}, "D D D@cpu D@cpu"),
        ({"plan": "zero3@nvme", "offload": {"optim": "cpu"}}, "D D D@cpu D@cpu"),
        ({"plan": "zero3@nvme-all", "offload": {"weight": "device", "grad": "device"}}, "D D D D@nvme"),
        ({"offload": {"optim": {"cpu": 0.7, "device": 0.3}}}, "D D D D@cpu:0.7,device:0.3"),
        ({"offload": {"optim": {"nvme": 0.5, "cpu": 0.3}}}, "D D D D@nvme:0.5,cpu:0.3"),
        ({"offload": {"optim": "cpu:0.7"}}, "D D D D@cpu:0.7"),
        ({"offload": {"optim": {"device": 0.3}}}, "D D D D"),
        (
            {"plan": {"weight": "-", "between": "-", "grad": "D", "optim": "D@cpu"}, "offload": {"grad": "cpu"}},
            "- - D@cpu D@cpu",
        ),
    ],
    ids=str,
)
def test_tiers_of_the_plan_and_those_in_their_place(section: dict[str, Any], places: str) -> None:
    assert " ".join(map(str, build_plan(config(**section)).places().values())) == places


def test_a_plan_goes_by_the_name_of_the_preset_that_it_is() -> None:
    assert build_plan(config(offload={"grad": "cpu", "optim": "cpu"})) == Plan.named("zero3@cpu")
    assert build_plan(config(plan="zero3@cpu", offload={"grad": "device", "optim": "device"})).name == "zero3"
    assert build_plan(config(offload={"optim": "cpu:0.5"})).name == "zero3@custom"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"optim": "cpux"}, ["offload.optim", "'cpux'", "Did you mean 'cpu'"]),
        ({"optim": {"nvm": 0.5}}, ["'nvm'", "Did you mean 'nvme'"]),
        ({"optim": {"cpu": 0.7, "nvme": 0.6}}, ["gives away 1.3"]),
        ({"grad": {"cpu": 1.5}}, ["'1.5'", "from 0 to 1"]),
        ({"weight": 3}, ["offload.weight is 3", "expected text"]),
        ({"pth": "x"}, ["unknown key 'pth'", "Did you mean 'path'"]),
        ({"step": "overlaped"}, ["offload.step", "Did you mean 'overlapped'"]),
        ({"depth": 0}, ["offload.depth is 0"]),
        ({"activations": "cpu"}, ["train.activation_checkpointing is 'none'", "full, selective or every_N"]),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_with_the_way_out(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadInput) as refused:
        config(offload=section)
    for word in words:
        assert word in str(refused.value)


def test_a_block_that_is_no_whole_number_of_pages_is_refused() -> None:
    with pytest.raises(BadInput, match=r"block_mib is 0\.001"):
        build_offload(config(offload={"block_mib": 0.001}))


@pytest.mark.parametrize(
    ("clip", "precision", "step"),
    [
        (1.0, "fp32", "overlapped"),
        (None, "fp32", "backward"),
        (None, "fp16", "overlapped"),
        (1.0, "fp16", "overlapped"),
    ],
)
def test_units_are_updated_in_backward_where_nothing_has_to_see_all_gradients(
    clip: float | None, precision: str, step: str
) -> None:
    asked = config(plan="zero3@cpu", train={"clip": clip}, precision=precision)
    assert build_offload(asked).step == step
    assert setup_of(asked, 1).offload.step == step
    chosen = config(plan="zero3@cpu", train={"clip": clip}, precision=precision, offload={"step": "synchronous"})
    assert build_offload(chosen).step == "synchronous"


@pytest.mark.parametrize(
    ("sections", "word"),
    [({}, "train.clip=null"), ({"train": {"clip": None}, "precision": "fp16"}, "another precision")],
)
def test_an_update_in_backward_that_would_not_be_exact_is_refused(sections: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match="before the others' gradients exist") as refused:
        build_offload(config(offload={"step": "backward"}, **sections))
    assert word in str(refused.value)


# -- folders -----------------------------------------------------------------------------------------------------------


def on_drives(path: Any, folder: Path, **more: Any) -> Config:
    return config(plan="zero3@nvme", offload={"path": path, **more}, log={"folder": str(folder / "run")})


def test_states_on_nvme_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"offload\.path names no folder"):
        check_folders(on_drives(None, tmp_path))
    assert check_folders(config()) == []
    assert check_folders(config(offload={"path": "/nowhere"})) == []


def test_a_missing_folder_is_most_often_a_drive_that_is_not_mounted(tmp_path: Path) -> None:
    """Only those inside log.folder are the run's own."""
    with pytest.raises(BadInput, match="does not exist"):
        check_folders(on_drives(str(tmp_path / "drive"), tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="is not a folder"):
        check_folders(on_drives([str(tmp_path), str(tmp_path / "file")], tmp_path))
    own = on_drives(str(tmp_path / "run" / "swap"), tmp_path)
    check_folders(own)
    assert not (tmp_path / "run").exists()
    make_swap_folders(own)
    assert (tmp_path / "run" / "swap").is_dir()
    make_swap_folders(on_drives(str(tmp_path), tmp_path))


def test_what_speaks_against_a_folder_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "inspect_folder", lambda folder: ["this is a tmpfs"])
    assert check_folders(on_drives([str(tmp_path), str(tmp_path)], tmp_path)) == ["this is a tmpfs"]


# -- room --------------------------------------------------------------------------------------------------------------


def test_disks_must_hold_the_files_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    asked = on_drives([str(tmp_path), str(tmp_path)], tmp_path)
    bill = memory_of(setup_of(asked, 2))
    needed = 2 * sum(term.value for term in bill.disk)
    monkeypatch.setattr(offload, "free_bytes", lambda path: int(needed))
    assert host_lacks_room(asked, bill, 2) is None
    monkeypatch.setattr(offload, "free_bytes", lambda path: int(needed) - 1)
    assert "further folders on other disks" in str(host_lacks_room(asked, bill, 2))
    with pytest.raises(BadInput, match=r"Swap files.*offload\.path.*launch\.ignore_planner=true"):
        check_plan(asked, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert host_lacks_room(asked, bill, 2) is None


def test_files_of_runs_that_are_gone_count_as_room_and_are_left_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked before a start changes nothing; a run removes them when it opens its own."""
    asked = on_drives([str(tmp_path), str(tmp_path)], tmp_path)
    bill = memory_of(setup_of(asked, 1))
    needed = round(sum(term.value for term in bill.disk))
    disk = SwapSpace(Offload(tmp_path, direct=False), 0, needed + (1 << 20))
    (mine,) = disk.paths
    monkeypatch.setattr(offload, "free_bytes", lambda path: 0)
    assert "Swap files" in str(host_lacks_room(asked, bill, 1)), "they are of a run that goes on"
    size = mine.stat().st_size
    disk.close()
    mine.write_bytes(bytes(size))
    with mine.open("rb") as other_rank:
        fcntl.flock(other_rank, fcntl.LOCK_SH)  # as one that asks at the same moment
        assert host_lacks_room(asked, bill, 1) is None
    assert list(tmp_path.iterdir()) == [mine]


def on_cuda(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(offload, "resolve_device", lambda launch: "cuda")
    monkeypatch.setattr(offload, "available_host_bytes", lambda: free)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_host_memory_must_hold_what_all_ranks_keep_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(plan="zero3@cpu")
    bill = memory_of(setup_of(asked, 2))
    needed = 2 * sum(term.value for term in bill.host)
    for free, refused in ((int(needed), False), (int(needed) - 1, True), (None, False)):
        on_cuda(monkeypatch, free)
        reason = host_lacks_room(asked, bill, 2)
        assert (reason is not None) is refused
    on_cuda(monkeypatch, 0)
    assert "moments" in str(host_lacks_room(asked, bill, 2))


def test_memory_that_is_to_be_locked_is_held_against_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(plan="zero3@cpu")
    bill = memory_of(setup_of(asked, 1))
    on_cuda(monkeypatch, None)
    for limit, said in ((8 << 10, True), (GIB, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert any("RLIMIT_MEMLOCK" in note for note in offload_notes(asked, bill, 1)) is said
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 10, 8 << 10))
    assert offload_notes(config(plan="zero3@cpu", offload={"pin": False}), bill, 1) == []


def test_on_a_cpu_the_host_and_the_device_are_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is moved to host memory there makes no room; what is moved to a disk does."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    small = {"model": {"dim": 256, "layers": 8, "heads": 4, "vocab_size": 128}, "batch": {"micro_batch": 1}}
    needed = memory_of(setup_of(config(**small), 1)).near_bytes
    assert memory_of(setup_of(config(**small, plan="zero3@cpu-all"), 1)).near_bytes > 0.9 * needed
    monkeypatch.setattr(fit, "available_host_bytes", lambda: int(0.6 * needed))
    for plan in ("zero3", "zero3@cpu-all"):
        with pytest.raises(BadInput, match=r"offload\.optim=nvme with an offload\.path"):
            check_plan(config(**small, plan=plan), 1)
    there = {"path": "/", "grad": "nvme", "block_mib": 0.0625}
    check_plan(config(**small, plan="zero3@nvme-all", offload=there), 1)


def test_on_a_cpu_no_advice_is_to_move_states_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to take more ranks, which share its memory: the largest term here is no state."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(fit, "available_host_bytes", lambda: 1 << 20)
    there = {"path": "/", "grad": "nvme", "block_mib": 0.0625}
    small = {"batch": {"micro_batch": 1, "global_batch": 1, "sequence_length": 2}, "plan": "zero3@nvme-all"}
    for more in ({"offload": there}, {"offload": there, "precision": "bf16-pure"}):
        with pytest.raises(BadInput, match=r"Largest: disk buffers.*Use ") as caught:
            check_plan(config(**small, **more), 1)
        assert "offload.optim=cpu" not in str(caught.value)
        assert "more ranks" not in str(caught.value)
    with pytest.raises(BadInput, match=r"Use a smaller model\.dim or model\.layers\."):
        check_plan(config(**small, offload=there, precision="bf16-pure"), 1)


def test_what_a_run_wears_off_its_drives_is_said(tmp_path: Path) -> None:
    asked = config(plan="zero3@nvme", offload={"path": str(tmp_path)}, train={"steps": 500})
    bill = memory_of(setup_of(asked, 2))
    written = 2 * sum(term.value for term in bill.disk_writes)
    (note,) = offload_notes(asked, bill, 2)
    assert f"writes {written / 1e9:.3g} GB" in note
    assert f"500 steps of this run {500 * written / 1e9:.3g} GB: less than 0.1%" in note
    assert [line for line in check_plan(asked, 2) if "consumer" in line or "600 TB" in line] == [f"plan: {note}"]


def test_limits_of_a_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_lines_of", lambda _: {"VmData": 300, "VmSize": 700})
    limits = {resource.RLIMIT_DATA: 1000, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert allowed_bytes() == [700]
    limits[resource.RLIMIT_AS] = 500
    assert allowed_bytes() == [700, 0]
    monkeypatch.setattr(fit, "available_host_bytes", lambda: 10**12)
    found = fit.available(config(), 1)
    assert found is not None
    assert found.bytes == 0
    with pytest.raises(BadInput, match="what the limits of a process"):
        check_plan(config(), 1)


# -- runs --------------------------------------------------------------------------------------------------------------


def run_in(folder: Path, **sections: Any) -> Config:
    text = folder / "text.txt"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(600)))
    values: dict[str, Any] = {
        "model": {"dim": 16, "layers": 3, "heads": 2},
        "data": {"source": str(text), "cache": str(folder / "cache"), "validation_fraction": 0.2},
        "batch": {"global_batch": 4, "micro_batch": 2, "sequence_length": 16},
        "optimizer": {"lr": 0.003, "options": {"fused": True}},
        "train": {"steps": 4, "eval_every": 1, "eval_batches": 1, "sample_tokens": 4},
        "checkpoint": {"every": 2},
        "log": {"every": 1, "folder": str(folder / "run"), "tensorboard": False},
        "launch": {"device": "cpu"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    return config_from_dict(values)


class StopAfter(StopRequest):
    def __init__(self, steps: int | None) -> None:
        self.left = steps

    def agreed(self, broken: bool) -> tuple[bool, bool]:
        self.left = None if self.left is None else self.left - 1
        return self.left == 0, broken


def trained(asked: Config, stop_after: int | None = None) -> None:
    def body(rank: int) -> int:
        session = open_session(asked, ALONE)
        trainer = TrainingLoop(session, StopAfter(stop_after))
        try:
            return trainer.run()
        finally:
            session.close()
            session.loader.close()
            trainer.report.leave()

    run_in_threads(1, body)


def result(folder: Path) -> tuple[dict[tuple[str, str], torch.Tensor], list[tuple[float, ...]]]:
    """The last checkpoint, and every loss and norm."""
    path = latest(folder / "run" / "checkpoints")
    assert path is not None
    source = open_source(path)
    states = {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["loss"], line.get("grad_norm", 0.0)) for line in lines if "loss" in line]
    return states, curve


def summary(folder: Path) -> dict[str, Any]:
    line = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    found: dict[str, Any] = json.loads(line)
    assert found["kind"] == "summary"
    return found


TIERS = {
    "cpu": {"plan": "zero3@cpu"},
    "cpu-all, on the spot": {"plan": "zero3@cpu-all", "offload": {"step": "synchronous"}},
    "nvme": {"plan": "zero3@nvme"},
    "nvme-all": {"plan": "zero3@nvme-all", "offload": {"grad": "nvme", "block_mib": 0.0625, "digest": True}},
    "shares": {"offload": {"weight": {"cpu": 0.5}, "optim": {"nvme": 0.3, "cpu": 0.4}}},
}


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, Any]:
    """By clipping: what a run on the device ends with."""
    found = {}
    for clip in (1.0, None):
        folder = tmp_path_factory.mktemp("device")
        trained(run_in(folder, train={"clip": clip}))
        found[clip] = result(folder)
    return found


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("clip", [1.0, None], ids=["clipped", "in backward"])
@pytest.mark.parametrize("tiers", mostly_long(TIERS, "nvme-all", "shares"))
def test_a_run_ends_as_it_does_in_memory(
    tiers: str, clip: float | None, tmp_path: Path, in_memory: dict[float | None, Any]
) -> None:
    """To the bit, interrupted and resumed, with evaluation and samples between; and it leaves no swap files."""
    sections = {**TIERS[tiers], "train": {"clip": clip}}
    path = {"path": str(tmp_path / "run" / "swap")}
    asked = run_in(tmp_path, **{**sections, "offload": {**sections.get("offload", {}), **path}})
    trained(asked, stop_after=2)
    trained(asked)
    states, curve = result(tmp_path)
    expected, expected_curve = in_memory[clip]
    assert curve == expected_curve
    assert states.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(states[key], value), key
    assert not (tmp_path / "run" / "swap").exists() or not list((tmp_path / "run" / "swap").iterdir())


def test_the_summary_tells_bytes_by_tier_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run" / "swap")
    asked = run_in(tmp_path, plan="zero3@nvme-all", offload={"path": path}, batch={"micro_batch": 4})
    trained(asked)
    said = summary(tmp_path)
    for tier in ("state", "host", "disk"):
        assert said[f"{tier}_bytes_promised"] == said[f"{tier}_bytes_measured"], tier
    assert said["state_bytes_measured"] == 0
    numel = sum(info.numel for info in setup_of(asked, 1).model.units for _ in range(info.count))
    assert said["disk_bytes_measured"] >= 12 * numel
    assert said["peak_memory_bytes_promised"] == round(estimate_run(asked, 1).memory.near_bytes)
    usage = said["offload"]
    assert usage["stepped_numel"] >= 4 * numel
    assert usage["written_bytes"] >= 4 * 12 * numel
    out = capsys.readouterr().out
    assert bytes_line(said) in out
    page = (tmp_path / "run" / "report.html").read_text()
    for line in summary_lines(said):
        assert line in page
    for words in (
        "host memory: promised",
        "swap files, of this rank: promised",
        "of this rank: read",
        "optimizer step on the CPU:",
    ):
        assert words in page
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates: dict[str, Any] = {}  # updates go on beside the steps: not every log step sees one end
    for line in steps:
        rates |= line
    assert min(rates[name] for name in ("disk_read_gb_s", "disk_write_gb_s", "cpu_step_gparam_s")) > 0
    assert "read GB/s" in out


def test_a_run_on_the_device_says_nothing_of_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(run_in(tmp_path))
    assert "swap" not in (out := capsys.readouterr().out)
    assert "GB/s" not in out
    assert "cpu_step_gparam_s" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("mode", mostly_long(["full", "selective", "every_2"], "selective"))
def test_offloaded_activations_change_nothing(mode: str, tmp_path: Path) -> None:
    results = []
    for where in ("device", "cpu"):
        folder = tmp_path / where
        folder.mkdir()
        train = {"activation_checkpointing": mode, "steps": 2}
        asked = run_in(folder, train=train, offload={"activations": where}, batch={"sequence_length": 64})
        check(asked, 1)
        trained(asked)
        results.append(result(folder))
    assert results[0][1] == results[1][1]
    assert all(torch.equal(results[0][0][key], results[1][0][key]) for key in results[0][0])


def test_folders_are_made_when_the_run_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_in(tmp_path, plan="zero3@nvme", offload={"path": str(tmp_path / "run" / "swap")})
    check(asked, 1)
    assert not (tmp_path / "run").exists()
    assert swap_folders(asked) == (tmp_path / "run" / "swap",)


LIMITED = """
model: {dim: 512, layers: 8, heads: 8}
data: {source: SOURCE, validation_fraction: 0, cache: FOLDER/cache}
plan: zero3@nvme-all
offload: {grad: nvme, path: FOLDER/run/swap, block_mib: 1, depth: 2}
batch: {global_batch: 1, micro_batch: 1, sequence_length: 32}
train: {steps: 2, sample_tokens: 0}
checkpoint: {resume: never, overwrite: true}
launch: {ranks: 1, device: cpu, threads: 1}
log: {every: 1, folder: FOLDER/run, tensorboard: false}
"""
LEFT_BYTES = 280 << 20
"""What the limit leaves a process beyond what it has mapped when it begins: less than the states."""

IN_MEMORY = ("plan=zero3", "offload.grad=device")


TRAIN_UNDER_A_LIMIT = """
import re, resource, runpy, sys
mapped_kib = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
limit_bytes = (mapped_kib << 10) + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
runpy.run_module("terrazzo", run_name="__main__", alter_sys=True)
"""


def under_a_limit(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    text, path = folder / "text.txt", folder / "config.yaml"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(600)))
    path.write_text(LIMITED.replace("SOURCE", str(text)).replace("FOLDER", str(folder)))
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    words = ("-c", TRAIN_UNDER_A_LIMIT, str(LEFT_BYTES), "train", str(path), *overrides)
    return programs.run(*words, env={**kept, "OMP_NUM_THREADS": "1"}, timeout_s=170)


@pytest.mark.long
@pytest.mark.processes
def test_states_larger_than_the_memory_limit_are_trained_from_a_disk(tmp_path: Path) -> None:
    """The same run with its states in memory is refused, and fails where nothing refuses it."""
    done = under_a_limit(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert summary(tmp_path)["disk_bytes_measured"] > LEFT_BYTES
    assert not list((tmp_path / "run" / "swap").iterdir())
    refused = under_a_limit(tmp_path, *IN_MEMORY)
    assert refused.returncode == 2
    assert "what the limits of a process" in refused.stderr
    forced = under_a_limit(tmp_path, *IN_MEMORY, "launch.ignore_planner=true")
    assert forced.returncode == 1
    assert "can't allocate memory" in forced.stderr
