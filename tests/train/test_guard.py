"""Steps that are not like those before them: left out, or gone back from, on all ranks alike, or the end of a run."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo import files
from terrazzo.checkpoint import latest, open_source
from terrazzo.errors import BadInput, Diverged
from terrazzo.exit_codes import PREEMPTED
from terrazzo.telemetry.log import sinks
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.objectives import DPO, NextToken, Validation
from terrazzo.train.report.run_screen import RunScreen
from terrazzo.train.session import dpo_reference
from terrazzo.train.settings.plan import build_offload
from terrazzo.train.steps.judge import spike_above
from tests.helpers.cover import mostly_long
from tests.train.test_run_edges import on_ranks_of_a_run
from tests.train.test_session import StopAfter, config_in, equal, final_state, metrics, trained

REAL = NextToken.loss_of


def spoil(monkeypatch: pytest.MonkeyPatch, calls: dict[int, float]) -> None:
    """Losses of some calls of the objective, counted from 1, times a number."""
    count = itertools.count(1)

    def spoilt(objective: Any, model: Any, *arguments: Any) -> Tensor:
        return REAL(objective, model, *arguments) * calls.get(next(count), 1.0)

    monkeypatch.setattr(NextToken, "loss_of", spoilt)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def test_a_spike_is_far_above_the_median_of_enough_steps() -> None:
    assert spike_above([1.0] * 7, 3.0) == math.inf
    calm = [2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.0, 2.1]
    assert 2.2 < spike_above(calm, 4.0) < 3.0
    assert spike_above([*calm, 1e9], 4.0) < 3.0, "a spike in the window hides no other"
    assert spike_above([5.0] * 8, 10.0) == pytest.approx(5.5)


def test_a_step_that_is_left_out_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the run in which the loop gives that step no gradients to learn from, and no decay."""
    spoil(monkeypatch, {3: math.nan})
    config = config_in(tmp_path, guard={"action": "skip"}, train={"steps": 3}, schedule={"name": "constant"})
    assert trained(config) == 0
    skipped = final_state(tmp_path)
    assert [(line["step"], line["batches"]) for line in lines(tmp_path, "guard")] == [(3, 1)]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    extra = open_source(str(latest(str(tmp_path / "run" / "checkpoints")))).extra
    assert extra["skipped"] == [{"step": 3, "batches": 1, "why": "its loss is nan"}]
    other = tmp_path / "other"
    other.mkdir()
    spoil(monkeypatch, {})
    assert trained(config_in(other, train={"steps": 2}, schedule={"name": "constant"})) == 0
    assert equal(skipped, final_state(other))


@pytest.mark.parametrize(
    ("left_out", "save_every", "expected"),
    [
        ({10}, None, [1, 5, 11, 15, 20]),
        ({20}, None, [1, 5, 10, 15, 19]),
        ({18, 19, 20}, 1, [1, 5, 10, 15, 17]),
        ({1, 2}, None, [3, 5, 10, 15, 20]),
    ],
)
def test_a_row_is_of_its_own_step_where_the_log_step_was_left_out(
    left_out: set[int], save_every: int | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[int, float] = {}

    def loss_of(objective: Any, model: Any, output: Any, batch: Any) -> Tensor:
        loss = REAL(objective, model, output, batch)
        own[len(own) + 1] = loss.item() / batch.samples
        return loss * (math.nan if len(own) in left_out else 1.0)

    monkeypatch.setattr(NextToken, "loss_of", loss_of)
    sections: dict[str, Any] = {"log": {"every": 5}, "checkpoint": {"every": save_every}}
    assert trained(config_in(tmp_path, guard={"action": "skip"}, train={"steps": 20}, **sections)) == 0
    rows = {line["step"]: line["loss"] for line in metrics(tmp_path)}
    assert list(rows) == expected
    assert rows == pytest.approx({step: own[step] for step in rows})


@pytest.mark.parametrize("more", mostly_long([0, 2], 2))
def test_after_a_spike_the_run_goes_back_and_around_the_batches_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """The oracle goes on from the same checkpoint, once its cursor has been moved by hand."""
    spoil(monkeypatch, {12: 100.0})
    guard = {"action": "rollback", "spike": 8.0, "skip_batches": more}
    bar: list[int] = []
    monkeypatch.setattr(RunScreen, "advance", lambda screen, step: bar.append(step))
    sections: dict[str, Any] = {"checkpoint": {"every": 5}, "schedule": {"name": "constant"}, "log": {"every": 1}}
    assert trained(config_in(tmp_path, guard=guard, train={"steps": 14}, **sections)) == 0
    (line,) = lines(tmp_path, "guard")
    assert [line[key] for key in ("step", "not_taken", "batches")] == [10, 12, 2 + more]
    assert [each["step"] for each in metrics(tmp_path)] == list(range(1, 15))
    assert bar == [*range(1, 12), *range(10, 15)]

    other = tmp_path / "other"
    other.mkdir()
    spoil(monkeypatch, {})
    assert trained(config_in(other, train={"steps": 10}, **sections)) == 0
    config = config_in(other, train={"steps": 14}, **sections)

    def moved(session: Any) -> None:
        session.loader.skip(2 + more)
        TrainingLoop(session, StopAfter(None)).run()

    on_ranks_of_a_run(1, config, moved)
    assert equal(final_state(tmp_path), final_state(other))


def test_a_disk_that_is_full_when_the_run_goes_back_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 alone opens the log again. Who watches the run reads files as they were or as they are to be."""
    spoil(monkeypatch, {12: 100.0})
    taken, real = list[Path](), files.replacing

    @contextlib.contextmanager
    def full(path: Path, *, sync: bool) -> Iterator[Path]:
        if path in taken or path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with real(path, sync=sync) as beside:
            yield beside
        if path.name in ("config.json", "plan.txt"):
            taken.append(path)

    monkeypatch.setattr(files, "replacing", full)
    monkeypatch.setattr(sinks, "replacing", full)
    guard = {"action": "rollback", "spike": 8.0}
    sections: dict[str, Any] = {"checkpoint": {"every": 5}, "schedule": {"name": "constant"}, "log": {"every": 1}}
    assert trained(config_in(tmp_path, guard=guard, train={"steps": 13}, **sections)) == 0
    assert lines(tmp_path, "guard") and metrics(tmp_path)[-1]["step"] == 13
    said = capfd.readouterr().err
    for name in ("config.json", "plan.txt", "metrics.jsonl"):
        assert f"run/{name}' cannot be written (No space left on device): the run goes on" in said


def spoil_batches(monkeypatch: pytest.MonkeyPatch, spoilt: set[bytes]) -> None:
    """A hundred times the losses of some batches, whenever they are read."""

    def loss_of(objective: Any, model: Any, output: Any, batch: Any) -> Tensor:
        return REAL(objective, model, output, batch) * (100.0 if targets_of(batch) in spoilt else 1.0)

    monkeypatch.setattr(NextToken, "loss_of", loss_of)


def targets_of(batch: Any) -> bytes:
    return bytes(batch.targets.numpy().tobytes())


@pytest.mark.parametrize(("bad", "left_out"), mostly_long([((12, 15), [2, 5]), ((12, 13), [2, 3])], ((12, 15), [2, 5])))
def test_of_several_spikes_behind_a_checkpoint_none_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, int], left_out: list[int]
) -> None:
    """They are bad batches, and not bad calls. The oracle goes around all that was read until the last one."""
    sections: dict[str, Any] = {"checkpoint": {"every": 10}, "schedule": {"name": "constant"}, "log": {"every": 1}}
    other = tmp_path / "other"
    other.mkdir()
    assert trained(config_in(other, train={"steps": 10}, **sections)) == 0
    ahead: list[bytes] = []  # from the 11th batch on

    def moved(session: Any) -> None:
        cursor = session.loader.cursor
        ahead.extend(targets_of(session.loader.next_step().micro_batches[0]) for _ in range(8))
        session.loader.ahead, session.loader.cursor = None, cursor
        session.loader.skip(left_out[-1])
        TrainingLoop(session, StopAfter(None)).run()

    on_ranks_of_a_run(1, config_in(other, train={"steps": 14}, **sections), moved)

    spoil_batches(monkeypatch, {ahead[number - 11] for number in bad})
    guard = {"action": "rollback", "spike": 8.0}
    assert trained(config_in(tmp_path, guard=guard, train={"steps": 14}, **sections)) == 0
    assert [line["batches"] for line in lines(tmp_path, "guard")] == left_out
    assert equal(final_state(tmp_path), final_state(other))


def test_fp16_leaves_a_loss_that_is_not_finite_to_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {3: math.nan})
    config = config_in(tmp_path, guard={"action": "skip"}, precision={"name": "fp16"}, checkpoint={"every": None})
    assert trained(config) == 0
    assert [line["not_taken"] for line in lines(tmp_path, "guard")] == [3]


def test_a_resumed_run_compares_with_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"guard": {"action": "skip", "spike": 8.0}, "checkpoint": {"every": None}}
    assert trained(config_in(tmp_path, train={"steps": 12}, **options), stop_after=9) == PREEMPTED
    spoil(monkeypatch, {2: 100.0})
    assert trained(config_in(tmp_path, train={"steps": 12}, **options)) == 0
    assert [line["not_taken"] for line in lines(tmp_path, "guard")] == [11]


@pytest.mark.parametrize("every", [None, 5])
def test_a_stop_in_the_step_that_is_rolled_back_saves_what_it_goes_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    """That is on the machine alone, where nothing is left of it when the run ends."""
    spoil(monkeypatch, {9: math.nan})
    (tmp_path / "shm").mkdir()
    checkpoint = {"every": every, "local": {"folder": str(tmp_path / "shm"), "every": 1}}
    config = config_in(tmp_path, guard={"action": "rollback"}, train={"steps": 20}, checkpoint=checkpoint)
    assert trained(config, stop_after=9) == PREEMPTED
    saved = open_source(str(latest(str(tmp_path / "run" / "checkpoints")))).extra
    assert (saved["step"], [each["step"] for each in saved["skipped"]]) == (8, [9])
    assert list((tmp_path / "shm").iterdir()) == []


def test_pairs_behind_those_that_were_gone_around_have_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 steps of 60 pairs would read 16 of them."""
    real, count = DPO.loss_of, itertools.count(1)

    def loss_of(*arguments: Any) -> Tensor:
        return real(*arguments) * (math.inf if next(count) == 5 else 1.0)

    monkeypatch.setattr(DPO, "loss_of", loss_of)
    pairs = [{"prompt": f"q{n} ", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    sections: dict[str, Any] = {
        "objective": {"name": "dpo"},
        "data": {"source": str(tmp_path / "pairs.jsonl")},
        "guard": {"action": "rollback", "skip_batches": 2},
        "checkpoint": {"every": 2},
    }
    assert trained(config_in(tmp_path, train={"steps": 8}, **sections)) == 0
    assert [(line["not_taken"], line["batches"]) for line in lines(tmp_path, "guard")] == [(5, 3)]
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 9))


def test_a_reference_of_nan_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo_reference, "completion_log_probs", lambda *_: torch.full((2, 2), math.nan))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "yes", "rejected": "no"}\n' * 8)
    sections: dict[str, Any] = {"objective": {"name": "dpo"}, "data": {"source": str(tmp_path / "pairs.jsonl")}}
    with pytest.raises(BadInput, match=r"NaN of 8 of 8 preference pairs.*precision\.name=fp32"):
        trained(config_in(tmp_path, **sections))


def test_two_ranks_decide_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's micro-batch is bad; both leave the step out."""

    def spoilt(objective: Any, model: Any, *arguments: Any) -> Tensor:
        loss = REAL(objective, model, *arguments)
        model.calls += 1
        return loss * math.inf if torch.distributed.get_rank() == 1 and model.calls == 2 else loss

    def work(session: Any) -> tuple[int, list[dict[str, Any]]]:
        session.model.calls = 0
        TrainingLoop(session, StopAfter(None)).run()
        return session.step, session.progress.skipped

    monkeypatch.setattr(NextToken, "loss_of", spoilt)
    config = config_in(tmp_path, guard={"action": "skip"}, batch={"micro_batch": 1})
    one, other = on_ranks_of_a_run(2, config, work)
    assert one == other == (4, [{"step": 2, "batches": 1, "why": "its loss is inf"}])


@pytest.mark.parametrize(
    ("guard", "every", "calls", "match"),
    [
        ({"spike": 8.0}, None, {10: 50.0}, r"Step 10 was not taken: its loss is .* is a spike.*guard\.action=skip"),
        ({"action": "rollback"}, 1000, {2: math.nan}, "no checkpoint to go back to"),
        (
            {"action": "skip", "limit": 1},
            None,
            {2: math.nan, 4: math.nan},
            r"guard\.limit 1.*before it: step 2\. Gone on with.*or raise guard\.limit",
        ),
        (
            {"action": "rollback", "limit": 2},
            1,
            dict.fromkeys(range(3, 9), math.nan),
            r"limit 2.*before it: step 3, 2 times\.",
        ),
    ],
)
def test_what_cannot_go_on_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: dict[str, Any], every: int | None, calls: Any, match: str
) -> None:
    spoil(monkeypatch, calls)
    with pytest.raises(Diverged, match=match):
        trained(config_in(tmp_path, guard=guard, checkpoint={"every": every}, train={"steps": 12}))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_validation_loss_that_is_not_finite_ends_the_run_and_is_named(
    bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = NextToken.measure, itertools.count(1)
    batches = 2  # of each validation

    def measure(*arguments: Any) -> tuple[Tensor, float]:
        loss, right = real(*arguments)
        return loss * (bad if next(times) > batches else 1.0), right

    monkeypatch.setattr(NextToken, "measure", measure)
    train = {"eval_every": 2, "eval_batches": batches}
    with pytest.raises(Diverged, match=rf"validation loss of step 2 is {bad}.*up to step 1 are intact"):
        trained(config_in(tmp_path, data={"validation_fraction": 0.2}, train=train))
    (found,) = lines(tmp_path, "validation")
    assert (found["step"], math.isfinite(found["loss"])) == (0, True)
    assert Validation(bad, bits_per_byte=bad, accuracy=0.5).as_dict() == {"accuracy": 0.5}


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="skip_batches belongs to action 'rollback'"):
        config_in(tmp_path, guard={"skip_batches": 3})
    with pytest.raises(BadInput, match=r"window without guard\.spike"):
        config_in(tmp_path, guard={"window": 20})
    offload = {"offload": {"optim": "cpu", "step": "backward"}, "train": {"clip": None}}
    with pytest.raises(BadInput, match=r"judges each step before its update \(guard\).*no guard"):
        build_offload(config_in(tmp_path, guard={"action": "skip"}, **offload))
