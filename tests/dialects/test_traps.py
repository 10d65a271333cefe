"""Where stacks mean different things by the same word, or the same default: each is told apart, or named."""

from __future__ import annotations

from typing import Any

import pytest

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.understand import read_document


def described(name: str, document: dict[str, Any], **context: Any) -> Description:
    return read_document(dialect(name), document, ReadingContext(**context)).description


def converted(source: str, target: str, document: dict[str, Any], **context: Any) -> Conversion:
    reading = read_document(dialect(source), document, ReadingContext(**context))
    return convert_reading(dialect(source), reading, dialect(target), ReadingContext(**context))


def fsdp(version: int, **options: Any) -> dict[str, Any]:
    """An Accelerate file."""
    keys = {f"fsdp_{name}": value for name, value in options.items()}
    more = {"num_processes": 8, "num_machines": 2}
    return {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        **more,
        "fsdp_config": {"fsdp_version": version, **keys},
    }


# Accelerate's own converter turns HYBRID_SHARD into full sharding and NO_SHARD into SHARD_GRAD_OP without a word.


@pytest.mark.parametrize("target", ["fsdp2", "terrazzo", "torchtitan"])
def test_replication_does_not_vanish(target: str) -> None:
    conversion = converted("accelerate", target, fsdp(1, sharding_strategy="HYBRID_SHARD"))
    verdicts = {verdict.key: verdict for verdict in conversion.verdicts}
    verdict = verdicts["fsdp_config.fsdp_sharding_strategy"]
    if verdict.kind in ("lossy", "refused"):
        assert verdict.why
    else:
        assert conversion.after.row == "hybrid_shard"
        assert (conversion.after.value("mesh.dp_replicate"), conversion.after.value("mesh.dp_shard")) in (
            (2, 4),
            (2, None),
        )


@pytest.mark.parametrize("target", ["fsdp2", "terrazzo", "torchtitan", "deepspeed"])
def test_what_was_not_split_is_not_split_in_silence(target: str) -> None:
    conversion = converted("accelerate", target, fsdp(1, sharding_strategy="NO_SHARD"))
    (verdict,) = [each for each in conversion.verdicts if each.key == "fsdp_config.fsdp_sharding_strategy"]
    assert conversion.after.row == "zero0" or verdict.kind in ("lossy", "refused")


def test_stage_2_is_not_shard_grad_op() -> None:
    assert described("deepspeed", {"zero_optimization": {"stage": 2}}).row == "zero2"
    assert described("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}).row == "shard_grad_op"
    conversion = converted("deepspeed", "fsdp1", {"zero_optimization": {"stage": 2}})
    (verdict,) = [each for each in conversion.verdicts if each.key == "zero_optimization.stage"]
    assert conversion.after.row == "shard_grad_op"
    assert (verdict.kind, bool(verdict.why)) == ("lossy", True)


def test_hpz_is_not_hybrid_sharding() -> None:
    document = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}, "bf16": {"enabled": True}}
    assert described("deepspeed", document, world=8).row == "hpz"
    conversion = converted("deepspeed", "fsdp1", document, world=8)
    verdicts = {verdict.key: verdict for verdict in conversion.verdicts}
    assert verdicts["zero_optimization.zero_hpz_partition_size"].kind in ("lossy", "refused")


# The same option, three defaults.


def test_backward_prefetch_is_on_in_torch_and_off_in_accelerate() -> None:
    assert described("fsdp1", {"sharding_strategy": "FULL_SHARD"}).value("prefetch.backward") == 1
    assert described("accelerate", fsdp(1, sharding_strategy="FULL_SHARD")).value("prefetch.backward") == 0
    assert described("accelerate", fsdp(2)).value("prefetch.backward") == 1  # version 2 always does


def test_state_dict_type_has_a_default_by_version_and_library() -> None:
    assert described("accelerate", fsdp(1)).value("saving.state") == "full"
    assert described("accelerate", fsdp(2)).value("saving.state") == "sharded"
    assert described("trainer", {"output_dir": "x", "fsdp": True}).value("saving.state") == "full"
    assert described("lightning", {"strategy": "fsdp"}).value("saving.state") == "full"


def test_the_default_stage_is_0_or_2() -> None:
    assert described("deepspeed", {"zero_optimization": {}}).row == "zero0"
    assert described("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": {}}).row == "zero2"
    assert described("lightning", {"strategy": "deepspeed"}).row == "zero2"


def test_clipping_came_to_deepspeed_by_default_in_2026() -> None:
    document = {"train_micro_batch_size_per_gpu": 1}
    assert described("deepspeed", document).value("training.clip") == 1.0
    assert described("deepspeed", document, versions={"deepspeed": "0.18.0"}).value("training.clip") is None


# "bf16" names many recipes.


@pytest.mark.parametrize(
    ("name", "document", "storage", "reduce", "master"),
    [
        ("accelerate", fsdp(1), "fp32", "bf16", "fp32"),
        ("accelerate", fsdp(2), "fp32", "bf16", "fp32"),
        ("trainer", {"output_dir": "x", "bf16": True, "fsdp": True}, "fp32", "bf16", "fp32"),
        ("lightning", {"strategy": "fsdp", "precision": "bf16-mixed"}, "fp32", "bf16", "fp32"),
        ("deepspeed", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, "bf16", "bf16", "fp32"),
        ("torchtitan", {"parallelism": {"data_parallel_shard_degree": -1}}, "fp32", "fp32", "fp32"),
        ("terrazzo", {"precision": "bf16"}, "bf16", "fp32", "fp32"),
    ],
)
def test_bf16_is_pinned_state_by_state(
    name: str, document: dict[str, Any], storage: str, reduce: str, master: str
) -> None:
    description = described(name, document)
    assert description.value("precision.compute") == "bf16"
    assert [description.value(f"precision.{state}") for state in ("weight", "reduce", "master")] == [
        storage,
        reduce,
        master,
    ]


@pytest.mark.parametrize(("version", "reduce"), [("2.13.0", "bf16"), ("2.15.0", "fp32")])
def test_an_unset_reduce_dtype_depends_on_torch(version: str, reduce: str) -> None:
    document = {"reshard_after_forward": True, "mp_policy": {"param_dtype": "bfloat16"}}
    description = described("fsdp2", document, versions={"torch": version})
    assert description.value("precision.reduce") == reduce
    conversion = converted("fsdp2", "terrazzo", document, versions={"torch": version})
    assert conversion.after.value("precision.reduce") == reduce
    back = converted("terrazzo", "fsdp2", conversion.document)
    assert back.document["mp_policy"]["reduce_dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[reduce]


def test_without_mixed_precision_the_load_dtype_decides() -> None:
    document = {**fsdp(2), "mixed_precision": "no"}
    assert described("accelerate", document).value("precision.weight") == "loaded"
    assert described("accelerate", document, load_dtype="bf16").value("precision.moments") == "bf16"
    conversion = converted("accelerate", "terrazzo", document)
    lost = {each.key: each for each in (*conversion.verdicts, *conversion.unsaid) if "--load-dtype" in each.why}
    assert "precision.master" in lost or "mixed_precision" in lost
    assert {each.kind for each in lost.values()} == {"lossy"}


# "auto", accumulation, clipping, saving.


def test_auto_is_hugging_faces_word() -> None:
    document = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    reading = read_document(dialect("deepspeed"), document, ReadingContext())
    assert {v.key for v in reading.verdicts if v.kind == "defaulted"} >= {"train_micro_batch_size_per_gpu"}
    findings = list(dialect("deepspeed").findings(reading, ReadingContext()))
    assert any("auto" in finding.text for finding in findings)
    description = described("deepspeed", document, trainer={"per_device_train_batch_size": 3})
    assert (description.value("batch.micro_batch"), description["batch.micro_batch"].origin) == (3, "auto")


def test_deepspeed_owns_accumulation_and_clipping() -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    conversion = converted("deepspeed", "fsdp2", document)
    verdicts = {verdict.key: verdict for verdict in conversion.verdicts}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        assert verdicts[key].kind in ("lossy", "refused")
        assert "code" in verdicts[key].why or "loop" in verdicts[key].why


def test_sharded_state_with_the_trainer_writes_no_weights_to_load() -> None:
    document = {"output_dir": "x", "fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    description = described("trainer", document)
    assert (description.value("saving.state"), description.value("saving.export")) == ("sharded", "none")
    full = described("trainer", {"output_dir": "x", "fsdp": True})
    assert full.value("saving.export") in ("full", "hf")


def test_bucket_sizes_are_elements_and_units_are_modules() -> None:
    document = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}}
    (verdict,) = [
        each for each in converted("deepspeed", "fsdp2", document).verdicts if each.key.endswith("reduce_bucket_size")
    ]
    assert "elements" in verdict.why
    assert (
        described("accelerate", fsdp(1, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000)).value(
            "units.min_numel"
        )
        == 1000
    )


# Keys that are ignored without a word.


DEAD = [
    ("deepspeed", {"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage", "zero_optimization"),
    (
        "accelerate",
        fsdp(1, backward_prefetch_policy="BACKWARD_PRE"),
        "fsdp_config.fsdp_backward_prefetch_policy",
        "fsdp_backward_prefetch",
    ),
    (
        "trainer",
        {"output_dir": "x", "fsdp": True, "fsdp_config": {"fsdp_offload_params": True}},
        "fsdp_config.fsdp_offload_params",
        "cpu_offload",
    ),
]


@pytest.mark.parametrize(("name", "document", "key", "near"), DEAD)
def test_dead_keys_are_found_and_the_live_one_named(name: str, document: dict[str, Any], key: str, near: str) -> None:
    (verdict,) = [each for each in read_document(dialect(name), document).verdicts if each.key == key]
    assert verdict.kind in ("refused", "lossy")
    assert near in verdict.why


# What a loss is the mean over, and what becomes of a step that is not finite: each library has it otherwise.


MEANS: list[tuple[str, dict[str, Any], str | None]] = [
    ("terrazzo", {"plan": "zero3"}, "tokens"),
    ("trainer", {"output_dir": "x"}, "tokens"),
    ("trainer", {"output_dir": "x", "average_tokens_across_devices": False}, "rank_tokens"),
    ("trainer", {"output_dir": "x", "deepspeed": {"zero_optimization": {"stage": 2}}}, "tokens"),
    ("megatron", {"micro-batch-size": 1}, "micro_batches"),
    ("megatron", {"micro-batch-size": 1, "calculate-per-token-loss": True}, "tokens"),
    ("deepspeed", {"train_micro_batch_size_per_gpu": 1}, None),
]


@pytest.mark.parametrize(("name", "document", "mean"), MEANS)
def test_a_loss_is_a_mean_over_tokens_or_over_means(name: str, document: dict[str, Any], mean: str | None) -> None:
    assert described(name, document).value("training.loss_mean") == mean
    for target in ("terrazzo", "megatron", "trainer", "torchtitan", "deepspeed", "accelerate"):
        conversion = converted(name, target, document)
        same = conversion.after.value("training.loss_mean") == mean
        outcomes = (*conversion.verdicts, *conversion.unsaid)
        lost = any(each.key == "training.loss_mean" or "training.loss_mean" in each.why for each in outcomes)
        lost |= any(each.kind == "lossy" and each.key.startswith(("average", "calculate")) for each in outcomes)
        assert same or lost or mean is None or target == name, target


BF16 = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
NONFINITE: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("deepspeed", BF16, {}, "skip"),
    ("deepspeed", BF16, {"versions": {"deepspeed": "0.18.0"}}, "go_on"),
    ("deepspeed", {**BF16, **UNCHECKED}, {}, "go_on"),
    ("deepspeed", {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}}, {}, None),
    ("megatron", {"micro-batch-size": 1, "bf16": True}, {}, "stop"),
    ("megatron", {"micro-batch-size": 1, "bf16": True, "no-check-for-nan-in-loss-and-grad": True}, {}, "go_on"),
    ("megatron", {"micro-batch-size": 1, "fp16": True}, {}, None),
    ("trainer", {"output_dir": "x", "bf16": True}, {}, "go_on"),
    ("torchtitan", {"training": {"steps": 5}}, {}, "stop"),
    ("terrazzo", {"guard": {"action": "rollback"}, "checkpoint": {"every": 5}}, {}, "rollback"),
]


@pytest.mark.parametrize(("name", "document", "context", "word"), NONFINITE)
def test_a_step_that_is_not_finite(
    name: str, document: dict[str, Any], context: dict[str, Any], word: str | None
) -> None:
    assert described(name, document, **context).value("training.nonfinite") == word
    for target in ("terrazzo", "megatron", "trainer", "torchtitan", "deepspeed"):
        conversion = converted(name, target, document, **context)
        kept = conversion.after.value("training.nonfinite") == word
        outcomes = [each for each in (*conversion.verdicts, *conversion.unsaid) if each.kind == "lossy"]
        keys = ("training.nonfinite", "bf16.check_grad_overflow", "no-check-for-nan-in-loss-and-grad", "guard.action")
        lost = any(each.key in keys or "training.nonfinite" in each.why for each in outcomes)
        assert kept or lost or word in (None, "go_on"), target


def test_what_deepspeed_leaves_out_is_left_out_here() -> None:
    document = converted("deepspeed", "terrazzo", BF16).document
    assert document["guard"] == {"action": "skip"}
    back = converted("terrazzo", "deepspeed", document).document
    assert back["bf16"] == {"enabled": True, "check_grad_overflow": True}


def test_what_is_written_for_a_loop_is_not_called_lost() -> None:
    """Accelerate hands DeepSpeed clipping and accumulation, and FSDP recomputation: no loop has to say these."""
    document = {**BF16, "gradient_accumulation_steps": 8, "gradient_clipping": 0.7}
    conversion = converted("deepspeed", "accelerate", {**document, "zero_optimization": {"stage": 2}})
    kinds = {each.key: each.kind for each in conversion.verdicts}
    assert (kinds["gradient_accumulation_steps"], kinds["gradient_clipping"]) == ("renamed", "renamed")
    recomputed = {"train": {"activation_checkpointing": "full"}, "plan": "zero3"}
    kinds = {each.key: each.kind for each in converted("terrazzo", "accelerate", recomputed).verdicts}
    assert kinds["train.activation_checkpointing"] == "renamed"


@pytest.mark.parametrize("matrices", [{"momentum": 0.9}, {"ns_steps": 5}, {}])
def test_defaults_of_muon_are_no_difference(matrices: dict[str, Any]) -> None:
    document = {"optimizer": {"name": "Muon", "muon": matrices}, "batch": {"micro_batch": 1}}
    conversion = converted("terrazzo", "megatron", document)
    lost = [each for each in (*conversion.verdicts, *conversion.unsaid) if each.kind == "lossy"]
    assert not [each for each in lost if "muon" in each.key or "options" in each.key]


@pytest.mark.parametrize(
    ("name", "document", "meant"),
    [
        ("deepspeed", {"zero_optimization": {"offload_optimizre": {"device": "cpu"}}}, "offload_optimizer.device"),
        ("megatron", {"micro-batch-size": 1, "torchrun": {"nproc-per-noed": 8}}, "nproc-per-node"),
        ("trainer", {"output_dir": "x", "accelerator_config": {"split_batchs": True}}, "split_batches"),
        (
            "lightning",
            {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"weight_decya": 0.1}}},
            "weight_decay",
        ),
    ],
)
def test_slips_at_any_depth_are_named_with_what_was_meant(name: str, document: dict[str, Any], meant: str) -> None:
    refused = [each for each in read_document(dialect(name), document).verdicts if each.kind == "refused"]
    assert [meant in each.why for each in refused] == [True]
