"""The decoder against a plain computation with complex numbers and explicit loops over heads."""

from __future__ import annotations

import builtins
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import terrazzo as tz
from terrazzo.engine import compile_units
from terrazzo.errors import BadInput
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.causal_lm import build_model, generate, logits_of, num_flops_per_token
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.huggingface import weight_files
from tests.helpers.fake import fake_group

SMALL = {
    "vocab_size": 61,
    "dim": 48,
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "ffn_dim": 80,
    "max_sequence_length": 32,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**SMALL, **changes})


def tokens_of(shape: tuple[int, int], vocab_size: int = 61) -> Tensor:
    return torch.randint(vocab_size, shape)


Sees = tuple[Callable[[int], bool], ...]
"""Whether a token sees one that is so far behind it, in one layer after the other."""


def plain_logits(model: Decoder, tokens: Tensor, sees: Sees = (lambda distance: True,), prompt: int = 0) -> Tensor:
    """What the architecture means, in fp64: one sequence, one head, one query at a time.

    The first `prompt` tokens see each other in both directions.
    """
    shape = model.config
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    out = [plain_sequence(weights, shape, sequence, sees, prompt) for sequence in tokens]
    return torch.stack(out)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotate(head: Tensor, theta: float) -> Tensor:
    """`[T, head_dim]`: channels i and i + half form one complex number, turned by its angle."""
    half = head.shape[1] // 2
    numbers = torch.complex(head[:, :half], head[:, half:])
    for position in range(head.shape[0]):
        for pair in range(half):
            angle = torch.tensor(position / theta ** (pair / half), dtype=torch.float64)
            numbers[position, pair] *= torch.complex(angle.cos(), angle.sin())
    return torch.cat((numbers.real, numbers.imag), dim=1)


def plain_sequence(
    weights: dict[str, Tensor],
    shape: DecoderConfig,
    tokens: Tensor,
    sees: Sees = (lambda distance: True,),
    prompt: int = 0,
) -> Tensor:
    x = weights["embedding.weight"][tokens]
    for layer in range(shape.layers):
        of = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        normed = plain_norm(x, of["attention_norm.weight"], shape.norm_eps)
        mixed = plain_attention(of, shape, normed, sees[layer % len(sees)], prompt)
        x = x + mixed @ of["attention.output.weight"].T
        normed = plain_norm(x, of["feed_forward_norm.weight"], shape.norm_eps)
        gate = normed @ of["feed_forward.gate.weight"].T
        hidden = gate * torch.sigmoid(gate) * (normed @ of["feed_forward.up.weight"].T)
        x = x + hidden @ of["feed_forward.down.weight"].T
    x = plain_norm(x, weights["norm.weight"], shape.norm_eps)
    return x @ weights["embedding.weight" if shape.tie_embeddings else "head.weight"].T


def plain_attention(
    of: dict[str, Tensor],
    shape: DecoderConfig,
    x: Tensor,
    sees: Callable[[int], bool] = lambda distance: True,
    prompt: int = 0,
) -> Tensor:
    size, group = shape.dim // shape.heads, shape.heads // shape.kv_heads
    heads = []
    for head in range(shape.heads):
        mine, shared = slice(head * size, (head + 1) * size), head // group
        its = slice(shared * size, (shared + 1) * size)
        query = plain_rotate(x @ of["attention.query.weight"][mine].T, shape.rope_theta)
        key = plain_rotate(x @ of["attention.key.weight"][its].T, shape.rope_theta)
        value = x @ of["attention.value.weight"][its].T
        seen = [[s for s in range(max(t + 1, prompt)) if sees(t - s)] for t in range(len(x))]
        rows = [torch.softmax(key[its] @ query[t] / size**0.5, dim=0) @ value[its] for t, its in enumerate(seen)]
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1)


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_logits_equal_the_plain_computation(tie_embeddings: bool, kv_heads: int) -> None:
    model = Decoder(config(tie_embeddings=tie_embeddings, kv_heads=kv_heads, rope_theta=500.0))
    for parameter in model.parameters():  # norms away from 1, scores away from 0, so that a mistake shows
        nn.init.normal_(parameter, std=0.3)
    tokens = tokens_of((2, 11))
    expected = plain_logits(model, tokens)
    torch.testing.assert_close(model(tokens).double(), expected, atol=2e-4, rtol=2e-4)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.double()(tokens), expected, atol=1e-5, rtol=1e-5)  # but for the fp32 tables


@pytest.mark.parametrize(
    ("pattern", "sees"),
    [
        (AttentionPattern(3), (lambda distance: distance < 3,)),
        (AttentionPattern(3, full_every=2), (lambda distance: distance < 3, lambda distance: True)),
        (AttentionPattern(2, stride=4), (lambda distance: distance < 2 or distance % 4 == 0,)),
    ],
    ids=["window", "full_every", "stride"],
)
def test_windows_of_layers_equal_the_plain_computation(pattern: AttentionPattern, sees: Sees) -> None:
    model = Decoder(config(attention=pattern))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = tokens_of((2, 13))
    expected = plain_logits(model, tokens, sees)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)
    documents = torch.cat((tokens, tokens), dim=1)
    positions = torch.arange(13).repeat(2).expand(2, -1)
    torch.testing.assert_close(model(documents, positions).double(), expected.repeat(1, 2, 1), rtol=1e-4, atol=1e-4)


def test_a_window_counts_in_flops_by_what_a_token_sees() -> None:
    shape = config(layers=4)
    windowed = Decoder(replace(shape, attention=AttentionPattern(4, stride=4, full_every=2)))
    attended = 2 * 16 + 2 * (4 + 3)
    assert num_flops_per_token(windowed, 16) == 6 * shape.matmul_numel + 12 * shape.dim * attended


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore::DeprecationWarning")
def test_compiled_blocks_see_the_same_and_are_compiled_once_for_all_documents() -> None:
    shape = config(layers=2, attention=AttentionPattern(5, stride=3, full_every=2), max_sequence_length=32)
    model = Decoder(shape)
    compiled = copy.deepcopy(model)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_units(compiled, units=[Block], backend=backend)
    for first in (3, 7, 8, 14):
        tokens, positions = tokens_of((2, 32)), torch.cat((torch.arange(first), torch.arange(32 - first))).expand(2, -1)
        pairs = [(each(tokens, positions), list(each.parameters())) for each in (model, compiled)]
        one, other = ([logits, *torch.autograd.grad(logits.square().sum(), of)] for logits, of in pairs)
        torch.testing.assert_close(other, one)
    assert len(graphs) == 2  # of each kind of layer


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = Decoder(config())
    tokens = tokens_of((1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_attention_depends_on_relative_positions_only() -> None:
    block = Block(config())
    x = torch.randn(1, 8, 48)
    cos, sin = Decoder(config(max_sequence_length=64)).rotary(64)
    torch.testing.assert_close(block(x, cos[:8], sin[:8]), block(x, cos[40:48], sin[40:48]), atol=1e-5, rtol=1e-5)


def test_initial_values() -> None:
    model = Decoder(config(dim=128, ffn_dim=512, heads=8, layers=8, vocab_size=512, tie_embeddings=False))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        scaled = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        assert parameter.std().item() == pytest.approx(0.02 / 4 if scaled else 0.02, rel=0.05), name
        assert abs(parameter.mean().item()) < 1e-3
    assert F.cross_entropy(model(tokens_of((4, 32)))[:, :-1].flatten(0, 1), tokens_of((4, 31)).flatten()) < 7.0


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_module_by_module_from_meta_gives_the_values_of_ordinary_construction(tie_embeddings: bool) -> None:
    torch.manual_seed(5)
    ordinary = build_model(config(tie_embeddings=tie_embeddings))
    model = build_model(config(tie_embeddings=tie_embeddings), device="meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    torch.manual_seed(5)
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()
    pairs = zip(
        [*ordinary.named_parameters(), *ordinary.named_buffers()],
        [*model.named_parameters(), *model.named_buffers()],
        strict=True,
    )
    for (name, expected), (found_name, found) in pairs:
        assert name == found_name
        assert torch.equal(expected, found), name


def test_tied_embeddings_are_one_parameter_with_both_gradients() -> None:
    model = Decoder(config())
    assert [name for name, _ in model.named_parameters() if "head" in name] == []
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient[1:].abs().sum() > 0  # tokens that were never looked up: from the head
    untied = sum(p.numel() for p in Decoder(config(tie_embeddings=False)).parameters())
    assert untied == sum(p.numel() for p in model.parameters()) + 61 * 48


def test_rotary_tables_are_not_saved() -> None:
    assert not any("rotary" in name for name in Decoder(config()).state_dict())


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_flops_are_three_times_what_torch_counts_forward(tie_embeddings: bool) -> None:
    model = Decoder(config(tie_embeddings=tie_embeddings))
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model.to("meta")(torch.zeros(2, 16, dtype=torch.int64))
    assert num_flops_per_token(model, 16) * 2 * 16 == 3 * counter.get_total_flops()


def test_dropout_acts_in_training_only() -> None:
    model = Decoder(config(dropout=0.5))
    tokens = tokens_of((1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 0}, "model.layers"),
        ({"dim": 50}, "model.dim 50"),
        ({"dim": 18, "heads": 6}, "even whole number"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_shapes(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        config(**changes)


def test_too_long_a_sequence() -> None:
    with pytest.raises(BadInput, match=r"33 tokens, but batch\.sequence_length"):
        Decoder(config())(tokens_of((1, 33)))


class Counting(nn.Module):
    """Predicts the token after the last one, surely; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.longest = 0, 0
        self.config = config(vocab_size=10, max_sequence_length=5)

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        self.calls, self.longest = self.calls + 1, max(self.longest, tokens.shape[1])
        return F.one_hot((tokens + 1) % 10, 10).float() * 50


def test_generate_continues_and_restores_the_mode() -> None:
    model = Counting()
    model.train()
    text = generate(model, torch.tensor([[3], [7]]), 8, temperature=0.0)
    assert text.tolist() == [[3, 4, 5, 6, 7, 8, 9, 0, 1], [7, 8, 9, 0, 1, 2, 3, 4, 5]]
    assert (model.calls, model.longest, model.training) == (8, 5, True)


def test_generate_draws_the_same_from_the_same_generator_and_follows_the_distribution() -> None:
    model = Decoder(config())
    start = tokens_of((2, 4))
    texts = [generate(model, start, 12, 1.0, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    many = generate(model, start[:1].expand(4000, 4), 1, 0.7, torch.Generator().manual_seed(1))[:, -1]
    expected = F.softmax(model(start[:1])[0, -1] / 0.7, dim=-1)
    found = torch.bincount(many, minlength=61) / 4000
    assert (found - expected).abs().max() < 0.015


def test_logits_of_every_kind_of_output() -> None:
    logits = torch.zeros(1, 2, 3)
    holder = type("Output", (), {"logits": logits})()
    assert all(logits_of(output) is logits for output in (logits, (logits, None), holder))


def test_huggingface_model_from_a_config_and_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    model: Any = build_model(LLAMA)
    tokens = tokens_of((2, 8))
    output = model(tokens)
    assert logits_of(output).shape == (2, 8, 61)
    assert output.past_key_values is None
    model.save_pretrained(tmp_path)
    random = build_model(tmp_path)  # its config.json alone
    assert logits_of(random(tokens)).shape == (2, 8, 61)
    assert not torch.equal(logits_of(random(tokens)), logits_of(model(tokens)))
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]


def test_huggingface_model_from_meta_is_initialised() -> None:
    pytest.importorskip("transformers")
    model = build_model(LLAMA, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    with fake_group(1):
        tz.shard(model, None, "zero0")
    expected: Any = build_model(LLAMA)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected.get_buffer(name)), name
    for name, parameter in model.named_parameters():
        assert parameter.std().item() == pytest.approx(expected.get_parameter(name).std().item(), rel=0.1), name


def test_huggingface_flops_are_those_of_the_same_decoder_and_its_norms() -> None:
    pytest.importorskip("transformers")
    model = build_model(LLAMA, device="meta")
    same = DecoderConfig(61, 32, 2, 4, 2, 64, 64, tie_embeddings=False)
    norms_numel = (2 * 2 + 1) * 32
    assert num_flops_per_token(model, 16) == Decoder(same).num_flops_per_token(16) + 6 * norms_numel
    assert num_flops_per_token(nn.Linear(2, 2), 16) == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "lama"}, "Did you mean 'llama'"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
    ],
)
def test_huggingface_configs_that_cannot_be_used(changes: dict[str, Any], named: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=named):
        build_model({**LLAMA, **changes})


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        build_model(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        build_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(BadInput, match=r"no \*\.safetensors"):
        weight_files(tmp_path)


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "transformers")
    with pytest.raises(BadInput, match=r"pip install -e '\.\[hf\]'"):
        build_model(LLAMA)


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes `import package` fail as if it were not installed."""
    real = builtins.__import__

    def importing(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", importing)
