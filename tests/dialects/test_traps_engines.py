"""What engines do differently under configurations that look alike, held against the engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import NAMES, dialect
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.understand import Understood, read_document
from terrazzo.documents import Loaded
from terrazzo.documents.dotted_keys import flatten
from tests.dialects.samples import SAMPLES
from tests.dialects.test_traps import converted, described, fsdp


def findings(name: str, document: dict[str, Any], **facts: Any) -> dict[str, str]:
    """What `check` says, by key."""
    from pathlib import Path

    context = ReadingContext(**facts)
    reading = read_document(dialect(name), document, context)
    loaded = Loaded(Path("x.yaml"), document, "", "yaml")
    return {finding.key: finding.text for finding in check(Understood(loaded, dialect(name), reading, context))}


# FSDP2 in Accelerate exchanges the optimizer's parameters: a loop that prepares them apart, or two models, fails.


def test_version_2_of_fsdp_wants_model_and_optimizer_together() -> None:
    assert "one call, with one model" in findings("accelerate", fsdp(2))["fsdp_config.fsdp_version"]
    assert "one call" not in findings("accelerate", fsdp(1)).get("fsdp_config.fsdp_version", "")


# Who divides gradients, by what, and before or after they are summed.


@pytest.mark.parametrize(
    ("name", "key", "value", "kinds"),
    [
        ("deepspeed", "gradient_predivide_factor", 2.0, ("lossy", "refused")),
        ("deepspeed", "prescale_gradients", True, ("lossy", "refused")),
        ("deepspeed", "gradient_allreduce_op", "sum", ("refused",)),
        ("fsdp2", "set_gradient_divide_factor", 4.0, ("refused",)),
        ("fsdp2", "set_reduce_scatter_divide_factor", 4.0, ("refused",)),
    ],
)
@pytest.mark.parametrize("target", ["terrazzo", "torchtitan", "trainer"])
def test_another_divisor_is_never_dropped_in_silence(
    name: str, key: str, value: Any, kinds: tuple[str, ...], target: str
) -> None:
    base = {"train_micro_batch_size_per_gpu": 1} if name == "deepspeed" else {"reshard_after_forward": True}
    conversion = converted(name, target, {**base, key: value})
    (verdict,) = [each for each in conversion.verdicts if each.key == key]
    assert verdict.kind in kinds
    assert verdict.why
    assert key not in conversion.document


# A tied parameter that two FSDP groups see raises, since torch 2.13.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))  # type: ignore[no-any-return]


def test_a_unit_of_a_tied_embedding_is_refused_as_torch_refuses_it() -> None:
    alone = {"module": ["Block", "torch.nn.Embedding"], "mp_policy": {"param_dtype": "bfloat16"}}
    assert "units share a parameter" in findings("fsdp2", alone, tied=True)["module"]
    assert "module" not in findings("fsdp2", alone, tied=False)
    assert "module" not in findings("fsdp2", {**alone, "module": ["Block"]}, tied=True)


def test_torch_refuses_a_tied_embedding_in_a_unit_of_its_own() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if dist.is_initialized():
        pytest.skip("a process group is there already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Tied()
        fully_shard(model.block)
        fully_shard(model)
        model(torch.arange(3)).sum().backward()
        model = Tied()
        fully_shard(model.embed)
        fully_shard(model)
        with pytest.raises(ValueError, match="shared with a parameter"):
            model(torch.arange(3))
    finally:
        dist.destroy_process_group()


# A tensor that tensor parallelism cut and FSDP cut again lies in strides: only the same order of axes reads it back.


def test_axes_stand_in_the_order_in_which_they_cut() -> None:
    degrees = {"data_parallel_replicate": 2, "data_parallel_shard": 4, "tensor_parallel": 4, "context_parallel": 2}
    document = {"parallelism": {f"{name}_degree": size for name, size in degrees.items()}}
    conversion = converted("torchtitan", "fsdp2", document, world=64)
    assert list(conversion.document["mesh"]) == ["dp_replicate", "dp_shard", "cp", "tp"]
    assert conversion.document["dp_mesh_dims"] == {"shard": ["dp_shard", "cp"], "replicate": "dp_replicate"}
    piped = converted("torchtitan", "fsdp2", {"parallelism": {"pipeline_parallel_degree": 2}}, world=8)
    assert next(iter(piped.document["mesh"])) == "pp"


@pytest.mark.parametrize(("version", "level"), [("2.7.1", "error"), ("2.8.0", "warning"), ("2.13.0", None)])
def test_a_hugging_face_folder_from_shards_needs_a_new_torch(version: str, level: str | None) -> None:
    document = {"training": {"steps": 10}, "checkpoint": {"enable": True, "last_save_in_hf": True}}
    context = ReadingContext(versions={"torch": version})
    reading = read_document(dialect("torchtitan"), document, context)
    findings_there = dialect("torchtitan").findings(reading, context)
    assert {each.level for each in findings_there if each.key == "checkpoint.last_save_in_hf"} == (
        {level} if level else set()
    )


# Accelerate and Lightning run the forward under autocast whether FSDP casts the weights or not.


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("accelerate", fsdp(1)),
        ("accelerate", fsdp(2)),
        ("accelerate", {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}),
        ("trainer", {"output_dir": "x", "bf16": True, "fsdp": True}),
        ("lightning", {"strategy": "fsdp", "precision": "bf16-mixed"}),
    ],
)
def test_autocast_is_on_beside_cast_weights(name: str, document: dict[str, Any]) -> None:
    description = described(name, document, load_dtype="fp32")
    assert (description.value("precision.autocast"), description.value("precision.compute")) == (True, "bf16")
    conversion = converted(name, "fsdp2", document, load_dtype="fp32")
    told = [each for each in (*conversion.verdicts, *conversion.unsaid) if "autocast" in each.why]
    assert {each.kind for each in told} == {"lossy"}


@pytest.mark.parametrize("name", ["accelerate", "trainer"])
def test_who_had_no_autocast_hears_of_it(name: str) -> None:
    document = {"mp_policy": {"param_dtype": "bfloat16"}, "reshard_after_forward": True, "mesh": [8]}
    source = converted("fsdp2", "terrazzo", document, versions={"torch": "2.15"}).document
    conversion = converted("terrazzo", name, {**source, "train": {"clip": None}})
    assert conversion.after.value("precision.autocast") is True
    assert any("autocast" in each.why for each in (*conversion.verdicts, *conversion.unsaid))


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
def test_lightning_enters_autocast_under_fsdp() -> None:
    plugin = pytest.importorskip("lightning.pytorch.plugins.precision.fsdp").FSDPPrecision
    assert isinstance(plugin("bf16-mixed").forward_context(), torch.autocast)
    assert not isinstance(plugin("bf16-true").forward_context(), torch.autocast)
    row = described("lightning", {"strategy": "fsdp", "precision": "bf16-true"})
    assert row.value("precision.autocast") is False


def test_accelerate_wraps_the_forward_in_autocast() -> None:
    """It does so on `native_amp` alone, whatever shards."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    seen: dict[str, Any] = {}

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen["autocast"] = torch.is_autocast_enabled("cpu")
            return super().forward(inputs)

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        out = accelerator.prepare_model(Model(4, 4))(torch.ones(1, 4))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert (seen["autocast"], out.dtype) == (True, torch.float32)
    assert described("accelerate", fsdp(2)).value("precision.output") == "fp32"
    assert described("trainer", {"output_dir": "x", "bf16": True}).value("precision.output") == "fp32"


# "auto" that nobody fills is open, and no value of ours.


def test_an_open_switch_says_no_dtype() -> None:
    document = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    description = described("deepspeed", document)
    assert description["precision.compute"].value is None
    assert [description[f"precision.{state}"].is_set for state in ("weight", "reduce", "saved")] == [False] * 3
    assert description.value("precision.master") == "fp32"
    conversion = converted("deepspeed", "terrazzo", document)
    (verdict,) = [each for each in conversion.verdicts if each.key == "bf16.enabled"]
    assert (verdict.kind, "open" in verdict.why) == ("lossy", True)
    assert described("deepspeed", document, trainer={"bf16": True}).value("precision.compute") == "bf16"


def test_auto_without_a_rule_falls_to_the_default_or_fails() -> None:
    document = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"}, "aio": {"block_size": "auto"}}
    kinds = {each.key: each for each in read_document(dialect("deepspeed"), document).verdicts}
    live = kinds["zero_optimization.stage3_max_live_parameters"]
    assert (live.kind, "1000000000" in live.why) == ("defaulted", True)
    assert kinds["aio.block_size"].kind == "refused"


def test_deepspeed_itself_drops_auto_for_the_default() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    assert zero.DeepSpeedZeroConfig(stage=3, stage3_max_live_parameters="auto").max_live_parameters == 10**9


def test_what_a_target_needs_and_nobody_said_is_named() -> None:
    conversion = converted("fsdp2", "deepspeed", {"reshard_after_forward": True, "module": ["Block"]})
    (missing,) = [each for each in conversion.unsaid if each.key == "batch.micro_batch"]
    assert (missing.kind, missing.target) == ("refused", "train_micro_batch_size_per_gpu")
    assert "train_micro_batch_size_per_gpu" not in conversion.document
    inside = converted("fsdp2", "trainer", {"reshard_after_forward": 4, "mesh": [8]}).document
    assert inside["deepspeed"]["train_micro_batch_size_per_gpu"] == "auto"


# A field that fills "auto" is not a key that does nothing.


def test_a_field_that_fills_auto_is_taken_over() -> None:
    inner = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    document = {"output_dir": "x", "bf16": True, "max_grad_norm": 0.5, "deepspeed": inner}
    verdicts = {each.key: each for each in converted("trainer", "terrazzo", document).verdicts}
    assert (verdicts["max_grad_norm"].kind, verdicts["max_grad_norm"].target) == ("renamed", "train.clip")
    assert verdicts["bf16"].target.startswith("precision")
    assert converted("trainer", "trainer", document).document == document


def test_lightning_replicates_over_nodes() -> None:
    strategy = {
        "class_path": "FSDPStrategy",
        "init_args": {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": ["Block"]},
    }
    description = described("lightning", {"strategy": strategy, "devices": 8, "num_nodes": 2})
    assert (description.value("mesh.dp_replicate"), description.value("mesh.dp_shard")) == (2, 8)
    alone = described("lightning", {"strategy": strategy, "devices": 8, "num_nodes": 1})
    assert (description.row, alone.row, alone.value("mesh.dp_shard")) == ("hybrid_shard", "zero3", 8)


def test_ranks_that_share_matrices_are_not_lost() -> None:
    sizes = {f"parallelism_config_{name}_size": 2 for name in ("dp_replicate", "dp_shard", "tp")}
    conversion = converted("accelerate", "terrazzo", {**fsdp(2), "parallelism_config": sizes})
    assert conversion.document["plan"]["mesh"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert not {each.kind for each in conversion.verdicts if each.key.endswith("tp_size")} & {"refused", "lossy"}


@pytest.mark.parametrize(("heads", "kv_heads", "wrong"), [(32, 8, False), (32, 2, True), (6, 6, True)])
def test_a_model_that_an_axis_cannot_cut(heads: int, kv_heads: int, wrong: bool) -> None:
    document = {"parallelism": {"tensor_parallel_degree": 4}}
    key = "parallelism.tensor_parallel_degree"
    assert (key in findings("torchtitan", document, heads=heads, kv_heads=kv_heads)) == wrong


def test_sizes_that_a_model_has_not() -> None:
    document = {"parallelism": {"expert_parallel_degree": 8}, "training": {"seq_len": 8192}}
    texts = findings("torchtitan", document, experts=0, positions=4096)
    assert "parallelism.expert_parallel_degree" in texts
    assert "4,096" in texts["training.seq_len"]
    sized = fsdp(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10**9)
    assert "one unit" in findings("accelerate", sized, block_numel=10**8)["fsdp_config.fsdp_min_num_params"]


# A report that names a key of the target which is not there sends its reader looking for it.


@pytest.mark.parametrize("name", SAMPLES)
def test_the_keys_that_a_verdict_names_stand_in_the_document(name: str) -> None:
    for document in SAMPLES[name].values():
        for target in NAMES:
            conversion = converted(name, target, document, world=8)
            written = list(flatten(conversion.document))
            named = {part for each in conversion.verdicts if each.kind != "lossy" for part in each.target.split(", ")}
            lost = [part for part in named - {""} if not any(_within(part, key) for key in written)]
            assert lost == [], (name, target)


def _within(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


# The Trainer hands version 1's strategy over under a name that Accelerate reads second, after its own default.


@pytest.mark.parametrize("word", ["shard_grad_op", "hybrid_shard", "no_shard"])
def test_version_1_of_the_trainer_shards_fully_whatever_it_says(word: str) -> None:
    document = {"output_dir": "x", "fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": word}}
    reading = read_document(dialect("trainer"), document)
    (verdict,) = [each for each in reading.verdicts if each.key == "fsdp_config.reshard_after_forward"]
    assert (reading.description.row, verdict.kind) == ("zero3", "refused")
    assert "FSDP_SHARDING_STRATEGY" in verdict.why


@pytest.mark.parametrize("word", ["shard_grad_op", "hybrid_shard"])
def test_accelerate_prefers_its_own_default_strategy(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.delenv("FSDP_SHARDING_STRATEGY", raising=False)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=1, reshard_after_forward=word, cpu_ram_efficient_loading=False, sync_module_states=False
    )
    assert (plugin.sharding_strategy or plugin.reshard_after_forward).name == "FULL_SHARD"


def test_the_trainer_is_not_given_a_hybrid_that_would_not_replicate() -> None:
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"},
    }
    verdicts = {each.key: each for each in converted("accelerate", "trainer", document).verdicts}
    assert verdicts["fsdp_config.fsdp_sharding_strategy"].kind == "refused"
    sized = converted("accelerate", "trainer", fsdp(1, sharding_strategy="HYBRID_SHARD"))
    assert sized.document["parallelism_config"] == {"dp_replicate_size": 2, "dp_shard_size": 4}
    assert sized.after.row == "hybrid_shard"


def test_one_setting_open_under_two_keys_is_warned_of_once() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    document = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}
    texts = findings("deepspeed", document)
    assert texts["scheduler.params.warmup_max_lr"] == "as optimizer.params.lr: they are one setting"


def test_stages_of_torchtitan_are_written_without_cuda_graphs() -> None:
    document = {"plan": {"name": "zero2", "mesh": {"pp": 2}}, "precision": "bf16"}
    conversion = converted("terrazzo", "torchtitan", document, world=8)
    assert conversion.document["training"]["disable_cuda_graphs"] is True


def test_copies_beside_other_axes_are_what_these_leave() -> None:
    conversion = converted("terrazzo", "fsdp2", {"plan": {"name": "zero0", "mesh": {"tp": 2}}}, world=8)
    assert conversion.document["mesh"] == {"dp_replicate": 4, "dp_shard": 1, "tp": 2}
