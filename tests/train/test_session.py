"""Sessions in this process: what is never saved, what a resumed run says, what a new run removes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from terrazzo import checkpoint
from terrazzo.checkpoint import complete_checkpoints, latest, open_source
from terrazzo.config import Config, config_from_dict, load_config, without_passwords
from terrazzo.errors import BadInput, Damaged, Diverged, SaveFailed
from terrazzo.launch.rank.process_group import Ranks, agree_on_data
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.telemetry import JsonLines, rows_of, run_lines
from terrazzo.telemetry.display import page
from terrazzo.train import loop
from terrazzo.train.checkpoints.resume import data_changes
from terrazzo.train.checkpoints.run_checkpoints import RunCheckpoints
from terrazzo.train.data import ByteTokenizer, load_data
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.huggingface import weight_files
from terrazzo.train.model.objectives import NextToken
from terrazzo.train.preflight import check
from terrazzo.train.session import build_session
from terrazzo.train.session.build_session import open_session
from terrazzo.train.session.run_progress import RunProgress, read_saved
from terrazzo.train.settings.optimizer import learning_rate_share
from terrazzo.train.steps.cadence import SaveInterval
from tests.helpers.chat import save_tokenizer
from tests.helpers.threads import run_in_threads

ALONE = Ranks(0, 1, torch.device("cpu"))


def config_in(folder: Path, **sections: dict[str, Any]) -> Config:
    text = folder / "text.txt"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(600)))
    values: dict[str, dict[str, Any]] = {
        "model": {"dim": 16, "layers": 1, "heads": 2},
        "data": {"source": str(text), "validation_fraction": 0.0, "cache": str(folder / "cache")},
        "batch": {"global_batch": 2, "micro_batch": 2, "sequence_length": 16},
        "optimizer": {"lr": 0.003},
        "train": {"steps": 4, "sample_tokens": 0},
        "checkpoint": {"every": 1, "keep_last": None},  # what is to go would be looked for after each save
        "log": {"every": 1, "folder": str(folder / "run"), "tensorboard": False},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return config_from_dict(values)


class StopAfter(StopRequest):
    """Asks to stop after so many steps. Signals belong to the main thread; ranks are threads here."""

    def __init__(self, steps: int | None) -> None:
        self.left = steps

    def agreed(self, broken: bool) -> tuple[bool, bool]:
        self.left = None if self.left is None else self.left - 1
        return self.left == 0, broken


def trained(config: Config, stop_after: int | None = None) -> int:
    def body(rank: int) -> int:
        trainer = TrainingLoop(open_session(config, ALONE), StopAfter(stop_after))
        try:
            return trainer.run()
        finally:
            trainer.session.loader.close()
            trainer.report.leave()

    return run_in_threads(1, body)[0]


def spoil_the_third_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN gradients in step 3, behind a finite loss."""
    real, calls = NextToken.loss_of, []

    def loss_of(*arguments: Any) -> Tensor:
        loss = real(*arguments)
        calls.append(loss.item())
        if len(calls) == 3:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    monkeypatch.setattr(NextToken, "loss_of", loss_of)


def test_a_finite_loss_with_a_nan_gradient_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_the_third_gradient(monkeypatch)
    with pytest.raises(Diverged, match=r"norm of step 3 is nan.*up to step 2 are intact"):
        trained(config_in(tmp_path))
    saved = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [Path(path).name for path in saved] == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("digest", [False, True])
def test_where_states_are_on_drives_these_are_named_too(
    digest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_the_third_gradient(monkeypatch)
    offload = {"optim": "nvme", "path": str(tmp_path / "run" / "swap"), "digest": digest}
    with pytest.raises(Diverged) as caught:
        trained(config_in(tmp_path, offload=offload))
    assert ("offload.digest=true checks" in str(caught.value)) is not digest


def test_under_fp16_such_a_step_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_the_third_gradient(monkeypatch)
    assert trained(config_in(tmp_path, precision={"name": "fp16"})) == 0
    assert latest(tmp_path / "run" / "checkpoints") == str(tmp_path / "run" / "checkpoints" / "step-00000004")


def test_an_optimizer_that_makes_its_states_as_it_is_built_trains_and_goes_on(tmp_path: Path) -> None:
    """Models are built on the meta device, and these states with them. The oracle is the run that is never stopped."""
    ends = []
    for stop_after in (None, 2):
        folder = tmp_path / str(stop_after)
        folder.mkdir()
        config = config_in(folder, optimizer={"name": "Adagrad", "options": {"initial_accumulator_value": 0.1}})
        check(config, 1)
        if stop_after is not None:
            trained(config, stop_after)
        assert trained(config) == 0
        ends.append((folder / "run" / "checkpoints" / "step-00000004" / "rank-00000.safetensors").read_bytes())
    assert ends[0] == ends[1]


def test_one_rank_alone_waits_for_no_late_one(tmp_path: Path) -> None:
    assert trained(config_in(tmp_path)) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {record["cause_s"]["late_peer"] for record in records if record["kind"] == "step"} == {0.0}


def test_a_checkpoint_of_another_loop_is_refused_by_name(tmp_path: Path) -> None:
    config = config_in(tmp_path)

    def body(rank: int) -> None:
        with open_session(config, ALONE) as session:
            checkpoint.save(
                checkpoint.step_path(session.checkpoints.folder, 1), session.model, session.optimizer, {"step": 1}
            )
        with pytest.raises(BadInput, match=r"not of 'terrazzo train'.*no best, config, data.*tz\.checkpoint\.load"):
            open_session(config, ALONE)

    run_in_threads(1, body)


def test_what_another_version_has_written_is_refused_by_name() -> None:
    extra = {"step": 3, "tokens": 9, "best": None}
    RunProgress().take_up(extra, same_evaluation=True)  # the least that there is, of an early version
    with pytest.raises(BadInput, match=r"extra\['judged'\] has 'scales'.*another version.*checkpoint\.resume=never"):
        RunProgress().take_up({**extra, "judged": {"losses": [], "scales": []}}, same_evaluation=True)
    with pytest.raises(BadInput, match=r"extra\['cadence'\] lacks 'cost_s'.*another version"):
        read_saved(SaveInterval, {"every": 7}, "cadence")


def test_validations_of_another_number_of_sequences_are_not_compared(tmp_path: Path) -> None:
    """A quarter of the micro-batch reads a quarter of the sequences, of which an earlier best says nothing."""
    data, steps = {"validation_fraction": 0.2}, {"steps": 2, "eval_every": 1, "eval_batches": 2}
    keep = {"keep_last": 1, "keep_best": 1}
    trained(config_in(tmp_path, data=data, train=steps, checkpoint=keep, optimizer={"lr": 0.0}))
    fewer, steps["steps"] = {"micro_batch": 1, "global_batch": 2}, 4
    trained(config_in(tmp_path, data=data, train=steps, checkpoint=keep, batch=fewer, optimizer={"lr": 0.0}))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["same_evaluation"] for line in lines if line["kind"] == "begin"] == [False]
    newest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").read_text())["extra"]
    assert newest["best"]["step"] == 3
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))[0] == "step-00000003"


@pytest.mark.parametrize("same", [True, False])
def test_a_validation_is_taken_up_where_it_is_of_the_same_data(same: bool) -> None:
    progress = RunProgress()
    progress.validations.add(9, 1.0)  # of a step that is gone back from
    progress.take_up({"step": 3, "tokens": 9, "metric": 2.0, "best": None}, same_evaluation=same)
    assert progress.as_extra()["metric"] == (2.0 if same else None)
    progress.step = 9
    assert progress.as_extra()["metric"] is None


def test_a_checkpoint_that_goes_while_a_run_begins_is_not_started_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    assert trained(config) == 0
    monkeypatch.setattr(checkpoint, "load_newest", lambda *_, **__: None)

    def body(rank: int) -> None:
        with pytest.raises(BadInput, match=r"had a checkpoint when this run began.*checkpoint\.resume=never"):
            open_session(config, ALONE)

    run_in_threads(1, body)


def test_a_resumed_run_names_what_differs_and_which_value_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path))
    assert "resume: " not in capsys.readouterr().out
    changed = config_in(tmp_path, optimizer={"lr": 5.0}, batch={"micro_batch": 1}, train={"steps": 6})
    trained(changed)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("resume: ")]
    assert lines == [
        "resume: batch.micro_batch is 1 in the configuration, which is used, and 2 in the checkpoint",
        "resume: optimizer.lr is 5.0 in the configuration and 0.003 in the checkpoint, which is used",
        "resume: the learning rate goes on at 5.6e-04, where this schedule has it; it was 3.0e-04",
    ]
    assert "zero3 on 1 CPU rank, fp32, 1 thread\n" in out[: out.index("tok/s")]
    assert re.match(r"plan zero3 on .*\nprecision: .*\n\d units", (tmp_path / "run/plan.txt").read_text(), re.DOTALL)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert {group["initial_lr"] for group in manifest["optimizer"]["groups"]} == {0.003}
    trained(config_in(tmp_path, optimizer={"lr": 4.0}, batch={"micro_batch": 1}, train={"steps": 8}))
    again = "resume: optimizer.lr is 4.0 in the configuration and 0.003 in the checkpoint, which is used"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: optim")] == [again]


def test_a_checkpoint_of_another_model_is_refused_in_a_few_words_with_the_way_on(tmp_path: Path) -> None:
    trained(config_in(tmp_path, train={"steps": 1}))
    with pytest.raises(BadInput) as caught:
        trained(config_in(tmp_path, model={"dim": 32, "dropout": 0.25, "rope_theta": 500.0}))
    said = str(caught.value)
    assert len(said) < 1200
    assert said.count(" in the model") == 3
    assert " more like these. " in said
    assert "This run differs from the checkpoint's in model.dim (16 → 32). " in said
    assert said.endswith(
        "take another log.folder, or checkpoint.resume=never checkpoint.overwrite=true, which removes the checkpoints"
        " that are there."
    )
    trained(config_in(tmp_path, model={"dim": 32}, checkpoint={"resume": "never", "overwrite": True}))


def test_a_run_with_nothing_left_does_not_say_how_it_would_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path))
    trained(config_in(tmp_path, train={"steps": 4}, schedule={"name": "linear", "final_fraction": 0.5}))
    out = capsys.readouterr().out
    assert "nothing left to do" in out
    assert "the learning rate goes on" not in out


def test_a_run_of_one_step_ends_without_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In it all is done for the first time."""
    for steps in (1, 6):
        trained(config_in(tmp_path, train={"steps": steps}))
        assert ("\nverdict " in capsys.readouterr().out) is (steps > 1)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path, log={"folder": str(tmp_path / "runs" / "a")}, data={"source": str(tmp_path / "x.txt")})
    (tmp_path / "x.txt").write_bytes(b"a\0b")
    (tmp_path / "kept").mkdir()
    for name, left in (("runs/a", "runs"), ("kept/b", "kept/b")):
        log = config.log.model_copy(update={"folder": tmp_path / name})
        with pytest.raises(BadInput, match="binary"):
            trained(config.model_copy(update={"log": log}))
        assert not (tmp_path / left).exists()
    assert (tmp_path / "kept").is_dir(), "it was there before"


@pytest.mark.parametrize(
    "changed",
    [{"schedule": {"name": "linear", "final_fraction": 0.0}}, {"schedule": {"name": "constant"}}, {}],
    ids=["another schedule", "no schedule", "a longer run"],
)
def test_a_resumed_runs_first_step_takes_the_learning_rate_of_its_own_schedule(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    trained(config_in(tmp_path))
    config = config_in(tmp_path, **changed, train={"steps": 10})

    def body(rank: int) -> list[float]:
        with open_session(config, ALONE) as session:
            assert session.step == 4
            return [group["lr"] for group in session.optimizer.param_groups]

    expected = 0.003 * learning_rate_share(config.schedule, 10, 4)
    assert run_in_threads(1, body) == [[expected] * 2]


def test_a_row_shows_the_learning_rate_that_its_step_was_taken_with(tmp_path: Path) -> None:
    taken: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: taken.append(optimizer.param_groups[0]["lr"]))
    try:
        trained(config_in(tmp_path, schedule={"name": "linear", "warmup_steps": 0}))
    finally:
        hook.remove()
    rates = [line["learning_rate"] for line in metrics(tmp_path)]
    assert rates == taken[1:5]  # what comes before them is the first use's, and behind them the promise's
    assert len(set(rates)) == 4


def test_an_overwriting_run_that_cannot_start_removes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path))
    folder = tmp_path / "run" / "checkpoints"
    saved = complete_checkpoints(folder)
    anew = {"resume": "never", "overwrite": True}
    with pytest.raises(BadInput):
        trained(config_in(tmp_path, checkpoint=anew, plan={"units": ["NoSuchBlock"]}))
    assert complete_checkpoints(folder) == saved
    assert "removed" not in capsys.readouterr().out
    trained(config_in(tmp_path, checkpoint=anew, train={"steps": 1}))
    assert f"anew: removed {Path(saved[0]).name}" in capsys.readouterr().out.replace("\n", " ")
    assert [Path(path).name for path in complete_checkpoints(folder)] == ["step-00000001"]


def test_absent_pretrained_weights_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"set model\.weights to random"):
        weight_files(tmp_path)


def final_state(folder: Path) -> dict[tuple[str, str], Tensor]:
    path = latest(folder / "run" / "checkpoints")
    assert path is not None
    source = open_source(path)
    return {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


def equal(first: dict[tuple[str, str], Tensor], second: dict[tuple[str, str], Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def with_everything_that_draws(folder: Path, **sections: dict[str, Any]) -> Config:
    """Dropout, shuffling over more than one epoch, and a schedule that depends on the step."""
    folder.mkdir(exist_ok=True)
    sections = {"model": {"dropout": 0.3}, "data": {"max_bytes": 2000, "validation_fraction": 0.2}, **sections}
    return config_in(folder, **sections)


@pytest.mark.long  # in fewer steps: test_loop
def test_twenty_steps_after_a_resumption_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    whole = with_everything_that_draws(tmp_path / "a", train={"steps": 26}, checkpoint={"every": 6})
    trained(whole)
    part = {"every": 6, "background": True, "keep_last": 1}
    assert trained(with_everything_that_draws(tmp_path / "b", train={"steps": 26}, checkpoint=part), stop_after=6) == 75
    trained(with_everything_that_draws(tmp_path / "b", train={"steps": 26}, checkpoint=part))
    assert equal(final_state(tmp_path / "a"), final_state(tmp_path / "b"))
    losses = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name)] for name in ("a", "b")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 26


def test_the_header_says_what_the_loss_is_per(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(config_in(tmp_path, train={"steps": 1}))
    assert "\nloss      nats per byte\n" in capsys.readouterr().out
    folder = save_tokenizer(tmp_path / "tokenizer")
    elsewhere = {"folder": str(tmp_path / "other")}
    trained(config_in(tmp_path, train={"steps": 1}, data={"tokenizer": str(folder)}, checkpoint=elsewhere))
    text = (tmp_path / "text.txt").read_text()
    tokens = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids) + 1  # the end of the document
    size = f"{len(text) / tokens:.2f} bytes of text in the mean"
    assert f"\nloss      nats per token of {folder}, {size}; bits per byte are of" in capsys.readouterr().out


def test_a_run_that_is_watched_has_the_columns_that_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path, train={"steps": 2}))
    printed = capsys.readouterr().out.splitlines()
    header, *rows = rows_of(run_lines(tmp_path / "run"), 2, 80)
    assert header in printed
    assert [row for row in rows if row in printed] == rows


def test_the_first_step_of_each_start_has_a_row(tmp_path: Path) -> None:
    """That the run works, and where its loss begins, is seen before the first log step."""
    for name, every, stops in (("all", 1, None), ("rare", 5, 3)):
        (tmp_path / name).mkdir()
        config = config_in(tmp_path / name, train={"steps": 12}, log={"every": every})
        trained(config, stop_after=stops)
    assert [line["step"] for line in metrics(tmp_path / "rare")] == [1, 3]
    trained(config)
    losses = {line["step"]: line["loss"] for line in metrics(tmp_path / "all")}
    rare = metrics(tmp_path / "rare")
    assert [line["step"] for line in rare] == [1, 3, 4, 5, 10, 12]
    assert [line["loss"] for line in rare] == [losses[line["step"]] for line in rare]


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_a_damaged_newest_checkpoint_is_passed_over_loudly_and_its_step_is_saved_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path))
    expected = final_state(tmp_path)
    newest = Path(str(latest(tmp_path / "run" / "checkpoints")))
    data = bytearray((newest / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "rank-00000.safetensors").write_bytes(data)
    capsys.readouterr()
    trained(config_in(tmp_path))
    out = capsys.readouterr().out
    assert "resumed at step 3" in out
    assert f"resume: {newest} is DAMAGED, not used: '{newest}/rank-00000.safetensors', bytes" in out
    assert equal(final_state(tmp_path), expected)
    assert len([path for path in newest.parent.iterdir() if ".damaged-" in path.name]) == 1


def test_no_whole_checkpoint_is_an_error_and_never_a_new_start(tmp_path: Path) -> None:
    trained(config_in(tmp_path))
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "manifest.json").write_text("{}")
    with pytest.raises(Damaged, match=r"No checkpoint is whole.*step-00000004.*step-00000003"):
        trained(config_in(tmp_path))


@pytest.mark.parametrize("why", ["damaged", "cannot begin"])
def test_a_run_that_cannot_be_opened_leaves_no_swap_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    swap = tmp_path / "run" / "swap"
    config = config_in(tmp_path, plan={"name": "zero3@nvme"}, offload={"path": str(swap)})
    if why == "damaged":
        trained(config)
        for path in (tmp_path / "run" / "checkpoints").iterdir():
            (path / "manifest.json").write_text("{}")
    else:

        def fails(config: Config) -> None:
            assert list(swap.iterdir())
            raise BadInput("The weights are of another model.")

        monkeypatch.setattr(build_session, "clear_checkpoints", fails)
    with pytest.raises(BadInput) as caught:
        trained(config)
    assert list(swap.iterdir()) == [], "while the error still holds everything"
    assert caught.type is (Damaged if why == "damaged" else BadInput)


def test_what_a_resumed_run_has_learnt_is_counted_from_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, steps = {"validation_fraction": 0.2}, {"steps": 4, "eval_every": 2}
    trained(config_in(tmp_path, data=data, train=steps), stop_after=2)
    trained(config_in(tmp_path, data=data, train=steps))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [found for line in lines if (found := json.loads(line))["kind"] == "validation"]
    assert (first["step"], last["step"]) == (0, 4)
    begun = [found for line in lines if (found := json.loads(line))["kind"] == "begin"]
    assert begun == [{"kind": "begin", "step": 2, "ranks": 1, "same_evaluation": True}]
    learnt = f"; {first['bits_per_byte']:.2f} → {last['bits_per_byte']:.2f} bits per byte\n"
    assert learnt in capsys.readouterr().out.partition("done ")[2]

    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "other" / "checkpoints")
    trained(config_in(tmp_path, data=data, train={**steps, "steps": 6}, log={"folder": str(tmp_path / "other")}))
    assert "bits per byte" not in capsys.readouterr().out.partition("done ")[2]  # measured once: there is no first


def test_losses_of_other_validation_data_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two sources, one of which is easier: no best of it stays, and no first of it is the summary's."""
    (tmp_path / "easy.txt").write_text("the number 1 follows 0\n" * 200)
    (tmp_path / "hard.txt").write_text("".join(chr(33 + 7 * n * n % 94) for n in range(4000)))

    def go(name: str, steps: int) -> str:
        data = {"validation_source": str(tmp_path / f"{name}.txt"), "validation_fraction": 0.05}
        keep = {"every": 2, "keep_last": 1, "keep_best": 1}
        trained(config_in(tmp_path, data=data, train={"steps": steps, "eval_every": 2}, checkpoint=keep))
        return capsys.readouterr().out.partition("done ")[2]

    go("easy", 4)
    go("hard", 6)
    (path,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    extra = open_source(path).extra
    assert extra["best"] == {"loss": extra["metric"], "step": 6}
    assert " since step 6" in go("hard", 8)


def test_changed_data_are_refused_unless_allowed(tmp_path: Path) -> None:
    trained(config_in(tmp_path))
    changed = {"max_bytes": 3000}
    with pytest.raises(BadInput, match=r"another dataset.*checkpoint\.allow_changed_data"):
        trained(config_in(tmp_path, data=changed, train={"steps": 6}))
    assert trained(config_in(tmp_path, data=changed, train={"steps": 6}, checkpoint={"allow_changed_data": True})) == 0


def test_changed_data_are_named_with_the_ways_on(tmp_path: Path) -> None:
    """The setting, or else the file, and the commands of a new run from the weights."""

    def refused(**sections: dict[str, Any]) -> str:
        with pytest.raises(BadInput, match="another dataset") as caught:
            trained(config_in(tmp_path, train={"steps": 6}, **sections))
        return str(caught.value)

    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text(f"the first text of {name}\n" * 20)
    source = {"source": str(folder)}
    trained(config_in(tmp_path, data=source))
    assert "What has changed: data.max_bytes is 700 and was null. Put it" in refused(data={**source, "max_bytes": 700})
    secret = {"source": "https://someone:secret@example.org/x"}
    was = config_from_dict({"data": secret | {"max_bytes": None}}).model_dump(mode="json")
    now = config_from_dict({"data": secret | {"max_bytes": 700}})
    changed = data_changes(now, {"config": without_passwords(was), "step": 3}, ())
    assert "changed: data.max_bytes is 700 and was null. Put" in changed, "the password is not what has changed"
    (folder / "a.txt").write_text("the other text of a.txt\n" * 20)
    assert "in data.source, 'a.txt' was written anew. Put it back" in refused(data=source)
    (folder / "b.txt").write_text("short")
    (folder / "c.txt").rename(folder / "d.txt")
    said = refused(data=source)
    assert "What has changed: in data.source, 'c.txt' is gone, 'd.txt' is new, 'b.txt' has 5 bytes and had 480." in said

    (converting,) = re.findall(r"checkpoint convert (\S+ \S+) --to hf, then", said)
    open_source(converting.split()[0])
    (settings,) = re.findall(r"the same command with (.*)\. checkpoint\.allow", said)
    (tmp_path / "a.json").write_text(config_in(tmp_path, data=source).model_dump_json())
    config = load_config(tmp_path / "a.json", settings.split())
    assert (config.log.folder, str(config.model.path)) == (tmp_path / "run-new", converting.split()[1])


def test_the_best_checkpoint_by_validation_loss_is_kept(tmp_path: Path) -> None:
    keep = {"every": 1, "keep_last": 1, "keep_best": 1}
    trained(config_in(tmp_path, data={"validation_fraction": 0.2}, checkpoint=keep, train={"eval_every": 1}))
    kept = [open_source(path) for path in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept[-1].step == 4
    best = kept[-1].extra["best"]
    assert best["step"] in [source.step for source in kept]
    assert len(kept) == (1 if best["step"] == 4 else 2)


def test_a_checkpoint_is_ranked_by_a_validation_of_its_own_step_alone(tmp_path: Path) -> None:
    keep = {"every": 1, "keep_last": None}
    trained(config_in(tmp_path, data={"validation_fraction": 0.2}, checkpoint=keep, train={"eval_every": 2}))
    found = [open_source(path).extra for path in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert [each["step"] for each in found if each["metric"] is not None] == [2, 4]
    assert found[-1]["best"]["loss"] <= min(found[1]["metric"], found[3]["metric"])


def test_a_new_run_does_not_empty_the_metrics_of_another(tmp_path: Path) -> None:
    first, other = {"folder": str(tmp_path / "a")}, {"folder": str(tmp_path / "b")}
    trained(config_in(tmp_path, checkpoint=first))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for elsewhere in (other, {}):
        with pytest.raises(BadInput, match=rf"of a run with checkpoint.folder='{tmp_path}/a'.*another log.folder"):
            check(config_in(tmp_path, checkpoint=elsewhere), 1)
    check(config_in(tmp_path, checkpoint=other | {"resume": "never", "overwrite": True}), 1)
    longer = config_in(tmp_path, checkpoint=first, train={"steps": 6})
    check(longer, 1)
    trained(longer)
    assert len((tmp_path / "run" / "metrics.jsonl").read_bytes()) > len(before)
    shutil.rmtree(tmp_path / "a")
    check(longer, 1)  # as a run that was killed before it had saved
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"metrics.jsonl is of another run"):
        check(longer, 1)


def test_a_hugging_face_folder_is_written_at_the_end(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained(config_in(tmp_path, checkpoint={"save_format": "hf"}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    assert tokenizer("the number")["input_ids"] == list(b"the number")
    state = final_state(tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, state["embedding.weight", "weight"])
    again = {"save_format": "hf", "folder": str(tmp_path / "another run's")}
    with pytest.raises(BadInput, match="exists already: move it away"):
        check(config_in(tmp_path, checkpoint=again), 1)


def test_no_other_run_may_take_the_folder_while_a_checkpoint_in_it_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(config: Config, checkpoints: RunCheckpoints, *_: Any, trained: bool) -> Path:
        assert latest(checkpoints.folder) is not None and trained
        with pytest.raises(BadInput, match="Another run saves in"):
            checkpoint.claim(checkpoints.folder, "me")
        return tmp_path / "exported"

    monkeypatch.setattr(loop, "export", export)
    saved = {"save_format": "hf", "background": True, "every": None}
    assert trained(config_in(tmp_path, checkpoint=saved)) == 0
    lock = checkpoint.claim(tmp_path / "run" / "checkpoints", "me")
    assert lock is not None
    lock.drop()


def test_a_finished_run_with_a_hugging_face_folder_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def run(steps: int) -> dict[str, bytes]:
        config = config_in(tmp_path, checkpoint={"save_format": "hf"}, train={"steps": steps})
        check(config, 1)
        assert trained(config) == 0
        return {path.parent.name: path.read_bytes() for path in tmp_path.glob("run/hf*/model.safetensors")}

    first = run(2)["hf"]
    assert run(2) == {"hf": first}, "nothing was left to do"
    longer = run(4)
    assert longer.pop("hf") != first
    assert longer == {"hf-1": first}


def test_a_hugging_face_folder_of_another_step_is_not_taken_for_the_last_ones(tmp_path: Path) -> None:
    """The run went on without one, and is started again with nothing left to do."""
    pytest.importorskip("transformers")

    def run(steps: int, save_format: str = "hf") -> dict[str, bytes]:
        assert trained(config_in(tmp_path, checkpoint={"save_format": save_format}, train={"steps": steps})) == 0
        return {path.parent.name: path.read_bytes() for path in tmp_path.glob("run/hf*/model.safetensors")}

    first = run(2)["hf"]
    assert run(4, "terrazzo") == {"hf": first}
    later = run(4)
    assert later.pop("hf") != first
    assert later == {"hf-1": first}
    notes = {path.name: json.loads(path.read_text())["step"] for path in tmp_path.glob("run/hf*.json")}
    assert notes == {"hf.json": 4, "hf-1.json": 2}
    (tmp_path / "run" / "hf.json").unlink()
    assert sorted(run(4)) == ["hf", "hf-1", "hf-2"], "nobody knows of what it was"
    assert sorted(run(4)) == ["hf", "hf-1", "hf-2"]


def test_a_resume_with_nothing_left_changes_and_promises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path))
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert b'"summary"' in metrics
    capsys.readouterr()
    assert trained(config_in(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "nothing left to do: step 4 of 4" in said
    assert "measured" not in said
    assert "settings" not in said
    assert trained(config_in(tmp_path, log={"every": 3})) == 0
    assert "settings  no step was taken with log.every=3 (the run had " in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("what", ["run", "run/checkpoints", "run/metrics.jsonl"])
@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
def test_a_folder_that_goes_away_while_training_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    real, calls = NextToken.loss_of, []

    def loss_of(*arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            aside = tmp_path / "aside"
            (tmp_path / what).rename(aside)
            if how == "removed" and aside.is_dir():
                shutil.rmtree(aside)
            if how == "replaced":
                (tmp_path / what).touch() if what.endswith("jsonl") else (tmp_path / what).mkdir()
        return real(*arguments)

    monkeypatch.setattr(NextToken, "loss_of", loss_of)
    with pytest.raises(SaveFailed, match=f"folder '{tmp_path}/run.*was renamed, removed or replaced"):
        trained(config_in(tmp_path, checkpoint={"every": 100}))
    assert len(calls) == 2
    left = {"renamed": [], "removed": [], "replaced": [tmp_path / what]}[how]
    assert [path for path in (tmp_path / what,) if path.exists()] == left, "nothing was made in its place"


def test_a_run_whose_log_has_no_room_at_all_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(JsonLines, "_log", full)
    monkeypatch.setattr(page, "replace_file", full)
    config = config_in(tmp_path)
    assert trained(config) == 0
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert f"done      step {config.train.steps} of {config.train.steps}" in said.out
    assert "\nreport" not in said.out, "it was not written"


@pytest.mark.parametrize("key", ["log", "checkpoint"])
def test_folders_that_cannot_be_written_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    there = tmp_path / "read-only"
    there.mkdir()
    config = config_in(tmp_path, **{key: {"folder": str(there / "run")}})

    def refusing(dir: Path) -> BinaryIO:
        if dir == there:
            raise PermissionError(errno.EACCES, "Permission denied")
        return BytesIO()

    with monkeypatch.context() as patched:  # root may write anywhere
        patched.setattr("tempfile.TemporaryFile", refusing)
        with pytest.raises(BadInput, match=rf"{key}\.folder is '{there}/run', but '{there}' cannot be written to"):
            check(config, 1)
    assert not list(there.iterdir())
    (there / "file").touch()
    for name in ("file", "file/run"):
        with pytest.raises(BadInput, match=rf"{key}\.folder is .* is a file"):
            check(config_in(tmp_path, **{key: {"folder": str(there / name)}}), 1)
    for folder, why in (("/proc/run", "No such file"), (str(there / ("a" * 300)), "File name too long")):
        with pytest.raises(BadInput, match=rf"{key}\.folder is '{folder}', .* cannot be .*{why}"):
            check(config_in(tmp_path, **{key: {"folder": folder}}), 1)
    # What has become so since: /proc takes no folders, whatever it says of itself.
    monkeypatch.setattr(build_session, "load_data", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(
        BadInput, match=r"/proc/run.*(cannot be written to|cannot be saved in)|cannot be saved in '/proc/run"
    ):
        trained(config_in(tmp_path, **{key: {"folder": "/proc/run"}}))


def opened_by_machines(configs: list[Config], run: Path) -> list[str]:
    """What ranks say that share no folder but the run's: the fingerprint of their data, or why they do not start."""
    shared = [config.model_copy(update={"log": config.log.model_copy(update={"folder": run})}) for config in configs]

    def body(rank: int) -> str:
        try:
            with open_session(shared[rank], Ranks(rank, len(shared), torch.device("cpu"))) as opened:
                return opened.data.train.fingerprint
        except BadInput as error:
            return str(error).replace(str(Path(str(shared[rank].data.source)).parent), "")  # the test's own difference

    return run_in_threads(len(shared), body)


@pytest.mark.parametrize("differing", ["training", "validation", None])
def test_machines_that_read_different_data_are_refused(tmp_path: Path, differing: str | None) -> None:
    configs = []
    for machine in ("one", "other"):
        (tmp_path / machine).mkdir()
        held_out = tmp_path / machine / "held-out.txt"
        held_out.write_text("a word and another " * 20)
        data = {"validation_source": str(held_out)}
        configs.append(config_in(tmp_path / machine, data=data, batch={"micro_batch": 1}))
    sources = {"training": configs[1].data.source, "validation": configs[1].data.validation_source}
    if differing is not None:
        Path(str(sources[differing])).write_text("others, and fewer " * 20)
    one, other = opened_by_machines(configs, tmp_path / "run")
    assert one == other, "and a time of change alone makes no difference"
    if differing is not None:
        assert re.search(rf"{differing} data \([\d,]+ tokens, .* on rank 0; 361 tokens, .* on rank 1\)", one)
        assert "data.source" in one


def test_tokenizers_that_read_these_texts_alike_and_others_not_are_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    data = load_data(config)

    def body(rank: int) -> str:
        tokenizer = ByteTokenizer()
        tokenizer.fingerprint = f"of-{rank}"
        with pytest.raises(BadInput) as caught:
            agree_on_data(replace(data, tokenizer=tokenizer).described, [])
        return str(caught.value)

    messages = run_in_threads(2, body)
    assert "differ between ranks in tokenizer (of-0 on rank 0; of-1 on rank 1). Every" in messages[0] == messages[1]
