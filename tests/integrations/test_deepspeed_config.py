"""What the integration makes of DeepSpeed's JSON, without ranks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.errors import BadInput
from terrazzo.integrations import deepspeed
from terrazzo.integrations.deepspeed.answers import Answers
from terrazzo.integrations.deepspeed.optimizers import build_optimizer
from terrazzo.integrations.deepspeed.requested import Configuration, read

CPU = torch.device("cpu")


def made(world: int = 2, **document: Any) -> Configuration:
    return read({"train_micro_batch_size_per_gpu": 4, **document}, world, CPU)


def test_sizes_follow_from_two_of_three() -> None:
    configuration = read({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, CPU)
    assert (configuration.micro_batch, configuration.setup.accumulation) == (4, 4)


@pytest.mark.parametrize("stage", range(4))
def test_stages_are_plans(stage: int) -> None:
    configuration = made(zero_optimization={"stage": stage})
    assert (configuration.setup.plan.name, configuration.stage) == (f"zero{stage}", stage)


def test_clipping_has_deepspeeds_default_and_zero_is_none() -> None:
    assert made().setup.clip == 1.0
    assert made(gradient_clipping=0).setup.clip is None


def test_sixteen_bits_keep_masters_in_32_and_reduce_in_16() -> None:
    precision = made(bf16={"enabled": True}).setup.precision
    assert (precision.compute, precision.reduce, precision.master) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_a_file_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, // all ranks\n "zero_optimization": {"stage": 2}}')
    assert read(path, 2, CPU).micro_batch == 4


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "nontrainable"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"managed_gradient_accumulation": False}, "set_gradient_accumulation_boundary"),
        ({"managed_gradient_accumulation": "FALSE"}, "set_gradient_accumulation_boundary"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr is 'auto'"),
        ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto'"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": 0.1}}},
            "warmup_min_lr is 'auto'",
        ),
        ({"train_batch_size": 9}, "train_batch_size"),
        ({"scheduler": {"type": "Warmup"}}, "WarmupLR"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(document: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        made(**document)


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(BadInput, match=r"zero_optimisation: .*; managed_gradient_accumulation"):
        made(zero_optimisation={}, managed_gradient_accumulation=False)
    with pytest.raises(BadInput, match=r"'the config dict' .*gradient_allreduce_op is 'sum'.*; .*topk_ratio is 0\.1"):
        made(gradient_allreduce_op="sum", zero_optimization={"stage": 2, "zenflow": {"topk_ratio": 0.1}})


@pytest.mark.parametrize(
    ("document", "key", "value"),
    [
        ({"bf16": {"enabled": True, "check_grad_overflow": "false"}}, "bf16.check_grad_overflow", False),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow", False),
        ({"bf16": {"enabled": True, "check_grad_overflow": "auto"}}, "bf16.check_grad_overflow", True),
        ({"bf16": {"enabled": True}}, "bf16.check_grad_overflow", True),
        ({"dataloader_drop_last": "false"}, "dataloader_drop_last", False),
        ({"dataloader_drop_last": "True"}, "dataloader_drop_last", True),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage", 2),
        ({}, "steps_per_print", None),
    ],
)
def test_what_the_engine_looks_up_is_parsed_under_every_spelling(
    document: dict[str, Any], key: str, value: object
) -> None:
    assert made(**document).get(key) is value


def test_arguments_of_the_optimizer_are_parsed() -> None:
    params = {"lr": "1e-3", "torch_adam": "false", "amsgrad": "false", "betas": [0.9, 0.95]}
    section = made(optimizer={"type": "AdamW", "params": params}).section("optimizer.params")
    defaults = build_optimizer("AdamW", section, [nn.Parameter(torch.ones(2))]).defaults
    wanted = {"lr": 0.001, "weight_decay": 0.0, "amsgrad": False, "betas": (0.9, 0.95)}
    assert {name: defaults[name] for name in wanted} == wanted


def test_notes_say_what_has_no_effect_and_nothing_else() -> None:
    assert made(gradient_clipping=1, wall_clock_breakdown="false", prescale_gradients="false").notes == ()
    quiet: dict[str, Any] = {"stage": 2, "overlap_comm": None, "contiguous_gradients": True, "cpu_offload": False}
    assert (
        made(gradient_clipping=1, zero_optimization=quiet, steps_per_print=10, wall_clock_breakdown=False).notes == ()
    )
    notes = made(zero_optimization={"stage": 2, "reduce_bucket_size": 5}, prescale_gradients=True).notes
    assert any("prescale_gradients" in note for note in notes)
    assert any("reduce_bucket_size" in note and "without effect" in note for note in notes)


def test_optimizers_have_deepspeeds_defaults() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert build_optimizer("AdamW", {"lr": 0.1}, parameters).defaults["weight_decay"] == 0.0
    assert build_optimizer("AdamW", {"torch_adam": True}, parameters).defaults["weight_decay"] == 0.01


def test_param_groups_keep_their_own_and_lose_what_is_frozen() -> None:
    frozen, kept = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    groups = [{"params": [frozen, kept], "weight_decay": 0.5}, {"params": [frozen]}]
    optimizer = build_optimizer("AdamW", {"lr": 0.1}, groups)
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.5)]


@pytest.mark.parametrize(
    ("name", "params", "word"),
    [
        ("Lamb", {}, "each element"),
        ("AdamW", {"bias_correction": False}, "bias_correction"),
        ("SGD", {"betas": [0.9, 0.99]}, "do not suit SGD"),
    ],
)
def test_optimizers_that_cannot_run_are_refused(name: str, params: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        build_optimizer(name, params, [nn.Parameter(torch.ones(2))])


def test_what_the_door_has_not_can_be_named_and_not_used() -> None:
    with pytest.raises(BadInput, match=r"deepspeed\.utils\.safe_get_full_grad is used"):
        deepspeed.utils.safe_get_full_grad(torch.ones(2))
    layer = deepspeed.moe.layer.MoE
    assert not isinstance(3, layer)
    with pytest.raises(BadInput, match="no expert parallelism"):
        layer(hidden_size=4)
    with pytest.raises(BadInput, match="pipeline"):
        type("Piped", *_bases(deepspeed.PipelineModule))
    with pytest.raises(BadInput, match=r"deepspeed\.moe\.kinds is used"):
        list(deepspeed.moe.kinds)
    with pytest.raises(BadInput, match=r"deepspeed\.moe\.kinds is used"):
        deepspeed.moe.kinds["one"]


def _bases(base: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    class Piped(base):  # type: ignore[misc]
        pass

    return (Piped,), {}


def test_arguments_of_the_parser() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    arguments = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (arguments.deepspeed, arguments.deepspeed_config) == (True, "x.json")


def test_ranks_of_another_launcher_are_never_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(BadInput, match=r"OMPI_COMM_WORLD_SIZE says 2 ranks.*MASTER_ADDR"):
        deepspeed.init_distributed()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch.distributed would have been started with, in an environment that says nothing."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **options: started.append(options))
    return started


def test_slurms_tasks_are_ranks_by_the_rule_of_every_entry_point(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an allocation of 8 tasks a process that no step has started, such as a shell's, is alone."""
    for name, value in {"PROCID": "1", "LOCALID": "1", "NTASKS": "2", "JOB_NODELIST": "n[7-8]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    deepspeed.init_distributed()
    assert (joined[0]["rank"], joined[0]["world_size"], os.environ["LOCAL_RANK"]) == (0, 1, "0")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    deepspeed.init_distributed()
    assert (joined[1]["rank"], joined[1]["world_size"], os.environ["LOCAL_RANK"]) == (1, 2, "1")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("n7", "29500")


def test_a_rank_that_the_script_names_is_that_one(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed.init_distributed(init_method="tcp://127.0.0.1:1", rank=1, world_size=2)
    monkeypatch.setenv("RANK", "3")
    deepspeed.init_distributed(init_method="tcp://127.0.0.1:1")
    assert [(each["init_method"], each["rank"], each["world_size"]) for each in joined] == [
        ("tcp://127.0.0.1:1", 1, 2),
        ("tcp://127.0.0.1:1", 3, 2),
    ]


def test_another_launcher_is_not_asked_where_the_script_says_so(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"PROCID": "1", "LOCALID": "1", "NTASKS": "2", "STEP_ID": "0", "TASKS_PER_NODE": "2"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    deepspeed.init_distributed(auto_mpi_discovery=False, rank=0, world_size=1)
    assert ([each["rank"] for each in joined], os.environ["WORLD_SIZE"]) == ([0], "1")


def test_without_an_optimizer_there_is_no_name_of_one() -> None:
    engine: Any = SimpleNamespace(configuration={}, optimizer=None)
    assert Answers.optimizer_name(engine) is None
    engine.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert Answers.optimizer_name(engine) == "sgd"


def test_terrazzo_has_initialize() -> None:
    assert tz.initialize is deepspeed.initialize


def test_the_examples_json_is_one() -> None:
    path = Path(__file__).parents[2] / "examples" / "integrations" / "deepspeed.json"
    assert read(path, 2, CPU).notes == ()
    assert json.loads(path.read_text())["zero_optimization"]["stage"] == 3
