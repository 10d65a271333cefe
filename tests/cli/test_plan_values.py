"""`terrazzo plan`: wrong values and options of other tools are answered with what was meant, before any work."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.cli.plan import answer as planning
from terrazzo.cli.plan.options import OPTION_ROWS
from terrazzo.errors import BadInput

PLAN = ["--model", "llama3-8b", "--gpus", "8", "--strategy", "zero3"]
NUMBERS = [option for option in OPTION_ROWS if option.is_number]


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert isinstance(result.exception, BadInput), result.output
    assert not result.stdout
    return str(result.exception)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which an answer is begun."""
    monkeypatch.setattr(planning, "_answer", lambda *_: pytest.fail("work was begun"))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("flag", [option.flag for option in NUMBERS])
def test_what_is_no_number_is_answered_with_the_option_and_what_it_is(flag: str) -> None:
    said = refusal(*PLAN, flag, "foo")
    assert said.startswith(f"{flag} is 'foo', expected a ")
    (option,) = [option for option in NUMBERS if option.flag == flag]
    assert option.help in said


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("flag", [option.flag for option in NUMBERS if option.flag != "--prefetch"])
@pytest.mark.parametrize("value", ["-1", "0"])
def test_numbers_below_their_range_name_the_option(flag: str, value: str) -> None:
    if value == "0" and flag in ("--price", "--launch-ms"):
        return
    assert refusal(*PLAN, flag, value).startswith(f"{flag} is {value}")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("arguments", "edit"),
    [
        (["--memory-gb", "80GB"], "Write 80."),
        (["--memory-gb", "80GiB"], "--memory-gb is '80GiB', expected a number of GB (1e9 bytes)"),
        (["--seq", "8k"], "Write 8192."),
        (["--seq", "8,192"], "Write 8192."),
        (["--price", "$2.50"], "Write 2.5."),
        (["--watts", "500W"], "Write 500."),
        (["--micro-batch", "1.5"], "Write 1 or 2."),
    ],
)
def test_the_number_that_was_meant_is_written_out(arguments: list[str], edit: str) -> None:
    assert edit in refusal(*PLAN, *arguments)


@pytest.mark.parametrize(
    ("arguments", "near", "choices"),
    [
        (["--ac", "ful"], "'full'", "every_N"),
        (["--ac", "on"], "'full'", "selective"),
        (["--precision", "bf61"], "'bf16'", "fp8-rowwise"),
        (["--precision", "nf4"], "", "bf16,frozen=nf4"),
        (["--precision", "bf7"], "", "Precisions are fp32, bf16"),
        (["--optimizer", "adamww"], "'adamw'", "muon"),
        (["--attention", "sdpa"], "'flash'", "math"),
        (["--attention", "eager"], "'math'", "flash3"),
        (["--loss", "chunk"], "'chunked'", "fused"),
        (["--pp", "2", "--pipeline", "zb"], "'zero_bubble'", "gpipe"),
        (["--rank-by", "speed"], "'throughput'", "cost"),
        (["--cp", "2", "--context", "rings"], "'ring'", "ulysses"),
        (["--gpu", "h100s"], "'H100-SXM5-80GB'", "lists all"),
        (["--framework", "deepsped"], "'deepspeed'", "megatron"),
        (["--optimizer-kernel", "fuse"], "'fused'", "foreach"),
        (["--offload", "cpuu"], "'cpu'", "nvme-all"),
        (["--offload", "disk"], "'nvme'", "--offload is 'disk'; it is one of cpu, cpu-all, nvme"),
        (["--gpus", "eight"], "", "--gpus is 'eight'"),
        (["--gpus", "8..4"], "", "--gpus is '8..4'"),
        (["--attention", "flash4"], "'flash'", "--attention is 'flash4'"),
    ],
)
def test_a_wrong_value_is_answered_like_a_wrong_name(arguments: list[str], near: str, choices: str) -> None:
    said = refusal(*PLAN, *arguments)
    assert f"Did you mean {near}" in said or not near
    assert choices in said


def test_what_is_no_tier_is_not_put_behind_a_strategy() -> None:
    said = refusal("--model", "llama3-8b", "--gpus", "8", "--offload", "disk")
    assert "Did you mean 'nvme'" in said
    assert "--strategy" not in said


def test_the_written_name_of_a_strategy_is_the_one_in_the_error() -> None:
    said = refusal("--model", "llama3-8b", "--gpus", "8", "--strategy", "zero-3")
    assert "'zero-3'" in said
    assert "Did you mean 'zero3'?" in said


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("--preset llama3-8b", "--model llama3-8b"),
        ("--model llama3-8b --checkpointing full", "--ac full"),
        ("--model llama3-8b --sequence_length 8192", "--seq 8192"),
        ("--model llama3-8b --batch-size 4", "--micro-batch 4"),
        ("--model llama3-8b --world-size 8", "--gpus 8"),
        ("--model llama3-8b --plan zero1", "--strategy zero1"),
        ("--model llama3-8b --stratgy zero1", "--strategy zero1"),
        ("--model llama3-8b --grad-accum 4", "--micro-batches 4"),
        ("--model llama3-8b --rank cost", "--rank-by cost"),
        ("--model llama3-8b --paralel", "--parallel"),
        ("--model llama3-8b -o plan.yaml", "--emit plan.yaml"),
        ("examples/quickstart.yaml --steps 4", "train.steps=4"),
        ("--model llama3-8b --mesh 2x8", "write --dp-replicate R, --tp T"),
        ("--model llama3-8b --dp-shard 8", "dp_shard is what these leave of --gpus"),
        ("--model llama3-8b --zzqqxx 4", "`terrazzo plan --help`"),
    ],
)
def test_options_of_other_tools_are_answered_with_this_ones(arguments: str, written: str) -> None:
    said = refusal(*arguments.split())
    assert "is no option of `terrazzo plan`" in said
    assert written in said


@pytest.mark.parametrize(
    ("sizes", "gpus", "key"),
    [
        (
            "model.dim=2048 model.layers=24 model.heads=16 batch.micro_batch=64 batch.sequence_length=2048",
            "8",
            "batch.",
        ),
        (
            (
                "model.dim=16384 model.layers=126 model.heads=128 model.kv_heads=8 model.ffn_dim=53248 "
                "batch.micro_batch=1 batch.sequence_length=16384"
            ),
            "256",
            "plan.mesh.tp=",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_given_settings_with_which_it_does(
    sizes: str, gpus: str, key: str
) -> None:
    """They are written behind the file, and tried again here."""
    big = ["examples/quickstart.yaml", *sizes.split(), "batch.global_batch=512", "precision=bf16"]
    machine = ["--gpu", "h100-sxm", "--host-memory-gb", "500", "--gpus", gpus, "--json"]
    found = json.loads(CliRunner().invoke(cli.app, ["plan", *big, *machine]).stdout)
    assert found["fits"] is False
    assert found["blocker"].startswith("in the way: activations")
    options = [edit["options"] for edit in found["edits"]]
    assert any(key in each for each in options), options
    for each in options:
        if "--gpus" not in each:
            again = json.loads(CliRunner().invoke(cli.app, ["plan", *big, *each.split(), *machine]).stdout)
            assert again["fits"] is True


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (["examples/quickstart.yaml"], "which a configuration decides"),
        (["--params", "7e9", "--gpus", "8"], "of which a number says nothing"),
    ],
)
def test_a_page_is_of_a_named_model(source: list[str], why: str) -> None:
    assert f"{why}: give a model by --model," in refusal(*source, "--html", "a.html")
    assert ".html" in refusal(*PLAN, "--html", "a.txt")


@pytest.mark.parametrize(("given", "meant"), [("llama3-8b", "llama3-8b"), ("lama3-8b", "llama3-8b")])
def test_a_model_in_the_place_of_a_file_is_named_by_an_option(given: str, meant: str) -> None:
    assert refusal(given, "--gpus", "8").endswith(f"write --model {meant}.")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.source=-1", "data.source is -1, expected text or a list."),
        ("lora.target_modules=0", "lora.target_modules is 0, expected all-linear or a list."),
        ("parallel.tensor.plan=foo", "parallel.tensor.plan is 'foo', expected"),
        ("train.activation_checkpointing=ful", "Did you mean 'full'?"),
        ("offload.optim=cpuu", "Did you mean 'cpu'?"),
    ],
)
def test_a_key_that_takes_several_kinds_has_one_sentence(override: str, said: str) -> None:
    error = refusal("examples/quickstart.yaml", override)
    assert said in error
    assert "problems" not in error
