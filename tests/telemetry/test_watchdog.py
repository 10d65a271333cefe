"""Ranks that stand still: which one it is, why, and what is left alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.exit_codes import STALLED
from terrazzo.telemetry import flights_of
from terrazzo.telemetry.flight.recorder import RingRecorder
from terrazzo.telemetry.flight.ring import CAPACITY, EventKind, Ring, Tail
from terrazzo.telemetry.watchdog.rank_progress import LEFT, RankProgress
from terrazzo.telemetry.watchdog.recording import Recording
from terrazzo.telemetry.watchdog.stall import ProcessFacts, Stall, find_stall
from terrazzo.telemetry.watchdog.stall_causes import STALL_CAUSES, StallCause
from terrazzo.telemetry.watchdog.watchdog import Patience, System, Watchdog
from tests.helpers import programs
from tests.helpers.cover import mostly_long

S = 1_000_000_000


class Ranks:
    """Rings of a few ranks that this process writes, with units of these names."""

    def __init__(self, count: int) -> None:
        self.rings = [Ring(Ring.memory()) for _ in range(count)]
        self.ranks = [RingRecorder(ring, rank, count) for rank, ring in enumerate(self.rings)]
        self.tails = [Tail(ring.descriptor) for ring in self.rings]
        for rank in self.ranks:
            rank.extend_table(
                units=["", "layers.7"], groups={"": list(range(count)), "dp_shard": list(range(count))}, pid=812
            )
            rank.extend_table(host="b")

    def close(self) -> None:
        for ring in self.rings:
            os.close(ring.descriptor)

    def step(self, number: int = 811) -> None:
        for rank in self.ranks:
            rank.step_done(number)
            rank.phase("backward")

    def ask(self, rank: int, kind: str = "all_gather", ordinal: int = 91, axis: str = "dp_shard", **of: Any) -> int:
        """A rank asks for an exchange; returns its track."""
        track = self.ranks[rank].track(axis, kind, False)
        small = kind == "control"
        purpose, unit = of.get("purpose", Purpose.AGREEMENT if small else Purpose.BACKWARD), of.get("unit", 1)
        self.ranks[rank].issued(track, ordinal, Label(purpose, unit, 5), of.get("sent", 64))
        return track

    def wait(self, rank: int, kind: str = "all_gather", ordinal: int = 91, axis: str = "dp_shard", **of: Any) -> None:
        self.ranks[rank].waits(self.ask(rank, kind, ordinal, axis, **of), ordinal)

    def stall(self, facts: Mapping[int, ProcessFacts] | None = None, later_s: float = 21.0) -> Stall:
        progress_of = {rank: RankProgress() for rank in range(len(self.ranks))}
        for rank, tail in enumerate(self.tails):
            progress_of[rank].take(tail.table, tail.flight().events)
        all_facts = {rank: ProcessFacts("S", False) for rank in progress_of} | dict(facts or {})
        return find_stall(progress_of, all_facts, time.monotonic_ns() + int(later_s * S))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterable[Ranks]:
    made = Ranks(getattr(request, "param", 4))
    made.step()
    yield made
    made.close()


MISSING = "Missing from all_gather 91 on dp_shard, unit layers.7, backward, step 812. Ranks 0-2 have waited 21 s."


@pytest.mark.parametrize(
    ("fact", "phase", "cause", "said"),
    [
        (ProcessFacts("T", False), "backward", "stopped", "Rank 3 (host b, pid 812) is stopped (SIGSTOP)."),
        (ProcessFacts("", False), "backward", "died", "Rank 3 (host b, pid 812) has ended."),
        (ProcessFacts("Z", False), "backward", "died", "Rank 3 (host b, pid 812) has ended."),
        (
            ProcessFacts("R", True),
            "backward",
            "slow",
            "Rank 3 (host b, pid 812) is still at work, and is not ended for it.",
        ),
        (ProcessFacts("S", False), "input", "input", "Rank 3 (host b, pid 812) waits for data."),
        (
            ProcessFacts("S", False, True),
            "update",
            "drive",
            "Rank 3 (host b, pid 812) waits for a drive or a file system.",
        ),
        (
            *(ProcessFacts("S", False), "backward", "stuck"),
            "Rank 3 (host b, pid 812) does nothing, and waits for no other rank.",
        ),
    ],
)
def test_the_rank_that_others_wait_for_is_named_with_what_became_of_it(
    ranks: Ranks, fact: ProcessFacts, phase: str, cause: str, said: str
) -> None:
    for rank in range(3):
        ranks.wait(rank)
    ranks.ask(3, ordinal=90)
    ranks.ranks[3].phase(phase)
    found = ranks.stall({3: fact})
    assert (found.cause, list(found.ranks)) == (cause, [3])
    assert found.text == f"{said} {MISSING}"
    assert found.is_final is (cause in ("stopped", "died", "stuck"))


def test_a_rank_that_was_stopped_in_an_exchange_that_it_has_asked_for_is_found(ranks: Ranks) -> None:
    """Its thread stands still, too."""
    for rank in range(4):
        ranks.wait(rank)
    assert ranks.stall({3: ProcessFacts("T", False)}).text.endswith(MISSING)


def test_a_wait_whose_end_was_written_over_is_forgotten(ranks: Ranks) -> None:
    """Its launcher was late by a whole ring: what the rank waits for now stands behind the gap."""
    ranks.wait(0, ordinal=90)
    ranks.ranks[0].waited(0, 90, 0.0)
    ranks.wait(0, ordinal=91)
    events = ranks.tails[0].flight().events
    ended = next(index for index, told in enumerate(events) if told.kind == EventKind.WAITED)
    progress = RankProgress()
    progress.take(ranks.tails[0].table, events[:ended])
    assert [key[-1] for key in progress.waits] == [90]
    progress.take(ranks.tails[0].table, events[ended + 1 :])
    assert [key[-1] for key in progress.waits] == [91]


def test_the_newest_step_is_known_though_the_next_has_left_no_room_for_its_record() -> None:
    recording = Recording()
    try:
        ring = Ring(recording.descriptors[0])
        recorder = RingRecorder(ring, 0, 1)
        assert (recording.step, recording.at) == (None, "")
        recorder.step_done(0)  # one that was left out
        assert recording.step == 0
        recorder.step_done(811)
        for _ in range(CAPACITY + 1):
            ring.write(EventKind.DONE, 0)
        assert not any(told.kind == EventKind.STEP for told in recording.tail.flight().events)
        assert (recording.step, recording.at) == (811, ", in step 812")
        recorder.phase("backward")
        assert recording.at == ", in phase backward of step 812"
    finally:
        recording.close()


def test_while_one_is_at_work_others_that_do_nothing_are_not_blamed(ranks: Ranks) -> None:
    ranks.wait(0)
    found = ranks.stall({2: ProcessFacts("R", True)})
    assert (found.cause, list(found.ranks)) == ("slow", [2])


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {"unit": 0}),
        ({}, {"purpose": Purpose.GRADIENT}),
        ({"kind": "all_reduce"}, {"kind": "all_reduce", "sent": 32}),
        ({}, {"kind": "control", "ordinal": 12}),
        ({}, {"axis": ""}),
    ],
    ids=["unit", "pass", "bytes", "kind", "axis"],
)
def test_ranks_that_wait_for_each_other_in_different_exchanges_are_told_apart(
    ranks: Ranks, here: dict[str, Any], there: dict[str, Any]
) -> None:
    ranks.wait(0, **here)
    ranks.wait(1, **there)
    found = ranks.stall()
    assert (found.cause, list(found.ranks)) == ("desynchronised", [0, 1])
    assert found.text.startswith("Ranks 0 and 1 have come apart: rank 0 (host b, pid 812) waits in ")
    assert "Every rank must run the same number of forwards" in found.text


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_one_exchange_of_all_that_does_not_end_blames_nobody(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.wait(rank, "control", 7, "")
    found = ranks.stall()
    assert found.cause == "lost"
    assert found.text.startswith("All ranks are in control 7 of all ranks, step 812, which does not end. Ranks 0, 1")


def test_groups_of_an_axis_are_told_from_each_other(ranks: Ranks) -> None:
    """Ranks 0 and 1 wait for each other alone, and rank 3 for rank 2."""
    for rank, group in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        ranks.ranks[rank].extend_table(groups={"": [0, 1, 2, 3], "dp_shard": group})
    ranks.wait(0, ordinal=95)
    ranks.wait(1, ordinal=95)
    ranks.wait(3, ordinal=91)
    found = ranks.stall({2: ProcessFacts("T", False)})
    assert "Missing from all_gather 91 on dp_shard" in found.text


# -- when it is a stall --------------------------------------------------------------------------------------------


class World(System):
    """A system whose clock, processes and sleep are set."""

    def __init__(self) -> None:
        self.at, self.states, self.held, self.used, self.slept = time.monotonic_ns(), {}, False, {}, 0.0
        self.states: dict[int, str]
        self.drive: tuple[int, int] | None = None
        self.used: dict[int, float]

    def state(self, pid: int) -> str:
        return self.states.get(pid, "S")

    def traced(self, pid: int) -> bool:
        return self.held

    def waits_for_drive(self, pid: int) -> bool:
        return (pid, self.at // S % 8) == self.drive  # a moment in eight seconds

    def processor_s(self, pid: int) -> float:
        return self.used.get(pid, 0.0)

    def now(self) -> int:
        return self.at

    def slept_s(self) -> float:
        return self.slept


def numbered(ranks: Ranks) -> dict[int, tuple[Tail, int]]:
    """What is looked at: rank N is process N."""
    return {rank: (tail, rank) for rank, tail in enumerate(ranks.tails)}


class Watched:
    """Two ranks, of which rank 0 waits for the other in their second step."""

    def __init__(self, patience: Patience | None = None, at_steps: bool = True) -> None:
        self.ranks, self.world, self.said = Ranks(2), World(), list[str]()
        self.dog = Watchdog(numbered(self.ranks), patience or Patience(20, 600), self.world, self.said.append)
        if at_steps:
            self.ranks.step(1)
        self.ranks.ask(1, ordinal=90)
        self.ranks.wait(0)
        self.world.at = time.monotonic_ns()

    def watch(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> Stall | None:
        """So many seconds pass, in each quarter of which `meanwhile` happens."""
        for _ in range(int(seconds * 4)):
            meanwhile()
            self.world.at += S // 4
            if (found := self.dog.look()) is not None:
                return found
        return None

    def go_on(self) -> None:
        """Ranks end a step. Their records have the true time, which the other one is set back to."""
        self.ranks.step(2)
        self.world.at = time.monotonic_ns()
        self.dog._looked = self.world.at - S // 4


@pytest.fixture
def watched() -> Iterable[Watched]:
    made = Watched()
    yield made
    made.ranks.close()


def test_nothing_for_long_enough_is_a_stall(watched: Watched) -> None:
    assert watched.watch(19) is None
    found = watched.watch(3)
    assert found is not None and (found.cause, list(found.ranks)) == ("stuck", [1])


@pytest.mark.parametrize("phase", ["setup", "evaluate", "save"])
def test_what_takes_long_by_its_nature_is_no_stall_unless_somebody_has_stopped_it(watched: Watched, phase: str) -> None:
    watched.ranks.ranks[1].phase(phase)
    assert watched.watch(500) is None
    watched.world.states[1] = "T"
    assert watched.watch(19) is None
    found = watched.watch(3)
    assert found is not None and found.cause == "stopped"


def test_the_first_step_is_waited_for() -> None:
    ranks, world = Ranks(2), World()
    dog = Watchdog(numbered(ranks), Patience(20, 600), world)
    ranks.ranks[1].phase("forward")
    ranks.wait(0)
    for _ in range(1000):
        world.at += S // 4
        assert dog.look() is None
    ranks.close()


def test_a_phase_that_has_taken_long_before_may_do_so_again(watched: Watched) -> None:
    watched.dog.look()
    watched.world.at += S
    watched.dog.look()
    for progress in watched.dog.progress_of.values():
        progress.slowest["backward"] = 10 * S
    assert watched.watch(48) is None
    assert watched.watch(4) is not None


def test_it_is_never_waited_for_longer_than_ranks_wait_for_each_other() -> None:
    watched = Watched(Patience(100, 30))
    assert watched.watch(28) is None
    assert watched.watch(4) is not None
    watched.ranks.close()


def test_a_rank_that_computes_is_named_once_and_not_ended(watched: Watched) -> None:
    def work() -> None:
        watched.world.used[1] = watched.world.used.get(1, 0.0) + 0.2

    assert watched.watch(100, work) is None
    (said,) = watched.said
    assert said.startswith("Rank 1 (host b, pid 812) is still at work, and is not ended for it. Missing from")


def test_a_rank_that_waits_for_data_is_named_and_not_ended(watched: Watched) -> None:
    watched.ranks.ranks[1].phase("input")
    assert watched.watch(100) is None
    assert len(watched.said) == 1 and "waits for data" in watched.said[0]


def test_in_a_loop_of_ones_own_what_is_between_steps_is_named_where_others_wait_and_never_ended() -> None:
    own = Patience(20, 600, own_loop=True)
    awaited, alone = Watched(patience=own), Watched(patience=own)
    alone.ranks.ranks[0].waited(alone.ranks.ranks[0].track("dp_shard", "all_gather", False), 91, 0.0)
    for each in (awaited, alone):
        for rank in each.ranks.ranks[1:] if each is awaited else each.ranks.ranks:
            rank.phase("other")
        assert each.watch(500) is None
        each.ranks.close()
    (said,) = awaited.said
    assert "is between steps, in code of your own, and is not ended for it. Missing from" in said
    assert alone.said == []


def test_a_rank_that_is_gone_without_a_word_is_not_waited_for_in_a_phase_that_may_last(watched: Watched) -> None:
    watched.ranks.ranks[1].phase("save")
    watched.world.states[1] = ""
    assert watched.watch(19) is None
    found = watched.watch(3)
    assert found is not None and (found.cause, list(found.ranks)) == ("died", [1])


def test_a_rank_that_has_left_is_no_dead_one(watched: Watched) -> None:
    watched.ranks.ranks[1].phase(LEFT)
    watched.world.states[1] = ""
    assert watched.watch(500) is None


def test_a_rank_that_was_stopped_after_it_has_left_is_no_reason_to_end_one_that_computes() -> None:
    ranks, world = Ranks(3), World()
    ranks.step(1)
    ranks.ranks[0].phase(LEFT)
    ranks.wait(1)
    dog = Watchdog(numbered(ranks), Patience(20, 600), world, lambda text: None)
    world.states[0] = "T"
    for _ in range(400):
        world.at += S // 4
        world.used[2] = world.used.get(2, 0.0) + 0.2
        assert dog.look() is None
    ranks.close()


def test_a_rank_that_has_waited_for_a_drive_now_and_then_is_named_and_not_ended(watched: Watched) -> None:
    watched.world.drive = (1, 3)
    assert watched.watch(100) is None
    assert len(watched.said) == 1 and "waits for a drive" in watched.said[0]
    watched.world.drive = None
    watched.ranks.ranks[1].phase("update")
    watched.world.at = time.monotonic_ns() + 1
    watched.dog._looked = watched.world.at - S
    assert watched.watch(15) is None
    found = watched.watch(10)
    assert found is not None and found.cause == "stuck"


def test_waiting_begins_anew_where_all_are_stopped_or_a_debugger_holds_one_or_the_machine_has_slept(
    watched: Watched,
) -> None:
    watched.world.states |= {0: "T", 1: "T"}
    assert watched.watch(60) is None
    watched.world.states.clear()
    assert watched.watch(19) is None
    watched.world.held = True
    assert watched.watch(60) is None
    watched.world.held = False
    assert watched.watch(19) is None
    watched.world.slept += 3600
    assert watched.watch(19) is None
    watched.world.at += 60 * S  # the launcher itself was stopped
    assert watched.watch(19) is None
    assert watched.watch(3) is not None


def test_a_rank_that_is_stopped_two_thirds_of_the_time_is_named_as_slow_once_and_not_ended(watched: Watched) -> None:
    """It goes on meanwhile, and so does the run: nothing ever stands still for long enough."""
    looks = iter(range(10**6))

    def hinder() -> None:
        number = next(looks)
        watched.world.states[1] = "T" if number % 6 < 4 else "S"  # a second of one and a half
        if number % 6 == 5:
            watched.go_on()

    assert watched.watch(60, hinder) is None
    (said,) = watched.said
    assert said == (
        "Rank 1 (host b, pid 812) is slow: a signal stops it again and again (SIGSTOP), for 70% of the time. It is not"
        " ended for it. Rank 0 goes as slowly. See who stops processes there."
    )


def test_a_rank_that_is_stopped_again_and_again_since_setup_is_named_at_its_steps() -> None:
    watched, looks = Watched(at_steps=False), iter(range(10**6))

    def hinder() -> None:
        watched.world.states[1] = "T" if next(looks) % 4 else "S"

    def hinder_steps() -> None:
        hinder()
        watched.go_on()

    assert watched.watch(15, hinder) is None and watched.said == [], "nobody goes as slowly before the first step"
    assert watched.watch(100, hinder_steps) is None
    (said,) = watched.said
    assert said.startswith("Rank 1 (host b, pid 812) is slow: a signal stops it again and again"), said
    watched.ranks.close()


@pytest.mark.parametrize("states", [["T", "S"], ["T"] * 30 + ["S"] * 50, ["S"]])
def test_all_that_are_stopped_together_one_that_was_stopped_once_and_a_clean_run_are_not_named(
    states: list[str], watched: Watched
) -> None:
    looks = iter(range(10**6))

    def go_on() -> None:
        state = states[next(looks) % len(states)]
        watched.world.states = {0: state, 1: state} if len(states) == 2 else {1: state}
        watched.go_on()

    assert watched.watch(20, go_on) is None
    assert watched.said == []


def test_every_cause_is_a_row_of_the_guides_table() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/slow-runs.md").read_text()
    assert set(STALL_CAUSES) == set(get_args(StallCause))
    for key, row in STALL_CAUSES.items():
        assert f"| `{key}` | {row.of(1)} | {row.because} | {row.does} |\n" in guide, key
        assert row.ends is ("ends" in row.does), key


# -- real ranks ----------------------------------------------------------------------------------------------------

RANK = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from pathlib import Path
import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.launch.launcher_pipe import Milestone
from terrazzo.launch.rank.rank_process import RankProcess
from terrazzo.telemetry.watchdog.recording import open_flight_recorder

how, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])

process = RankProcess(rank)

def work():
    process.reach(Milestone.READY)
    dist.init_process_group("gloo")
    recorder = open_flight_recorder(rank, 2)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = tz.shard(model, optimizer, plan="zero3", units=[torch.nn.Linear])
    engine = engine_of(model)
    recorder.follow(engine, folder)
    for step in range(1, 5):
        loss = model(torch.ones(2, 8)).sum()
        if step == 3 and rank == 1:
            act(model, engine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.events.step_done(step)
    return 0

def act(model, engine):
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stuck":
        threading.Event().wait(120)
    elif how == "apart":
        engine.axes.along("dp_shard").gather_rows(torch.ones(2))
    elif how == "slow":
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
    elif how == "patient":
        for phase in ("evaluate", "save"):
            with engine.tally.phases.during(phase):
                time.sleep(1.6)

process.run(work)
"""

LAUNCH = """
import sys
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.telemetry.watchdog.stall_causes import STALL_CAUSES, StallCause
from terrazzo.telemetry.watchdog.watchdog import Patience
sys.exit(launch_ranks(LaunchSpec(2, sys.argv[1:]), patience=Patience(1.0, 600.0)))
"""

Done = subprocess.CompletedProcess[str]


def launch(folder: Path, how: str) -> tuple[Done, float]:
    (folder / "rank.py").write_text(RANK)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    start = time.monotonic()
    words: Sequence[str] = ("-c", LAUNCH, str(folder / "rank.py"), how, str(folder))
    done = programs.run(*words, env={**environment, "OMP_NUM_THREADS": "1"})
    return done, time.monotonic() - start


@pytest.mark.processes
def test_a_stopped_rank_is_named_in_seconds_and_what_all_were_doing_is_kept(tmp_path: Path) -> None:
    done, took_s = launch(tmp_path, "stopped")
    assert done.returncode == STALLED, done.stderr
    said = re.search(
        r"Rank 1 \(host .+, pid \d+\) is stopped \(SIGSTOP\)\. Missing from (\w+) \d+ on dp_shard, .*step 3\."
        r" Rank 0 has waited \d+ s\.\nAll ranks were ended\.",
        done.stderr,
    )
    assert said is not None, done.stderr
    assert took_s < 120
    kept = {path.name: path.read_text() for path in (tmp_path / "stall").iterdir()}
    assert sorted(kept) == ["rank-0.txt", "rank-1.txt", "stall.txt"]
    assert "rank.py" in kept["rank-0.txt"] and "in wait" in kept["rank-0.txt"]  # the frames of its main thread
    assert "It did not answer" in kept["rank-1.txt"] or "rank.py" in kept["rank-1.txt"]
    for rank in (0, 1):
        assert re.search(r"^ +\d+\.\d+  step    2$", kept[f"rank-{rank}.txt"], re.MULTILINE)
    assert [flight.table["rank"] for flight in flights_of(tmp_path)] == [0, 1]
    note = json.loads((tmp_path / "exit.json").read_text())
    assert (note["code"], note["reason"], note["rank"], note["step"]) == (
        STALLED,
        "stopped",
        1,
        2,
    ) and "is stopped (SIGSTOP)" in note["cause"]


@pytest.mark.long
@pytest.mark.processes
def test_a_rank_that_does_nothing_is_named_and_shows_where_it_is(tmp_path: Path) -> None:
    done, _ = launch(tmp_path, "stuck")
    assert done.returncode == STALLED, done.stderr
    assert re.search(r"Rank 1 .* does nothing, and waits for no other rank\. Missing from", done.stderr), done.stderr
    assert "in act" in (tmp_path / "stall" / "rank-1.txt").read_text()


@pytest.mark.processes
def test_ranks_in_different_exchanges_are_named(tmp_path: Path) -> None:
    done, _ = launch(tmp_path, "apart")
    assert done.returncode == STALLED, done.stderr
    assert "have come apart" in done.stderr


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("how", mostly_long(["slow", "patient"], "patient"))
def test_who_computes_or_does_what_takes_long_is_left_alone(tmp_path: Path, how: str) -> None:
    done, _ = launch(tmp_path, how)
    assert done.returncode == 0, done.stderr
    assert ("is still at work, and is not ended for it" in done.stderr) is (how == "slow")
    assert "All ranks were ended" not in done.stderr
    assert not (tmp_path / "stall").exists()


@pytest.mark.processes
def test_a_killed_rank_leaves_its_records(tmp_path: Path) -> None:
    done, _ = launch(tmp_path, "killed")
    assert done.returncode == 1
    assert re.search(r"Rank 1 was ended by SIGKILL .*, in phase forward of step 3; the other", done.stderr), done.stderr
    steps = [[told.ordinal for told in flight.events if told.kind == 9] for flight in flights_of(tmp_path)]
    assert steps == [[1, 2], [1, 2]]
