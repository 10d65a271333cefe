"""What a conversion promises: the document that it writes would run, and no other number is trained in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrazzo.dialects.core.description import Setting, build
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.check import findings_of
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.documents.dotted_keys import flatten

TITAN = {"training": {"steps": 1000, "local_batch_size": 2}}


def converted(source: str, target: str, document: dict[str, Any], **context: Any) -> Conversion:
    told = ReadingContext(**context)
    reading = read_document(dialect(source), document, told)
    return convert_reading(dialect(source), reading, dialect(target), told)


def errors(name: str, document: dict[str, Any], **context: Any) -> dict[str, str]:
    told = ReadingContext(**context)
    reading = read_document(dialect(name), document, told)
    return {each.key: each.text for each in findings_of(dialect(name), reading, told) if each.level == "error"}


# -- the warm-up of a Trainer that carries a DeepSpeed document ----------------------------------------------------


def carried(steps: Any, **fields: Any) -> dict[str, Any]:
    params = {"warmup_num_steps": steps, "warmup_max_lr": "auto", "total_num_steps": "auto"}
    inner = {
        "train_micro_batch_size_per_gpu": "auto",
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    return {"max_steps": 300, "learning_rate": 1e-4, "deepspeed": inner, **fields}


def test_deepspeeds_schedule_owns_the_warm_up() -> None:
    description = read_document(dialect("trainer"), carried(30, warmup_steps=0.1)).description
    assert description.value("schedule.warmup_steps") == 30
    assert not description["schedule.warmup_fraction"].is_set
    written = converted("trainer", "megatron", carried(30, warmup_steps=0.1), world=8).document
    assert written["lr-warmup-iters"] == 30 and "lr-warmup-fraction" not in written


@pytest.mark.parametrize("field", ["warmup_steps", "warmup_ratio"])
def test_auto_takes_the_fields_share_of_the_run(field: str) -> None:
    description = read_document(dialect("trainer"), carried("auto", **{field: 0.1})).description
    assert description.value("schedule.warmup_steps") == 30


def test_a_warm_up_that_differs_from_the_field_is_an_error() -> None:
    key = "deepspeed.scheduler.params.warmup_num_steps, warmup_steps"
    assert "transformers raises" in errors("trainer", carried(40, warmup_steps=0.1))[key]
    assert key not in errors("trainer", carried(30, warmup_steps=0.1))


# -- numbers that would be others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2", "torchtitan"])
def test_casts_that_lightning_makes_by_itself_are_not_asked_for(name: str) -> None:
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    source = {"mp_policy": policy} if name == "fsdp2" else TITAN
    conversion = converted(name, "lightning", source, world=8)
    assert conversion.after.value("precision.autocast") is False
    written = {key: f"torch.{dtype}" for key, dtype in policy.items()}
    assert conversion.document["trainer"]["strategy"]["init_args"]["mixed_precision"] == written
    assert not {"precision.autocast", "precision.buffers"} & {each.key for each in conversion.unsaid}


@pytest.mark.parametrize(("groups", "kind"), [(1, "renamed"), (2, "refused")])
def test_one_rate_for_two_groups_is_refused(groups: int, kind: str) -> None:
    every = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-4}}
    other = {"pattern": "embed.*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-2}}
    source = {**TITAN, "optimizer": {"param_groups": [other, every][-groups:]}}
    verdicts = {each.key: each.kind for each in converted("torchtitan", "terrazzo", source, world=8).verdicts}
    assert verdicts["optimizer.param_groups"] == kind


# -- documents that would not run ----------------------------------------------------------------------------------


def test_a_mesh_that_the_ranks_cannot_have_is_no_conversion() -> None:
    source = {**TITAN, "parallelism": {"tensor_parallel_degree": 3}}
    assert converted("torchtitan", "megatron", source, world=8).refused
    assert not converted("torchtitan", "megatron", TITAN, world=8).faults


@pytest.mark.parametrize(("experts", "fits"), [(8, True), (16, False)])
def test_experts_are_held_against_the_ranks(experts: int, fits: bool) -> None:
    found = errors("torchtitan", {**TITAN, "parallelism": {"expert_parallel_degree": experts}}, world=8)
    assert ("parallelism.expert_parallel_degree" not in found) == fits


@pytest.mark.parametrize(
    ("source", "document", "key"),
    [
        ("lightning", {"trainer": {"devices": 8, "num_nodes": 1, "strategy": "ddp"}}, "trainer.devices"),
        ("accelerate", {"distributed_type": "MULTI_GPU", "num_processes": 8}, "num_processes"),
    ],
)
def test_two_numbers_of_ranks_are_an_error_by_name(source: str, document: dict[str, Any], key: str) -> None:
    faults = converted(source, "terrazzo", document, world=16).faults
    assert any(key in fault.key and "--world 16" in fault.text for fault in faults)
    assert not converted(source, "terrazzo", document, world=8).faults


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"train-iters": 100, "lr-warmup-fraction": 0.1, "lr-warmup-iters": 10}, "lr-warmup-fraction"),
        ({"train-iters": 100, "lr-decay-samples": 800}, "lr-decay-samples"),
        ({"train-iters": 100, "lr-warmup-samples": 80}, "lr-warmup-samples"),
        ({"train-iters": 100, "lr-decay-iters": 50, "lr-warmup-iters": 50}, "lr-warmup-iters"),
    ],
)
def test_megatrons_asserts_on_the_schedule(arguments: dict[str, Any], key: str) -> None:
    usual = {"micro-batch-size": 1, "global-batch-size": 8, "lr": 1e-4}
    assert key in errors("megatron", {**usual, **arguments})
    assert key not in errors("megatron", {**usual, "train-iters": 100, "lr-warmup-iters": 10})


def test_what_the_source_says_in_other_words_is_not_the_targets_choice() -> None:
    source = {"train-iters": 100, "lr-warmup-fraction": 0.1, "lr": 1e-4, "micro-batch-size": 1}
    conversion = converted("megatron", "torchtitan", source, world=8)
    assert conversion.after.value("schedule.warmup_steps") == 10
    assert "schedule.warmup_steps" not in {each.key for each in conversion.added}


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("linears", "fp8-rowwise"), ("gather", "int8"), ("quantized_reduce", "int8"), ("rounding", "stochastic")],
)
def test_no_word_of_lightnings_stands_for_codes(strategy: str, key: str, value: str) -> None:
    name = "bf16-pure" if key == "rounding" else "bf16"
    document = {"plan": strategy, "precision": {"name": name, key: value}, "train": {"clip": None}}
    verdicts = {verdict.key: verdict for verdict in converted("terrazzo", "lightning", document).verdicts}
    lost = verdicts[f"precision.{key}"]
    assert lost.kind == "lossy" and f"precision.{key} = {value}" in lost.why


def test_accelerates_fp8_is_lost_in_lightning_by_name() -> None:
    document = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}
    (verdict,) = (
        each for each in converted("accelerate", "lightning", document).verdicts if each.key == "mixed_precision"
    )
    assert verdict.kind == "lossy" and "precision.linears" in verdict.why


# -- the scheduler of the DeepSpeed document -----------------------------------------------------------------------


def scheduled(kind: str, **params: Any) -> Conversion:
    source = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {"type": kind, "params": params},
    }
    return converted("deepspeed", "trainer", source, world=8)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_first_step_size": 10}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "log"}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear"}),
    ],
)
def test_a_schedule_that_the_trainer_lacks_stays_in_the_document_that_it_obeys(kind: str, params: Any) -> None:
    conversion = scheduled(kind, **params)
    assert conversion.document["deepspeed"]["scheduler"]["type"] == kind
    assert "lr_scheduler_type" not in conversion.document
    told = {each.kind for each in conversion.verdicts if each.key.startswith("scheduler")}
    assert told.isdisjoint({"lossy", "refused"})
    for path in ("schedule.name", "schedule.options", "schedule.decay_lag", "schedule.warmup_lag"):
        assert conversion.before.value(path) == conversion.after.value(path)


def deepspeed_schedule(kind: str, **start: float) -> dict[str, Any]:
    params = {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear", **start}
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {"optimizer": adam, "scheduler": {"type": kind, "params": params}, "train_batch_size": 8}


STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a rate": ("megatron", {"lr": 1e-3, "lr-warmup-init": 1e-4, "lr-warmup-iters": 10, "train-iters": 100}),
    "a share": ("deepspeed", deepspeed_schedule("WarmupCosineLR", warmup_min_ratio=0.1)),
    "of its peak": (
        "deepspeed",
        deepspeed_schedule("WarmupDecayLR", warmup_min_lr=1e-4, warmup_max_lr=1e-3),
    ),
    "the lowest rate": (
        "trainer",
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 0.1},
            "warmup_steps": 10,
            "max_steps": 100,
            "learning_rate": 1e-3,
        },
    ),
}
"""Warm-ups that start at a tenth of the peak."""


@pytest.mark.parametrize("label", STARTS)
def test_where_warm_up_starts_goes_along_or_is_told(label: str) -> None:
    source, document = STARTS[label]
    for target in ("megatron", "deepspeed"):
        conversion = converted(source, target, document, world=8)
        assert conversion.before.value("schedule.warmup_start") == pytest.approx(0.1)
        written = conversion.after["schedule.warmup_start"]
        assert written.value == pytest.approx(0.1) or conversion.after.value("schedule.name") is None
    ours = converted(source, "terrazzo", document, world=8)
    keys = ours.before["schedule.warmup_start"].keys
    told = [each.why for each in ours.verdicts if each.key in keys and each.kind == "lossy"]
    assert told and all("a warm-up starts at zero, not at 0.1 of the peak" in why for why in told)


def test_a_warm_up_from_zero_is_another_to_the_trainers_stable_schedule() -> None:
    schedule = {"name": "wsd", "final_fraction": 0.1, "warmup_steps": 10, "decay_steps": 20}
    document = {"train": {"steps": 100}, "schedule": schedule}
    told = {each.key: each.why for each in converted("terrazzo", "trainer", document).unsaid}
    assert "warm-up starts at min_lr_ratio there, 0.1, not at 0" in told["schedule.warmup_start"]
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"num_decay_steps": 20, "min_lr_ratio": 0.1}
    optimization.get_scheduler("warmup_stable_decay", optimizer, 10, 100, options)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_share_of_the_run_is_in_no_key_of_a_scheduler_that_is_not_written() -> None:
    for kind, written in (("cosine", True), ("warmup_stable_decay", False)):
        source = {"max_steps": 100, "lr_scheduler_type": kind, "warmup_steps": 0.1, "lr_scheduler_kwargs": DECAY}
        conversion = converted("trainer", "deepspeed", source, world=8)
        (verdict,) = [each for each in conversion.verdicts if each.key == "warmup_steps"]
        assert ("scheduler" in conversion.document) is written
        assert (verdict.kind, verdict.target) == ("lossy", WARM if written else ""), verdict


DECAY = {"num_decay_steps": 20, "decay_type": "linear"}
WARM = "scheduler.params.warmup_num_steps"


def test_places_are_said_in_words() -> None:
    places = {"weight": "D", "between": "-", "grad": "-", "optim": "D"}  # a row of nobody else's
    conversion = converted("terrazzo", "torchtitan", {"plan": places}, world=8)
    told = " ".join(each.why for each in conversion.verdicts)
    assert "weight: split over all data ranks; between: a full copy on every rank" in told


@pytest.mark.parametrize(
    ("name", "document", "words"),
    [
        ("accelerate", {"distributed_type": "FSDP", "fsdp_config": 5}, "it is 5, expected a section"),
        ("fsdp2", {"mesh": "eight"}, "it is 'eight', expected the sizes"),
        ("terrazzo", {"optimizer": {"options": "x" * 300}}, "xxx..., expected a section"),
        ("torchtitan", {"training": {"steps": True}}, "it is true, expected a whole number"),
        ("deepspeed", {"zero_optimization": None, "gradient_clipping": [1]}, "it is [1], expected a number"),
    ],
)
def test_values_in_findings_are_shown_alike(name: str, document: dict[str, Any], words: str) -> None:
    verdicts = read_document(dialect(name), document).verdicts
    told = [each.why for each in verdicts if each.kind == "refused" and words in each.why]
    assert told and all(len(why) < 200 for why in told), verdicts


@pytest.mark.parametrize(("target", "here"), [("terrazzo", True), ("torchtitan", False)])
def test_defaults_that_terrazzo_has_keys_for_are_not_said_to_be_unsayable(target: str, here: bool) -> None:
    unsaid = converted("megatron", target, {"num-layers": 8}).unsaid
    (told,) = [each.why for each in unsaid if each.key == "num-layers"]
    absent, _, written_here = told.partition("; ")
    assert absent.startswith("no such settings") and "init-method-std 0.02" in absent
    assert ("hidden-dropout 0.1" in absent) is not here
    assert ("hidden-dropout 0.1 (in Terrazzo: model.dropout" in written_here) is here, told


@pytest.mark.parametrize(("trained", "saved"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_the_command_that_is_named_for_saved_weights_writes_what_is_asked_for(trained: str, saved: str) -> None:
    states = dict.fromkeys(("weight", "compute", "reduce", "accumulate", "master", "moments"), trained)
    asked = {**states, "saved": saved}
    told = {f"precision.{state}": Setting(dtype, "file", state) for state, dtype in asked.items()}
    (verdict,) = [each for each in dialect("terrazzo").write(build("other", told)).verdicts if each.kind == "lossy"]
    assert verdict.key == "precision.saved" and f"--to hf --dtype {saved}` writes it so" in verdict.why


MACHINES: dict[str, dict[str, Any]] = {
    "lightning": {"trainer": {"devices": 8, "num_nodes": 4, "strategy": "ddp"}},
    "megatron": {"torchrun": {"nproc-per-node": 8, "nnodes": 4}, "micro-batch-size": 1},
    "accelerate": {"distributed_type": "MULTI_GPU", "num_processes": 32, "num_machines": 4},
}
"""32 ranks on 4 machines."""


@pytest.mark.parametrize("target", [*MACHINES, "terrazzo", "deepspeed", "trainer", "torchtitan", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("source", MACHINES)
def test_ranks_stay_on_as_many_machines_or_the_launcher_is_named(source: str, target: str) -> None:
    conversion = converted(source, target, MACHINES[source])
    if target in MACHINES:
        assert (conversion.after.value("mesh.world"), conversion.after.value("mesh.nodes")) == (32, 4)
        for path, value in flatten(MACHINES[target]).items():
            if source != target and path.rpartition(".")[2] in ("devices", "num_nodes", "nproc-per-node", "nnodes"):
                assert flatten(conversion.document)[path] == value
        return
    keys = conversion.before["mesh.nodes"].keys
    (verdict,) = [verdict for verdict in conversion.verdicts if verdict.key in keys]
    assert "torchrun --nnodes 4 --nproc-per-node 8" in verdict.why and verdict.kind == "applied"
    assert "ranks" not in conversion.document.get("launch", {})  # which would start all of them on one machine


def test_a_global_batch_that_does_not_follow_is_a_loss() -> None:
    apart = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    (verdict,) = converted("deepspeed", "trainer", apart, world=4).verdicts[:1]
    assert verdict.kind == "lossy" and "has 32 for batch.global_batch, not 64" in verdict.why


@pytest.mark.parametrize("target", ["terrazzo", "deepspeed", "trainer", "torchtitan"])
def test_sizes_of_a_batch_are_read_back_with_as_many_ranks(target: str) -> None:
    """The number of ranks is the launcher's in all of them, and the third size follows from it."""
    conversion = converted("megatron", target, {**MACHINES["megatron"], "global-batch-size": 64})
    assert conversion.before.value("batch.accumulation") == conversion.after.value("batch.accumulation") == 2
    (verdict,) = [each for each in conversion.verdicts if each.key == "global-batch-size"]
    assert verdict.kind in ("applied", "renamed"), verdict


@pytest.mark.parametrize(
    ("target", "key", "value"),
    [
        ("accelerate", "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "TransformerEncoderLayer"),
        ("terrazzo", "plan.units", ["TransformerEncoderLayer"]),
        ("trainer", "fsdp_config.transformer_layer_cls_to_wrap", ["TransformerEncoderLayer"]),
    ],
)
def test_classes_are_bare_where_they_are_matched_so(target: str, key: str, value: Any) -> None:
    arguments = {"auto_wrap_policy": ["torch.nn.TransformerEncoderLayer"]}
    strategy = {"class_path": "lightning.pytorch.strategies.FSDPStrategy", "init_args": arguments}
    conversion = converted("lightning", target, {"trainer": {"strategy": strategy, "precision": "bf16-mixed"}})
    assert flatten(conversion.document)[key] == value
    assert any("bare names" in verdict.why and key in verdict.target for verdict in conversion.verdicts)


def test_how_files_are_read_is_not_said_where_nothing_is_on_nvme() -> None:
    document = {"trainer": {"strategy": "deepspeed_stage_2_offload", "precision": "bf16-true"}}
    conversion = converted("lightning", "terrazzo", document)
    assert conversion.after.value("offload.optim") == "cpu"
    assert "block_mib" not in conversion.document.get("offload", {})


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_the_trainer_is_told_the_data_ranks_beside_others(axis: str) -> None:
    """Accelerate takes a size that is not given as 1, and refuses the ranks that are then too many."""
    document = {"plan": {"name": "zero3", "mesh": {axis: 2}}}
    written = flatten(converted("terrazzo", "trainer", document, world=8).document)
    assert (written[f"parallelism_config.{axis}_size"], written["parallelism_config.dp_shard_size"]) == (2, 4)
    refused = {each.key: each.why for each in converted("terrazzo", "trainer", document).refused}
    assert "must be known" in refused["mesh.dp_shard"]
