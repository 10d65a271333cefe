"""The configuration: what is accepted, and that every refusal names the key, the value and the fix."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from terrazzo.config import (
    CONFIG_KEYS,
    SHORTHANDS,
    BatchConfig,
    Config,
    MeshConfig,
    OptimizerConfig,
    check_keys,
    config_from_dict,
    config_problems,
    load_config,
    sections,
    setting_texts,
)
from terrazzo.config.sections import precision
from terrazzo.documents import load
from terrazzo.engine import DTYPES, FrozenFormat, StateFormat
from terrazzo.engine.formats.format_names import GRADIENT_FORMATS, WEIGHT_FORMATS
from terrazzo.errors import BadInput
from terrazzo.parallel import STYLES
from terrazzo.train.checkpoints.resume import resume_from
from terrazzo.train.preflight import check
from terrazzo.train.settings.optimizer import check_settings, optimizer_class
from terrazzo.train.settings.plan import build_plan, empty_rows, filling_note, mesh_shape, micro_batches_per_rank
from terrazzo.words import STYLE_NAMES

JARGON = ("pydantic", "validation error", "extra_forbidden", "input_value", "type=", "Extra inputs")


PREFIX = {"model": {"attention": {"prefix": True}}}


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        config_from_dict(raw)
    message = str(caught.value)
    assert not any(word in message for word in JARGON)
    return message


def test_one_key_is_a_complete_configuration(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("train: {steps: 1000}\n")
    assert load_config(path) == Config()


def test_every_format_of_the_engine_has_its_name() -> None:
    """Sections are read without torch, and so without the engine's own table."""
    assert get_args(precision.FrozenName) == tuple(FrozenFormat)
    assert get_args(precision.GatherName) == ("compute", *WEIGHT_FORMATS)
    assert get_args(precision.QuantizedReduceName) == ("none", *GRADIENT_FORMATS)
    assert set(get_args(precision.MomentsName)) == {*DTYPES, *StateFormat}


@pytest.mark.parametrize("text", ["", "# later\n", "{}", "null"])
def test_an_empty_file_starts_nothing(tmp_path: Path, text: str) -> None:
    name = "a.json" if text == "{}" else "a.yaml"
    path = tmp_path / name
    path.write_text(text)
    for overrides in ([], ["train.steps=3"]):
        with pytest.raises(BadInput, match=rf"{name}' is empty.*write sections such as 'model:'"):
            load_config(path, overrides)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"trian": {}}, ["'trian'", "'train'"]),
        ({"train": {"stpes": 3}}, ["'stpes'", "section 'train'", "'steps'"]),
        ({"plan": {"mesh": {"dp_shrad": 2}}}, ["'dp_shrad'", "section 'plan.mesh'", "'dp_shard'"]),
        ({"schedule": {"name": "cosin"}}, ["schedule.name", "'cosin'", "'cosine'"]),
        ({"precision": {"moments": "INT8"}}, ["precision.moments is 'INT8'", "Did you mean 'int8'"]),
    ],
)
def test_unknown_names_are_answered_with_the_nearest_known_one(raw: dict[str, Any], words: list[str]) -> None:
    message = refusal(raw)
    assert all(word in message for word in words)
    assert "Did you mean" in message


@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ({"lr": 1e-3}, "'optimizer.lr' or 'plan.outer.lr' or 'optimizer.muon.lr'"),
        ({"train": {"lr": 1e-3}}, "'optimizer.lr' or 'plan.outer.lr' or 'optimizer.muon.lr'"),
        ({"train": {"step": 5}}, "'steps' or 'offload.step'"),
        ({"eval_evry": 5}, "'train.eval_every'"),
        ({"data": {"folder": "runs"}}, "'checkpoint.folder' or 'log.folder' or 'checkpoint.local.folder'"),
        ({"batch": {"micro_batches": 2}}, "'micro_batch'"),
    ],
)
def test_a_key_of_another_section_is_found_by_its_last_part(raw: dict[str, Any], meant: str) -> None:
    assert f"Did you mean {meant}?" in refusal(raw)


def test_a_colon_without_a_space_behind_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3}")
    with pytest.raises(BadInput) as caught:
        load_config(path, ["precision={name:bf16,moments:int8}"])
    assert "unknown key 'name:bf16' in section 'precision'. Write a space behind the colon: name: bf16." in str(
        caught.value
    )


def test_a_name_of_many_sections_is_no_answer() -> None:
    assert "Known: model, lora" in refusal({"name": "x"})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"optimizer": {"lr": -1.0}}, ["optimizer.lr", "-1.0", "at least 0"]),
        ({"optimizer": {"lr": float("nan")}}, ["optimizer.lr", "nan", "finite"]),
        ({"train": {"clip": float("inf")}}, ["train.clip", "inf"]),
        ({"train": {"steps": "many"}}, ["train.steps", "'many'", "whole number"]),
        ({"train": {"steps": 0}}, ["train.steps", "above 0."]),
        ({"train": {"eval_every": 0}}, ["train.eval_every is 0", "above 0, or null: only at the end."]),
        ({"train": []}, ["train", "section", "It has steps, clip,"]),
        ({"optimizer": True}, ["optimizer is True, expected a section of keys. It has name, lr,"]),
        ({"schedule": "cosin"}, ["schedule.name is 'cosin'", "Did you mean 'cosine'?"]),
        ({"train": {"activation_checkpointing": "every_0"}}, ["every_0", "every_N"]),
        ({"model": {"kind": "huggingface"}}, ["model.path"]),
        ({"plan": {"name": "zero3", "grad": "D"}}, ["'zero3'", "grad"]),
        ({"plan": {"weight": "D", "grad": "D"}}, ["between", "optim"]),
        ({"schedule": {"warmup_steps": 10}, "train": {"steps": 5}}, ["schedule.warmup_steps=0", "train.steps=10"]),
        (
            {"schedule": {"name": "wsd", "decay_steps": 9}, "train": {"steps": 5}},
            ["schedule.decay_steps 9 is longer than the run, whose train.steps are 5,", "leave it out"],
        ),
        (
            {"schedule": {"name": "wsd", "warmup_steps": 3, "decay_steps": 3}, "train": {"steps": 5}},
            ["train.steps are 5, of which 3 warm up"],
        ),
        (
            {"model": {"attention": {"stride": 4}}},
            ["stride without model.attention.window: set model.attention.window"],
        ),
        ({"model": {"attention": {"prefix": True, "window": 8}}}, ["prefix beside window", "remove one of them"]),
        (
            {"model": {"kind": "huggingface", "path": "a", "attention": {"prefix": True}}},
            ["prefix belongs to kind 'decoder'", "Remove it"],
        ),
        ({**PREFIX, "data": {"loss_on": "all"}}, ["'all' nothing is", "leave data.loss_on out"]),
        ({**PREFIX, "data": {"packing": "whole"}}, ["several prompts in a sequence", "data.attention to 'document'"]),
        ({**PREFIX, "objective": {"name": "reward"}}, ["'reward' scores whole texts", "'next_token' or 'dpo'"]),
        ({**PREFIX, "checkpoint": {"save_format": "hf"}}, ["has no prefix mask", "save_format to 'terrazzo'"]),
        ({"model": {"attention": {"window": 300}}}, ["window 300 is longer", "sequence_length 256: leave it out"]),
        ({"model": {"attention": {"window": 8, "stride": 300}}}, ["model.attention.stride 300 is longer"]),
        ({"model": {"layers": 3, "attention": {"window": 8, "full_every": 4}}}, ["full_every 4 with 3 layers"]),
        (
            {"model": {"kind": "huggingface", "path": "a", "attention": {"window": 8}}},
            ["belongs to kind 'decoder'", "sliding_window and layer_types"],
        ),
        (
            {"model": {"attention": {"window": 8, "stride": 4}}, "checkpoint": {"save_format": "hf"}},
            ["as a Mistral, which has no stride"],
        ),
        ({"parallel": {"pipeline": {"schedule": "gpipe", "chunks": 2}}}, ["'gpipe' has one stage", "chunks is 2"]),
        ({"parallel": {"pipeline": {"schedule": "zero_bubble", "chunks": 2}}}, ["'zero_bubble' has one stage"]),
        ({"lora": {"dropout": 0.1, "alpha": 16.0}}, ["lora: dropout without lora.rank"]),
        ({"plan": {"units": "Block"}}, ['a list, or null: found by themselves. Write ["Block"].']),
        ({"optimizer": {"no_decay": "*.norm*"}}, ['Write ["*.norm*"].']),
        ({"data": {"packing": 1}}, ["or null: stream for text, single for conversations"]),
        ({"launch": {"stall_s": 700}}, ["stall_s 700 is longer than timeout_s 600", "Lower launch.stall_s"]),
    ],
)
def test_wrong_values_are_refused_with_key_and_expectation(raw: dict[str, Any], words: list[str]) -> None:
    message = refusal(raw)
    assert all(word in message for word in words), message


def test_edits_name_whole_keys() -> None:
    """Each `set KEY`, also where a part of the key is put in when it is said."""
    known = {*CONFIG_KEYS, *SHORTHANDS}
    folder = Path(sections.__file__).parent
    found = 0
    for path in (*folder.glob("*.py"), *folder.parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr(values=parts):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
                case ast.Constant(value=str() as text) if " " in text:
                    pass
                case _:
                    continue
            for key in re.findall(r"\b[Ss]et ([a-z_*.]*[a-z_*])(?= to |=|,| and |$)", text):
                found += 1
                assert fnmatch.filter(known, key), f"{path.name}: set {key}"
    assert found > 20


def test_what_null_means_is_said_of_every_key_that_may_be_null() -> None:
    assert not [name for name, key in CONFIG_KEYS.items() if key.null and "null: " not in key.meaning]


def test_keys_that_do_not_agree_are_read_each_by_itself() -> None:
    checked = check_keys({"parallel": {"pipeline": {"schedule": "gpipe", "chunks": 2}}})
    read = [checked.values[f"parallel.pipeline.{key}"] for key in ("schedule", "chunks")]
    assert (read, checked.problems) == (["gpipe", 2], {})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"train": {"steps": True}}, "train.steps is True, expected a whole number."),
        ({"train": {"clip": True}}, "train.clip is True, expected a number, or null"),
        ({"optimizer": {"lr": True}}, "optimizer.lr is True, expected a number."),
        ({"checkpoint": {"keep_last": True}}, "checkpoint.keep_last is True, expected a whole number"),
        ({"train": {"compile": 1}}, "train.compile is 1, expected true or false."),
        ({"train": {"compile": "off"}}, "expected true or false. Write false, without quotes."),
        ({"train": {"compile": "offf"}}, "train.compile is 'offf', expected true or false."),
        ({"train": {"steps": "1_000"}}, "expected a whole number. Write 1000, without quotes."),
        ({"optimizer": {"lr": "1e-3"}}, "expected a number. Write 0.001, without quotes."),
        ({"train": {"steps": 1.5}}, "train.steps is 1.5, expected a whole number."),
        ({"checkpoint": {"every": True}}, "True is neither a number of steps nor auto"),
    ],
)
def test_switches_are_no_numbers_and_text_is_neither(raw: dict[str, Any], words: str) -> None:
    assert words in refusal(raw)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.source", ["a", 1], "data.source.1 is 1, expected text."),
        ("data.source", 5, "data.source is 5, expected text or a list"),
        ("lora.target_modules", ["q_proj", 1], "lora.target_modules.1 is 1, expected text."),
        ("lora.target_modules", 5, "lora.target_modules is 5, expected all-linear or a list."),
        ("plan.units", ["a", 1], "plan.units.1 is 1, expected text."),
        ("parallel.tensor.plan", {"layers": {"*": {"mlp": "enter"}}}, "{'layers.*.mlp': enter}"),
        ("parallel.tensor.plan", 5, "parallel.tensor.plan is 5, expected a section of keys or auto."),
    ],
)
def test_a_key_of_several_kinds_is_one_problem_without_their_names(key: str, value: Any, words: str) -> None:
    *parents, last = key.split(".")
    raw: dict[str, Any] = {last: value}
    for name in reversed(parents):
        raw = {name: raw}
    ((where, told),) = config_problems(raw)
    assert where == key and words in told and "[" not in told.partition(" is ")[0]
    (of_key,) = check_keys(raw).problems.values()
    assert of_key == (told if value != 5 else told.replace(key, "it"))


def test_the_edit_for_a_glob_of_a_tensor_plan_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {steps: 7}\n")
    with pytest.raises(BadInput) as refused:
        load_config(path, ["parallel.tensor.plan.layers.*.mlp=enter"])
    (edit,) = re.findall(r'as an override (\S+="[^"]*")', str(refused.value))
    assert load_config(path, [edit.replace('"', "")]).parallel.tensor.plan == {"layers.*.mlp": "enter"}


def test_a_whole_number_may_be_written_as_a_power_of_ten() -> None:
    assert config_from_dict({"train": {"steps": 5e3}}).train.steps == 5000
    assert config_from_dict({"train": {"seed": 2.0**52}}).train.seed == 2**52
    assert config_from_dict({"train": {"seed": 2**62 + 1}}).train.seed == 2**62 + 1


@pytest.mark.parametrize(("section", "key"), [("train", "seed"), ("train", "steps"), ("checkpoint", "every")])
def test_a_whole_number_that_has_been_rounded_is_refused(section: str, key: str) -> None:
    told = refusal({section: {key: 1234567890123456789.0}})
    assert f"{section}.{key} is 1.2345678901234568e+18" in told and "Write all of its digits" in told


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.folder=s3://key:SECRET@host/p", "train.stpes=3"],
        ["checkpoint.folder='s3://key:SECRET@host/p"],
        ["checkpoint.folder.s3://key:SECRET@host/p"],
        ["train=s3://key:SECRET@host/p", "train.steps=3"],
        ["train.seed=s3://key:SECRET@host/p", "train.stpes=3"],
        ["train.activation_checkpointing=s3://key:SECRET@host/p"],
    ],
)
def test_no_refusal_repeats_a_password(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {steps: 7}\n")
    with pytest.raises(BadInput, match=r"s3://\*\*\*@host/p") as caught:
        load_config(path, overrides)
    assert "SECRET" not in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    message = refusal({"train": {"stpes": 1, "clip": -1}, "model": {"dim": "wide"}})
    assert "3 problems" in message
    assert message.count("\n  - ") == 3


def test_what_cannot_be_together_is_listed_at_once_within_sections_and_between_them() -> None:
    mistakes: dict[str, dict[str, Any]] = {
        "schedule.warmup_steps 2000 is longer": {"schedule": {"warmup_steps": 2000}},
        "offload.activations 'cpu' moves": {"offload": {"activations": "cpu"}},
        "precision.frozen 'nf4' keeps": {"precision": {"frozen": "nf4"}},
        "precision: error_feedback of gradients": {"precision": {"error_feedback": True}},
        "lora: alpha without lora.rank": {"lora": {"alpha": 3.0}},
        "model.attention: stride without": {"model": {"attention": {"stride": 2}}},
    }
    together: dict[str, Any] = {}
    for words, section in mistakes.items():
        assert words in refusal(section)  # each alone
        for name, keys in section.items():
            together[name] = {**together.get(name, {}), **keys}
    message = refusal(together)
    assert f"has {len(mistakes)} problems" in message
    assert all(message.count(words) == 1 for words in mistakes)
    keys = {key for key, _ in config_problems(together)}
    assert {"schedule.warmup_steps", "offload.activations", "precision.error_feedback", "model.attention.stride"} < keys
    typo = refusal({**together, "train": {"stpes": 1}})  # what sections say together waits for keys that are right
    assert "stpes" in typo and "lora: alpha" in typo and "offload.activations" not in typo


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "max_bytes", 0),
        ("data", "validation_fraction", 0.5),
        ("data", "validation_fraction", -1),
        ("batch", "sequence_length", 0),
        ("batch", "global_batch", 0),
        ("batch", "micro_batch", 0),
        ("train", "seed", -1),
    ],
)
def test_sizes_out_of_range(section: str, key: str, value: float) -> None:
    assert f"{section}.{key} is {value}, expected a number" in refusal({section: {key: value}})


def test_overrides_are_yaml_values_and_reach_into_shorthands(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("plan: zero2\ntrain: {steps: 7}\n")
    given = [
        "plan.mesh.dp_shard=2",
        "optimizer.lr=1e-3",
        "train.clip=null",
        "optimizer.options.betas=[0.9, 0.95]",
    ]
    config = load_config(path, given)
    assert (config.plan.name, config.plan.mesh.dp_shard, config.train.steps) == ("zero2", 2, 7)
    assert (config.optimizer.lr, config.train.clip) == (1e-3, None)
    assert config.optimizer.options == {"betas": [0.9, 0.95]}


@pytest.mark.parametrize("name", ["run.sh", "run.args"])
def test_a_script_is_refused_by_its_name_whatever_it_holds(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("if $1; then torchrun pretrain_gpt.py --lr 1; fi")
    with pytest.raises(BadInput, match=r"is a script by its name.*config convert .* --to terrazzo"):
        load_config(path)


@pytest.mark.parametrize("value", ["#3", "run #3", "[a, b] # c", "'run' #3"])
def test_an_override_of_which_yaml_would_leave_out_a_comment_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {steps: 7}\n")
    with pytest.raises(BadInput, match="comment") as refused:
        load_config(path, [f"log.note={value}"])
    (edit,) = re.findall(r"write '(.*)' with both", str(refused.value))
    assert load_config(path, [edit]).log.note == value


@pytest.mark.parametrize(("value", "note"), [("run#3", "run#3"), ("'run #3'", "run #3"), ('"#3"', "#3")])
def test_a_number_sign_that_is_no_comment_is_text(tmp_path: Path, value: str, note: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {steps: 7}\n")
    assert load_config(path, [f"log.note={value}"]).log.note == note


def test_another_name_leaves_the_rest_of_a_files_section(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("plan: {name: zero3, mesh: {tp: 2}, prefetch: 3}\n")
    plan = load_config(path, ["plan=zero1"]).plan
    assert (plan.name, plan.mesh.tp, plan.prefetch) == ("zero1", 2, 3)
    path.write_text("plan: zero3\noptimizer: {lr: 0.1}\nschedule: linear\n")
    config = load_config(path, ["plan=zero1", "optimizer=Lion", "schedule.warmup_steps=5"])
    assert (config.plan.name, config.optimizer.name, config.optimizer.lr) == ("zero1", "Lion", 0.1)
    assert (config.schedule.name, config.schedule.warmup_steps) == ("linear", 5)


def test_a_name_that_is_a_number_is_a_name_in_overrides_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for text, override in (("{name: bf16, moments: bf16}", "precision=32"), ("32", "precision.moments=bf16")):
        path.write_text(f"precision: {text}\n")
        precision = load_config(path, [override]).precision
        assert (precision.name, precision.moments) == ("fp32", "bf16")
    with pytest.raises(BadInput, match="precision is True, expected a section of keys"):
        load_config(path, ["precision=true"])


@pytest.mark.parametrize(
    "override",
    [
        "train.steps",
        "=3",
        "train.steps.deep=3",
        "train.steps..deep=3",
        "train.steps={",
        "train.steps={? [a] : 1}",
        "train.steps=!!bool maybe",
        pytest.param("train.steps=" + "[" * 3000, id="deep"),
        pytest.param("train.steps=" + "9" * 5000, id="long"),
        pytest.param("train=0x" + "f" * 5000, id="long hexadecimal"),
    ],
)
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {steps: 7}\n")
    with pytest.raises(BadInput, match=r"[Oo]verride"):
        load_config(path, [override])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "train: {steps: 1, steps: 2}", "'steps' appears twice"),
        ("a.json", '{"train": {"steps": 1, "steps": 2}}', "'steps' appears twice"),
        ("a.yaml", "train: [", "not valid YAML"),
        ("a.yaml", "train:\n  steps: 5\n   lr: 3", r"a.yaml' is not valid YAML: line 3, column 6: mapping values are"),
        ("a.yaml", "train: {\nsteps: 5\nlr: [", r"YAML: line 3, column \d+: did not find .* that begins in line \d.$"),
        ("a.json", "{", "not valid JSON"),
        ("a.toml", "train: 1", "not valid TOML"),
        ("a.yaml", "- 1", "expected sections"),
        ("a.yaml", "train: !!python/object/apply:os.getcwd []", "the tag 'tag:yaml.org,2002:python"),
        ("a.yaml", "train: {? [steps] : 1}", "line 1: a key is no text"),
        ("a.yaml", "train: {steps: !!timestamp x}", "the tag 'tag:yaml.org,2002:timestamp'"),
        ("a.yaml", "train: {steps: !!bool maybe}", "not valid YAML: KeyError: 'maybe'"),
        ("a.yaml", "train:\n  seed: 010", "line 2 has the number 010, which YAML 1.1 reads in base 8: write it in"),
        ("a.yaml", "train: {seed: -1:30}", "the number -1:30, which YAML 1.1 reads in base 60"),
        ("a.yaml", "train: {clip: 1:30.5}", "the number 1:30.5, which YAML 1.1 reads in base 60"),
        *(
            pytest.param(f"a.{kind.lower()}", text.replace("N", digits), words, id=f"{kind} {digits[:3]}")
            for kind, text in (("YAML", "train: {steps: N}"), ("TOML", "train.steps = N"), ("JSON", '{"train": N}'))
            for digits in ("9" * 5000, "9" * 500, "0x" + "f" * 5000)
            for words in ("a number of|value that cannot be read|not valid",)
        ),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        load_config(path)


def both_read(path: Path) -> list[Any]:
    """What `terrazzo train` and `terrazzo config` make of a file: what it says, or their one refusal."""
    found: list[Any] = []
    for read in (lambda: load_config(path), lambda: config_from_dict(load(path).document, str(path))):
        try:
            found.append(read())
        except BadInput as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("a.yaml", b"log: {note: 2024-05-01}", "2024-05-01"),
        ("a.yaml", b"log: {note: 2024-13-45}", "2024-13-45"),
        ("a.toml", b"log.note = 2024-05-01", "2024-05-01"),
        ("a.json", b'\xef\xbb\xbf{"log": {"note": "x"}}', "x"),
        ("a.json", b'{"log": {"note": "x"},} // last', "x"),
        ("a.yaml", b"log: {note: !!bool maybe}", None),
        ("a.yaml", b"log: {note: &a [*a]}", None),
        ("a.yaml", b"log: {note: a}\n---\nlog: {note: b}", None),
        ("a.yaml", b"log: {note: .inf}", None),
        ("a.yaml", b"log: {note: \x07}", None),
        ("a.yaml", b"log: {note: \xff}", None),
    ],
)
def test_training_reads_a_file_as_the_other_commands_do(
    tmp_path: Path, name: str, text: bytes, note: str | None
) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    one, other = both_read(path)
    assert one == other
    assert isinstance(one, str) if note is None else one.log.note == note


def test_a_date_is_text_in_an_override_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {steps: 7}\n")
    assert load_config(path, ["log.note=2024-13-45"]).log.note == "2024-13-45"


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(BadInput, match=r"Did you mean 'quickstart.yaml'"):
        load_config(tmp_path / "quikstart.yaml")


def test_json_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    raw = {"plan": {"name": "zero1"}, "train": {"steps": 3}}
    (tmp_path / "a.json").write_text(json.dumps(raw))
    (tmp_path / "a.yaml").write_text("plan: zero1\ntrain:\n  steps: 3\n")
    (tmp_path / "a.toml").write_text('plan = "zero1"\n[train]\nsteps = 3\n')
    assert load_config(tmp_path / "a.json") == load_config(tmp_path / "a.yaml") == load_config(tmp_path / "a.toml")


def test_setting_texts_list_every_key_and_tell_settings_apart() -> None:
    one, other = setting_texts(Config()), setting_texts(config_from_dict({"optimizer": {"options": {"eps": 1e-6}}}))
    assert one["train.steps"] == "1000"
    assert set(other.items()) - set(one.items()) == {("optimizer.options.eps", "1e-06")}


def test_batch_arithmetic_is_shown_when_it_does_not_come_out_whole() -> None:
    assert micro_batches_per_rank(BatchConfig(global_batch=32, micro_batch=4), 2) == 4
    assert filling_note(BatchConfig(global_batch=32, micro_batch=4), 2) is None
    uneven = BatchConfig(global_batch=100, micro_batch=8)
    assert (micro_batches_per_rank(uneven, 4), empty_rows(uneven, 4)) == (4, 28)
    note = filling_note(uneven, 4)
    assert note is not None and "28 of 128 rows of a step are empty, 22%" in note
    assert "batch.global_batch=96 or 128" in note
    assert empty_rows(uneven, 12, MeshConfig(tp=4)) == empty_rows(uneven, 3) == 20


def test_mesh_must_make_up_the_world() -> None:
    assert mesh_shape(MeshConfig(dp_replicate=2), 8) == {"dp_replicate": 2, "dp_shard": 4}
    assert mesh_shape(MeshConfig(), 8) == {"dp_shard": 8}
    assert mesh_shape(MeshConfig(cp=4), 8) == {"dp_shard": 2, "cp": 4}
    assert mesh_shape(MeshConfig(tp=2, dp_shard=1, cp=4), 8) == {"dp_shard": 1, "cp": 4, "tp": 2}
    with pytest.raises(BadInput, match=r"plan\.mesh: .* the product of its axes must be 8"):
        mesh_shape(MeshConfig(dp_replicate=3), 8)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"name": "zero4"}, "zero"),
        ({"weight": "D", "between": "-", "grad": "-", "optim": "-"}, "prefix"),
        ({"name": "hybrid_shard"}, "set plan.mesh.dp_replicate to the number of groups"),
        ({"name": "hpz@cpu"}, "set plan.mesh.dp_replicate to the number of groups"),
        ({"weight": "S", "between": "S", "grad": "S", "optim": "S,R"}, "set plan.mesh.dp_replicate to the number"),
        ({"name": "fsdp"}, "Did you mean 'zero3'"),
        ({"name": "HSDP"}, "Did you mean 'hybrid_shard'"),
    ],
)
def test_impossible_plans_are_refused_before_anything_starts(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        build_plan(config_from_dict({"plan": plan}))
    assert "init_device_mesh" not in str(caught.value)  # who writes YAML has no Python to write it in


def test_optimizer_names_and_options_are_checked() -> None:
    assert optimizer_class(OptimizerConfig(options={"betas": [0.9, 0.99], "fused": True})).__name__ == "AdamW"
    assert optimizer_class(OptimizerConfig(options={"fused": None, "foreach": False, "eps": 1})).__name__ == "AdamW"
    for option, value, kind in (
        ("fused", "yes", "true or false or null"),
        ("fused", 1, "true or false or null"),
        ("amsgrad", "no", "true or false"),
        ("eps", "1e-8", "a number"),
        ("eps", True, "a number"),
    ):
        with pytest.raises(BadInput, match=rf"optimizer\.options\.{option} is {value!r}, and is {kind} to AdamW"):
            optimizer_class(OptimizerConfig(options={option: value}))
    with pytest.raises(BadInput, match="Did you mean 'AdamW'"):
        optimizer_class(OptimizerConfig(name="Adamw"))
    with pytest.raises(BadInput, match="Did you mean 'betas'"):
        optimizer_class(OptimizerConfig(options={"beta": [0.9, 0.99]}))
    for options in (
        *({"betas": each} for each in ([0.9, 1.5], [0.9], {"a": 1}, [0.9, 0.99, 0.999], 0.9)),
        {"eps": -1.0, "amsgrad": True},
    ):
        option, value = next(iter(options.items()))
        words = rf"optimizer\.options\.{option} is {re.escape(repr(value))}, with which AdamW makes no step \(.*[^.]\)"
        for name in ("AdamW", "Muon"):
            with pytest.raises(BadInput, match=words):
                check_settings(OptimizerConfig(name=name, options=options))
    for option, words in (("capturable", "a CUDA graph: remove it"), ("differentiable", "through a step: remove it")):
        with pytest.raises(BadInput, match=rf"optimizer\.options\.{option} is True, and .* {words}"):
            check_settings(OptimizerConfig(options={option: True}))
        check_settings(OptimizerConfig(options={option: False}))
    with pytest.raises(BadInput, match=r"AdamW does not accept these settings: .*epsilon value: -1\.0\.$"):
        check_settings(OptimizerConfig(options={"eps": -1.0, "betas": 3}))
    for name in ("Adafactor", "adafactor"):  # before its options, which the one to take in its place has not
        with pytest.raises(BadInput, match="Adafactor cannot run on flat shards"):
            check_settings(OptimizerConfig(name=name, options={"betas": [0.9, 0.99]}))


@pytest.mark.parametrize("name", ["muon", "Muons", "lbfgs", "sparse_adam"])
def test_no_optimizer_is_suggested_that_would_be_refused(name: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_settings(OptimizerConfig(name=name))
    suggested = str(caught.value).partition("Did you mean '")[2].partition("'")[0]
    if suggested:
        check_settings(OptimizerConfig(name=suggested))


def test_preflight_accepts_the_default_and_refuses_missing_data(tmp_path: Path) -> None:
    log = {"folder": str(tmp_path / "run")}
    check(config_from_dict({"log": log}), 2)
    with pytest.raises(BadInput, match="nowhere"):
        check(config_from_dict({"log": log, "data": {"source": str(tmp_path / "nowhere")}}), 2)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(BadInput, match=r"log\.folder.*is a file"):
        check(config_from_dict({"log": log}), 2)


def test_resume_never_guesses(tmp_path: Path) -> None:
    def config(resume: str, **more: Any) -> Config:
        return config_from_dict({"checkpoint": {"folder": str(tmp_path), "resume": resume, **more}})

    assert resume_from(config("if_exists")) is None
    with pytest.raises(BadInput, match="holds no complete checkpoint"):
        resume_from(config("required"))
    saved = tmp_path / "step-00000010"
    saved.mkdir()
    assert resume_from(config("if_exists")) is None, "a folder without a manifest is not a checkpoint"
    (saved / "manifest.json").write_text("{}")
    (saved / "manifest.sha256").touch()
    assert resume_from(config("if_exists")) == resume_from(config("required")) == str(saved)
    with pytest.raises(BadInput, match="step-00000010' of another run"):
        resume_from(config("never"))
    assert resume_from(config("never", overwrite=True)) is None


def test_styles_have_the_names_that_a_configuration_knows() -> None:
    assert tuple(STYLES) == STYLE_NAMES
