"""The model families whose tensors are known without building them: a table, and nothing computed.

Names, shapes and defaults are those of `transformers` (src/transformers/models/*/{configuration,modeling}_*.py), which
the tests build on the meta device. The sizes that the rows name are read from a config by `fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from terrazzo.planner.model.decoder_family import DECODER
from terrazzo.planner.model.rows import (
    Architecture,
    BufferRow,
    TensorRow,
    attention,
    embedding,
    experts,
    fused_attention,
    latent_attention,
    linear,
    mlp,
    norms,
    positions,
    router,
    swiglu,
    transposed,
    uncut,
)
from terrazzo.planner.model.shapes import BUILT_IN

__all__ = ["FAMILIES"]

_LLAMA = Architecture(
    blocks="model.layers",
    root=embedding("model.embed_tokens") + norms("model.norm"),
    attention=attention("attention_bias", "attention_bias"),
    mlp=swiglu("mlp_bias"),
    norms=norms("input_layernorm", "post_attention_layernorm"),
    defaults={"positions": 2048},
)
"""The layout that most families vary."""

_QUERY_KEY_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", size="head_dim")
_WIDE_QUERY_KEY_NORMS = norms("self_attn.q_norm", size="q", split="column") + norms(
    "self_attn.k_norm", size="kv", split="column"
)
_FOUR_NORMS = _LLAMA.norms + norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
_GATE_UP = linear("mlp.gate_up_proj", "gate_up", "hidden", "column_gathered")
_FUSED_SWIGLU = _GATE_UP + linear("mlp.down_proj", "hidden", "ffn", "row_splits")
_LAYER_NORMS = norms("input_layernorm", "post_attention_layernorm", bias=True)

_MISTRAL = replace(
    _LLAMA, attention=attention(), mlp=swiglu(), defaults={"kv_heads": 8, "positions": 131072, "window": 4096}
)
_QWEN2 = replace(
    _LLAMA,
    attention=attention(qkv_bias=True),
    mlp=swiglu(),
    defaults={"kv_heads": 32, "positions": 32768, "window": 4096, "use_window": False, "window_from": 28},
)
_QWEN3 = replace(_QWEN2, attention=_LLAMA.attention + _QUERY_KEY_NORMS, defaults={**_QWEN2.defaults, "head_dim": 128})
_GEMMA = replace(
    _LLAMA,
    mlp=swiglu(),
    defaults={"kv_heads": 16, "head_dim": 256, "positions": 8192, "tied": True},
    wide_norm=True,
)
_WINDOWED_GEMMA = replace(
    _GEMMA, norms=_FOUR_NORMS, windowed=2, defaults={**_GEMMA.defaults, "kv_heads": 4, "window": 4096}
)
_OLMO2 = replace(
    _LLAMA,
    attention=_LLAMA.attention + _WIDE_QUERY_KEY_NORMS,
    mlp=swiglu(),
    norms=norms("post_attention_layernorm", "post_feedforward_layernorm"),
    wide_norm=True,
)

_ROUTED = router("mlp.gate") + experts("mlp.experts")
_ROUTER_LAST = experts("mlp.experts") + router("mlp.gate")

_MIXTRAL = replace(
    _MISTRAL,
    sparse=_ROUTED,
    keys={"experts": "num_local_experts", "expert_ffn": "intermediate_size"},
    defaults={"kv_heads": 8, "positions": 131072, "window": None, "experts": 8, "active": 2},
)
_QWEN2_MOE = replace(
    _QWEN2,
    attention=attention(qkv_bias="qkv_bias"),
    sparse=(
        *_ROUTED,
        *uncut(swiglu(module="mlp.shared_expert", width="shared_ffn")),
        TensorRow("mlp.shared_expert_gate.weight", ("one", "hidden"), "router"),
    ),
    defaults={
        **_QWEN2.defaults,
        "kv_heads": 16,
        "qkv_bias": True,
        "experts": 60,
        "active": 4,
        "expert_ffn": 1408,
        "shared_ffn": 5632,
        "sparse_step": 1,
    },
)
_QWEN3_MOE = replace(
    _QWEN3,
    sparse=_ROUTER_LAST,
    defaults={
        "kv_heads": 4, "positions": 32768, "window": 4096, "use_window": False,
        "experts": 128, "active": 8, "expert_ffn": 768, "sparse_step": 1,
    },
)  # fmt: skip
_DEEPSEEK_V3 = replace(
    _LLAMA,
    attention=latent_attention(),
    mlp=swiglu(),
    sparse=(*_ROUTER_LAST, *swiglu(module="mlp.shared_experts", width="shared_ffn")),
    keys={"experts": "n_routed_experts"},
    fp32_router=True,
    defaults={
        "positions": 4096, "experts": 256, "active": 8, "expert_ffn": 2048, "shared_experts": 1, "dense_layers": 3,
        "q_lora": 1536, "kv_lora": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128,
    },
)  # fmt: skip
_DEEPSEEK_V2 = replace(
    _DEEPSEEK_V3,
    mlp=swiglu("mlp_bias"),
    sparse=(*_ROUTER_LAST, *swiglu("mlp_bias", module="mlp.shared_experts", width="shared_ffn")),
    defaults={
        **_DEEPSEEK_V3.defaults,
        "positions": 2048,
        "experts": 64,
        "active": None,
        "expert_ffn": 1407,
        "shared_experts": 2,
        "dense_layers": 0,
    },
)

_HEAD_BIAS = TensorRow("lm_head.bias", ("vocab",), "vector", "vocab")

_GPT2_DROPOUTS = {"attn_pdrop": 0.1, "resid_pdrop": 0.1}

_GPT2 = Architecture(
    blocks="transformer.h",
    root=embedding("transformer.wte") + positions("transformer.wpe") + norms("transformer.ln_f", bias=True),
    attention=transposed(fused_attention("attn.c_attn", "attn.c_proj")),
    mlp=transposed(mlp("mlp.c_fc", "mlp.c_proj")),
    norms=norms("ln_1", "ln_2", bias=True),
    keys={"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn": "n_inner", "positions": "n_positions"},
    defaults={**_GPT2_DROPOUTS, "ffn": None, "positions": 1024, "tied": True, "nonlinearity": "gelu_new"},
    gated=False,
    rotary=0.0,
    norm="layer",
    assumes={"add_cross_attention": False},
)
_GPTJ = replace(
    _GPT2,
    root=(*embedding("transformer.wte"), *norms("transformer.ln_f", bias=True), _HEAD_BIAS),
    attention=(
        *(row for each in "kvq" for row in linear(f"attn.{each}_proj", "q", "hidden", "column")),
        *linear("attn.out_proj", "hidden", "q", "row"),
    ),
    mlp=mlp("mlp.fc_in", "mlp.fc_out"),
    norms=norms("ln_1", bias=True),
    defaults={"ffn": None, "positions": 2048, "nonlinearity": "gelu_new", "rotary_dim": 64},
    rotary=1.0,
    parallel=True,
    eager=True,
)
_GPT_NEOX = replace(
    _GPT2,
    blocks="gpt_neox.layers",
    root=embedding("gpt_neox.embed_in", split="none") + norms("gpt_neox.final_layer_norm", bias=True),
    attention=fused_attention("attention.query_key_value", "attention.dense", "attention_bias"),
    mlp=mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    norms=_LAYER_NORMS,
    keys={},
    defaults={"positions": 2048, "attention_bias": True, "use_parallel_residual": True},
    rotary=0.25,
    parallel="use_parallel_residual",
)
_PHI = replace(
    _GPT_NEOX,
    blocks="model.layers",
    root=(*embedding("model.embed_tokens"), *norms("model.final_layernorm", bias=True), _HEAD_BIAS),
    attention=attention(True, True, names=("q_proj", "k_proj", "v_proj", "dense")),
    mlp=mlp("mlp.fc1", "mlp.fc2"),
    norms=norms("input_layernorm", bias=True),
    defaults={"positions": 2048, "nonlinearity": "gelu_new"},
    rotary=0.5,
    parallel=True,
    assumes={"qk_layernorm": False},
)
_STARCODER2 = replace(
    _GPT_NEOX,
    blocks="model.layers",
    root=embedding("model.embed_tokens") + norms("model.norm", bias=True),
    attention=attention("use_bias", "use_bias"),
    mlp=mlp("mlp.c_fc", "mlp.c_proj", "use_bias"),
    defaults={"kv_heads": 2, "positions": 4096, "tied": True, "use_bias": True},
    rotary=1.0,
    parallel=False,
)
_OPT = replace(
    _GPT2,
    blocks="model.decoder.layers",
    root=(
        *embedding("model.decoder.embed_tokens"),
        *positions("model.decoder.embed_positions"),
        *norms("model.decoder.final_layer_norm", bias=True),
    ),
    attention=(
        *(row for each in "kvq" for row in linear(f"self_attn.{each}_proj", "q", "hidden", "column", "enable_bias")),
        *linear("self_attn.out_proj", "hidden", "q", "row", "enable_bias"),
    ),
    mlp=mlp("fc1", "fc2", "enable_bias"),
    norms=norms("self_attn_layer_norm", "final_layer_norm", bias=True),
    order=("self_attn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"),
    keys={"ffn": "ffn_dim"},
    defaults={"positions": 2048, "tied": True, "dropout": 0.1, "enable_bias": True, "nonlinearity": "relu"},
    position_offset=2,  # modeling_opt.py, OPTLearnedPositionalEmbedding
    assumes={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
    assumes_width=("word_embed_proj_dim",),  # OPT-350m alone embeds in another width
)
_XGLM = replace(
    _OPT,
    blocks="model.layers",
    root=embedding("model.embed_tokens") + norms("model.layer_norm", bias=True),
    attention=(
        *(row for each in "kvq" for row in linear(f"self_attn.{each}_proj", "q", "hidden", "column", True)),
        *linear("self_attn.out_proj", "hidden", "q", "row", True),
    ),
    mlp=mlp("fc1", "fc2"),
    keys={"hidden": "d_model", "layers": "num_layers", "heads": "attention_heads", "ffn": "ffn_dim"},
    defaults={"positions": 2048, "tied": True, "dropout": 0.1, "attention_dropout": 0.1},
    buffers=(BufferRow(("position_rows", "hidden"), 4),),  # sines
    eager=True,
    clamped=True,
    assumes=_GPT2.assumes,
    assumes_width=(),
)
_BLOOM = replace(
    _GPT2,
    blocks="transformer.h",
    root=(
        *embedding("transformer.word_embeddings"),
        *norms("transformer.word_embeddings_layernorm", "transformer.ln_f", bias=True),
    ),
    attention=fused_attention("self_attention.query_key_value", "self_attention.dense"),
    mlp=_GPT_NEOX.mlp,
    norms=_LAYER_NORMS,
    keys={"hidden": "n_embed", "layers": "n_layer", "heads": "n_head", "ffn": ""},
    defaults={"ffn": None, "positions": 0, "tied": True},
    eager=True,
)
_MPT = replace(
    _GPT2,
    blocks="transformer.blocks",
    root=embedding("transformer.wte") + norms("transformer.norm_f"),
    attention=fused_attention("attn.Wqkv", "attn.out_proj", False),
    mlp=mlp("ffn.up_proj", "ffn.down_proj", False),
    norms=norms("norm_1", "norm_2"),
    order=("norm_1", "attn", "norm_2", "ffn"),
    keys={"hidden": "d_model", "layers": "n_layers", "heads": "n_heads", "positions": "max_seq_len", "ffn": ""},
    defaults={"ffn": None, "positions": 2048, "tied": True},
    eager=True,
)
_STABLELM = replace(
    _LLAMA,
    root=embedding("model.embed_tokens") + norms("model.norm", bias=True),
    attention=attention(qkv_bias="use_qkv_bias"),
    mlp=swiglu(),
    norms=_LAYER_NORMS,
    norm="layer",
    defaults={"kv_heads": 32, "positions": 4096},
    rotary=0.25,
    assumes={"qk_layernorm": False, "use_parallel_residual": False},
)

FAMILIES: Mapping[str, Architecture] = {
    BUILT_IN: DECODER,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": replace(
        _WINDOWED_GEMMA,
        eager=True,
        defaults={**_WINDOWED_GEMMA.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": replace(
        _WINDOWED_GEMMA,
        attention=_WINDOWED_GEMMA.attention + _QUERY_KEY_NORMS,
        windowed=6,
        defaults={**_WINDOWED_GEMMA.defaults, "positions": 131072},
    ),
    "olmo": replace(
        _LLAMA, root=embedding("model.embed_tokens"), mlp=swiglu(), norms=(), bare_norms=2, norm="layer", wide_norm=True
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windowed=4, defaults={"positions": 2048, "window": 4096}),
    "granite": _LLAMA,
    "smollm3": replace(_LLAMA, defaults={"kv_heads": 4, "positions": 32768, "tied": True, "no_rope_layer_interval": 4}),
    "stablelm": _STABLELM,
    "phi3": replace(
        _LLAMA,
        attention=(
            *linear("self_attn.o_proj", "hidden", "q", "row_splits"),
            *linear("self_attn.qkv_proj", "qkv", "hidden", "column_gathered"),
        ),
        mlp=_FUSED_SWIGLU,
        defaults={"positions": 4096, "window": None},
    ),
    "glm4": replace(
        _LLAMA,
        attention=attention(qkv_bias="attention_bias"),
        mlp=_FUSED_SWIGLU,
        norms=_LLAMA.norms + norms("post_self_attn_layernorm", "post_mlp_layernorm"),
        defaults={"kv_heads": 2, "head_dim": 128, "positions": 131072, "attention_bias": True},
        rotary=0.5,
    ),
    "mixtral": _MIXTRAL,
    "olmoe": replace(
        _OLMO2,
        wide_norm=False,
        sparse=_ROUTED,
        norms=_LLAMA.norms,
        keys={"expert_ffn": "intermediate_size"},
        defaults={"positions": 4096, "experts": 64, "active": 8},
    ),
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "gpt_oss": replace(
        _LLAMA,
        attention=(TensorRow("self_attn.sinks", ("heads",), "vector", "column"), *_LLAMA.attention),
        sparse=(
            *linear("mlp.router", "experts", "hidden", "none", True),
            *experts("mlp.experts", transposed=True, bias=True),
        ),
        keys=_MIXTRAL.keys,
        windowed=2,
        eager=True,
        wide_norm=True,
        defaults={
            "nonlinearity": "clamped",
            "kv_heads": 8,
            "head_dim": 64,
            "positions": 131072,
            "window": 128,
            "attention_bias": True,
            "experts": 128,
            "active": 4,
        },
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "gpt2": replace(_GPT2, order=("ln_1", "attn", "ln_2", "mlp")),
    "gpt_bigcode": replace(
        _GPT2,
        order=("ln_1", "attn", "ln_2", "mlp"),
        attention=transposed(_GPT2.attention),
        mlp=transposed(_GPT2.mlp),
        defaults={**_GPT2.defaults, "multi_query": True, "nonlinearity": "gelu_pytorch_tanh"},
    ),
    "gptj": replace(_GPTJ, order=("ln_1", "attn", "mlp")),
    "gpt_neox": replace(_GPT_NEOX, order=("input_layernorm", "post_attention_layernorm", "attention", "mlp")),
    "phi": _PHI,
    "starcoder2": _STARCODER2,
    "opt": _OPT,
    "xglm": _XGLM,
    "bloom": replace(_BLOOM, order=("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")),
    "mpt": _MPT,
    "falcon": replace(
        _BLOOM,
        root=embedding("transformer.word_embeddings") + norms("transformer.ln_f", bias=True),
        attention=fused_attention("self_attention.query_key_value", "self_attention.dense", "bias"),
        mlp=mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "bias"),
        norms=(
            *norms("post_attention_layernorm", bias=True, when="not parallel_attn"),
            *norms("input_layernorm", bias=True, when="not new_decoder_architecture"),
            *norms("ln_attn", "ln_mlp", bias=True, when="new_decoder_architecture"),
        ),
        keys={"kv_heads": "num_kv_heads", "ffn": "ffn_hidden_size"},
        defaults={"ffn": None, "positions": 2048, "tied": True, "multi_query": True, "parallel_attn": True},
        rotary=1.0,
        parallel="parallel_attn",
        eager=False,
        drops_scores="alibi",
        one_key=True,
        masks="all",
        assumes={"num_ln_in_parallel_attn": None},
    ),
}
"""The one table of families, by `model_type`. A model of none of them is built by `transformers` on the meta device."""
