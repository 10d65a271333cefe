"""What DeepSpeed's JSON means: rows, dtypes, tiers, batch sizes, optimizers and schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from terrazzo.dialects.core.description import LOADED, Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.formats.deepspeed.dialect import DIALECT
from terrazzo.dialects.formats.deepspeed.keys import TABLE
from tests.dialects.peers import converted, findings_by_key, nested, verdicts

SIZE = {"train_micro_batch_size_per_gpu": 1}


PUBLISHED = {
    "fp16": {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": False,
        "round_robin_gradients": False,
        "zero_hpz_partition_size": 1,
    },
}
"""Defaults as DeepSpeed's documentation has them (docs/_pages/config-json.md), where its loader is not installed."""


def test_defaults_are_those_that_are_published() -> None:
    for section, defaults in PUBLISHED.items():
        assert {name: TABLE[f"{section}.{name}"].default for name in defaults} == defaults


def read(document: dict[str, Any], context: ReadingContext = NO_CONTEXT) -> Description:
    return DIALECT.read(document, context).description


def verdict(document: dict[str, Any], key: str, **versions: str) -> KeyVerdict:
    reading = DIALECT.read(document, ReadingContext(versions=versions))
    return next(each for each in reading.verdicts if each.key == key)


def values(description: Description, section: str, *names: str) -> list[Any]:
    return [description.value(f"{section}.{name}") for name in names]


def findings(document: dict[str, Any], context: ReadingContext = NO_CONTEXT) -> dict[str, str]:
    return {each.key: each.level for each in DIALECT.findings(DIALECT.read(document, context), context)}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


# -- rows and meshes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_stages_are_rows(stage: int) -> None:
    assert read(zero(stage)).row == f"zero{stage}"


def test_no_section_is_stage_0_and_true_is_stage_1() -> None:
    assert read({}).row == "zero0"
    assert read({"zero_optimization": True}).row == "zero1"
    assert verdict({"zero_optimization": True}, "zero_optimization").kind == "renamed"


def test_hpz_is_a_row_of_two_axes() -> None:
    document = zero(3, zero_hpz_partition_size=8)
    assert read(document).row == "hpz"
    assert values(read(document, ReadingContext(world=32)), "mesh", "dp_shard", "dp_replicate") == [8, 4]
    assert read(zero(2, zero_hpz_partition_size=8)).row == "zero2"
    assert findings(zero(2, zero_hpz_partition_size=8) | SIZE)["zero_optimization.zero_hpz_partition_size"] == "warning"
    key = "zero_optimization.zero_hpz_partition_size"
    assert findings(document | SIZE, ReadingContext(world=12))[key] == "error"


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "mics_shard_size"])
def test_one_group_of_all_ranks_is_stage_3(key: str) -> None:
    document = zero(3, **{key: 8}) | SIZE
    assert read(document, ReadingContext(world=8)).row == "zero3"


def test_mics_is_still_understood() -> None:
    document = zero(3, mics_shard_size=8)
    assert read(document).row == "hybrid_shard"
    assert read(document).value("mesh.dp_shard") == 8
    outcome = verdict(document, "zero_optimization.mics_shard_size")
    assert (outcome.kind, "0.19.7" in outcome.why) == ("renamed", True)


def test_degrees() -> None:
    document = {"tensor_parallel": {"autotp_size": 4}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    assert values(read(document | {"sequence_parallel_size": 8}), "mesh", "tp", "ep", "sp") == [4, 2, 8]
    assert values(read({"expert_parallel": {"autoep_size": 2}}), "mesh", "tp", "ep", "sp") == [1, 1, 1]


# -- precision: the rows of the survey of stacks ---------------------------------------------------------------------

_STATES = ("weight", "compute", "reduce", "accumulate", "master", "moments", "saved")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "fp32 fp32 fp32 fp32 fp32 fp32 fp32"),
        ({"bf16": {"enabled": True}}, "bf16 bf16 bf16 bf16 fp32 fp32 bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16 bf16 bf16 bf16 fp32 fp32 bf16"),
        ({"fp16": {"enabled": True}}, "fp16 fp16 fp16 fp16 fp32 fp32 fp16"),
        ({"bf16": {"enabled": False}}, "fp32 fp32 fp32 fp32 fp32 fp32 fp32"),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
            "bf16 bf16 fp32 fp32 fp32 fp32 bf16",
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            "bf16 bf16 bf16 bf16 bf16 bf16 bf16",
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "fp32 bf16 bf16 fp32 fp32 fp32 fp32"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []}},
            "fp32 bf16 fp32 fp32 fp32 fp32 fp32",
        ),
        ({"bf16": {"enabled": True}, "sequence_parallel_size": 2}, "bf16 bf16 fp32 bf16 fp32 fp32 bf16"),
    ],
)
def test_every_dtype_is_pinned(document: dict[str, Any], expected: str) -> None:
    assert values(read(zero(1) | document), "precision", *_STATES) == expected.split()


def test_loss_scaling() -> None:
    scaling = read({"fp16": {"enabled": True, "initial_scale_power": 8}}).value("precision.loss_scaling")
    assert (scaling.init, scaling.interval, scaling.hysteresis, scaling.minimum) == (256.0, 1000, 2, 1.0)
    fixed = read({"fp16": {"enabled": True, "loss_scale": 128}})
    assert values(fixed, "precision", "loss_scaling", "static_loss_scale") == [None, 128]


def test_a_smallest_loss_scale_between_powers_of_two_becomes_the_next() -> None:
    """Another scale would round gradients."""
    description = read({"fp16": {"enabled": True, "min_loss_scale": 1000}})
    assert description.value("precision.loss_scaling").minimum == 1024.0


# -- offload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "device", "optim", "grad"),
    [
        (0, "cpu", "device", "device"),
        (1, "cpu", "cpu", "cpu"),
        (2, "cpu", "cpu", "cpu"),
        (2, "nvme", "cpu", "cpu"),
        (3, "cpu", "cpu", "cpu"),
        (3, "nvme", "nvme", "cpu"),
    ],
)
def test_optimizer_offload_by_stage(stage: int, device: str, optim: str, grad: str) -> None:
    document = zero(stage, offload_optimizer={"device": device, "nvme_path": "/nvme"})
    assert values(read(document), "offload", "optim", "grad") == [optim, grad]
    kind = verdict(document, "zero_optimization.offload_optimizer.device").kind
    assert kind == ("applied" if device == optim else "lossy")


def test_parameter_offload_needs_stage_3() -> None:
    offload = {"offload_param": {"device": "nvme", "nvme_path": "/p"}, "offload_optimizer": {"device": "nvme"}}
    document = zero(3, **offload)
    document["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/o"
    assert values(read(document), "offload", "weight", "path") == ["nvme", ("/o", "/p")]
    below = zero(2, offload_param={"device": "cpu"})
    assert read(below).value("offload.weight") == "device"
    assert "needs stage 3" in verdict(below, "zero_optimization.offload_param.device").why


def test_a_ratio_is_a_share_of_the_units() -> None:
    section = {"device": "cpu", "ratio": 0.7}
    assert read(zero(3, offload_optimizer=section)).value("offload.optim") == "cpu:0.7"
    assert findings(zero(2, offload_optimizer=section) | SIZE)["zero_optimization.offload_optimizer.ratio"] == "error"


def test_old_words_for_offload() -> None:
    document = zero(2, cpu_offload=True)
    assert read(document).value("offload.optim") == "cpu"
    assert verdict(document, "zero_optimization.cpu_offload").kind == "renamed"
    written = DIALECT.write(read(document)).document
    assert written["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}


# -- batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [s for s in itertools.product((None, 48), (None, 3), (None, 4)) if s != (None,) * 3])
def test_batch_arithmetic_is_deepspeeds(sizes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed's arithmetic is the oracle")
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(comm, "get_world_size", lambda *_: 4)
    monkeypatch.setattr(comm, "get_rank", lambda *_: 0)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    document = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    description = read(document, ReadingContext(world=4))
    ours = values(description, "batch", "global_batch", "micro_batch", "accumulation")
    if sizes[:2] == (None, None):
        assert findings(document) == {**findings(document), "train_micro_batch_size_per_gpu": "error"}
        with pytest.raises(AssertionError):
            DeepSpeedConfig(document)
        return
    config = DeepSpeedConfig(dict(document))
    assert ours == [getattr(config, name) for name in names]


def test_without_the_number_of_ranks_the_rest_stays_open() -> None:
    description = read({"train_batch_size": 64})
    assert values(description, "batch", "global_batch", "micro_batch", "accumulation") == [64, None, 1]


# -- optimizer and schedule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "verdict_kind"),
    [
        ("Adam", "AdamW", "applied"),
        ("adamw", "AdamW", "applied"),
        ("DeepSpeedCPUAdam", "AdamW", "renamed"),
        ("SGD", "SGD", "applied"),
        ("OneBitAdam", None, "refused"),
        ("AdamX", None, "refused"),
        ("os.system", None, "refused"),
    ],
)
def test_optimizer_types(kind: str, name: str | None, verdict_kind: str) -> None:
    document = {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}
    assert read(document).value("optimizer.name") == name
    assert verdict(document, "optimizer.type").kind == verdict_kind


def test_optimizer_defaults_are_deepspeeds_own() -> None:
    """Its Adam has no weight decay where torch's AdamW has 0.01; torch's own classes keep theirs."""
    built_in = read({"optimizer": {"type": "AdamW"}})
    assert values(built_in, "optimizer", "lr", "betas", "eps", "weight_decay") == [1e-3, (0.9, 0.999), 1e-8, 0.0]
    sgd = read({"optimizer": {"type": "SGD"}})
    assert (sgd.value("optimizer.lr"), sgd.value("optimizer.weight_decay")) == (1e-3, 0.0)
    assert not sgd["optimizer.betas"].is_set


def test_the_schedules_peak_is_its_own() -> None:
    """WarmupDecayLR climbs to its warmup_max_lr, by default 0.001, whatever rate the optimizer was given."""
    pytest.importorskip("deepspeed", reason="DeepSpeed's schedule is the oracle")
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    document = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    }
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=3e-4)
    schedule = WarmupDecayLR(optimizer, **document["scheduler"]["params"])
    rates = []
    for _ in range(100):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert read(document).value("optimizer.lr") == pytest.approx(max(rates), rel=0.02)
    assert verdict(document, "optimizer.params.lr").kind == "lossy"
    assert "scheduler.type" in findings(document | SIZE)


def test_a_logarithmic_warm_up_is_not_a_linear_one() -> None:
    document = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    assert values(read(document), "schedule", "name", "warmup_steps") == ["constant", 10]
    assert read(document).value("schedule.options") == {"warmup_type": "log"}
    document["scheduler"]["params"]["warmup_type"] = "linear"
    assert not read(document)["schedule.options"].is_set


def test_buffers_keep_the_dtype_that_they_were_loaded_in() -> None:
    """As in DeepSpeed 0.19.8's `_cast_module_mixed_precision`: they are cast where `buffer_dtype` is given alone."""
    for extra, wanted in (({}, LOADED), ({"data_types": {"buffer_dtype": "bf16"}}, "bf16")):
        read = DIALECT.read({"bf16": {"enabled": True}, **extra}).description
        assert read.value("precision.buffers") == wanted
        assert DIALECT.read(DIALECT.write(read).document).description.value("precision.buffers") == wanted


@pytest.mark.parametrize(("kind", "decay"), [("AdamW", 0.01), ("Adam", 0.01)])
def test_torchs_adam_has_torchs_defaults(kind: str, decay: float) -> None:
    params = {"torch_adam": True}
    description = read({**SIZE, "optimizer": {"type": kind, "params": params}})
    assert description.value("optimizer.weight_decay") == decay
    plain = read({**SIZE, "optimizer": {"type": kind, "params": {**params, "adam_w_mode": False}}})
    assert plain.value("optimizer.weight_decay") == (0.0 if kind == "Adam" else decay)


# What DeepSpeed's other classes take where the file is silent.
@pytest.mark.parametrize(
    ("kind", "lr", "betas", "eps"),
    [
        ("Adagrad", 1e-2, None, 1e-10),
        ("DeepSpeedCPUAdagrad", 1e-2, None, 1e-10),
        ("Lion", 1e-3, (0.9, 0.999), None),
        ("MuSGD", 1e-3, None, None),
        ("Muon", 3e-4, (0.9, 0.95), 1e-10),
        ("Lamb", 1e-3, (0.9, 0.999), 1e-8),
    ],
)
def test_an_optimizer_has_its_own_defaults(kind: str, lr: float, betas: Any, eps: float | None) -> None:
    description = read({**SIZE, "optimizer": {"type": kind}})
    assert values(description, "optimizer", "lr", "betas", "eps", "weight_decay") == [lr, betas, eps, 0.0]


def test_reduce_scatter_is_said_to_replace_the_all_reduce() -> None:
    assert "not all-reduced" in DIALECT.meaning("zero_optimization.reduce_scatter")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("moe.num_experts", "model.experts.count"),
        ("moe.use_residual", "model.experts.shared"),
        ("ep_size", "plan.mesh.ep"),
        ("pipeline.num_stages", "plan.mesh.pp"),
        ("moe.use_tutel", "deepspeed.moe.layer.MoE"),
    ],
)
def test_arguments_of_classes_are_no_keys(key: str, words: str) -> None:
    verdict = verdicts("deepspeed", nested({key: 2}))[key]
    assert verdict.kind == "refused"
    assert words in verdict.why


def test_a_pipeline_goes_there_and_back() -> None:
    pipeline = {"stages": 2, "activation_checkpoint_interval": 1}
    document = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "pipeline": pipeline}
    conversion = converted("deepspeed", "terrazzo", document, world=4)
    assert {verdict.kind for verdict in conversion.verdicts} == {"renamed"}
    assert conversion.document["plan"]["mesh"] == {"pp": 2}
    assert conversion.document["train"]["activation_checkpointing"] == "full"
    assert converted("terrazzo", "deepspeed", conversion.document, world=4).document["pipeline"] == pipeline
    assert converted("deepspeed", "deepspeed", document, world=4).document == document


def test_what_a_pipeline_of_deepspeed_cannot_say_is_named() -> None:
    document = {"plan": {"name": "zero1", "mesh": {"pp": 2, "tp": 2}}, "parallel": {"pipeline": {"chunks": 2}}}
    outcomes = {verdict.key: verdict for verdict in converted("terrazzo", "deepspeed", document).verdicts}
    assert outcomes["parallel.pipeline.chunks"].kind == "lossy"
    assert "one stage" in outcomes["parallel.pipeline.chunks"].why
    interval = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 4}}
    assert verdicts("deepspeed", interval)["pipeline.activation_checkpoint_interval"].kind == "lossy"


def test_a_version_has_three_numbers_however_many_are_written() -> None:
    def found(version: str) -> list[str]:
        context = ReadingContext(versions={"deepspeed": version})
        document = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
        return [finding.text for finding in DIALECT.findings(DIALECT.read(document, context), context)]

    assert found("0.17") == found("0.17.0") == found("0.17+cu128") == []
    assert "0.16.0 may have others" in found("0.16")[0]
    assert ReadingContext(versions={"torch": "2.9+cu128"}).version("torch", "") == (2, 9, 0)


def test_what_the_target_needs_and_refuses_to_go_without_is_told_once() -> None:
    document = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}
    conversion = converted("accelerate", "deepspeed", document)
    told = [each for each in conversion.unsaid if "train_micro_batch_size_per_gpu" in each.target]
    assert [(each.key, each.kind) for each in told] == [("batch.micro_batch", "refused")]
    assert [fault.key for fault in conversion.faults] == ["train_micro_batch_size_per_gpu"]


@pytest.mark.parametrize("section", [{}, {"topk_ratio": 0.1}])
def test_zenflow_is_on_where_its_section_is(section: dict[str, Any]) -> None:
    zero = {"stage": 2, "zenflow": section}
    document = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    refused = converted("deepspeed", "terrazzo", document).refused
    assert [each.key.split(".")[1] for each in refused] == ["zenflow"]
    assert "ZenFlow updates most parameters late" in refused[0].why


def test_a_removed_key_is_an_error_once() -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "sparse_attention": {"mode": "fixed"}}
    refused = [key for key, each in verdicts("deepspeed", document).items() if each.kind == "refused"]
    assert refused == ["sparse_attention.mode"]
    assert "sparse_attention" not in findings_by_key("deepspeed", document)
