"""Ranks that may become fewer: what a range says, what is refused of it, and the bits of what goes on."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from terrazzo.config import config_from_dict, load_config
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.rank_slots import RankSlots, slots_of
from terrazzo.launch.launcher.restart_policy import RestartPoint, RestartPolicy
from terrazzo.launch.launcher.run_end import RunEnd
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.launch.launcher_pipe import LauncherPipe
from terrazzo.launch.machine import ranks_to_start
from terrazzo.launch.rank.rank_process import RankProcess
from terrazzo.launch.stopping.notices import Notices
from terrazzo.messages import counted
from terrazzo.telemetry import FlightRecorder
from terrazzo.train.model import prepare
from terrazzo.train.preflight import check, checks
from terrazzo.train.settings.run_command import RunCommand
from terrazzo.train.trainer_rank import _RankOfRun
from tests.helpers import programs
from tests.train.test_again import LAUNCHER, killed_by
from tests.train.test_loop import command, curve, environment, metrics
from tests.train.test_session import config_in

# -- what a configuration says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "launch: {ranks: 2:4, restarts: 1}"),
        ("a.yaml", "launch:\n  ranks: 2:4\n  restarts: 1"),
        ("a.yaml", "launch: {ranks: '2:4', restarts: 1}"),
        ("a.json", '{"launch": {"ranks": "2:4", "restarts": 1}}'),
        ("a.toml", 'launch = {ranks = "2:4", restarts = 1}'),
    ],
)
def test_a_range_is_text_in_every_format_and_never_base_60(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_config(path).launch.ranks == "2:4"
    assert list(load_config(path).launch.numbers(2)) == [2, 4]
    assert load_config(path, ["launch.ranks=3:5"]).launch.ranks == "3:5"
    assert load_config(path, ["launch={ranks: 3:5, restarts: 2}"]).launch.ranks == "3:5"
    assert load_config(path, ["launch.ranks=124"]).launch.ranks == 124
    with pytest.raises(BadInput, match=r"the number 2:4, which YAML 1.1 reads in base 60"):
        load_config(path, ["train.steps=2:4"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": "4:2"}, "launch.ranks: '4:2' is no range of ranks, which is least:most: write 2:4"),
        ({"ranks": "3:3"}, "'3:3' is no range of ranks, which is least:most: write 3"),
        ({"ranks": "0:3"}, "'0:3' is no range of ranks, which is least:most: write 1:3"),
        ({"ranks": "2:"}, "launch.ranks: '2:' is neither a number of ranks nor a range of them, least:most"),
        ({"ranks": "2"}, r"launch.ranks is '2', expected a whole number, or null: .*\. Write 2, without quotes"),
        ({"ranks": 0}, "launch.ranks is 0, expected a number above 0"),
        ({"ranks": 2.5}, "launch.ranks is 2.5, expected a whole number"),
        ({"ranks": True}, "launch.ranks is True, expected a whole number"),
        (
            {"ranks": "2:4", "restarts": 0},
            "restarts is 0: set launch.restarts to how often that may be",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        config_from_dict({"launch": {"restarts": 1, **settings}})


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"dp_shard": 4}, "plan.mesh.dp_shard 4 says how many there are, 4: leave plan.mesh.dp_shard out"),
        ({"tp": 2, "dp_shard": 2}, "plan.mesh.dp_shard 2 says how many there are, 4"),
        ({"dp_replicate": None}, "dp_replicate and dp_shard are both null, .* set plan.mesh.dp_shard to the ranks of"),
        ({"dp_replicate": None, "dp_shard": 3}, r"multiples of 3 of them \(plan.mesh: pp, dp_shard, cp and tp\)"),
        ({"tp": 3}, r"multiples of 3 of them \(plan.mesh: pp, dp_replicate, cp and tp\), and two of these are not"),
    ],
)
def test_a_mesh_that_fixes_how_many_there_are_is_refused(mesh: dict[str, int | None], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        config_from_dict({"launch": {"ranks": "2:4", "restarts": 1}, "plan": {"name": "zero3", "mesh": mesh}})


def test_fewer_ranks_that_cannot_run_it_are_refused_before_a_start(tmp_path: Path) -> None:
    config = config_in(
        tmp_path,
        model={"experts": {"count": 4}},
        plan={"name": "zero3", "mesh": {"ep": 2}},
        launch={"ranks": "3:4", "restarts": 1, "device": "cpu"},
        batch={"global_batch": 8},
    )
    with pytest.raises(
        BadInput, match=r"launch.ranks is 3:4, and of 3 ranks it would be refused: plan.mesh: The mesh has ep 2"
    ):
        check(config, 4, fewer=[3])
    check(config, 4)


def test_what_does_not_depend_on_the_number_of_ranks_is_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(
        tmp_path,
        launch={"ranks": "1:4", "restarts": 1, "device": "cpu"},
        batch={"global_batch": 12},
        optimizer={"name": "Muon", "muon": {"matrices": ["*.attention.*.weight"]}},  # names, for which it is built
    )
    done: list[str] = []
    for module, name in ((prepare, "prepare_model"), (checks, "load_tokenizer"), (checks, "check_written")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, name=name, original=original: done.append(name) or original(*args)
        )
    check(config, 4, fewer=[1, 2, 3])
    assert sorted(done) == ["check_written", "load_tokenizer", "prepare_model"]


def test_a_start_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"ranks": "2:4", "restarts": 1}
    config = config_from_dict({"launch": launch})
    assert ranks_to_start(config) == 4
    monkeypatch.setattr(devices, "count", lambda: 3)
    in_twos = config_from_dict({"launch": launch, "plan": {"mesh": {"tp": 2}}})
    assert (ranks_to_start(config), ranks_to_start(in_twos)) == (3, 2)
    monkeypatch.setattr(devices, "count", lambda: 1)
    with pytest.raises(BadInput, match=r"launch.ranks is 2:4, but this machine has 1 CUDA devices"):
        ranks_to_start(config)
    assert slots_of(config_from_dict({"launch": {"ranks": 4, "restarts": 1}})) is None


# -- places that are lost ------------------------------------------------------------------------------------------


def on(devices_seen: Sequence[int], numbers: Sequence[int]) -> RankSlots:
    seen: Iterator[int] = iter(devices_seen)
    return RankSlots(numbers, lambda: next(seen), named=True)


def test_a_device_that_fails_is_left_out_and_others_take_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    places = on([5, 5, 5, 5], [2, 3, 4])
    assert (places.ranks, places.environment) == (4, {})
    assert places.follow(1) == "rank 1 of 4 fails at its start again, on device 1"
    assert (places.ranks, places.environment) == (4, {"CUDA_VISIBLE_DEVICES": "0,2,3,4"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e")
    assert places.follow(3) == "rank 3 of 4 fails at its start again, on device 4"
    assert (places.ranks, places.environment) == (3, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c,GPU-d"})
    assert places.follow(None) == ""


def test_devices_that_cannot_be_seen_any_more_take_ranks_away() -> None:
    places = on([4, 3, 1], [2, 4])
    assert places.follow(0) == "1 device of 4 cannot be seen any more"
    assert (places.ranks, places.environment) == (2, {})
    with pytest.raises(BadInput, match=r"2 devices of 3 cannot be seen any more, and 2 ranks are the least"):
        places.follow(None)


def test_devices_that_are_seen_again_are_taken_at_the_next_restart() -> None:
    places = on([4, 2, 4, 5], [2, 4])
    assert places.follow(None) == "2 devices of 4 cannot be seen any more"
    assert places.ranks == 2
    assert places.follow(None) == "4 devices can be seen in the place of 2"
    assert (places.ranks, places.environment) == (4, {})
    assert places.follow(1) == "5 devices can be seen in the place of 4"
    assert places.ranks == 4


def test_a_rank_that_fails_at_its_start_again_is_gone_on_without(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    places = RankSlots([2, 3], lambda: 3, named=False)
    again = RestartPolicy(9, lambda: RestartPoint(5, "step-5"), lambda saved: ["words"], said.append, places)
    start = LaunchSpec(3, ["words"])
    for ranks, why in ((3, "x"), (2, "y")):
        following = again.after(start, RunEnd(1, why, lasts=False, rank=2, failed_at_start=True))
        assert following is not None and following.ranks == ranks
        start = following
    assert said == [
        "restart 1 of 9: starting 3 ranks again, from step-5",
        "restart 2 of 9: rank 2 of 3 fails at its start again; starting 2 ranks, from step-5",
    ]
    assert again.after(start, RunEnd(1, "z", lasts=False, rank=1, failed_at_start=True)) is None
    assert capsys.readouterr().err == (
        "\nNot started again: rank 1 of 2 fails at its start again, and 2 ranks are the least (launch.ranks).\n"
    )


FAILS = """
import os, sys
for said in ("ready", "claimed", "training", *sys.argv[1:]):
    os.write(int(os.environ["TERRAZZO_REPORT"]), b'{"reached": "%s"}\\n' % said.encode())
os._exit(7)
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (["stepped"], "launch.restarts is 2"),
        ([], "rank 0 of 1 fails at its start again, and 1 rank are the least (launch.ranks)"),
    ],
    ids=["later", "at its start"],
)
def test_a_rank_alone_is_where_it_was_if_it_has_ended_a_step(
    tmp_path: Path, said: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody looks after one rank, so that it records nothing that its launcher could read."""
    (tmp_path / "rank.py").write_text(FAILS)
    words = [str(tmp_path / "rank.py"), *said]
    saved = map(RestartPoint, itertools.count(1), itertools.repeat("a checkpoint"))
    slots = RankSlots([1, 2], lambda: 1, named=False)
    policy = RestartPolicy(2, lambda: next(saved), lambda point: words, lambda line: None, slots)
    assert launch_ranks(LaunchSpec(1, words), notices=Notices(lambda trains: "", str), restarts=policy) == 7
    assert f"\nNot started again: {why}.\n" in capfd.readouterr().err


def test_the_first_step_that_a_rank_ends_is_told_to_its_launcher_once(tmp_path: Path) -> None:
    told, recorded = tmp_path / "told", []
    process = RankProcess(0)
    rank = _RankOfRun(process, Path(), [], RunCommand(), launched=True)
    recorder = SimpleNamespace(events=SimpleNamespace(step_done=recorded.append))
    step_ended = rank._step_end(cast(FlightRecorder, recorder))
    with told.open("wb") as file:
        process._reporter = LauncherPipe(file.fileno())
        for step in (5, 6):
            step_ended(step)
    assert (told.read_text(), recorded) == ('{"reached": "stepped"}\n', [5, 6])


# -- real ranks ----------------------------------------------------------------------------------------------------

STEPS = [
    *("model.dropout=0", "model.layers=1", "data.validation_fraction=0", "train.eval_every=null"),
    *("train.sample_tokens=0", "train.steps=8", "checkpoint.every=4"),
]

RANK = """
import os, runpy, signal, sys
if os.environ["RANK"] == os.environ["LOST"] and "TERRAZZO_RESTARTED" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
sys.argv[0] = "terrazzo"
runpy.run_module("terrazzo", run_name="__main__", alter_sys=True)
"""
"""The last rank cannot be started again."""


@pytest.mark.processes
@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.long)])
def test_fewer_ranks_go_on_to_the_bits_of_as_many_that_nothing_happened_to(tmp_path: Path, most: int) -> None:
    """The oracle is a run of so many ranks that begins at that checkpoint."""
    folder, whole, left = tmp_path / "fewer", tmp_path / "whole", most - 1
    for each in (folder, whole):
        each.mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    words = command(folder, *STEPS, f"launch.ranks=1:{most}", "launch.restarts=2")
    launcher = programs.Program(
        *("-c", LAUNCHER, str(tmp_path / "rank.py"), *words[2:]), env={**environment(), "LOST": str(left)}
    )
    done = killed_by(launcher, signal.SIGKILL, behind_step=5)
    assert done.returncode == 0, done.stderr
    again = f"starting {most} ranks again, from .*/step-00000004"
    fewer = f"rank {left} of {most} fails at its start again; starting {counted(left, 'rank')}, from .*/step-00000004"
    assert re.search(f"(?m)^restart 1 of 2: {again}\n(.*\n)*restart 2 of 2: {fewer}\n", done.stdout), done.stdout
    assert [(line["number"], line["ranks"]) for line in metrics(folder, "restart")] == [(2, left)]

    checkpoints = whole / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copytree(folder / "run" / "checkpoints" / "step-00000004", checkpoints / "step-00000004")
    for end in programs.on_ranks(left, *command(whole, *STEPS)):
        assert end.returncode == 0, end.stderr
    assert [point[0] for point in curve(whole)] == [5, 6, 7, 8]
    assert curve(folder)[4:] == curve(whole)
    assert weights(folder) == weights(whole)


def weights(folder: Path) -> dict[str, bytes]:
    """And what else ranks have of the last step, by file."""
    last = folder / "run" / "checkpoints" / "step-00000008"
    found = {path.name: path.read_bytes() for path in last.glob("rank-*")}
    assert found
    return found
