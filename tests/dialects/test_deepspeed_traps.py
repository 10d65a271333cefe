"""What in DeepSpeed's JSON is not as it looks: releases, typing errors, "auto", and keys that mean something else."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.formats.deepspeed.dialect import DIALECT
from terrazzo.dialects.formats.deepspeed.versions import REMOVED

SIZE = {"train_micro_batch_size_per_gpu": 1}


def read(document: dict[str, Any], context: ReadingContext = NO_CONTEXT) -> Description:
    return DIALECT.read(document, context).description


def verdict(document: dict[str, Any], key: str, **versions: str) -> KeyVerdict:
    reading = DIALECT.read(document, ReadingContext(versions=versions))
    return next(each for each in reading.verdicts if each.key == key)


def values(description: Description, section: str, *names: str) -> list[Any]:
    return [description.value(f"{section}.{name}") for name in names]


def findings(document: dict[str, Any], context: ReadingContext = NO_CONTEXT) -> dict[str, str]:
    return {each.key: each.level for each in DIALECT.findings(DIALECT.read(document, context), context)}


def zero(stage: int | str, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


# -- releases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "clip", "pinned"), [("0.18.9", None, False), ("0.19.3", 1.0, False), ("", 1.0, True)]
)
def test_defaults_moved(version: str, clip: float | None, pinned: bool) -> None:
    context = ReadingContext(versions={"deepspeed": version} if version else {})
    document = zero(2, offload_optimizer={"device": "cpu"})
    assert read(document, context).value("training.clip") == clip
    assert read(document, context).value("offload.pin") is pinned
    assert ("gradient_clipping" in findings(document, context)) is (clip is not None)


@pytest.mark.parametrize(
    ("version", "moved"),
    [
        ("0.17.5", set()),
        ("0.17.6", {"data_types.grad_accum_dtype"}),
        ("0.19.3", {"data_types.grad_accum_dtype", "gradient_clipping", "bf16.check_grad_overflow"}),
    ],
)
def test_a_default_that_has_moved_is_said_where_numbers_depend_on_it(version: str, moved: set[str]) -> None:
    context = ReadingContext(versions={"deepspeed": version})
    bf16 = SIZE | {"bf16": {"enabled": True}}
    assert set(findings(bf16, context)) == moved
    assert set(findings(bf16 | {"zero_optimization": {"stage": 1}}, context)) == moved - {"data_types.grad_accum_dtype"}
    assert set(findings(SIZE | {"fp16": {"enabled": True}}, context)) == moved & {"gradient_clipping"}
    told = {"bf16": {"enabled": True, "check_grad_overflow": False}, "data_types": {"grad_accum_dtype": "bf16"}}
    if moved:
        assert not findings(SIZE | told | {"gradient_clipping": 0.0}, context)


@pytest.mark.parametrize(("version", "refused"), [("0.17.5", "bf16"), ("0.17.6", "fp32")])
def test_bf16_without_zero_was_summed_in_fp32_alone(version: str, refused: str) -> None:
    """`get_data_types` and the checks beside it, before and after DeepSpeed's #7515."""
    context = ReadingContext(versions={"deepspeed": version})
    low = SIZE | {"bf16": {"enabled": True}}
    taken = {"bf16": "fp32", "fp32": "bf16"}[refused]
    assert read(low, context).value("precision.accumulate") == taken
    assert read(low | {"zero_optimization": {"stage": 1}}, context).value("precision.accumulate") == "bf16"
    said = {kind: findings(low | {"data_types": {"grad_accum_dtype": kind}}, context) for kind in ("bf16", "fp32")}
    assert ["data_types.grad_accum_dtype" in said[kind] for kind in (taken, refused)] == [False, True]


def test_a_release_whose_defaults_are_not_known_is_warned_of() -> None:
    assert findings(SIZE, ReadingContext(versions={"deepspeed": "0.16.9"}))[""] == "warning"
    assert "" not in findings(SIZE, ReadingContext(versions={"deepspeed": "0.17.0"}))


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_removed_keys_are_explained_and_their_file_is_refused(key: str) -> None:
    section, _, name = key.rpartition(".")
    value = 4 if name == "mics_shard_size" else True
    document: dict[str, Any] = {
        **SIZE,
        **({section: {"stage": 3, name: value}} if section else {key: {"enabled": True}}),
    }
    if key in ("sparse_gradients", "graph_harvesting"):
        document[key] = True
    outcome = next(each for each in DIALECT.read(document).verdicts if each.key.startswith(key))
    assert outcome.kind == ("renamed" if "mics_shard_size" in key else "refused")
    assert (findings(document).get(key) == "error") is (outcome.kind != "refused")  # one of them says it
    pytest.importorskip("deepspeed", reason="DeepSpeed's loader is the oracle")
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError):
        DeepSpeedConfig(copy.deepcopy(document))


def test_a_removed_key_that_is_switched_off_costs_nothing() -> None:
    document = SIZE | {"elasticity": {"enabled": False, "max_train_batch_size": 2000}}
    outcome = verdict(document, "elasticity.max_train_batch_size")
    assert (outcome.kind, "It is switched off" in outcome.why) == ("defaulted", True)


# -- typing errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "key", "meant"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage", "zero_optimization"),
        ({"gradient_cliping": 0.5}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimization": {"reduce_bucket": 1}}, "zero_optimization.reduce_bucket", "reduce_bucket_size"),
        ({"aio": {"thread_count": 2}}, "aio.thread_count", "intra_op_parallelism"),
        ({"fp32_allreduce": True}, "fp32_allreduce", "communication_data_type"),
    ],
)
def test_typing_errors_name_what_was_meant(document: dict[str, Any], key: str, meant: str) -> None:
    outcome = verdict(document, key)
    assert outcome.kind == "refused"
    assert meant in outcome.why


def test_a_misspelt_section_trains_unsharded() -> None:
    """DeepSpeed takes the file and shards nothing: the reader says so, and reads it as DeepSpeed does."""
    pytest.importorskip("deepspeed", reason="DeepSpeed's loader is the oracle")
    from deepspeed.runtime.config import DeepSpeedConfig

    document = SIZE | {"zero_optimisation": {"stage": 3}}
    assert DeepSpeedConfig(dict(document)).zero_config.stage == 0
    assert read(document).row == "zero0"
    assert "ignores it without a word" in verdict(document, "zero_optimisation.stage").why


# -- "auto" --------------------------------------------------------------------------------------------------------

_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
_FIELDS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "learning_rate": 2e-4,
    "weight_decay": 0.05,
    "max_grad_norm": 0.7,
    "bf16": True,
    "max_steps": 200,
    "warmup_steps": 0.1,
}


def test_auto_is_what_transformers_makes_of_it() -> None:
    for library in ("deepspeed", "accelerate"):
        pytest.importorskip(library, reason="transformers' own rules are the oracle, and want it")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = HfTrainerDeepSpeedConfig(copy.deepcopy(_AUTO))
    defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "fp16": False, "fp16_full_eval": False}
    arguments = SimpleNamespace(
        **{**defaults, **_FIELDS},
        world_size=8,
        bf16_full_eval=False,
        save_on_each_node=False,
        get_warmup_steps=lambda n: 20,
    )
    config.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=96))
    config.trainer_config_finalize(arguments, model, 200)
    context = ReadingContext(world=8, hidden_size=96, trainer=_FIELDS)
    filled, ours = read(config.config, context), read(_AUTO, context)
    for path in ("batch.global_batch", "batch.micro_batch", "batch.accumulation", "training.clip", "optimizer.lr"):
        assert ours.value(path) == filled.value(path), path
        assert ours[path].origin == "auto"
    for path in ("optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "precision.compute"):
        assert ours.value(path) == filled.value(path), path
    for path in ("schedule.warmup_steps", "schedule.total_steps"):
        assert ours.value(path) == filled.value(path), path
    section = config.config["zero_optimization"]
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        key = f"zero_optimization.{name}"
        reason = next(each.why for each in DIALECT.read(_AUTO, context).verdicts if each.key == key)
        assert reason.endswith(f": {section[name]}")


def test_auto_that_nobody_fills_stays_open_and_is_reported() -> None:
    """DeepSpeed itself fails on it at the top, and drops it below."""
    description = read(_AUTO)
    assert (description["optimizer.lr"].value, description["optimizer.lr"].origin) == (None, "auto")
    assert "not known here" in verdict(_AUTO, "train_batch_size").why
    assert findings(_AUTO)["train_batch_size"] == "warning"
    assert verdict({"wall_clock_breakdown": "auto"}, "wall_clock_breakdown").kind == "refused"
    pytest.importorskip("deepspeed", reason="DeepSpeed's loader is the oracle")
    from deepspeed.runtime.config import DeepSpeedConfig

    with pytest.raises(TypeError):
        DeepSpeedConfig(copy.deepcopy(_AUTO))
    dropped = DeepSpeedConfig(SIZE | {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    assert dropped.zero_config.reduce_bucket_size == 500_000_000


# -- other traps ---------------------------------------------------------------------------------------------------


def test_the_engine_owns_accumulation_and_clipping() -> None:
    document = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    assert "the loop does not" in verdict(document, "gradient_accumulation_steps").why
    assert "only reports" in verdict(document, "gradient_clipping").why


def test_bucket_sizes_are_elements_and_no_units() -> None:
    description = read(zero(3, reduce_bucket_size=1e6))
    assert not description["units.min_numel"].is_set
    (extra,) = description.extras
    assert (extra.key, extra.loss, "elements" in extra.why) == (
        "zero_optimization.reduce_bucket_size",
        "harmless",
        True,
    )


def test_division_and_quantisation_are_not_lost_in_silence() -> None:
    document = {"gradient_predivide_factor": 2.0} | zero(
        3, zero_quantized_nontrainable_weights=True, contiguous_gradients=False
    )
    kinds = {extra.key: extra.loss for extra in read(document).extras}
    assert kinds == {
        "gradient_predivide_factor": "lossy",
        "zero_optimization.zero_quantized_nontrainable_weights": "refused",
        "zero_optimization.contiguous_gradients": "harmless",
    }
    off = read(zero(3, zero_quantized_nontrainable_weights=False)).extras[0]
    assert off.loss == "harmless"


def test_what_zeropp_sends_is_sent_at_stage_3_and_elsewhere_kept_aside() -> None:
    switches = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = read(zero(3, **switches))
    assert found.value("precision.gather") == "int8"
    assert found.value("precision.quantized_reduce") == "int4"
    other = read(zero(2, **switches))
    assert not other["precision.quantized_reduce"].is_set
    assert {extra.key.rpartition(".")[2] for extra in other.extras} == set(switches)


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"bf16": {"enabled": "true"}, "fp16": {"enabled": "True"}}, "fp16.enabled"),
        (zero("3") | {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        (zero(2) | {"pipeline": {"stages": "4"}}, "pipeline.stages"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        (zero(3) | {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        (zero(2) | {"pipeline": {"stages": 4}}, "pipeline.stages"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps"),
        (zero(3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.device"),
        (zero(3, cpu_offload=True, offload_optimizer={"device": "cpu"}), "zero_optimization.cpu_offload"),
    ],
)
def test_combinations_that_fail_later_are_errors_now(document: dict[str, Any], key: str) -> None:
    assert findings(SIZE | document)[key] == "error"


def test_activation_checkpointing_keys_do_not_switch_it_on() -> None:
    document = SIZE | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    assert not read(document)["activation_checkpointing.mode"].is_set
    assert findings(document)["activation_checkpointing"] == "warning"
