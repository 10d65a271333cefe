"""`terrazzo train` killed at random moments, again and again, until it is done.

    TERRAZZO_SOAK_KILLS=100 pytest -s tests/train/test_soak.py     the long form, so many kills in each test

A kill is SIGKILL, to whatever of a run `KINDS` says. After each one all must be quiet within `QUIET_S`, nothing may be
left in the temporary folder, and no checkpoint that the run had counted as saved may be lost. The oracle is the run
that nobody touched. `TERRAZZO_SOAK_SEED` draws other moments.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo import checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.long]

KILLS = int(os.environ.get("TERRAZZO_SOAK_KILLS", "0"))
SEED = int(os.environ.get("TERRAZZO_SOAK_SEED", "0"))
STEPS = 12 + 5 * KILLS
QUIET_S = 15.0
START_S = 600.0  # what has not begun by then hangs
CONFIG: dict[str, Any] = {
    "model": {"dim": 32, "layers": 2, "heads": 2, "dropout": 0.2},
    "data": {"source": "python-stdlib", "max_bytes": 60_000},
    "batch": {"global_batch": 6, "micro_batch": 1, "sequence_length": 32},
    "optimizer": {"lr": 0.003},
    "train": {"steps": STEPS, "sample_tokens": 0, "eval_every": 25},
    "launch": {"device": "cpu", "threads": 1, "timeout_s": 300},
    "log": {"every": 1, "tensorboard": False},
}


@dataclass(frozen=True)
class Start:
    """How many ranks a start has, and under which plan."""

    ranks: int
    plan: str = "zero3"


@dataclass
class Run:
    """A start of `terrazzo train`. Whatever comes of it is known by a mark in its environment."""

    folder: Path
    start: Start
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary = self.folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self.mark = uuid.uuid4().hex
        dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        kept = {key: value for key, value in os.environ.items() if key not in dropped}
        self.process = subprocess.Popen(
            command(self.folder, self.start),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "TERRAZZO_SOAK_MARK": self.mark},
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)

    def alive(self) -> dict[int, list[str]]:
        """All processes that came of this start and are not dead, and their command lines."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return found

    def ranks(self) -> list[int]:
        if self.start.ranks == 1:  # the process that was started is the rank
            return [self.process.pid]
        return [pid for pid, words in self.alive().items() if pid != self.process.pid and not _writes(words)]

    def writers(self) -> list[int]:
        return [pid for pid, words in self.alive().items() if _writes(words)]

    def steps(self) -> int:
        """How many it has made, as far as it has said."""
        return sum(re.match(r" +\d+ +\d+\.\d{4}", line) is not None for line in list(self.said))

    def committed(self) -> int:
        """The newest step whose checkpoint is known to be saved: a save begins when the one before it is done."""
        saves = [int(line.strip()[-8:]) for line in list(self.said) if "  saving " in line]
        return saves[-2] if len(saves) > 1 else 0

    def until(self, reached: Callable[[], object]) -> bool:
        """Whether something came to be before the run ended."""
        deadline = time.monotonic() + START_S
        while not reached():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.01)
        return True

    def goes_on(self) -> bool:
        """Whether it makes some more steps, and saves at one of them."""
        steps = self.steps()
        return self.until(lambda: self.steps() > steps + 4)

    def quiet(self) -> float:
        """The seconds until nothing of it is left."""
        began = time.monotonic()
        while left := self.alive():
            assert time.monotonic() - began < QUIET_S, f"still running: {left}\n{''.join(self.said)}"
            time.sleep(0.02)
        took = time.monotonic() - began
        self.process.wait()
        self._reader.join(QUIET_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return took


def _writes(words: list[str]) -> bool:
    return "terrazzo.checkpoint.saving.writer_main" in words


def _kill(pids: list[int]) -> bool:
    """Whether there was anything left to kill."""
    found = False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            found = True
    return found


Kind = Callable[[Run, random.Random], bool]


def launcher_new(run: Run, moments: random.Random) -> bool:
    """The launching process, within a second of its start."""
    time.sleep(moments.random())
    return _kill([run.process.pid])


def launcher_of_new_ranks(run: Run, moments: random.Random) -> bool:
    """The launching process, within a second of the first rank's start."""
    run.until(run.ranks)
    time.sleep(moments.choice([0.0, moments.random() * 0.1, moments.random()]))
    return _kill([run.process.pid])


def new_rank(run: Run, moments: random.Random) -> bool:
    """One rank, within a second of the first one's start."""
    run.until(run.ranks)
    time.sleep(moments.random())
    return _kill(run.ranks()[-1:])


def launcher(run: Run, moments: random.Random) -> bool:
    """The launching process, while the run trains."""
    _train(run, moments)
    return _kill([run.process.pid])


def rank(run: Run, moments: random.Random) -> bool:
    """One rank, while the run trains."""
    _train(run, moments)
    return _kill(moments.sample(run.ranks(), 1) if run.ranks() else [])


def writer(run: Run, moments: random.Random) -> bool:
    """The process that writes one rank's checkpoints. An idle one is replaced, and the run goes on."""
    run.until(run.writers)
    _train(run, moments)
    writers = run.writers()
    return _kill([moments.choice(writers)] if writers else [])


def everything(run: Run, moments: random.Random) -> bool:
    """All processes of the run."""
    _train(run, moments)
    return _kill(list(run.alive()))


def _train(run: Run, moments: random.Random) -> None:
    """Until some moment after training has begun."""
    steps = run.steps() + moments.randrange(6)
    run.until(lambda: run.steps() > steps)
    time.sleep(moments.random() * 0.2)


AT_START: tuple[Kind, ...] = (launcher_new, launcher_of_new_ranks, new_rank)
KINDS: list[Kind] = [*AT_START, writer, launcher, launcher_of_new_ranks, writer, rank, launcher_new, writer, everything]
SHORT: list[Kind] = [launcher_new, launcher_of_new_ranks, writer]


def command(folder: Path, start: Start) -> list[str]:
    path = folder / "config.json"
    every = {"every": 3, "background": True, "keep_last": 2}
    log = CONFIG["log"] | {"folder": str(folder / "run")}
    data = CONFIG["data"] | {"cache": str(folder.parent / "cache")}
    path.write_text(json.dumps(CONFIG | {"log": log, "data": data, "checkpoint": every}))
    settings = [f"launch.ranks={start.ranks}", f"plan.name={start.plan}"]
    return [sys.executable, "-m", "terrazzo", "train", str(path), *settings]


def untouched(folder: Path, start: Start) -> None:
    folder.mkdir()
    run = Run(folder, start)
    assert run.process.wait(600) == 0, "".join(run.said)
    run.quiet()


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """`work` on the other core; an error of it is seen by whoever looks for what it should have left."""
    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def killed(folder: Path, starts: list[Start], kinds: list[Kind], seed: int) -> str:
    """Train to the end through a kill of each of `kinds`, with the next of `starts` at each start; gives a report."""
    folder.mkdir()
    moments, checkpoints = random.Random(seed), folder / "run" / "checkpoints"
    run, began, slowest, committed = None, 0, 0.0, 0
    count: Counter[str] = Counter()
    for kind in [*kinds, None]:
        if run is not None and kind in AT_START:
            _kill(list(run.alive()))
            run.quiet()
            run = None
        if run is None:
            run, began = Run(folder, starts[began % len(starts)]), began + 1
        if kind is None:
            assert run.process.wait(600) == 0, "".join(run.said)
        elif kind(run, moments):
            count[kind.__name__] += 1
        if kind is writer and run.goes_on():
            continue  # it was idle
        slowest = max(slowest, took := run.quiet())
        committed = max(committed, run.committed())
        all_are_whole(checkpoints, committed)
        print(f"{count.total()} kills, {getattr(kind, '__name__', 'done')}: {run.start}, quiet after {took:.2f} s")
        assert list(run.temporary.glob("*terrazzo-*")) == []
        run = None
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    used = Counter(starts[index % len(starts)] for index in range(began))
    return f"\n{count.total()} kills: {dict(count)}\nstarts: {dict(used)}\nquiet after {slowest:.2f} s at most\n"


def all_are_whole(checkpoints: Path, committed: int) -> None:
    """Whatever is visible can be read as it was written, and what counted as saved is there."""
    found = checkpoint.complete_checkpoints(checkpoints)
    for path in found:
        assert content(path)
    newest = int(found[-1][-8:]) if found else 0
    assert newest >= committed


def content(path: str) -> dict[tuple[str, str], Tensor]:
    source = checkpoint.open_source(path)
    return {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


def state(folder: Path) -> dict[tuple[str, str], Tensor]:
    path = checkpoint.latest(folder / "run" / "checkpoints")
    assert path is not None
    assert path.endswith(f"step-{STEPS:08d}")
    return content(path)


def curve(folder: Path) -> dict[int, tuple[float, int]]:
    """Loss and targets so far by step, as they were last measured."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["tokens"]) for line in lines if line["kind"] == "train"}


def drawn(seed: int) -> list[Kind]:
    """The kinds of the long form: all equally often, in an order of their own."""
    kinds = [KINDS[index % len(KINDS)] for index in range(KILLS)]
    random.Random(seed).shuffle(kinds)
    return kinds


@pytest.mark.timeout(7200)
def test_the_same_ranks_and_plan_end_with_the_same_bits(tmp_path: Path) -> None:
    with meanwhile(lambda: untouched(tmp_path / "expected", Start(2))):
        report = killed(tmp_path / "found", [Start(2)], drawn(SEED) or SHORT, SEED)
    expected, found = state(tmp_path / "expected"), state(tmp_path / "found")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert curve(tmp_path / "found") == curve(tmp_path / "expected")
    print(report)


@pytest.mark.skipif(not KILLS, reason="the long form: TERRAZZO_SOAK_KILLS=100")
@pytest.mark.timeout(7200)
def test_other_ranks_and_plans_at_every_start_see_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout, whose generators are each rank's own, the loss of a step tells which samples it was of."""
    monkeypatch.setitem(CONFIG, "model", CONFIG["model"] | {"dropout": 0.0})
    starts = [Start(2), Start(1, "zero0"), Start(3, "zero2"), Start(2, "zero1"), Start(3), Start(2, "zero0")]
    with meanwhile(lambda: untouched(tmp_path / "expected", Start(2))):
        report = killed(tmp_path / "found", starts, drawn(SEED + 1), SEED + 1)
    expected, found = curve(tmp_path / "expected"), curve(tmp_path / "found")
    assert found.keys() == expected.keys()
    assert [found[step][1] for step in sorted(found)] == [expected[step][1] for step in sorted(expected)]
    apart = [abs(found[step][0] - loss) / loss for step, (loss, _) in expected.items()]
    assert median(apart) < 1e-2 and max(apart) < 5e-2  # by the order of sums; neighbouring steps are 8e-2 apart
    print(report)
