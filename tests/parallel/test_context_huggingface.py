"""Models of `transformers` that share sequences, against documents alone in the model as it is."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel import Context, check_config, share_sequences
from terrazzo.parallel.transformers_support import SHARED_SEQUENCES
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.helpers.threads import run_in_threads
from tests.train.test_documents_apart import OTHERS, SIZES, UNKNOWN_TO_NEOX

TOKENS = 16
PACKED = torch.stack([torch.cat((torch.arange(5), torch.arange(TOKENS - 5))), torch.arange(TOKENS)])
"""Two documents in the first sequence, one in the second."""
DROPS_NOTHING = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def model_of(model_type: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = SIZES if model_type != "gpt2" else {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {key: value for key, value in sizes.items() if model_type != "gpt_neox" or key not in UNKNOWN_TO_NEOX}
    sizes |= OTHERS.get(model_type, {}) | (DROPS_NOTHING if model_type == "gpt2" else {})
    config = transformers.AutoConfig.for_model(model_type, **sizes, **more)
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def check(model_type: str, mode: str, **more: Any) -> None:
    """Two documents in the first sequence, one in the second; two ranks."""
    model = model_of(model_type, **more)
    tokens = torch.randint(1, 64, (2, TOKENS))
    first = torch.cat((model(tokens[:1, :5]).logits, model(tokens[:1, 5:]).logits), dim=1)
    logits = torch.cat((first, model(tokens[1:]).logits))
    grad = torch.randn_like(logits)
    expected = torch.autograd.grad(logits, list(model.parameters()), grad, allow_unused=True)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[Tensor | None, ...]:
        own, context = copies[rank], Context(dist.group.WORLD, mode)
        share_sequences(own, context)
        mine, its_positions, its_grad, part = context.split(tokens, PACKED, grad, logits.detach())
        found = own(mine, position_ids=its_positions).logits
        assert (found - part).abs().max() < 2e-6 * logits.abs().max()
        return torch.autograd.grad(found, list(own.parameters()), its_grad, allow_unused=True)

    names = [name for name, _ in model.named_parameters()]
    for name, one, other, each in zip(names, *run_in_threads(2, on_rank), expected, strict=True):
        if each is not None:
            assert one is not None and other is not None
            assert (one + other - each).abs().max() < 5e-6 * each.abs().max().clamp_min(1e-2), name


@pytest.mark.parametrize(
    ("model_type", "mode"), [("llama", "gather"), ("gpt2", "ulysses"), ("llama", "ring"), ("gpt2", "gather")]
)
def test_parts_have_the_logits_and_gradients_of_the_whole(model_type: str, mode: str) -> None:
    check(model_type, mode)


def test_a_sliding_window_is_seen_across_parts() -> None:
    check("mistral", "gather", sliding_window=4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("guard", [contextlib.nullcontext, torch.inference_mode])
def test_under_ulysses_positions_are_gathered_once_in_a_forward(guard: Any) -> None:
    """Not in each layer, nor where one is recomputed; but anew in each forward, of which ranks compare the batch."""
    model = model_of("llama")

    def on_rank(rank: int) -> None:
        own, context = copy.deepcopy(model), Context(dist.group.WORLD, "ulysses")
        own.gradient_checkpointing_enable({"use_reentrant": False})
        share_sequences(own.train(), context)
        count = context.traffic.count
        with guard():
            tokens, positions = context.split(torch.ones(2, TOKENS, dtype=torch.int64), PACKED)
            own(tokens, position_ids=positions)
            for number in range(1, 3):
                told = count["control"]
                out = own(tokens, position_ids=positions).logits
                if torch.is_grad_enabled():
                    out.sum().backward()
                assert (count["all_gather"], count["control"]) == (1 + number, told + 1)

    run_in_threads(2, on_rank)


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted(SHARED_SEQUENCES))
def test_every_type_of_model_that_is_taken(model_type: str) -> None:
    check(model_type, "gather")


@pytest.mark.parametrize(
    ("values", "mode", "said"),
    [
        ({"model_type": "mamba2"}, "gather", r"model_type 'mamba2'.*llama.*cp 1"),
        ({"model_type": "gpt_oss"}, "gather", "model_type 'gpt_oss'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "ring", "sliding window of 4096.*'gather' or 'ulysses'"),
        (
            {"model_type": "qwen2", "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
            "ring",
            "sliding window of 4",
        ),
        ({"model_type": "llama", "attention_dropout": 0.1}, "gather", "attention_dropout 0.1.*to 0"),
        ({"model_type": "gpt2", "attn_pdrop": 0.1}, "gather", "attn_pdrop 0.1"),
        ({"model_type": "mixtral", "output_router_logits": True}, "gather", "routers' loss of a part.*to false"),
        ({"model_type": "gpt2", "reorder_and_upcast_attn": True}, "gather", "reorder_and_upcast_attn"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(values: dict[str, Any], mode: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_config(values, mode, 2)


def test_a_window_that_is_not_used_is_none() -> None:
    check_config({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False}, "ring", 2)
    check_config({"model_type": "qwen2", "sliding_window": 4, "layer_types": ["full_attention"]}, "ring", 2)


def test_what_would_be_wrong_of_a_part_is_refused() -> None:
    model = model_of("llama")
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)

    def on_rank(rank: int) -> list[str]:
        own = copy.deepcopy(model)
        share_sequences(own, context := Context(dist.group.WORLD, "ring"))
        mine, positions = context.split(tokens, context.chunks.places(0, TOKENS).repeat(2).unsqueeze(0))
        said = []
        for more in (
            {},
            {"position_ids": positions, "labels": mine},
            {"position_ids": positions, "attention_mask": torch.ones_like(mine)},
        ):
            with pytest.raises(Misuse) as caught:
                own(mine, **more)
            said.append(str(caught.value))
        with pytest.raises(Misuse) as caught:  # inside of the head's module
            own.base_model(mine, position_ids=positions, attention_mask=torch.ones_like(mine))
        return [*said, str(caught.value)]

    for without, labels, *masks in run_in_threads(2, on_rank):
        assert "position_ids" in without
        assert "shift targets first" in labels.lower()
        assert len(masks) == 2 and all("custom mask" in each for each in masks)


def test_models_with_sinks_or_soft_caps_are_refused_by_name() -> None:
    """However they got past the list of types."""
    from terrazzo.parallel.context.transformers_attention import _attention, register

    model = model_of("llama")

    def on_rank(rank: int) -> list[str]:
        own = copy.deepcopy(model)
        register(own, Context(dist.group.WORLD, "ring"), own)
        module = own.model.layers[0].self_attn
        query, said = torch.zeros(1, 2, 4, 8), []
        for more in ({"s_aux": torch.zeros(2)}, {"softcap": 50.0}, {"dropout": 0.1}, {"is_causal": False}):
            with pytest.raises(Misuse) as caught:
                _attention(module, query, query, query, None, position_ids=torch.zeros(1, 4), **more)  # type: ignore[arg-type]
            said.append(str(caught.value))
        return said

    for said in run_in_threads(2, on_rank):
        words = ("attention sinks", "soft cap", "dropout", "not causal")
        assert all(word in each for word, each in zip(words, said, strict=True))


@pytest.mark.parametrize("huggingface", [False, True], ids=["decoder", "transformers"])
def test_heads_go_to_tp_first(huggingface: bool) -> None:
    """Six divide by cp 2 and by tp 2, and not by both."""
    transformers = pytest.importorskip("transformers")

    def on_rank(rank: int) -> None:
        with torch.device("meta"):
            if huggingface:
                sizes = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
                config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
                model = transformers.LlamaForCausalLM(config)
            else:
                model = Decoder(DecoderConfig(31, 24, 1, heads=6, kv_heads=2, ffn_dim=32, max_sequence_length=8))
        with pytest.raises(BadInput, match=r"4 ranks \(cp 2 x tp 2\).*6 heads do not divide by 4.*'gather'"):
            tz.parallelize(model, tz.mesh(tp=2, cp=2, device="cpu"), context="ulysses")
        tz.parallelize(model, tz.mesh(tp=2, cp=2, device="cpu"), context="gather")

    run_in_threads(4, on_rank)
