"""Lightning's strategies, against its own classes where it is installed."""

from __future__ import annotations

import inspect
import json
import logging
from collections import UserList
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.dialects.core.description import Setting, build
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext
from terrazzo.dialects.core.keys import matches
from terrazzo.dialects.formats.lightning.deepspeed_document import strategy_document
from terrazzo.dialects.formats.lightning.keys import (
    ARGUMENTS,
    DEEPSPEED_STRATEGY,
    FSDP,
    MODEL_PARALLEL,
    NAMED,
    SHARED,
    TRAINER,
)
from terrazzo.dialects.formats.lightning.precision import WORDS
from terrazzo.dialects.formats.lightning.trainer_arguments import trainer_arguments
from terrazzo.dialects.registry import dialect
from terrazzo.engine import DTYPE_NAMES
from tests.dialects.peers import (
    assert_agrees_or_says,
    converted,
    described,
    findings_by_key,
    inventory,
    precision,
    verdicts,
)

CLASSES = "lightning.pytorch.strategies"


def strategy(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{CLASSES}.{name}", "init_args": arguments}


DOCUMENTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp", "precision": "bf16-mixed", "devices": 8, "accumulate_grad_batches": 4},
    "ddp": {"strategy": "ddp_find_unused_parameters_true", "gradient_clip_val": 1.0, "num_nodes": 2, "devices": 4},
    "arguments": {
        "trainer": {
            "strategy": strategy(
                "FSDPStrategy",
                sharding_strategy="HYBRID_SHARD",
                device_mesh=[2, 4],
                auto_wrap_policy=["Block"],
                activation_checkpointing_policy=["Block"],
                state_dict_type="sharded",
                cpu_offload=True,
                limit_all_gathers=True,
                timeout=30,
            ),
            "precision": "bf16-mixed",
            "max_steps": 10,
        },
        "seed_everything": 3,
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 1e-3, "betas": [0.9, 0.95], "fused": True},
        },
        "model": {"class_path": "x.Y", "init_args": {"layers": 2}},
    },
    "deepspeed": {"strategy": "deepspeed_stage_3_offload", "precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "deepspeed arguments": {
        "strategy": strategy(
            "DeepSpeedStrategy", stage=3, offload_optimizer=True, nvme_path="/x", reduce_bucket_size=5
        ),
        "precision": "16-mixed",
    },
    "deepspeed config": {"strategy": strategy("DeepSpeedStrategy", config={"zero_optimization": {"stage": 1}})},
    "model parallel": {
        "strategy": strategy("ModelParallelStrategy", data_parallel_size="auto", tensor_parallel_size=2),
        "devices": 4,
        "precision": "bf16-true",
    },
    "others": {"accelerator": "gpu", "max_epochs": 3, "max_steps": -1, "seed_everything": True, "strategy": "ddp"},
    "by value": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value", "strategy": "ddp"},
}


@pytest.mark.parametrize("label", DOCUMENTS)
def test_the_writer_says_what_the_reader_reads(label: str) -> None:
    assert_agrees_or_says("lightning", DOCUMENTS[label])


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_every_key_of_the_inventory_has_a_verdict(name: str) -> None:
    for entry in inventory(name):
        argument = entry.partition(" ")[0]
        if argument in ("**kwargs", "parallelize_fn"):  # the first are FSDP1's; the second is Fabric's, and code
            continue
        for value in (None, True, 8, "x", ["x"]):
            verdict = verdicts("lightning", {"strategy": strategy(name, **{argument: value})})
            outcome = verdict[f"strategy.init_args.{argument}"]
            assert "no such" not in outcome.why, outcome
        key = f"strategy.init_args.{argument}"
        assert any(matches(key, pattern) for pattern in dialect("lightning").keys)
        assert dialect("lightning").meaning(key)


# storage, compute, reduce, accumulate, master and moments, saved
@pytest.mark.parametrize(
    ("document", "row"),
    [
        ({"strategy": "fsdp", "precision": "bf16-mixed"}, ["fp32", "bf16", "bf16", "fp32", "fp32", "fp32"]),
        (
            {"strategy": "fsdp", "precision": "bf16-mixed", "accumulate_grad_batches": 4},
            ["fp32", "bf16", "bf16", "bf16", "fp32", "fp32"],
        ),
        (
            {"strategy": "ddp", "precision": "bf16-mixed", "accumulate_grad_batches": 4},
            ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"],
        ),
        ({"strategy": "fsdp", "precision": "bf16-true"}, ["bf16"] * 6),
        ({"strategy": "fsdp", "precision": "16-mixed"}, ["fp32", "fp16", "fp16", "fp32", "fp32", "fp32"]),
        ({"strategy": "fsdp"}, ["fp32"] * 6),
        ({"strategy": "ddp", "precision": "bf16"}, ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"]),
        ({"strategy": "ddp", "precision": 64}, ["fp64"] * 6),
        (
            {
                "strategy": strategy(
                    "FSDPStrategy", mixed_precision={"param_dtype": "bfloat16", "reduce_dtype": "float32"}
                ),
                "precision": "bf16-mixed",
            },
            ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"],
        ),
        ({"strategy": "deepspeed_stage_2", "precision": "bf16-mixed"}, ["bf16"] * 4 + ["fp32", "bf16"]),
    ],
)
def test_precision_is_pinned(document: dict[str, Any], row: list[str]) -> None:
    assert precision("lightning", document) == row


@pytest.mark.parametrize(
    ("strategy", "word", "row"),
    [
        ("ddp", "32-true", ["bf16"] * 6),
        ("ddp", "64-true", ["fp64"] * 6),
        ("ddp", "16-true", ["fp16"] * 6),
        ("ddp", "16-mixed", ["bf16", "fp16", "bf16", "bf16", "bf16", "bf16"]),
        ("fsdp", "32-true", ["fp32"] * 6),
        ("fsdp", "bf16-mixed", ["bf16"] * 6),
    ],
)
def test_weights_stay_as_they_are_loaded_unless_the_word_casts_them(strategy: str, word: str, row: list[str]) -> None:
    assert precision("lightning", {"strategy": strategy, "precision": word}, load_dtype="bf16") == row
    library = pytest.importorskip("lightning.pytorch.plugins.precision", reason="Lightning itself")
    plain = {"32-true": "Precision", "64-true": "DoublePrecision"}
    if strategy == "fsdp":
        plugin = library.FSDPPrecision(word)
    elif word.endswith("-mixed"):
        plugin = library.MixedPrecision(word, "cpu")
    else:
        plugin = getattr(library, plain[word])() if word in plain else library.HalfPrecision(word)
    weight = plugin.convert_module(torch.nn.Linear(2, 2, dtype=torch.bfloat16)).weight
    assert DTYPE_NAMES[weight.dtype] == row[0]


def test_masters_that_the_loaded_model_does_not_have_are_told() -> None:
    for name, lossy in (("fp32", True), ("bf16-pure", False)):
        conversion = converted("terrazzo", "lightning", {"plan": "zero0", "precision": name}, load_dtype="bf16")
        (told,) = [each for each in conversion.verdicts if each.key == "precision"]
        assert (told.kind == "lossy") is lossy, told


def test_sums_over_micro_batches_are_narrow_under_fsdp_and_it_is_told() -> None:
    """FSDP1's `no_sync` leaves gradients in the dtype of gathered weights, and Lightning's Trainer calls it."""
    for count, kind in ((4, "lossy"), (1, "applied")):
        document = {"plan": "zero3", "precision": "bf16", "batch": {"global_batch": 8 * count, "micro_batch": 1}}
        document |= {"train": {"clip": None}}
        before = described("terrazzo", document, world=8)
        writing = dialect("lightning").write(before, ReadingContext(world=8))
        (told,) = [each for each in writing.verdicts if each.key == "precision.accumulate"]
        assert (before.value("batch.accumulation"), told.kind) == (count, kind)
    types, fsdp = (
        pytest.importorskip("lightning.pytorch.utilities.types"),
        pytest.importorskip("torch.distributed.fsdp"),
    )
    assert issubclass(fsdp.FullyShardedDataParallel, types.DistributedDataParallel)


def test_buffers_and_autocast() -> None:
    sharded = described("lightning", {"strategy": "fsdp", "precision": "bf16-mixed"})
    assert (sharded.value("precision.buffers"), sharded.value("precision.autocast")) == ("bf16", True)
    assert described("lightning", {"strategy": "ddp", "precision": "bf16-mixed"}).value("precision.autocast") is True
    assert described("lightning", {"strategy": "fsdp", "precision": "16-mixed"}).value("precision.loss_scaling")


@pytest.mark.parametrize(
    ("name", "row", "tiers"),
    [
        ("ddp", "zero0", ["device"] * 3),
        ("fsdp", "zero3", ["device"] * 3),
        ("fsdp_cpu_offload", "zero3", ["cpu"] * 3),
        ("deepspeed", "zero2", ["device"] * 3),
        ("deepspeed_stage_1", "zero1", ["device"] * 3),
        ("deepspeed_stage_2_offload", "zero2", ["device", "cpu", "cpu"]),
        ("deepspeed_stage_3_offload", "zero3", ["cpu"] * 3),
        ("deepspeed_stage_3_offload_nvme", "zero3", ["nvme", "cpu", "nvme"]),
    ],
)
def test_names_are_rows(name: str, row: str, tiers: list[str]) -> None:
    description = described("lightning", {"strategy": name})
    assert description.row == row
    assert [description.value(f"offload.{state}") for state in ("weight", "grad", "optim")] == tiers


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "DDPStrategy"])
def test_the_class_chooses_the_plan(name: str) -> None:
    arguments = {"FSDPStrategy": {"sharding_strategy": "FULL_SHARD"}, "DeepSpeedStrategy": {"stage": 3}}.get(name, {})
    document = {"strategy": strategy(name, **arguments), "precision": "bf16-mixed"}
    setting = described("lightning", document)["sharding.weight"]
    assert "strategy.class_path" in setting.keys
    assert setting.origin == "file"


def test_model_parallel_leaves_the_plan_to_code() -> None:
    description = described("lightning", DOCUMENTS["model parallel"])
    assert not description["sharding.weight"].is_set
    assert not description["precision.reduce"].is_set
    assert [description.value(f"mesh.{axis}") for axis in ("dp_shard", "tp")] == [1, 2]  # auto: one node


def test_a_strategy_that_is_not_known_is_refused_and_not_imported() -> None:
    document = {"strategy": {"class_path": "no_such_package.Strategy", "init_args": {"a": 1}}, "precision": "16-mixed"}
    assert verdicts("lightning", document)["strategy.class_path"].kind == "refused"
    assert not described("lightning", document)["sharding.weight"].is_set
    assert verdicts("lightning", {"strategy": "fdsp"})["strategy"].why.endswith("Did you mean 'fsdp'?")


@pytest.mark.parametrize("strategy", ["fsdp", {"class_path": "no_such_package.Strategy"}])
def test_arguments_of_a_strategy_beside_the_trainers_section_are_no_ones(strategy: Any) -> None:
    document = {"trainer": {"strategy": strategy}, "strategy": {"init_args": {"word": {"x": 1}}}}
    assert verdicts("lightning", document)["strategy.init_args.word.x"].kind == "refused"


def test_a_whole_configuration_makes_other_arguments_void() -> None:
    document = {"strategy": strategy("DeepSpeedStrategy", config={"zero_optimization": {"stage": 1}}, stage=3)}
    assert described("lightning", document).row == "zero1"
    assert verdicts("lightning", document)["strategy.init_args.stage"].kind == "refused"
    inner = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}
    outcomes = verdicts("lightning", {"strategy": strategy("DeepSpeedStrategy", config=inner)})
    assert "raises" in outcomes["strategy.init_args.config.gradient_accumulation_steps"].why


def test_of_arguments_beside_a_whole_configuration_those_of_fp16_count_where_it_has_none() -> None:
    """`_format_precision_config` writes the section by them."""
    inner = {"zero_optimization": {"stage": 1}}
    for config, kind, first in ((inner, "applied", 2.0**8), ({**inner, "fp16": {"enabled": True}}, "refused", 2.0**16)):
        beside = strategy("DeepSpeedStrategy", config=config, initial_scale_power=8)
        document = {"strategy": beside, "precision": "16-mixed"}
        assert verdicts("lightning", document)["strategy.init_args.initial_scale_power"].kind == kind
        setting = described("lightning", document)["precision.loss_scaling"]
        assert setting.value.init == first
        assert setting.keys == (("strategy.init_args.initial_scale_power",) if kind == "applied" else ())


def test_a_configuration_in_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    document = {"strategy": strategy("DeepSpeedStrategy", config="ds.json"), "accumulate_grad_batches": 2}
    assert described("lightning", document, folder=tmp_path).row == "zero1"
    assert_agrees_or_says("lightning", document, folder=tmp_path)


@pytest.mark.parametrize(
    ("document", "key", "level"),
    [
        ({"strategy": "fsdp", "gradient_clip_val": 1.0}, "gradient_clip_val", "error"),
        ({"trainer": {"strategy": "fsdp", "accelerator": "cpu"}}, "trainer.accelerator", "error"),
        ({"strategy": "fsdp", "precision": "64-true"}, "precision", "error"),
        (
            {"strategy": strategy("FSDPStrategy", sharding_strategy="HYBRID_SHARD")},
            "strategy.init_args.sharding_strategy",
            "error",
        ),
        ({"strategy": strategy("DeepSpeedStrategy", thread_count=2)}, "strategy.init_args.thread_count", "warning"),
        ({"strategy": "deepspeed_stage_3_offload"}, "strategy", "warning"),
        ({"strategy": strategy("ModelParallelStrategy"), "precision": "16-mixed"}, "precision", "error"),
    ],
)
def test_findings(document: dict[str, Any], key: str, level: str) -> None:
    assert findings_by_key("lightning", document)[key].level == level


def test_a_deepspeed_configuration_is_looked_at_as_lightning_hands_it_on(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    document = {"strategy": strategy("DeepSpeedStrategy", config=config), "precision": "bf16-mixed"}  # adds bf16
    found = findings_by_key("lightning", document)
    assert found["strategy.init_args.config.fp16.enabled"].level == "error"
    where = "strategy.init_args.config"  # Lightning says batch and clipping itself
    assert set(found) == {f"{where}.fp16.enabled", f"{where}.bf16.check_grad_overflow"}
    document["strategy"] = strategy("DeepSpeedStrategy", config="ds.json")
    named = converted("lightning", "terrazzo", document, folder=tmp_path).findings
    assert {each.key for each in named} == {where}
    assert [each.text.partition(":")[0] for each in named] == ["fp16.enabled", "bf16.check_grad_overflow"]


def test_a_class_of_ones_own_is_not_the_one_that_it_is_named_as() -> None:
    for package in ("my.project", "my.lightning"):
        document = {"strategy": {"class_path": f"{package}.DDPStrategy"}}
        assert verdicts("lightning", document)["strategy.class_path"].kind == "refused"
        assert not described("lightning", document)["sharding.weight"].is_set
    for package in ("pytorch_lightning.strategies.", "lightning.fabric.strategies.", ""):
        assert described("lightning", {"strategy": {"class_path": f"{package}DDPStrategy"}}).row == "zero0"


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("ddp_comm_hook", "refused"),
        ("model_averaging_period", "refused"),
        ("bucket_cap_mb", "defaulted"),
        ("timeout", "defaulted"),
        ("nonsense", "refused"),
    ],
)
def test_arguments_of_ddp_that_change_numbers_are_not_lost(argument: str, kind: str) -> None:
    document = {"strategy": strategy("DDPStrategy", **{argument: 4})}
    outcomes = {verdict.key: verdict for verdict in converted("lightning", "terrazzo", document).verdicts}
    assert outcomes[f"strategy.init_args.{argument}"].kind == kind


@pytest.mark.parametrize(
    ("callbacks", "kind"),
    [
        (["lightning.pytorch.callbacks.ModelSummary", "LearningRateMonitor"], "defaulted"),
        ([{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}, "LearningRateMonitor"], "lossy"),
        ({"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 5}}, "renamed"),
        ([{"class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler"}], "lossy"),
        (["ModelCheckpoint", "StochasticWeightAveraging"], "lossy"),
        ([], "defaulted"),
    ],
)
def test_callbacks_that_may_change_the_run_are_not_lost(callbacks: Any, kind: str) -> None:
    conversion = converted("lightning", "terrazzo", {"strategy": "ddp", "callbacks": callbacks})
    assert {verdict.key: verdict.kind for verdict in conversion.verdicts}["callbacks"] == kind


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of Lightning itself
@pytest.mark.parametrize(
    ("arguments", "checkpoint", "lost"),
    [
        ({"every_n_train_steps": 3, "save_top_k": -1}, {"every": 3, "keep_last": None}, ""),
        ({"every_n_train_steps": 3}, {"every": 3, "keep_last": 1}, ""),
        (
            {"every_n_train_steps": 3, "save_top_k": 2, "monitor": "step", "mode": "max"},
            {"every": 3, "keep_last": 2},
            "",
        ),
        ({"every_n_train_steps": 3, "dirpath": "ckpt"}, {"every": 3, "keep_last": 1, "folder": "ckpt"}, ""),
        ({"every_n_train_steps": 3, "save_top_k": 2, "monitor": "loss"}, {"every": 3}, "the best 2 by loss"),
        ({"every_n_train_steps": 3, "save_weights_only": True}, {"every": 3, "keep_last": 1}, "weights alone"),
        ({"every_n_epochs": 1}, {"keep_last": 1}, "ends of epochs"),
    ],
)
def test_a_model_checkpoint_saves_as_often_elsewhere(
    arguments: dict[str, Any], checkpoint: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    """What is kept of it is what Lightning leaves of 7 steps; the one at the end is Terrazzo's own, and asked for."""
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": arguments}
    conversion = converted("lightning", "terrazzo", {"strategy": "ddp", "max_steps": 7, "callbacks": [callback]})
    assert conversion.document["checkpoint"].items() >= checkpoint.items()
    (verdict,) = [each for each in conversion.verdicts if each.key == "callbacks"]
    assert (verdict.kind, lost in verdict.why) == ("lossy" if lost else "renamed", True)
    back = converted("terrazzo", "lightning", conversion.document).document["trainer"]["callbacks"]
    assert lost or set(saved_steps(back, tmp_path / "back")) == {*saved_steps([callback], tmp_path / "there"), 7}


def saved_steps(callbacks: list[dict[str, Any]], folder: Path) -> list[int]:
    """The steps whose checkpoints are there behind a run of 7."""
    lightning = pytest.importorskip("lightning.pytorch")
    boring = pytest.importorskip("lightning.pytorch.demos.boring_classes")
    kind, where = lightning.callbacks.ModelCheckpoint, {"dirpath": str(folder)}
    savers = [kind(**{**each["init_args"], **where}) for each in callbacks]
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=7, callbacks=savers, **quiet)
    trainer.fit(boring.BoringModel())
    return sorted(torch.load(path, weights_only=False)["global_step"] for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize(
    ("keep", "written"),
    [(None, {"save_top_k": -1}), (1, {"save_top_k": 1}), (3, {"save_top_k": 3, "monitor": "step", "mode": "max"})],
)
def test_a_checkpoint_at_the_end_is_one_of_lightnings(keep: int | None, written: dict[str, Any]) -> None:
    document = {"plan": "zero0", "train": {"steps": 50}, "checkpoint": {"keep_last": keep, "folder": "ckpt"}}
    conversion = converted("terrazzo", "lightning", document)
    (callback,) = conversion.document["trainer"]["callbacks"]
    assert callback["init_args"] == {"every_n_train_steps": 50, "dirpath": "ckpt", **written}
    assert not [each for each in conversion.unsaid if each.key.startswith("saving.when")]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of Lightning itself
@pytest.mark.parametrize(
    ("every", "keep", "steps"), [(3, None, [3, 6, 7]), (3, 1, [6, 7]), (7, None, [7]), (9, None, [7])]
)
def test_the_end_of_a_run_is_saved_too(every: int, keep: int | None, steps: list[int], tmp_path: Path) -> None:
    checkpoint = {"every": every, "keep_last": keep, "folder": "ckpt"}
    document = {"plan": "zero0", "train": {"steps": 7}, "checkpoint": checkpoint}
    conversion = converted("terrazzo", "lightning", document)
    told = {each.key: each for each in conversion.verdicts}
    assert told["checkpoint.every"].kind == told["checkpoint.keep_last"].kind == "renamed"
    assert ("beside them" in told["checkpoint.keep_last"].why) == (keep == 1)
    written = conversion.document["trainer"]
    assert not findings_by_key("lightning", written) and described("lightning", written).value("saving.when") == "steps"
    assert saved_steps(written["callbacks"], tmp_path) == steps


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of Lightning itself
@pytest.mark.parametrize(
    ("arguments", "steps", "when", "keep"),
    [
        ({"every_n_train_steps": 3, "save_top_k": 0}, [6], "steps", 1),
        ({"every_n_train_steps": 3, "monitor": "step", "mode": "min"}, [3, 6], "steps", 1),
        ({"every_n_train_steps": 9}, [7], "end", 1),
        ({"save_top_k": 0}, [7], "end", 1),
    ],
)
def test_the_last_is_kept_beside_others(
    arguments: dict[str, Any], steps: list[int], when: str, keep: int, tmp_path: Path
) -> None:
    callback = {"class_path": "ModelCheckpoint", "init_args": {**arguments, "save_last": True}}
    assert saved_steps([callback], tmp_path) == steps
    document = {"strategy": "ddp", "max_steps": 7, "callbacks": [callback]}
    description = described("lightning", document)
    assert (description.value("saving.when"), description.value("saving.keep_last")) == (when, keep)
    assert not [each for each in findings_by_key("lightning", document).values() if "nothing is saved" in each.text]


def test_what_lightning_does_not_save_is_told() -> None:
    def saver(**arguments: Any) -> dict[str, Any]:
        return {"class_path": "ModelCheckpoint", "init_args": arguments}

    run = {"strategy": "ddp", "max_steps": 7}
    found = findings_by_key("lightning", {**run, "callbacks": saver(every_n_train_steps=3)})["callbacks"]
    assert "the last 1 of 7 steps are not saved" in found.text
    found = findings_by_key("lightning", {**run, "callbacks": saver(every_n_train_steps=9)})["callbacks"]
    assert "nothing is saved" in found.text
    for arguments in ({"every_n_train_steps": 9}, {"every_n_epochs": 0}, {"every_n_train_steps": 0}):
        assert described("lightning", {**run, "callbacks": saver(**arguments)}).value("saving.when") == "never"
    nulls = {"every_n_train_steps": None, "every_n_epochs": None, "train_time_interval": None}  # as LightningCLI prints
    by_default = pytest.importorskip("lightning.pytorch").callbacks.ModelCheckpoint(**nulls)
    assert (by_default._every_n_train_steps, by_default._every_n_epochs) == (0, 1)  # at ends of epochs
    assert described("lightning", {**run, "callbacks": saver(**nulls)}).value("saving.when") != "never"
    several = {**run, "callbacks": [saver(every_n_train_steps=3), saver(every_n_train_steps=7, dirpath="elsewhere")]}
    outcomes = {each.key: each.why for each in converted("lightning", "terrazzo", several).verdicts}
    assert "several" in outcomes["callbacks"]
    by_epochs = converted("trainer", "lightning", {"output_dir": "out", "save_steps": 400, "num_train_epochs": 2})
    told = {each.key: each.why for each in (*by_epochs.verdicts, *by_epochs.unsaid)}
    assert "at the end of a run none is saved" in told["save_steps"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"save_top_k": -2}, "expected a whole number"),
        ({"save_top_k": 3}, "without monitor"),
        ({"save_topk": 3}, "'save_top_k'"),
        ({"every_n_train_steps": 3, "every_n_epochs": 1}, "every_n_train_steps beside every_n_epochs"),
        ({"monitor": "loss", "mode": "lowest"}, "one of min, max"),
    ],
)
def test_callbacks_that_lightning_raises_on_are_refused(arguments: dict[str, Any], words: str) -> None:
    callback = {"class_path": "ModelCheckpoint", "init_args": arguments}
    verdict = verdicts("lightning", {"strategy": "ddp", "callbacks": [callback]})["callbacks"]
    assert verdict.kind == "refused" and words in verdict.why
    kind = pytest.importorskip("lightning.pytorch.callbacks").ModelCheckpoint
    with pytest.raises(Exception, match=r"save_top|unexpected|exclusive|mode"):
        kind(**arguments)
    switched = {"strategy": "ddp", "enable_checkpointing": False, "callbacks": ["ModelCheckpoint"]}
    assert "drop one" in verdicts("lightning", switched)["callbacks"].why


def test_every_argument_of_a_model_checkpoint_is_known() -> None:
    kind = pytest.importorskip("lightning.pytorch.callbacks").ModelCheckpoint
    for name in list(inspect.signature(kind).parameters):
        callback = {"class_path": "ModelCheckpoint", "init_args": {name: None}}
        assert verdicts("lightning", {"strategy": "ddp", "callbacks": [callback]})["callbacks"].kind != "refused"


def test_a_micro_batch_in_the_configuration_of_deepspeed_is_told_where_it_is() -> None:
    conversion = converted("deepspeed", "lightning", {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}})
    (verdict,) = conversion.verdicts[:1]
    where = "trainer.strategy.init_args.config"
    assert (verdict.kind, verdict.target) == ("lossy", f"{where}.train_micro_batch_size_per_gpu")
    config = conversion.document["trainer"]["strategy"]["init_args"]["config"]
    assert config["train_micro_batch_size_per_gpu"] == 2


def test_both_words_for_activation_checkpointing_are_one_too_many() -> None:
    document = {"strategy": strategy("FSDPStrategy", activation_checkpointing=["A"])}
    assert verdicts("lightning", document)["strategy.init_args.activation_checkpointing"].kind == "renamed"
    document["strategy"]["init_args"]["activation_checkpointing_policy"] = ["A"]
    verdict = verdicts("lightning", document)["strategy.init_args.activation_checkpointing"]
    assert verdict.kind == "refused"
    assert "says it as well" in verdict.why


@pytest.mark.parametrize("seed", [True, False])
def test_a_seed_that_is_drawn_is_none(seed: bool) -> None:
    found = described("lightning", {"strategy": "ddp", "seed_everything": seed, "max_steps": 100})
    assert not found["training.seed"].is_set
    assert found.value("schedule.total_steps") == 100


def test_clipping_under_fsdp_is_refused_not_dropped() -> None:
    conversion = converted("trainer", "lightning", {"output_dir": "x", "fsdp": True, "max_grad_norm": 0.5})
    (verdict,) = [each for each in conversion.verdicts if each.key == "max_grad_norm"]
    assert verdict.kind == "refused"
    assert "configure_gradient_clipping" in verdict.why


def test_reduction_in_fp32_is_said_by_mixed_precision() -> None:
    conversion = converted("torchtitan", "lightning", {"parallelism": {"data_parallel_shard_degree": -1}})
    arguments = conversion.document["trainer"]["strategy"]["init_args"]
    assert arguments["mixed_precision"]["reduce_dtype"] == "torch.float32"
    assert conversion.after.value("precision.reduce") == "fp32"


@pytest.mark.parametrize(
    ("policy", "word", "states", "gathered"),
    [
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, "32-true", ["bf16", "fp32", "fp32", False], None),
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, "bf16-mixed", ["bf16", "fp32", "loaded", True], None),
        ({"reduce_dtype": "float32"}, "bf16-mixed", ["bf16", "fp32", "loaded", True], "fp32"),
        ({"param_dtype": "float32"}, "bf16-mixed", ["bf16", "fp32", "loaded", True], "fp32"),
        ({"param_dtype": "bfloat16", "buffer_dtype": "float32"}, "bf16-true", ["bf16", "bf16", "fp32", False], None),
        ({"param_dtype": "bfloat16"}, "bf16-true", ["bf16", "bf16", "bf16", False], None),
    ],
)
def test_mixed_precision_takes_the_place_of_the_words_dtypes(
    policy: dict[str, str], word: str, states: list[Any], gathered: str | None
) -> None:
    """The arguments are FSDP's, autocast and the cast of the module are the word's."""
    document = {"strategy": strategy("FSDPStrategy", mixed_precision=policy), "precision": word}
    description = described("lightning", document)
    paths = ("compute", "reduce", "buffers", "autocast")
    assert [description.value(f"precision.{path}") for path in paths] == states
    said = verdicts("lightning", document)["precision"]
    assert said.why == (f"weights are gathered in {gathered}, and autocast computes in bf16" if gathered else "")
    assert_agrees_or_says("lightning", document)


def test_weights_are_gathered_in_fp32_before_lightning_2_6() -> None:
    document, before = {"strategy": "fsdp", "precision": "bf16-mixed"}, {"versions": {"lightning": "2.5.6"}}
    assert "gathered in fp32" in verdicts("lightning", document, **before)["precision"].why
    assert "precision" not in findings_by_key("lightning", document, **before)
    assert "since Lightning 2.6" in findings_by_key("lightning", document)["precision"].text
    assert verdicts("lightning", document)["precision"].why == ""
    for other in ({"strategy": "fsdp", "precision": "bf16-true"}, {"strategy": "ddp", "precision": "bf16-mixed"}):
        assert "precision" not in findings_by_key("lightning", other)


@pytest.mark.parametrize("policy", [{"param_dtype": "bfloat16", "reduce_dtype": "float32"}, {}])
def test_what_fully_shard_leaves_alone_stays_as_it_is(policy: dict[str, str]) -> None:
    """Buffers and the operators that autocast would choose; without a policy, the dtype is that of the model."""
    conversion = converted("fsdp2", "lightning", {"module": ["Block"], **({"mp_policy": policy} if policy else {})})
    trainer = conversion.document["trainer"]
    assert trainer["precision"] == "32-true"
    written = {key: f"torch.{dtype}" for key, dtype in policy.items()}
    assert trainer["strategy"]["init_args"].get("mixed_precision", {}) == written
    if policy:
        assert not {each.key for each in conversion.unsaid if each.key.startswith("precision")}


def test_blocks_that_nobody_recomputes_are_no_loss() -> None:
    document = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    document["fsdp_config"]["fsdp_activation_checkpointing"] = True  # of units that are not named
    lost = {each.key for each in converted("accelerate", "lightning", document).unsaid}
    assert not {each for each in lost if each.startswith("activation_checkpointing.")}


def test_the_optimizer_of_the_cli_has_a_constant_rate_without_a_schedule() -> None:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}}
    document: dict[str, Any] = {"trainer": {"strategy": "ddp", "max_steps": 8}, "optimizer": optimizer}
    assert converted("lightning", "terrazzo", document).document["schedule"] == {"name": "constant"}
    document["lr_scheduler"] = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
    assert not described("lightning", document)["schedule.name"].is_set
    (lost,) = [
        each
        for each in converted("lightning", "terrazzo", document).verdicts
        if "class" in each.key and "lr_" in each.key
    ]
    assert lost.kind == "lossy" and "once an epoch" in lost.why
    for name, kind in (("constant", "applied"), ("cosine", "lossy")):
        back = {"plan": "zero0", "schedule": {"name": name}, "train": {"steps": 8}}
        (verdict,) = [each for each in converted("terrazzo", "lightning", back).verdicts if each.key == "schedule.name"]
        assert verdict.kind == kind, name


# -- Lightning itself ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strategies() -> Iterator[Any]:
    """Lightning's strategies; their import warns of what other packages do."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(CLASSES, reason="the oracle is Lightning itself: pip install 'lightning>=2.6'")
        logging.disable(logging.WARNING)
        yield module
        logging.disable(logging.NOTSET)


def parameters(kind: Any) -> dict[str, Any]:
    signature = inspect.signature(kind.__init__).parameters
    return {name: each.default for name, each in signature.items() if name not in ("self", "kwargs")}


def test_arguments_are_lightnings(strategies: Any) -> None:
    import lightning.pytorch

    assert set(parameters(lightning.pytorch.Trainer)) == set(TRAINER) - {"strategy.class_path"}
    assert {name: row.default for name, row in DEEPSPEED_STRATEGY.items()}.items() <= parameters(
        strategies.DeepSpeedStrategy
    ).items()
    assert set(parameters(strategies.DeepSpeedStrategy)) <= {*DEEPSPEED_STRATEGY, *SHARED}
    assert set(parameters(strategies.ModelParallelStrategy)) <= {*MODEL_PARALLEL, *SHARED}
    fsdp1 = {"cpu_offload", "mixed_precision", "auto_wrap_policy", "sharding_strategy", "device_mesh"}
    assert set(parameters(strategies.FSDPStrategy)) - {*SHARED, *FSDP} == fsdp1


def test_arguments_of_ddp_are_lightnings_and_torchs(strategies: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    assert set(parameters(strategies.SingleDeviceStrategy)) <= {*ARGUMENTS["SingleDeviceStrategy"]}
    passed_on = set(parameters(DistributedDataParallel)) - {"module"}
    assert {*parameters(strategies.DDPStrategy), *passed_on} == {*ARGUMENTS["DDPStrategy"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "arguments",
    [
        {"accelerator": "cpu", "strategy": "single_device", "devices": 2},
        {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "num_nodes": 2},
        {"accelerator": "cpu", "strategy": "fsdp", "devices": 2},
        {"accelerator": "CPU", "strategy": "ddp", "devices": 2},
        {"accelerator": "cpu", "strategy": "dpp", "devices": 2},
        {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "gradient_clip_algorithm": "Norm"},
        {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "precision": "bf16-half"},
    ],
)
def test_what_a_trainer_raises_at_is_an_error_and_its_ranks_are_ours(
    strategies: Any, arguments: dict[str, Any]
) -> None:
    from lightning.pytorch import Trainer

    try:
        made = Trainer(logger=False, enable_checkpointing=False, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        made, raised = None, error
    found = [each for each in findings_by_key("lightning", arguments).values() if each.level == "error"]
    refused = [key for key, verdict in verdicts("lightning", arguments).items() if verdict.kind == "refused"]
    if made is None:
        assert found or refused, raised
    else:
        assert described("lightning", arguments).value("mesh.world") == made.world_size
        assert refused == (["devices"] if made.num_devices != arguments["devices"] else [])  # passed over in silence


def test_names_are_lightnings(strategies: Any) -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    others = ("xla", "tpu", "terrazzo")  # the last is ours, where another test has imported it
    theirs = {name for name in StrategyRegistry.available_strategies() if not any(each in name for each in others)}
    assert theirs == set(NAMED) - {"auto", "single_device"} | {"single_device"} & theirs
    for name in theirs - {"single_device"}:
        entry = StrategyRegistry[name]
        arguments = {key: value for key, value in entry["init_params"].items() if key != "start_method"}
        assert (entry["strategy"].__name__, arguments) == NAMED[name]


@pytest.mark.parametrize(
    "betas", [[0.9, 0.95], (0.9, 0.95), UserList([0.9, 0.95])], ids=lambda betas: type(betas).__name__
)
def test_betas_are_any_sequence_of_two(betas: Any) -> None:
    """OmegaConf has lists of its own."""
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"betas": betas}}
    description = described("lightning", {"optimizer": optimizer})
    assert description.value("optimizer.betas") == (0.9, 0.95) and not description.value("optimizer.options")


def test_precision_words_are_lightnings() -> None:
    precision_plugin = pytest.importorskip("lightning.fabric.plugins.precision.precision", reason="Lightning itself")
    from typing import get_args

    names = ("_PRECISION_INPUT_STR", "_PRECISION_INPUT_STR_ALIAS", "_PRECISION_INPUT_INT")
    words = [word for name in names for word in get_args(getattr(precision_plugin, name))]
    assert set(map(str, words)) == set(map(str, WORDS))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "pin_memory": True},
        {"zero_optimization": False, "logging_batch_size_per_gpu": 4},
        {"stage": 3, "offload_optimizer": True, "offload_optimizer_device": "nvme", "nvme_path": "/x", "block_size": 7},
    ],
)
def test_the_strategy_document_is_lightnings(strategies: Any, arguments: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeedStrategy imports it")
    theirs = strategies.DeepSpeedStrategy(**arguments).config
    document = {"strategy": strategy("DeepSpeedStrategy", **arguments)}
    ours = strategy_document(trainer_arguments(document, lambda key: TRAINER[key].neutral), NO_CONTEXT).document
    added = ("gradient_accumulation_steps", "gradient_clipping")  # Lightning adds them when training starts
    assert {key: value for key, value in ours.items() if key not in added} == theirs


@pytest.mark.parametrize(
    ("source", "document"),
    [
        ("fsdp1", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2, 4], "auto_wrap_policy": ["Block"]}),
        ("terrazzo", {"plan": "shard_grad_op", "precision": "bf16", "train": {"clip": None}}),
        ("fsdp2", {"reshard_after_forward": True, "offload_policy": "CPUOffloadPolicy", "module": ["Block"]}),
        ("deepspeed", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_batch_size": 8}),
        ("terrazzo", {"plan": "zero1", "precision": "fp16"}),
    ],
)
def test_lightning_takes_what_is_written(strategies: Any, source: str, document: dict[str, Any]) -> None:
    conversion = converted(source, "lightning", document, world=8)
    written = conversion.document["trainer"]["strategy"]
    kind = getattr(strategies, written["class_path"].rpartition(".")[2])
    if kind is strategies.DeepSpeedStrategy:
        pytest.importorskip("deepspeed", reason="DeepSpeedStrategy imports it")
    made = kind(**as_lightning(written["init_args"]))
    if kind is strategies.FSDPStrategy:
        rows = {"zero3": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "hybrid_shard": "HYBRID_SHARD"}
        assert made.sharding_strategy.name == rows[str(conversion.after.row)]
        assert made.cpu_offload.offload_params == (conversion.after.value("offload.weight") == "cpu")
    else:
        stage = {"zero1": 1, "zero2": 2}[str(conversion.after.row)]
        assert made.config["zero_optimization"]["stage"] == stage


def test_a_run_without_checkpoints_is_one() -> None:
    document = {"strategy": "ddp", "enable_checkpointing": False}
    assert described("lightning", document).value("saving.when") == "never"
    assert not described("lightning", {"strategy": "ddp", "enable_checkpointing": True})["saving.when"].is_set
    written = converted("trainer", "lightning", {"output_dir": "x", "save_strategy": "no"})
    assert written.document["trainer"]["enable_checkpointing"] is False


def test_nobody_fills_auto_in_a_document_that_lightning_hands_on() -> None:
    """DeepSpeed drops it in a section that it checks, where its default holds, and has no such value at the top."""
    zero = {"stage": 3, "reduce_bucket_size": "auto"}
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero, "bf16": {"enabled": "auto"}}
    document = {"strategy": strategy("DeepSpeedStrategy", config=config), "precision": "bf16-mixed"}
    where = "strategy.init_args.config"
    outcomes = verdicts("lightning", document)
    assert outcomes[f"{where}.train_micro_batch_size_per_gpu"].kind == "refused"
    assert "its default, False" in outcomes[f"{where}.bf16.enabled"].why
    assert "its default, 500000000" in outcomes[f"{where}.zero_optimization.reduce_bucket_size"].why
    assert not [outcome for outcome in outcomes.values() if "Hugging Face" in outcome.why]
    assert described("lightning", document).value("precision.compute") == "fp32"
    assert any("nobody fills 'auto'" in found.text for found in findings_by_key("lightning", document).values())
    written = converted("deepspeed", "lightning", config, hidden_size=4, trainer={"bf16": True})
    inner = written.document["trainer"]["strategy"]["init_args"]["config"]
    assert inner == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 16}, "bf16": {"enabled": True}}


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "Rprop"])
def test_the_written_optimizer_starts(name: str) -> None:
    """LightningCLI calls the class with all parameters and `init_args`."""
    arguments = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "options": {"maximize": True}}
    arguments["options"] |= {"muon.lr": 1.0}
    told = {"name": name, **arguments}
    description = build("other", {f"optimizer.{key}": Setting(value, "file", key) for key, value in told.items()})
    writing = dialect("lightning").write(description)
    weights = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))]
    written = writing.document["optimizer"]
    optimizer = getattr(torch.optim, name)(weights, **written["init_args"])
    lost = {verdict.key.partition(".")[2]: verdict.why for verdict in writing.verdicts if verdict.kind == "lossy"}
    assert optimizer.defaults["maximize"] and "muon.lr" in lost["options"]
    for key in ("betas", "eps", "weight_decay"):
        assert (key in written["init_args"]) == (key in optimizer.defaults) == (key not in lost)


def test_muon_cannot_start_there_but_by_deepspeed() -> None:
    document = {"plan": "zero3", "optimizer": {"name": "Muon", "lr": 0.01, "muon": {"lr": 0.02}}}
    conversion = converted("terrazzo", "lightning", {**document, "train": {"clip": None}})
    assert "optimizer" not in conversion.document
    assert [each.key for each in conversion.refused] == ["optimizer.name"]
    with pytest.raises(ValueError, match="only supports 2D"):
        torch.optim.Muon([torch.nn.Parameter(torch.zeros(2))])
    conversion = converted("terrazzo", "lightning", document)  # which is clipped by norm
    config = conversion.document["trainer"]["strategy"]["init_args"]["config"]
    assert "optimizer" not in conversion.document
    assert config["optimizer"]["type"] == "Muon" and config["optimizer"]["params"]["muon_lr"] == 0.02
    (verdict,) = [each for each in conversion.verdicts if each.key == "optimizer.name"]
    assert verdict.target == "trainer.strategy.init_args.config.optimizer.type"


def as_lightning(arguments: dict[str, Any]) -> dict[str, Any]:
    """The objects that names stand for."""
    from torch.distributed.fsdp import MixedPrecision

    made = dict(arguments)
    if made.pop("auto_wrap_policy", None):
        made["auto_wrap_policy"] = {torch.nn.Linear}
    if policy := made.pop("mixed_precision", None):
        dtypes = {key: getattr(torch, value.removeprefix("torch.")) for key, value in policy.items()}
        made["mixed_precision"] = MixedPrecision(**dtypes)
    if mesh := made.pop("device_mesh", None):
        made["device_mesh"] = tuple(mesh)
    return made


def test_an_fsdp2_policy_is_what_lightning_hands_to_fsdp() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision
    from lightning.pytorch.strategies import FSDPStrategy

    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    trainer = converted("fsdp2", "lightning", {"module": ["Block"], "mp_policy": policy}).document["trainer"]
    made = FSDPStrategy(**as_lightning(trainer["strategy"]["init_args"]))
    made.precision_plugin = FSDPPrecision(trainer["precision"])
    said = made.mixed_precision_config
    assert said is not None
    assert (said.param_dtype, said.reduce_dtype, said.buffer_dtype) == (torch.bfloat16, torch.float32, None)
    with made.precision_plugin.forward_context():
        assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
    for plugin, strategy_name, word in (
        (HalfPrecision("bf16-true"), "ddp", "bf16-true"),
        (FSDPPrecision("bf16-true"), "fsdp", "bf16-true"),
        (FSDPPrecision("32-true"), "fsdp", "32-true"),
    ):
        cast = plugin.convert_module(torch.nn.BatchNorm1d(2).double()).running_mean
        buffers = described("lightning", {"strategy": strategy_name, "precision": word}).value("precision.buffers")
        assert cast.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[buffers]


@pytest.mark.parametrize(
    ("devices", "count"),
    [(4, 4), ("4", 4), ("0,1", 2), ("0,", 1), ([2, 3, 5], 3), ("auto", None), (-1, None), ("-1", None), (None, None)],
)
def test_devices_are_counted_as_lightning_does(devices: Any, count: int | None) -> None:
    document = {"strategy": "ddp", "devices": devices, "num_nodes": 2}
    assert described("lightning", document).value("mesh.world") == (count and 2 * count)
    assert verdicts("lightning", document)["devices"].kind == "applied"


@pytest.mark.parametrize("devices", ["²", "0,x", "", 0, True, [], ["a"], 1.5, 1e308, "two"])
def test_devices_that_are_none_are_refused(devices: Any) -> None:
    assert verdicts("lightning", {"strategy": "ddp", "devices": devices})["devices"].kind == "refused"


def test_ulysses_is_left_to_code_beside_deepspeed() -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "zero_optimization": {"stage": 3}}
    (verdict,) = (
        each for each in converted("deepspeed", "lightning", document).verdicts if each.key == "sequence_parallel_size"
    )
    assert (verdict.kind, "registers Ulysses" in verdict.why) == ("lossy", True)


@pytest.mark.parametrize(("clips", "kind"), [(0.5, "refused"), (1.0, "applied")])
def test_a_clipping_that_deepspeed_passes_over_is_told(clips: float, kind: str) -> None:
    strategy = {"class_path": "DeepSpeedStrategy", "init_args": {"config": {"gradient_clipping": clips}}}
    document = {"gradient_clip_val": 1.0, "strategy": strategy}
    outcome = verdicts("lightning", document)["gradient_clip_val"]
    assert (outcome.kind, "gradient_clipping" in outcome.why) == (kind, True)
    assert described("lightning", document).value("training.clip") == clips


def test_fp16_on_a_cpu_is_bf16() -> None:
    trainer = pytest.importorskip("lightning.pytorch").Trainer
    document = {"accelerator": "cpu", "devices": 1, "precision": "16-mixed"}
    with pytest.warns(UserWarning, match="not supported on CPU"):
        does = trainer(**document, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert (does.precision, does.precision_plugin.scaler) == ("bf16-mixed", None)
    description = described("lightning", document)
    assert (description.value("precision.compute"), description.value("precision.loss_scaling")) == ("bf16", None)
    assert verdicts("lightning", document)["precision"].why == "on a CPU Lightning takes bf16-mixed: say that"


def test_deepspeeds_buffers_are_cast_with_the_module() -> None:
    """`DeepSpeedPrecision.convert_module()` is `module.to(dtype)` under the `true` words."""
    for word, buffers in (("bf16-true", "bf16"), ("bf16-mixed", "loaded"), ("32-true", "fp32")):
        document = {"strategy": "deepspeed_stage_2", "precision": word}
        assert described("lightning", document).value("precision.buffers") == buffers
    inner = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    before = described("deepspeed", inner)
    said = {verdict.key: verdict for verdict in dialect("lightning").write(before).verdicts}
    assert said["precision.buffers"].kind == "lossy"


def test_the_launchers_ranks_are_laid_over_nodes() -> None:
    strategy = {"class_path": "FSDPStrategy", "init_args": {"sharding_strategy": "HYBRID_SHARD"}}
    description = described("lightning", {"num_nodes": 2, "strategy": strategy}, world=8)
    assert (description.value("mesh.dp_replicate"), description.value("mesh.dp_shard")) == (2, 4)
