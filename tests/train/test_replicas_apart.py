"""Groups of ranks that train by themselves (`plan.sync_every`), in a run of the command line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.data import Loader
from terrazzo.train.preflight import check
from terrazzo.train.preflight.refusals import check_samples_of_groups
from terrazzo.train.settings.plan import build_offload, check_rounds, mesh_shape
from tests.helpers import programs
from tests.train.test_again import LAUNCHER, killed_by, weights
from tests.train.test_data_loader import make_dataset
from tests.train.test_elastic import RANK
from tests.train.test_loop import command, curve, environment, metrics

APART = ("plan.mesh.dp_replicate=2", "plan.sync_every=3", "plan.outer.traffic=int8", "train.steps=9")


STREAMING = (
    *("plan.mesh.dp_replicate=2", "plan.sync_every=2", "plan.outer.traffic=int8", "plan.outer.fragments=2"),
    *("plan.outer.delay=1", "plan.outer.meet_every=4", "train.steps=12"),
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "steps", "ends"),
    [
        pytest.param(APART, "an outer step every 3 steps", [3, 6, 9], marks=pytest.mark.long),
        (STREAMING, "groups meet every 4 steps", [4, 8, 12]),
    ],
    ids=["rounds", "fragments that stream"],
)
def test_a_run_saves_at_the_ends_of_rounds_and_goes_on_from_there_bit_for_bit(
    tmp_path: Path, words: tuple[str, ...], steps: str, ends: list[int]
) -> None:
    every = f"checkpoint.every={ends[0] + 1}"
    done = programs.run(*command(tmp_path, *words, every), env=environment())
    assert done.returncode == 0, done.stderr
    assert "rounds    2 groups (plan.mesh.dp_replicate) train by themselves, an outer step every " in done.stdout
    assert steps in done.stdout
    expected, validation = curve(tmp_path), metrics(tmp_path, "validation")
    assert [point[0] for point in expected] == ends
    assert expected[-1][1] < expected[0][1]
    assert [line["step"] for line in validation] == [0, *ends]
    summary = metrics(tmp_path, "summary")[0]
    assert summary["round_steps"] == ends[0]
    for what in ("traffic", "round_traffic", "transient", "state"):
        assert summary[f"{what}_bytes_measured"] == summary[f"{what}_bytes_promised"]
    sent, of_round = (sum(summary[f"{of}_bytes_measured"].values()) for of in ("traffic", "round_traffic"))
    assert (
        f"sent per step on average {of_round / ends[0] / 2**20:.2f}, sent where groups meet {sent / 2**20:.2f}"
        in done.stdout
    )
    record = metrics(tmp_path, "step")[-1]
    assert sum(record["promised"]["sent_bytes"].values()) == of_round / ends[0]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{end:08}" for end in ends[1:]]
    shutil.rmtree(checkpoints / f"step-{ends[2]:08}")

    first, second = programs.on_ranks(2, *command(tmp_path, *words, "checkpoint.resume=required"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert f"resumed at step {ends[1]}" in first.stdout
    assert curve(tmp_path) == expected
    assert metrics(tmp_path, "validation") == validation


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "behind"),
    [((*APART, "train.steps=18"), 9), ((*STREAMING, "train.steps=24"), 8)],
    ids=["rounds", "fragments that stream"],
)
def test_a_replica_that_is_killed_in_a_round_changes_no_loss_and_no_weight(
    tmp_path: Path, words: tuple[str, ...], behind: int
) -> None:
    """The oracle is the run that nobody has disturbed, on ranks that nobody starts again."""
    words = (*words, "checkpoint.every=4")
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    undisturbed.mkdir()
    for end in programs.on_ranks(2, *command(undisturbed, *words)):
        assert end.returncode == 0, end.stderr
    launcher = programs.Program(*command(killed, *words, "launch.restarts=1"), env=environment())
    done = killed_by(launcher, signal.SIGKILL, behind_step=behind)
    assert done.returncode == 0, done.stderr
    (restart,) = metrics(killed, "restart")
    assert restart["step"] in range(4, 21)
    assert curve(killed) == curve(undisturbed)
    assert metrics(killed, "validation") == metrics(undisturbed, "validation")
    assert weights(killed) == weights(undisturbed)


FOLLOWING = ("plan.mesh.dp_replicate=null", "plan.mesh.dp_shard=2")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("mesh", [(), FOLLOWING], ids=["two groups of one", "one group of two"])
def test_a_rank_that_is_lost_leaves_fewer_to_each_group_or_fewer_groups(tmp_path: Path, mesh: tuple[str, ...]) -> None:
    """The oracle is a run of so many ranks that begins at the same checkpoint of two groups of two."""
    fewer, whole = tmp_path / "fewer", tmp_path / "whole"
    for each in (fewer, whole):
        each.mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    words = [*APART, *mesh, "checkpoint.every=3", "checkpoint.keep_last=null", "model.dropout=0"]
    words += ["train.sample_tokens=0"]
    started = command(fewer, *words, "launch.ranks=2:4", "launch.restarts=2")
    lost = {**environment(), "LOST": "3"}
    launcher = programs.Program("-c", LAUNCHER, str(tmp_path / "rank.py"), *started[2:], env=lost)
    done = killed_by(launcher, signal.SIGKILL, behind_step=6)
    assert done.returncode == 0, done.stderr
    assert "rank 3 of 4 fails at its start again; starting 2 ranks" in done.stdout
    (restart,) = metrics(fewer, "restart")
    assert restart["ranks"] == 2
    begun = f"step-{restart['step']:08}"
    shutil.copytree(fewer / "run" / "checkpoints" / begun, whole / "run" / "checkpoints" / begun)
    for end in programs.on_ranks(2, *command(whole, *words)):
        assert end.returncode == 0, end.stderr
    assert [point[0] for point in curve(whole)] == list(range(restart["step"] + 3, 10, 3))
    assert curve(fewer)[-len(curve(whole)) :] == curve(whole)
    assert weights(fewer) == weights(whole)


@pytest.mark.long
@pytest.mark.processes
def test_a_group_leaves_and_comes_back_by_the_number_of_ranks(tmp_path: Path) -> None:
    words = [*APART, "plan.mesh.dp_replicate=null", "plan.mesh.dp_shard=1", "checkpoint.every=6"]
    for ranks, steps, groups in ((2, 6, "2 groups"), (1, 12, "1 group"), (2, 18, "2 groups")):
        ends = programs.on_ranks(ranks, *command(tmp_path, *words, f"train.steps={steps}"))
        assert [end.returncode for end in ends] == [0] * ranks, ends[0].stderr
        assert f"{groups} (plan.mesh.dp_replicate) train" in ends[0].stdout
    losses = {point[0]: point[1] for point in curve(tmp_path)}
    assert list(losses) == [3, 6, 9, 12, 15, 18]
    assert losses[6] > losses[12] > losses[18]
    for summary in metrics(tmp_path, "summary"):
        for what in ("traffic", "transient", "state"):
            assert summary[f"{what}_bytes_measured"] == summary[f"{what}_bytes_promised"]


def agent(folder: Path, port: int, *words: str) -> subprocess.Popen[str]:
    """A torchrun of one rank that goes on with those that are there, as on a machine of its own."""
    meets = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost")
    soon = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1", "--max-restarts", "3")
    launcher = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", *meets, *soon]
    return subprocess.Popen(
        [sys.executable, *launcher, *command(folder, *words, "launch.ranks=null")],
        env={**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # or who joins waits in torch 2.13
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(agent: subprocess.Popen[str]) -> None:
    """As a machine that is lost."""
    lists = Path(f"/proc/{agent.pid}/task").glob("*/children")
    ranks = {int(pid) for children in lists for pid in children.read_text().split()}
    for pid in (agent.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def until(agent: subprocess.Popen[str], *patterns: str) -> list[re.Match[str]]:
    """The first lines that match, one behind the other."""
    assert agent.stdout is not None
    found, said = list[re.Match[str]](), list[str]()
    for line in agent.stdout:
        said.append(line)
        if match := re.search(patterns[len(found)], line):
            found.append(match)
            if len(found) == len(patterns):
                return found
    raise AssertionError("".join(said))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks in /proc")
@pytest.mark.parametrize("gently", [True, False], ids=["taken away", "lost"])
def test_a_machine_joins_and_leaves_under_torchrun(tmp_path: Path, gently: bool) -> None:
    words = [*APART, "plan.mesh.dp_replicate=null", "plan.mesh.dp_shard=1", "train.steps=300000", "checkpoint.every=60"]
    words += ["train.eval_every=null", "train.sample_tokens=0"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    groups, row, resumed = r"rounds +(\d) groups?", r"^ +(\d+) +\d+\.\d{4}", r"resumed at step (\d+)"
    first = agent(tmp_path, port, *words)
    agents, late = [first], threading.Timer(200, lambda: [end(each) for each in agents])
    late.start()
    try:
        alone, _ = until(first, groups, row)
        agents.append(second := agent(tmp_path, port, *words))
        stopped, together, joined, _ = until(first, r"stopped +step (\d+)", groups, resumed, row)
        second.terminate() if gently else end(second)
        saved = until(first, r"stopped +step (\d+)")[0][1] if gently else joined[1]
        left, went_on, _ = until(first, groups, resumed, row)
    finally:
        late.cancel()
        for each in agents:
            end(each)
            assert each.stdout is not None
            each.stdout.close()
    assert [match[1] for match in (alone, together, left)] == ["1", "2", "1"]
    assert joined[1] == stopped[1], "what the group alone had done is kept, to the end of its round"
    assert went_on[1] == saved if gently else int(went_on[1]) >= int(saved)
    assert not int(joined[1]) % 3 and not int(went_on[1]) % 3


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"plan": {"mesh": {"dp_replicate": 1}}}, r"there is one group of ranks: set plan\.mesh\.dp_replicate"),
        ({"plan": {"outer": {"delay": 1}}}, r"plan\.outer: meet_every is None.*give a multiple of sync_every 3"),
        (
            {"plan": {"outer": {"fragments": 2, "meet_every": 30}}},
            r"plan\.outer\.meet_every 30 does not divide .* Set train\.steps=90 or 120",
        ),
        (
            {"plan": {"sync_every": 9, "outer": {"fragments": 9, "meet_every": 99}}, "model": {"layers": 4}},
            r"plan\.outer\.fragments is 9; .* this model has 5: set plan\.outer\.fragments=5 or fewer",
        ),
        ({"train": {"steps": 100}}, r"the last 1 would end without an outer step. Set train\.steps=99 or 102"),
        ({"plan": {"name": "hybrid_shard"}}, r"take plan=zero3, which splits over the ranks of one group"),
        ({"precision": "bf16-pure"}, r"master weights are bfloat16: set precision\.master=fp32"),
        ({"guard": {"spike": 8}}, r"guard judges each step by the gradients of all ranks: set guard\.action=stop"),
        ({"guard": {"replay_every": 5}}, r"set guard\.replay_every=null"),
        ({"train": {"check_replicas_every": 5}}, r"set train\.check_replicas_every=null"),
        ({"model": {"experts": {"count": 4}}}, r"train a model without experts"),
        ({"plan": {"mesh": {"pp": 2}}}, r"plan\.mesh\.pp is 2, which has not been tried"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_before_the_start(tmp_path: Path, raw: dict[str, Any], said: str) -> None:
    plan = {"mesh": {"dp_replicate": 2}, "sync_every": 3}
    plan |= raw.get("plan", {})
    plan["mesh"] = {"dp_replicate": 2, **raw.get("plan", {}).get("mesh", {})}
    base = {"log": {"folder": str(tmp_path / "run")}, "launch": {"device": "cpu"}, "train": {"steps": 99}}
    with pytest.raises(BadInput, match=said):
        check(config_from_dict({**base, **raw, "plan": plan}), 4)
    assert not any(tmp_path.iterdir())


def test_groups_that_follow_the_ranks_are_whole_and_have_samples(tmp_path: Path) -> None:
    plan = {"mesh": {"dp_replicate": None, "dp_shard": 2}, "sync_every": 3}
    raw = {"log": {"folder": str(tmp_path / "run")}, "launch": {"device": "cpu"}, "train": {"steps": 99}, "plan": plan}
    config = config_from_dict({**raw, "batch": {"global_batch": 8, "micro_batch": 2}})
    assert [mesh_shape(config.plan.mesh, ranks)["dp_replicate"] for ranks in (2, 4, 6)] == [1, 2, 3]
    for ranks, numbers in ((3, "2 or 4"), (1, "2")):
        with pytest.raises(BadInput, match=rf"groups of 2 ranks .* this run has {ranks} ranks?: start {numbers}, or"):
            mesh_shape(config.plan.mesh, ranks)
    check_samples_of_groups(config, 4)
    with pytest.raises(BadInput, match=r"leaves none to 1 of the 3 groups .*: set batch\.global_batch=12, or start"):
        check(config, 6)


def test_rounds_are_counted_from_where_a_run_goes_on() -> None:
    config = config_from_dict({"plan": {"mesh": {"dp_replicate": 2}, "sync_every": 3}, "train": {"steps": 100}})
    check_rounds(config, 40)
    check_rounds(config, 100)
    with pytest.raises(BadInput, match=re.escape("train.steps 100, from step 41: the last 2 would end")):
        check_rounds(config, 41)


def test_weights_that_a_round_begins_with_are_noted_before_they_are_updated() -> None:
    raw = {"plan": {"name": "zero3@cpu", "mesh": {"dp_replicate": 2}, "sync_every": 3}, "train": {"clip": None}}
    assert build_offload(config_from_dict(raw)).step == "overlapped"
    del raw["plan"]["sync_every"]
    assert build_offload(config_from_dict(raw)).step == "backward"


def test_a_replica_divides_by_its_own_samples(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 29)  # the last sequence is half full
    batch = {"global_batch": 12, "micro_batch": 2}
    plan = {"mesh": {"dp_replicate": 2}, "sync_every": 3}
    config = config_from_dict({"batch": batch, "plan": plan})
    loaders = [Loader(dataset, config, rank, 4) for rank in range(4)]
    unlike = False
    for _ in range(5):
        steps = [loader.next_step() for loader in loaders]
        own = [sum(part.samples for part in step.micro_batches) for step in steps]
        assert np.sum(own) == steps[0].samples
        assert [step.learnt for step in steps] == [own[0] + own[1]] * 2 + [own[2] + own[3]] * 2
        unlike |= own[0] + own[1] != own[2] + own[3]
    assert unlike
    for loader in loaders:
        loader.close()
