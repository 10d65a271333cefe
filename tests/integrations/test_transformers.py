"""Hugging Face's Trainer on Terrazzo, on two gloo ranks: the unmodified Trainer, which is DDP there, is the oracle."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from terrazzo.errors import BadInput
from terrazzo.integrations.shared import first_rank
from tests.helpers.processes import Pool
from tests.integrations.trainers import (
    PATIENCE_S,
    QUIET,
    Run,
    apart,
    for_accelerate,
    sequences,
    tiny_model,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes

# -- against the unmodified Trainer --------------------------------------------------------------------------------


def _differences(folder: Path, plans: tuple[str, ...], given: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By plan, the largest difference of what is logged, and of the weights, from the unmodified Trainer's."""
    given = {"eval_strategy": "steps", "eval_steps": 2, "weight_decay": 0.1, "warmup_steps": 1, **given}
    trainer = {"eval_dataset": sequences(6)}
    theirs, found = Run(folder, None, given, trainer), {}
    for plan in plans:
        ours = Run(folder, plan, given, trainer)
        found[plan] = {
            name: max(abs(a - b) for a, b in zip(ours.logged(name), theirs.logged(name), strict=True))
            for name in ("loss", "grad_norm", "learning_rate", "eval_loss")
        }
        found[plan]["flos"] = abs(ours.trainer.state.total_flos - theirs.trainer.state.total_flos)
        found[plan]["weights"] = apart(ours.weights(), theirs.weights())
    return found


def test_losses_norms_and_weights_are_the_trainers(two_processes: Pool, tmp_path: Path) -> None:
    """Clipping is on. A difference is a sum over ranks or parameters in another order."""
    for accumulation, plans in ((1, ("zero1",)), (4, ("zero0", "zero3"))):
        given = {"gradient_accumulation_steps": accumulation}
        for found in two_processes.run(_differences, tmp_path, plans, given, timeout_s=PATIENCE_S):
            for plan, differences in found.items():
                assert differences["loss"] <= 1e-6, (accumulation, plan, differences)
                assert differences["eval_loss"] <= 1e-6, (accumulation, plan, differences)
                assert differences["grad_norm"] <= 2e-7, (accumulation, plan, differences)
                assert differences["weights"] <= 3e-7, (accumulation, plan, differences)
                assert differences["learning_rate"] == differences["flos"] == 0, (accumulation, plan, differences)


@pytest.mark.parametrize("given", [{}, {"activation_checkpointing": True, "bf16": True}], ids=str)
def test_without_clipping_the_bits_are_the_trainers(two_processes: Pool, tmp_path: Path, given: dict[str, Any]) -> None:
    for found in two_processes.run(
        _differences, tmp_path, ("zero2",), {"max_grad_norm": 0, **given}, timeout_s=PATIENCE_S
    ):
        for plan, differences in found.items():
            assert differences["weights"] == differences["loss"] == differences["eval_loss"] == 0, (plan, differences)


# -- where the plan comes from, and what comes with it -------------------------------------------------------------


def _plans(folder: Path) -> dict[str, Any]:
    """What was run for arguments of several kinds, with the losses."""
    classes = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": False}
    asked: dict[str, dict[str, Any]] = {
        "nothing": {},
        "fsdp": {"fsdp": True, "fsdp_config": classes},
        "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}},
    }
    found = {}
    for name, given in asked.items():
        from terrazzo.integrations.transformers import TerrazzoArguments

        run = Run(folder, "", given, {"terrazzo": TerrazzoArguments()})
        found[name] = run.trainer.accelerator.setup.plan.name, run.logged()
    return found


def test_training_arguments_name_the_plan(two_processes: Pool, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="TrainingArguments(deepspeed=...) want it")
    for found in two_processes.run(_plans, tmp_path, timeout_s=PATIENCE_S):
        assert {name: plan for name, (plan, _) in found.items()} == {
            "nothing": "zero0",
            "fsdp": "shard_grad_op",
            "deepspeed": "zero2",
        }
        assert found["fsdp"][1] == pytest.approx(found["nothing"][1], abs=1e-6)
        assert found["deepspeed"][1] == pytest.approx(found["nothing"][1], abs=1e-6)


def _model_init(folder: Path, evaluate: bool) -> list[float]:
    import transformers

    from terrazzo.integrations.transformers import TerrazzoArguments, Trainer

    arguments = transformers.TrainingArguments(str(folder), **QUIET)
    data = {"train_dataset": sequences(), "eval_dataset": sequences(6)}
    trainer = Trainer(args=arguments, model_init=lambda: tiny_model(), **data, terrazzo=TerrazzoArguments(plan="zero3"))
    if evaluate:
        trainer.evaluate()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _evaluated_first(folder: Path) -> tuple[list[float], list[float]]:
    for_accelerate()
    return _model_init(folder, False), _model_init(folder, True)


def test_a_model_of_model_init_that_was_evaluated_first_trains_the_same(two_processes: Pool, tmp_path: Path) -> None:
    """The unmodified Trainer then trains each rank's model alone."""
    first, second = two_processes.run(_evaluated_first, tmp_path, timeout_s=PATIENCE_S)
    assert first == second
    assert first[0] == first[1]


# -- scripts that know nothing of Terrazzo -------------------------------------------------------------------------

_SCRIPT = """
import json, sys
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tests.integrations.trainers import sequences, tiny_model, tiny_tokenizer

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=tiny_model(), args=args, train_dataset=sequences())
trainer.train()
trainer.save_model()
trainer.save_state()
if trainer.is_world_process_zero():
    print(json.dumps([type(trainer).__module__, hasattr(trainer.model, "_terrazzo")]), file=open(sys.argv[-1], "w"))
"""


def _script(folder: Path) -> None:
    """By the runner, in this process."""
    import transformers

    from terrazzo.integrations.transformers import TerrazzoArguments, TerrazzoTrainerMixin
    from terrazzo.integrations.transformers.__main__ import main

    for_accelerate()
    words = "--use_cpu --report_to none --disable_tqdm True --logging_steps 1 --save_strategy no --max_steps 4 --seed 5"
    words += " --per_device_train_batch_size 2 --learning_rate 1e-2 --output_dir"
    theirs, argv, first, ours = transformers.Trainer, list(sys.argv), sys.path[0], sys.modules["__main__"]
    try:
        main(["--plan", "zero3", str(folder / "script.py"), *words.split(), str(folder / "out")])
    finally:
        transformers.Trainer = transformers.trainer.Trainer = theirs
        TerrazzoTrainerMixin.terrazzo = TerrazzoArguments()
        sys.argv[:], sys.path[0] = argv, first
        sys.modules["__main__"] = ours


def _script_and_run(folder: Path) -> list[float]:
    _script(folder)
    dist.barrier()
    return Run(folder / "theirs").logged()


def test_an_unmodified_script_runs_by_the_runner(two_processes: Pool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT.replace("sys.argv[-1]", repr(str(tmp_path / "told.json"))))
    losses = two_processes.run(_script_and_run, tmp_path, timeout_s=PATIENCE_S)[0]
    assert json.loads((tmp_path / "told.json").read_text()) == ["terrazzo.integrations.transformers.trainer", True]
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["loss"] for entry in history if "loss" in entry] == losses


@pytest.mark.parametrize("words", [["--plan", "zeroo"], ["--precision", "bf61"]])
def test_a_plan_that_there_is_not_is_refused_before_the_script_begins(words: list[str], tmp_path: Path) -> None:
    import transformers

    from terrazzo.errors import BadInput
    from terrazzo.integrations.transformers.__main__ import main

    theirs = transformers.Trainer
    (tmp_path / "script.py").write_text("raise KeyError('begun')\n")
    with pytest.raises(BadInput, match=words[1]):
        main([*words, str(tmp_path / "script.py")])
    assert transformers.Trainer is theirs


def _example(folder: Path, name: str, *words: str) -> list[str]:
    """Run an example as a user does, in `folder`; what it wrote there."""
    for_accelerate()
    argv, there = list(sys.argv), Path.cwd()
    script = Path(__file__).parents[2] / "examples" / "integrations" / name
    os.chdir(folder)
    try:
        sys.argv[:] = [str(script), *words]
        runpy.run_path(str(script), run_name="__main__")
    finally:
        os.chdir(there)
        sys.argv[:] = argv
    dist.barrier()
    return sorted(str(path.relative_to(folder)) for path in folder.glob("runs/*/*") if path.is_dir())


def test_the_example_trains_and_saves(two_processes: Pool, tmp_path: Path) -> None:
    written = two_processes.run(_example, tmp_path, "trainer_script.py", timeout_s=PATIENCE_S)[0]
    assert written == [f"runs/trainer/{name}" for name in ("checkpoint-10", "checkpoint-20", "final")]


# -- what is refused -----------------------------------------------------------------------------------------------


def _arguments(folder: Path, **given: Any) -> Any:
    import transformers

    return transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"torch_compile_mode": "max-autotune"}, "torch_compile_mode"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    tmp_path: Path, given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from terrazzo.integrations.transformers.requested import check

    for name in ("BACKEND", "MODE"):  # which TrainingArguments sets, for good
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "no")
    with pytest.raises(BadInput, match=message):
        check(_arguments(tmp_path, **given), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_in_another_dtype_is_refused_as_training_begins(tmp_path: Path, name: str) -> None:
    from terrazzo.integrations.transformers import Trainer

    data = {"train_dataset": sequences(2), "eval_dataset": sequences(2)}
    trainer = Trainer(tiny_model(), _arguments(tmp_path, **{name: True}, disable_tqdm=True), **data)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(BadInput, match=f"{name} turns the model's weights"):
        trainer.train()


def test_the_dtype_is_that_of_the_adapters_and_not_of_their_frozen_base(tmp_path: Path) -> None:
    from terrazzo.integrations.transformers.requested import check

    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(2, 2))
    assert check(_arguments(tmp_path), model) is torch.float32
    assert check(_arguments(tmp_path), model[0]) is torch.bfloat16


def test_ranks_that_would_train_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without use_cpu and without a GPU the unmodified Trainer trains one lone model on each rank."""
    from terrazzo.integrations.transformers.requested import check

    arguments = _arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="use_cpu=True"):
        check(arguments, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "accelerate launch was told FSDP"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "accelerate launch was told MULTI_GPU"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "asks for inductor"),
    ],
)
def test_what_accelerate_launch_says_of_engines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], message: str
) -> None:
    from terrazzo.integrations.transformers.requested import describe

    arguments = _arguments(tmp_path)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=message):
        describe(arguments, torch.float32)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")  # as accelerate launch writes it
    for name in told:
        monkeypatch.delenv(name)
    describe(arguments, torch.float32)


def test_a_key_that_training_arguments_pass_over_is_refused(tmp_path: Path) -> None:
    from terrazzo.integrations.transformers.requested import describe

    arguments = _arguments(tmp_path, fsdp=True, fsdp_config={"offload_params": True})
    with pytest.raises(BadInput, match=r"offload_params.*cpu_offload"):
        describe(arguments, torch.float32)


def test_what_is_lost_of_a_deepspeed_document_is_named_in_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from terrazzo.integrations.transformers.requested import describe

    arguments = _arguments(tmp_path)  # what is set behind it needs no DeepSpeed
    arguments.deepspeed = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    arguments.deepspeed |= {"gradient_clipping": "auto", "prescale_gradients": False}
    describe(arguments, torch.float32)  # pytest makes errors of warnings
    arguments.deepspeed["prescale_gradients"] = True
    monkeypatch.setattr(first_rank, "_WARNED", set())
    with pytest.warns(UserWarning, match=r"TrainingArguments: deepspeed\.prescale_gradients: .*divided") as caught:
        describe(arguments, torch.float32)
    describe(arguments, torch.float32)
    assert len(caught) == 1


def test_a_warm_up_that_starts_above_zero_in_a_deepspeed_document_alone_is_refused(tmp_path: Path) -> None:
    from terrazzo.integrations.transformers.requested import describe

    arguments = _arguments(tmp_path, lr_scheduler_type="linear", learning_rate=1e-3, warmup_steps=2, max_steps=8)
    steps = {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear", "warmup_max_lr": "auto"}
    schedule = {"type": "WarmupDecayLR", "params": {**steps, "warmup_min_lr": 1e-4}}
    arguments.deepspeed = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    arguments.deepspeed |= {"gradient_clipping": "auto", "scheduler": schedule}
    arguments.deepspeed |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    with pytest.raises(BadInput, match=r"warmup_min_lr is 0\.1, not 0\.0 of the peak"):
        describe(arguments, torch.float32)


def test_a_deepspeed_document_must_agree_with_the_arguments(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="TrainingArguments(deepspeed=...) want it")
    from terrazzo.integrations.transformers.requested import describe

    stage = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    describe(_arguments(tmp_path, deepspeed={**stage, "gradient_clipping": "auto"}), torch.float32)
    said = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "gradient_clipping": 0.5}
    with pytest.raises(BadInput, match=r"lr is 0\.0003, not 5e-05.*gradient_clipping is 0\.5, not 1\.0"):
        describe(_arguments(tmp_path, deepspeed={**stage, **said}), torch.float32)
