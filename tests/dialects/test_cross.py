"""All dialects against each other: through ours and back no loss goes unnamed, and every pair agrees or says so."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.config import config_from_dict
from terrazzo.dialects.core.agreement import agree_on
from terrazzo.dialects.core.dialect import Dialect, Reading, ReadingContext
from terrazzo.dialects.registry import NAMES, dialect
from terrazzo.dialects.verbs.convert import Conversion, convert_reading
from terrazzo.dialects.verbs.emit import to_text
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.documents import Loaded, format_of, parse
from terrazzo.documents.dotted_keys import flatten, split
from tests.dialects.peers import KEPT, assert_each_agrees_or_says, converted, described
from tests.dialects.samples import SAMPLES

CONTEXT = ReadingContext(world=8, hidden_size=64)
OURS = dialect("terrazzo")
CASES = [(name, label) for name in NAMES for label in SAMPLES[name]]


def read(name: str, document: dict[str, Any]) -> Reading:
    return read_document(dialect(name), document, CONTEXT)


@cache
def sample(name: str, label: str) -> Reading:
    return read(name, SAMPLES[name][label])


def through(source: Dialect, reading: Reading, target: Dialect) -> tuple[Conversion, dict[str, Any]]:
    """A conversion, and its document as it is in a file."""
    conversion = convert_reading(source, reading, target, CONTEXT)
    kind = format_of(Path(f"x{target.suffix}"))
    text = to_text(
        conversion.document,
        kind,
        Loaded(Path("x.json"), {}, "", "json"),
        conversion.verdicts,
        conversion.target.program,
    )
    return conversion, parse(text, kind) if conversion.document else {}


def test_every_dialect_has_samples() -> None:
    assert set(SAMPLES) == set(NAMES)


@pytest.mark.parametrize(("name", "label"), CASES)
def test_samples_are_of_their_dialect_and_right(name: str, label: str) -> None:
    document = SAMPLES[name][label]
    assert [other for other in NAMES if dialect(other).recognises(document)] == [name]
    reading = sample(name, label)
    assert [verdict for verdict in reading.verdicts if verdict.kind == "refused"] == []
    assert reading.description.row is not None
    errors = [finding for finding in dialect(name).findings(reading, CONTEXT) if finding.level == "error"]
    assert errors == []


@pytest.mark.parametrize(("name", "label"), CASES)
def test_the_same_dialect_is_written_as_it_was(name: str, label: str) -> None:
    document = SAMPLES[name][label]
    conversion, written = through(dialect(name), sample(name, label), dialect(name))
    assert [verdict.kind for verdict in conversion.verdicts] == [each.kind for each in sample(name, label).verdicts]
    assert written == document


RECOMPUTED = {
    "accelerate": "all of every unit",
    "deepspeed": "cannot switch it on",
    "fsdp1": "your own code says it",
    "fsdp2": "your own code says it",
    "lightning": "cannot switch it on",  # by DeepSpeed
    "megatron": "as a whole; asked was selective_half",
    "torchtitan": "",
    "trainer": "whole blocks; asked was selective_half",
}
"""What each says of keeping every second product, where it has another way or none."""


@pytest.mark.parametrize("name", [name for name in NAMES if name != OURS.name])
def test_every_library_says_what_becomes_of_keeping_every_second_product(name: str) -> None:
    document = {"plan": {"name": "zero3", "units": ["Block"]}, "train": {"activation_checkpointing": "selective_half"}}
    outcomes = convert_reading(OURS, read(OURS.name, document), dialect(name), CONTEXT).verdicts
    (verdict,) = [each for each in outcomes if each.key == "train.activation_checkpointing"]
    assert verdict.kind == ("lossy" if RECOMPUTED[name] else "renamed")
    assert RECOMPUTED[name] in verdict.why


MODEL_PARALLEL = {
    "devices": 8,
    "strategy": {
        "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
        "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 4},
    },
}
"""Two axes with their sizes, and no word of what is split along them: code says that."""
AXES = {
    "accelerate": {f"parallelism_config.parallelism_config_{key}_size": n for key, n in (("dp_shard", 2), ("tp", 4))},
    "deepspeed": {"tensor_parallel.autotp_size": 4},
    "fsdp2": {"mesh.dp_shard": 2, "mesh.tp": 4},
    "megatron": {"tensor-model-parallel-size": 4, "torchrun.nproc-per-node": 8},
    "terrazzo": {"plan.mesh.dp_shard": 2, "plan.mesh.tp": 4},
    "torchtitan": {"parallelism.data_parallel_shard_degree": 2, "parallelism.tensor_parallel_degree": 4},
    "trainer": {"parallelism_config.dp_shard_size": 2, "parallelism_config.tp_size": 4},
}
"""How each says the axes; FSDP1 has the one of data ranks alone."""


@pytest.mark.parametrize("target", AXES)
@pytest.mark.parametrize("source", ["lightning", "terrazzo"])
def test_axes_are_written_where_no_row_is_or_none_that_the_target_has(source: str, target: str) -> None:
    places = {"weight": "D", "between": "D", "grad": "-", "optim": "D"}  # a row of nobody else's
    ours = {"plan": {**places, "mesh": {"dp_shard": 2, "tp": 4}}, "launch": {"ranks": 8}}
    document = {"lightning": MODEL_PARALLEL, "terrazzo": ours}[source]
    conversion = converted(source, target, document)
    assert AXES[target].items() <= flatten(conversion.document).items()
    told = [verdict for verdict in (*conversion.verdicts, *conversion.unsaid) if "nothing for mesh" in verdict.why]
    assert not told


def test_how_ranks_of_an_axis_work_together_goes_with_the_axis() -> None:
    document = {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"}}
    conversion = converted("torchtitan", "trainer", document, world=8)
    by_key = {verdict.key: verdict for verdict in (*conversion.verdicts, *conversion.unsaid)}
    assert by_key["parallelism.pipeline_parallel_schedule"].why == "without mesh.pp it says nothing"
    assert "parallel.chunks" not in by_key  # its default
    sizes = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4}
    for name in ("fsdp1", "lightning"):  # no mesh of four that eight ranks would not have
        conversion = converted("torchtitan", name, {"parallelism": sizes})
        assert "device_mesh" not in str(conversion.document)
        assert not conversion.faults
        by_key = {verdict.key: verdict for verdict in conversion.verdicts}
        assert "they take them all" in by_key["parallelism.data_parallel_shard_degree"].why


def test_degrees_that_are_all_known_are_the_number_of_ranks() -> None:
    sizes = {f"parallelism_config_{key}": size for key, size in (("dp_shard_size", 4), ("tp_size", 2))}
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {**sizes, "parallelism_config_dp_replicate_size": 2},
    }
    assert described("accelerate", document).value("mesh.world") == 16
    assert converted("accelerate", "terrazzo", document).document["launch"] == {"ranks": 16}
    del document["parallelism_config"]
    assert described("accelerate", document).value("mesh.world") is None


# -- every pair ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "label"), CASES)
def test_every_pair_agrees_or_names_the_loss(name: str, label: str) -> None:
    for target in NAMES:
        assert_agrees_or_names_the_loss(name, sample(name, label), target)


def assert_agrees_or_names_the_loss(name: str, reading: Reading, target: str) -> None:
    conversion, written = through(dialect(name), reading, dialect(target))
    assert [verdict.key for verdict in conversion.verdicts] == [verdict.key for verdict in reading.verdicts]
    writing = dialect(target).write(reading.description, CONTEXT)
    assert {each.key for each in writing.verdicts} == {
        path for path, each in reading.description.items() if each.is_set
    }
    reread = read(target, written if target != name else writing.document)
    assert_each_agrees_or_says(reading.description, writing, reread.description)
    grave = [verdict for verdict in (*conversion.verdicts, *conversion.unsaid) if verdict.kind in ("lossy", "refused")]
    assert all(verdict.why for verdict in grave)
    assert not [verdict for verdict in reread.verdicts if verdict.kind == "refused"], target
    if target == "terrazzo":
        config_from_dict(written)


# -- through ours and back -------------------------------------------------------------------------------------------


def variants(name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each sample as it is, and with each of its keys left out or set to another value of its kind."""
    for label, document in SAMPLES[name].items():
        yield label, None, document
        for key, value in flatten(document).items():
            yield f"{label} without {key}", None, changed(document, key, None)
            for other in others(value):
                yield f"{label}, {key} = {other}", other, changed(document, key, other)


def others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2] if value > 0 else []
    return [value / 2] if isinstance(value, float) else []


def changed(document: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    other = copy.deepcopy(document)
    *parents, last = split(key)
    inner: Any = other
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return other


def losses(conversion: Conversion, path: str) -> bool:
    """Whether a conversion names a loss at a path, or explains why it is none."""
    keys = conversion.before[path].keys
    named = [verdict for verdict in conversion.verdicts if verdict.key in keys and verdict.why]
    return bool(named) or any(verdict.key == path for verdict in conversion.unsaid)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "terrazzo"])
def test_through_the_hub_and_back_nothing_is_lost_unnamed(name: str, every: int) -> None:
    there_and_back = 0
    for label, _, document in itertools.islice(variants(name), None, None, every):
        reading = read(name, document)
        out, hub_document = through(dialect(name), reading, OURS)
        back, written = through(OURS, read("terrazzo", hub_document), dialect(name))
        again = read(name, written).description
        for path, setting in reading.description.items():
            if setting.origin not in ("file", "auto") or setting.value is None:
                continue
            verdicts = [verdict for verdict in out.verdicts if verdict.key in setting.keys]
            if all(verdict.kind in KEPT and not verdict.why for verdict in verdicts):
                there_and_back += agree_on(path, reading.description, again) and again[path].is_set
                assert agree_on(path, reading.description, again) or losses(back, path), (
                    label,
                    path,
                    setting,
                    again[path],
                )
    assert there_and_back > 20


LOSSLESS: dict[str, set[str]] = {
    "deepspeed": {
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
        "bf16.enabled",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    },
    "accelerate": {
        "fsdp_config.fsdp_reshard_after_forward",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.fsdp_activation_checkpointing",
        "mixed_precision",
        "num_processes",
    },
    "trainer": {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "max_steps",
        "bf16",
        "fsdp_config.reshard_after_forward",
    },
    "lightning": {"strategy", "devices", "gradient_clip_val", "precision"},
    "fsdp1": {"sharding_strategy", "mixed_precision.param_dtype", "mixed_precision.reduce_dtype"},
    "fsdp2": {"reshard_after_forward", "mp_policy.param_dtype", "mp_policy.reduce_dtype"},
    "megatron": {
        "use-distributed-optimizer",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "num-virtual-stages-per-pipeline-rank",
        "sequence-parallel",
        "bf16",
        "micro-batch-size",
        "global-batch-size",
        "seq-length",
        "lr",
        "min-lr",
        "weight-decay",
        "adam-beta1",
        "lr-decay-style",
        "lr-warmup-iters",
        "train-iters",
        "clip-grad",
        "recompute-granularity",
        "save",
        "save-interval",
    },
    "torchtitan": {
        "parallelism.data_parallel_replicate_degree",
        "training.local_batch_size",
        "training.global_batch_size",
        "training.seq_len",
        "training.steps",
    },
}
"""Keys whose meaning must come back from ours in at least one sample that has them."""


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_keys_that_matter_come_back(name: str) -> None:
    came = set()
    for label in SAMPLES[name]:
        reading = sample(name, label)
        _, hub_document = through(dialect(name), reading, OURS)
        _, written = through(OURS, read("terrazzo", hub_document), dialect(name))
        again = read(name, written).description
        keys = {key for _, setting in reading.description.items() for key in setting.keys}
        for key in keys:
            paths = [path for path, setting in reading.description.items() if key in setting.keys]
            if all(again[path].is_set and agree_on(path, reading.description, again) for path in paths):
                came.add(key)
    assert LOSSLESS[name] - came == set()


@pytest.mark.parametrize("state", ["weight", "optim"])
@pytest.mark.parametrize("tiers", [{"cpu": 0.5, "nvme": 0.5}, {"cpu": 0.5, "nvme": 0.25}])
@pytest.mark.parametrize(
    ("target", "where"),
    [("deepspeed", ""), ("trainer", "deepspeed."), ("lightning", "config."), ("accelerate", "deepspeed_config.")],
)
def test_a_state_on_two_tiers_goes_to_the_further_one_and_says_so(
    state: str, tiers: dict[str, float], target: str, where: str
) -> None:
    document = {"plan": {"name": "zero3"}, "offload": {state: tiers, "path": ["/drive"]}, "model": {"name": "gpt2"}}
    conversion = convert_reading(OURS, read("terrazzo", document), dialect(target), CONTEXT)
    outcomes = {verdict.key: verdict for verdict in conversion.verdicts}
    kind = "refused" if target == "accelerate" else "lossy"  # to which no folder for nvme can be said
    assert (outcomes[f"offload.{state}"].kind, where in outcomes[f"offload.{state}"].target) == (kind, True)
    assert "one tier" in outcomes[f"offload.{state}"].why
    assert "on nvme" in outcomes[f"offload.{state}"].why
    written = flatten(conversion.document)
    section = {"weight": "offload_param", "optim": "offload_optimizer"}[state]
    devices = [value for key, value in written.items() if key.endswith((f"{section}.device", f"{section}_device"))]
    assert devices == ["nvme"]
    assert "/drive" in written.values()


@pytest.mark.parametrize("tier", ["zzz", "cpu:abc", "cpu:2"])
def test_a_place_of_no_tier_is_found_and_stops_no_conversion(tier: str) -> None:
    document = {"plan": {"weight": "D", "between": "D", "grad": "D", "optim": f"D@{tier}"}, "model": {"name": "gpt2"}}
    reading = read("terrazzo", document)
    assert [finding.level for finding in OURS.findings(reading, CONTEXT)] == ["error"]
    for target in NAMES:
        convert_reading(OURS, reading, dialect(target), CONTEXT)


@pytest.mark.parametrize(
    ("name", "document", "ours"),
    [
        ("trainer", {"logging_steps": 10}, "log.every"),
        ("trainer", {"eval_strategy": "steps", "eval_steps": 50}, "train.eval_every"),
        ("lightning", {"log_every_n_steps": 5, "strategy": "fsdp"}, "log.every"),
        ("megatron", {"eval-interval": 100, "bf16": True}, "train.eval_every"),
        ("deepspeed", {"steps_per_print": 5}, "log.every"),
    ],
)
def test_what_is_logged_and_evaluated_is_left_out_with_the_key_that_says_it_here(
    name: str, document: dict[str, Any], ours: str
) -> None:
    verdicts = converted(name, "terrazzo", document).verdicts
    (told,) = [verdict for verdict in verdicts if verdict.why == f"in Terrazzo: {ours}"]
    assert told.kind == "defaulted" and told.tuning


OF_CLASSES = {
    "lightning": lambda name, given: {"optimizer": {"class_path": f"torch.optim.{name}", "init_args": given}},
    "torchtitan": lambda name, given: {
        "optimizer": {"param_groups": [{"pattern": ".*", "optimizer_name": name, "optimizer_kwargs": given}]}
    },
    "deepspeed": lambda name, given: {"optimizer": {"type": name, "params": given}},
}


@pytest.mark.parametrize("given", [{}, {"lr": 0.5}, {"weight_decay": 0.25}])
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.RAdam, torch.optim.NAdam, torch.optim.Rprop, torch.optim.AdamW]
)
@pytest.mark.parametrize("source", OF_CLASSES)
def test_what_a_class_of_torch_is_not_given_is_what_torch_takes(
    source: str, kind: type[torch.optim.Optimizer], given: dict[str, float]
) -> None:
    """Torch's own optimizer is asked; DeepSpeed has an AdamW of its own, and Rprop no weight decay."""
    if (source, kind) == ("deepspeed", torch.optim.AdamW) or (kind is torch.optim.Rprop and "weight_decay" in given):
        return
    takes = {"weight_decay": 0.0, **kind([torch.nn.Parameter(torch.zeros(1))], **given).defaults}  # type: ignore[call-arg]
    conversion = converted(source, "terrazzo", OF_CLASSES[source](kind.__name__, given), world=1)
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert conversion.before.value(f"optimizer.{name}") == takes.get(name), name
        known = conversion.before[f"optimizer.{name}"]
        assert not known.is_set or known.origin == ("file" if name in given else "default")
    after = conversion.document["optimizer"]
    assert after.get("weight_decay", 0.1) == takes["weight_decay"]
    assert (after.get("lr", 3e-4)) == takes["lr"]


@pytest.mark.parametrize("target", ["torchtitan", "trainer", "megatron", "terrazzo"])
def test_a_constant_rate_gains_no_warm_up(target: str) -> None:
    """LightningCLI without an lr_scheduler never changes the rate; torchtitan by itself warms up over 200 steps."""
    adamw = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
    document = {"trainer": {"strategy": "ddp", "devices": 1, "max_steps": 5000}, "optimizer": adamw}
    after = converted("lightning", target, document).after
    assert (after.value("schedule.name"), after.value("schedule.warmup_steps")) == ("constant", 0)
