"""What is emitted is a configuration that `terrazzo train` loads, means the same setup, and runs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from terrazzo.config import Config, config_from_dict, load_config
from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.planner.choice.emit import TrainFiles, train_config
from terrazzo.planner.choice.search import search
from terrazzo.planner.machine import devices
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.optimizers import OPTIMIZERS
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.volumes import traffic_of
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from terrazzo.train.model.prepare import ModelOnPaper, decoder_config, prepare_model
from terrazzo.train.planning.as_setup import optimizer_spec, setup_of
from terrazzo.train.preflight.offload_room import check_folders
from terrazzo.train.preflight.shared_axes import check_axes
from terrazzo.train.settings.folders import swap_folders
from terrazzo.train.settings.optimizer import check_settings
from terrazzo.train.settings.plan import build_plan, build_precision
from tests.helpers import programs

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def emitted(folder: Path, model: Any = TINY, gpus: int = 8, **options: Any) -> tuple[Config, TrainFiles]:
    """The configuration as it is read back from a file, beside the model's config.json."""
    setup = build_setup(Request(model, gpus, **{"gpu": "h100", "sequence": 64, **options}))
    files = train_config(setup, model, folder)
    if files.model_config is not None:
        (folder / "config.json").write_text(json.dumps(files.model_config))
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(files.config))
    return load_config(path), files


def test_every_choice_arrives_in_the_configuration(tmp_path: Path) -> None:
    config, _ = emitted(
        tmp_path,
        gpus=16,
        strategy="hybrid_shard",
        micro_batch=2,
        global_batch=64,
        checkpointing="every_2",
        precision="bf16",
        compile=True,
        prefetch=2,
        optimizer="momentum",
    )
    assert config.plan.name == "hybrid_shard"
    assert (config.plan.mesh.dp_replicate, config.plan.mesh.dp_shard, config.plan.prefetch) == (2, 8, 2)
    assert config.precision.name == "bf16"
    batch = config.batch
    assert (batch.global_batch, batch.micro_batch, batch.sequence_length) == (64, 2, 64)
    assert config.train.activation_checkpointing == "every_2"
    assert config.train.compile
    assert (config.optimizer.name, config.optimizer.options) == ("SGD", {"momentum": 0.9})
    assert config.launch.ranks is None  # two hosts: torchrun or Slurm starts the ranks


def test_a_batch_that_does_not_divide_is_filled_up_as_in_a_run(tmp_path: Path) -> None:
    config, _ = emitted(tmp_path, gpus=4, global_batch=6)
    planned = build_setup(Request(TINY, 4, gpu="h100", sequence=64, global_batch=6))
    run = setup_of(config, 4, planned.cluster)
    assert config.batch.global_batch == 6
    for each in (planned, run):
        assert (each.micro_batches, each.empty_rows, each.global_batch, each.rows) == (2, 2, 6, 8)


def test_on_one_host_the_ranks_are_started_too(tmp_path: Path) -> None:
    assert emitted(tmp_path, gpus=4)[0].launch.ranks == 4


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-pure", "fp16", "fsdp2", "zero"])
def test_dtypes_are_those_of_the_setup(name: str, tmp_path: Path) -> None:
    setup = build_setup(Request(TINY, 8, gpu="h100", precision=name))
    assert build_precision(emitted(tmp_path, precision=name)[0]) == setup.precision


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3", "ddp", "shard_grad_op", "fsdp"])
def test_the_plan_is_the_setups(strategy: str, tmp_path: Path) -> None:
    setup = build_setup(Request(TINY, 8, gpu="h100", strategy=strategy))
    assert build_plan(emitted(tmp_path, strategy=strategy)[0]) == setup.plan


@pytest.mark.parametrize("strategy", ["zero3@cpu", "zero2@cpu-all", "zero3@nvme", "fsdp@nvme-all", "zero3@cpu:0.7"])
def test_a_plan_with_offload_is_the_setups(strategy: str, tmp_path: Path) -> None:
    setup = build_setup(Request(TINY, 8, gpu="h100", strategy=strategy))
    config, _ = emitted(tmp_path, strategy=strategy)
    assert build_plan(config) == setup.plan
    assert config.plan.name == setup.plan.name
    assert bool(swap_folders(config)) == ("nvme" in strategy)
    make = {"log": {"folder": str(tmp_path / "run")}, "offload": {"path": str(tmp_path / "run" / "swap")}}
    check_folders(config.model_validate(config.model_dump() | make) if "nvme" in strategy else config)


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_how_ranks_share_sequences_and_matrices_arrives(mode: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tp": 2, "cp": 2, "context": mode, "sequence_parallel": False}
    config, _ = emitted(tmp_path, **options)
    assert (config.plan.mesh.tp, config.plan.mesh.cp) == (2, 2)
    assert (config.parallel.context.mode, config.parallel.tensor.sequence) == (mode, False)
    planned = build_setup(Request(TINY, 8, gpu="h100", sequence=64, **options))
    run = setup_of(config, 8, planned.cluster)
    assert run.loss == planned.loss == "parts"
    assert traffic_of(run).collectives == traffic_of(planned).collectives


def test_a_plan_of_ones_own_is_emitted_place_by_place(tmp_path: Path) -> None:
    own = Plan("-", "-", "D", "D")
    assert build_plan(emitted(tmp_path, strategy=own)[0]) == own


@pytest.mark.parametrize("options", [{"attention": "math"}, {"attention": "flash3"}, {"loss": "fused"}], ids=str)
def test_what_the_trainer_would_do_otherwise_is_not_emitted(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"planned, not runnable yet: `terrazzo train`"):
        emitted(tmp_path, **options)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_run_computes_its_loss_as_was_planned(loss: Any, tmp_path: Path) -> None:
    """Also where it would take the other by itself."""
    for sequence in (64, 2**18):
        config, _ = emitted(tmp_path, loss=loss, sequence=sequence)
        assert setup_of(config, 8).loss == loss


@pytest.mark.parametrize(
    "precision",
    [
        "bf16,gather=int8,quantized_reduce=int4",
        "bf16-pure,moments=fp8,rounding=stochastic",
        "bf16-pure,moments=int8,rounding=remainder",
        "fp32,reduce=bf16",
    ],
)
def test_keys_of_a_precision_arrive(precision: str, tmp_path: Path) -> None:
    config, _ = emitted(tmp_path, precision=precision)
    assert build_precision(config) == build_setup(Request(TINY, 8, precision=precision)).precision


@pytest.mark.parametrize(("precision", "linears"), [("fp8", "fp8-tensorwise"), ("fp8-rowwise", "fp8-rowwise")])
def test_linear_layers_multiply_as_was_planned(precision: str, linears: Any, tmp_path: Path) -> None:
    config, _ = emitted(tmp_path, precision=precision)
    assert (config.precision.name, config.precision.linears) == ("bf16", linears)
    again = setup_of(config, 8, build_setup(Request(TINY, 8, gpu="h100", sequence=64)).cluster)
    assert (again.matmul, f"fp8-{again.recipe}") == ("fp8", linears)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_emitted_as_one_that_the_engine_takes_or_refused(name: str, tmp_path: Path) -> None:
    if OPTIMIZERS[name].torch_class and OPTIMIZERS[name].runs:
        config, named = emitted(tmp_path, optimizer=name)[0], OPTIMIZERS[name]
        check_settings(config.optimizer)
        trained = optimizer_spec(config)
        kept = [(each.moments, each.matrices, each.fixed_bytes) for each in (trained, named)]
        assert kept[0] == kept[1]
    else:
        with pytest.raises(BadInput, match=name):
            emitted(tmp_path, optimizer=name)


@pytest.mark.parametrize(("kernel", "which"), [(None, None), ("fused", "fused"), ("foreach", "foreach"), ("loop", "")])
def test_the_kernel_that_was_planned_is_the_one_that_steps(kernel: Any, which: Any, tmp_path: Path) -> None:
    config, _ = emitted(tmp_path, optimizer_kernel=kernel)
    check_settings(config.optimizer)
    assert config.optimizer.options == ({} if which is None else {name: name == which for name in ("foreach", "fused")})
    torch.optim.AdamW([torch.zeros(1)], **config.optimizer.options)


@pytest.mark.parametrize("model", [TINY, "gpt2", "qwen3-0.6b"], ids=["tiny", "gpt2", "qwen3-0.6b"])
def test_the_model_that_is_trained_has_the_parameters_that_were_planned(model: Any, tmp_path: Path) -> None:
    config, files = emitted(tmp_path, model)
    assert files.model_config is not None
    built = prepare_model(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == model_shape(model).numel


def test_a_folder_is_trained_where_it_is_with_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "tokenizer.json").write_text("{}")
    for model in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        config, files = emitted(tmp_path, model)
        assert files.model_config is None
        assert config.model.path == tmp_path
        assert config.data.tokenizer == str(tmp_path)


def test_a_config_of_another_name_is_trained_and_not_the_config_json_beside_it(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(TINY))
    big = tmp_path / "m" / "big.json"
    big.write_text(json.dumps({**TINY, "num_hidden_layers": 8}))
    for model in (big, str(big)):
        config, _ = emitted(tmp_path, model)
        layers = [name for name, _ in prepare_model(config).named_modules() if name.endswith("self_attn")]
        assert len(layers) == 8
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == TINY


@pytest.mark.parametrize("tied", [True, False])
def test_the_built_in_decoder_is_recognised_by_its_tensors(tied: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Decoder(DecoderConfig(300, 64, 3, 4, 2, 192, 128, tie_embeddings=tied))
    config, files = emitted(tmp_path, module)
    assert files.model_config is None
    model = config.model
    assert (model.kind, model.vocab_size, model.dim, model.layers) == ("decoder", 300, 64, 3)
    assert (model.heads, model.kv_heads, model.ffn_dim, model.tie_embeddings) == (4, 2, 192, tied)
    built = prepare_model(config)
    assert sum(p.numel() for p in built.parameters()) == sum(p.numel() for p in module.parameters())


PARTS = {
    "causal": {"rope_theta": 5e5, "dropout": 0.1},
    "window": {"attention": AttentionPattern(window=32, stride=8)},
    "full_every": {"attention": AttentionPattern(window=32, full_every=2)},
    "prefix": {"attention": AttentionPattern(prefix=True)},
    "experts": {"experts": MixtureConfig(8, 2, 48, shared=1, scores="sigmoid", balance="loss", loss_weight=0.02)},
}


@pytest.mark.parametrize("source", ["config", "module", "file"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_run_builds_the_decoder_that_was_planned(parts: dict[str, Any], source: str, tmp_path: Path) -> None:
    planned = DecoderConfig(300, 64, 5, 4, 2, 192, 64, tie_embeddings=False, **parts)
    (tmp_path / "decoder.json").write_text(json.dumps(planned.to_dict()))
    with torch.device("meta"):
        model = {"config": planned.to_dict(), "module": Decoder(planned), "file": tmp_path / "decoder.json"}[source]
    config, files = emitted(tmp_path, model)
    assert files.model_config is None
    built = decoder_config(config)
    assert replace(built, ffn_dim=planned.ffn_dim) == planned  # with experts it is of no matrix
    setup = build_setup(Request(model, 8, gpu="h100", sequence=64))
    assert setup_of(config, 8, setup.cluster).model.units == setup.model.units


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": 1e-6}, "its norm_eps is 1e-06, and there is no key"),
        ({"sliding_window": 32, "layer_types": ["sliding_attention"] * 6 + ["full_attention"] * 2}, "is no key"),
    ],
    ids=str,
)
def test_a_decoder_that_no_key_describes_is_not_emitted(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        emitted(tmp_path, DECODER | changes)


def test_how_much_a_shape_drops_is_not_made_up(tmp_path: Path) -> None:
    setup = build_setup(Request(DECODER | {"dropout": 0.1}, 8, gpu="h100", sequence=64))
    with pytest.raises(BadInput, match="how much it drops is not known"):
        train_config(setup, setup.model, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 2}, "planned, not runnable yet: Pipelines have run on CPUs alone yet (pp 2)"),
        ({"optimizer": "adafactor"}, "does not update each element from its own values alone"),
        ({"model": 7e9}, "There is nothing to train in 7B parameters"),
        (
            {"strategy": "zero2", "accumulate_locally": True, "micro_batches": 2},
            "reduces every micro-batch under zero2",
        ),
    ],
    ids=str,
)
def test_what_cannot_run_is_not_emitted(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        emitted(tmp_path, **{"model": TINY, **options})
    assert message in str(caught.value)


def test_a_module_that_is_no_decoder_is_not_emitted(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(BadInput):
        emitted(tmp_path, module)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [pytest.param("zero3", marks=pytest.mark.long), "zero3@nvme-all"])
def test_what_is_emitted_trains_as_it_is(strategy: str, tmp_path: Path) -> None:
    emitted(tmp_path, gpus=2, strategy=strategy, checkpointing="full", global_batch=4)
    (tmp_path / "text.txt").write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(1500)))
    overrides = ["train.steps=1", "train.eval_batches=1", "train.sample_tokens=0", "log.tensorboard=false"]
    overrides += [f"data.source={tmp_path / 'text.txt'}", "launch.device=cpu", "launch.threads=1"]
    folders = [f"log.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    folders += [f"offload.path={tmp_path / 'run' / 'swap'}"] if "nvme" in strategy else []
    words = ["-m", "terrazzo", "train", str(tmp_path / "train.yaml"), *overrides, *folders]
    for rank in programs.on_ranks(2, *words, timeout_s=170):
        assert rank.returncode == 0, rank.stderr[-2000:]
    assert (tmp_path / "run").is_dir()


def test_every_axis_of_a_mesh_is_written(tmp_path: Path) -> None:
    """One that were left out would be a run of another plan."""
    own = {
        "dim": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "max_sequence_length": 256,
        "vocab_size": 512,
        "ffn_dim": 128,
        "tie_embeddings": False,
    }
    split = {"strategy": "zero1", "pp": 2, "tp": 2, "global_batch": 8, "virtual_stages": 1}
    config, _ = emitted(tmp_path, own, gpus=4, gpu="cpu", **split)
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 256}
    with pytest.raises(BadInput, match="does not say through which modules its values go"):
        emitted(tmp_path, gpt2, gpus=4, gpu="cpu", **split | {"tp": 1})
    assert (config.plan.mesh.pp, config.plan.mesh.tp, config.plan.mesh.dp_shard) == (2, 2, 1)
    assert (config.parallel.pipeline.schedule, config.parallel.pipeline.chunks) == ("1f1b", 1)
    assert (config.model.kind, config.model.dim, config.model.ffn_dim) == ("decoder", 64, 128)


DECODER = {
    "model_type": "terrazzo", "vocab_size": 512, "dim": 64, "layers": 8, "heads": 4, "kv_heads": 2, "ffn_dim": 128,
    "max_sequence_length": 256, "tie_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}


@pytest.mark.parametrize(
    ("model", "ranks", "axes"),
    [
        (DECODER, 32, {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2, "virtual_stages": 2, "strategy": "hfsdp"}),
        (DECODER, 8, {"pp": 4, "pipeline": "zero_bubble", "strategy": "zero1"}),
        (DECODER, 8, {"pp": 2, "tp": 2, "pipeline": "gpipe", "strategy": "zero3"}),
        (DECODER | EXPERTS, 16, {"pp": 2, "dp_replicate": 2, "cp": 2, "ep": 4, "strategy": "hybrid_shard"}),
    ],
    ids=str,
)
def test_a_plan_on_all_axes_is_read_back_by_train_as_it_was(
    model: dict[str, Any], ranks: int, axes: dict[str, Any], tmp_path: Path
) -> None:
    """Sizes, schedule, and what train's own checks say of it; what the run would be promised is what was planned."""
    asked = {"gpu": "cpu", "precision": "fp32", "sequence": 256, "global_batch": 64, **axes}
    config, _ = emitted(tmp_path, model, gpus=ranks, **asked)
    planned = build_setup(Request(model, ranks, **asked))
    check_axes(config, ModelOnPaper(config))
    read = setup_of(config, ranks, planned.cluster)
    assert read.mesh == planned.mesh
    assert (read.pipeline, read.virtual_stages) == (planned.pipeline, planned.virtual_stages)
    assert (read.plan, read.micro_batches, read.loss) == (planned.plan, planned.micro_batches, planned.loss)
    assert traffic_of(read).total_bytes == traffic_of(planned).total_bytes
    assert memory_of(read).allocated_bytes == memory_of(planned).allocated_bytes


ANSWERS: dict[str, tuple[Any, ...]] = {
    "strategy": ("zero1", "zero2", "zero3", "zero3@cpu"),
    "loss": ("full", "chunked", "fused", "parts"),
    "optimizer": ("adamw", "rmsprop", "lion", "momentum", "muon", "adamw-8bit"),
    "optimizer_kernel": ("fused", "foreach", "loop"),
    "precision": ("fp32", "bf16", "fp16", "fp8-rowwise", "bf16,gather=int8"),
    "checkpointing": ("none", "selective_half", "every_2"),
    "attention": ("flash", "math"),
    "context": ("gather", "ring"),
    "sequence_parallel": (True, False),
    "accumulate_locally": (None, True),
    "prefetch": (0, 1),
    "compile": (False, True),
}
NAMES_ALONE = ("model", "cluster", "optimizer", "optimizer_kernel", "adapters", "accumulate_locally")
"""Of a setup: names of what is compared by what it means, or is the same by `Request`."""

ONLY_ALONG = {"cp": "context", "tp": "sequence_parallel"}
"""What says nothing where its axis has one rank."""


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"gpu": "h100", "strategy": "zero3"}, {"parts", "fused", "math"}),
        ({"gpu": "h100", "strategy": "zero2", "cp": 2, "tp": 2, "optimizer": "rmsprop"}, {"full", "fused", "math"}),
        ({"gpu": "cpu", "strategy": "zero1", "pp": 2, "tp": 2, "optimizer": "lion"}, {"full", "fused", "math"}),
    ],
    ids=str,
)
def test_what_is_emitted_is_read_back_as_it_was_planned_or_refused(asked: dict[str, Any], refused: set[str]) -> None:
    """Every answer beside each of these plans: a run that would be another than was planned is not written."""
    left = []
    for name, value in ((name, value) for name, values in ANSWERS.items() for value in values):
        planned = build_setup(Request(DECODER, 8, **{"micro_batches": 4, "sequence": 256, **asked, name: value}))
        check(planned)
        try:
            files = train_config(planned, DECODER)
        except BadInput:
            left.append((name, value))
            continue
        read = setup_of(config_from_dict(files.config), 8, planned.cluster)
        idle = {ONLY_ALONG[axis] for axis in ONLY_ALONG if getattr(planned.mesh, axis) == 1}
        compared = [field.name for field in fields(Setup) if field.name not in {*NAMES_ALONE, *idle}]
        assert not [each for each in compared if getattr(read, each) != getattr(planned, each)], (name, value)
        means = [(each.update_kernel, each.optimizer.moments, each.sums_locally) for each in (read, planned)]
        assert means[0] == means[1], (name, value)
    assert {value for name, value in left if name in ("loss", "attention")} == refused
    assert (("compile", True) in left) == (asked.get("pp", 1) > 1 or asked.get("cp", 1) > 1)
    assert {name for name, _ in left} <= {"loss", "attention", "accumulate_locally", "optimizer_kernel", "compile"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "full", "tp": 2}, "Plan with loss parts"),
        ({"optimizer": "rmsprop", "optimizer_kernel": "fused"}, "RMSprop has none of that name"),
        ({"optimizer": "lion", "optimizer_kernel": "fused"}, "Lion has none of that name"),
        ({"loss": "fused", "pp": 2, "gpu": "cpu", "model": DECODER, "strategy": "zero1"}, "which is not fused"),
        ({"framework": "megatron"}, "Leave --framework megatron out"),
    ],
    ids=str,
)
def test_what_a_run_would_do_otherwise_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        emitted(tmp_path, **options)


@pytest.mark.parametrize("per_node", [None, 8])
def test_ranks_on_this_machines_cpus_share_it_in_a_plan_as_in_its_run(
    per_node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them do, or as many as are on each of several such machines."""
    monkeypatch.setattr(devices, "_host_memory_bytes", lambda: 64 * 2**30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    asked: dict[str, Any] = {"gpu": "cpu", "strategy": "zero3", "precision": "fp32", "per_node": per_node}
    planned = build_setup(Request(DECODER, 16, sequence=64, **asked))
    assert planned.cluster.device.memory_bytes == 64 * 2**30 // (per_node or 16)
    assert planned.cluster.nodes == 16 // (per_node or 16)
    ranked = search(Request(DECODER, "16..16", sequence=64, **asked | {"strategy": None})).ranked
    assert ranked and all(each.setup.cluster == planned.cluster for each in ranked)
    config, _ = emitted(tmp_path, DECODER, gpus=16, sequence=64, **asked)
    assert config.launch.ranks == (16 if per_node is None else None)
    if per_node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    run = setup_of(config, 16)
    assert run.cluster.device == planned.cluster.device
    assert traffic_of(run).links == traffic_of(planned).links
