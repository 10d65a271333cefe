"""FSDP1's arguments, against torch's own signature, enums and dataclasses, and its own constructor."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from terrazzo.dialects.core.keys import matches
from terrazzo.dialects.formats.fsdp1.keys import KEYS
from terrazzo.dialects.registry import dialect
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
from tests.helpers.fake import fake_group

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "strategy": {"sharding_strategy": "SHARD_GRAD_OP"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2, 4], "auto_wrap_policy": ["LlamaDecoderLayer"]},
    "nulls": {"sharding_strategy": None, "mixed_precision": None, "auto_wrap_policy": None, "backward_prefetch": None},
    "empty policy": {"mixed_precision": {}, "sharding_strategy": "NO_SHARD"},
    "precision": {"mixed_precision": {**BF16, "buffer_dtype": "float32", "keep_low_precision_grads": True}},
    "casts": {"mixed_precision": {"param_dtype": "float16", "cast_forward_inputs": True}},
    "size": {"auto_wrap_policy": {"size_based_auto_wrap_policy": {"min_num_params": 1000, "exclude_wrap_modules": []}}},
    "classes": {"auto_wrap_policy": {"transformer_layer_cls": ["Block", "Head"]}},
    "offload": {"cpu_offload": {"offload_params": True}, "forward_prefetch": True, "sync_module_states": True},
    "post": {"backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False, "use_orig_params": True},
    "code": {"param_init_fn": "init", "device_id": 0, "ignored_modules": ["head"], "device_mesh": [8]},
}


def test_every_argument_of_torch_is_known() -> None:
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self", "module"}
    assert arguments == {key.partition(".")[0] for key in KEYS}
    fields = {f"mixed_precision.{field.name}" for field in dataclasses.fields(MixedPrecision)}
    assert fields == {key for key in KEYS if key.startswith("mixed_precision.")}


def test_switches_are_by_default_what_torch_has_them() -> None:
    """Else `config diff` calls what somebody has written the usual."""
    parameters = inspect.signature(FullyShardedDataParallel.__init__).parameters.values()
    theirs = {each.name: each.default for each in parameters if isinstance(each.default, bool)}
    assert {name: KEYS[name].default for name in theirs} == theirs and "use_orig_params" in theirs
    (extra,) = described("fsdp1", {"use_orig_params": True}).extras
    assert not extra.usual


def test_every_key_of_the_inventory_has_a_verdict() -> None:
    for key in inventory("fsdp1"):
        name = key.replace("MixedPrecision", "mixed_precision")
        for value in (None, True, 8, "x", ["x"]):
            assert "no such key" not in verdicts("fsdp1", nested({name: value}))[name].why, name
        assert any(matches(name, pattern) for pattern in dialect("fsdp1").keys), name
        assert dialect("fsdp1").meaning(name), name


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_strategies_are_rows(name: str) -> None:
    assert name in ShardingStrategy.__members__
    rows = dict(zip(ShardingStrategy.__members__, ("zero3", "shard_grad_op", "zero0"), strict=False))
    rows |= {"HYBRID_SHARD": "hybrid_shard", "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2"}
    for spelling in (name, name.lower(), f"ShardingStrategy.{name}"):
        assert described("fsdp1", {"sharding_strategy": spelling}).row == rows[name]
    assert set(rows) == set(ShardingStrategy.__members__)


@pytest.mark.parametrize(
    ("name", "flat", "row"),
    [("HYBRID_SHARD", "FULL_SHARD", "zero3"), ("_HYBRID_SHARD_ZERO2", "SHARD_GRAD_OP", "shard_grad_op")],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_single_node_is_full_sharding(name: str, flat: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP1 makes one group of all ranks of the node, and groups of one rank between nodes."""
    document = {"sharding_strategy": name, "auto_wrap_policy": ["Block"], "device_mesh": [1, 8]}
    assert (described("fsdp1", document).row, verdicts("fsdp1", document)["sharding_strategy"].kind) == (row, "renamed")
    monkeypatch.setattr(torch.cpu, "device_count", lambda: 8)
    policy = as_torch({"auto_wrap_policy": ["Block"]})
    with fake_group(8):
        cpu = torch.device("cpu")
        hybrid = FullyShardedDataParallel(model(), device_id=cpu, sharding_strategy=ShardingStrategy[name], **policy)
        full = FullyShardedDataParallel(model(), device_id=cpu, sharding_strategy=ShardingStrategy[flat], **policy)
        assert (hybrid.process_group.size(), hybrid._inter_node_pg.size()) == (8, 1)
        shapes = [[parameter.shape for parameter in wrapped.parameters()] for wrapped in (hybrid, full)]
        assert shapes[0] == shapes[1]


def test_defaults_are_torchs() -> None:
    description = described("fsdp1", {})
    signature = inspect.signature(FullyShardedDataParallel.__init__).parameters
    assert signature["backward_prefetch"].default is BackwardPrefetch.BACKWARD_PRE
    assert signature["forward_prefetch"].default is False
    assert (description.value("prefetch.backward"), description.value("prefetch.forward")) == (1, 0)
    assert signature["auto_wrap_policy"].default is None
    assert (description.row, description.value("units.policy")) == ("zero3", "none")
    assert signature["sync_module_states"].default is description.value("loading.broadcast") is False


# storage, compute, reduce, accumulate, master and moments, saved
@pytest.mark.parametrize(
    ("policy", "row"),
    [
        ({"param_dtype": "bfloat16"}, ["fp32", "bf16", "bf16", "fp32", "fp32", "fp32"]),
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, ["fp32", "bf16", "fp32", "fp32", "fp32", "fp32"]),
        ({"param_dtype": "torch.float16"}, ["fp32", "fp16", "fp16", "fp32", "fp32", "fp32"]),
        ({**BF16, "keep_low_precision_grads": True}, ["fp32", "bf16", "bf16", "bf16", "fp32", "fp32"]),
        (None, ["loaded"] * 6),
    ],
)
def test_precision_is_pinned(policy: dict[str, Any] | None, row: list[str]) -> None:
    assert precision("fsdp1", {"mixed_precision": policy}) == row


def test_the_load_dtype_is_storage_master_and_saved() -> None:
    row = ["bf16", "bf16", "fp32", "bf16", "bf16", "bf16"]
    assert precision("fsdp1", {"mixed_precision": {"reduce_dtype": "float32"}}, load_dtype="bf16") == row


@pytest.mark.parametrize("label", DOCUMENTS)
def test_the_writer_says_what_the_reader_reads(label: str) -> None:
    assert_agrees_or_says("fsdp1", DOCUMENTS[label])


@pytest.mark.parametrize("key", ["use_orig_params", "limit_all_gathers"])
@pytest.mark.parametrize("target", ["fsdp2", "terrazzo", "torchtitan", "deepspeed"])
def test_arguments_that_only_fsdp1_needs_are_noted(key: str, target: str) -> None:
    conversion = converted("fsdp1", target, {"sharding_strategy": "FULL_SHARD", key: True}, world=8)
    (verdict,) = [each for each in conversion.verdicts if each.key == key]
    assert verdict.kind == "defaulted"  # the target does well without
    assert "FSDP1 only" in verdict.why


@pytest.mark.parametrize("target", ["fsdp2", "torchtitan", "trainer", "lightning", "terrazzo"])
@pytest.mark.parametrize(("strategy", "row"), [("HYBRID_SHARD", "hybrid_shard"), ("NO_SHARD", "zero0")])
def test_replication_stays_replication(target: str, strategy: str, row: str) -> None:
    mesh = {"device_mesh": [2, 4]} if row == "hybrid_shard" else {}
    document = {"sharding_strategy": strategy, "auto_wrap_policy": ["Block"], **mesh}
    conversion = converted("fsdp1", target, document, world=8)
    assert conversion.after.row == row
    assert not conversion.refused
    if mesh:
        assert [conversion.after.value(f"mesh.{axis}") for axis in ("dp_replicate", "dp_shard")] == [2, 4]


@pytest.mark.parametrize("target", ["fsdp2", "torchtitan"])
def test_what_is_whole_is_never_split_where_the_number_of_ranks_is_not_known(target: str) -> None:
    conversion = converted("fsdp1", target, {"sharding_strategy": "NO_SHARD"})
    (verdict,) = conversion.verdicts
    assert conversion.after.row == "zero0" or verdict.kind == "refused"
    split = conversion.document.get("parallelism", {}).get("data_parallel_shard_degree")
    assert split == 1 or conversion.document.get("mesh", {}).get("dp_shard") == 1


def test_hybrid_without_sizes_says_so() -> None:
    conversion = converted("fsdp1", "fsdp2", {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": ["Block"]})
    (verdict,) = [each for each in conversion.verdicts if each.key == "sharding_strategy"]
    assert verdict.kind == "lossy"
    assert conversion.document["mesh"] == {"dp_replicate": None, "dp_shard": None}
    assert conversion.after.row == "hybrid_shard"


def test_reduce_dtype_is_always_said_to_fsdp2() -> None:
    conversion = converted("fsdp1", "fsdp2", {"mixed_precision": {"param_dtype": "bfloat16"}})
    assert conversion.document["mp_policy"] == BF16


def test_functions_are_refused_not_run() -> None:
    verdict = verdicts("fsdp1", {"auto_wrap_policy": "my.module.policy"})["auto_wrap_policy"]
    assert verdict.kind == "refused"
    assert "not run" in verdict.why


@pytest.mark.parametrize(
    ("document", "key", "level"),
    [
        ({"sharding_strategy": "HYBRID_SHARD"}, "sharding_strategy", "error"),
        ({"sharding_strategy": "NO_SHARD"}, "sharding_strategy", "warning"),
        ({"ignored_modules": ["a"], "ignored_states": ["b"]}, "ignored_modules", "error"),
        ({"process_group": "x", "device_mesh": [8]}, "process_group", "error"),
        ({"backward_prefetch": None}, "backward_prefetch", "warning"),
    ],
)
def test_findings(document: dict[str, Any], key: str, level: str) -> None:
    assert findings_by_key("fsdp1", document)[key].level == level


@pytest.mark.parametrize(("mesh", "strategy"), [([2, 4], "FULL_SHARD"), ([8], "HYBRID_SHARD"), ("x", "FULL_SHARD")])
def test_a_mesh_of_the_wrong_shape_is_refused(mesh: Any, strategy: str) -> None:
    assert verdicts("fsdp1", {"sharding_strategy": strategy, "device_mesh": mesh})["device_mesh"].kind == "refused"


# -- torch's own constructor ---------------------------------------------------------------------------------------


class Block(torch.nn.Linear):
    pass


def model() -> torch.nn.Module:
    return torch.nn.Sequential(Block(8, 8), Block(8, 8))


def as_torch(document: dict[str, Any]) -> dict[str, Any]:
    """The objects that a document's names stand for, on a CPU."""
    arguments = {key: value for key, value in document.items() if key != "sync_module_states"}  # which needs a GPU
    if policy := arguments.pop("mixed_precision", None):
        arguments["mixed_precision"] = MixedPrecision(**{key: getattr(torch, value) for key, value in policy.items()})
    if name := arguments.pop("sharding_strategy", None):
        arguments["sharding_strategy"] = ShardingStrategy[name]
    if sizes := arguments.pop("device_mesh", None):
        arguments["device_mesh"] = init_device_mesh("cpu", tuple(sizes))
    if offload := arguments.pop("cpu_offload", None):
        arguments["cpu_offload"] = CPUOffload(**offload)
    if arguments.pop("auto_wrap_policy", None):
        arguments["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    if arguments.get("backward_prefetch"):
        arguments["backward_prefetch"] = BackwardPrefetch[arguments["backward_prefetch"]]
    return arguments


@pytest.mark.parametrize(
    ("source", "document"),
    [
        ("terrazzo", {"plan": {"name": "hybrid_shard", "units": ["Block"], "mesh": {"dp_replicate": 2}}}),
        ("terrazzo", {"plan": {"name": "zero3", "units": ["Block"]}, "precision": "bf16"}),
        ("fsdp2", {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "reshard_after_forward": False, "module": ["Block"]}),
        ("deepspeed", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
        (
            "torchtitan",
            {"parallelism": {"data_parallel_replicate_degree": 2}, "training": {"enable_cpu_offload": True}},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_torch_takes_what_is_written(source: str, document: dict[str, Any]) -> None:
    conversion = converted(source, "fsdp1", document, world=8)
    with fake_group(8):
        wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), **as_torch(conversion.document))
        strategy = conversion.document.get("sharding_strategy", "FULL_SHARD")
        assert wrapped.sharding_strategy is ShardingStrategy[strategy]
        if policy := conversion.document.get("mixed_precision"):
            assert wrapped.mixed_precision.reduce_dtype == getattr(torch, policy["reduce_dtype"])
        splits = {"hybrid_shard": 4, "hybrid_shard_zero2": 4}.get(str(conversion.after.row), 8)
        assert wrapped.process_group.size() == splits
