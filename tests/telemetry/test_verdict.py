"""What is said to bound a step: from records made by hand, whose answer is known, and from ranks that are late."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from typer.testing import CliRunner

import terrazzo as tz
from terrazzo import cli
from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.telemetry import Verdict, lines_of, page_of, steps_of, verdict_of
from terrazzo.telemetry.display.tables import tables_of
from terrazzo.telemetry.log.step_record import StepRecord
from terrazzo.telemetry.steps.step_recorder import TIME_CAUSES
from terrazzo.telemetry.verdict.bounds import BOUNDS
from terrazzo.telemetry.verdict.edits import edit_for
from terrazzo.train.report import run_review
from tests.helpers.processes import Pool
from tests.telemetry.test_steps import trained

CONFIG = {
    "model": {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "vocab_size": 256},
    "plan": "zero3",
    "batch": {"global_batch": 8, "micro_batch": 2},
    "train": {"steps": 40, "eval_every": 10},
    "launch": {"ranks": 2},
}


def record(step: int, comm: dict[str, dict[str, float]] | None = None, **more: Any) -> dict[str, Any]:
    """Ten steps of one second, all of them compute but for what is given: causes by name, `late` by rank."""
    late = more.pop("late", None)
    causes = {"late_peer": (late or [0.0])[0], **more}
    causes["gather"] = sum(row["exposed_s"] - row["late_s"] for row in (comm or {}).values())
    causes["compute"] = 1.0 - sum(causes.values())
    found = {"kind": "step", "step": step, "steps": 10, "step_s": 1.0, "cause_s": causes, "comm": comm or {}}
    found["phase_s"] = {name: causes.get(name, 0.0) for name in ("evaluate", "save", "local_save")}
    if late:
        found["skew"] = {"late_peer_s": late, "compute_s": [1.0 - each for each in late], "input_s": [0.0] * len(late)}
    return found


def of(records: Sequence[dict[str, Any]], settings: Any = None, admits: Any = lambda _: True) -> Verdict:
    found = verdict_of(records, settings, admits)
    assert found is not None
    return found


def settings(**changes: Any) -> dict[str, Any]:
    return config_from_dict(CONFIG | changes).model_dump(mode="json")


def test_a_run_that_finds_out_how_often_to_save_is_told_no_number() -> None:
    records = [record(step, save=0.5) for step in (10, 20, 30)]
    told = of(records, settings(checkpoint={"every": "auto", "background": True})).edit.text
    assert "checkpoint.every" not in told and "=" not in told
    assert of(records, settings(checkpoint={"every": 5, "background": True})).edit.text == "checkpoint.every=20"


@pytest.mark.parametrize(("every", "edit"), [(10, "=40"), (20, "=40"), (40, "Evaluating less often")])
def test_no_rarer_evaluation_than_one_a_run_is_proposed(every: int, edit: str) -> None:
    found = of([record(10, evaluate=0.3)], settings(train={"steps": 40, "eval_every": every}))
    assert edit in found.edit.text


@pytest.mark.parametrize("cause", ["evaluate", "save"])
def test_what_a_run_ends_with_is_not_what_bounds_its_steps(cause: str) -> None:
    once = [record(10), record(20), record(30, **{cause: 0.6})]
    assert of(once).bound == "compute"
    assert of([record(10), record(20, **{cause: 0.6}), record(30, **{cause: 0.6})]).bound == cause
    few = record(4, **{cause: 0.6}) | {"steps": 4}
    assert of([few]).bound == "compute"
    for found, step_s in ((of(once), 1.0), (of([few]), 0.4)):
        assert (found.seconds, found.step_s) == (pytest.approx(step_s), pytest.approx(step_s))
        assert f", leaving out {'evaluation' if cause == 'evaluate' else 'saving'}, too seldom" in str(found)


def test_what_comes_only_at_the_ends_of_a_run_and_its_continuations_is_no_bound() -> None:
    """The record of the first end stands in the middle then."""
    at_ends = [record(10), record(20, evaluate=0.6), record(30), record(40, evaluate=0.6)]
    every = settings(train={"steps": 40, "eval_every": 10})
    assert of(at_ends, every).bound == "evaluate"
    assert of(at_ends, settings(train={"steps": 40, "eval_every": None})).bound == "compute"
    saved = [record(10), record(20, save=0.6), record(30), record(40, save=0.6)]
    assert of(saved, settings(checkpoint={"every": None})).bound == "compute"


def test_a_record_that_is_nothing_but_its_evaluation_has_no_verdict() -> None:
    assert verdict_of([record(1, evaluate=1.0) | {"steps": 1}]) is None
    late = record(1, late=[0.0, 0.1])
    late["skew"]["step_s"] = [0.0, 1.0]
    assert verdict_of([late]) is not None


def test_what_is_small_beside_compute_is_not_said_to_bound_the_step() -> None:
    said = [str(of([record(step, input=share) for step in (10, 20)])) for share in (0.09, 0.14, 0.16)]
    small = ["data is the first thing to look at in a step: 0.090 of 1.00 s (9%) is waiting for the next batch."]
    assert said[0].startswith(small[0]) and "first thing" in said[1]
    assert said[2].startswith("data bounds the step: ")


def test_what_ranks_wait_for_in_an_evaluation_that_is_left_out_is_left_out() -> None:
    """Else waits that are no part of the steps would bound them."""
    records = [record(step, late=[0.0, 0.0]) for step in (10, 20, 30)]
    records.append(record(40, evaluate=2.9, late=[1.5, 1.4]) | {"step_s": 4.0})
    found = of(records)
    assert (found.bound, found.step_s, found.steps) == ("compute", pytest.approx(1.0), 30)
    assert ", leaving out evaluation, too seldom" in str(found)


@pytest.mark.parametrize(
    "waits", [{"late": [0.95, 0.9]}, {"late": [0.0, 0.95, 0.95], "evaluate": 0.8}, {"gathered": 0.9}]
)
@pytest.mark.parametrize("records", [1, 3])
def test_no_wait_is_more_than_the_steps_beside_an_evaluation_that_every_record_has(
    waits: dict[str, Any], records: int
) -> None:
    """Two steps a record, of 0.2 s beside an evaluation of 0.8 s in which ranks wait for each other."""
    waits = dict(waits)
    comm = gathered(waits.pop("gathered")) if "gathered" in waits else None
    lines = [record(step, comm, **waits) | {"steps": 2} for step in range(2, 2 + 2 * records, 2)]
    for line in lines:
        line["phase_s"]["evaluate"] = 0.8
        if "skew" in line:
            line["skew"]["step_s"] = [1.0] * len(line["skew"]["late_peer_s"])
    found = of(lines)
    assert found.step_s == pytest.approx(0.2)
    assert 0 < found.share <= 1
    assert ", leaving out evaluation, too seldom" in str(found)


def gathered(seconds: float, axis: str = "dp_shard") -> dict[str, dict[str, float]]:
    return {f"{axis} all_gather": {"n": 8, "sent_bytes": 100, "exposed_s": seconds + 0.02, "late_s": 0.02}}


@pytest.mark.parametrize(
    ("cause", "words", "edit"),
    [
        ("input", "data bounds the step", "background"),
        ("save", "saving bounds the step", "checkpoint.background=true"),
        ("local_save", "saving on each machine bounds the step", "checkpoint.local.every=40"),
        ("evaluate", "evaluation bounds the step", "train.eval_every=40"),
        ("tier", "offload bounds the step", "offload.optim=device"),
    ],
)
def test_each_cause_is_named_with_its_number_and_an_edit(cause: str, words: str, edit: str) -> None:
    given = settings(offload={"optim": "cpu"})
    found = of([record(step, **{cause: 0.3}) for step in (10, 20, 30)], given)
    assert (found.bound, found.seconds, found.share) == (cause, pytest.approx(0.3), pytest.approx(0.3))
    assert str(found).startswith(f"{words}: 0.300 of 1.00 s (30%)")
    assert edit in found.edit.text
    assert "30% at most" in str(found)


def test_waits_of_ranks_that_count_longer_steps_are_a_part_of_these() -> None:
    line = record(10, late=[0.1, 2.0]) | {"step_s": 1.0}
    line["skew"]["step_s"] = [1.0, 4.0]
    found = of([line])
    assert (found.bound, found.seconds) == ("late_peer", pytest.approx((0.1 + 2.0 / 4.0) / 2))
    del line["skew"]["step_s"]
    assert of([line]).seconds == pytest.approx((0.1 + 1.0) / 2), "of an older record: no more than its step"


def test_what_ranks_wait_for_in_an_evaluation_goes_with_it() -> None:
    line = record(10, evaluate=0.3, late=[0.35, 0.2])
    line["phase_s"]["evaluate"] = 0.6
    line["skew"]["step_s"] = [1.0, 1.0]
    found = of([line])
    assert (found.bound, found.seconds) == ("evaluate", pytest.approx(0.6))


def test_exposed_communication_is_named_by_axis_without_waits_for_late_ranks() -> None:
    found = of([record(10, gathered(0.2) | gathered(0.1, "tp"))], settings())
    assert (found.bound, found.axis, found.seconds) == ("gather", "dp_shard", pytest.approx(0.2))
    assert str(found).startswith("exposed communication along dp_shard bounds the step: 0.200 of 1.00 s")
    assert found.edit.text == "plan.name=zero2"
    along = of([record(10, gathered(0.2, "tp"))], settings(plan={"name": "zero3", "mesh": {"tp": 2}}))
    assert (along.bound, along.axis, along.edit.text) == ("exchange", "tp", "plan.mesh.tp=1")


GUIDE = (Path(__file__).parents[2] / "docs/guides/slow-runs.md").read_text()
AXES = {"cp", "pp"}
ROWS_OF_EDITS = re.findall(
    r"^\| (`.*) \| (.*) \| (.*) \|$", GUIDE.split("## From the verdict")[1].split("\n## ")[0], re.M
)


def test_waits_for_other_stages_are_the_pipelines_and_name_the_longest() -> None:
    sends = {"pp send": {"n": 8.0, "sent_bytes": 8.0, "total_s": 0.6, "exposed_s": 0.6, "late_s": 0.0}}
    found = of([record(step, sends) | {"skew": {"compute_s": [0.2, 0.9]}} for step in range(1, 9)])
    assert found.axis == "pp"
    assert str(found).startswith(
        "the pipeline along pp bounds the step: 0.600 of 1.00 s (60%) is waiting for what other stages"
    )
    assert "; rank 1 computes longest, 0.900 s beside 0.200" in str(found)


@pytest.mark.parametrize(("bounds", "has", "edits"), ROWS_OF_EDITS)
def test_the_edits_of_the_guide_are_those_that_a_verdict_names(bounds: str, has: str, edits: str) -> None:
    """Each is named where those before it are not admitted, and at last what would help in words."""
    given: dict[str, Any] = {"batch": {"global_batch": 16, "micro_batch": 2}, "train": {"steps": 1000}}
    for key, value in (text.split("=") for text in re.findall(r"`([\w.]+=.*?)`", has)):
        *sections, last = key.split(".")
        within = given
        for section in sections:
            within = within.setdefault(section, {})
        within[last] = yaml.safe_load(value)
    run = settings(**given)
    names = re.findall(r"`(\w+)`", bounds)
    axis = next((name for name in names if name in AXES), "")
    for bound in set(names) - AXES:
        left = re.findall(r"`([\w.]+=.*?)`", edits)
        for number, edit in enumerate(left):
            assert edit_for(bound, axis, run, lambda each, before=left[:number]: each not in before) == (edit, True)  # type: ignore[misc]
        assert not edit_for(bound, axis, run, lambda each, before=left: each not in before).is_code  # type: ignore[misc]


def test_the_guide_has_every_bound_that_a_setting_helps_against() -> None:
    named = {bound for bounds, _, _ in ROWS_OF_EDITS for bound in re.findall(r"`(\w+)`", bounds)} - AXES
    assert named == BOUNDS.keys()


def test_the_page_has_every_field_of_a_record() -> None:
    page = (Path(__file__).parents[2] / "docs/concepts/step-record.md").read_text()
    fields = page.split("## Fields")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", fields, re.M)) == StepRecord.__annotations__.keys() - {"kind"}


def test_no_number_is_shown_of_what_records_do_not_have() -> None:
    """Of a script nobody knows bytes, nor when an exchange ended; on CUDA there are no times."""
    of_script = record(10, {"all_reduce": {"n": 2.0, "exposed_s": 0.25, "late_s": 0.125}})
    on_cuda = of_script | {"comm": {"dp gather": {"n": 2.0, "sent_bytes": 2.0**20}}}
    for one, head, row in (
        (of_script, ("n", "exposed s", "late s"), ("all_reduce", "2", "0.2500", "0.1250")),
        (on_cuda, ("n", "MiB sent"), ("dp gather", "2", "1.00")),
    ):
        table = next(each for each in tables_of([one]) if each.title == "Exchanges of a step")
        assert table.head == ("axis, kind", *head)
        assert table.rows == [row]


def test_an_edit_that_cannot_be_is_not_named() -> None:
    found = of([record(10, gathered(0.2))], settings(), lambda edit: edit != "plan.name=zero2")
    assert found.edit.text == "batch.micro_batch=4"
    assert not of([record(10, gathered(0.2))], settings(), lambda _: False).edit.is_code
    assert not of([record(10, gathered(0.2))]).edit.is_code, "a loop of one's own has no settings"


def test_micro_batches_that_would_be_empty_in_part_are_not_proposed(tmp_path: Path) -> None:
    """16 sequences are four for each of four ranks: of eight at once half would be nothing."""
    for batch, proposed in (
        ({"global_batch": 16, "micro_batch": 4}, False),
        ({"global_batch": 32, "micro_batch": 4}, True),
    ):
        config = settings(batch=batch, plan={"name": "zero1"}, launch={"ranks": 4})
        (tmp_path / "config.json").write_text(json.dumps(config))
        line = record(10, gathered(0.4), late=[0.0] * 4)
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        assert ("batch.micro_batch=8" in str(run_review.RunReview(tmp_path).verdict())) is proposed


def test_replicas_of_shards_share_the_batch_between_all_of_them() -> None:
    """16 sequences are four for each of 2 × 2 ranks."""
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    for size, edit in ((16, "plan.prefetch=2"), (32, "batch.micro_batch=8")):
        batch = {"global_batch": size, "micro_batch": 4}
        given = settings(batch=batch, plan={"name": "hybrid_shard_zero2", "mesh": mesh}, launch={"ranks": 4})
        assert of([record(10, gathered(0.4))], given).edit.text == edit


def test_below_five_percent_it_is_compute() -> None:
    found = of([record(10, gathered(0.04), input=0.03)], settings())
    assert (found.bound, found.seconds) == ("compute", pytest.approx(0.93))
    assert found.edit.text == BOUNDS["compute"].edit, "on a CPU nothing is known to help"
    assert "nothing else takes 5 %" in str(found)


def test_what_takes_much_but_unevenly_is_not_said_to_take_nothing() -> None:
    """Every other record waits for data for 40 % of its time: no steady bound, but a fifth of the whole."""
    found = of([record(step, input=0.4 if step % 20 else 0.0) for step in range(10, 110, 10)], settings())
    assert found.bound == "compute"
    assert "nothing else takes" not in str(found)
    assert "data takes 20% in the mean" in str(found)


def test_all_that_may_bound_a_step_has_a_row_of_words() -> None:
    assert {*TIME_CAUSES, "stages", "late_rank", "device", "host"} == set(BOUNDS)
    assert [name for name, row in BOUNDS.items() if not row.color] == ["device", "host", "stages", "late_rank"]


def test_an_update_counts_where_the_plan_could_divide_it() -> None:
    assert of([record(10, update=0.3)], settings()).bound == "compute"
    found = of([record(10, update=0.3)], settings(plan="zero0"))
    assert (found.bound, found.edit.text) == ("update", "plan.name=zero1")


def test_what_comes_and_goes_by_itself_is_not_named() -> None:
    """Six percent in the mean, of records that differ by as much."""
    noisy = [record(step, input=seconds) for step, seconds in enumerate([0.0, 0.12, 0.01, 0.11, 0.0, 0.12])]
    assert of(noisy).bound == "compute"
    assert of([record(step, input=0.06) for step in range(6)]).bound == "input"


def test_a_rank_is_named_if_all_wait_for_it_again_and_again() -> None:
    found = of([record(step, late=[0.3, 0.31, 0.01, 0.3]) for step in (10, 20, 30)])
    assert (found.bound, found.rank, found.seconds) == ("late_rank", 2, pytest.approx(0.29))
    assert "rank 2 bounds the step: 0.290 of 1.00 s (29%)" in str(found)
    assert "computes 0.290 s longer" in str(found)
    rows = ([0.3, 0.0, 0.3], [0.0, 0.3, 0.3], [0.3, 0.3, 0.0])
    turns = of([record(step, late=row) for step, row in enumerate(rows)])
    assert (turns.bound, turns.rank, turns.seconds) == ("late_peer", None, pytest.approx(0.2))
    assert "and no one rank is always the last" in str(turns)


@pytest.mark.parametrize(("last", "ranks", "late"), [(5, 2, 1), (8, 4, 2)])
def test_steps_of_another_number_of_ranks_do_not_count(last: int, ranks: int, late: int) -> None:
    """Ranks that come back as fewer, or as more, have other times."""
    waits = {3: [0.0, 0.5, 0.5], 2: [0.4, 0.0], 4: [0.5, 0.5, 0.0, 0.5]}
    numbers = (3, 3, 2, 2, 2, 4, 4, 4)
    records = [record(step, late=waits[number]) for step, number in enumerate(numbers[:last])]
    found = of(records)
    assert (found.bound, found.rank, found.steps) == ("late_rank", late, 30)
    assert [len(table.rows) for table in tables_of(records) if table.title == "Ranks"] == [ranks]


@pytest.mark.parametrize("mark", [{"kind": "begin", "ranks": 2}, {"kind": "restart", "ranks": 2}])
def test_steps_before_the_newest_start_do_not_count(mark: dict[str, Any]) -> None:
    """It may have other settings, and what its first record holds is done once; in the picture all stand."""
    slow, mark = [record(step, save=0.5) for step in (10, 20)], {"step": 20, **mark}
    assert of(steps_of([*slow, mark])).bound == "save", "nothing of the newest is known yet"
    lines = [*slow, mark, record(30, input=0.9), record(40), record(50)]
    assert (of(steps_of(lines)).bound, of(steps_of(lines)).steps) == ("compute", 20)
    assert of(steps_of(lines[:4])).bound == "input"
    told = [{**line, "number": 1, "most": 1, "why": ""} for line in lines]
    assert "step 20: save 0.5" in page_of("a run", told, {})


def test_a_device_is_not_said_to_compute() -> None:
    line = {"kind": "step", "step": 10, "steps": 10, "step_s": 1.0, "phase_s": {"input": 0.01, "forward": 0.99}}
    assert of([line]).bound == "device"
    assert "not told apart on CUDA" in str(of([line]))
    assert of([line | {"phase_s": {"input": 0.4, "forward": 0.6}}]).bound == "input"


@pytest.mark.processes
def test_a_late_rank_is_found_at_any_step_of_a_loop_of_ones_own(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(trained, "zero3", str(tmp_path), "forward")
    found = of(steps_of(lines_of(tmp_path / "metrics.jsonl")))
    assert found.bound == "late_peer"
    assert found.seconds > 0.12
    assert "and which rank is the last is not recorded" in str(found)
    (first, other) = two_processes.run(asked_in_the_loop, str(tmp_path / "asked"))
    assert "bounds the step" in first
    assert other == "None"


def test_a_configuration_of_another_version_names_no_setting() -> None:
    for cause in ("compute", "gather", "tier", "save", "evaluate"):
        assert not edit_for(cause, "", {"plan": {}}, lambda _: True).is_code
    assert verdict_of([record(10, evaluate=0.5), record(20)], {"train": {}}) is not None


def asked_in_the_loop(folder: str) -> str:
    model: nn.Module = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = tz.shard(model, optimizer, plan="zero3")
    telemetry = tz.telemetry.attach(model, folder, every=1)
    assert telemetry.verdict() is None, "there is no record yet"
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert dist.get_world_size() == 2
    said = str(telemetry.verdict())
    telemetry.close()
    return said


def write_run(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "step", "st')
    (folder / "config.json").write_text(json.dumps(settings()))
    return folder


def test_the_verbs_read_a_run_that_is_still_writing(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": 10, "loss": 2.0}, record(10, input=0.9), record(20, gathered(0.2))]
    run = write_run(tmp_path / "run", lines)
    shown = CliRunner().invoke(cli.app, ["verdict", str(run)]).output
    assert shown.startswith("exposed communication along dp_shard bounds the step")
    assert "plan.name=zero2 would help" in shown, "by the planner it fits"
    assert re.search(r"^gather +0\.2000 +20\.0%$", shown, re.MULTILINE)
    assert re.search(r"^dp_shard all_gather +8 ", shown, re.MULTILINE)
    said = json.loads(CliRunner().invoke(cli.app, ["verdict", str(run), "--json"]).output)
    assert (said["bound"], said["edit"]) == ("gather", "plan.name=zero2")
    other = write_run(tmp_path / "other", [{"kind": "train", "step": 10, "loss": 3.0}])
    shown = CliRunner().invoke(cli.app, ["report", str(run), "--against", str(other)]).output
    assert shown.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert "exposed communication along dp_shard bounds the step" in page
    assert 'class="against"' in page
    assert "<script" not in page
    assert "http" not in page


def test_a_run_is_named_by_its_folder_or_by_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "mine", [{"kind": "train", "step": 10, "loss": 2.0}, record(10, input=0.9)])
    folder, file = str(run), str(run / "metrics.jsonl")
    pages, shown = [], []
    for argument in (folder, file):
        shown.append(CliRunner().invoke(cli.app, ["verdict", argument]).output)
        said = CliRunner().invoke(cli.app, ["report", argument, "--against", argument]).output
        assert said.strip() == str(run / "report.html")
        pages.append((run / "report.html").read_text())
    assert shown[0] == shown[1]
    assert pages[0] == pages[1] and "mine" in pages[0] and "metrics.jsonl" not in pages[0]
    monkeypatch.chdir(run)
    CliRunner().invoke(cli.app, ["report", "metrics.jsonl"])
    assert "<title>mine" in (run / "report.html").read_text()
    (run / "copy.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    for verb in ("verdict", "report", "trace", "watch"):
        with pytest.raises(BadInput, match="is a file: give the folder of a run"):
            CliRunner().invoke(cli.app, [verb, "copy.jsonl"], catch_exceptions=False)


def test_the_summary_of_another_version_is_named_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"kind": "train", "step": 10, "loss": 2.0}, {"kind": "summary", "step": 10}])
    assert CliRunner().invoke(cli.app, ["report", str(run)]).exit_code == 0
    assert "written by another version of Terrazzo" in (run / "report.html").read_text()


def test_verbs_say_what_is_not_there(tmp_path: Path) -> None:
    for verb in ("verdict", "report"):
        result = CliRunner().invoke(cli.app, [verb, str(tmp_path)])
        assert isinstance(result.exception, BadInput)
        assert "give the folder of a run" in str(result.exception)
    run = write_run(tmp_path / "run", [{"kind": "train", "step": 1, "loss": 2.0}])
    result = CliRunner().invoke(cli.app, ["verdict", str(run)])
    assert "wait for its first log step" in str(result.exception)
    run = write_run(tmp_path / "empty", [])
    assert "no line of a run yet" in str(CliRunner().invoke(cli.app, ["report", str(run)]).exception)


def test_the_picture_has_a_bar_for_each_record_whose_parts_are_as_tall_as_their_seconds() -> None:
    lines = [record(step, input=0.5 if step == 20 else 0.0) for step in (10, 20, 30)]
    page = page_of("run", lines, {})
    bars = re.findall(r'class="part-(\w+)" x="[\d.]+" y="[\d.]+" width="[\d.]+" height="([\d.]+)"><title>(.*?)<', page)
    assert [(name, said) for name, _, said in bars] == [
        ("compute", "step 20: compute 0.5000 s"),
        ("input", "step 20: input 0.5000 s"),
        ("compute", "step 30: compute 1.0000 s"),
    ], "the first record, of what is done once, is left out"
    tall = [float(height) for _, height, _ in bars]
    assert tall[0] == tall[1] == pytest.approx(tall[2] / 2, abs=0.02)
    many = page_of("run", [record(step) for step in range(1000)], {})
    assert 60 < many.count("<title>step") <= 120, "neighbours of many are one bar"
