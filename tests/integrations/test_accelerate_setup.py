"""Where the drop-in's plan comes from: its arguments, Accelerate's plugins, and the launcher's environment."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.engine import LossScaling, Offload, Plan, Precision
from terrazzo.errors import BadInput
from tests.helpers.launched import launched

pytest.importorskip("accelerate")

from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ParallelismConfig,
    TERecipeKwargs,
    TorchDynamoPlugin,
)

from terrazzo.integrations.accelerate.requested import RequestedSetup, hidden
from terrazzo.integrations.shared import first_rank
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup

CPU = torch.device("cpu")
FSDP = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16"}


@pytest.fixture(autouse=True)
def _no_noise() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def asked(words: TerrazzoArguments | None = None, alone: bool = False, **given: Any) -> RequestedSetup:
    return RequestedSetup(given, words or TerrazzoArguments(), alone)


def as_launched(monkeypatch: pytest.MonkeyPatch, folder: Path, document: dict[str, Any]) -> None:
    for name, value in launched(document, folder).items():
        monkeypatch.setenv(name, value)


def dtypes(setup: EngineSetup) -> tuple[str, ...]:
    found = setup.precision
    names = (found.weight, found.compute, found.reduce, found.master)
    return tuple(str(dtype).removeprefix("torch.") for dtype in names)


FSDP_CASES: list[tuple[dict[str, Any], str, tuple[str, ...] | None]] = [
    ({}, "zero3", ()),
    ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "shard_grad_op", ()),
    ({"fsdp_sharding_strategy": "NO_SHARD"}, "zero0", ()),
    ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, "shard_grad_op", ()),
    (
        {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A,B"},
        "zero3",
        ("A", "B"),
    ),
    ({"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}, "zero3", None),
]


@pytest.mark.parametrize(("section", "plan", "units"), FSDP_CASES)
def test_the_launcher_and_the_plugin_say_the_same(
    section: dict[str, Any],
    plan: str,
    units: tuple[str, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    as_launched(monkeypatch, tmp_path, FSDP | {"fsdp_config": section})
    from_launcher = asked().setup(CPU, 2)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin would ask for a GPU
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")
    plugin = FullyShardedDataParallelPlugin()
    for name in [name for name in os.environ if name.startswith("FSDP_")] + ["ACCELERATE_USE_FSDP"]:
        monkeypatch.delenv(name)
    assert asked(fsdp_plugin=plugin).setup(CPU, 2) == from_launcher
    assert (from_launcher.plan.name, from_launcher.arguments.units) == (plan, units)
    if plan != "zero0":
        assert dtypes(from_launcher)[1:] == ("bfloat16", "bfloat16", "float32")


def test_deepspeed_as_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = {"zero_stage": 1, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": False}
    section["offload_optimizer_device"] = "cpu"
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16"}
    as_launched(monkeypatch, tmp_path, document | {"deepspeed_config": section})
    found = asked()
    setup = found.setup(CPU, 2)
    assert found.deepspeed
    assert (str(setup.plan.optim), setup.clip, setup.accumulation) == ("D@cpu", 0.5, 4)
    assert dtypes(setup)[:2] == ("bfloat16", "bfloat16")
    assert setup.autocast is None


# without a word DeepSpeed clips at 1.0
FILES: list[tuple[dict[str, Any], tuple[str, ...], Any]] = [
    ({"bf16": {"enabled": "auto"}}, (), ("float32", 1.0, 1)),
    ({"bf16": {"enabled": "auto"}}, ("--mixed_precision", "bf16"), ("bfloat16", 1.0, 1)),
    ({}, ("--mixed_precision", "bf16"), ("bfloat16", 1.0, 1)),
    ({"gradient_clipping": "auto"}, ("--gradient_clipping", "0.5"), ("float32", 0.5, 1)),
    ({"gradient_clipping": 0.5}, ("--gradient_clipping", "0.5"), ("float32", 0.5, 1)),
    ({}, ("--gradient_accumulation_steps", "4"), ("float32", 1.0, 4)),
    ({"gradient_clipping": 1.0}, ("--gradient_clipping", "0.5"), "gradient_clipping is 0.5 from the launcher and 1.0"),
    ({"fp16": {"enabled": True}}, ("--mixed_precision", "bf16"), "fp16.enabled: True"),
    ({"bf16": {"enabled": False}}, ("--mixed_precision", "bf16"), "bf16.enabled: False"),
    ({"fp16": {"loss_scale": 0}}, ("--mixed_precision", "fp16"), "fp16.enabled: False"),
]


@pytest.mark.parametrize(("said", "flags", "wanted"), FILES)
def test_flags_beside_deepspeeds_file(
    said: dict[str, Any], flags: tuple[str, ...], wanted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Accelerate fills "auto" and what is missing from its own words; where both speak, they must agree."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1, **said}))
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {}}
    document["deepspeed_config"] = {"deepspeed_config_file": str(file)}
    for name, value in launched(document, tmp_path, *flags).items():
        monkeypatch.setenv(name, value)
    if isinstance(wanted, str):
        with pytest.raises(BadInput, match=wanted):
            asked().setup(CPU, 2)
    else:
        setup = asked().setup(CPU, 2)
        assert (dtypes(setup)[1], setup.clip, setup.accumulation) == wanted
        assert setup.plan.name == "zero1"


def test_what_is_lost_of_a_configuration_is_named_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys that the document has, and at other values than their defaults; not those that change no result."""
    file, sizes = tmp_path / "deepspeed.json", {"train_micro_batch_size_per_gpu": 1}
    lost = {"prescale_gradients": True, "gradient_predivide_factor": 1.0, "wall_clock_breakdown": True}
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, **sizes, **lost}))
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2}
    as_launched(monkeypatch, tmp_path, document | {"deepspeed_config": {"deepspeed_config_file": str(file)}})
    monkeypatch.setattr(first_rank, "_WARNED", set())
    with pytest.warns(UserWarning, match="DeepSpeed's configuration") as caught:
        asked().setup(CPU, 2)
    (said,) = [str(each.message) for each in caught if "DeepSpeed's configuration" in str(each.message)]
    assert "prescale_gradients: Terrazzo has no such setting: gradients are divided in other places" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked().setup(CPU, 2)


def test_an_effect_that_is_lost_on_the_way_to_deepspeed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    section = {"zero_stage": 1, "gradient_clipping": 0.0, "zero3_init_flag": False}
    document = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
    as_launched(monkeypatch, tmp_path, document)
    monkeypatch.setattr(first_rank, "_WARNED", set())
    with pytest.warns(UserWarning, match=r"Accelerate's configuration: deepspeed_config\.gradient_clipping: .* 0 out"):
        assert asked().setup(CPU, 2).clip == 1.0


@pytest.mark.parametrize("version", ["3", "", "[1]"])
def test_a_version_of_fsdp_that_is_none_is_refused_by_its_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(BadInput, match=r"fsdp_config\.fsdp_version"):
        asked().setup(CPU, 2)


def test_a_file_of_deepspeeds_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "/nowhere/ds.json")
    with pytest.raises(BadInput, match=r"deepspeed_config_file.*nowhere"):
        asked()


def test_a_precision_that_the_notebook_launcher_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("MIXED_PRECISION", "bf16")
    with pytest.raises(BadInput, match="notebook_launcher"):
        asked()
    assert asked(mixed_precision="bf16").mixed == "bf16"


def test_every_variable_of_the_launcher_is_in_the_guide() -> None:
    """Those that Accelerate's own launcher sets for ranks, by its source."""
    import accelerate.utils.launch as launcher

    source = Path(launcher.__file__).read_text()
    names = set(re.findall(r'current_env\["((?:ACCELERATE|FSDP)_\w+)"\]', source))
    names |= {f"PARALLELISM_CONFIG_{name}" for name in re.findall(r'current_env\[prefix \+ "(\w+_SIZE)"\]', source)}
    guide = (Path(__file__).parents[2] / "docs/guides/accelerate.md").read_text()
    table = guide[guide.index("| variable |") :].split("\n\n")[0]
    patterns = [pattern.replace("*", r"\w+") for pattern in re.findall(r"`([A-Z_0-9*]+)`", table)]
    assert len(names) > 40
    assert {name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()


def test_deepspeeds_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="Accelerate's plugin wants it")
    from accelerate.utils import DeepSpeedPlugin

    document = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0.25,
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 4,
    }
    setup = asked(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=document), mixed_precision="bf16").setup(CPU, 2)
    assert (setup.plan.name, setup.clip, setup.accumulation) == ("zero3", 0.25, 2)
    assert dtypes(setup)[1] == "bfloat16"


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_what_deepspeed_would_build_is_refused_beside_the_scripts_own(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ds.json"
    built = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}[section]
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, section: built}))
    launched = {"distributed_type": "DEEPSPEED", "num_processes": 2}
    as_launched(monkeypatch, tmp_path, launched | {"deepspeed_config": {"deepspeed_config_file": str(file)}})
    with pytest.raises(BadInput, match=f"configuration has {section}, and the script"):
        asked().setup(CPU, 2)


def test_replicas_keep_the_models_dtype_and_weights_whole() -> None:
    plain = asked().setup(CPU, 2)
    assert (plain.plan.name, plain.precision, plain.arguments.units) == ("zero2", Precision(), None)
    half = asked(mixed_precision="bf16").setup(CPU, 2, nn.Linear(2, 2, dtype=torch.bfloat16))
    assert half.precision == Precision.named("bf16-pure")


def test_the_words_of_terrazzo_hold() -> None:
    offload = Offload(threads=1)
    words = TerrazzoArguments("zero3@cpu", "bf16", [nn.Linear], offload=offload)
    setup = asked(words).setup(CPU, 2)
    assert (setup.plan, setup.precision) == (Plan.named("zero3@cpu"), Precision.named("bf16"))
    assert (setup.arguments.units, setup.arguments.offload) == ([nn.Linear], offload)
    beside = asked(TerrazzoArguments(units=[nn.Linear]), fsdp_plugin=FullyShardedDataParallelPlugin()).setup(CPU, 2)
    assert (beside.plan.name, beside.arguments.units) == ("zero3", [nn.Linear])
    axes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    replicated = asked(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), parallelism_config=axes)
    assert replicated.setup(CPU, 4).plan.name == "hybrid_shard"
    assert asked(dynamo_backend="inductor").setup(CPU, 2).compile
    assert not asked(dynamo_backend="no").setup(CPU, 2).compile
    assert not asked(dynamo_plugin=TorchDynamoPlugin("inductor", disable=True)).setup(CPU, 2).compile


def test_fp16_scales_as_its_handler_says() -> None:
    handler = GradScalerKwargs(init_scale=1024.0, growth_interval=10)
    setup = asked(mixed_precision="fp16", kwargs_handlers=[handler]).setup(torch.device("cuda"), 1)
    scaling = setup.precision.loss_scaling
    assert scaling is not None
    assert (scaling.init, scaling.interval, setup.precision.compute) == (1024.0, 10, torch.float32)


@pytest.mark.parametrize("version", [1, 2])
def test_under_fsdp_too_fp16_scales_as_its_handler_says(version: int) -> None:
    handler = GradScalerKwargs(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=10)

    def scaling(mixed: str, *handlers: Any) -> LossScaling | None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        found = asked(mixed_precision=mixed, fsdp_plugin=plugin, kwargs_handlers=list(handlers))
        return found.setup(torch.device("cuda"), 2).precision.loss_scaling

    assert scaling("fp16", handler) == LossScaling(1024.0, 4.0, 0.25, 10)
    assert scaling("fp16") == LossScaling()
    assert scaling("bf16", handler) is None


def deepspeed_plugin() -> Any:
    """What this integration reads of Accelerate's plugin, which cannot be made without DeepSpeed."""
    return SimpleNamespace(deepspeed_config={"train_micro_batch_size_per_gpu": 1})


BESIDE_DEEPSPEED: list[tuple[dict[str, Any], str]] = [
    ({"parallelism_config": ParallelismConfig(sp_size=2)}, "parallelism_config_sp_size is 2 beside DeepSpeed"),
    ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, "parallelism_config_dp_shard_size is 2"),
    ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "FSDP is asked for beside DeepSpeed"),
    ({"kwargs_handlers": [GradScalerKwargs(init_scale=1024.0)]}, "GradScalerKwargs beside DeepSpeed"),
]


@pytest.mark.parametrize(("given", "words"), BESIDE_DEEPSPEED)
def test_what_deepspeeds_configuration_would_hide_is_refused(given: dict[str, Any], words: str) -> None:
    given = {name: value() if isinstance(value, type) else value for name, value in given.items()}
    with pytest.raises(BadInput, match=words):
        asked(deepspeed_plugin=deepspeed_plugin(), **given)


def test_a_mesh_of_the_launchers_beside_deepspeed_is_refused_unless_its_sizes_are_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "1")
    assert asked(deepspeed_plugin=deepspeed_plugin()).setup(CPU, 2).plan.name == "zero0"
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    with pytest.raises(BadInput, match="parallelism_config_sp_size is 2"):
        asked(deepspeed_plugin=deepspeed_plugin())
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(BadInput, match="parallelism_config_sp_size is 2"):
        asked()


def test_fp8_is_linear_layers_in_eight_bits_on_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"mixed_precision": "fp8"}
    found = RequestedSetup(given, TerrazzoArguments(), alone=False)
    assert given["mixed_precision"] == "bf16"  # what Accelerate's own class is told, which would look for torchao
    assert (found.setup(CPU, 2).float8, asked(mixed_precision="bf16").setup(CPU, 2).float8) == ("tensorwise", None)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    sharded = asked(mixed_precision="fp8", fsdp_plugin=plugin).setup(CPU, 4)
    assert (sharded.float8, sharded.precision.compute) == ("tensorwise", torch.bfloat16)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"words": TerrazzoArguments(plan="zero3"), "fsdp_plugin": 1},
        "plan='zero3' was given, and the configuration of FSDP",
    ),
    ({"words": TerrazzoArguments(precision="bf16"), "mixed_precision": "bf16"}, "mixed_precision .bf16"),
    ({"words": TerrazzoArguments(plan="zero4")}, "zero4"),
    ({"alone": True, "words": TerrazzoArguments(plan="zero1")}, "setup= says everything"),
    ({"mixed_precision": "fp8", "kwargs_handlers": [TERecipeKwargs.__new__(TERecipeKwargs)]}, "TERecipeKwargs cannot"),
    ({"mixed_precision": "fp16"}, "on a CPU"),
    ({"megatron_lm_plugin": object()}, "megatron_lm_plugin"),
    ({"torch_tp_plugin": object()}, "torch_tp_plugin"),
    ({"dynamo_backend": "eager"}, "dynamo_backend is eager"),
    ({"dynamo_plugin": TorchDynamoPlugin("inductor", options={"max_autotune": True})}, "inductor with options"),
    ({"deepspeed_plugin": {"a": 1, "b": 2}}, "has 2 plugins: a, b|takes one: a, b"),
    ({"parallelism_config": ParallelismConfig(tp_size=2)}, "tp_size.*tensor parallel degree of 2"),
    ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]}, "comm_hook"),
    ({"kwargs_handlers": [GradScalerKwargs(enabled=False)]}, "GradScalerKwargs.enabled"),
    ({"fsdp_plugin": 2}, "ignored_modules|ignored"),
    ({"fsdp_plugin": 3}, "auto_wrap_policy is a function"),
    ({"fsdp_plugin": 4}, "mixed_precision_policy"),
    ({"fsdp_plugin": 5}, "param_init_fn"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], words: str) -> None:
    plugins: dict[int, dict[str, Any]] = {
        1: {},
        2: {"ignored_modules": "lm_head"},
        3: {"auto_wrap_policy": lambda **kwargs: True},
        4: {"mixed_precision_policy": "bf16"},
        5: {"param_init_fn": nn.Module.cpu, "sync_module_states": False, "cpu_ram_efficient_loading": False},
    }
    given = dict(given)
    if "fsdp_plugin" in given:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(**plugins[given["fsdp_plugin"]])
    with pytest.raises(BadInput, match=words):
        asked(**given).setup(CPU, 2)


def test_other_engines_are_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with hidden():
        assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND"} & set(os.environ)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
