"""Hugging Face models as they are: units found by themselves, and DDP's losses under zero3 on two processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine.toys import adamw, full_parameters
from tests.helpers.cover import mostly_long
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, **HEADS}, 2),
    "Qwen3ForCausalLM": ("Qwen3Config", {**SMALL, **HEADS, "head_dim": 8, "tie_word_embeddings": True}, 2),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        2,
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {**SMALL, **HEADS, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        2,
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    config, settings, _ = MODELS[name]
    torch.manual_seed(3)
    return getattr(transformers, name)(getattr(transformers, config)(**settings))


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))


def five_steps(model: Any, optimizer: Any, rank: int) -> list[float]:
    losses = []
    for step in range(5):
        batch = tokens(step, rank)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train_both(name: str, plan: str, checkpointing: bool) -> tuple[list[float], list[float], float]:
    rank, base = dist.get_rank(), build(name)
    alone = copy.deepcopy(base)
    reference = DistributedDataParallel(alone, find_unused_parameters="Moe" in name)
    wanted = five_steps(reference, adamw(reference.parameters()), rank)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model, optimizer = tz.shard(base, adamw(base.parameters()), plan)
    found = five_steps(model, optimizer, rank)
    ours = full_parameters(model)
    return found, wanted, max((ours[n] - p).abs().max().item() for n, p in alone.named_parameters())


@pytest.mark.processes
@pytest.mark.parametrize("name", mostly_long(MODELS, *list(MODELS)[:2]))
def test_losses_equal_ddps(two_processes: Pool, name: str) -> None:
    for found, wanted, apart in two_processes.run(_train_both, name, "zero3", False, timeout_s=120.0):
        assert found == pytest.approx(wanted, abs=1e-6)
        assert found[0] != found[-1]
        assert apart < 1e-5


@pytest.mark.processes
def test_gradient_checkpointing_of_the_models_own(two_processes: Pool) -> None:
    for found, wanted, _ in two_processes.run(_train_both, "LlamaForCausalLM", "zero3", True, timeout_s=120.0):
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_units_are_found_by_themselves(name: str) -> None:
    layers = MODELS[name][2]
    with fake_group(2):
        model, _ = tz.shard(build(name), None, "zero3")
        engine = engine_of(model)
    names = [unit.name for unit in engine.units]
    prefix = "transformer.h" if "GPT2" in name else "model.layers"
    assert [n for n in names if n.startswith(prefix)] == [f"{prefix}.{layer}" for layer in range(layers)]
    assert "the model's own list of blocks" in engine.describe()


@pytest.mark.parametrize("name", MODELS)
def test_meta_device_models_get_values_and_train(name: str) -> None:
    with torch.device("meta"):
        base = build(name)
    with fake_group(1):
        model, optimizer = tz.shard(base, adamw, "zero3")
        losses = five_steps(model, optimizer, 0)
        parameters = full_parameters(model)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[0] == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), abs=0.5)
    assert all(bool(torch.isfinite(value).all()) for value in parameters.values())


def test_generation_reads_sharded_weights() -> None:
    base = build("LlamaForCausalLM").eval()
    prompt = tokens(0, 0)[:1]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = base.generate(prompt, **options)  # type: ignore[operator]
    with fake_group(1):
        model, _ = tz.shard(base, None, "zero3")
        assert torch.equal(model.generate(prompt, **options), wanted)


def _t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=400, **sizes))


def _gpt2_below() -> nn.Module:
    sizes = {"vocab_size": 400, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return nn.Sequential(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), nn.Linear(400, 8))


@pytest.mark.parametrize("make", [_t5, _gpt2_below])
def test_a_model_on_the_meta_device_is_drawn_as_wide_as_its_constructor_draws_it(make: Any) -> None:
    """T5's attention and GPT-2's residual layers are set from their parents; a model below another one asks its own."""
    torch.manual_seed(0)
    wanted = make()
    with torch.device("meta"):
        model = make()
    with fake_group(1):
        found = full_parameters(tz.shard(model, None, "zero3")[0])
    for name, value in wanted.named_parameters():
        if value.numel() > 100 and value.std():
            assert found[name].std().item() == pytest.approx(value.std().item(), rel=0.25), name
        else:
            torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=0.5 if "1.bias" in name else 0)
