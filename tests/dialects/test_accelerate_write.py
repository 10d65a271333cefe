"""Other dialects' descriptions as Accelerate's YAML: the launcher takes it, and what it does not mean is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from terrazzo.dialects.core.description import PATHS, Description, asks_for_nothing
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext
from terrazzo.dialects.formats.accelerate.dialect import DIALECT
from terrazzo.dialects.registry import dialect
from tests.dialects import peers
from tests.helpers.examples import examples
from tests.helpers.launched import has_plugin, launched, plugin
from tests.helpers.neutral import described, descriptions

FUZZ = settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# What the launcher decides, what is gathered anyway, and sizes that the loop or the number of ranks gives.
_ELSEWHERE = ("mesh.dp_shard", "mesh.dp_replicate", "batch.global_batch", "batch.micro_batch")


def written(description: Description, context: ReadingContext = NO_CONTEXT) -> tuple[dict[str, Any], dict[str, str]]:
    writing = DIALECT.write(description, context)
    return writing.document, {verdict.key: verdict.kind for verdict in writing.verdicts}


@FUZZ
@given(descriptions())
def test_what_a_written_file_does_not_mean_is_named(description: Description) -> None:
    writing = DIALECT.write(description)
    kinds = {verdict.key: verdict for verdict in writing.verdicts}
    after = DIALECT.read(json.loads(json.dumps(writing.document))).description
    for path in PATHS:
        wanted, found = description[path], after[path]
        if not wanted.is_set:
            assert path not in kinds
        elif kinds[path].kind in ("lossy", "refused"):
            assert kinds[path].why
        elif found.is_set and not asks_for_nothing(path, wanted.value) and path not in _ELSEWHERE:
            told = path.startswith(("saving.state", "sharding.", "offload.step")) and kinds[path].why
            same = found.value == wanted.value or told
            assert same, (path, kinds[path], writing.document)


@FUZZ
@given(description=descriptions())
def test_the_launcher_takes_what_is_written(description: Description, tmp_path_factory: pytest.TempPathFactory) -> None:
    writing = DIALECT.write(description, ReadingContext(world=8))
    document = writing.document
    flags = ("--num_processes", "8", "--num_machines", "1")
    environment = launched(document, tmp_path_factory.mktemp("launch"), *flags)
    if has_plugin(document):
        plugin(environment)
    if any(verdict.kind == "refused" for verdict in writing.verdicts):
        return  # without an axis that it has not, the rest need not make sense
    reading = DIALECT.read(document)
    errors = [each for each in DIALECT.findings(reading, NO_CONTEXT) if each.level == "error"]
    assert not errors
    assert not [verdict for verdict in reading.verdicts if verdict.kind == "refused"]


# -- case by case --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "engine"),
    [
        ("zero0", "MULTI_GPU"),
        ("zero1", "DEEPSPEED"),
        ("zero2", "DEEPSPEED"),
        ("zero3", "FSDP"),
        ("shard_grad_op", "FSDP"),
        ("hybrid_shard", "FSDP"),
    ],
)
def test_the_engine_is_the_one_that_has_the_row(row: str, engine: str) -> None:
    document, kinds = written(described(row))
    assert document["distributed_type"] == engine
    assert kinds["sharding.weight"] == "applied"
    assert DIALECT.read(document).description.row == row


def test_replicas_on_cpus_are_no_replicas_on_gpus() -> None:
    document, _ = written(described("zero0", training__device="cpu"))
    assert (document["distributed_type"], document["use_cpu"]) == ("MULTI_CPU", True)


def test_ranks_that_nothing_says_are_asked_for(tmp_path: Path) -> None:
    """Of several machines too, which torchrun and Slurm tell Terrazzo, and this launcher is told in the file."""
    writing = DIALECT.write(described("zero3"))
    (lacking,) = writing.missing
    assert (lacking.target, lacking.kind, "--num_machines" in lacking.why) == ("num_processes", "lossy", True)
    with pytest.raises(ValueError, match="manually pass in `--num_processes`"):
        launched(writing.document, tmp_path)
    assert not DIALECT.write(described("zero3", mesh__world=8)).missing


@pytest.mark.parametrize("row", ["zero3", "hybrid_shard"])
def test_the_version_of_fsdp_is_named_where_it_is_written(row: str) -> None:
    writing = DIALECT.write(described(row))
    section = writing.document["fsdp_config"]
    said = {each.key: each.target for each in writing.verdicts}["sharding.weight"]
    assert said.split(", ")[0] == "fsdp_config.fsdp_version"
    assert f"fsdp_{'reshard_after_forward' if section['fsdp_version'] == 2 else 'sharding_strategy'}" in said


@pytest.mark.parametrize(("row", "mixed"), [("zero3", "no"), ("zero2", "bf16")])
def test_a_model_in_16_bits_alone_is_mixed_precision_under_deepspeed_only(row: str, mixed: str) -> None:
    """Under FSDP it is one that has been loaded so."""
    dtypes = dict.fromkeys(("precision__weight", "precision__compute", "precision__master"), "bf16")
    assert written(described(row, **dtypes))[0]["mixed_precision"] == mixed


def test_replication_does_not_vanish() -> None:
    """With sizes it is version 2's mesh, without them version 1's word: never a plain true."""
    sized = described("hybrid_shard", mesh__dp_replicate=2, mesh__dp_shard=4)
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    assert written(sized)[0]["parallelism_config"] == mesh
    document, _ = written(described("hybrid_shard_zero2"))
    assert document["fsdp_config"]["fsdp_version"] == 1
    assert document["fsdp_config"]["fsdp_sharding_strategy"] == "HYBRID_SHARD_ZERO2"


@pytest.mark.parametrize(("ranks", "tp"), [(4, 4), (8, 4), (8, 1)])
def test_replicas_have_the_axes_that_accelerate_takes_beside_them(ranks: int, tp: int) -> None:
    """Its own ParallelismConfig says which: tensor parallel ranks alone, or replicas alone."""
    library = pytest.importorskip("accelerate.parallelism_config")
    taken = True
    try:
        library.ParallelismConfig(tp_size=tp, dp_replicate_size=ranks // tp)
    except ValueError:
        taken = False
    document, kinds = written(described("zero0", mesh__tp=tp, mesh__world=ranks, mesh__dp_replicate=ranks // tp))
    assert kinds["mesh.tp"] == ("applied" if taken else "refused")
    sizes = {"parallelism_config_tp_size": tp} if taken and tp > 1 else {}
    assert document.get("parallelism_config", {}) == sizes
    assert written(described("zero0", mesh__cp=2))[1]["mesh.cp"] == "refused"


def test_gradients_that_are_not_reduced_yet_are_summed_in_16_bits() -> None:
    """FSDP2 keeps them in the dtype of reduction while synchronisation is off, which Accelerate makes 16 bits."""
    dtypes = {f"precision__{name}": "fp32" for name in ("weight", "master", "accumulate")}
    dtypes |= dict.fromkeys(("precision__compute", "precision__reduce"), "bf16")
    assert written(described("zero3", **dtypes))[1]["precision.accumulate"] == "applied"
    assert written(described("zero3", **dtypes, batch__accumulation=4))[1]["precision.accumulate"] == "lossy"
    document = written(described("zero3", **dtypes))[0]
    found = [each.text for each in DIALECT.findings(DIALECT.read(document), NO_CONTEXT)]
    assert any("sums gradients in bf16" in text for text in found)
    if dist.is_initialized():
        pytest.skip("a process group is there already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = fully_shard(torch.nn.Linear(2, 2), mp_policy=policy)
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 2)).sum().backward()
        (kept, _) = model._get_fsdp_state()._fsdp_param_group.fsdp_params
        assert kept._unsharded_param.grad.dtype == torch.bfloat16
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.dtype == torch.float32
    finally:
        dist.destroy_process_group()


def test_finer_offload_than_all_or_nothing_goes_to_deepspeed() -> None:
    everything = dict.fromkeys(("offload__weight", "offload__grad", "offload__optim"), "cpu")
    assert written(described("zero3", **everything))[0]["fsdp_config"]["fsdp_offload_params"] is True
    document, kinds = written(described("zero3", offload__optim="cpu", offload__grad="cpu"))
    assert document["deepspeed_config"] == {"zero_stage": 3, "offload_optimizer_device": "cpu"}
    assert kinds["offload.optim"] == "applied"
    document, kinds = written(described("zero3", offload__optim="nvme", offload__grad="cpu", offload__path=("/nvme",)))
    assert (kinds["offload.optim"], kinds["offload.path"]) == ("applied", "lossy")


def test_reduction_in_fp32_is_lost_by_name() -> None:
    """Accelerate reduces in the compute dtype and has no key for another."""
    dtypes = {"precision__weight": "fp32", "precision__compute": "bf16", "precision__master": "fp32"}
    document, kinds = written(described("zero3", **dtypes, precision__reduce="fp32"))
    assert document["mixed_precision"] == "bf16"
    assert (kinds["precision.compute"], kinds["precision.reduce"]) == ("applied", "lossy")


def test_no_clipping_under_deepspeed_is_lost_by_name() -> None:
    assert written(described("zero2", training__clip=None))[1]["training.clip"] == "lossy"
    assert written(described("zero2", training__clip=0.5))[0]["deepspeed_config"]["gradient_clipping"] == 0.5


@pytest.mark.parametrize("target", ["accelerate", "trainer"])
def test_what_the_model_is_loaded_in_counts_where_it_is_written_as_where_it_is_read(target: str) -> None:
    ours = peers.described("terrazzo", {"plan": "zero0", "precision": "bf16-pure"})
    for loaded, kind in (("bf16", "applied"), ("fp32", "lossy")):
        writing = dialect(target).write(ours, ReadingContext(load_dtype=loaded))
        kinds = {each.key: each.kind for each in writing.verdicts}
        assert {kinds[f"precision.{state}"] for state in ("weight", "master", "moments")} == {kind}
