"""TrainingArguments, against the dataclass itself and what it makes of what is written."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo as tz
from terrazzo.dialects.core.dialect import Reading, ReadingContext
from terrazzo.dialects.core.keys import matches
from terrazzo.dialects.formats.trainer.keys import DISTRIBUTED, FIELDS, FSDP_KEYS, FSDP_VERSION_1
from terrazzo.dialects.formats.trainer.keys_earlier import ALIASES
from terrazzo.dialects.registry import dialect
from tests.dialects.peers import (
    assert_agrees_or_says,
    converted,
    described,
    findings_by_key,
    inventory,
    nested,
    precision,
    reading,
    verdicts,
)

transformers = pytest.importorskip("transformers", reason="TrainingArguments are the oracle: pip install transformers")
trainer_optimizer = pytest.importorskip("transformers.trainer_optimizer")

FSDP = {"output_dir": "out", "fsdp": True}
BARE = {"zero_optimization": {"stage": 2}}
ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "plain": {
        "output_dir": "out",
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 2,
        "seed": 1,
        "adam_beta2": 0.95,
    },
    "fsdp": {**FSDP, "bf16": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}},
    "units": {**FSDP, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}},
    "version 1": {
        **FSDP,
        "fsdp_config": {"version": 1, "reshard_after_forward": "hybrid_shard", "backward_prefetch": "BACKWARD_POST"},
    },
    "words": {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"version": 1, "use_orig_params": True}},
    "mesh": {**FSDP, "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4, "cp_backend": "torch"}},
    "prefixed": {**FSDP, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_version": 2}},
    "schedule": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.05,
        "max_steps": 100,
    },
    "stable": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}},
    "epochs": {"num_train_epochs": 2, "save_strategy": "epoch", "optim": "sgd", "gradient_checkpointing": True},
    "off": {
        "max_grad_norm": 0,
        "bf16": False,
        "fsdp": "",
        "deepspeed": None,
        "save_total_limit": None,
        "use_cpu": True,
    },
    "deepspeed": {"output_dir": "out", "bf16": True, "per_device_train_batch_size": 4, "deepspeed": ZERO},
    "own sharding": {"distributed_config": {"fsdp_size": 8, "fsdp_mixed_precision": True}, "save_only_model": True},
    "others": {"report_to": "none", "label_smoothing_factor": 0.1, "logging_steps": 5, "tf32": True},
}

OWN: dict[str, Any] = {"distributed_config": {"fsdp_size": 8}, "save_only_model": True}


def test_the_fields_are_the_dataclasss() -> None:
    fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    assert set(fields) == {*FIELDS, *ALIASES}
    for name, row in FIELDS.items():
        theirs = fields[name].default
        if theirs is dataclasses.MISSING:
            theirs = fields[name].default_factory()
        assert (name, row.default) == (name, theirs)


def test_the_fields_of_distributed_config_are_the_dataclasss() -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    fields = {field.name: field.default for field in dataclasses.fields(DistributedConfig)}
    assert fields == {name: row.default for name, row in DISTRIBUTED.items()}


def entries() -> Iterator[str]:
    """The inventory's names, which put several keys on one line."""
    for entry in inventory("trainer"):
        names = entry.split(" (version")[0].removeprefix("fsdp_config.").replace(",", " /").split(" / ")
        section = "fsdp_config." if entry.startswith("fsdp_config.") else ""
        yield from (f"{section}{name.strip()}" for name in names)
    yield from (f"distributed_config.{name}" for name in inventory("distributed_config"))


def test_every_key_of_the_inventory_has_a_verdict() -> None:
    for key in entries():
        for value in (None, True, 8, "x", ["x"]):
            assert "no such" not in verdicts("trainer", {"fsdp": True, **nested({key: value})})[key].why, key
        assert any(matches(key, pattern) for pattern in dialect("trainer").keys), key
        assert dialect("trainer").meaning(key), key


@pytest.mark.parametrize("label", DOCUMENTS)
def test_the_writer_says_what_the_reader_reads(label: str) -> None:
    assert_agrees_or_says("trainer", DOCUMENTS[label])


# storage, compute, reduce, accumulate, master and moments, saved
@pytest.mark.parametrize(
    ("document", "row"),
    [
        ({**FSDP, "bf16": True}, ["fp32", "bf16", "bf16", "fp32", "fp32", "fp32"]),
        ({**FSDP, "bf16": True, "gradient_accumulation_steps": 4}, ["fp32", "bf16", "bf16", "bf16", "fp32", "fp32"]),
        ({**FSDP, "bf16": True, "fsdp_config": {"version": 1}}, ["fp32", "bf16", "bf16", "fp32", "fp32", "fp32"]),
        ({**FSDP, "fp16": True}, ["fp32", "fp16", "fp16", "fp32", "fp32", "fp32"]),
        (FSDP, ["loaded"] * 6),
        ({"bf16": True}, ["loaded", "bf16", "loaded", "loaded", "loaded", "loaded"]),
        (
            {"distributed_config": {"fsdp_size": 8, "fsdp_mixed_precision": True}},
            ["loaded", "bf16", "fp32", "fp32", "loaded", "loaded"],
        ),
        (OWN | {"bf16": True}, ["loaded", "bf16", "loaded", "loaded", "loaded", "loaded"]),
        (
            {"bf16": True, "distributed_config": {"fsdp_size": 8, "fsdp_mixed_precision": True}},
            ["loaded", "bf16", "fp32", "fp32", "loaded", "loaded"],
        ),
        ({"deepspeed": ZERO, "bf16": True}, ["bf16", "bf16", "bf16", "bf16", "fp32", "bf16"]),
        ({"deepspeed": BARE, "bf16": True}, ["bf16", "bf16", "bf16", "bf16", "fp32", "bf16"]),
        ({"deepspeed": BARE, "fp16": True}, ["fp16", "fp16", "fp16", "fp16", "fp32", "fp16"]),
        ({"deepspeed": BARE}, ["fp32"] * 6),
    ],
)
def test_precision_is_pinned_by_what_stands_under_it(document: dict[str, Any], row: list[str]) -> None:
    assert precision("trainer", document) == row


def test_under_ddp_autocast_works_on_the_load_dtype() -> None:
    row = ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"]
    assert precision("trainer", {"bf16": True}, load_dtype="fp32") == row
    description = described("trainer", {"bf16": True})
    assert description.value("precision.autocast") is True
    assert described("trainer", {**FSDP, "bf16": True}).value("precision.autocast") is True  # prepare_model() wraps it


def test_transformers_own_sharding_runs_under_autocast_as_the_rest_does() -> None:
    """`prepare_model()` of Accelerate is called there as well, for the autocast alone: see `test_traps_engines`."""
    for half, scaled in (("bf16", False), ("fp16", True)):
        description = described("trainer", OWN | {half: True})
        said = [description.value(f"precision.{state}") for state in ("compute", "autocast", "output")]
        assert said == [half, True, "fp32"]
        assert (description.value("precision.loss_scaling") is not None) is scaled
        assert verdicts("trainer", OWN | {half: True})[half].why.startswith("weights are gathered as loaded, and")
    gathered = {"distributed_config": {"fsdp_size": 8, "fsdp_mixed_precision": True}}
    assert described("trainer", gathered).value("precision.autocast") is False
    outcomes = verdicts("trainer", gathered | {"fp16": True, "bf16": False})
    assert outcomes["fp16"].kind == "lossy"
    assert outcomes["fp16"].why == "weights are gathered in bf16, and autocast computes in fp16"
    replicas = {"distributed_config": {"dp_replicate_size": 8}}
    for document in (gathered, replicas):
        assert verdicts("trainer", document | {"bf16": True})["bf16"].kind == "applied"


def test_loss_scaling_comes_with_fp16() -> None:
    assert described("trainer", {"fp16": True}).value("precision.loss_scaling") is not None
    assert described("trainer", {"bf16": True}).value("precision.loss_scaling") is None


# -- what is ignored in silence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states"])
def test_keys_of_version_1_are_reported_under_version_2(key: str) -> None:
    section = {key: "BACKWARD_PRE" if key == "backward_prefetch" else True}
    assert verdicts("trainer", {**FSDP, "fsdp_config": section})[f"fsdp_config.{key}"].kind == "refused"
    older = verdicts("trainer", {**FSDP, "fsdp_config": {"version": 1, **section}})
    assert older[f"fsdp_config.{key}"].kind == "applied"


@pytest.mark.parametrize(
    ("key", "meant"),
    [("offload_params", "cpu_offload"), ("sharding_strategy", "reshard_after_forward"), ("cpu_ofload", "cpu_offload")],
)
@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_words_of_others_are_named(key: str, meant: str, prefix: str) -> None:
    verdict = verdicts("trainer", {**FSDP, "fsdp_config": {f"{prefix}{key}": True}})[f"fsdp_config.{prefix}{key}"]
    assert verdict.kind == "refused"
    assert f"'{meant}'" in verdict.why


def test_a_section_for_fsdp_that_is_off_is_reported() -> None:
    verdict = verdicts("trainer", {"fsdp_config": {"cpu_offload": True}})["fsdp_config.cpu_offload"]
    assert verdict.kind == "refused"
    assert "fsdp: true" in verdict.why


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"min_num_params": 100}, "min_num_params"),
        ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": ["A"]}, "transformer_layer_cls_to_wrap"),
    ],
)
def test_units_that_the_policy_ignores_are_reported(section: dict[str, Any], key: str) -> None:
    assert verdicts("trainer", {**FSDP, "fsdp_config": section})[f"fsdp_config.{key}"].kind == "refused"


def test_hybrid_words_are_refused_under_either_version() -> None:
    document = {"fsdp": "hybrid_shard auto_wrap", "bf16": True}
    assert verdicts("trainer", document)["fsdp"].kind == "refused"
    assert described("trainer", document).row == "hybrid_shard"
    older = {**document, "fsdp_config": {"version": 1}}
    assert "parallelism_config" in verdicts("trainer", older)["fsdp"].why
    assert described("trainer", older).row == "zero3"


FOUR = {"output_dir": "x", "max_steps": 100, "warmup_ratio": 0.1, "evaluation_strategy": "no", "logging_dir": "logs"}


@pytest.mark.parametrize("more", [{}, {"warmup_steps": 0}, {"group_by_length": False, "save_safetensors": True}])
def test_arguments_of_transformers_4_are_translated(more: dict[str, Any]) -> None:
    document = {**FOUR, **more}
    conversion = converted("trainer", "terrazzo", document)
    assert conversion.document["schedule"]["warmup_steps"] == 10
    assert not conversion.refused
    outcomes = verdicts("trainer", document)
    assert "warmup_steps" in outcomes["warmup_ratio"].why
    assert (outcomes["evaluation_strategy"].kind, outcomes["logging_dir"].kind) == ("renamed", "defaulted")
    written = converted("trainer", "trainer", document).document
    assert written == {"output_dir": "x", "max_steps": 100, "warmup_steps": 0.1, "eval_strategy": "no"}


def test_of_two_words_for_the_warmup_steps_count() -> None:
    found = described("trainer", {**FOUR, "warmup_steps": 7})
    assert (found.value("schedule.warmup_steps"), found.value("schedule.warmup_fraction")) == (7, None)


@pytest.mark.parametrize("key", ["group_by_length", "adafactor", "split_batches"])
def test_what_transformers_5_says_elsewhere_is_not_lost(key: str) -> None:
    assert verdicts("trainer", {**FOUR, key: True})[key].kind == "refused"


def test_a_least_rate_that_is_null_leaves_it_to_its_share() -> None:
    options = {"min_lr": None, "min_lr_rate": 0.1}
    document = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": options, "max_steps": 10}
    assert described("trainer", document).value("schedule.final_fraction") == 0.1


def test_a_schedule_without_warmup_ignores_it() -> None:
    outcomes = verdicts("trainer", {"lr_scheduler_type": "constant", "warmup_steps": 10})
    assert outcomes["warmup_steps"].kind == "refused"
    assert (
        described("trainer", {"lr_scheduler_type": "constant", "warmup_steps": 10}).value("schedule.warmup_steps") == 0
    )


@pytest.mark.parametrize(
    ("document", "key", "level"),
    [
        ({**FSDP, "deepspeed": ZERO}, "fsdp", "error"),
        ({**FSDP, "parallelism_config": {"sp_size": 2}}, "parallelism_config.sp_size", "error"),
        ({**FSDP, "gradient_checkpointing": True}, "activation_checkpointing", "warning"),
        ({**FSDP, "fsdp_config": {"version": 1}}, "fsdp_config.version", "warning"),
        ({**FSDP, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "fsdp_config.state_dict_type", "warning"),
        ({"distributed_config": {"fsdp_size": 2}}, "distributed_config", "error"),
        (
            {"deepspeed": {**ZERO, "gradient_clipping": 0.5}, "bf16": True},
            "deepspeed.gradient_clipping, max_grad_norm",
            "error",
        ),
    ],
)
def test_findings(document: dict[str, Any], key: str, level: str) -> None:
    assert findings_by_key("trainer", document)[key].level == level


# -- DeepSpeed inside ----------------------------------------------------------------------------------------------


def test_auto_inside_is_resolved_and_reported() -> None:
    document = DOCUMENTS["deepspeed"]
    description = described("trainer", document)
    assert description.row == "zero2"
    assert description["batch.micro_batch"].value == 4
    outcome = verdicts("trainer", document)["deepspeed.train_micro_batch_size_per_gpu"]
    assert outcome.kind == "defaulted"
    assert "per_device_train_batch_size" in outcome.why


def test_a_field_switches_on_the_section_of_16_bits_that_deepspeeds_document_lacks(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(BARE))
    for inner in (BARE, "ds.json"):
        document = {"deepspeed": inner, "bf16": True, "fp16": False}
        assert described("trainer", document, folder=tmp_path)["precision.compute"].keys == ("bf16",)
        assert {key.partition(".")[0] for key in verdicts("trainer", document, folder=tmp_path)} == set(document)
        assert_agrees_or_says("trainer", document, folder=tmp_path)
    off = {"deepspeed": {**BARE, "bf16": {"enabled": False}}, "bf16": True}
    assert described("trainer", off).value("precision.compute") == "fp32"
    assert "bf16" in str([*findings_by_key("trainer", off)])
    other = findings_by_key("trainer", {"deepspeed": {**BARE, "fp16": {"enabled": True}}, "bf16": True})
    assert any(finding.level == "error" for finding in other.values())


def test_an_optimizer_in_8_bits_is_the_trainers_unless_deepspeed_has_its_own() -> None:
    document = {**DOCUMENTS["deepspeed"], "optim": "adamw_8bit"}
    assert described("trainer", document).value("precision.moments") == "int8"
    assert verdicts("trainer", document)["optim"].kind == "lossy"
    named = {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    document = {**document, "deepspeed": named}
    assert described("trainer", document).value("precision.moments") == "fp32"
    assert "8 bits" not in verdicts("trainer", document)["optim"].why


@pytest.mark.parametrize(("name", "word"), [("AdamW", "adamw_8bit"), ("Lion", "lion_8bit")])
def test_moments_in_8_bits_are_another_optimizer(name: str, word: str) -> None:
    document = {"precision": {"name": "bf16-pure", "moments": "int8"}, "optimizer": {"name": name}}
    conversion = converted("terrazzo", "trainer", document)
    assert conversion.document["optim"] == word
    (moments,) = (each for each in conversion.verdicts if each.key == "precision.moments")
    assert (moments.kind, moments.target) == ("lossy", "optim")


@pytest.mark.parametrize(("target", "name"), [("trainer", "SGD"), ("accelerate", "AdamW")])
def test_no_model_is_loaded_in_8_bits_for_its_moments(target: str, name: str) -> None:
    precision = {"name": "bf16-pure", "moments": "int8"}
    outcomes = converted("terrazzo", target, {"precision": precision, "optimizer": {"name": name}}).verdicts
    (moments,) = (verdict for verdict in outcomes if verdict.key == "precision.moments")
    assert (moments.kind, moments.why.rpartition(": ")[2]) == ("lossy", "no setting makes it int8")


def test_files_that_are_named_are_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    (tmp_path / "fsdp.json").write_text(json.dumps({"cpu_offload": True, "fsdp_offload_params": True}))
    context = {"folder": tmp_path}
    deepspeed = {"output_dir": "x", "deepspeed": "ds.json", "bf16": True}
    assert described("trainer", deepspeed, **context).row == "zero2"
    assert_agrees_or_says("trainer", deepspeed, **context)
    fsdp = {**FSDP, "fsdp_config": "fsdp.json"}
    assert described("trainer", fsdp, **context).value("offload.weight") == "cpu"
    assert verdicts("trainer", fsdp, **context)["fsdp_config"].kind == "refused"  # for the key that is ignored
    missing = verdicts("trainer", {"output_dir": "x", "deepspeed": "no.json"}, **context)["deepspeed"]
    assert missing.kind == "refused"


@pytest.mark.parametrize(
    ("beside", "version", "mean", "warned"),
    [
        ({"warmup_ratio": 0.1}, "", "tokens", True),
        ({"warmup_ratio": 0.1}, "4.53", "rank_tokens", False),
        ({"warmup_ratio": 0.1, "average_tokens_across_devices": False}, "", "rank_tokens", False),
        ({"warmup_steps": 10}, "", "tokens", False),
        ({"warmup_steps": 10}, "4.53.1", "rank_tokens", False),
    ],
)
def test_tokens_of_all_ranks_are_averaged_since_transformers_4_54(
    beside: dict[str, Any], version: str, mean: str, warned: bool
) -> None:
    document, context = {"output_dir": "x", **beside}, {"versions": {"transformers": version} if version else {}}
    assert described("trainer", document, **context).value("training.loss_mean") == mean
    assert ("average_tokens_across_devices" in findings_by_key("trainer", document, **context)) is warned


@pytest.mark.parametrize(
    ("fsdp", "section", "version", "row", "warned"),
    [
        (True, {}, "", "zero3", False),
        ("full_shard auto_wrap", {}, "", "zero3", True),
        ("full_shard", {"version": 2}, "", "zero3", False),
        ("hybrid_shard", {}, "4.57.6", "hybrid_shard", False),
        ("shard_grad_op", {"version": 2}, "4.57.6", "shard_grad_op", False),
        (True, {}, "5.9.0", "zero3", False),
        (True, {}, "5.10.0", "zero3", False),
    ],
)
def test_fsdp_is_the_second_since_transformers_5_10(
    fsdp: Any, section: dict[str, Any], version: str, row: str, warned: bool
) -> None:
    """As `training_args.py` of 5.9.0 and 5.10.0 has it; that of 4.57.6 asks for no version and knows the first alone.

    There the words choose the strategy, by way of the environment.
    """
    document = {"output_dir": "x", "fsdp": fsdp, "fsdp_config": {"backward_prefetch": "backward_pre", **section}}
    context = {"versions": {"transformers": version} if version else {}}
    first = version in ("4.57.6", "5.9.0")
    outcome = verdicts("trainer", document, **context)
    assert (outcome["fsdp_config.backward_prefetch"].kind == "refused") is not first  # the second passes over it
    assert ("fsdp_config.version" in outcome and outcome["fsdp_config.version"].kind == "refused") is (
        first and bool(section)
    )
    assert described("trainer", document, **context).row == row
    assert ("fsdp_config.version" in findings_by_key("trainer", document, **context)) is warned


@pytest.mark.parametrize(
    ("fsdp", "section", "units", "tier"),
    [
        (True, {}, "none", "device"),
        ("full_shard auto_wrap", {}, "auto", "device"),
        ("full_shard auto_wrap offload", {"transformer_layer_cls_to_wrap": "Block"}, "classes", "cpu"),
        ("full_shard auto_wrap", {"min_num_params": 9}, "min_numel", "device"),
        ("full_shard", {"min_num_params": 9, "cpu_offload": True}, "none", "device"),
    ],
)
def test_words_alone_choose_units_and_offload_before_transformers_5_10(
    fsdp: Any, section: dict[str, Any], units: str, tier: str
) -> None:
    """As `training_args.py` of 5.9.0 has it, which passes `auto_wrap_policy` and `cpu_offload` of the section over."""
    document, context = {"output_dir": "x", "fsdp": fsdp, "fsdp_config": section}, {"versions": {"transformers": "5.9"}}
    description = described("trainer", document, **context)
    assert (description.value("units.policy"), description.value("offload.weight")) == (units, tier)
    refused = [key for key, each in verdicts("trainer", document, **context).items() if each.kind == "refused"]
    assert refused == ([f"fsdp_config.{key}" for key in section] if units == "none" else [])


def test_each_micro_batch_may_be_reduced_at_once() -> None:
    """Transformers 5.23 synchronises in each where Accelerate's plugin says sync_each_batch."""
    document = {**FSDP, "bf16": True, "gradient_accumulation_steps": 4}
    at_once = {**document, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    for told, kind in ((document, "bf16"), (at_once, "fp32")):
        assert described("trainer", told).value("precision.accumulate") == kind
    assert_agrees_or_says("trainer", at_once)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2},
        {"tp_size": 2, "dp_shard_size": 2},
        {"tp_size": 2, "dp_replicate_size": 2},
        {"cp_size": 2},
        {"dp_replicate_size": 2},
        {"cp_size": 2, "sp_size": 2, "dp_shard_size": 2},
    ],
)
def test_what_accelerate_refuses_of_axes_is_an_error(sizes: dict[str, int]) -> None:
    library = pytest.importorskip("accelerate.parallelism_config")
    ranks = math.prod(sizes.values())
    accelerator = types.SimpleNamespace(multi_device=True, num_processes=ranks, is_fsdp2=True)
    try:
        library.ParallelismConfig(**sizes)._validate_accelerator(accelerator)
        raised = False
    except ValueError:
        raised = True
    found = findings_by_key("trainer", {**FSDP, "parallelism_config": sizes})
    errors = [key for key, each in found.items() if key.startswith("parallelism_config") and each.level == "error"]
    assert bool(errors) is raised, found


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3@nvme"])
def test_what_fsdp_lacks_is_deepspeeds(plan: str) -> None:
    offload = {"offload": {"path": "/tmp/swap"}} if "nvme" in plan else {}
    conversion = converted("terrazzo", "trainer", {"plan": plan, "precision": "bf16", **offload}, world=8)
    assert conversion.after.row == plan.partition("@")[0]
    inner = conversion.document["deepspeed"]
    assert inner["bf16"]["enabled"] == "auto"
    assert not [key for key in findings_by_key("trainer", conversion.document) if key.startswith("deepspeed.")]


def test_a_deepspeed_file_is_looked_at_as_the_section_would_be(tmp_path: Path) -> None:
    inner = {"train_micro_batch_size_per_gpu": 3, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(inner))
    outer = {"per_device_train_batch_size": 4, "bf16": True}
    within = findings_by_key("trainer", {**outer, "deepspeed": inner})
    named = list(dialect("trainer").findings(*_read({**outer, "deepspeed": "ds.json"}, tmp_path)))
    assert {finding.text for finding in named} == {
        f"{key.partition(',')[0].removeprefix('deepspeed.')}: {finding.text}" for key, finding in within.items()
    }
    assert {finding.key.partition(", ")[0] for finding in named} == {"deepspeed"}
    assert within["deepspeed.train_micro_batch_size_per_gpu, per_device_train_batch_size"].level == "error"
    assert within["deepspeed.fp16.enabled"].level == "error"


def test_a_fsdp_file_is_looked_at_as_the_section_would_be(tmp_path: Path) -> None:
    section = {"fsdp_version": 1, "version": 2, "state_dict_type": "SHARDED_STATE_DICT"}  # the prefixed one counts
    (tmp_path / "fsdp.json").write_text(json.dumps(section))
    within = findings_by_key("trainer", {**FSDP, "fsdp_config": section})
    assert set(within) == {"fsdp_config.version", "fsdp_config.state_dict_type"}
    named = dialect("trainer").findings(*_read({**FSDP, "fsdp_config": "fsdp.json"}, tmp_path))
    assert {finding.key for finding in named} == set(within)


def _read(document: dict[str, Any], folder: Path) -> tuple[Reading, ReadingContext]:
    context = ReadingContext(folder=folder)
    return dialect("trainer").read(document, context), context


def test_numbers_that_are_text_differ_from_a_field_as_numbers_do() -> None:
    params = {"type": "AdamW", "params": {"lr": "1e-4"}}
    key = "deepspeed.optimizer.params.lr, learning_rate"
    assert key not in findings_by_key("trainer", {"deepspeed": {**ZERO, "optimizer": params}, "learning_rate": 1e-4})
    assert key in findings_by_key("trainer", {"deepspeed": {**ZERO, "optimizer": params}, "learning_rate": "5e-4"})


def test_sizes_that_distributed_config_decides_are_refused_elsewhere() -> None:
    document = {"distributed_config": {"fsdp_size": 4}, "parallelism_config": {"dp_shard_size": 8, "cp_size": 2}}
    outcomes = verdicts("trainer", document)
    assert outcomes["parallelism_config.dp_shard_size"].kind == "refused"
    assert outcomes["parallelism_config.cp_size"].kind == "applied"


# -- sequences split under DeepSpeed -------------------------------------------------------------------------------


def test_sequences_are_split_by_parallelism_config_alone() -> None:
    """transformers: data ranks are world // tp // cp // sp, all of them from there."""
    inner = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    loop = {"per_device_train_batch_size": 1, "bf16": True}
    split = {**loop, "deepspeed": inner, "parallelism_config": {"sp_size": 2, "dp_shard_size": 4}}
    description = described("trainer", split, world=8)
    assert (description.value("mesh.sp"), description.value("batch.global_batch")) == (2, 4)
    assert description["mesh.sp"].keys == ("parallelism_config.sp_size",)
    assert description.value("precision.reduce") == "fp32"  # seq_parallel_communication_data_type

    whole = {**loop, "deepspeed": {**inner, "sequence_parallel_size": 2}}
    description = described("trainer", whole, world=8)
    assert (description.value("mesh.sp"), description.value("batch.global_batch")) == (1, 8)
    outcome = verdicts("trainer", whole, world=8)["deepspeed.sequence_parallel_size"]
    assert (outcome.kind, "parallelism_config" in outcome.why) == ("lossy", True)
    for value, kind in ((None, "applied"), (1, "applied"), ("x", "refused")):
        document = {**loop, "deepspeed": {**inner, "sequence_parallel_size": value}}
        assert verdicts("trainer", document)["deepspeed.sequence_parallel_size"].kind == kind


@pytest.mark.parametrize("world", [8, None])
def test_ulysses_is_written_as_accelerate_registers_it(world: int | None) -> None:
    inner = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "zero_optimization": {"stage": 2}}
    conversion = converted("deepspeed", "trainer", inner, world=world)
    assert "sequence_parallel_size" not in conversion.document["deepspeed"]
    sizes = {"sp_size": 2, "sp_backend": "deepspeed"} | ({"dp_shard_size": 4} if world else {})
    assert conversion.document["parallelism_config"] == sizes
    assert conversion.after.value("mesh.sp") == 2
    outcome = next(verdict for verdict in conversion.verdicts if verdict.key == "sequence_parallel_size")
    assert (outcome.kind, "dp_shard_size" in outcome.why) == (("renamed", False) if world else ("lossy", True))


# -- the dataclass itself ------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes TrainingArguments, on a machine that says it has bf16."""
    pytest.importorskip("accelerate", reason="TrainingArguments need it for FSDP")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "false")  # so that what they set is taken back

    def make(document: dict[str, Any]) -> Any:
        plain = {
            key: value for key, value in document.items() if key not in ("parallelism_config", "distributed_config")
        }
        return transformers.TrainingArguments(**{"output_dir": str(tmp_path), **plain})

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "document"),
    [
        (
            "terrazzo",
            {"plan": "zero3", "precision": "bf16", "train": {"activation_checkpointing": "full", "clip": 0.5}},
        ),
        ("terrazzo", {"plan": "shard_grad_op", "schedule": {"name": "wsd"}, "optimizer": {"options": {"eps": 1e-6}}}),
        ("terrazzo", {"plan": "zero0", "schedule": {"name": "linear", "final_fraction": 0.1}}),
        ("fsdp1", {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": ["Block"], "forward_prefetch": True}),
        ("fsdp2", {"reshard_after_forward": False, "module": ["Block"], "offload_policy": "CPUOffloadPolicy"}),
        ("torchtitan", {"parallelism": {"data_parallel_shard_degree": -1}, "training": {"local_batch_size": 2}}),
        ("lightning", {"strategy": "fsdp", "precision": "16-mixed", "accumulate_grad_batches": 2}),
    ],
)
def test_training_arguments_take_what_is_written(source: str, document: dict[str, Any], arguments: Any) -> None:
    conversion = converted(source, "trainer", document, world=8)
    made = arguments(conversion.document)
    after = conversion.after
    assert made.per_device_train_batch_size == after.value("batch.micro_batch")
    assert made.learning_rate == after.value("optimizer.lr")
    assert (made.max_grad_norm or None) == after.value("training.clip")
    assert bool(made.bf16) == (after.value("precision.compute") == "bf16")
    plugin = getattr(made, "fsdp_plugin_args", None)
    assert (plugin is None) == (after.row == "zero0")
    if plugin is not None:
        words = {"zero3": True, "shard_grad_op": False, "hybrid_shard": True}
        assert plugin["reshard_after_forward"] == words[str(after.row)]
        assert plugin.get("cpu_offload", False) == (after.value("offload.weight") == "cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"fsdp": True, "bf16": True, "fsdp_config": {"cpu_offload": True}}])
def test_what_they_save_is_read_as_what_made_it(options: dict[str, Any], arguments: Any) -> None:
    saved = json.loads(arguments(options).to_json_string())
    outcome = reading("trainer", saved)
    assert [verdict for verdict in outcome.verdicts if verdict.kind in ("refused", "lossy")] == []
    made = described("trainer", {"output_dir": saved["output_dir"], **options})
    for path, setting in outcome.description.items():
        assert (path, setting.value) == (path, made[path].value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", [{"version": 1, "reshard_after_forward": True}, {"auto_wrap_policy": "X"}])
def test_what_is_refused_is_refused_by_them_too(section: dict[str, Any], arguments: Any) -> None:
    document = {**FSDP, "fsdp_config": section}
    assert "refused" in {verdict.kind for verdict in reading("trainer", document).verdicts}
    with pytest.raises((ValueError, KeyError)):
        _plugin(arguments(document))


def _plugin(made: Any) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(**made.fsdp_plugin_args)


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "document",
    [
        {**BEST, "eval_steps": 200, "save_steps": 300},
        {**BEST, "eval_steps": 200, "save_steps": 400},
        {**BEST, "eval_steps": 0.2, "save_steps": 300},
        {**BEST, "eval_steps": 0.1, "save_steps": 0.3},
        {**BEST, "save_steps": 300, "logging_steps": 7},
        {**BEST, "save_strategy": "epoch"},
        {**BEST, "save_strategy": "best", "eval_strategy": "no"},
        {"load_best_model_at_end": True},
        {"lr_scheduler_type": "Cosine"},
        {"save_strategy": "Steps"},
        {"bf16": True, "fp16": True},
        {"optim": "adamw"},
    ],
)
def test_what_training_arguments_raise_at_is_an_error(document: dict[str, Any], arguments: Any) -> None:
    try:
        arguments(document)
        raises = False
    except ValueError:
        raises = True
    outcome = reading("trainer", document)
    found = {finding.level for finding in dialect("trainer").findings(outcome, ReadingContext())}
    assert raises == ("error" in found or any(verdict.kind == "refused" for verdict in outcome.verdicts))


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("cosine_with_min_lr", {}),
    ("cosine_with_min_lr", {"min_lr": 0.1}),
    ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}),
    ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": None}),
    ("warmup_stable_decay", {"decay_type": "linear"}),
    ("warmup_stable_decay", {"decay_type": "linear", "num_decay_steps": 4}),
    ("polynomial", {"lr_end": 2.0}),
    ("polynomial", {"power": 1.0}),
]


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
def test_what_a_schedule_of_theirs_raises_at_is_an_error(name: str, options: dict[str, Any]) -> None:
    document = {"lr_scheduler_type": name, "lr_scheduler_kwargs": options}
    assert ("lr_scheduler_kwargs" in findings_by_key("trainer", document)) == (_rates(name, options) is None)


@pytest.mark.filterwarnings("ignore")  # num_stable_steps is taken with a warning
@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"num_cycles": 2}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}, {"warmup_type": "cosine"}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}, {"num_stable_steps": 2}),
        ("polynomial", {"lr_end": 0.1, "power": 1.0}, {"power": 2.0}),
        ("polynomial", {}, {"power": 2.0}),
        ("cosine", {}, {"num_cycles": 2}),
    ],
)
def test_an_argument_that_bends_the_curve_is_not_lost(name: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    assert _rates(name, options) != _rates(name, {**options, **more})  # it matters there
    for given, kind in ((options, "renamed"), ({**options, **more}, "lossy")):
        document = {"lr_scheduler_type": name, "lr_scheduler_kwargs": given, "max_steps": 20, "learning_rate": 1.0}
        outcomes = {verdict.key: verdict.kind for verdict in converted("trainer", "terrazzo", document).verdicts}
        assert outcomes["lr_scheduler_kwargs"] == (kind if given else "defaulted")
    text = {"lr_scheduler_type": name, "lr_scheduler_kwargs": json.dumps({**options, **more})}
    outcomes = {verdict.key: verdict.kind for verdict in converted("trainer", "terrazzo", text).verdicts}
    assert outcomes["lr_scheduler_kwargs"] == "lossy"


def _wsd(shape: str, final: float = 0.0) -> tuple[str, dict[str, Any]]:
    kwargs = {"decay_ratio": 0.4, "decay_type": shape, "min_lr_factor": final}
    return "torchtitan", {"training": {"steps": 20}, "lr_scheduler": {"warmup_steps": 3, **kwargs}}


def _ours(name: str, final: float = 0.0, **more: Any) -> tuple[str, dict[str, Any]]:
    schedule = {"name": name, "warmup_steps": 3, "final_fraction": final, **more}
    return "terrazzo", {"train": {"steps": 20}, "optimizer": {"lr": 1.0}, "schedule": schedule}


MEGATRON = {"lr": 1.0, "train-iters": 20, "lr-warmup-iters": 3, "lr-wsd-decay-iters": 8, "lr-decay-style": "WSD"}
WRITTEN: list[tuple[tuple[str, dict[str, Any]], str, int, float]] = [
    (_ours("constant"), "constant", 8, 0.0),
    (_ours("linear"), "linear", 17, 0.0),
    (_ours("linear", 0.1), "linear", 17, 0.1),
    (_ours("linear", 1.0), "constant", 17, 1.0),
    (_ours("cosine"), "cosine", 17, 0.0),
    (_ours("cosine", 0.1), "cosine", 17, 0.1),
    (_ours("wsd", 0.1, decay_steps=8), "linear", 8, 0.1),
    (_wsd("linear"), "linear", 8, 0.0),
    (_wsd("cosine", 0.1), "cosine", 8, 0.1),
    (_wsd("sqrt"), "sqrt", 8, 0.0),
    (
        ("torchtitan", {"training": {"steps": 20}, "lr_scheduler": {"warmup_steps": 3, "decay_type": "sqrt"}}),
        "sqrt",
        17,
        0.0,
    ),
    (("megatron", {**MEGATRON, "lr-wsd-decay-style": "minus_sqrt"}), "sqrt", 8, 0.0),
    (("megatron", {**MEGATRON, "lr-wsd-decay-style": "cosine", "min-lr": 0.1}), "cosine", 8, 0.1),
    (("megatron", MEGATRON), "linear", 8, 0.0),  # exponential, which there is not: said, and a line in its place
]
"""A document of another library's, and what the Trainer then does: the fall's shape and steps, and where it ends."""


@pytest.mark.parametrize(("source", "shape", "falling", "final"), WRITTEN)
def test_a_schedule_that_is_written_is_taken_by_transformers_and_has_that_curve(
    source: tuple[str, dict[str, Any]], shape: str, falling: int, final: float
) -> None:
    """By hand: warm-up from 0 (WSD's from the lowest share), and the fall of `t` from 0 to 1 behind the last step."""
    conversion = converted(source[0], "trainer", source[1])
    fields = conversion.document
    kind, options = fields.get("lr_scheduler_type", "linear"), fields.get("lr_scheduler_kwargs", {})
    falls: dict[str, Callable[[float], float]] = {
        "constant": lambda t: 1.0,
        "linear": lambda t: 1 - t,
        "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
        "sqrt": lambda t: 1 - math.sqrt(t),
    }
    least = final if kind == "warmup_stable_decay" else 0.0
    rise = [least + (1 - least) * step / 3 for step in range(3)]
    fall = [falls[shape](step / falling) for step in range(falling)]
    expected = [*rise, *[1.0] * (17 - falling), *(final + (1 - final) * share for share in fall)]
    assert (fields["warmup_steps"], fields["max_steps"]) == (3, 20)
    assert _rates(kind, options) == pytest.approx(expected, abs=1e-12)
    told = [*conversion.verdicts, *conversion.unsaid]
    lossy = {"schedule.decay_shape"} if source[1] is MEGATRON else set()
    assert {each.key for each in told if "decay_shape" in each.why or each.key == "schedule.decay_shape"} == lossy
    assert any("starts at min_lr_ratio" in each.why for each in told) is bool(least)


def test_a_line_that_does_not_fall_is_a_constant_rate() -> None:
    conversion = converted("terrazzo", "trainer", _ours("linear", 1.0)[1])
    assert conversion.document["lr_scheduler_type"] == "constant_with_warmup"
    assert "lr_scheduler_kwargs" not in conversion.document and not conversion.faults
    assert "schedule.name" not in {each.key for each in conversion.verdicts if each.kind == "lossy"}


@pytest.mark.parametrize("word", ["sqrt", "exponential", "1-sqrt", "linear", "cosine"])
def test_a_decay_that_transformers_has_not_is_refused(word: str) -> None:
    options = {"num_decay_steps": 4, "decay_type": word}
    document = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": options, "max_steps": 20}
    outcome = verdicts("trainer", document)["lr_scheduler_kwargs"]
    assert (outcome.kind == "refused") is (_rates("warmup_stable_decay", options) is None)
    assert outcome.kind != "refused" or "linear, cosine, 1-sqrt" in outcome.why


def test_a_square_root_is_one_curve_in_every_librarys_word() -> None:
    options = {"num_decay_steps": 8, "decay_type": "1-sqrt"}
    fields = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": options, "max_steps": 20}
    for target, key, word in (("torchtitan", "decay_type", "sqrt"), ("megatron", "lr-wsd-decay-style", "minus_sqrt")):
        conversion = converted("trainer", target, fields)
        assert conversion.document.get("lr_scheduler", conversion.document)[key] == word
        assert {each.key: each.kind for each in conversion.verdicts}["lr_scheduler_kwargs"] == "renamed", target


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("target", ["terrazzo", "torchtitan"])
def test_a_warm_up_from_the_lowest_rate_is_not_lost(target: str, warmup: int) -> None:
    options = {"num_decay_steps": 8, "decay_type": "linear", "min_lr_ratio": 0.1}
    fields = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": options, "max_steps": 20}
    outcome = {each.key: each for each in converted("trainer", target, {**fields, "warmup_steps": warmup}).verdicts}
    assert ("schedule.warmup_start" in outcome["lr_scheduler_kwargs"].why) is bool(warmup)


def _rates(name: str, options: dict[str, Any]) -> list[float] | None:
    """The rates of a run of 20 steps by transformers itself; None where it raises."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        schedule = transformers.get_scheduler(name, optimizer, 3, 20, scheduler_specific_kwargs=options)
    except (TypeError, ValueError):
        return None
    rates = []
    for _ in range(20):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


def test_the_best_checkpoint_at_the_end_is_another_result() -> None:
    document = {"output_dir": "x", **BEST, "eval_steps": 500}
    outcomes = {verdict.key: verdict for verdict in converted("trainer", "terrazzo", document).verdicts}
    assert outcomes["load_best_model_at_end"].kind == "lossy"


def test_keys_of_fsdp_config_are_those_that_transformers_reads() -> None:
    source = Path(transformers.training_args.__file__).read_text()
    body = source[source.index("def _process_fsdp_args") : source.index("def _apply_legacy_fsdp_to_config")]
    for name in FSDP_KEYS:
        assert f'"{name}"' in body, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [1, 2])
def test_defaults_of_fsdp_config_are_what_transformers_passes_on(version: int, arguments: Any) -> None:
    passed = arguments({"fsdp": True, "fsdp_config": {"version": version}}).fsdp_plugin_args
    words = {"version": version, "reshard_after_forward": True if version == 2 else "full_shard"}
    assert passed.pop("fsdp_version") == version
    assert passed == {name: words.get(name, FSDP_KEYS[name].default) for name in passed}
    assert {*passed} >= {*(FSDP_VERSION_1 if version == 1 else ()), "auto_wrap_policy"} - {"limit_all_gathers"}


def test_context_resolves_sizes() -> None:
    description = dialect("trainer").read({"output_dir": "x"}, ReadingContext(world=8)).description
    assert description.value("batch.micro_batch") == 8


@pytest.mark.parametrize(
    ("written", "every", "kinds"),
    [
        ({"save_steps": 0.12, "max_steps": 50}, 6, ["applied", "applied"]),
        ({"save_steps": 0.125, "max_steps": 50}, 7, ["applied", "applied"]),
        ({"save_steps": 0, "max_steps": 50}, None, ["applied", "applied"]),
        ({"save_steps": 2.5, "max_steps": 50}, 2, ["refused", "applied"]),
    ],
)
def test_a_share_of_the_run_between_checkpoints_is_as_many_steps_as_the_trainer_makes_of_it(
    written: dict[str, Any], every: int | None, kinds: list[str], tmp_path: Path
) -> None:
    description = described("trainer", written)
    assert description["saving.when"].origin == "file" and description.value("saving.every") == every
    assert description.value("saving.when") == ("steps" if every else "never")
    assert [verdict.kind for verdict in reading("trainer", written).verdicts] == kinds
    if "refused" in kinds:
        with pytest.raises(ValueError, match="must be an integer if bigger than 1"):
            transformers.TrainingArguments(tmp_path, **written, use_cpu=True)
        return
    state = transformers.TrainerState()
    state.compute_steps(transformers.TrainingArguments(tmp_path, **written, use_cpu=True), written["max_steps"])
    assert state.save_steps == (every or 0)


def test_a_number_as_text_is_held_against_deepspeeds_as_a_number() -> None:
    document = {"max_grad_norm": "1.0", "deepspeed": {"zero_optimization": {"stage": 2}}}
    assert verdicts("trainer", document)["max_grad_norm"].kind == "applied"
    document["max_grad_norm"] = "0.5"
    assert "clips at its own" in verdicts("trainer", document)["max_grad_norm"].why


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_lags_are_those_of_hugging_faces_schedules(kind: str) -> None:
    steps, warmup = 20, 5
    fields = {"output_dir": "x", "lr_scheduler_type": kind, "warmup_steps": warmup, "max_steps": steps}
    description = described("trainer", fields)
    rise, end = (description.value(f"schedule.{name}_lag") for name in ("warmup", "decay"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_scheduler(kind, optimizer, warmup, steps)
    shares = [schedule.lr_lambdas[0](step) for step in range(steps + 1)]
    assert shares[:warmup] == [pytest.approx(max(0, step + 1 - rise) / warmup) for step in range(warmup)]
    assert shares[steps - 1 + end] == pytest.approx(0, abs=1e-12)
    assert shares[steps - 2 + end] > 1e-3
    became = {each.key: each for each in converted("trainer", "terrazzo", fields).verdicts}
    assert (became["warmup_steps"].kind, became["lr_scheduler_type"].kind) == ("lossy", "lossy")
    assert "1/5 of the peak here, and there the rate is zero for 1 step" in became["warmup_steps"].why


def test_weight_decay_says_what_it_is_for() -> None:
    """Hugging Face's Trainer decays no norm and no bias; DeepSpeed's optimizer is given one group of all."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    deepspeed = {"train_micro_batch_size_per_gpu": 1, "optimizer": adamw}
    assert converted("deepspeed", "terrazzo", deepspeed).document["optimizer"]["decay"] == "all"
    fields = {"output_dir": "x", "weight_decay": 0.1}
    assert "decay" not in converted("trainer", "terrazzo", fields).document["optimizer"]
    across = {path.key: path.why for path in converted("trainer", "deepspeed", fields).unsaid}
    asked = "in DeepSpeed all parameters have weight decay; asked was: norms and biases have no weight decay"
    assert across["optimizer.decay"] == asked
    unasked = {path.key for path in converted("trainer", "deepspeed", {"output_dir": "x"}).unsaid}
    assert "optimizer.decay" not in unasked


@pytest.mark.parametrize("given", [{}, {"adam_beta1": 0.8, "adam_beta2": 0.97}])
@pytest.mark.parametrize(("word", "name"), [("lion_32bit", "Lion"), ("ademamix", "AdEMAMix")])
def test_optimizers_of_bitsandbytes_are_given_what_ours_are(
    word: str, name: str, given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers itself says what it would hand to bitsandbytes, of which the classes alone are stubs."""
    stub = types.ModuleType("bitsandbytes.optim")
    for each in ("AdamW", "Lion", "RMSprop", "AdEMAMix"):
        setattr(stub, each, type(each, (), {}))
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", stub)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: True)
    args = types.SimpleNamespace(**{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, **given}, optim=word)
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    context = types.SimpleNamespace(args=args, adam_kwargs=adam, optim_args={}, optimizer_kwargs={})
    kind, theirs = trainer_optimizer._get_bitsandbytes_optimizer(context)
    conversion = converted("trainer", "terrazzo", {"optim": word, "output_dir": "x", **given})
    ours = conversion.document["optimizer"]
    assert (kind.__name__, ours["name"]) == (name, name)
    chosen = getattr(tz.optim, name)([torch.nn.Parameter(torch.zeros(1))], **ours.get("options", {})).defaults
    for key in ("betas", "eps", "alpha"):
        mine = tuple(chosen[key]) if key == "betas" else chosen.get(key)
        assert mine == theirs.get(key), key
    told = {each.key: each.kind for each in (*conversion.verdicts, *conversion.unsaid)}
    assert told["optim"] == "renamed" and {"lossy", "refused"}.isdisjoint(told[key] for key in given)
    assert not any(key.startswith("optimizer.") and key != "optimizer.decay" for key in told)
    back = converted("terrazzo", "trainer", conversion.document)
    assert back.document["optim"] == word
    assert {key: back.document[key] for key in given} == given
    assert not any(
        each.key.startswith("optimizer") and each.kind in ("lossy", "refused")
        for each in (*back.verdicts, *back.unsaid)
    )


def test_what_our_own_optimizers_say_beyond_theirs_is_not_lost() -> None:
    document = {"optimizer": {"name": "AdEMAMix", "options": {"betas": [0.9, 0.99, 0.999], "alpha": 3.0}}}
    conversion = converted("terrazzo", "trainer", document)
    (told,) = (each for each in conversion.verdicts if each.key.startswith("optimizer.options"))
    assert (told.kind, conversion.document["adam_beta2"]) == ("lossy", 0.99)
    assert "betas, alpha" in told.why
    lion = verdicts("trainer", {"optim": "lion_32bit", "adam_epsilon": 1e-6})["adam_epsilon"]
    assert (lion.kind, "Lion does not read it" in lion.why) == ("refused", True)


def test_a_share_of_warm_up_is_rounded_up_as_transformers_rounds_it() -> None:
    fields = {"per_device_train_batch_size": 1, "warmup_steps": 0.014, "max_steps": 300, "optim": "adamw_torch"}
    fields["lr_scheduler_type"] = "constant_with_warmup"
    theirs = transformers.TrainingArguments(output_dir="x", warmup_steps=0.014).get_warmup_steps(300)
    assert theirs == 5  # 4.2 steps
    for name in ("terrazzo", "torchtitan", "deepspeed"):
        assert converted("trainer", name, fields).after.value("schedule.warmup_steps") == theirs, name
