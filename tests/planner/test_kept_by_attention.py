"""Attention that keeps its scores without a word, and masks: what plain torch and transformers save on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.engine import Plan, Precision
from terrazzo.planner import Request, ask, build_setup, model_shape
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.memory.activations import block_activations
from terrazzo.planner.model.closed_form import shape_of_config
from terrazzo.planner.model.shapes import BlockShape
from terrazzo.planner.setup.kernels import attention_of, unfused_by_itself
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.attention import attention_bytes, attention_seconds

CPU = Device("host", kind="cpu", peak_flops={"fp32": 1e11, "bf16": 1e11}, memory_bandwidth=1e10)
LENGTH, WIDTH, HEADS, INNER = 256, 128, 4, 512
DTYPES = [torch.float32, torch.bfloat16]

USUAL = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS,
    "intermediate_size": INNER, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OF_GPT2 = {"n_embd": WIDTH, "n_head": HEADS, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
OLD = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
OF_XGLM = {"d_model": WIDTH, "attention_heads": HEADS, "ffn_dim": INNER, "vocab_size": 512}
MLA = {
    "num_key_value_heads": HEADS, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 0, "topk_group": 1,
}  # fmt: skip
ROUTED = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropped scores of one matrix": ("gpt2", OF_GPT2),
    "nothing dropped": ("gpt2", OF_GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0}),
    "dropped scores, few keys": ("llama", USUAL | {"attention_dropout": 0.1}),
    "dropped scores, rotated in part": ("phi", OLD | {"intermediate_size": INNER, "attention_dropout": 0.1}),
    "ALiBi": ("bloom", {"hidden_size": WIDTH, "n_head": HEADS, "vocab_size": 512}),
    "ALiBi, dropped": ("bloom", {"hidden_size": WIDTH, "n_head": HEADS, "vocab_size": 512, "attention_dropout": 0.1}),
    "fp32 scores": ("gptj", OF_GPT2 | {"rotary_dim": 16}),
    "soft cap, dropped": ("gemma2", USUAL | {"attention_dropout": 0.1}),
    "sinks": ("gpt_oss", USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "narrow values": ("deepseek_v3", USUAL | MLA),
    "one key head": ("falcon", OLD),
    "a mask where there is no window": ("falcon", OLD | {"multi_query": False}),
    "a mask where there is no window, nothing dropped": (
        "falcon",
        OLD | {"multi_query": False, "attention_dropout": 0.1},
    ),
    "one key head, ALiBi, dropped": ("falcon", OLD | {"alibi": True, "attention_dropout": 0.1}),
    "clamped scores": ("xglm", OF_XGLM | {"attention_dropout": 0.0}),
    "clamped scores, dropped": ("xglm", OF_XGLM),
    "a window": ("mistral", USUAL | {"sliding_window": 64}),
    "a window in some layers": ("olmo3", USUAL | {"sliding_window": 64}),
    "a window as long as the sequence": ("mistral", USUAL | {"sliding_window": LENGTH}),
    "ReLU": ("opt", OLD | {"ffn_dim": INNER, "word_embed_proj_dim": WIDTH, "dropout": 0.0}),
    "layer norms in fp32": ("olmo", USUAL),
    "latent attention in a fused kernel": ("deepseek_v3", USUAL | MLA | {"v_head_dim": 48}),
    "experts": ("qwen3_moe", USUAL | ROUTED),
    "experts that all tokens meet, weighted": ("qwen2_moe", USUAL | ROUTED | {"shared_expert_intermediate_size": 96}),
    "norms of queries and keys": ("qwen3", USUAL),
    "norms of queries and of one key head": ("qwen3", USUAL | {"num_key_value_heads": 1}),
    "norms of wide heads": ("qwen3", USUAL | {"head_dim": 64}),
    "norms of all heads together": ("olmo2", USUAL),
}
ROUGH = {"fp32 scores"}
BERT_DROPS = ("attention_probs_dropout_prob", "hidden_dropout_prob")

LAYERS = {"xglm": "num_layers", "gpt2": "n_layer", "gptj": "n_layer", "bloom": "n_layer"}


def kept_bytes(run: Callable[[], object], beside: set[int]) -> int:
    """Bytes of the storages that autograd keeps, without those of `beside`."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in beside:
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in kept.values())


def of_transformers(family: str, values: dict[str, Any], dtype: torch.dtype) -> int:
    """What the body of a model keeps, in training."""
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    config = transformers.AutoConfig.for_model(family, use_cache=False, **values)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    held = [*model.parameters(), *model.buffers()]
    tokens = torch.randint(3, 512, (1, LENGTH))
    return kept_bytes(lambda: model.base_model(tokens), {each.untyped_storage()._cdata for each in held})


def promised(family: str, values: dict[str, Any], dtype: torch.dtype) -> float:
    shape = model_shape({"model_type": family, **values})
    setup = Setup(
        shape,
        Cluster(CPU),
        Plan.named("zero0"),
        sequence=LENGTH,
        precision=Precision(weight=dtype, compute=dtype),
        attention=attention_of(None, shape, CPU, as_megatron=False),
    )
    return sum(unit.count * block_activations(setup, unit.block).saved for unit in shape.repeated if unit.block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_layers_keep_what_is_promised(model: str, dtype: torch.dtype) -> None:
    family, values = MODELS[model]
    few, more = ({**values, LAYERS.get(family, "num_hidden_layers"): layers} for layers in (4, 8))
    measured = of_transformers(family, more, dtype) - of_transformers(family, few, dtype)
    expected = promised(family, more, dtype) - promised(family, few, dtype)
    assert expected == pytest.approx(measured, rel=0.06 if model in ROUGH else 0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropped", [pytest.param(0.0, marks=pytest.mark.long), 0.1])
@pytest.mark.parametrize(("family", "drops"), [("cohere", ("attention_dropout",)), ("bert", BERT_DROPS)])
def test_layers_of_a_model_that_is_there_do_too(
    family: str, drops: tuple[str, ...], dropped: float, dtype: torch.dtype
) -> None:
    """Cohere has no row in the table, and layer norms in plain operators; BERT is read by other keys.

    Each number of layers is built in a process of its own, which imports transformers: ten seconds.
    """
    values = USUAL | {"is_decoder": True, "num_key_value_heads": HEADS} | dict.fromkeys(drops, dropped)
    few, more = ({**values, "num_hidden_layers": layers} for layers in (4, 8))
    measured = of_transformers(family, more, dtype) - of_transformers(family, few, dtype)
    expected = promised(family, more, dtype) - promised(family, few, dtype)
    assert expected == pytest.approx(measured, rel=0.06), family


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block", "options"),
    [
        (BlockShape(64, 4, 4, 16, 256), {}),
        (BlockShape(64, 4, 4, 15, 256), {}),
        (BlockShape(64, 4, 2, 16, 256), {"enable_gqa": True}),
        (BlockShape(64, 4, 4, 16, 256, attention_dropout=True), {"dropout_p": 0.1}),
        (BlockShape(64, 4, 4, 16, 256, value_dim=8), {}),
        (BlockShape(64, 4, 1, 16, 256, one_key=True), {}),
    ],
    ids=["plain", "odd", "few keys", "dropout", "narrow values", "one key head"],
)
def test_torch_keeps_scores_where_that_is_said(block: BlockShape, options: dict[str, Any], dtype: torch.dtype) -> None:
    def made(heads: int, channels: int) -> Tensor:
        return torch.randn(1, heads, LENGTH, channels, dtype=dtype, requires_grad=True)

    query, key = made(block.heads, block.head_dim), made(block.kv_heads, block.head_dim)
    value = made(block.kv_heads, block.value_dim)
    kept = kept_bytes(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, **options), set())
    scores = LENGTH * LENGTH * block.heads
    assert (unfused_by_itself(block, on_cpu=True) is not None) == (kept > 4 * scores)


def test_gpus_drop_scores_in_a_fused_kernel() -> None:
    assert build_setup(Request("gpt2", 1, gpu="h100")).attention == "flash"
    found = ask(Request("gpt2", 1, gpu=CPU, strategy="zero0")).best
    assert found.setup.attention == "math"
    assert any("on CPUs has no dropout" in note for note in found.notes)
    assert not [finding for finding in found.findings if finding.severity == "planned"]


def test_megatron_has_kernels_of_its_own() -> None:
    assert build_setup(Request("bloom-560m", 8, framework="megatron")).attention == "flash"
    assert build_setup(Request("bloom-560m", 8)).attention == "math"


def test_a_mask_is_in_the_upper_bound_alone_on_a_gpu() -> None:
    """FlashAttention's own package needs none."""
    block = BlockShape(WIDTH, HEADS, HEADS, 32, INNER, window=64, masked=True)
    shape = shape_of_config({"model_type": "mistral", "num_hidden_layers": 1, **USUAL, "sliding_window": 64}, "mistral")
    found = block_activations(Setup(shape, Cluster(Device("gpu")), Plan.named("zero0"), sequence=LENGTH), block)
    assert found.saved_upper - found.saved == LENGTH * LENGTH * 4


def test_dropped_scores_take_the_time_of_each_operator() -> None:
    """84 bytes a score, of fp32 operators one after the other, and products of whole sequences."""
    setup = build_setup(Request("gpt2", 1, gpu=CPU, precision="fp32", sequence=1024))
    (block,) = (unit.block for unit in setup.model.repeated)
    assert block is not None
    assert attention_bytes(setup, block) == 84 * 12 * 1024 * 1024
    fused = build_setup(Request("gpt2", 1, gpu=CPU, precision="fp32", sequence=1024, attention="flash"))
    assert attention_seconds(setup, block) > 2 * attention_seconds(fused, block)
