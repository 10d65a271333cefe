"""fully_shard's arguments, against torch's own signature, policies and placements."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from terrazzo.dialects.core.keys import matches
from terrazzo.dialects.formats.fsdp2.keys import KEYS
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.precision_table import costs
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

MESH = {"dp_replicate": 2, "dp_shard": 4}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "full": {"reshard_after_forward": True, "module": ["Block"]},
    "grad": {"reshard_after_forward": False},
    "none": {"reshard_after_forward": None, "mesh": None, "mp_policy": None, "offload_policy": None},
    "number": {"mesh": [8], "reshard_after_forward": 4},
    "number alone": {"reshard_after_forward": 4},
    "hybrid": {"mesh": MESH, "reshard_after_forward": False},
    "hybrid by order": {"mesh": [2, 4]},
    "replicated": {"mesh": [8, 1]},
    "open": {"mesh": [None, 1]},
    "larger mesh": {"mesh": {**MESH, "tp": 2}, "dp_mesh_dims": {"shard": "dp_shard", "replicate": "dp_replicate"}},
    "context": {"mesh": {"dp_shard": 4, "cp": 2}, "dp_mesh_dims": {"shard": ["dp_shard", "cp"]}},
    "experts": {"mesh": {"dp_shard": 2, "ep": 4}, "dp_mesh_dims": {"shard": ["dp_shard", "ep"]}},
    "policy": {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"}},
    "casts": {"mp_policy": {"param_dtype": "bfloat16", "cast_forward_inputs": False}},
    "offload": {"offload_policy": "CPUOffloadPolicy", "ignored_params": ["head.weight"]},
    "pinned": {"offload_policy": {"pin_memory": True}},
    "pageable": {"offload_policy": {"pin_memory": False}},
    "calls": {"set_modules_to_forward_prefetch": 2, "set_modules_to_backward_prefetch": ["a", "b"], "unshard": True},
    "factor": {"set_gradient_divide_factor": 1.0, "set_requires_gradient_sync": False},
}


def test_every_argument_of_torch_is_known() -> None:
    arguments = set(inspect.signature(fully_shard).parameters)
    policy = {f"mp_policy.{field.name}" for field in dataclasses.fields(MixedPrecisionPolicy)}
    offload = {f"offload_policy.{field.name}" for field in dataclasses.fields(CPUOffloadPolicy)}
    assert arguments | policy | offload <= set(KEYS)
    named = {key for key in KEYS if key.startswith(("mp_policy.", "offload_policy."))}
    assert named == policy | offload
    setters = {name for name in dir(FSDPModule) if name.startswith("set_")}
    assert setters <= set(KEYS)


def test_every_key_of_the_inventory_has_a_verdict() -> None:
    for key in (key for entry in inventory("fsdp2") for key in entry.removeprefix("FSDPModule.").split(" / ")):
        for value in (None, True, 8, "x", ["x"]):
            assert "no such key" not in verdicts("fsdp2", nested({key: value}))[key].why, key
        assert any(matches(key, pattern) for pattern in dialect("fsdp2").keys), key
        assert dialect("fsdp2").meaning(key), key


@pytest.mark.parametrize(
    ("document", "row", "mesh"),
    [
        ({}, "zero3", (1, None)),
        ({"reshard_after_forward": True}, "zero3", (1, None)),
        ({"reshard_after_forward": None}, "zero3", (1, None)),
        ({"reshard_after_forward": False, "mesh": [8]}, "shard_grad_op", (1, 8)),
        ({"mesh": MESH}, "hybrid_shard", (2, 4)),
        ({"mesh": [2, 4], "reshard_after_forward": False}, "hybrid_shard_zero2", (2, 4)),
        ({"mesh": [8], "reshard_after_forward": 4}, "hpz", (2, 4)),
        ({"reshard_after_forward": 4}, "hpz", (None, 4)),
        ({"mesh": [8], "reshard_after_forward": 8}, "zero3", (1, 8)),
        ({"mesh": [8], "reshard_after_forward": 1}, "shard_grad_op", (1, 8)),
        ({"mesh": [8, 1]}, "zero0", (1, 8)),
    ],
)
def test_rows(document: dict[str, Any], row: str, mesh: tuple[int | None, int | None]) -> None:
    description = described("fsdp2", document)
    assert description.row == row
    assert (description.value("mesh.dp_replicate"), description.value("mesh.dp_shard")) == mesh


@pytest.mark.parametrize("size", [3, 16, 0, -2])
def test_a_number_that_torch_refuses_is_refused(size: int) -> None:
    verdict = verdicts("fsdp2", {"mesh": [8], "reshard_after_forward": size})["reshard_after_forward"]
    assert verdict.kind == "refused"
    with fake_group(8), pytest.raises(ValueError, match="factor of 8"):
        fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (8,)), reshard_after_forward=size)


# storage, compute, reduce, accumulate, master and moments, saved
@pytest.mark.parametrize(
    ("version", "reduce"), [("2.13.0", "bf16"), ("2.14.1", "bf16"), ("2.15.0", "fp32"), ("3.0", "fp32")]
)
def test_an_unsaid_reduce_dtype_is_pinned_by_version(version: str, reduce: str) -> None:
    document = {"mp_policy": {"param_dtype": "bfloat16"}}
    row = ["fp32", "bf16", reduce, "fp32", "fp32", "fp32"]
    assert precision("fsdp2", document, versions={"torch": version}) == row
    explicit = {
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": {"bf16": "bfloat16", "fp32": "float32"}[reduce]}
    }
    assert precision("fsdp2", explicit, versions={"torch": version}) == row
    assert findings_by_key("fsdp2", document)["mp_policy.reduce_dtype"].level == "warning"
    assert "mp_policy.reduce_dtype" not in findings_by_key("fsdp2", explicit)
    for target in ("fsdp1", "torchtitan", "terrazzo"):
        after = converted("fsdp2", target, document, versions={"torch": version}).after
        if target != "torchtitan":  # which reduces in fp32 only
            assert after.value("precision.reduce") == reduce


def test_the_installed_torch_decides_where_none_is_named() -> None:
    here = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]
    assert precision("fsdp2", {"mp_policy": {"param_dtype": "bfloat16"}})[2] == ("fp32" if here >= [2, 15] else "bf16")


@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
@pytest.mark.parametrize("stored", ["bf16", "fp32"])
@pytest.mark.parametrize("synced", [True, False])
def test_sums_of_micro_batches_have_the_dtype_that_torch_keeps_them_in(reduce: str, stored: str, synced: bool) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if dist.is_initialized():
        pytest.skip("a process group is there already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtypes[reduce])
        model = fully_shard(torch.nn.Linear(4, 4, bias=False, dtype=dtypes[stored]), mp_policy=policy)
        model.set_requires_gradient_sync(synced)
        for factor in (1, 1.01, 1.02):
            model(factor * torch.ones(2, 4)).sum().backward()
        (kept,) = model._get_fsdp_state()._fsdp_param_group.fsdp_params
        unreduced = kept._unsharded_param.grad if kept.unsharded_accumulated_grad is None else None
        sums = model.weight.grad if synced else kept.unsharded_accumulated_grad if unreduced is None else unreduced
    finally:
        dist.destroy_process_group()
    named = {"param_dtype": "bfloat16", "reduce_dtype": str(dtypes[reduce]).removeprefix("torch.")}
    document = {"mp_policy": named} | ({} if synced else {"set_requires_gradient_sync": False})
    assert sums is not None and dtypes[precision("fsdp2", document, load_dtype=stored)[3]] == sums.dtype


def test_sums_in_fp32_are_no_loss_and_a_loop_that_reduces_later_is_named() -> None:
    sharded = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"}
    accelerate = {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": sharded}
    conversion = converted("accelerate", "fsdp2", accelerate)
    assert not [each for each in (*conversion.verdicts, *conversion.unsaid) if "accumulate" in f"{each.key} {each.why}"]
    (cost,) = costs(conversion.after, (8,))
    assert cost.bytes_per_parameter == (4 + 4 + 8) / 8
    finding = findings_by_key("fsdp2", conversion.document)["set_requires_gradient_sync"]
    assert finding.level == "warning" and "in bf16 until they are reduced" in finding.text
    wide = conversion.document | {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    assert "set_requires_gradient_sync" not in findings_by_key("fsdp2", wide)


def test_sums_that_only_another_load_dtype_gives_say_so() -> None:
    """Masters in fp32 and sums in bf16: no model that is loaded in another dtype has both."""
    pure = {"precision": {"name": "bf16-pure"}}
    for name, words in (("bf16", "in the dtype of the parameters, fp32"), ("bf16-pure", "load it in bf16")):
        document = {"precision": {"name": name, "reduce": "bf16", "accumulate": "bf16"}} if name == "bf16" else pure
        writing = dialect("fsdp2").write(described("terrazzo", document))
        (verdict,) = [each for each in writing.verdicts if each.key == "precision.accumulate"]
        assert (verdict.kind, words in verdict.why) == ("lossy", True), verdict
    document = {"precision": {"name": "bf16", "reduce": "bf16"}}
    writing = dialect("fsdp2").write(described("terrazzo", document))
    (verdict,) = [each for each in writing.verdicts if each.key == "precision.accumulate"]
    assert (verdict.kind, verdict.why) == ("applied", "")


def test_without_a_policy_the_load_dtype_holds() -> None:
    assert precision("fsdp2", {}) == ["loaded"] * 6
    assert precision("fsdp2", {}, load_dtype="bf16") == ["bf16"] * 6


@pytest.mark.parametrize("label", DOCUMENTS)
def test_the_writer_says_what_the_reader_reads(label: str) -> None:
    assert_agrees_or_says("fsdp2", DOCUMENTS[label])


def test_another_divisor_is_refused_elsewhere() -> None:
    conversion = converted("fsdp2", "terrazzo", {"reshard_after_forward": True, "set_gradient_divide_factor": 1.0})
    (verdict,) = [each for each in conversion.verdicts if each.key == "set_gradient_divide_factor"]
    assert verdict.kind == "refused"


def test_offload_is_all_or_nothing() -> None:
    document = {"plan": "zero3@cpu", "precision": "bf16"}  # gradients and optimizer, not the weights
    conversion = converted("terrazzo", "fsdp2", document)
    assert conversion.document["offload_policy"] == "CPUOffloadPolicy"
    verdict = {each.key: each for each in conversion.verdicts}["plan"]
    assert verdict.kind == "lossy"
    assert "all of weights, gradients and optimizer" in verdict.why


@pytest.mark.parametrize(
    ("document", "key", "level"),
    [
        ({"mesh": {"dp_shard": 4, "tp": 2}}, "mesh", "error"),
        ({"mesh": [2, 4]}, "mesh", "warning"),
        ({"reshard_after_forward": True}, "module", "warning"),
    ],
)
def test_findings(document: dict[str, Any], key: str, level: str) -> None:
    assert findings_by_key("fsdp2", document)[key].level == level


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("dp_shard", "dp_replicate"), "dp_shard is copied over, and dp_replicate split over"),
        (("fsdp", "other"), "fsdp is copied over"),
        (("dp_replicate",), "for plain replicas"),
        (("dp_replicate", "dp_shard"), ""),
        (("data", "model"), ""),
        (("dp",), ""),
    ],
)
def test_names_that_contradict_their_order_are_told(names: tuple[str, ...], words: str) -> None:
    """Torch goes by order: the last axis is split over, whatever its name."""
    mesh = dict.fromkeys(names, 2)
    found = findings_by_key("fsdp2", {"mesh": mesh, "module": ["Block"]}).get("mesh")
    assert (found is None) == (not words) and (found is None or (found.level == "warning" and words in found.text))
    named = {"mesh": mesh, "dp_mesh_dims": {"shard": names[0]}}
    assert len(names) > 1 or "mesh" not in findings_by_key("fsdp2", named)
    with fake_group(2 ** len(names)):
        linear = torch.nn.Linear(8, 8)
        fully_shard(linear, mesh=init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names))
        weight = linear.weight
        assert isinstance(weight, DTensor)
        assert [place.is_shard() for place in weight.placements] == [False, True][-len(names) :]


@pytest.mark.parametrize(
    "document",
    [
        {"mesh": [2, 2, 2]},
        {"mesh": "eight"},
        {"mesh": [0]},
        {"mesh": {"dp_shard": 4, "x": 2}, "dp_mesh_dims": {"shard": "dp_shard"}},
        {"mesh": {"dp_shard": 4}, "dp_mesh_dims": {"shard": "shards"}},
        {"mesh": {"dp": 2, "tp": 4}, "dp_mesh_dims": {"shard": ["dp", "tp"]}},
        {"mesh": {"pp": 2, "dp": 4}, "dp_mesh_dims": {"shard": "dp", "replicate": "pp"}},
        {"mesh": {"dp": 2, "ep": 4}, "dp_mesh_dims": {"shard": "dp"}},
    ],
)
def test_a_mesh_that_is_none_is_refused(document: dict[str, Any]) -> None:
    assert verdicts("fsdp2", document)["mesh"].kind == "refused"


@pytest.mark.parametrize(
    ("mesh", "dims", "key"),
    [
        (None, {"shard": "dp"}, "dp_mesh_dims.shard"),
        ([2, 4], {"shard": "dp", "replicate": "r"}, "dp_mesh_dims.replicate"),
    ],
)
def test_names_of_axes_that_a_mesh_has_not_are_refused(mesh: Any, dims: dict[str, Any], key: str) -> None:
    document = {"dp_mesh_dims": dims} | ({} if mesh is None else {"mesh": mesh})
    assert verdicts("fsdp2", document)[key].kind == "refused"


def test_replicas_alone_are_plain_replication() -> None:
    """As `DataParallelMeshDims` says: replicate is for HSDP or for DDP."""
    description = described("fsdp2", {"mesh": {"r": 4, "tp": 2}, "dp_mesh_dims": {"replicate": "r"}})
    assert (description.row, description.value("mesh.dp_shard"), description.value("mesh.tp")) == ("zero0", 4, 2)
    document = {"mesh": {"a": 2, "b": 4}, "dp_mesh_dims": {"replicate": "b"}}
    assert verdicts("fsdp2", document)["mesh"].kind == "refused"  # nothing says what a is


def test_shards_over_context_parallel_ranks_alone_are_shards() -> None:
    mesh = {"dp_replicate": 2, "dp_shard": 1, "cp": 4}
    dims = {"shard": ["dp_shard", "cp"], "replicate": "dp_replicate"}
    document = {"mesh": mesh, "dp_mesh_dims": dims}
    description = described("fsdp2", document)
    assert description.row == "hybrid_shard"
    assert [description.value(f"mesh.{axis}") for axis in mesh] == [2, 1, 4]
    flat = {"mesh": {"dp_shard": 1, "cp": 4}, "dp_mesh_dims": {"shard": ["dp_shard", "cp"]}}
    assert described("fsdp2", flat).row == "zero3"
    assert described("fsdp2", {**flat, "reshard_after_forward": 4}).row == "zero3"
    assert described("fsdp2", {**document, "dp_mesh_dims": {**dims, "shard": "dp_shard"}}).row == "zero0"
    partial = {**flat, "mesh": {"dp_shard": 2, "cp": 4}, "reshard_after_forward": 4}
    assert "context parallel ranks" in verdicts("fsdp2", partial)["reshard_after_forward"].why
    assert_agrees_or_says("fsdp2", document)


@pytest.mark.parametrize("target", ["fsdp1", "fsdp2"])
def test_masters_that_are_loaded_in_another_dtype_are_told(target: str) -> None:
    document = {"plan": "zero3", "precision": "bf16"}
    conversion = converted("terrazzo", target, document, load_dtype="bf16")
    assert conversion.after.value("precision.master") == "bf16"
    (told,) = [each for each in conversion.verdicts if each.key == "precision"]
    assert (told.kind, "load it in fp32" in told.why) == ("lossy", True)
    for name, dtype in (("bf16-pure", "bf16"), ("bf16", "fp32"), ("bf16", None)):
        context = {"load_dtype": dtype} if dtype else {}
        conversion = converted("terrazzo", target, {**document, "precision": name}, **context)
        (told,) = [each for each in conversion.verdicts if each.key == "precision"]
        assert "load it in" not in told.why, (name, dtype)


@pytest.mark.parametrize("target", ["terrazzo", "torchtitan"])
def test_shards_that_context_parallel_ranks_do_not_share_are_told(target: str) -> None:
    mesh = {"dp": 4, "cp": 2}
    for shard, kind in ((["dp", "cp"], "defaulted"), ("dp", "lossy")):
        conversion = converted("fsdp2", target, {"mesh": mesh, "dp_mesh_dims": {"shard": shard}})
        (told,) = [each for each in conversion.verdicts if each.key == "dp_mesh_dims.shard"]
        assert (told.kind, "same shards" in told.why) == (kind, kind == "lossy")


@pytest.mark.parametrize("name", ["zero0", "zero3", "hybrid_shard"])
def test_a_size_that_is_not_known_is_told_beside_other_axes_too(name: str) -> None:
    replicas = {"dp_replicate": 2} if name == "hybrid_shard" else {}
    document = {"plan": {"name": name, "mesh": {**replicas, "tp": 2}}}
    for world, size in ((None, None), (8, 2 if replicas else 4)):
        conversion = converted("terrazzo", "fsdp2", document, **({"world": world} if world else {}))
        mesh = {**replicas, "tp": 2} | (
            {"dp_replicate": size, "dp_shard": 1} if name == "zero0" else {"dp_shard": size}
        )
        assert conversion.document["mesh"] == mesh
        kinds = {each.key: each.kind for each in (*conversion.verdicts, *conversion.unsaid)}
        assert ("lossy" in kinds.values() and "fill it in" in str(conversion.unsaid)) == (size is None)


# -- torch's own function ------------------------------------------------------------------------------------------


def as_torch(document: dict[str, Any]) -> dict[str, Any]:
    """The objects that a document's names stand for."""
    arguments = {key: value for key, value in document.items() if key in inspect.signature(fully_shard).parameters}
    arguments.pop("module", None)
    if policy := arguments.pop("mp_policy", None):
        arguments["mp_policy"] = MixedPrecisionPolicy(**{key: getattr(torch, value) for key, value in policy.items()})
    if (mesh := arguments.pop("mesh", None)) is not None:
        sizes, names = (tuple(mesh.values()), tuple(mesh)) if isinstance(mesh, dict) else (tuple(mesh), None)
        arguments["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if dims := arguments.pop("dp_mesh_dims", None):
        tuples = {key: (names,) if isinstance(names, str) else tuple(names) for key, names in dims.items()}
        arguments["dp_mesh_dims"] = DataParallelMeshDims(**tuples)
    if (offload := arguments.pop("offload_policy", None)) is not None:
        arguments["offload_policy"] = (
            CPUOffloadPolicy(pin_memory=False) if offload != "OffloadPolicy" else OffloadPolicy()
        )
    return arguments


@pytest.mark.parametrize(
    ("source", "document", "split"),
    [
        ("fsdp1", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [2, 4], "auto_wrap_policy": ["Block"]}, 4),
        ("fsdp1", {"sharding_strategy": "NO_SHARD", "mixed_precision": {"param_dtype": "bfloat16"}}, 1),
        ("fsdp1", {"cpu_offload": {"offload_params": True}, "mixed_precision": {"param_dtype": "bfloat16"}}, 8),
        ("terrazzo", {"plan": {"name": "hpz", "mesh": {"dp_replicate": 2, "dp_shard": 4}}, "precision": "bf16"}, 8),
        ("deepspeed", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, 8),
        ("torchtitan", {"parallelism": {"data_parallel_replicate_degree": 4}}, 2),
    ],
)
def test_torch_takes_what_is_written(source: str, document: dict[str, Any], split: int) -> None:
    conversion = converted(source, "fsdp2", document, world=8)
    with fake_group(8):
        arguments = as_torch(conversion.document)
        module = fully_shard(torch.nn.Linear(8, 8, bias=False), **{"mesh": init_device_mesh("cpu", (8,)), **arguments})
        weight = module.weight
        assert weight.to_local().shape == (8 // split, 8)
        assert weight.placements[-1] == Shard(0)
        assert all(placement == Replicate() for placement in weight.placements[:-1])


@pytest.mark.parametrize(
    ("mesh", "name", "axes", "split"),
    [
        ({}, "zero3", {"dp_shard": 4, "ep": 2}, 8),
        ({"tp": 2}, "zero3", {"dp_shard": 2, "ep": 2, "tp": 2}, 4),
        ({"dp_replicate": 2}, "hybrid_shard", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 4),
        ({}, "zero0", {"dp_replicate": 4, "ep": 2, "dp_shard": 1}, 1),
    ],
)
def test_ranks_that_share_experts_are_data_ranks_in_a_mesh_that_torch_takes(
    mesh: dict[str, Any], name: str, axes: dict[str, int], split: int
) -> None:
    source = {"plan": {"name": name, "mesh": {**mesh, "ep": 2}}}
    conversion = converted("terrazzo", "fsdp2", source, world=8)
    assert conversion.document["mesh"] == axes and conversion.after.value("mesh.ep") == 2
    assert not conversion.refused and not [each for each in conversion.verdicts if each.kind == "lossy"]
    with fake_group(8):
        arguments = as_torch(conversion.document)
        spmd, dims = arguments["mesh"], arguments["dp_mesh_dims"]
        without = {name: tuple(axis for axis in axes if axis != "ep") for name, axes in vars(dims).items() if axes}
        dense, expert = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        for module, named in ((dense, dims), (expert, DataParallelMeshDims(**without))):
            places = [Shard(0) if axis == "ep" and module is expert else Replicate() for axis in spmd.mesh_dim_names]
            module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), spmd, places))
            fully_shard(module, **{**arguments, "dp_mesh_dims": named})
        assert isinstance(dense.weight, DTensor) and isinstance(expert.weight, DTensor)
        assert dense.weight.to_local().numel() == expert.weight.to_local().numel() * (2 if split == 1 else 1)
        assert dense.weight.to_local().shape == (8 // split, 8)


def test_a_number_beside_named_axes_is_refused_as_torch_does() -> None:
    source = {"plan": {"name": "hpz", "mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}}}
    conversion = converted("terrazzo", "fsdp2", source, world=8)
    assert conversion.document["mesh"] == {"dp_shard": 4, "tp": 2} and conversion.document["reshard_after_forward"]
    assert not conversion.faults and "no second copy" in str(conversion.verdicts)
    number = {**conversion.document, "reshard_after_forward": 2}
    assert findings_by_key("fsdp2", number)["reshard_after_forward"].level == "error"
    with fake_group(8), pytest.raises(NotImplementedError, match="dp_mesh_dims"):
        fully_shard(torch.nn.Linear(8, 8), **as_torch(number))


def test_experts_over_more_ranks_than_shards_are_refused() -> None:
    source = {"plan": {"name": "zero3", "mesh": {"tp": 4, "ep": 4}}}  # there along tp, too
    conversion = converted("terrazzo", "fsdp2", source, world=8)
    (refused,) = conversion.refused
    assert refused.key == "plan.mesh.ep" and "divides its 2" in refused.why
    assert conversion.document["mesh"] == {"dp_shard": 2, "tp": 4}


@pytest.mark.parametrize("module", [None, []])
def test_a_module_that_says_nothing_is_not_said(module: Any) -> None:
    assert "module" in findings_by_key("fsdp2", {"module": module})
