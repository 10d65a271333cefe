"""Activations against what autograd really keeps: saved tensors of real blocks on CPU, counted by storage."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terrazzo.engine import Plan, Precision
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.memory.activations import block_activations
from terrazzo.planner.memory.logits import head_activations
from terrazzo.planner.model.closed_form import shape_of_config
from terrazzo.planner.model.shapes import BlockShape, ModelShape
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.setup import Setup
from terrazzo.train.model.decoder import Block, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from terrazzo.train.model.rotary import RotaryTable
from tests.planner.subjects import gpt, llama

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, FFN = 2, 256, 128, 4, 2, 448
TOKENS = BATCH * LENGTH
CPU, CUDA = Device("host", kind="cpu"), Device("gpu")


def saved_bytes(run: Callable[[Tensor], Tensor], module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the storages that autograd keeps for the backward of `run`, parameters apart."""
    storages: dict[int, tuple[int, Tensor]] = {}
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage.nbytes(), tensor
        return tensor

    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    return sum(size for size, _ in storages.values())


def promised(block: BlockShape, dtype: torch.dtype, device: Device = CPU, **options: Any) -> float:
    model = llama(1, WIDTH, FFN, HEADS, KV_HEADS, 1000)
    precision = Precision(weight=dtype, compute=dtype)
    setup = Setup(model, Cluster(device), Plan.named("zero0"), sequence=LENGTH, micro_batch=BATCH, precision=precision)
    return block_activations(replace(setup, **options), block).saved


LLAMA_BLOCK = BlockShape(WIDTH, HEADS, KV_HEADS, WIDTH // HEADS, FFN)
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dropout", "experts"), [(0.0, None), (0.1, None), (0.0, MixtureConfig(8, 4, 32, 1))], ids=str)
def test_the_decoder_saves_what_is_promised(dropout: float, experts: MixtureConfig | None, dtype: torch.dtype) -> None:
    config = DecoderConfig(1000, WIDTH, 1, HEADS, KV_HEADS, FFN, LENGTH, dropout=dropout, experts=experts)
    module, (cos, sin) = Block(config).to(dtype), RotaryTable(LENGTH, config.head_dim, config.rope_theta)(LENGTH)
    routed = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1}
    values = {name: each for name, each in asdict(config).items() if name not in ("experts", "positions")}
    (unit,) = shape_of_config({"model_type": "terrazzo", **values, **(routed if experts else {})}, "decoder").repeated
    assert unit.block is not None
    measured = saved_bytes(lambda x: module(x, cos, sin), module, dtype)
    assert promised(unit.block, dtype) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_hugging_face_blocks_save_what_is_promised(family: str, implementation: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    modeling = getattr(transformers.models, family.lower())
    modeling = getattr(modeling, f"modeling_{family.lower()}")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=1,
        attn_implementation=implementation,
    )
    module = getattr(modeling, f"{family}DecoderLayer")(config, 0).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    positions = torch.arange(LENGTH)[None]
    rotary = getattr(modeling, f"{family}RotaryEmbedding")(config)

    def run(x: Tensor) -> Tensor:
        embedded = rotary(x, positions)
        output = module(x, attention_mask=None, position_ids=positions, position_embeddings=embedded)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    block = LLAMA_BLOCK if family == "Llama" else replace(LLAMA_BLOCK, experts=8, active_experts=2)
    block, attention = replace(block, eager=implementation == "eager"), "math" if implementation == "eager" else "flash"
    measured = saved_bytes(run, module, dtype)
    assert promised(block, dtype, attention=attention) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "layer", "options"),
    [
        ("phi3", "Phi3DecoderLayer", {"num_key_value_heads": KV_HEADS, "pad_token_id": 0}),  # one matrix for q, k and v
        ("stablelm", "StableLmDecoderLayer", {"num_key_value_heads": KV_HEADS}),  # a quarter of each head turned
        ("phi", "PhiDecoderLayer", {"hidden_act": "gelu", "resid_pdrop": 0.0}),  # half, attention beside the MLP
        ("gpt_neox", "GPTNeoXLayer", {}),  # all three
        ("gpt_neox", "GPTNeoXLayer", {"use_parallel_residual": False}),
        ("starcoder2", "Starcoder2DecoderLayer", {"num_key_value_heads": KV_HEADS}),  # none
    ],
    ids=str,
)
def test_blocks_keep_of_rotations_and_shared_inputs_what_is_promised(
    family: str, layer: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": FFN}
    values = {**sizes, "vocab_size": 1000, **options}
    config = transformers.AutoConfig.for_model(family, attn_implementation="sdpa", **values)
    module = getattr(modeling, layer)(config, 0).to(dtype)
    rotary = next(value for name, value in vars(modeling).items() if name.endswith("RotaryEmbedding"))(config)
    positions = torch.arange(LENGTH)[None]

    def run(x: Tensor) -> Tensor:
        output = module(x, attention_mask=None, position_ids=positions, position_embeddings=rotary(x, positions))
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    (unit,) = shape_of_config({"model_type": family, **values}, family).repeated
    assert unit.block is not None
    assert promised(unit.block, dtype) == pytest.approx(saved_bytes(run, module, dtype), rel=0.06)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gemma2_block_keeps_its_capped_scores(dtype: torch.dtype) -> None:
    """Eagerly: all of them, also outside of its window."""
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    from transformers.models.gemma2 import modeling_gemma2 as modeling

    config = transformers.Gemma2Config(
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        num_hidden_layers=2,
        sliding_window=64,
        attn_implementation="eager",
    )
    module, rotary = modeling.Gemma2DecoderLayer(config, 0).to(dtype), modeling.Gemma2RotaryEmbedding(config)
    positions = torch.arange(LENGTH)[None]

    def run(x: Tensor) -> Tensor:
        output = module(x, position_embeddings=rotary(x, positions), attention_mask=None, position_ids=positions)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    block = replace(LLAMA_BLOCK, norms=4, window=64, soft_cap=True, wide_norm=True)
    measured = saved_bytes(run, module, dtype)
    assert promised(block, dtype, attention="math") == pytest.approx(measured, rel=0.06)


class GPTBlock(nn.Module):
    """Layer norms, biases, GELU: what arXiv 2205.05198 counts, with torch's own operators."""

    def __init__(self, nonlinearity: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (part(y).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in self.inputs())
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(self.nonlinearity(self.up(self.mlp_norm(x))))
        return out

    def inputs(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpt_block_saves_what_the_paper_counts(dtype: torch.dtype) -> None:
    """34 s b h in 16 bits, less the 2 s b h of dropout masks."""
    module = GPTBlock().to(dtype)
    block = BlockShape(WIDTH, HEADS, HEADS, WIDTH // HEADS, 4 * WIDTH, gated=False, norm="layer")
    measured = saved_bytes(module, module, dtype)
    assert promised(block, dtype) == 16 * TOKENS * WIDTH * dtype.itemsize
    assert promised(block, dtype) == pytest.approx(measured, rel=0.02)


def plain_gelu(x: Tensor) -> Tensor:
    """Hendrycks and Gimpel's approximation, operator by operator, as GPT-2 has it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def test_a_gelu_in_plain_operators_saves_three_tensors_more() -> None:
    module = GPTBlock(plain_gelu)
    block = BlockShape(
        WIDTH, HEADS, HEADS, WIDTH // HEADS, 4 * WIDTH, gated=False, norm="layer", nonlinearity="plain_gelu"
    )
    assert promised(block, torch.float32) == pytest.approx(saved_bytes(module, module, torch.float32), rel=0.02)
    assert promised(block, torch.float32, compile=True) == promised(
        replace(block, nonlinearity="kernel"), torch.float32
    )


def test_megatron_core_keeps_what_its_fused_kernels_do() -> None:
    """Of bf16, per token: inputs of norms and matrices 4 h, queries, keys, values and output, and gate, up and product;
    no copy in fp32, and no silu(gate).
    """
    elements = 4 * WIDTH + 2 * (HEADS + KV_HEADS) * (WIDTH // HEADS) + 3 * FFN
    assert promised(LLAMA_BLOCK, torch.bfloat16, CUDA, framework=Framework("megatron")) == 2 * TOKENS * elements
    gpt2 = BlockShape(
        WIDTH, HEADS, HEADS, WIDTH // HEADS, 4 * WIDTH, gated=False, norm="layer", nonlinearity="plain_gelu"
    )
    assert promised(gpt2, torch.bfloat16, CUDA, framework=Framework("megatron")) == 2 * TOKENS * 16 * WIDTH


def test_full_checkpointing_keeps_inputs() -> None:
    config = DecoderConfig(1000, WIDTH, 1, HEADS, KV_HEADS, FFN, LENGTH)
    module, (cos, sin) = Block(config), RotaryTable(LENGTH, config.head_dim, config.rope_theta)(LENGTH)

    def run(x: Tensor) -> Tensor:
        output: Tensor = checkpoint(module, x, cos, sin, use_reentrant=False)
        return output

    tables = cos.untyped_storage().nbytes() + sin.untyped_storage().nbytes()  # one for all blocks
    measured = saved_bytes(run, module, torch.float32) - tables
    assert promised(LLAMA_BLOCK, torch.float32, checkpointing="full") == measured


def test_published_copies_of_llama_8b() -> None:
    """Bytes per token, layer and channel: 52 eager, 39 compiled (pytorch/ao); 29.4 for the 3.2 3B (pytorch/torchtune).

    Those of 8B come from code that repeats keys and values for all query heads: between expected and upper.
    """
    eight, three = llama(32, 4096, 14336, 32, 8, 128_256), llama(28, 3072, 8192, 24, 8, 128_256)

    def per_channel(model: ModelShape, compiled: bool) -> tuple[float, float]:
        setup = Setup(
            model,
            Cluster(CUDA),
            Plan.named("zero3"),
            sequence=1024,
            precision=Precision.named("bf16"),
            compile=compiled,
        )
        block = model.repeated[0].block
        assert block is not None
        found = block_activations(setup, block)
        return found.saved / 1024 / model.hidden, found.saved_upper / 1024 / model.hidden

    expected, upper = per_channel(eight, compiled=False)
    assert expected == pytest.approx(52, rel=0.06)
    assert upper == 52
    expected, upper = per_channel(eight, compiled=True)
    assert expected == pytest.approx(39, rel=0.13)
    assert upper == pytest.approx(39, rel=0.06)
    assert per_channel(three, compiled=True)[0] == pytest.approx(29.4, rel=0.01)


def test_tensor_and_context_parallelism_divide() -> None:
    """Table 2 of arXiv 2205.05198: s b h (10 + 24 / t) with tensor, and 34 / t with sequence parallelism too."""
    model = gpt(1, 512, 8, 1000)
    block = model.repeated[0].block
    assert block is not None
    sbh = 1024 * 512
    setup = Setup(model, Cluster(CUDA), Plan.named("zero0"), sequence=1024, precision=Precision.named("bf16"))
    for tp in (1, 2, 4, 8):
        mesh = replace(setup.mesh, tp=tp)
        alone = block_activations(replace(setup, mesh=mesh, sequence_parallel=False), block).saved
        assert alone == sbh * (10 + 24 / tp)
        assert block_activations(replace(setup, mesh=mesh), block).saved == sbh * 34 / tp
    half = block_activations(replace(setup, mesh=replace(setup.mesh, cp=2)), block).saved
    assert half == sbh * 34 / 2


def test_the_loss_makes_what_is_promised() -> None:
    """Storages held at once in the loss and its backward, followed operator by operator."""
    from tests.engine.census import PeakBytes, census, live_bytes

    vocab = 4096
    with census():
        hidden = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        head = nn.Linear(WIDTH, vocab, bias=False, dtype=torch.bfloat16)
        targets = torch.randint(vocab, (TOKENS,))
        before = live_bytes()
        with PeakBytes() as peak:
            _loss(head, hidden, targets).backward()
    model = llama(1, WIDTH, FFN, HEADS, KV_HEADS, vocab)
    setup = Setup(model, Cluster(CPU), Plan.named("zero0"), sequence=TOKENS, precision=Precision.named("bf16"))
    assert head_activations(setup).loss == pytest.approx(peak.peak_bytes - before, rel=0.05)


def _loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets)
