"""`terrazzo plan`: the contract for programs, what people see, the files it writes, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import terrazzo as tz
from terrazzo import cli
from terrazzo.cli.plan import answer as planning
from terrazzo.cli.plan import plan_config
from terrazzo.cli.plan.options import OPTION_ROWS, PlanArguments
from terrazzo.cli.plan.sources import FromConfig
from terrazzo.engine import DiLoCo
from terrazzo.engine.plan.place import ROWS
from terrazzo.errors import BadInput
from terrazzo.planner import Request
from terrazzo.planner.report.alternatives import alternatives
from terrazzo.planner.report.schema import ExplainedReport, PlanReport, StatesReport

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples/quickstart.yaml")
EIGHT = ["--model", "llama3-8b", "--gpu", "h100-sxm", "--gpus", "8"]


@pytest.fixture(autouse=True)
def no_records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was calibrated on this machine before does not count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *arguments])


def shown(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    assert not result.stderr
    return result.stdout


def answer(*arguments: str) -> Any:
    return json.loads(shown(*arguments, "--json"))


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    assert not result.stdout
    return str(result.exception)


# -- the contract for programs -------------------------------------------------------------------------------------

ZERO_PAPER = {  # 70e9 parameters on 256 ranks: arXiv 1910.02054, section 3 and 7
    "zero0": (140.0, 140.0, 840.0, 1120.0, 280.0),
    "zero1": (140.0, 140.0, 3.28125, 283.28125, 280.0),
    "zero2": (140.0, 0.546875, 3.28125, 143.828125, 280.0),
    "zero3": (0.546875, 0.546875, 3.28125, 4.375, 420.0),
}


def test_a_bare_number_of_parameters_gives_the_zero_papers_states_and_traffic() -> None:
    found = answer("--params", "70e9", "--world", "256")
    StatesReport.model_validate(found)
    assert {plan["strategy"] for plan in found["plans"]} == set(ZERO_PAPER)
    for plan in found["plans"]:
        states = [plan["per_rank"][f"{name}_gb"] for name in ("weights", "grads", "optimizer", "states")]
        assert (*states, plan["traffic_gb"]["total"]) == pytest.approx(ZERO_PAPER[plan["strategy"]])


@pytest.mark.parametrize("text", ["7.5e9", "7.5B", "7500M", "7,500,000,000", "7.5b"])
def test_counts_are_read_as_people_write_them(text: str) -> None:
    plans = answer("--params", text, "--gpus", "64")["plans"]
    assert [round(plan["per_rank"]["states_gb"], 1) for plan in plans] == [120.0, 31.4, 16.6, 1.9]


def test_a_bare_number_says_whose_bytes_it_counts() -> None:
    """16 of each parameter, where the default of --model has 18, of which 4 are of a gradient."""
    plan = ["--params", "1e9", "--world", "2"]
    assert "12 for optimizer; as in the ZeRO paper. --model assumes" in shown(*plan)
    assert "ZeRO paper" not in shown(*plan, "--precision", "bf16")


def test_states_are_held_against_a_devices_memory() -> None:
    plans = {
        plan["strategy"]: plan for plan in answer("--params", "70e9", "--world", "256", "--memory-gb", "80")["plans"]
    }
    assert [plans[name]["fits"] for name in ("zero0", "zero1", "zero2", "zero3")] == [False, False, False, True]
    assert plans["zero3"]["min_ranks"] == 14  # 1120 / 80
    assert plans["zero2"]["min_ranks"] is None  # 140 GB of weights on every rank


def test_states_count_the_precision_that_is_asked_for() -> None:
    assert answer("--params", "1e9", "--world", "2", "--precision", "bf16")["recipe"] == {
        "weights": 2.0,
        "grads": 4.0,
        "optimizer": 12.0,
    }


HYBRID_70B = {  # 64 ranks in groups of 8: 140 GB each for two gathers and a reduction, and what the groups exchange
    "hybrid_shard": 420 + 2 * 140 / 8,  # an all-reduce of each rank's shard, arXiv 2304.11277, section 3.2.2
    "hpz": 420,  # arXiv 2306.10209, section 3.2: only the gather for backward stays inside
    "hfsdp": 420 + 140 / 8,  # updated shards are gathered over the groups
}


@pytest.mark.parametrize(("strategy", "sent"), HYBRID_70B.items())
def test_traffic_of_the_hybrid_strategies_has_the_exchange_between_groups(strategy: str, sent: float) -> None:
    (plan,) = answer("--params", "70e9", "--world", "64", "--strategy", strategy)["plans"]
    assert plan["traffic_gb"]["total"] == pytest.approx(sent)


def test_one_rank_sends_nothing() -> None:
    assert [plan["traffic_gb"]["total"] for plan in answer("--params", "70e9", "--world", "1")["plans"]] == [0] * 4


def test_the_recipe_is_of_the_whole_model() -> None:
    recipe = answer("--params", "70e9", "--world", "64", "--strategy", "hybrid_shard")["recipe"]
    assert recipe == {"weights": 2.0, "grads": 2.0, "optimizer": 12.0}


FULL = ["--seq", "4096", "--micro-batch", "2", "--strategy", "zero3", "--ac", "selective", "--precision", "bf16"]
MESH = ["--tp", "2", "--pp", "2", "--cp", "2", "--compile"]


def test_expected_is_one_number_in_words_in_json_and_in_python() -> None:
    """It is all that the device will hold, which is what is held against its capacity."""
    found = answer(*EIGHT, "--strategy", "zero3", "--seq", "2048")
    text = run(*EIGHT, "--strategy", "zero3", "--seq", "2048").output
    memory = found["memory"]
    assert f"{memory['expected_gib']:.1f} GiB of {memory['capacity_gib']:.1f} GiB expected" in text
    assert memory["expected_gib"] == memory["device_gib"] > memory["allocated_gib"]
    assert found["fits"] is (memory["expected_gib"] <= memory["capacity_gib"])


def test_one_plan_has_every_key_of_the_contract() -> None:
    found = answer("--model", "llama3-8b", "--gpu", "h100-sxm", "--gpus", "16", *FULL, *MESH)
    PlanReport.model_validate(found)
    memory, time = found["memory"], found["time"]
    assert 0 < memory["allocated_gib"] < memory["expected_gib"] < memory["upper_gib"]
    assert sum(memory["terms"].values()) == pytest.approx(memory["allocated_gib"])
    assert found["fits"] is True
    assert "along pp" in found["limiting_rank"]
    assert sum(time["terms"].values()) == pytest.approx(time["step_s"])
    assert 0 < time["mfu"] < 1
    tokens = 2 * 4096 * found["setup"]["micro_batches"] * 2  # of 2 data ranks
    assert time["tokens_per_s_per_gpu"] == pytest.approx(tokens / time["step_s"] / 16)
    assert found["traffic"]["total_gb"] == pytest.approx(sum(found["traffic"]["links_gb"].values()))
    assert found["setup"]["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 1}
    assert found["setup"]["compile"] is True
    assert found["frontier"] is None


def test_json_is_one_object_and_nothing_else() -> None:
    output = shown(*EIGHT, "--strategy", "zero3", "--json")
    assert output.startswith("{\n")
    assert output.endswith("}\n")
    assert "NaN" not in output
    assert "Infinity" not in output


def test_without_a_strategy_the_best_is_described_and_the_others_are_listed() -> None:
    found = answer(*EIGHT)
    PlanReport.model_validate(found)
    rows = {row["strategy"]: row for row in found["frontier"]}
    assert found["setup"]["strategy"] in rows
    assert found["fits_surely"] is True
    assert {"zero1", "zero2", "zero3"} <= set(rows)
    refused = {row["strategy"]: row["reason"] for row in found["refused"]}
    assert "optimizer" in refused["zero0"]  # 16 bytes × 8e9 on every rank
    assert found["considered"] > len(found["frontier"])


def test_a_plan_that_does_not_fit_is_an_answer() -> None:
    found = answer("--model", "llama3-70b", "--gpu", "h100-sxm", "--gpus", "8", "--strategy", "zero1")
    assert found["fits"] is False
    assert found["memory"]["allocated_gib"] > 130  # 70.6e9 bf16 weights alone are 131


def test_where_nothing_fits_the_nearest_is_described() -> None:
    found = answer("--model", "llama3-405b", "--gpu", "a100", "--gpus", "8")
    assert found["fits"] is False
    assert found["frontier"] == []
    assert len(found["refused"]) >= 5


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["deepseek-v3", "--gpus", "64", "--parallel"], marks=pytest.mark.long),
        ["llama3-70b", "--gpus", "8"],
    ],
)
def test_what_comes_nearest_is_what_lacks_least(arguments: list[str]) -> None:
    found = answer("--model", *arguments)
    needed = [row["needed_gib"] for row in found["refused"] if row["needed_gib"]]
    assert found["fits"] is False
    assert found["memory"]["device_gib"] == pytest.approx(min(needed))


def test_without_a_known_peak_there_is_no_time_and_the_reason_is_given() -> None:
    found = answer("--model", "gpt2", "--gpu", "cpu", "--gpus", "2", "--strategy", "zero3", "--seq", "512")
    assert found["time"] is None
    assert "peak" in found["no_time"]


def test_min_gpus_names_the_floor_and_the_first_that_runs() -> None:
    found = answer("--model", "llama3-70b", "--gpu", "h100-sxm", "--min-gpus")["sizing"]
    assert found["states_floor_gpus"] == 14  # 16 bytes × 70.6e9 / 84.9e9
    assert found["gpus"] % 8 == 0
    assert 24 <= found["gpus"] <= 32
    tried = {row["gpus"]: row for row in found["rows"]}
    assert tried[16]["fits"] is False
    assert tried[16]["reason"]
    assert tried[found["gpus"]]["fits_surely"] is True


def test_price_and_offload_reach_the_answer() -> None:
    found = answer(*EIGHT, "--strategy", "zero3", "--offload", "cpu", "--price", "2.5")
    assert found["setup"]["plan"]["optim"] == "D@cpu"
    assert sum(term["value"] for term in found["memory"]["host"]) > 12e9  # master and moments, of 8 ranks
    per_token = 2.5 / 3600 / found["time"]["tokens_per_s_per_gpu"]
    assert found["time"]["cost_per_million_tokens"] == pytest.approx(1e6 * per_token)


def test_the_host_and_its_disks_count() -> None:
    arguments = [*EIGHT, "--strategy", "zero3", "--offload", "nvme", "--seq", "2048", "--disk-gb", "3000"]
    found = answer(*arguments, "--host-memory-gb", "10")
    assert found["fits"] is False
    host, disk = found["memory"]["hosts"]
    assert host["capacity_gib"] == pytest.approx(10e9 / 2**30)
    assert host["expected_gib"] > 8.03e9 * 4 / 2**30  # fp32 gradients of all ranks of the host
    assert disk["capacity_gib"] == pytest.approx(3000e9 / 2**30)
    written = 8 * sum(term["value"] for term in found["memory"]["disk_writes"])
    assert written == pytest.approx(12 * 8.03e9, rel=0.01)  # fp32 master weights and two moments
    output = shown(*arguments, "--host-memory-gb", "10")
    assert "GiB too much for the memory of a host" in output.splitlines()[0]
    assert "of 9.3 GiB" in output
    assert "written to them in a step: 89.7 GiB" in output
    assert answer(*arguments, "--host-memory-gb", "1000")["fits"] is True
    assert answer(*EIGHT, "--strategy", "zero3")["memory"]["hosts"] == []


def test_a_fused_loss_needs_less_than_a_full_one() -> None:
    arguments = [*EIGHT, "--strategy", "zero3", "--ac", "full", "--seq", "8192", "--loss"]
    needed = {loss: answer(*arguments, loss)["memory"]["allocated_gib"] for loss in ("full", "fused", "chunked")}
    logits = 8192 * 128256 / 2**30
    assert needed["full"] - needed["fused"] > 2 * logits  # 12 bytes of each against 6, unless then another moment peaks
    assert needed["chunked"] <= needed["fused"]
    assert "fused loss" in shown(*arguments, "fused")


def test_an_axis_beyond_what_is_searched_is_no_crash() -> None:
    assert run("--model", "llama-7b", "--gpus", "64", "--tp", "32", "--parallel").exit_code == 0


def test_explained_terms_have_formula_numbers_and_source() -> None:
    found = answer(*EIGHT, "--strategy", "zero3", "--explain", "activations")
    ExplainedReport.model_validate(found)
    (term,) = found["terms"]
    assert term["part"] == "memory"
    assert term["text"]
    assert term["source"]
    assert term["inputs"]


# -- what people see -----------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_nothing_is_coloured_in_a_pipe() -> None:
    output = shown(*EIGHT, "--strategy", "zero3")
    assert output.startswith("fits: ")
    assert "of 79.1 GiB expected (at most " in output.splitlines()[0]
    assert "\x1b" not in output
    for heading in ("memory of the fullest rank", "sent by one rank in a step", "time of a step", "memory by strategy"):
        assert heading in output
    assert "--emit plan.yaml" in output


def test_a_plan_that_does_not_fit_says_so_first() -> None:
    assert shown("--model", "llama3-70b", "--gpus", "8", "--strategy", "zero1").startswith("does not fit: ")


@pytest.mark.parametrize(
    ("asked", "edit"),
    [
        (["llama3-8b", "--gpus", "8"], "--ac selective"),
        (["llama3-8b", "--gpus", "8", "--micro-batch", "4", "--ac", "full", "--seq", "16384"], "--micro-batch 1"),
        (["llama3-8b", "--gpus", "8", "--micro-batch", "4"], "--ac full --loss chunked"),
        (["llama3-70b", "--gpus", "8", "--ac", "full"], "--gpus 32"),
    ],
)
def test_a_plan_that_does_not_fit_is_given_the_options_with_which_it_does(asked: list[str], edit: str) -> None:
    """The options are tried: with them it surely fits."""
    command = ["--model", *asked, "--gpu", "h100-sxm", "--strategy", "zero3"]
    command += [] if "--seq" in asked else ["--seq", "8192"]
    said = answer(*command)
    assert said["fits"] is False
    options = [found["options"] for found in said["edits"]]
    assert edit in options
    assert len(options) <= 3
    words = edit.split()
    for name, value in zip(words[::2], words[1::2], strict=True):
        command = [*command, name, value] if name not in command else _with(command, name, value)
    assert answer(*command)["fits_surely"] is True


def _with(command: list[str], name: str, value: str) -> list[str]:
    place = command.index(name) + 1
    return [*command[:place], value, *command[place + 1 :]]


def test_where_no_option_helps_the_search_is_named() -> None:
    machine = ["--gpus", "8", "--gpu", "h100-sxm", "--host-memory-gb", "500"]
    said = answer("--model", "llama3-405b", *machine, "--strategy", "zero0")
    assert said["edits"] == []
    assert "leave --strategy out" in said["warnings"][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["plan", *EIGHT, "--strategy", "zero3"], b"8 ? H100"), (["config", "explain", QUICKSTART], b"= 8 ? 1 micro-")],
)
def test_an_output_in_ascii_is_no_error(words: list[str], said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["terrazzo", *words])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    sys.stdout.flush()
    assert ended.value.code == 0
    assert said in written.getvalue()


def test_sizing_is_said_in_a_sentence() -> None:
    output = shown("--model", "llama3-70b", "--gpu", "h100-sxm", "--min-gpus")
    assert output.startswith("14 is only the floor for model states; ")


def test_machines_without_gpus_are_called_so_and_this_one_comes_first() -> None:
    output = shown("--model", "llama-7b", "--gpu", "cpu", "--memory-gb", "25")
    first, _, heads, *_ = output.splitlines()
    assert first == (
        "It does not fit on this machine: model states alone need 100.4 GiB of 23.3. Of machines like it 5 would hold"
        " the model states and nothing else, 8 is the first number that runs."
    )
    assert heads.startswith("machines  runs")
    assert "sends the fewest bytes per token, since no time is known, is first" in output


def test_what_was_assumed_is_said() -> None:
    output = shown("--model", "llama3-8b", "--gpus", "8", "--strategy", "zero3")
    assert "note: No GPU was named" in output
    assert "note: No sequence length was given" in output


def test_python_prints_what_the_command_prints() -> None:
    asked: dict[str, Any] = {"gpus": 8, "gpu": "h100-sxm", "sequence": 4096}
    for strategy in ("zero3", None):
        printed = str(tz.plan("llama3-8b", strategy=strategy, **asked))
        named = ["--strategy", strategy] if strategy else []
        assert shown(*EIGHT, "--seq", "4096", *named).startswith(f"{printed}\n")
    assert str(tz.plan("llama3-405b", **asked)).startswith("does not fit: ")


def test_limits_of_another_framework_are_listed() -> None:
    arguments = ["--model", "llama3-8b", "--gpus", "16", "--strategy", "zero3", "--offload", "nvme"]
    own = {each["rule"]: each["severity"] for each in answer(*arguments)["findings"]}
    assert set(own.values()) == {"warn"}  # drives wear out
    fsdp = answer(*arguments, "--framework", "fsdp2")["findings"]
    assert "refuse" in [each["severity"] for each in fsdp]  # FSDP has no NVMe tier
    assert "known not to work: " in shown(*arguments, "--framework", "fsdp2")


def test_explain_prints_formula_and_source() -> None:
    output = shown(*EIGHT, "--strategy", "zero3", "--explain", "gathered weights")
    assert output.startswith(("gathered weights (memory)\n", "gathered (memory)\n"))
    assert "source: " in output
    assert "GiB" in output


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_configuration_is_planned_as_it_is() -> None:
    quickstart = str(ROOT / "examples/quickstart.yaml")
    found = answer(quickstart, "plan.name=zero1", "batch.micro_batch=4", "launch.ranks=4")
    assert found["setup"]["strategy"] == "zero1"
    assert found["setup"]["gpus"] == 4
    elsewhere = answer(quickstart, "--gpu", "h100-sxm", "--gpus", "1")
    assert elsewhere["setup"]["gpu"].startswith("H100")
    assert elsewhere["setup"]["gpus"] == 1


def test_other_strategies_of_a_configuration_keep_what_else_its_plan_says(tmp_path: Path) -> None:
    file = tmp_path / "diloco.yaml"
    file.write_text(
        "model: {dim: 32, layers: 2, heads: 2}\nbatch: {global_batch: 4, micro_batch: 1, sequence_length: 16}\n"
        "plan: {name: zero3, sync_every: 5, outer: {lr: 0.5}, mesh: {dp_replicate: 2}}\n"
        "launch: {ranks: 4, device: cpu}\n"
    )
    arguments = PlanArguments(file, [], frozenset(), **{row.argument: None for row in OPTION_ROWS})
    planned = plan_config.plan_config(FromConfig(file, []), arguments, Request(1))
    others = alternatives(planned.best, planned.estimate)
    assert [each.setup.plan.name for each in others] == [*ROWS[:5]], "hybrid ones split states of one run"
    assert {each.setup.diloco for each in others} == {DiLoCo(5, 0.5)}
    assert {each.setup.mesh.dp_replicate for each in others} == {2}


def test_calibrate_measures_the_configuration_and_says_where_the_record_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, list[str]]] = []

    def calibrate(path: Path, overrides: list[str]) -> tuple[Any, Path]:
        asked.append((path, overrides))
        return SimpleNamespace(steps=6), Path("/records/this.json")

    monkeypatch.setattr(plan_config, "calibrate", calibrate)
    found = answer(str(ROOT / "examples/quickstart.yaml"), "plan.name=zero2", "--calibrate")
    assert asked == [(ROOT / "examples/quickstart.yaml", ["plan.name=zero2"])]
    assert any("/records/this.json" in note for note in found["warnings"])


def test_what_is_emitted_is_what_was_planned(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    arguments = ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8", "--seq", "512", "--global-batch", "64"]
    planned = answer(*arguments, "--strategy", "zero2", "--micro-batch", "4", "--ac", "full", "--emit", str(path))
    written = yaml.safe_load(path.read_text())
    assert written["plan"]["name"] == "zero2"
    assert written["batch"] == {"global_batch": 64, "micro_batch": 4, "sequence_length": 512}
    assert json.loads((tmp_path / "small" / "config.json").read_text())["model_type"] == "gpt2"
    again = answer(str(path), "--gpu", "h100-sxm")
    assert again["memory"]["terms"] == pytest.approx(planned["memory"]["terms"])
    assert again["traffic"]["total_gb"] == pytest.approx(planned["traffic"]["total_gb"])


@pytest.mark.parametrize(("steps", "edit"), [(40, "60"), (100, "60 or 120")])
def test_steps_that_do_not_end_a_round_are_refused_as_by_training(steps: int, edit: str) -> None:
    apart = ["plan.mesh.dp_replicate=2", "plan.sync_every=10", "plan.outer.delay=1", "plan.outer.meet_every=60"]
    words = refusal(QUICKSTART, "--gpus", "2", *apart, f"train.steps={steps}")
    assert f"plan.outer.meet_every 60 does not divide the steps of the run, train.steps {steps}" in words
    assert f"Set train.steps={edit}, or another" in words


def test_emit_refuses_what_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    assert "does not fit" in refusal(
        "--model", "llama3-405b", "--gpus", "8", "--strategy", "zero3", "--emit", str(path)
    )
    assert "planned" in refusal(*EIGHT, "--strategy", "zero1", "--pp", "2", "--emit", str(path))
    assert "attention flash" in refusal(*EIGHT, "--attention", "math", "--emit", str(path))
    assert "loss full" in refusal(*EIGHT, "--loss", "fused", "--emit", str(path))
    assert not list(tmp_path.iterdir())
    assert "--emit" not in shown(*EIGHT, "--strategy", "zero3", "--loss", "fused")


def test_emit_replaces_its_own_file_and_no_other_model(tmp_path: Path) -> None:
    arguments = ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8", "--emit", str(tmp_path / "gpt2.json")]
    shown(*arguments)
    shown(*arguments)
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "mine"}')
    assert "another model" in refusal(*arguments)


@pytest.mark.parametrize("option", ["--emit", "--picture"])
def test_a_folder_is_not_a_file(option: str, tmp_path: Path) -> None:
    folder = tmp_path / ("a.yaml" if option == "--emit" else "a.png")
    folder.mkdir()
    assert "is a folder" in refusal(*EIGHT, option, str(folder))


def test_what_draws_pictures_is_imported_for_one_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pillow takes 30 ms, of answers of a second."""
    drawing = "terrazzo.planner.report.picture"
    monkeypatch.delitem(sys.modules, drawing, raising=False)
    shown(*EIGHT)
    answer(*EIGHT)
    assert drawing not in sys.modules
    shown(*EIGHT, "--picture", str(tmp_path / "memory.svg"))
    assert drawing in sys.modules


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"memory.{suffix}"
    shown(*EIGHT, "--picture", str(path))
    start = path.read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if suffix == "png" else b"<svg")


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "No model was given"),
        (["--params", "70e9"], "--world"),
        (["--params", "70x", "--world", "8"], "70B"),
        (["--params", "0", "--world", "8"], "'0'"),
        (["--params", "-1", "--world", "8"], "'-1'"),
        (["--params", "7e99", "--world", "8"], "--params is '7e99', expected a number"),
        (["--params", "9" * 400, "--world", "8"], "--params is '9999"),
        (["--params", "70e9", "--model", "gpt2", "--world", "8"], "--model and --params"),
        (["--model", "nope", "--gpus", "8"], "neither a preset nor a file"),
        (["--model", "llama3-8", "--gpus", "8"], "Did you mean 'llama3-8b'"),
        (["--model", "llama3-8b", "--gpu", "h100-sxn", "--gpus", "8"], "Did you mean 'H100-SXM5-80GB'"),
        ([*EIGHT, "--strategy", "zero33"], "Did you mean 'zero3'"),
        ([*EIGHT, "--ac", "ful"], "Did you mean 'full'"),
        ([*EIGHT, "--precision", "bf61"], "Did you mean 'bf16'"),
        ([*EIGHT, "--optimizer", "adamx"], "Did you mean 'adam"),
        ([*EIGHT, "--framework", "deepsped"], "Did you mean 'deepspeed'"),
        ([*EIGHT, "--attention", "flesh"], "Did you mean 'flash'"),
        ([*EIGHT, "--strategy", "zero3", "--explain", "activatoins"], "Did you mean 'activations'"),
        ([*EIGHT, "--strategy", "zero3", "--offload", "cup"], "Did you mean 'cpu'"),
        ([*EIGHT, "--offload", "cpu"], "--strategy"),
        ([*EIGHT, "--strategy", "zero3", "--offload", "any"], "name a tier"),
        ([*EIGHT, "--tp", "3"], "2.667"),
        (["--model", "llama3-8b", "--gpus", "24", "--strategy", "zero1", "--tp", "3"], "32 / 3"),
        ([*EIGHT, "--global-batch", "64", "--micro-batches", "2"], "one of them"),
        (["--model", "llama3-8b", "--gpus", "0"], "gpus is 0"),
        (["--model", "llama3-8b", "--gpus", "-8"], "gpus is -8"),
        (["--model", "llama3-8b", "--gpus", "64..8"], "ends before it begins"),
        (["--model", "llama3-8b", "--gpus", "many"], "8..1024"),
        ([*EIGHT, "--seq", "-1"], "--seq is -1"),
        ([*EIGHT, "--micro-batch", "0"], "--micro-batch is 0"),
        ([*EIGHT, "--memory-gb", "nan"], "--memory-gb is nan"),
        ([*EIGHT, "--price", "-1"], "price"),
        ([*EIGHT, "--picture", "a.pdf"], ".png or .svg"),
        ([*EIGHT, "--picture", "/nowhere/a.png"], "no folder"),
        ([*EIGHT, "--emit", "a.txt"], ".yaml"),
        ([*EIGHT, "--emit", "/nowhere/a.yaml"], "no folder"),
        ([*EIGHT, "--calibrate"], "CONFIG"),
        (["--model", "llama3-8b", "--gpus", ""], "gpus is empty"),
        (["--model", "llama3-8b", "--gpus", "1..8", "--min-gpus", "--memory-gb", "1"], "need 129 GPUs"),
        ([*EIGHT, "--min-gpus"], "such as 1..8"),
        ([*EIGHT, "--strategy", "zero3@cpu", "--offload", "nvme"], "zero3@cpu names a tier, and --offload nvme too"),
        ([*EIGHT, "--strategy", "zero3@cpu", "--optimizer-kernel", "foreach"], "by kernels of its own. Leave it out"),
        (
            [*EIGHT, "--strategy", "zero3", "--lora", "8", "--freeze", "*.embed_tokens.*"],
            "all else is frozen beside adapters",
        ),
        (["--params", "70e9", "--world", "8..16"], "one number"),
        (["--params", "70e9", "--world", "8", "--offload", "cpu"], "--offload says nothing"),
        (["--params", "70e9", "--world", "8", "--seq", "4096"], "--seq says nothing"),
        (["--params", "70e9", "--world", "8", "--tp", "8"], "--tp says nothing"),
        (["--params", "70e9", "--world", "8", "--pp", "8"], "--pp says nothing"),
        (["--params", "70e9", "--world", "8", "--strategy", "zero3@cpu"], "offload says nothing"),
        (["--params", "70e9", "--world", "8", "--strategy", "hpz"], "two or more shard groups"),
        (["--params", "70e9", "--world", "8", "--precision", ""], "precision is empty"),
        (["--params", "9" * 400, "--world", "8"], "70B"),
        ([*EIGHT, "--strategy", ""], "strategy is empty"),
        ([*EIGHT, "--ac", ""], "--ac is empty"),
        ([*EIGHT, "--precision", ""], "precision is empty"),
        ([*EIGHT, "--framework", ""], "no framework ''"),
        (["--model", "llama3-8b", "--gpu", "", "--gpus", "8"], "gpu is empty"),
        (["--model", "llama3-8b", "--gpus", "9" * 5000], "give a number such as 64"),
        (["--model", "llama3-8b", "--gpus", "9" * 400], "gpus is a number of 1329 bits"),
        ([*EIGHT, "--seq", "9" * 400], "at most 1e+18"),
        ([*EIGHT, "--framework", f"deepspeed@{'9' * 5000}"], "numbers and dots"),
        ([str(ROOT / "examples/quickstart.yaml"), "--calibrate", "--gpu", "t4", "--gpus", "1"], "no --gpu"),
        (["--params", "1e9", "--world", "8", "--explain", "weights"], "--explain says nothing"),
        ([str(ROOT / "examples/quickstart.yaml"), "--tp", "2"], "--tp was given beside"),
        ([str(ROOT / "examples/quickstart.yaml"), "--context", "ring"], "--context was given beside"),
        ([str(ROOT / "examples/quickstart.yaml"), "--model", "gpt2"], "CONFIG and --model were given"),
        ([str(ROOT / "examples/quickstart.yaml"), "plan.name=zero7"], "zero7"),
        ([str(ROOT / "examples/nothing.yaml")], "nothing.yaml"),
    ],
)
def test_impossible_input_is_refused_in_words(arguments: list[str], named: str) -> None:
    assert named in refusal(*arguments)


def test_a_refusal_ends_with_2_and_prints_no_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["terrazzo", "plan", *EIGHT, "--tp", "3", "--json"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    output = capsys.readouterr()
    assert caught.value.code == 2
    assert output.out == ""
    assert output.err.startswith("Error: ")
    assert "8 GPUs are not a multiple of tp 3" in output.err


@pytest.mark.parametrize(
    "arguments", [["--seq", "many"], ["--tensor-parallel", "8"], ["--seq", "9" * 5000], ["--gpu", "h100-sxn"]]
)
def test_a_program_that_asks_wrongly_gets_nothing_on_stdout_and_the_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["terrazzo", "plan", *EIGHT, *arguments, "--json"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    output = capsys.readouterr()
    assert caught.value.code == 2
    assert output.out == ""
    assert output.err


def test_help_groups_the_options() -> None:
    result = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}).invoke(cli.app, ["plan", "--help"])
    assert all(panel in result.output for panel in ("Model", "Machines", "Training", "Splitting", "Output"))


# -- what is known of frameworks ----------------------------------------------------------------------------------


def test_a_search_for_another_framework_leaves_out_what_fails_there() -> None:
    found = answer(*EIGHT, "--framework", "megatron")
    assert {plan["strategy"] for plan in found["frontier"]} <= {"zero0", "zero1"}
    assert "Megatron-FSDP" in next(row["reason"] for row in found["refused"] if row["strategy"] == "zero3")


def test_a_plan_that_fails_in_a_framework_says_so_before_it_says_that_it_fits() -> None:
    first, second, *_ = shown(*EIGHT, "--strategy", "zero3", "--pp", "2", "--framework", "deepspeed").splitlines()
    assert first.startswith("known not to work: DeepSpeed's PipelineEngine")
    assert second.startswith("fits")


def test_reasons_name_only_the_numbers_of_gpus_that_they_hold_for() -> None:
    text = shown("--model", "llama3-70b", "--gpu", "h100-sxm", "--gpus", "8..32")
    alone = [line for line in text.splitlines() if "alone need 131 GiB" in line]
    assert [line.partition(" GPUs:")[0].strip() for line in alone] == [
        "zero3, shard_grad_op on 8",
        "hybrid_shard, hybrid_shard_zero2 on 16, 24",  # on 32, two groups of 16 hold them
    ]


@pytest.mark.parametrize("total", ["reserved", "device", "upper", "memory.upper"])
def test_totals_are_explained_too(total: str) -> None:
    (term,) = answer(*EIGHT, "--strategy", "zero3", "--explain", total)["terms"]
    assert term["formula"] == f"memory.{total.removeprefix('memory.')}"
    assert 0 < term["inputs"]["allocated"] < term["value"]
    amount = "at most: " if total.endswith("upper") else "expected: "
    assert amount in shown(*EIGHT, "--strategy", "zero3", "--explain", total)


@pytest.mark.long
def test_what_does_not_fit_is_not_said_how_to_run() -> None:
    small = ["model.dim=256", "launch.device=cpu"]
    config = str(ROOT / "examples/quickstart.yaml")
    assert "To run it" in shown(config, *small)
    text = shown(config, "model.dim=20480", "model.layers=100", "launch.device=cpu")
    assert text.startswith("does not fit")
    assert "To run it" not in text


def test_a_printed_command_starts_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a shell that has no `terrazzo` on its path."""
    monkeypatch.setattr(planning, "terrazzo_command", lambda: "my/terrazzo")
    small = [
        *EIGHT,
        "--strategy",
        "zero3",
        "--memory-gb",
        "80",
        "--seq",
        "2048",
        "--micro-batches",
        "2",
        "--reduce-each",
    ]
    data = "data.source=... data.tokenizer=..."
    asked = "--memory-gb 80 --seq 2048 --micro-batches 2 --strategy zero3 --reduce-each"
    emitted = " ".join(EIGHT) + f" {asked} --emit plan.yaml && my/terrazzo train plan.yaml {data}"
    drawn = ["--picture", str(tmp_path / "a.svg")]
    assert shown(*small, *drawn).splitlines()[-1] == f"To run it: my/terrazzo plan {emitted}"
    path = tmp_path / "a.yaml"
    assert shown(*small, "--emit", str(path)).splitlines()[-1].endswith(f"To run it: my/terrazzo train {path} {data}")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("zero3",), "whole ones of the units whose backward runs, the root among them, until ranks have summed them"),
        (("zero3", "--micro-batches", "4"), "the root among them, and this rank's part of what 4 micro-batches add up"),
        (("zero1", "--micro-batches", "4"), "whole ones of all units, .* over 4 micro-batches .zero1 splits no grad"),
        (("zero3", "--micro-batches", "4", "--accumulate-locally"), "whole ones of all units, .*; with --reduce-each"),
        (("zero1", "--micro-batches", "4", "--pp", "2"), "whole ones of all units, .*a pipeline sums over ranks once"),
        (("zero1", "--framework", "megatron"), "Megatron-core's buffers of whole ones of all units"),
    ],
)
def test_unreduced_gradients_are_given_a_reason(asked: tuple[str, ...], why: str) -> None:
    assert re.search(f"^unreduced gradients: .*{why}", shown(*EIGHT, "--strategy", *asked), re.MULTILINE)


def test_a_plan_for_another_framework_is_written_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no run of Terrazzo is said, which these figures are not of."""
    monkeypatch.setattr(planning, "terrazzo_command", lambda: "my/terrazzo")
    asked = [*EIGHT, "--memory-gb", "80", "--strategy", "zero3"]
    *_, last = shown(*asked, "--framework", "fsdp2").splitlines()
    assert last.endswith("--emit plan.yaml && my/terrazzo config convert plan.yaml --to fsdp2 --world 8")
    assert "torch FSDP2 (fully_shard) arguments" in last and "terrazzo train" not in last
    assert "terrazzo train plan.yaml" in shown(*asked, "--framework", "torchao").splitlines()[-1]


def test_plans_for_several_hosts_are_started_on_each() -> None:
    text = shown("--model", "llama3-8b", "--gpu", "h100-sxm", "--gpus", "16", "--strategy", "zero3")
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in text.splitlines()[-1]


@pytest.mark.parametrize(("gpus", "per_node"), [(10, 8), (12, 8), (20, 8), (16, 8), (10, 5), (8, 8), (7, 2)])
def test_printed_commands_start_the_ranks_that_were_planned(gpus: int, per_node: int) -> None:
    """On each host torchrun starts as many as its own command says."""
    model = ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", str(gpus), "--per-node", str(per_node)]
    plan = [*model, "--strategy", "zero3", "--seq", "512"]
    lines = [line for line in shown(*plan).splitlines() if "terrazzo train" in line]
    told = [tuple(map(int, found)) for found in re.findall(r"--nnodes (\d+) --nproc-per-node (\d+)", "".join(lines))]
    if gpus <= per_node:
        assert not told
        return
    planned = Counter(rank // per_node for rank in range(gpus))  # host by host, full ones first
    (hosts,) = {nodes for nodes, _ in told}
    assert hosts == len(planned)
    assert len(told) == len(set(planned.values()))
    each, last = told[0][1], told[-1][1]
    assert [each] * (hosts - 1) + [last] == list(planned.values())
    if last != each:
        assert "on each full host: " in lines[0]
        assert lines[1].startswith(f"And on the last host, with the other {last}: torchrun ")


def test_a_configuration_is_started_with_the_ranks_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host by an override, unless the file says as many; on several by torchrun."""
    monkeypatch.setattr(
        sys.modules["terrazzo.train.planning.run_estimate"], "traced_memory", lambda config, setup: None
    )
    config, small = str(ROOT / "examples/quickstart.yaml"), ["model.dim=256", "launch.device=cpu"]
    assert shown(config, *small, "--gpus", "4").splitlines()[-1].endswith(" launch.device=cpu launch.ranks=4")
    said = shown(config, *small, "launch.restarts=1", "launch.ranks=2:4", "--gpus", "4").splitlines()[-1]
    assert said.endswith(" launch.ranks=2:4")
    assert "launch.ranks" not in shown(config, *small).splitlines()[-1]
    hosts = shown(config, "--gpu", "h100-sxm", "--gpus", "16").splitlines()[-1]
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in hosts
    assert hosts.endswith(f" -m terrazzo train {config}")


# -- machines of one's own -----------------------------------------------------------------------------------------


def test_figures_of_a_device_can_be_replaced() -> None:
    plan = [*EIGHT, "--strategy", "zero3", "--seq", "4096", "--ac", "full"]
    known, slow = answer(*plan)["time"], answer(*plan, "--peak-tflops", "494.5")["time"]
    assert slow["step_s"] > 1.2 * known["step_s"]
    starved = answer(*plan, "--scaleup-gb-s", "5")["time"]
    assert starved["bound_by"] == "communication"
    assert starved["step_s"] > 3 * known["step_s"]


def test_a_device_that_nobody_knows_has_no_time_until_its_figures_are_given() -> None:
    plan = ["--model", "llama3-8b", "--gpu", "Zorg9000", "--gpus", "8", "--memory-gb", "100", "--strategy", "zero3"]
    found = answer(*plan)
    assert found["time"] is None
    assert "peak" in found["no_time"]
    figures = ["--peak-tflops", "400", "--memory-tb-s", "2", "--scaleup-gb-s", "200", "--pcie-gb-s", "30"]
    assert answer(*plan, *figures)["time"]["mfu"] == pytest.approx(0.45, abs=0.2)
