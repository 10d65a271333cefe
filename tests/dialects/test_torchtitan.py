"""torchtitan's configuration, against its own dataclasses where it is installed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from terrazzo.dialects.core.description import Setting, build
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.keys import matches
from terrazzo.dialects.formats.torchtitan.keys import KEYS
from terrazzo.dialects.registry import dialect, recognise
from terrazzo.dialects.verbs.convert import convert_reading
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.documents.dotted_keys import flatten
from tests.dialects.peers import (
    assert_agrees_or_says,
    converted,
    described,
    findings_by_key,
    inventory,
    nested,
    precision,
    verdicts,
)

ADAM = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "fsdp": {"parallelism": {"data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "always"}},
    "hybrid": {"parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4}},
    "ddp": {"parallelism": {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}},
    "four axes": {
        "parallelism": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "context_parallel_degree": 2},
        "training": {"disable_cuda_graphs": True},
    },
    "training": {
        "training": {"local_batch_size": 4, "global_batch_size": 64, "seq_len": 4096, "steps": 10, "max_norm": 0.5},
        "debug": {"seed": 3},
    },
    "one micro-batch": {"training": {"global_batch_size": -1, "gc_freq": 10}},
    "pure bf16": {"training": {"dtype": "bfloat16", "enable_cpu_offload": True}},
    "optimizer": {"optimizer": {"param_groups": [ADAM], "implementation": "fused_opt_states_bf16"}},
    "stable": {"lr_scheduler": {"warmup_steps": 10, "decay_ratio": 0.2, "decay_type": "cosine", "min_lr_factor": 0.1}},
    "constant": {"lr_scheduler": {"decay_ratio": 0.0, "total_steps": None}},
    "cosine": {"lr_scheduler": {"decay_type": "cosine"}},
    "full": {"activation_checkpoint": {"type": "FullAC", "preserve_rng_state": False}, "compile": {"enable": True}},
    "saved": {"activation_checkpoint": {"preserve_rng_state": True, "determinism_check": "default", "debug": False}},
    "none": {"activation_checkpoint": None, "training": {"steps": 7}},
    "budget": {"activation_checkpoint": "MemoryBudgetAC", "compile": {"enable": True}},
    "checkpoint": {
        "checkpoint": {
            "enable": True,
            "interval": 100,
            "keep_latest_k": 0,
            "async_mode": "async_with_pinned_mem",
            "last_save_in_hf": True,
            "export_dtype": "bfloat16",
        }
    },
    "checkpoint off": {"checkpoint": {"interval": 5, "folder": "x"}},
    "others": {"comm": {"mode": "fake_backend"}, "metrics": {"log_freq": 1}, "training": {"steps": 5}},
}


@pytest.mark.parametrize("label", DOCUMENTS)
@pytest.mark.parametrize("world", [None, 8])
def test_the_writer_says_what_the_reader_reads(label: str, world: int | None) -> None:
    assert_agrees_or_says("torchtitan", DOCUMENTS[label], world=world)


def entries() -> list[str]:
    """The inventory's names, some of which share a line or name a class."""
    keys = []
    for entry in inventory("torchtitan"):
        section, _, names = entry.partition(" (")[0].partition(".")
        keys += [f"{section}.{name.strip()}" if name else section for name in names.split("/")]
    return keys


def test_every_key_of_the_inventory_has_a_verdict() -> None:
    for key in entries():
        for value in (None, True, 8, "x", ["x"]):
            assert "no such key" not in verdicts("torchtitan", nested({key: value}))[key].why, key
        assert any(matches(key, pattern) for pattern in dialect("torchtitan").keys), key


@pytest.mark.parametrize(
    ("parallelism", "row", "mesh"),
    [
        ({}, "zero3", (1, None)),
        ({"fsdp_reshard_after_forward": "never"}, "shard_grad_op", (1, None)),
        ({"pipeline_parallel_degree": 2}, "shard_grad_op", (1, None)),
        ({"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": "always"}, "zero3", (1, None)),
        ({"data_parallel_replicate_degree": 2}, "hybrid_shard", (2, None)),
        ({"data_parallel_replicate_degree": 2, "fsdp_reshard_after_forward": "never"}, "hybrid_shard_zero2", (2, None)),
        ({"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}, "zero0", (1, 8)),
        ({"data_parallel_shard_degree": 1}, "zero0", (1, 1)),
        ({"data_parallel_shard_degree": 1, "context_parallel_degree": 2}, "zero3", (1, 1)),
    ],
)
def test_rows(parallelism: dict[str, Any], row: str, mesh: tuple[int, int | None]) -> None:
    description = described("torchtitan", {"parallelism": parallelism})
    assert description.row == row
    assert (description.value("mesh.dp_replicate"), description.value("mesh.dp_shard")) == mesh


# storage, compute, reduce, accumulate, master, saved
@pytest.mark.parametrize(
    ("document", "row"),
    [
        ({"training": {"steps": 5}}, ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"]),
        ({"training": {"mixed_precision_param": "float32"}}, ["fp32"] * 6),
        ({"training": {"dtype": "bfloat16"}}, ["bf16", "bf16", "fp32", "bf16", "bf16", "fp32"]),
        ({"checkpoint": {"export_dtype": "float16"}}, ["fp32", "bf16", "fp32", "fp32", "fp32", "fp16"]),
    ],
)
def test_precision_is_pinned(document: dict[str, Any], row: list[str]) -> None:
    assert precision("torchtitan", document) == row


def test_moments_may_be_narrower() -> None:
    description = described("torchtitan", DOCUMENTS["optimizer"])
    assert (description.value("precision.moments"), description.value("precision.master")) == ("bf16", "fp32")


def test_gradients_are_reduced_in_fp32_only() -> None:
    outcome = verdicts("torchtitan", {"training": {"mixed_precision_reduce": "bfloat16"}})[
        "training.mixed_precision_reduce"
    ]
    assert outcome.kind == "refused"
    document = {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}}
    (verdict,) = [
        each for each in converted("fsdp1", "torchtitan", document).verdicts if each.key.endswith("reduce_dtype")
    ]
    assert verdict.kind == "lossy"
    assert "twice the traffic" in verdict.why


EARLIER: dict[str, Any] = {  # as presets of 0.1 and 0.2 are
    "job": {"dump_folder": "./outputs", "description": "Llama 3 8B training"},
    "profiling": {"enable_profiling": True, "profile_freq": 100},
    "model": {"name": "llama3", "flavor": "8B", "tokenizer_path": "tokenizer.model", "converters": []},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 200, "lr_min": 0.1},
    "training": {"batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000, "compile": True, "dataset": "c4"},
    "parallelism": {
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 2,
        "enable_async_tensor_parallel": True,
    },
    "checkpoint": {"enable_checkpoint": True, "interval": 500, "model_weights_only": False},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    "float8": {"filter_fqns": ["output"]},
}


def test_configurations_of_earlier_versions_are_translated() -> None:
    assert recognise(EARLIER, "x").name == "torchtitan"
    conversion = converted("torchtitan", "terrazzo", EARLIER, world=8)
    assert not conversion.refused
    document = conversion.document
    assert document["batch"] == {"micro_batch": 1, "global_batch": 4, "sequence_length": 8192}
    assert document["optimizer"]["options"] == {"betas": [0.9, 0.95], "eps": 1e-8}
    assert (document["optimizer"]["lr"], conversion.after.value("optimizer.weight_decay")) == (3e-4, 0.1)
    assert document["schedule"] == {"name": "linear", "warmup_steps": 200, "final_fraction": 0.1}
    assert document["train"]["activation_checkpointing"] == "selective_half"
    assert (document["train"]["compile"], document["checkpoint"]["every"]) == (True, 500)
    assert conversion.after.value("precision.linears") == "compute"  # a section alone converts nothing
    assert verdicts("torchtitan", {**EARLIER, "optimizer": {"lrr": 1}})["optimizer.lrr"].why.endswith("mean 'lr'?")


def test_an_earlier_configuration_is_written_as_todays() -> None:
    document = converted("torchtitan", "torchtitan", EARLIER).document
    group = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert document["optimizer"]["param_groups"][0]["optimizer_kwargs"] == group
    assert document["training"] == {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000}
    assert document["compile"] == {"enable": True, "enable_async_tensor_parallel": True}
    assert document["activation_checkpoint"] == {"type": "SelectiveAC"}
    again = verdicts("torchtitan", document).values()
    assert {each.kind for each in again} == {"applied"}
    one, other = described("torchtitan", EARLIER), described("torchtitan", document)
    differing = {path for path, setting in one.items() if setting.value != other[path].value}
    assert differing == {"training.loss_mean", "training.nonfinite"}


@pytest.mark.parametrize(
    ("section", "mode", "every"),
    [
        ({"mode": "none"}, "none", None),
        ({"mode": "full", "selective_ac_option": "2"}, "full", None),
        ({"mode": "selective"}, "every", 2),
        ({}, "every", 2),
        ({"selective_ac_option": 3}, "every", 3),
        ({"selective_ac_option": "1"}, "full", None),
        ({"mode": "memory_budget", "memory_budget": 0.3}, "selective", None),
    ],
)
def test_what_earlier_versions_recompute(section: dict[str, Any], mode: str, every: int | None) -> None:
    document = {"job": {"description": "x"}, "training": {"steps": 5}, "activation_checkpoint": section}
    found = described("torchtitan", document)
    assert found.value("activation_checkpointing.mode") == mode
    assert found.value("activation_checkpointing.every") == every


def test_whole_weights_of_earlier_versions_are_computed_with_under_autocast() -> None:
    whole = {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}
    for parallelism, autocast, compute in (
        (whole, True, "bf16"),
        ({**whole, "tensor_parallel_degree": 2}, False, "fp32"),
        ({}, False, "bf16"),
    ):
        found = described("torchtitan", {"job": {"description": "x"}, "parallelism": parallelism})
        assert (found.value("precision.autocast"), found.value("precision.compute")) == (autocast, compute)


@pytest.mark.parametrize(("version", "mean"), [("0.2.0", "micro_batches"), ("0.2.2", "tokens"), ("0.3.0", "tokens")])
def test_what_the_loss_is_the_mean_over(version: str, mean: str) -> None:
    document = {"training": {"steps": 5}}
    assert described("torchtitan", document, versions={"torchtitan": version}).value("training.loss_mean") == mean
    assert described("torchtitan", EARLIER).value("training.loss_mean") is None
    (open_mean,) = [each for each in converted("torchtitan", "terrazzo", EARLIER).findings if each.key == "training"]
    assert "--library torchtitan=" in open_mean.text
    assert "training" not in findings_by_key("torchtitan", EARLIER, versions={"torchtitan": "0.2.1"})


def test_a_degree_that_is_written_as_text_is_that_degree() -> None:
    document = {"parallelism": {"pipeline_parallel_degree": "1"}, "training": {"local_batch_size": 16}}
    assert described("torchtitan", document).value("batch.micro_batch") == 16
    assert findings_by_key("torchtitan", document) == {}


def test_a_decay_of_no_step_is_none() -> None:
    document = {"training": {"steps": 10}, "lr_scheduler": {"decay_ratio": 0.01}}
    found = described("torchtitan", document)
    assert (found.value("schedule.name"), found.value("schedule.decay_steps")) == ("constant", None)
    assert converted("torchtitan", "torchtitan", document).document == document


@pytest.mark.parametrize(("local", "part"), [(8, 16), (10, 4)])
def test_a_local_batch_that_is_not_whole_parts_is_refused(local: int, part: int) -> None:
    document = {
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": part},
        "training": {"local_batch_size": local},
    }
    assert verdicts("torchtitan", document)["training.local_batch_size"].kind == "refused"
    assert described("torchtitan", document).value("batch.accumulation") is None


@pytest.mark.parametrize(("scale", "kind"), [(None, "applied"), ("match_rms_adamw", "applied"), ("other", "refused")])
def test_ways_of_scaling_matrices(scale: str | None, kind: str) -> None:
    groups = [
        {"pattern": "x", "optimizer_name": "DistMuon", "optimizer_kwargs": {"adjust_lr_fn": scale}},
        {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-3}},
    ]
    document = {"optimizer": {"param_groups": groups}}
    assert verdicts("torchtitan", document)["optimizer.param_groups"].kind == kind
    wanted = scale if kind == "applied" and scale else "original"
    assert described("torchtitan", document).value("optimizer.options")["muon.adjust_lr"] == wanted


def test_a_recipe_that_is_no_word_is_refused() -> None:
    document = {"model": {"converters": ["float8"]}, "float8": {"recipe_name": ["rowwise"]}}
    assert verdicts("torchtitan", document)["float8.recipe_name"].kind == "refused"


@pytest.mark.parametrize(("off", "found"), [("false", True), ("true", False), (True, False)])
def test_switches_written_as_text_are_found(off: Any, found: bool) -> None:
    document = {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"disable_cuda_graphs": off}}
    assert bool(findings_by_key("torchtitan", document)) is found


def test_there_were_no_cuda_graphs_before_torchtitan_0_3() -> None:
    document = {"parallelism": {"pipeline_parallel_degree": 2}}
    key, versions = "parallelism.pipeline_parallel_degree", {"torchtitan": "0.2"}
    assert key in findings_by_key("torchtitan", document)
    assert key not in findings_by_key("torchtitan", document, versions=versions)


@pytest.mark.parametrize("key", ["deterministic", "batch_invariant"])
def test_operators_of_other_results_are_no_matter_of_speed(key: str) -> None:
    for on, kind in ((True, "lossy"), (False, "defaulted")):
        (verdict,) = converted("torchtitan", "terrazzo", {"debug": {key: on}}).verdicts
        assert verdict.kind == kind


def test_stages_run_the_local_batch_in_parts() -> None:
    """`local_batch_size` sequences of a data rank go through the stages as `pipeline_parallel_microbatch_size` each."""
    document = {
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
        "training": {"local_batch_size": 16},
    }
    conversion = converted("torchtitan", "terrazzo", document, world=8)
    assert conversion.document["batch"]["micro_batch"] == 2
    assert conversion.after.value("batch.accumulation") in (8, None)
    assert conversion.document["batch"]["global_batch"] == 16 * 4
    back = converted("terrazzo", "torchtitan", conversion.document, world=8).document
    assert back["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert back["training"]["local_batch_size"] == 16
    assert converted("torchtitan", "torchtitan", document).document == document


@pytest.mark.parametrize(
    ("schedule", "section", "kind"),
    [
        ("1F1B", {}, "renamed"),
        ("GPipe", {"schedule": "gpipe"}, "renamed"),
        ("Interleaved1F1B", {"chunks": 2}, "renamed"),
        ("InterleavedZeroBubble", {"schedule": "zero_bubble"}, "lossy"),
        ("ZBVZeroBubble", {"schedule": "zero_bubble"}, "lossy"),
        ("LoopedBFS", {}, "lossy"),
    ],
)
def test_schedules_of_stages_are_taken_over(schedule: str, section: dict[str, Any], kind: str) -> None:
    document = {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}}
    conversion = converted("torchtitan", "terrazzo", document)
    (verdict,) = (each for each in conversion.verdicts if each.key == "parallelism.pipeline_parallel_schedule")
    assert verdict.kind == kind
    pipeline = conversion.document.get("parallel", {}).get("pipeline", {})
    usual = {"schedule": "1f1b", "chunks": 1}
    assert {**usual, **pipeline} == {**usual, **section}
    back = converted("terrazzo", "torchtitan", conversion.document).document["parallelism"]
    assert (back.get("pipeline_parallel_schedule", "1F1B") == schedule) is (kind == "renamed" or "Inter" in schedule)
    assert converted("torchtitan", "torchtitan", document).document == document


def test_layers_of_a_stage_say_how_many_a_rank_has() -> None:
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    document = {"parallelism": {**parallelism, "pipeline_parallel_layers_per_stage": 4}}
    conversion = converted("torchtitan", "terrazzo", document, layers=32)
    assert conversion.document["parallel"]["pipeline"]["chunks"] == 4
    back = converted("terrazzo", "torchtitan", conversion.document, layers=32).document
    assert back["parallelism"]["pipeline_parallel_layers_per_stage"] == 4
    assert "--model" in str(converted("terrazzo", "torchtitan", conversion.document).verdicts)


@pytest.mark.parametrize("split_norms", [True, False])
def test_sequences_between_matrices(split_norms: bool) -> None:
    document = {"parallelism": {"tensor_parallel_degree": 2, "enable_sequence_parallel": split_norms}}
    conversion = converted("torchtitan", "terrazzo", document)
    assert conversion.document.get("parallel", {}).get("tensor", {}).get("sequence", True) is split_norms
    back = converted("terrazzo", "torchtitan", conversion.document).document["parallelism"]
    assert back.get("enable_sequence_parallel", True) is split_norms


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "parallelism.pipeline_parallel_degree"),
        ({"activation_checkpoint": {"memory_budget": 0.3}}, "activation_checkpoint"),
        ({"compile": {"enable_async_tensor_parallel": True}}, "compile.enable_async_tensor_parallel"),
        ({"checkpoint": {"keep_latest_k": 1}}, "checkpoint.keep_latest_k"),
    ],
)
def test_findings(document: dict[str, Any], key: str) -> None:
    assert findings_by_key("torchtitan", document)[key].level == "error"


def test_a_second_copy_in_the_node_is_no_axis_here() -> None:
    for world in (None, 8):
        conversion = converted("fsdp2", "torchtitan", {"reshard_after_forward": 4}, world=world)
        assert conversion.after.row == "zero3"
        assert conversion.document["parallelism"]["data_parallel_shard_degree"] == -1
    (verdict,) = conversion.verdicts
    assert verdict.kind == "lossy"


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_schedules_come_back(schedule: str) -> None:
    steps = {"decay_steps": 20} if schedule == "wsd" else {}
    document = {"schedule": {"name": schedule, "warmup_steps": 10, **steps}, "train": {"steps": 100}}
    after = converted("terrazzo", "torchtitan", document).after
    assert after.value("schedule.name") == schedule
    assert after.value("schedule.warmup_steps") == 10
    assert after.value("schedule.decay_steps") == (20 if schedule == "wsd" else None)


@pytest.mark.parametrize(
    ("schedule", "key", "lengths"),
    [
        ({"decay_ratio": 0.9, "warmup_steps": 200}, "lr_scheduler.decay_ratio", ("wsd", 200, 800)),
        ({"decay_ratio": 0.8, "warmup_steps": 200}, "", ("wsd", 200, 800)),
        ({"decay_type": "sqrt", "warmup_steps": 200}, "", ("wsd", 200, 800)),
        ({"decay_ratio": 0.5, "warmup_steps": 1200}, "lr_scheduler.warmup_steps", ("constant", 1000, None)),
        ({"warmup_steps": 1200}, "lr_scheduler.warmup_steps", ("linear", 1000, None)),
    ],
)
def test_lengths_are_cut_as_torchtitan_cuts_them(schedule: dict[str, Any], key: str, lengths: Any) -> None:
    """Its `build_lr_schedulers`: warm-up is at most the run, and the decay at most what that leaves, with a warning."""
    document = {"lr_scheduler": schedule, "training": {"steps": 1000}}
    conversion = converted("torchtitan", "terrazzo", document)
    for description in (conversion.before, conversion.after):
        told = tuple(description.value(f"schedule.{name}") for name in ("name", "warmup_steps", "decay_steps"))
        assert told == lengths
    found = {finding.key: finding.level for finding in conversion.findings if finding.key.startswith("lr_scheduler")}
    assert found.keys() >= {key} - {""} and set(found.values()) <= {"warning"} and bool(found) is bool(key)
    assert not any("longer than" in each.why for each in (*conversion.verdicts, *conversion.unsaid))


# -- torchtitan itself ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def configs() -> ModuleType:
    """Its module of dataclasses, by itself: the package as a whole needs a nightly torch."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the oracle is torchtitan itself: pip install --no-deps 'torchtitan>=0.3'")
    path = Path(spec.submodule_search_locations[0]) / "config" / "configs.py"
    loader = importlib.util.spec_from_file_location("torchtitan_configs", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module
    loader.loader.exec_module(module)
    return module


SECTIONS = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}


def test_the_fields_are_the_dataclasss(configs: ModuleType) -> None:
    for section, name in SECTIONS.items():
        made = getattr(configs, name)()
        theirs = {f"{section}.{field.name}": getattr(made, field.name) for field in dataclasses.fields(made)}
        ours = {key: row.default for key, row in KEYS.items() if row.meaning and key.startswith(f"{section}.")}
        assert ours == theirs
    for section, name in {"comm": "CommConfig", "debug": "DebugConfig"}.items():
        fields = {f"{section}.{field.name}" for field in dataclasses.fields(getattr(configs, name))}
        assert fields == {key for key in KEYS if key.startswith(f"{section}.")}


def test_what_it_saves_is_read_as_its_defaults(configs: ModuleType) -> None:
    kinds = {**SECTIONS, "comm": "CommConfig", "debug": "DebugConfig"}
    saved = {name: dataclasses.asdict(getattr(configs, kind)()) for name, kind in kinds.items()}
    assert not [verdict for verdict in verdicts("torchtitan", saved).values() if verdict.kind in ("refused", "lossy")]
    read, empty = described("torchtitan", saved), described("torchtitan", {})
    for path in ("precision.reduce", "mesh.dp_shard", "sharding.between", "batch.micro_batch", "training.clip"):
        assert (path, read.value(path)) == (path, empty.value(path))
    assert_agrees_or_says("torchtitan", saved)


FILES = {
    "checkpoint": ("components/checkpointer/base.py", "components/checkpointer/dcp.py"),
    "lr_scheduler": ("components/optimizer/lr_scheduler.py",),
    "optimizer": ("components/optimizer/optimizer.py",),
    "activation_checkpoint": ("distributed/activation_checkpoint.py",),
    "metrics": ("components/metrics.py",),
    "profiler": ("tools/profiler.py",),
}


@pytest.mark.parametrize("section", FILES)
def test_the_fields_of_components_are_theirs(section: str, configs: ModuleType) -> None:
    folder = Path(str(configs.__file__)).parent.parent
    fields = {f"{section}.{name}" for file in FILES[section] for name in config_fields(folder / file)}
    ours = {key for key in KEYS if key.startswith(f"{section}.")} - {"activation_checkpoint.type"}
    assert ours == fields


def config_fields(path: Path) -> list[str]:
    """Fields of the classes named Config in a file, which is read and not run."""
    tree = ast.parse(path.read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Config"]
    lines = [line for each in classes for line in each.body if isinstance(line, ast.AnnAssign)]
    return [line.target.id for line in lines if isinstance(line.target, ast.Name)]


@pytest.mark.parametrize(
    ("source", "document"),
    [
        ("terrazzo", {"plan": {"name": "hybrid_shard", "mesh": {"dp_replicate": 2}}, "precision": "bf16"}),
        ("terrazzo", {"plan": "zero0", "train": {"steps": 50}}),
        ("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": {"offload_params": True}}),
        ("trainer", {"output_dir": "x", "fsdp": True, "bf16": True, "gradient_accumulation_steps": 4}),
        ("deepspeed", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 64}),
    ],
)
def test_torchtitan_takes_what_is_written(source: str, document: dict[str, Any], configs: ModuleType) -> None:
    conversion = converted(source, "torchtitan", document, world=8)
    made = {name: getattr(configs, kind)(**conversion.document.get(name, {})) for name, kind in SECTIONS.items()}
    after, mesh = conversion.after, made["parallelism"]
    replicas, shards = mesh.data_parallel_replicate_degree, mesh.data_parallel_shard_degree
    assert 8 % replicas == 0 if shards == -1 else replicas * shards == 8
    hybrid, whole = after.row in ("hybrid_shard", "hybrid_shard_zero2"), after.row == "zero0"
    assert (replicas > 1) == (hybrid or whole)
    assert (shards == 1) == whole
    assert made["training"].enable_cpu_offload == (after.value("offload.weight") == "cpu")
    if after.value("batch.global_batch") is not None and "global_batch_size" in conversion.document.get("training", {}):
        ranks = 8
        assert made["training"].global_batch_size % (made["training"].local_batch_size * ranks) == 0


@pytest.mark.parametrize(
    ("section", "mode"),
    [
        ({}, "selective_half"),  # torchtitan's default
        ({"activation_checkpoint": "SelectiveAC"}, "selective_half"),
        ({"activation_checkpoint": {"type": "SelectiveAC"}}, "selective_half"),
        ({"activation_checkpoint": {"force_recompute_mm_shapes_by_fqns": []}}, "selective_half"),
        ({"activation_checkpoint": "MemoryBudgetAC"}, "selective"),
        ({"activation_checkpoint": {"memory_budget": 0.3}}, "selective"),
        ({"activation_checkpoint": {"type": "FullAC"}}, "full"),
        ({"activation_checkpoint": None}, "none"),
    ],
)
def test_what_is_recomputed(section: dict[str, Any], mode: str) -> None:
    document = {"training": {"steps": 5}, **section}
    assert converted("torchtitan", "terrazzo", document).document["train"]["activation_checkpointing"] == mode
    assert_agrees_or_says("torchtitan", document)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"activation_checkpoint": "MemoryBudgetAC"}, "nearest is selective"),
        ({"activation_checkpoint": {"memory_budget": 0.3}}, "nearest is selective"),
        ({"optimizer": {"param_groups": [ADAM, ADAM]}}, "the last of 2 groups is read"),
        (
            {"optimizer": {"param_groups": [{**ADAM, "pattern": "layers.*"}]}},
            "is for the parameters of 'layers.*' alone",
        ),
        ({"optimizer": {"param_groups": [{**ADAM, "lr": 0.1}]}}, "'lr' is no part of a group"),
    ],
)
def test_what_a_key_says_beyond_its_settings_is_lost_elsewhere_and_named(document: dict[str, Any], why: str) -> None:
    elsewhere = "refused" if why.endswith(("is read", "alone")) else "lossy"  # for all, its numbers would be others
    for target, kind in (("terrazzo", elsewhere), ("torchtitan", "applied")):
        (verdict,) = converted("torchtitan", target, document).verdicts
        assert verdict.kind == kind
        assert (why in verdict.why) is (kind != "applied")


@pytest.mark.parametrize(("micro", "total", "local"), [(1, 8, 2), (1, 10, None), (2, 8, 2), (2, 12, None)])
def test_a_batch_that_does_not_fill_the_micro_batches_of_stages_is_lost_by_name(
    micro: int, total: int, local: int | None
) -> None:
    document = {"plan": {"mesh": {"pp": 2}}, "batch": {"global_batch": total, "micro_batch": micro}}
    conversion = converted("terrazzo", "torchtitan", document, world=8)
    assert flatten(conversion.document).get("training.local_batch_size") == local
    (verdict,) = [each for each in conversion.verdicts if each.key == "batch.global_batch"]
    assert (verdict.kind == "lossy") is (local is None)
    assert (f"{total} samples do not come out whole on 4 data ranks" in verdict.why) is (local is None)


def test_routing_that_is_forced_is_no_detail() -> None:
    (verdict,) = converted("torchtitan", "terrazzo", {"debug": {"moe_force_load_balance": True}}).verdicts
    assert (verdict.kind, "other experts" in verdict.why) == ("refused", True)
    (verdict,) = converted("torchtitan", "terrazzo", {"debug": {"moe_force_load_balance": False}}).verdicts
    assert verdict.tuning


@pytest.mark.parametrize(
    ("mode", "name", "kind", "why"),
    [
        ("none", None, "renamed", ""),
        ("full", "FullAC", "renamed", ""),
        ("selective_half", "SelectiveAC", "renamed", ""),
        ("selective", "SelectiveAC", "lossy", "keeps every second matrix product"),
        ("every_2", "FullAC", "lossy", "every block"),
    ],
)
def test_the_class_of_what_is_recomputed(mode: str, name: str | None, kind: str, why: str) -> None:
    conversion = converted("terrazzo", "torchtitan", {"train": {"activation_checkpointing": mode}})
    assert conversion.document["activation_checkpoint"] == name
    (verdict,) = conversion.verdicts
    assert verdict.kind == kind
    assert why in verdict.why


def test_a_config_written_into_itself_loses_nothing() -> None:
    """Without a global batch there is one micro-batch per step, which the same config says without a key."""
    source = dialect("torchtitan")
    reading = read_document(source, {"training": {"local_batch_size": 2}}, ReadingContext(world=8))
    assert not convert_reading(source, reading, source, ReadingContext(world=8)).unsaid


@pytest.mark.parametrize(("compute", "kind"), [("bf16", "applied"), ("fp32", "applied"), ("fp16", "refused")])
def test_compute_alone_is_written(compute: str, kind: str) -> None:
    """Where the source says no dtype of the weights, which torchtitan then has in fp32."""
    writing = dialect("torchtitan").write(build("fsdp2", {"precision.compute": Setting(compute)}))
    assert [verdict.kind for verdict in writing.verdicts] == [kind]
    assert ("training" in writing.document) is (compute == "fp32")


@pytest.mark.parametrize("section", ["quantize.linear.float8", "float8"])
def test_float8_of_earlier_versions_is_how_linear_layers_multiply(section: str) -> None:
    inside: dict[str, Any] = {
        "recipe_name": "rowwise", "filter_fqns": ["output", "router.gate"], "enable_fsdp_float8_all_gather": True,
    }  # fmt: skip
    document = {**nested({section: inside}), "model": {"converters": [section]}}
    conversion = converted("torchtitan", "terrazzo", document)
    assert conversion.document["precision"]["linears"] == "fp8-rowwise"
    assert conversion.document["precision"]["skip"] == ["*output*", "*router.gate*"]
    assert verdicts("torchtitan", document)[f"{section}.recipe_name"].kind == "renamed"
    assert_agrees_or_says("torchtitan", document)


@pytest.mark.parametrize("section", [{}, {"filter_fqns": []}])
def test_without_a_filter_heads_are_in_float8_too(section: dict[str, Any]) -> None:
    document = {"float8": section, "model": {"converters": ["float8"]}}
    assert described("torchtitan", document).value("precision.skip") == ()
    assert converted("torchtitan", "terrazzo", document).document["precision"]["skip"] == []


@pytest.mark.parametrize(
    ("name", "kind"), [("mx", "refused"), ("quantize.grouped_mm.float8", "refused"), ("lora", "lossy")]
)
def test_other_converters_are_not_lost_in_silence(name: str, kind: str) -> None:
    document = {"training": {"steps": 5}, "model": {"converters": [name]}}
    (verdict,) = [each for each in converted("torchtitan", "terrazzo", document).verdicts if "model" in each.key]
    assert verdict.kind == kind


@pytest.mark.parametrize(
    ("inside", "key", "kind"),
    [
        ({"recipe_name": "rowwise_with_gw_hp"}, "recipe_name", "lossy"),
        ({"recipe_name": "blockwise"}, "recipe_name", "refused"),
        ({"filter_fqns": ["auto_filter_small_kn"]}, "filter_fqns", "lossy"),
        ({"filter_fqns": "output"}, "filter_fqns", "refused"),
        ({"typo": 1}, "typo", "refused"),
    ],
)
def test_what_of_float8_is_other_here_is_said(inside: dict[str, Any], key: str, kind: str) -> None:
    document = {"quantize": {"linear": {"float8": inside}}, "model": {"converters": ["quantize.linear.float8"]}}
    assert verdicts("torchtitan", document)[f"quantize.linear.float8.{key}"].kind == kind


def test_the_last_checkpoint_is_one_to_go_on_from() -> None:
    """Its own last one has weights alone; others' have all."""
    ours = {"plan": "zero3", "train": {"steps": 10}, "checkpoint": {"folder": "ckpt"}}
    written = converted("terrazzo", "torchtitan", ours).document
    assert written["checkpoint"]["last_save_model_only"] is False
    assert not findings_by_key("torchtitan", written)
    ours["checkpoint"]["save_format"] = "hf"
    conversion = converted("terrazzo", "torchtitan", ours)
    assert "last_save_model_only" not in conversion.document["checkpoint"]
    (export,) = [each for each in conversion.verdicts if each.key == "checkpoint.save_format"]
    assert export.kind == "lossy" and "no run goes on" in export.why

    alone = {"training": {"steps": 10}, "checkpoint": {"enable": True, "interval": 10}}
    assert "nothing goes on from it" in findings_by_key("torchtitan", alone)["checkpoint.interval"].text
    alone["checkpoint"]["last_save_model_only"] = False
    outcomes = {each.key: each.kind for each in converted("torchtitan", "terrazzo", alone).verdicts}
    assert outcomes["checkpoint.last_save_model_only"] == "applied"
    alone["checkpoint"]["last_save_in_hf"] = True
    assert findings_by_key("torchtitan", alone)["checkpoint.last_save_in_hf"].level == "error"
    only_loads = {"checkpoint": {"enable": True, "load_only": True}}
    assert described("torchtitan", only_loads).value("saving.when") == "never"
