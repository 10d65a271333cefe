"""`terrazzo config VERB`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.config import config_from_dict
from terrazzo.dialects.registry import NAMES, dialect, recognise
from terrazzo.documents import format_of, parse
from terrazzo.errors import BadInput

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 100,
}


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, ["config", *map(str, arguments)])


def refused(*arguments: Any) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    return str(result.exception)


@pytest.fixture
def ds(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    return path


TORCHTITAN = """\
[job]
dump_folder = "./outputs"

[model]
name = "llama3"

[training]
local_batch_size = 2  # per rank
seq_len = 4096

[parallelism]
data_parallel_shard_degree = 8
fsdp_reshard_after_forward = "never"
"""


@pytest.fixture
def titan(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(TORCHTITAN)
    return path


# -- explain -------------------------------------------------------------------------------------------------------


def test_explain_says_the_row_and_every_option(ds: Path) -> None:
    result = run("explain", ds, "--world", 8)
    assert result.exit_code == 0
    assert "DeepSpeed JSON" in result.output
    assert "zero3: weight D | between D | grad D | optim D" in result.output
    assert "64 sequences = 2 × 4 micro-batches × 8 data ranks" in result.output
    assert "file: zero_optimization.stage" in result.output


def test_explain_says_first_what_the_file_sets(ds: Path) -> None:
    short, whole = run("explain", ds).output, run("explain", ds, "--all").output
    assert "precision.reduce" not in short
    assert "precision.reduce" in whole.partition("by default:")[2]
    assert "left to code: mesh.world" in whole
    assert "--all lists them" in short


def test_an_open_auto_is_called_open(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**DEEPSPEED, "bf16": {"enabled": "auto"}}))
    line = next(each for each in run("explain", path).output.splitlines() if each.startswith("precision.compute"))
    assert line.split()[1] == "open"


def test_explain_json_has_the_same(ds: Path) -> None:
    page = json.loads(run("explain", ds, "--world", 8, "--json").stdout)
    assert page["dialect"] == "deepspeed"
    options = {option["path"]: option for option in page["options"]}
    assert options["batch.global_batch"]["value"] == 64
    assert options["training.clip"]["key"] == "gradient_clipping"
    assert options["precision.reduce"]["value"] == "bf16"


def test_versions_of_libraries_change_defaults(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    new, old = (
        {each["path"]: each["value"] for each in json.loads(run("explain", path, "--json", *more).stdout)["options"]}
        for more in ((), ("--library", "deepspeed=0.16.0"))
    )
    assert (new["training.clip"], old["training.clip"]) == (1.0, None)


# -- check ---------------------------------------------------------------------------------------------------------


def test_check_of_a_good_file_ends_with_0() -> None:
    result = run("check", QUICKSTART)
    assert (result.exit_code, "no errors, no warnings" in result.output) == (0, True)


def test_check_finds_typos_and_arithmetic(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**DEEPSPEED, "zero_optimisation": {"stage": 2}, "train_batch_size": 100}))
    result = run("check", path, "--world", 8)
    assert result.exit_code == 1
    assert "Did you mean 'zero_optimization" in result.output
    assert "= 64, but the global batch is 100" in result.output
    found = json.loads(run("check", path, "--world", 8, "--json").stdout)["findings"]
    assert {finding["key"] for finding in found if finding["level"] == "error"} >= {"zero_optimisation.stage"}


def test_check_asks_the_trainer_about_its_own_files(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("plan: zero3\nmodel: {kind: huggingface}\ntrain: {steps: 3}\n")
    result = run("check", path)
    assert result.exit_code == 1
    assert "needs model.path" in result.output


def test_check_takes_the_settings_that_train_would_take(ds: Path) -> None:
    """And of another dialect's file none."""
    own = QUICKSTART
    assert run("check", own, "plan=zero1", "batch.micro_batch=4").exit_code == 0
    result = run("check", own, "plan.name=zero9")
    assert (result.exit_code, "zero9" in result.output) == (1, True)
    assert "write section.key=value" in refused("check", own, "plan.name")
    assert "'plan=zero1' would replace a setting of Terrazzo's own" in refused("check", ds, "plan=zero1")


def test_a_key_that_is_refused_hides_no_other_problem_of_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("plan: zero3\nmodel: {kind: huggingface}\ntrain: {steps: 3, stepz: 4, clip: many}\n")
    found = json.loads(run("check", path, "--json").stdout)["findings"]
    (own, *others) = sorted((each["key"], each["text"]) for each in found if each["level"] == "error")
    assert [key for key, _ in others] == ["train.clip", "train.stepz"]
    assert own[1].startswith("`terrazzo train`: model: kind 'huggingface' needs model.path, a local folder")


def test_check_knows_the_model(tmp_path: Path) -> None:
    path = tmp_path / "tt.json"
    path.write_text(json.dumps({"parallelism": {"tensor_parallel_degree": 3}}))
    result = run("check", path, "--from", "torchtitan", "--model", "llama3-8b")
    assert result.exit_code == 1
    assert "cannot cut the model's 32 attention heads evenly" in result.output


# -- convert -------------------------------------------------------------------------------------------------------


def test_keys_that_only_tune_are_told_from_those_that_auto_fills(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**DEEPSPEED, "gradient_clipping": "auto"}))
    result = run("convert", path, "--to", "terrazzo")
    lines = {line.split()[1]: line for line in result.output.splitlines() if line.startswith("defaulted ")}
    assert "left out, changes no result" in lines["steps_per_print"]
    assert "train.clip" in lines["gradient_clipping"]
    assert "2 defaulted (1 of them left out: they only tune, log or evaluate)" in result.output
    verdicts = {
        each["key"]: each for each in json.loads(run("convert", path, "--to", "terrazzo", "--json").stdout)["verdicts"]
    }
    assert (verdicts["steps_per_print"]["tuning"], verdicts["gradient_clipping"]["tuning"]) == (True, False)


def test_convert_prints_the_document_and_reports_beside_it(ds: Path) -> None:
    result = run("convert", ds, "--to", "terrazzo", "--world", 8)
    assert result.exit_code == 0
    config = config_from_dict(yaml.safe_load(result.stdout))
    assert config.batch.global_batch == 64
    assert config.plan.name == "zero3"
    for key in ("zero_optimization.stage", "gradient_clipping", "steps_per_print"):
        assert key in result.stderr
    assert "dtypes" in result.stderr
    assert "bytes per parameter" in result.stderr


def test_convert_writes_what_terrazzo_runs(ds: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    result = run("convert", ds, "--to", "terrazzo", "--world", 8, "-o", out)
    assert result.exit_code == 0
    assert f"written: {out}" in result.output
    assert run("check", out, "--world", 8).exit_code == 0
    differences = json.loads(run("diff", ds, out, "--world", 8, "--json").stdout)["differences"]
    assert {each["path"] for each in differences if each["kind"] == "differs"} == set()
    assert "exists" in refused("convert", ds, "--to", "terrazzo", "-o", out)


def test_convert_json_has_every_verdict(ds: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    report = json.loads(run("convert", ds, "--to", "terrazzo", "--model", "llama3-8b", "-o", out, "--json").stdout)
    assert [verdict["key"] for verdict in report["verdicts"]] == [
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "zero_optimization.stage",
        "steps_per_print",
    ]
    assert sum(report["counts"].values()) == 6
    assert report["written"] == str(out)
    assert report["precision"]["before"]["reduce"] == report["precision"]["after"]["reduce"] == "bf16"
    assert [cost["ranks"] for cost in report["memory"]["before"]] == [1, 8, 64]
    assert report["parameters"] > 8e9
    assert yaml.safe_load(out.read_text()) == report["document"]


def test_refused_keys_stop_a_conversion_unless_it_may_be_partial(tmp_path: Path) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "run.yaml"
    path.write_text(json.dumps({**DEEPSPEED, "zero_optimisation": 3}))
    result = run("convert", path, "--to", "terrazzo", "-o", out)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "1 key refused" in text and text.endswith("was not written: --partial writes what is left without them.")
    assert not out.exists()
    printed = run("convert", path, "--to", "terrazzo")
    assert printed.stdout == "" and "was not printed: --partial" in " ".join(printed.stderr.split())
    assert run("convert", path, "--to", "terrazzo", "-o", out, "--partial").exit_code == 0
    assert out.exists()


def test_keys_that_the_target_refuses_together_stop_a_conversion(tmp_path: Path) -> None:
    path, out = tmp_path / "titan.json", tmp_path / "run.yaml"
    path.write_text(json.dumps({"parallelism": {"pipeline_parallel_degree": 2}, "compile": {"enable": True}}))
    convert = ("convert", path, "--to", "terrazzo", "--from", "torchtitan")
    result = run(*convert, "-o", out)
    text = " ".join(result.output.split())
    assert (result.exit_code, out.exists()) == (1, False)
    assert "Terrazzo YAML refuses the document as it is: plan.mesh.pp: " in text
    assert "no stage is compiled yet. Set train.compile=false" in text
    assert text.endswith("run.yaml was not written: --partial writes what is left, to be mended by hand.")
    report = json.loads(run(*convert, "-o", out, "--json").stdout)
    assert (report["written"], [fault["key"] for fault in report["faults"]]) == (None, ["plan.mesh.pp"])
    partial = run(*convert, "-o", out, "--partial")
    assert (partial.exit_code, out.exists()) == (0, True)
    assert "refuses the document as it is: plan.mesh.pp: " in " ".join(partial.output.split())


def test_convert_keeps_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# ours\nplan: zero3  # fits\noptimizer:\n  # tuned\n  lr: 1.0e-4\nbatch: {micro_batch: 2}\n")
    text = run("convert", path, "--to", "deepspeed", "--partial").stdout
    assert json.loads(text)["zero_optimization"]["stage"] == 3
    text = run("convert", path, "--to", "terrazzo").stdout
    assert "plan: zero3  # fits" in text
    assert "  # tuned\n  lr:" in text


# -- diff ----------------------------------------------------------------------------------------------------------


def test_diff_tells_what_two_dialects_mean(ds: Path, tmp_path: Path) -> None:
    other = tmp_path / "a.yaml"
    other.write_text("plan: zero2\nprecision: bf16\ntrain: {clip: 1.0}\n")
    result = run("diff", ds, other)
    assert result.exit_code == 1
    lines = {
        line.split()[0]: line
        for line in result.output.splitlines()
        if line.startswith(("sharding", "precision", "training"))
    }
    assert {"sharding.weight", "precision.reduce"} <= set(lines)
    assert "training.clip" not in lines
    assert run("diff", ds, ds).exit_code == 0
    report = json.loads(run("diff", ds, other, "--json").stdout)
    assert report["a"]["dialect"] == "deepspeed"
    assert not report["equal"]
    assert {"path", "kind", "a", "b"} <= set(report["differences"][0])


# -- what is refused -----------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_with_the_edit(ds: Path, tmp_path: Path) -> None:
    assert "Did you mean 'deepspeed'" in refused("explain", ds, "--from", "deepsped")
    assert "Dialects are" in refused("convert", ds, "--to", "yaml")
    assert "there are: fp32" in refused("explain", ds, "--load-dtype", "half")
    assert "NAME=VERSION" in refused("explain", ds, "--library", "deepspeed")
    assert "no folder" in refused("convert", ds, "--to", "terrazzo", "-o", tmp_path / "none" / "a.yaml")
    assert "No configuration file" in refused("check", tmp_path / "none.yaml")
    assert "no dialect" in refused("explain", _file(tmp_path, "x.yaml", "hello: world\n"))


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("verb", ["explain", "check", "convert", "diff"])
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: !!python/object/apply:os.system ['true']",
        "a: .nan",
        "a: 1\na: 2",
        "a: " + "[" * 10**5,
        "\x1b[2J: 1",
    ],
)
def test_hostile_files_are_refused_by_every_verb(tmp_path: Path, verb: str, text: str) -> None:
    path = _file(tmp_path, "a.yaml", text)
    start = time.process_time()
    arguments = {"convert": [path, "--to", "terrazzo"], "diff": [path, QUICKSTART]}.get(verb, [path])
    assert str(path) in refused(verb, *arguments)
    assert time.process_time() - start < 1


def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path) -> None:
    path = _file(
        tmp_path, "a.json", json.dumps({**DEEPSPEED, "tag\u001b[2J": "\u001b]0;x\u0007", "fp16": {"\u202eo": 1}})
    )
    for arguments in (["explain", path], ["check", path], ["convert", path, "--to", "terrazzo", "--partial"]):
        result = run(*arguments)
        assert "\x1b" not in result.output
        assert "\u202e" not in result.output


def test_the_command_ends_with_2_for_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, "a.yaml", "a: 1\na: 2\n")
    monkeypatch.setattr(sys, "argv", ["terrazzo", "config", "explain", str(path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.out == ""
    assert shown.err.startswith("Error: ")
    assert "appears twice" in shown.err


# -- recognition ---------------------------------------------------------------------------------------------------

SAMPLES: dict[str, dict[str, Any]] = {
    "deepspeed": DEEPSPEED,
    "accelerate": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
    },
    "fsdp1": {"sharding_strategy": "FULL_SHARD", "use_orig_params": True},
    "fsdp2": {"reshard_after_forward": True, "mp_policy": {"param_dtype": "bfloat16"}},
    "trainer": {"output_dir": "out", "per_device_train_batch_size": 2, "bf16": True},
    "lightning": {"strategy": "fsdp", "devices": 8, "precision": "bf16-mixed"},
    "torchtitan": {"parallelism": {"data_parallel_shard_degree": -1}, "training": {"local_batch_size": 2}},
    "megatron": {"use-distributed-optimizer": True, "micro-batch-size": 2, "bf16": True},
    "terrazzo": {"plan": "zero3", "batch": {"micro_batch": 2}},
}


def test_each_dialect_is_recognised_and_no_other() -> None:
    assert set(SAMPLES) == set(NAMES)
    for name, document in SAMPLES.items():
        found = [other for other in NAMES if dialect(other).recognises(document)]
        assert found == [name]
        assert recognise(document, "a file").name == name


@pytest.mark.parametrize(("source", "target"), list(zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True)))
def test_every_verb_works_for_every_dialect(tmp_path: Path, source: str, target: str) -> None:
    """Each is read once and written once; every pair is in tests/dialects/test_cross.py."""
    path = _file(tmp_path, "a.json", json.dumps(SAMPLES[source]))
    result = run("convert", path, "--to", target, "--world", 8, "--partial")
    assert result.exit_code == 0, result.output
    written = parse(result.stdout, format_of(Path(f"x{dialect(target).suffix}")))
    assert recognise(written, "what is written").name == target
    assert dialect(source).title in run("explain", path).output
    checked = json.loads(run("check", path, "--json").stdout)
    assert (checked["dialect"], [each for each in checked["findings"] if each["level"] == "error"]) == (source, [])
    assert run("diff", path, path).exit_code == 0


# -- TOML ----------------------------------------------------------------------------------------------------------


def test_every_verb_reads_the_toml_of_torchtitan(titan: Path, tmp_path: Path) -> None:
    explained = run("explain", titan)
    assert "torchtitan Trainer.Config" in explained.output
    assert "shard_grad_op: weight D | between - | grad D | optim D" in explained.output
    checked = run("check", titan)
    assert "job" in checked.output
    assert "job.dump_folder: today's word is dump_folder" in " ".join(checked.output.split())
    for suffix, words in ((".toml", "written as TOML"), (".sh", "Megatron-LM's arguments")):
        assert words in refused("convert", titan, "--to", "terrazzo", "--out", tmp_path / f"own{suffix}", "--partial")
    out = tmp_path / "own.yaml"
    run("convert", titan, "--to", "terrazzo", "--out", out, "--partial")
    assert yaml.safe_load(out.read_text())["plan"]["name"] == "shard_grad_op"
    assert run("diff", titan, titan).exit_code == 0


def test_what_a_script_has_in_code_is_said_to_be_left(ds: Path, tmp_path: Path) -> None:
    written = run("convert", ds, "--to", "terrazzo", "--world", 2, "--partial", "-o", tmp_path / "new.yaml")
    assert "left:    model and data, which DeepSpeed JSON does not have." in written.output
    assert "Without them `terrazzo train` takes a small decoder and the texts" in written.output
    assert "left:" not in run("convert", ds, "--to", "fsdp2", "--world", 2, "--partial").output
    again = run("convert", tmp_path / "new.yaml", "--to", "terrazzo", "--partial", "-o", tmp_path / "again.yaml")
    assert "written:" in again.output and "left:" not in again.output


def test_units_of_a_model_are_said_to_want_that_model(tmp_path: Path) -> None:
    """The small decoder has no such modules: a run without a model is refused."""
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    section = {"fsdp_version": 2, **{f"fsdp_{name}": value for name, value in wrapped.items()}}
    source, out = tmp_path / "accelerate.yaml", tmp_path / "own.yaml"
    source.write_text(json.dumps({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": section}))
    said = " ".join(run("convert", source, "--to", "terrazzo", "-o", out).output.split())
    assert (
        "plan.units names modules of the model to give, LlamaDecoderLayer: model.kind huggingface, model.path" in said
    )
    assert "a small decoder" not in said
    assert "matches no module of Decoder" in run("check", out).output


def test_training_arguments_are_read_by_their_own_reader(tmp_path: Path) -> None:
    """Older names and texts count, and a slip is named."""
    arguments, inner = tmp_path / "args.yaml", tmp_path / "ds.json"
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    inner.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "scheduler": scheduler}))
    arguments.write_text("max_steps: 100\nwarmup_ratio: 0.1\nper_gpu_train_batch_size: 2\nlearning_rate: 1e-4\n")
    result = run("convert", inner, "--to", "terrazzo", "--trainer", arguments, "--world", 8, "--partial")
    document = yaml.safe_load(result.stdout)
    assert document["batch"]["micro_batch"] == 2 and document["schedule"]["warmup_steps"] == 10
    arguments.write_text("max_step: 100\n")
    assert "max_steps" in refused("check", inner, "--trainer", arguments)
