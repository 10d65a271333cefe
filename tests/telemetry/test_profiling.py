"""Scripts of others: what is seen of them from outside, and that they compute, print and end as they do without."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.errors import BadInput
from terrazzo.telemetry import advice_for, steps_of, verdict_of
from terrazzo.telemetry.profiling import command, probe
from terrazzo.telemetry.profiling.command import profile
from terrazzo.telemetry.profiling.merging import StepMerger
from terrazzo.telemetry.profiling.probe import ScriptProbe
from tests.helpers import programs
from tests.helpers.cover import mostly_long

PEAK = """
import sys, types
from pathlib import Path
for name in ("torch", "torch.distributed"):  # a process as small as can be
    sys.modules[name] = types.ModuleType(name)
sys.modules["torch"].distributed = sys.modules["torch.distributed"]
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("probe", sys.argv[1])
probe = module_from_spec(spec)
spec.loader.exec_module(probe)
held = b"x" * (100 << 20)
print(probe.ScriptProbe(Path("nowhere"))._memory()["peak"])
"""

SCRIPT = """
import sys, time, torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

mode, looked_at = sys.argv[1:]
if looked_at != "none":
    from pathlib import Path
    from terrazzo.telemetry.profiling.probe import ScriptProbe
    from terrazzo.telemetry.profiling.wraps import begin
    begin(ScriptProbe(Path(looked_at)))
dist.init_process_group("gloo")
rank = dist.get_rank()

class Rows(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        time.sleep(0.01 if mode == "input" else 0.0)
        return torch.full((64,), (index + rank) / 96)

torch.manual_seed(0)
wide = 1024 if mode == "compute" else 64
model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.BatchNorm1d(wide), nn.Linear(wide, 1))
if mode == "fsdp":
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        fully_shard(layer)
    run = fully_shard(model)
elif mode == "sharded":
    import terrazzo as tz
    run = model
else:
    run = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
if mode == "sharded":
    run, optimizer = tz.shard(model, optimizer, plan="zero3", units=[nn.Linear])
for batch in DataLoader(Rows(), 8):
    if mode == "late" and rank == 1:
        time.sleep(0.25)
    loss = run(batch.repeat(40 if mode == "compute" else 1, 1)).square().mean()
    loss.backward()
    (tz.clip_grad_norm_(run, 1.0) if mode == "sharded" else nn.utils.clip_grad_norm_(run.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
with torch.no_grad():
    print(sum(each.float().sum().item() for each in DataLoader(Rows(), 48)))
dist.barrier()
dist.destroy_process_group()
"""


@functools.cache
def printed_without(mode: str, ranks: int) -> list[str]:
    return [each.stdout for each in programs.on_ranks(ranks, "-c", SCRIPT, mode, "none")]


def seen(mode: str, folder: Path, ranks: int = 2) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Records of a script, what it was seen to use, and what each rank has printed."""
    done = programs.on_ranks(ranks, "-c", SCRIPT, mode, str(folder))
    assert [each.returncode for each in done] == [0] * ranks, [each.stderr for each in done]
    merged = StepMerger(folder)
    records = [{"kind": "step", "step": step, **record} for step, record in merged.new(at_end=True)]
    return records, merged.facts, [each.stdout for each in done]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "ranks", "bound", "advice"),
    [
        ("input", 1, "input", "num_workers=2"),
        pytest.param("input", 2, "input", "num_workers=2", marks=pytest.mark.long),  # ranks wait for cores, too
        ("late", 2, "late_rank", "A look at its machine"),
        pytest.param("compute", 1, "compute", "More ranks, or faster ones", marks=pytest.mark.long),
    ],
)
def test_what_bounds_a_script_of_others_is_found_and_nothing_changes(
    mode: str, ranks: int, bound: str, advice: str, tmp_path: Path
) -> None:
    records, facts, printed = seen(mode, tmp_path / "ranks", ranks)
    assert printed_without("compute" if mode == "compute" else "ddp", ranks) == printed
    assert [(record["step"], record["steps"]) for record in records] == [(1, 1), (11, 10), (12, 1)]
    for record in records:
        for field in ("phase_s", "cause_s"):
            assert sum(record[field].values()) == pytest.approx(record["step_s"], rel=1e-6)
            assert min(record[field].values()) >= 0
    found = verdict_of(steps_of(records))
    assert found is not None
    assert found.bound == bound, found
    assert found.rank == (1 if mode == "late" else None)
    assert advice in advice_for(found.bound, facts).text
    assert facts["workers"] == 0
    assert facts["cores"] == max(1, len(os.sched_getaffinity(0)) // ranks)
    assert facts["ddp"]
    assert records[1]["comm"]["all_reduce"]["n"] == 1, "sums of gradients"
    assert records[1]["comm"]["broadcast"]["n"] == 1, "statistics of batches"


@pytest.mark.processes
@pytest.mark.parametrize("mode", mostly_long(["fsdp", "sharded"], "sharded"))
def test_sharded_models_are_seen_too(mode: str, tmp_path: Path) -> None:
    records, facts, printed = seen(mode, tmp_path / "ranks")
    assert printed_without(mode, 2) == printed
    record = records[1]
    kinds = {key.split()[-1] for key in record["comm"]}
    assert {"all_gather", "reduce_scatter"} <= kinds
    assert record["phase_s"]["input"] > 0
    assert record["cause_s"]["gather"] + record["cause_s"]["late_peer"] > 0
    assert len(record["skew"]["late_peer_s"]) == 2
    assert facts.get("fsdp" if mode == "fsdp" else "terrazzo")


def test_the_peak_of_a_script_is_its_own_and_not_that_of_who_has_started_it() -> None:
    large = b"x" * (700 << 20)
    del large
    command = [sys.executable, "-c", PEAK, str(Path(probe.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 100 << 20 < int(done.stdout) < 300 << 20


def test_a_late_rank_is_told_from_bytes_by_when_all_were_there(tmp_path: Path) -> None:
    """One exchange of two ranks: rank 0 waits from 0 to 50 ms, rank 1 comes at 40, and the bytes take 10."""
    for rank, start in enumerate((0, 40)):
        begins = {"rank": rank, "world": 2, "here": 2, "boot": "one", "on_cuda": False}
        wait = ["", 1, "all_reduce", 2, start * 10**6, start * 10**6, 50 * 10**6]
        waited = {"backward": (50 - start) * 10**6}
        step = {"step": 1, "end": 0, "seconds": {"backward": 10**8}, "waited": waited, "waits": [wait]}
        lines = [{"begins": begins}, {"facts": {}}, step | {"memory": {"peak": 1}}]
        (tmp_path / f"rank-{rank:05}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((_, record),) = StepMerger(tmp_path).new()
    assert record["cause_s"]["late_peer"] == pytest.approx(0.04)
    assert record["cause_s"]["reduce"] == pytest.approx(0.01)
    assert record["skew"]["late_peer_s"] == pytest.approx([0.04, 0.0])


def begin_of(rank: int, **more: Any) -> dict[str, Any]:
    return {"begins": {"rank": rank, "world": 2, "here": 2, "boot": "one", "on_cuda": False, **more}}


def step_of(number: int, seconds: float = 1.0, waits: Sequence[Any] = ()) -> dict[str, Any]:
    spent = {"forward": int(seconds * 1e9)}
    return {"step": number, "end": 0, "seconds": spent, "waited": {}, "waits": waits, "memory": {"peak": 1}}


def merged(folder: Path, *ranks: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    for rank, lines in enumerate(ranks):
        (folder / f"rank-{rank:05}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(StepMerger(folder).new(at_end=True))


def test_sums_are_paired_whatever_ranks_send_to_each_other_on_the_same_group(tmp_path: Path) -> None:
    """Rank 0 of three sends twice and rank 1 once, then all sum: rank 1 comes 10 s late."""
    scripted = ScriptProbe(tmp_path / "unused")
    ranks = []
    for rank, (sends, came) in enumerate(((2, 0), (1, 10), (1, 0))):
        scripted.begin()
        waits = [[*scripted.begun(None, "send", 0), 0, 10**9] for _ in range(sends)]
        waits.append([*scripted.begun(None, "all_reduce", came * 10**9), came * 10**9, 11 * 10**9])
        waits = [[group, ordinal, kind, 3, *times] for group, ordinal, kind, _, *times in waits]
        ranks.append([begin_of(rank), step_of(1, waits=waits)])
    ((_, record),) = merged(tmp_path, *ranks)
    assert record["skew"]["late_peer_s"] == pytest.approx([10, 0, 10])


def test_after_a_restart_ranks_are_compared_at_the_same_steps(tmp_path: Path) -> None:
    """Rank 0 had finished 14 steps and rank 1 12, of which one was in its files by half, as the script was killed.

    The second start ends before rank 1 has done a step; in the third, rank 1 takes as many seconds as a step's number.
    """
    first = [
        [begin_of(rank), *(step_of(number) for number in range(1, last + 1))] for rank, last in enumerate((14, 12))
    ]
    third = [[begin_of(rank, restart=2), *(step_of(n, n if rank else 1) for n in range(1, 13))] for rank in range(2)]
    second = [[begin_of(0, restart=1), step_of(1, 99.0)], []]
    records = merged(tmp_path, *([*a, *b, *c] for a, b, c in zip(first, second, third, strict=True)))
    assert [step for step, _ in records] == [1, 11, 12, 13, 23, 24]
    assert [record["steps"] for _, record in records] == [1, 10, 1, 1, 10, 1]
    assert [record["skew"]["step_s"][1] for _, record in records[3:]] == pytest.approx([1, 6.5, 12])
    assert max(record["skew"]["step_s"][0] for _, record in records) == 1


def test_a_line_that_a_killed_process_left_unfinished_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "rank-00000.jsonl"
    begins = json.dumps({"begins": begin_of(0)["begins"] | {"here": 1}})
    file.write_text(f'{begins}\n{json.dumps(step_of(1))}\n{{"step": 2, "en\n{begins}\n{json.dumps(step_of(1))}\n')
    assert [step for step, _ in StepMerger(tmp_path).new(at_end=True)] == [1, 2]


ALONE = """
import signal, sys, torch
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.square().sum().backward()
    optimizer.step()
print("trained", weight.tolist(), flush=True)
signal.pause()
"""


def test_the_command_passes_on_signals_output_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    words = ("-m", "terrazzo", "profile", "--out", "seen", "--", sys.executable, "train.py")
    program = programs.Program(*words, cwd=tmp_path)
    assert program.stdout.readline().startswith("trained [")
    program.send_signal(signal.SIGUSR1)
    done = program.communicate()
    assert (done.returncode, done.stdout) == (7, "")
    assert "bounds the step" in done.stderr
    assert "3 steps seen" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "seen/metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("step", 1), ("step", 3), ("end", 3)]


COUNTS = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(time.monotonic()))
open("ready", "w").close()
while not got or time.monotonic() < got[0] + 1.0:
    time.sleep(0.01)
print(len(got))
"""


@pytest.mark.parametrize(("whole_group", "behind"), [(True, False), (True, True), (False, False)])
def test_one_interrupt_is_one_whoever_it_was_sent_to(whole_group: bool, behind: bool, tmp_path: Path) -> None:
    """To the whole group, as `timeout` sends it, or to the command alone; started `behind` a shell's `&`, or not."""
    (tmp_path / "train.py").write_text(COUNTS)
    words = [sys.executable, "-m", "terrazzo", "profile", "--out", "seen", "--", sys.executable, "train.py"]
    meant = signal.signal(signal.SIGINT, signal.SIG_IGN if behind else signal.default_int_handler)
    try:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, meant)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "1\n"


def test_a_second_interrupt_that_finds_the_script_at_its_end_leaves_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = signal.sigtimedwait, []

    def sigtimedwait(signals: Any, timeout_s: float) -> Any:
        told = real(signals, timeout_s)
        if told is not None and told.si_signo == signal.SIGCHLD and not sent:
            sent.append(signal.pthread_kill(threading.get_ident(), signal.SIGINT))  # others do not block it
        return told

    monkeypatch.setattr(signal, "sigtimedwait", sigtimedwait)
    assert profile([sys.executable, "-S", "-c", "raise SystemExit(3)"], tmp_path / "one") == (3, 0, None)
    assert sent


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"workers": 2, "cores": 8, "persistent": False}, "DataLoader(..., num_workers=4, persistent_workers=True)"),
        ({"workers": 6, "cores": 8, "persistent": True}, "DataLoader(..., num_workers=8)"),
        (
            {"workers": 8, "cores": 8, "persistent": True},
            "Less work on each sample, as the DataLoader's 8 workers have all 8 cores of a rank, would help",
        ),
    ],
)
def test_workers_that_are_too_few_are_named_with_the_edit_as_far_as_there_are_cores(
    facts: dict[str, Any], said: str
) -> None:
    assert advice_for("input", facts).text == said


def test_a_command_that_is_no_training_ends_as_it_does_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_EVERY_S", 300.0)
    assert profile([sys.executable, "-S", "-c", "raise SystemExit(3)"], tmp_path / "one") == (3, 0, None)
    start = time.monotonic()
    assert profile(["sh", "-c", "kill -TERM $$"], tmp_path / "two") == (128 + signal.SIGTERM, 0, None)
    assert time.monotonic() - start < 100, "its end is heard of at once"
    with pytest.raises(BadInput, match="records of an earlier run"):
        profile(["true"], tmp_path / "one")
    with pytest.raises(BadInput, match="no command 'trainn'"):
        profile(["trainn"], tmp_path / "three")


def test_a_device_that_has_nothing_to_do_waits_for_the_host() -> None:
    line = {"kind": "step", "step": 10, "steps": 10, "step_s": 1.0, "phase_s": {"forward": 1.0}}
    bounds = [getattr(verdict_of([line | {"starved": share}]), "bound", None) for share in (0.2, 0.9)]
    assert bounds == ["device", "host"]
    assert "torch.compile(model)" in advice_for("host", {}).text
    assert "autocast" in advice_for("device", {}).text
    assert advice_for("compute", {}).text == "More ranks, or faster ones, would help", "on a CPU neither was measured"


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("lines", ["", '{"kind": "begin", "step": 0}\n'])
def test_a_script_of_too_few_steps_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, lines: str
) -> None:
    """Its own records, of a log step each tenth, have none yet."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "metrics.jsonl").write_text(lines)
    monkeypatch.setattr(command, "profile", lambda words, folder: command.ProfiledScript(code, 3, own))
    ended = CliRunner().invoke(cli.app, ["profile", "--", "python", "train.py"])
    assert ended.exit_code == code
    assert f"3 steps seen, and no record of one was written in {own}" in ended.stderr
    assert "None" not in ended.stderr


def test_a_file_that_is_no_program_is_refused_and_leaves_its_folder_free(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("print(1)\n")
    script.chmod(0o755)
    with pytest.raises(BadInput, match=rf"'{script}' cannot be started \(Exec format error\): .*python {script}"):
        profile([str(script)], tmp_path / "run")
    assert profile([sys.executable, str(script)], tmp_path / "run").code == 0


def test_a_full_disk_leaves_the_scripts_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.json").symlink_to("/dev/full")
    assert profile([sys.executable, "-c", "raise SystemExit(3)"], tmp_path).code == 3
    assert f"'{tmp_path}/script.json' cannot be written (No space left on device)" in capfd.readouterr().err


def test_works_that_nobody_waits_for_do_not_hide_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MOST_WORKS", 2)
    watching, works = probe.ScriptProbe(tmp_path), [dist.Work() for _ in range(4)]
    for work in works:
        watching.exchange("all_reduce", lambda work=work: work, (), {})
    for work in works:
        watching.wait(work, lambda work: None, (), {})
    assert [ordinal for _, ordinal, *_ in watching._waits] == [3, 4]
