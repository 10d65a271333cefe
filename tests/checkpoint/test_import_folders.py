"""Importing folders of transformers' Trainer and of Accelerate, made by the functions of torch that they call."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from terrazzo.checkpoint.importers import open_foreign
from terrazzo.checkpoint.importers.parts.numbering import ModelNames
from terrazzo.checkpoint.importers.torch_file import TorchFile
from terrazzo.errors import BadInput
from tests.checkpoint.test_import_dcp import fsdp2
from tests.helpers.imported import Net, RunsCode, assert_same, names_of, states_of, train, trained
from tests.helpers.processes import Pool

STATE = {"global_step": 2, "epoch": 0.5, "max_steps": 9, "best_metric": math.nan, "log_history": [{"loss": 1.0}] * 3}


def language_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":  # its norms are torch's, and are not called norms
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        )
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=40, intermediate_size=24, attention_bias=True, **sizes)
    )


def trainer_folder(path: Path, model: Any) -> torch.optim.AdamW:
    """What the Trainer leaves in `checkpoint-2`, and its optimizer."""
    import transformers

    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, 10)
    for _ in range(2):
        model(torch.randint(40, (2, 8))).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.save_pretrained(path, max_shard_size=8000)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save(scheduler.state_dict(), path / "scheduler.pt")
    torch.save(RunsCode(), path / "training_args.bin")
    torch.save({"python": RunsCode()}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text(json.dumps(STATE))
    return optimizer


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("frozen", ["", "embed", "wte"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_checkpoint_of_the_trainer(tmp_path: Path, kind: str, frozen: str) -> None:
    model = language_model(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    optimizer = trainer_folder(tmp_path, model)
    source = open_foreign(tmp_path, ModelNames(names_of(model)))
    assert_same(source, states_of(model, optimizer))
    assert source.optimizer is not None
    named = {id(p): name for name, p in model.named_parameters()}
    expected = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert [group["params"] for group in source.optimizer.groups] == expected
    assert [group["weight_decay"] for group in source.optimizer.groups] == [0.1, 0.0]
    assert source.step == 2
    assert source.extra["trainer_state"] == {"global_step": 2, "epoch": 0.5, "max_steps": 9}
    assert source.extra["scheduler"]["last_epoch"] == 2
    assert sorted(note.split(":")[0] for note in source.all_notes) == [
        "not read",
        "trainer_state.best_metric is not taken over",
    ]
    assert "rng_state.pth, training_args.bin" in " ".join(source.file_notes)
    assert RunsCode.ran == 0


def test_a_folder_of_accelerate(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_file(net.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    save_file({"w": torch.ones(2)}, tmp_path / "model_1.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(), tmp_path / "scheduler.bin")
    torch.save({"scale": 512.0, "growth_factor": 2.0, "_growth_tracker": 4}, tmp_path / "scaler.pt")
    torch.save({"random_state": RunsCode()}, tmp_path / "random_states_0.pkl")
    source = open_foreign(tmp_path, ModelNames(names_of(net)))
    assert_same(source, states_of(net, optimizer))
    assert source.optimizer is not None
    assert source.optimizer.scaler["scale"] == 512.0
    assert source.extra["scheduler"]["step_size"] == 3
    assert source.step == 2
    assert "model_1.safetensors" in source.notes[0]
    assert "random_states_0.pkl" in source.file_notes[0]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model_1.safetensors").unlink()
    with pytest.raises(BadInput, match="holds no weights"):
        open_foreign(tmp_path)
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(open_foreign(tmp_path, ModelNames(names_of(net))), states_of(net, optimizer))
    assert RunsCode.ran == 0


def save_fsdp(folder: Path, full: bool) -> None:
    """What `save_fsdp_model` and `save_fsdp_optimizer` of Accelerate do for FSDP2."""
    net, optimizer = fsdp2(tied=True)
    train(net, optimizer)
    options = StateDictOptions(full_state_dict=full)
    model_state = get_model_state_dict(net, options=options)
    optimizer_state = get_optimizer_state_dict(net, optimizer, options=options)
    states = states_of(net, optimizer)
    if not full:
        (folder / "s/optimizer_1").mkdir(parents=True, exist_ok=True)  # a further model's
        dcp.save({"model": model_state}, checkpoint_id=folder / "s/pytorch_model_fsdp_0")
        dcp.save({"optimizer": optimizer_state}, checkpoint_id=folder / "s/optimizer_0")
    elif dist.get_rank() == 0:
        (folder / "s").mkdir()
        torch.save(model_state, folder / "s/pytorch_model_fsdp.bin")
        torch.save(optimizer_state, folder / "s/optimizer.bin")
    if dist.get_rank() == 0:
        torch.save(states, folder / "expected.pt")


@pytest.mark.processes
@pytest.mark.parametrize("full", [True, False])
def test_fsdp_under_accelerate(two_processes: Pool, tmp_path: Path, full: bool) -> None:
    two_processes.run(save_fsdp, tmp_path, full)
    expected = torch.load(tmp_path / "expected.pt")
    source = open_foreign(tmp_path / "s")
    assert_same(source, expected)
    assert source.aliases == {"head.weight": "embedding.weight"}
    assert source.optimizer is not None
    assert [group["weight_decay"] for group in source.optimizer.groups] == [1e-2, 0.0]
    assert source.step == 2
    assert ["optimizer_1" in note for note in source.all_notes] == [True][full:]


def test_deepspeed_under_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.checkpoint.importers import huggingface

    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    (tmp_path / "global_step2").mkdir()
    (tmp_path / "trainer_state.json").write_text(json.dumps(STATE))
    monkeypatch.setattr(huggingface, "is_deepspeed", lambda path: (path / "global_step2").is_dir())
    monkeypatch.setattr(huggingface, "DeepSpeedCheckpoint", lambda path: TorchFile(path / "w.pt"))
    source = open_foreign(tmp_path)
    assert_same(source, {("w", "weight"): torch.ones(2)})
    assert source.step == 2
    assert source.extra["trainer_state"]["epoch"] == 0.5


def outside(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"outside-{name}")
        (folder / name).symlink_to(folder.parent / f"outside-{name}")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: torch.save(RunsCode(), folder / "optimizer.bin"), "ran_code"),
        (lambda folder: torch.save([1], folder / "optimizer.bin"), "holds no optimizer's state dict but a list"),
        (lambda folder: torch.save({}, folder / "optimizer.bin"), "not that of a torch optimizer"),
        (lambda folder: torch.save(RunsCode(), folder / "scaler.pt"), "ran_code"),
        (lambda folder: torch.save(RunsCode(), folder / "pytorch_model_fsdp.bin"), "ran_code"),
        (lambda folder: torch.save([torch.ones(2)], folder / "pytorch_model_fsdp.bin"), "holds a list"),
        (lambda folder: (folder / "pytorch_model_fsdp_0").mkdir(), r"no file '\.metadata'"),
        (lambda folder: (folder / "pytorch_model_fsdp_0").symlink_to(folder.parent), "is not followed"),
        (lambda folder: (folder / "trainer_state.json").write_text("[" * 9000), "trainer_state.json"),
        (lambda folder: (folder / "trainer_state.json").write_text("[1]"), "trainer_state.json"),
        (outside("optimizer.bin"), "is not followed"),
        (outside("model.safetensors"), "is not followed"),
    ],
)
def test_what_is_damaged_or_a_trap_is_refused(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    net, optimizer = trained()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(net.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"last_epoch": 3}, folder / "scheduler.bin")
    assert_same(open_foreign(folder, ModelNames(names_of(net))), states_of(net, optimizer))
    change(folder)
    with pytest.raises(BadInput, match=message):
        open_foreign(folder, ModelNames(names_of(net)))
    assert RunsCode.ran == 0


def test_weights_that_are_there_twice_are_read_once_with_a_note(tmp_path: Path) -> None:
    model = language_model("gpt2")
    trainer_folder(tmp_path, model)
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    torch.save(other, tmp_path / "pytorch_model.bin")
    source = open_foreign(tmp_path, ModelNames(names_of(model)))
    assert "not read: pytorch_model.bin, as the weights are in .safetensors files" in source.all_notes
    assert any(source.values(name, "weight").read(0, 1).item() for name in source.tensors)


def test_a_scheduler_that_would_run_code_is_left_out(tmp_path: Path) -> None:
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text("{}")
    torch.save({"lr_lambdas": [RunsCode()]}, tmp_path / "scheduler.pt")
    source = open_foreign(tmp_path)
    assert source.extra == {"trainer_state": {}}
    assert "the scheduler's state is not taken over" in source.file_notes[0]
    assert "ran_code" in source.file_notes[0]
    assert RunsCode.ran == 0
