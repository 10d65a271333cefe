"""Runs at their edges: folders that are the data, nothing to learn, slow data, signals at odd moments, one bad rank."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from terrazzo import checkpoint, exchange
from terrazzo.checkpoint import complete_checkpoints, latest, open_source
from terrazzo.config import Config, config_from_dict
from terrazzo.engine import ModelState
from terrazzo.errors import BadInput, Diverged
from terrazzo.exit_codes import INTERRUPTED
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.launch.stopping import stop_request as stop_signals
from terrazzo.launch.stopping.notices import Notices
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.shell_command import terrazzo_command
from terrazzo.train import loop
from terrazzo.train.data import IGNORED, Loader
from terrazzo.train.data import load as load_module
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.objectives import NextToken
from terrazzo.train.preflight import check
from terrazzo.train.report.stop_notices import asked_text, cut_short_text
from terrazzo.train.session import build_session
from terrazzo.train.session.build_session import open_session
from terrazzo.train.session.session import Session
from terrazzo.train.settings.plan import build_precision, scaled_for_sums
from terrazzo.train.settings.run_command import RunCommand
from terrazzo.train.steps.evaluate import evaluate
from terrazzo.train.steps.step import backward_on, update
from tests.checkpoint.faults import reap, spawn_child
from tests.helpers import programs
from tests.helpers.threads import run_in_threads
from tests.launch.test_launch import LAUNCH
from tests.train.test_session import ALONE, StopAfter, config_in, equal, final_state, metrics, trained

# -- before anything starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["{data}", "{data}/*.txt", "{data}/**/*.txt"])
@pytest.mark.parametrize("what", ["source", "validation_source"])
@pytest.mark.parametrize("key", ["log", "checkpoint"])
def test_a_folder_that_is_the_data_is_refused(tmp_path: Path, key: str, what: str, source: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("the number 1\n" * 100)
    sections: dict[str, Any] = {"log": {"folder": str(tmp_path / "run")}, "data": {what: source.format(data=data)}}
    sections[key] = {"folder": str(data)}
    with pytest.raises(BadInput, match=rf"{key}\.folder is '{data}', which is the data itself"):
        check(config_from_dict(sections), 1)
    assert [path.name for path in data.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("key", ["log", "checkpoint"])
def test_a_folder_inside_the_data_is_refused(tmp_path: Path, key: str) -> None:
    """The next start would read the run's own files as data. Hidden folders are not read."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("the number 1\n" * 100)
    sections: dict[str, Any] = {"log": {"folder": str(tmp_path / "run")}, "data": {"source": str(data)}}
    with pytest.raises(BadInput, match=rf"{key}\.folder is '{data}/sub/run', which is inside the data, '{data}'"):
        check(config_from_dict({**sections, key: {"folder": str(data / "sub" / "run")}}), 1)
    check(config_from_dict({**sections, key: {"folder": str(data / ".run")}}), 1)
    check(config_from_dict({**sections, key: {"folder": str(tmp_path / "data-of-a-run")}}), 1)


@pytest.mark.parametrize("key", ["log", "checkpoint"])
def test_a_folder_whose_files_a_glob_would_read_is_refused(tmp_path: Path, key: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.json").write_text("the number 1\n" * 100)
    sections: dict[str, Any] = {"log": {"folder": str(tmp_path / "run")}, key: {"folder": str(data / "run")}}
    theirs = ("a.txt", "other/plan.txt", "other/a.py", "other/a.html", "other/deep/a.sha256", "other/exit.md")
    for name in (*theirs, "other/flight/a.txt"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("the number 1\n" * 100)
    only = {
        "log": ("**/*.txt", "*/*", "*/plan.txt", "*/exit.*", "**/flight/*", "[or]*/*.html"),
        "checkpoint": ("*/*/*", "*/**/*.sha256"),
    }[key]
    for pattern in ("**/*.json", "**", "**/**", *only):
        with pytest.raises(BadInput, match=rf"{key}\.folder is '{data}/run', which is inside the data, '{data}'"):
            check(config_from_dict({**sections, "data": {"source": f"{data}/{pattern}"}}), 1)
    for pattern in ("*.json", "*", "**/*.py", "other/**", "oth*/*"):
        check(config_from_dict({**sections, "data": {"source": f"{data}/{pattern}"}}), 1)


@pytest.mark.parametrize("key", ["log", "checkpoint"])
def test_a_home_that_nobody_has_expanded_is_refused(tmp_path: Path, key: str) -> None:
    """It would be a folder called ~ in the current one."""
    sections: dict[str, Any] = {"log": {"folder": str(tmp_path / "run")}, key: {"folder": "~/run"}}
    with pytest.raises(BadInput, match=rf"{key}\.folder is '~/run', .*write '{Path.home()}/run'"):
        check(config_from_dict(sections), 1)


@pytest.mark.parametrize("key", ["log", "checkpoint"])
def test_the_root_is_no_folder_for_a_run(tmp_path: Path, key: str) -> None:
    sections: dict[str, Any] = {"log": {"folder": str(tmp_path / "run")}}
    sections[key] = {"folder": "/tmp/.."}
    with pytest.raises(BadInput, match=rf"{key}\.folder is .* or the root"):
        check(config_from_dict(sections), 1)


# -- data ------------------------------------------------------------------------------------------------------


def on_ranks_of_a_run(ranks: int, config: Config, work: Callable[[Session], Any]) -> list[Any]:
    """`work(session)` on ranks that are threads."""

    def body(rank: int) -> Any:
        session = open_session(config, Ranks(rank, ranks, torch.device("cpu")))
        try:
            return work(session)
        finally:
            session.loader.close()
            session.checkpoints.abandon()

    return run_in_threads(ranks, body)


@pytest.mark.parametrize("empty", [(0,), (0, 1)], ids=["one rank", "all ranks"])
def test_ranks_with_nothing_to_learn_count_for_nothing(tmp_path: Path, empty: tuple[int, ...]) -> None:
    """A micro-batch whose targets are all ignored; the oracle is the step on the other rank's alone."""
    options = {"optimizer": {"weight_decay": 0.0}, "batch": {"micro_batch": 1}}

    def work(session: Session) -> tuple[float, float, dict[str, Tensor]]:
        batch = session.loader.next_step()
        if session.ranks.rank in empty:
            ignored = tuple(
                replace(part, targets=torch.full_like(part.targets, IGNORED), valid_tokens=0)
                for part in batch.micro_batches
            )
            batch = replace(batch, micro_batches=ignored)
        valid = 0 if len(empty) == 2 else batch.valid_tokens // 2
        before = {piece.name: piece.tensor.clone() for piece in ModelState(session.model).pieces()}
        total, norm = backward_on(session, replace(batch, valid_tokens=valid))
        update(session)
        after = {piece.name: piece.tensor for piece in ModelState(session.model).pieces() if piece.kind == "weight"}
        moved = {name: (after[name] - value).abs().max() for name, value in before.items()}
        return float(total), float(norm), moved

    for rank, (total, norm, moved) in enumerate(on_ranks_of_a_run(2, config_in(tmp_path, **options), work)):
        assert (total == 0.0) is (rank in empty)
        assert (norm == 0.0) is (len(empty) == 2)
        assert all(torch.isfinite(value) for value in moved.values())
        assert any(value > 0 for value in moved.values()) is (len(empty) == 1)


@pytest.mark.parametrize(("ranks", "plan"), [(3, "zero2"), (5, "zero3")])
def test_a_batch_that_does_not_divide_is_the_same_on_any_number_of_ranks(tmp_path: Path, ranks: int, plan: str) -> None:
    """Five ranks have a sequence each, and one has none; three have two, and the last one only rows of nothing."""

    def steps(session: Session) -> list[tuple[float, float]]:
        found = []
        for _ in range(3):
            batch = session.loader.next_step()
            total, norm = backward_on(session, batch)
            update(session)
            found.append((float(session.share.total(total.clone())) / batch.samples, float(norm)))
        return found

    def found_on(count: int) -> list[list[tuple[float, float]]]:
        """From the weights of one and the same checkpoint: threads draw from one generator."""
        shutil.copytree(tmp_path / "run", folder := tmp_path / f"on-{count}")
        batch, train = {"global_batch": 4, "micro_batch": 1}, {"steps": 9}
        log = {"folder": str(folder)}
        return on_ranks_of_a_run(
            count, config_in(tmp_path, batch=batch, train=train, log=log, plan={"name": plan}), steps
        )

    trained(config_in(tmp_path, train={"steps": 1}))
    (alone,) = found_on(1)
    for found in found_on(ranks):
        assert found == [pytest.approx(step, rel=1e-5) for step in alone]


def test_empty_rows_are_told_of(tmp_path: Path) -> None:
    batch = {"batch": {"global_batch": 4, "micro_batch": 1}}
    assert any("2 of 6 rows of a step are empty" in note for note in check(config_in(tmp_path, **batch), 3))


def test_slow_data_are_waited_for_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read ahead comes 0.2 s after the loop has asked for it, however long the step before has taken."""
    read, next_step = Loader.read, Loader.next_step
    reads, asked = itertools.count(1), threading.Semaphore(0)

    def slow(loader: Loader, cursor: Any) -> Any:
        if next(reads) <= 3:  # nobody asks for the one behind the last step
            asked.acquire()
            time.sleep(0.2)
        return read(loader, cursor)

    def asks(loader: Loader) -> Any:
        asked.release()
        return next_step(loader)

    monkeypatch.setattr(Loader, "read", slow)
    monkeypatch.setattr(Loader, "next_step", asks)
    assert trained(config_in(tmp_path, train={"steps": 3}, checkpoint={"every": None})) == 0
    waited = [line["data_wait"] * line["step_s"] for line in metrics(tmp_path)]
    assert [seconds > 0.199 for seconds in waited] == [True] * 3, waited


def test_a_rank_that_makes_the_token_cache_keeps_no_other_waiting_in_one_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens may take hours, and a collective is given up after launch.timeout_s."""
    write, gather = load_module.write_cache, exchange.gather_json
    making: list[float] = []
    waits: list[tuple[float, float]] = []

    def slow(*arguments: Any) -> Any:
        making.append(time.monotonic())
        time.sleep(3)
        making.append(time.monotonic())
        return write(*arguments)

    def timed(value: Any) -> list[Any]:
        begins = time.monotonic()
        found = gather(value)
        waits.append((begins, time.monotonic()))
        return found

    monkeypatch.setattr(load_module, "write_cache", slow)
    monkeypatch.setattr(exchange, "gather_json", timed)
    monkeypatch.setattr(exchange, "ROUND_S", 0.05)
    config = config_in(tmp_path)

    def body(rank: int) -> int:
        with open_session(config, Ranks(rank, 2, torch.device("cpu"), local_rank=rank)) as session:
            return len(session.data.train)

    first, second = run_in_threads(2, body)
    assert first == second
    began, ended = making
    assert max(end - begin for begin, end in waits if begin < ended and end > began) < 1.5


def test_an_evaluation_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    """Of a long question and a short answer, packed as a stream, only the last sequence has targets."""
    long = [{"role": "user", "content": "why? " * 200}, {"role": "assistant", "content": "so."}]
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": long}) + "\n")
    data = {"validation_source": str(tmp_path / "held.jsonl"), "packing": "stream"}

    def validated(eval_batches: int) -> list[bool]:
        config = config_in(tmp_path, data=data, train={"eval_batches": eval_batches})
        return on_ranks_of_a_run(1, config, lambda session: evaluate(session).loss > 0)  # type: ignore[union-attr]

    with pytest.raises(BadInput, match=r"in the 2 of their 65 sequences .* Raise train\.eval_batches"):
        validated(1)
    assert validated(33) == [True]


# -- signals ---------------------------------------------------------------------------------------------------


class Asked(StopRequest):
    """Hears of SIGTERM when the test says so: handlers belong to the main thread, and ranks are threads here."""

    def __init__(self) -> None:
        self.requested, self._interrupts = False, 0


@pytest.mark.parametrize(
    ("owner", "during"), [(loop, "evaluate"), (NextToken, "loss_of")], ids=["an evaluation", "the first forward"]
)
def test_a_stop_within_an_evaluation_or_the_first_step_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, during: str
) -> None:
    stop, real = Asked(), getattr(owner, during)

    def interrupted(*arguments: Any) -> Any:
        stop._receive(signal.SIGTERM, None)
        return real(*arguments)

    monkeypatch.setattr(owner, during, interrupted)
    data, rest = {"validation_fraction": 0.2}, {"eval_every": 2, "steps": 50}
    config = config_in(tmp_path, data=data, train=rest, checkpoint={"every": None}, schedule={"warmup_steps": 10})

    def body(rank: int) -> int:
        trainer = TrainingLoop(open_session(config, ALONE), stop)
        try:
            return trainer.run()
        finally:
            trainer.session.loader.close()
            trainer.report.leave()

    assert run_in_threads(1, body) == [75]
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.endswith("step-00000001")


@pytest.mark.parametrize(("times", "code", "said"), [(1, 0, "asked\n"), (2, INTERRUPTED, "asked\ncut short\n")])
def test_a_second_interrupt_ends_at_once(tmp_path: Path, times: int, code: int, said: str) -> None:
    """Each is said as it comes, by the rank itself where no launcher of ours hears it."""

    def work() -> None:
        stop = StopRequest(Notices(lambda trains: "asked", lambda: "cut short"))
        with (tmp_path / "stderr").open("w") as sys.stderr:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            _wait_until(lambda: times == 1 and (tmp_path / "stderr").stat().st_size > 0)
        assert stop.requested

    assert reap(spawn_child(work)) == code
    assert (tmp_path / "stderr").read_text() == said


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_DFL, 75), (signal.SIG_IGN, 0)], ids=["a terminal", "nohup"])
def test_a_closed_terminal_asks_a_run_to_stop(before: signal.Handlers, code: int) -> None:
    def work() -> None:
        signal.signal(signal.SIGHUP, before)
        stop = StopRequest()
        os.kill(os.getpid(), signal.SIGHUP)
        os._exit(75 if stop.requested else 0)

    assert reap(spawn_child(work)) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.processes
def test_a_launcher_passes_on_that_a_stop_is_asked_for(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        RANK_THAT_SLEEPS.replace("lambda *_: None", "lambda *_: os._exit(75)").replace("SIGINT", number.name)
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    launcher = programs.Program("-c", LAUNCH_WITH_NOTICES, str(tmp_path / "rank.py"), env=kept)
    assert launcher.stdout.readline() == "begun\n"
    time.sleep(0.3)  # until the launcher has heard of it
    launcher.send_signal(number)
    done = launcher.communicate()
    assert (done.returncode, done.stderr) == (75, "asked\n")


@pytest.mark.parametrize(("trains", "said"), [(False, "asked early"), (True, "asked")])
def test_a_stop_before_the_first_step_promises_no_step(
    trains: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a run is set up it may be refused, and what is said must be true then, too."""
    lines: list[str] = []
    monkeypatch.setattr(stop_signals, "say_now", lines.append)
    stop, requests = Asked(), SimpleQueue[int]()
    stop.trains = trains
    notices = Notices(lambda trains: "asked" if trains else "asked early", lambda: "cut short")
    threading.Thread(target=stop._say, args=(requests, notices), daemon=True).start()
    requests.put(0)
    _wait_until(lambda: bool(lines))
    assert lines == [said]


@pytest.mark.parametrize(
    ("trains", "said"), [(True, "at the end of this round of 100 steps, and"), (False, "takes a round of 100 steps,")]
)
def test_a_stop_within_a_round_says_that_it_waits_for_its_end(trains: bool, said: str) -> None:
    """Groups that train by themselves have nothing to save before: whoever waits has to know for what."""
    config = config_from_dict({"plan": {"mesh": {"dp_replicate": 2}, "sync_every": 100}})
    assert said in asked_text(config, trains=trains)


@pytest.mark.parametrize(
    "notices", [None, Notices(lambda trains: "asked", lambda: str(1 / 0))], ids=["no line", "no line found"]
)
def test_a_second_interrupt_ends_at_once_without_its_line_too(notices: Notices | None) -> None:
    def work() -> None:
        sys.stderr = io.StringIO()
        stop = StopRequest(notices)
        for _ in range(2):
            stop._receive(signal.SIGINT, None)
        _wait_until(lambda: False)

    assert reap(spawn_child(work)) == INTERRUPTED


def _wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_what_is_lost_at_a_second_interrupt_is_said_with_the_way_on(tmp_path: Path) -> None:
    config = config_in(tmp_path, train={"steps": 3})
    command = RunCommand(Path("mine.yaml"), ["train.steps=3"])
    again = f"{terrazzo_command()} train mine.yaml train.steps=3"
    assert cut_short_text(config, command) == (
        f"Ended at once, without saving: there is no checkpoint, and all steps are lost. To begin anew: {again}"
    )
    trained(config)
    newest = tmp_path / "run" / "checkpoints" / "step-00000003"
    lost = f"steps after the newest checkpoint, {newest}, are lost"
    assert cut_short_text(config, command) == f"Ended at once, without saving: {lost}. To go on from it: {again}"
    far = config_in(tmp_path, checkpoint={"folder": "memory://far"})
    stays = "what was saved before stays in memory://far"
    assert cut_short_text(far, command).endswith(f" are lost; {stays}. To go on: {again}")
    anew = config_in(tmp_path, checkpoint={"resume": "never", "overwrite": True})
    assert cut_short_text(anew, command).endswith(f"{again} checkpoint.resume=if_exists")


RANK_THAT_SLEEPS = """
import os, time
os.write(int(os.environ["TERRAZZO_REPORT"]), b'{"reached": "ready"}\\n')
print("begun", flush=True)
import signal
signal.signal(signal.SIGINT, lambda *_: None)
time.sleep(60)
"""

LAUNCH_WITH_NOTICES = """
import sys
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.launch.stopping import stop_request as stop_signals
from terrazzo.launch.stopping.notices import Notices
sys.exit(launch_ranks(LaunchSpec(1, sys.argv[1:]), notices=Notices(lambda trains: "asked", lambda: "cut short")))
"""


@pytest.mark.processes
def test_the_launcher_says_at_once_what_an_interrupt_does(tmp_path: Path) -> None:
    """Before the rank, which here never heeds it, has come to the end of a step."""
    (tmp_path / "rank.py").write_text(RANK_THAT_SLEEPS)
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    launcher = programs.Program("-c", LAUNCH_WITH_NOTICES, str(tmp_path / "rank.py"), env=kept)
    assert launcher.stdout.readline() == "begun\n"
    time.sleep(0.3)  # until the launcher has heard of it
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr.readline() == "asked\n"
    launcher.send_signal(signal.SIGINT)
    done = launcher.communicate()
    assert (done.returncode, done.stderr) == (INTERRUPTED, "cut short\n")


STARTS = """
import ctypes, os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(os.environ["RANK"])
if os.environ["RANK"] == "1":
    ctypes.string_at(0)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_crash_in_native_code_is_named_and_nothing_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(STARTS)
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = programs.run("-c", LAUNCH, str(tmp_path / "rank.py"), str(tmp_path / "starts"), env=kept)
    assert done.returncode == 1
    assert "Rank 1 was ended by SIGSEGV" in done.stderr.rstrip().splitlines()[-1]
    starts = (tmp_path / "starts").read_text()  # the other rank may not have come so far
    assert starts.count("1") == 1 and starts.count("0") <= 1


def test_a_queue_starts_again_only_what_was_asked_to_stop() -> None:
    script = (Path(__file__).parents[2] / "examples" / "slurm.sbatch").read_text()
    requeue = script[: script.index("scontrol requeue")].rstrip().splitlines()[-1]
    assert "75" in requeue


@pytest.mark.parametrize("kind", ["decoder", "huggingface"])
def test_a_tokenizer_that_is_not_there_is_refused_before_the_ranks_start(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, "hidden_size": 16}))
    model = {"kind": kind} | ({"path": str(tmp_path), "weights": "random"} if kind == "huggingface" else {})
    with pytest.raises(BadInput, match=r"data\.tokenizer 'absent' is neither 'bytes' nor an existing path"):
        check(config_in(tmp_path, model=model, data={"tokenizer": "absent"}), 1)


# -- numbers ---------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_on_one_rank_ends_all_with_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = NextToken.loss_of

    def spoilt(objective: Any, model: Any, *arguments: Any) -> Tensor:
        loss = real(objective, model, *arguments)
        bad = torch.distributed.get_rank() == 1 and model.spoilt == 2
        model.spoilt += 1
        return loss * float("nan") if bad else loss

    def work(session: Session) -> str:
        session.model.spoilt = 0  # type: ignore[assignment]
        with pytest.raises(Diverged) as caught:
            TrainingLoop(session, StopAfter(None)).run()
        return str(caught.value)

    monkeypatch.setattr(NextToken, "loss_of", spoilt)
    one, other = on_ranks_of_a_run(2, config_in(tmp_path, batch={"micro_batch": 1}), work)
    assert one == other
    assert "loss of step 3 is nan" in one
    saved = [Path(path).name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert saved == ["step-00000001", "step-00000002"]


def test_a_gradient_that_is_not_a_number_on_one_rank_ends_all_in_its_step_without_being_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the next log step is. The weights are those of the step before."""
    real = NextToken.loss_of

    def spoilt(objective: Any, model: Any, *arguments: Any) -> Tensor:
        loss = real(objective, model, *arguments)
        model.forwards += 1
        if torch.distributed.get_rank() == 1 and model.forwards == 3:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    def work(session: Session) -> tuple[str, int, int, bool]:
        session.model.forwards = 0  # type: ignore[assignment]
        with pytest.raises(Diverged) as caught:
            TrainingLoop(session, StopAfter(None)).run()
        with tz.gathered(session.model) as weights:
            finite = all(bool(weight.isfinite().all()) for weight in weights.values())
        return str(caught.value), session.step, int(session.model.forwards), finite  # type: ignore[arg-type]

    monkeypatch.setattr(NextToken, "loss_of", spoilt)
    rare = {"log": {"every": 100}, "checkpoint": {"every": None}, "train": {"steps": 6}}
    one, other = on_ranks_of_a_run(2, config_in(tmp_path, batch={"micro_batch": 1}, **rare), work)
    assert one == other
    assert one[0].startswith("The gradients' norm of step 3 is nan.")
    assert one[1:] == (2, 3, True)


def test_the_record_of_steps_adds_up_with_all_that_is_between_them(tmp_path: Path) -> None:
    """Evaluations, saves, samples and the ranks' agreement are a part of the time that went by."""
    train = {"steps": 4, "eval_every": 2, "eval_batches": 1, "sample_tokens": 2, "sample_every": 2}
    rare = {"log": {"every": 2}, "batch": {"micro_batch": 1}, "data": {"validation_fraction": 0.2}}
    config = config_in(tmp_path, train=train, **rare)
    assert on_ranks_of_a_run(2, config, lambda session: TrainingLoop(session, StopAfter(None)).run()) == [0, 0]
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "step"]
    assert [(line["step"], line["steps"]) for line in records] == [(1, 1), (2, 1), (4, 2)]
    for record in records:
        for parts in (record["phase_s"], record["cause_s"]):
            assert sum(parts.values()) == pytest.approx(record["step_s"], rel=0.01)
            assert min(parts.values()) > -1e-4
        between = ("save", "evaluate") if record["step"] % 2 == 0 else ()
        assert all(record["phase_s"][name] > 0 for name in ("input", "forward", "backward", *between))
        assert [len(column) for column in record["skew"].values()] == [2, 2, 2, 2, 2]
        assert record["skew"]["step_s"][0] == record["step_s"]
        for cause in ("late_peer", "compute", "input"):
            assert record["skew"][f"{cause}_s"][0] == record["cause_s"][cause], "tables of a report stand side by side"
        for row in record["comm"].values():
            assert row["late_s"] <= row["exposed_s"] <= row["total_s"]
    of_control = [record["comm"]["control"]["n"] for record in records]
    assert of_control == [1, 2, 1.5], "the exchange for a record is one of the next"


def test_a_save_between_two_log_steps_leaves_the_pace_as_it_is(tmp_path: Path) -> None:
    """A step has 32 targets whenever it is saved: seconds per step and targets per second are of the same steps."""
    assert trained(config_in(tmp_path, train={"steps": 8}, checkpoint={"every": 3}, log={"every": 4})) == 0
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 4, 8]
    for line in lines:
        assert line["step_s"] * line["tokens_per_s"] == pytest.approx(32)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_first_loss_scale_is_that_of_mean_losses(pairs: bool, tmp_path: Path) -> None:
    """Losses are summed over a step's tokens or pairs: what enters backward is a mean's gradient times 2^16."""
    objective: dict[str, Any] = {"objective": {"name": "reward"}} if pairs else {}
    config = config_in(tmp_path, precision={"name": "fp16"}, **objective)
    samples = config.batch.global_batch * (1 if pairs else config.batch.sequence_length)
    scaling = scaled_for_sums(build_precision(config), config).loss_scaling
    assert scaling and 2.0**16 <= scaling.init * samples < 2.0**17 and 1 <= scaling.minimum * samples < 2


def test_fp16_begins_without_a_skipped_step(tmp_path: Path) -> None:
    assert trained(config_in(tmp_path, precision={"name": "fp16"})) == 0
    assert metrics(tmp_path)[-1]["skipped_steps"] == 0


def test_skipped_steps_are_the_same_after_a_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rate, samples and generators move on, moments and step counts do not; scale and counters are kept.

    The first scale is too large for this model: it is halved in several steps on end.
    """
    monkeypatch.setattr(build_session, "scaled_for_sums", lambda precision, config: precision)

    def run(name: str, *stops: int | None) -> Path:
        (tmp_path / name).mkdir()
        config = config_in(tmp_path / name, precision={"name": "fp16"}, model={"dropout": 0.3}, train={"steps": 6})
        for stop in stops:
            trained(config, stop)
        return tmp_path / name

    whole, part = run("whole", None), run("part", 2, None)
    skipped = [line["skipped_steps"] for line in metrics(whole)]
    assert skipped[1] == 2 and skipped[-1] < 6
    assert equal(final_state(whole), final_state(part))
    kept = ("step", "loss", "learning_rate", "tokens", "loss_scale", "skipped_steps")
    assert [[line[key] for key in kept] for line in metrics(whole)] == [
        [line[key] for key in kept] for line in metrics(part)
    ]


# -- going on --------------------------------------------------------------------------------------------------


def test_counters_rate_and_best_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    def extra(name: str, *stops: int | None) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        options: dict[str, Any] = {"data": {"validation_fraction": 0.2}, "train": {"steps": 6, "eval_every": 1}}
        for stop in stops:
            trained(config_in(tmp_path / name, **options), stop)
        newest = latest(tmp_path / name / "run" / "checkpoints")
        assert newest is not None
        where = ("config", "files")  # folders and the times of files, which are written for each run
        return {key: value for key, value in open_source(newest).extra.items() if key not in where}

    whole = extra("whole", None)
    assert whole == extra("part", 3, None)
    assert whole["best"]["loss"] <= whole["metric"]


def test_other_ranks_draw_anew_and_say_so(tmp_path: Path) -> None:
    trained(config_in(tmp_path))
    config = config_in(tmp_path, batch={"micro_batch": 1}, train={"steps": 6})
    for notes in on_ranks_of_a_run(2, config, lambda session: session.notes):
        assert "resume: saved by 1 rank: random generators are seeded anew for 2" in notes


def test_a_password_in_a_url_is_neither_saved_nor_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = "memory://me:pass-word@store/run"
    trained(config_in(tmp_path, checkpoint={"folder": folder}))
    assert "saved memory://***@store/run/step-00000001" in (out := capsys.readouterr().out)
    assert "pass-word" not in out
    newest = latest(folder)
    assert newest is not None
    saved = open_source(newest).extra["config"]
    assert "pass-word" not in str(saved)
    assert saved["checkpoint"]["folder"] == "memory://***@store/run"
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert "config.json" in [path.name for path in written]
    assert not any(b"pass-word" in path.read_bytes() for path in written)
    checkpoint.clear(folder)
