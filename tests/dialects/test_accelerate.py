"""What Accelerate's YAML means under `accelerate launch`, and the traps in it, as its own launcher shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.formats.accelerate.dialect import DIALECT
from terrazzo.dialects.formats.accelerate.launch_environment import launched_document
from terrazzo.dialects.registry import recognise
from terrazzo.dialects.verbs.convert import convert_reading
from terrazzo.errors import BadInput
from tests.dialects.peers import assert_agrees_or_says, converted, described
from tests.helpers.launched import launched, plugin

COMMON = {"compute_environment": "LOCAL_MACHINE", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16"}


def fsdp(version: int = 2, **keys: Any) -> dict[str, Any]:
    section = {"fsdp_version": version, **{f"fsdp_{name}": value for name, value in keys.items()}}
    return {**COMMON, "distributed_type": "FSDP", "fsdp_config": section}


def deepspeed(**keys: Any) -> dict[str, Any]:
    return {**COMMON, "distributed_type": "DEEPSPEED", "deepspeed_config": keys}


def sizes(**axes: int) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{axis}_size": size for axis, size in axes.items()}}


def read(document: dict[str, Any], context: ReadingContext = NO_CONTEXT) -> Description:
    return DIALECT.read(document, context).description


def verdict(document: dict[str, Any], key: str) -> KeyVerdict:
    return next(each for each in DIALECT.read(document).verdicts if each.key == key)


def values(description: Description, section: str, *names: str) -> list[Any]:
    return [description.value(f"{section}.{name}") for name in names]


def findings(document: dict[str, Any], level: str = "error") -> dict[str, str]:
    own_findings = DIALECT.findings(DIALECT.read(document), NO_CONTEXT)
    return {each.key: each.text for each in own_findings if each.level == level}


def test_variables_of_others_are_no_keys_and_bad_values_are_named() -> None:
    on = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    told = launched_document({**on, "FSDP_DEBUG_LEVEL": "3", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"})
    assert told["fsdp_config"] == {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Block"}
    with pytest.raises(BadInput, match="FSDP_STATE_DICT_TYPE"):
        launched_document({**on, "FSDP_STATE_DICT_TYPE": "*name"})


@pytest.mark.parametrize("path", ["/tmp/run #3/ds.json", "a: b", "[a]"])
def test_text_of_a_variable_has_no_comments_and_no_sections(path: str) -> None:
    told = launched_document({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": path})
    assert told["deepspeed_config"] == {"deepspeed_config_file": path}


def test_a_file_that_says_its_backend_is_no_training_arguments() -> None:
    document = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, **sizes(dp_shard=8)}
    assert recognise(document, "a.yaml") is DIALECT


def test_a_misspelt_word_is_answered_in_the_spelling_of_the_file() -> None:
    outcome = verdict(fsdp(1, sharding_strategy="FULL_SHART"), "fsdp_config.fsdp_sharding_strategy").why
    words = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, 1, 2, 3, 4, 5"
    assert outcome == f"it is 'FULL_SHART', expected one of {words}. Did you mean 'FULL_SHARD'?"


# -- profiles in the shapes that questionnaires and training libraries write -----------------------------------------

_PROFILE = {
    **COMMON,
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
_FSDP1 = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": True,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
    "fsdp_version": 1,
}
_FSDP2 = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_version": 2,
}
_ZERO3 = {
    "deepspeed_multinode_launcher": "standard",
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
PROFILES = {
    "fsdp1": ({"distributed_type": "FSDP", "fsdp_config": _FSDP1}, "zero3"),
    "fsdp2": ({"distributed_type": "FSDP", "fsdp_config": _FSDP2}, "zero3"),
    "zero1": ({"distributed_type": "DEEPSPEED", "deepspeed_config": {**_ZERO3, "zero_stage": 1}}, "zero1"),
    "zero3": ({"distributed_type": "DEEPSPEED", "deepspeed_config": _ZERO3}, "zero3"),
    "ddp": ({"distributed_type": "MULTI_GPU", "gpu_ids": "all"}, "zero0"),
}


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_read_and_written_again(name: str) -> None:
    engine, row = PROFILES[name]
    document = {**_PROFILE, **engine}
    assert DIALECT.recognises(document)
    reading = DIALECT.read(document)
    assert not [each for each in reading.verdicts if each.kind == "refused"]
    assert reading.description.row == row
    assert_agrees_or_says("accelerate", document)


# -- FSDP ----------------------------------------------------------------------------------------------------------


def test_the_mesh_of_version_2_makes_replicas() -> None:
    assert read(fsdp() | sizes(dp_replicate=2, dp_shard=4)).row == "hybrid_shard"
    assert read(fsdp(reshard_after_forward=False) | sizes(dp_replicate=2, dp_shard=4)).row == "hybrid_shard_zero2"
    assert values(read(fsdp() | sizes(dp_shard=2, tp=4)), "mesh", "dp_shard", "tp", "cp") == [2, 4, 1]
    assert read(fsdp())["mesh.dp_shard"].value is None


@pytest.mark.parametrize(
    ("strategy", "row"), [("HYBRID_SHARD", "zero3"), (4, "zero3"), ("HYBRID_SHARD_ZERO2", "shard_grad_op")]
)
def test_hybrid_sharding_on_a_single_node_is_full_sharding(strategy: str | int, row: str) -> None:
    document = fsdp(1, sharding_strategy=strategy)
    assert read(document).row == row
    assert verdict(document, "fsdp_config.fsdp_sharding_strategy").kind == "renamed"
    assert read({**document, "num_machines": 2}).row == f"hybrid_shard{'_zero2' * (row == 'shard_grad_op')}"
    assert described("accelerate", document).value("mesh.dp_replicate") == 1
    assert converted("accelerate", "accelerate", document).document == document
    conversion = converted("accelerate", "terrazzo", document)
    assert conversion.document["plan"]["name"] == row
    assert "refused" not in {each.kind for each in conversion.verdicts}


@pytest.mark.parametrize(
    ("half", "expected"),
    [
        ("bf16", "fp32 bf16 bf16 fp32 fp32 fp32 fp32 fp32"),
        ("fp16", "fp32 fp16 fp16 fp32 fp32 fp32 fp32 fp32"),
        ("fp8", "fp32 bf16 bf16 fp32 fp32 fp32 fp32 fp32"),
        ("no", "loaded loaded loaded loaded loaded loaded loaded None"),
    ],
)
def test_every_dtype_of_fsdp_is_pinned(half: str, expected: str) -> None:
    """Trainable weights are lifted to fp32; gradients travel in 16 bits."""
    description = read(fsdp() | {"mixed_precision": half})
    names = ("weight", "compute", "reduce", "accumulate", "master", "moments", "saved", "output")
    assert [str(value) for value in values(description, "precision", *names)] == expected.split()


def test_replicas_run_under_autocast() -> None:
    description = read({**COMMON, "distributed_type": "MULTI_GPU"})
    assert values(description, "precision", "autocast", "compute", "weight") == [True, "bf16", "loaded"]
    one = {**COMMON, "distributed_type": "NO"}
    assert read(one, ReadingContext(load_dtype="fp32")).value("precision.weight") == "fp32"


# -- traps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"])
def test_version_2_passes_over_a_strategy(strategy: str, tmp_path: Path) -> None:
    """Replication vanishes, and NO_SHARD becomes sharded, without a word from Accelerate."""
    document = fsdp(sharding_strategy=strategy)
    assert read(document).row == "zero3"
    outcome = verdict(document, "fsdp_config.fsdp_sharding_strategy")
    assert outcome.kind == "refused"
    assert ("parallelism_config" if strategy != "NO_SHARD" else "MULTI_GPU") in outcome.why
    assert plugin(launched(document, tmp_path)).reshard_after_forward is True


def test_version_1_passes_over_reshard(tmp_path: Path) -> None:
    """`accelerate config` asks for a strategy, writes it as fsdp_reshard_after_forward, and FULL_SHARD runs."""
    document = fsdp(1, reshard_after_forward="SHARD_GRAD_OP")
    outcome = verdict(document, "fsdp_config.fsdp_reshard_after_forward")
    assert (outcome.kind, "fsdp_sharding_strategy: SHARD_GRAD_OP" in outcome.why) == ("refused", True)
    assert plugin(launched(document, tmp_path)).sharding_strategy.name == "FULL_SHARD"
    assert read(document).row == "zero3"


def test_no_prefetch_is_the_default_of_version_1(tmp_path: Path) -> None:
    """Torch's own default is BACKWARD_PRE."""
    document = fsdp(1)
    assert read(document).value("prefetch.backward") == 0
    assert "fsdp_config.fsdp_backward_prefetch" in findings(document, "warning")
    assert plugin(launched(document, tmp_path)).backward_prefetch is None
    assert read(fsdp(1, backward_prefetch="BACKWARD_PRE")).value("prefetch.backward") == 1
    assert read(fsdp(2)).value("prefetch.backward") == 1


def test_the_launchers_defaults_hold_not_the_plugins(tmp_path: Path) -> None:
    document = fsdp(1, auto_wrap_policy="SIZE_BASED_WRAP")
    description = read(document)
    made = plugin(launched(document, tmp_path))
    assert description.value("loading.low_memory") is made.cpu_ram_efficient_loading is True
    assert description.value("loading.broadcast") is made.sync_module_states is True
    assert description.value("units.min_numel") == made.min_num_params == 10**8
    assert description.value("saving.state") == "full"
    assert made.state_dict_type.name == "FULL_STATE_DICT"
    assert read(fsdp(2)).value("saving.state") == "sharded"


def test_the_default_stage_is_2(tmp_path: Path) -> None:
    document = deepspeed(gradient_accumulation_steps=4)
    assert read(document).row == "zero2"
    assert "DeepSpeed itself takes 0" in findings(document, "warning")["deepspeed_config.zero_stage"]
    assert plugin(launched(document, tmp_path)).zero_stage == 2


def test_a_folder_for_nvme_does_not_arrive(tmp_path: Path) -> None:
    document = deepspeed(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/nvme")
    outcome = verdict(document, "deepspeed_config.offload_optimizer_nvme_path")
    assert (outcome.kind, "folder named 'none'" in outcome.why) == ("lossy", True)
    assert values(read(document), "offload", "optim", "path") == ["nvme", ("/nvme",)]
    made = plugin(launched(document, tmp_path)).deepspeed_config
    assert made["zero_optimization"]["offload_optimizer"]["nvme_path"] == "none"


def test_clipping_by_0_does_not_arrive(tmp_path: Path) -> None:
    """The plugin leaves a 0 out, and DeepSpeed then clips at 1.0."""
    document = deepspeed(zero_stage=2, gradient_clipping=0.0)
    assert read(document).value("training.clip") == 1.0
    assert verdict(document, "deepspeed_config.gradient_clipping").kind == "lossy"
    assert "gradient_clipping" not in plugin(launched(document, tmp_path)).deepspeed_config


def test_the_compiler_is_not_told_to_deepspeed(tmp_path: Path) -> None:
    compiled = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    assert read({**COMMON, "distributed_type": "MULTI_GPU", **compiled}).value("training.compile") is True
    document = deepspeed(zero_stage=2) | compiled
    assert read(document).value("training.compile") is False
    assert verdict(document, "dynamo_config.dynamo_backend").kind == "refused"
    assert "ACCELERATE_DYNAMO_BACKEND" not in launched(document, tmp_path)


@pytest.mark.parametrize(
    ("document", "key", "meant"),
    [
        (
            fsdp(1, backward_prefetch_policy="BACKWARD_PRE"),
            "fsdp_config.fsdp_backward_prefetch_policy",
            "fsdp_backward_prefetch",
        ),
        (fsdp(offload_parms=True), "fsdp_config.fsdp_offload_parms", "fsdp_offload_params"),
        (deepspeed(zero_stag=3), "deepspeed_config.zero_stag", "zero_stage"),
        (
            fsdp() | {"parallelism_config": {"dp_shard_size": 8}},
            "parallelism_config.dp_shard_size",
            "parallelism_config_dp_shard_size",
        ),
        (
            {**COMMON, "fp8_config": {"amax_history_length": 8}},
            "fp8_config.amax_history_length",
            "fp8_amax_history_len",
        ),
    ],
)
def test_dropped_keys_name_what_was_meant(document: dict[str, Any], key: str, meant: str) -> None:
    outcome = verdict(document, key)
    assert outcome.kind == "refused"
    assert "without a word" in outcome.why
    assert meant in outcome.why


def test_a_key_counts_with_and_without_its_prefix() -> None:
    document = {**COMMON, "distributed_type": "FSDP", "fsdp_config": {"version": 2, "offload_params": True}}
    assert values(read(document), "offload", "weight", "grad", "optim") == ["cpu", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"num_processes": 1}, "distributed_type"),
        (fsdp(1) | sizes(dp_shard=8), "fsdp_config.fsdp_version"),
        (fsdp() | sizes(tp=8), "parallelism_config.parallelism_config_dp_shard_size"),
        (fsdp() | sizes(dp_shard=2, cp=2, sp=2), "parallelism_config.parallelism_config_cp_size"),
        (fsdp() | sizes(dp_replicate=4, tp=2), "parallelism_config.parallelism_config_dp_shard_size"),
        (fsdp(activation_checkpointing_offload=True), "fsdp_config.fsdp_activation_checkpointing_offload"),
        (fsdp(1, sync_module_states=False), "fsdp_config.fsdp_sync_module_states"),
        (fsdp(state_dict_type="LOCAL_STATE_DICT"), "fsdp_config.fsdp_state_dict_type"),
        (deepspeed(deepspeed_config_file="ds.json"), "mixed_precision"),
    ],
)
def test_combinations_that_fail_later_are_errors_now(document: dict[str, Any], key: str) -> None:
    assert key in findings(document)


def test_no_without_quotes_is_false() -> None:
    document = yaml.safe_load("distributed_type: NO\nmixed_precision: no\n")
    kinds = {each.key: each.kind for each in DIALECT.read(document).verdicts}
    assert kinds == {"distributed_type": "refused", "mixed_precision": "refused"}
    assert all("in quotes" in verdict(document, key).why for key in kinds)


# -- a DeepSpeed file ----------------------------------------------------------------------------------------------


def test_a_deepspeed_file_is_read_in_its_place(tmp_path: Path) -> None:
    inner = {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(inner))
    document = deepspeed(deepspeed_config_file="ds.json", zero_stage=2)
    del document["mixed_precision"]
    context = ReadingContext(folder=tmp_path)
    reading = DIALECT.read(document, context)
    assert reading.description.row == "zero3"
    assert reading.description["precision.compute"].key == "deepspeed_config.deepspeed_config_file"
    kinds = {each.key: each for each in reading.verdicts}
    assert kinds["deepspeed_config.zero_stage"].kind == "refused"
    assert "zero_quantized_nontrainable_weights" in kinds["deepspeed_config.deepspeed_config_file"].why
    conversion = convert_reading(DIALECT, reading, DIALECT, context)
    assert conversion.document["deepspeed_config"] == {"deepspeed_config_file": "ds.json"}  # without what is refused


@pytest.mark.parametrize("name", ["absent.json", "../../../../etc/hostname", ""])
def test_a_file_that_cannot_be_read_is_a_verdict(name: str, tmp_path: Path) -> None:
    reading = DIALECT.read(deepspeed(deepspeed_config_file=name), ReadingContext(folder=tmp_path))
    kinds = {each.key: each.kind for each in reading.verdicts}
    assert kinds["deepspeed_config.deepspeed_config_file"] == "refused"
