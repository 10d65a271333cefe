"""Well-known models by name, as the fields of their published config.json that decide a shape.

Sources: the config.json of each model's own repository on huggingface.co, except GPT-3 (arXiv 2005.14165, table 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS"]

PresetConfig = Mapping[str, Any]


def _llama(hidden: int, layers: int, heads: int, ffn: int, **rest: Any) -> PresetConfig:
    """Llama and the families that share its keys; grouped queries, vocabulary and positions in `rest`."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": ffn,
        "tie_word_embeddings": False,
    } | rest


def _llama1(hidden: int, layers: int, heads: int, ffn: int, positions: int = 2048, **rest: Any) -> PresetConfig:
    return _llama(hidden, layers, heads, ffn, vocab_size=32000, max_position_embeddings=positions, **rest)


def _llama3(hidden: int, layers: int, heads: int, ffn: int, positions: int = 131072, **rest: Any) -> PresetConfig:
    return _llama(
        hidden,
        layers,
        heads,
        ffn,
        **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": positions} | rest,
    )


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> PresetConfig:
    common = {"model_type": "qwen2", "num_key_value_heads": kv_heads, "vocab_size": 151936}
    return _llama(hidden, layers, heads, ffn, **common | {"max_position_embeddings": 32768} | rest)


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> PresetConfig:
    common = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
    return _qwen(hidden, layers, heads, kv_heads, ffn, **common | rest)


def _gemma(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> PresetConfig:
    common = {"model_type": "gemma", "num_key_value_heads": kv_heads, "vocab_size": 256000, "head_dim": 256}
    more = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    return _llama(hidden, layers, heads, ffn, **common | more | rest)


def _gemma2(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> PresetConfig:
    return _gemma(hidden, layers, heads, kv_heads, ffn, model_type="gemma2", sliding_window=4096, **rest)


def _gpt2(width: int, layers: int, heads: int, **rest: Any) -> PresetConfig:
    sizes = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}
    return {**sizes, "vocab_size": 50257, "n_positions": 1024} | rest


def _neox(hidden: int, layers: int, heads: int, vocab: int) -> PresetConfig:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    rest = {"vocab_size": vocab, "intermediate_size": 4 * hidden, "max_position_embeddings": 2048}
    return {"model_type": "gpt_neox", "tie_word_embeddings": False} | sizes | rest


def _mpt(width: int, layers: int, heads: int, positions: int = 2048) -> PresetConfig:
    sizes = {"d_model": width, "n_layers": layers, "n_heads": heads, "max_seq_len": positions}
    return {"model_type": "mpt", "vocab_size": 50432 if width > 2048 else 50368} | sizes


def _opt(hidden: int, layers: int, heads: int) -> PresetConfig:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048, "dropout": 0.1} | sizes


def _bloom(hidden: int, layers: int, heads: int) -> PresetConfig:
    return {"model_type": "bloom", "vocab_size": 250880, "hidden_size": hidden, "n_layer": layers, "n_head": heads}


def _deepseek(model_type: str, hidden: int, layers: int, heads: int, ffn: int, **rest: Any) -> PresetConfig:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return _llama(hidden, layers, heads, ffn, model_type=model_type, max_position_embeddings=163840, **latent, **rest)


PRESETS: Mapping[str, PresetConfig] = {
    "llama-7b": _llama1(4096, 32, 32, 11008),
    "llama-13b": _llama1(5120, 40, 40, 13824),
    "llama-30b": _llama1(6656, 60, 52, 17920),
    "llama-65b": _llama1(8192, 80, 64, 22016),
    "llama2-7b": _llama1(4096, 32, 32, 11008, 4096),
    "llama2-13b": _llama1(5120, 40, 40, 13824, 4096),
    "llama2-70b": _llama1(8192, 80, 64, 28672, 4096, num_key_value_heads=8),
    "llama3-8b": _llama3(4096, 32, 32, 14336, 8192),
    "llama3-70b": _llama3(8192, 80, 64, 28672, 8192),
    "llama3.1-8b": _llama3(4096, 32, 32, 14336),
    "llama3.1-70b": _llama3(8192, 80, 64, 28672),
    "llama3-405b": _llama3(16384, 126, 128, 53248),
    "llama3.1-405b": _llama3(16384, 126, 128, 53248),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, tie_word_embeddings=True, head_dim=64),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, tie_word_embeddings=True, head_dim=128),
    "tinyllama-1.1b": _llama1(2048, 22, 32, 5632, num_key_value_heads=4),
    "smollm2-135m": _llama(
        576,
        30,
        9,
        1536,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "smollm2-360m": _llama(
        960,
        32,
        15,
        2560,
        num_key_value_heads=5,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "smollm2-1.7b": _llama(
        2048, 24, 32, 8192, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True
    ),
    "mistral-7b": _llama1(4096, 32, 32, 14336, 32768, model_type="mistral", num_key_value_heads=8, sliding_window=4096),
    "mixtral-8x7b": _llama1(
        4096,
        32,
        32,
        14336,
        32768,
        model_type="mixtral",
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "mixtral-8x22b": _llama(
        6144,
        56,
        48,
        16384,
        model_type="mixtral",
        vocab_size=32768,
        max_position_embeddings=65536,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen2.5-0.5b": _qwen(896, 24, 14, 2, 4864, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, tie_word_embeddings=True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944, vocab_size=152064, max_position_embeddings=131072),
    "qwen2.5-14b": _qwen(5120, 48, 40, 8, 13824, vocab_size=152064, max_position_embeddings=131072),
    "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, vocab_size=152064, max_position_embeddings=131072),
    "qwen2.5-72b": _qwen(8192, 80, 64, 8, 29568, vocab_size=152064, max_position_embeddings=131072),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(
        2048, 48, 32, 4, 6144, model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "qwen3-235b-a22b": _qwen3(
        4096,
        94,
        64,
        4,
        12288,
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
    ),
    "gemma-2b": _gemma(2048, 18, 8, 1, 16384),
    "gemma-7b": _gemma(3072, 28, 16, 16, 24576),
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14336),
    "gemma2-27b": _gemma2(4608, 46, 32, 16, 36864, head_dim=128),
    "gemma3-1b": _gemma(
        1152,
        26,
        4,
        1,
        6912,
        model_type="gemma3_text",
        vocab_size=262144,
        max_position_embeddings=32768,
        sliding_window=512,
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt2-1.5b": _gpt2(1600, 48, 25),
    "gpt3-1.3b": _gpt2(2048, 24, 16, n_positions=2048),
    "gpt3-2.7b": _gpt2(2560, 32, 32, n_positions=2048),
    "gpt3-6.7b": _gpt2(4096, 32, 32, n_positions=2048),
    "gpt3-13b": _gpt2(5120, 40, 40, n_positions=2048),  # the paper prints 5140, which 40 heads do not make
    "gpt3-175b": _gpt2(12288, 96, 96, n_positions=2048),
    "pythia-160m": _neox(768, 12, 12, 50304),
    "pythia-1.4b": _neox(2048, 24, 16, 50304),
    "pythia-2.8b": _neox(2560, 32, 32, 50304),
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "gpt-neox-20b": _neox(6144, 44, 64, 50432),
    "gpt-j-6b": {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400},
    "phi-2": _llama(
        2560,
        32,
        32,
        10240,
        model_type="phi",
        vocab_size=51200,
        max_position_embeddings=2048,
        partial_rotary_factor=0.4,
    ),
    "phi3-mini": _llama(3072, 32, 32, 8192, model_type="phi3", vocab_size=32064, max_position_embeddings=4096),
    "phi-4": _llama(
        5120, 40, 40, 17920, model_type="phi3", num_key_value_heads=10, vocab_size=100352, max_position_embeddings=16384
    ),
    "olmo2-7b": _llama(4096, 32, 32, 11008, model_type="olmo2", vocab_size=100352, max_position_embeddings=4096),
    "starcoder2-15b": _llama(
        6144,
        40,
        48,
        24576,
        model_type="starcoder2",
        num_key_value_heads=4,
        vocab_size=49152,
        max_position_embeddings=16384,
        sliding_window=4096,
    ),
    "falcon-7b": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    },
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 16),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56, 8192),
    "mpt-70b": _mpt(8192, 80, 64),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom-176b": _bloom(14336, 70, 112),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        2048,
        27,
        16,
        10944,
        vocab_size=102400,
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        7168,
        61,
        128,
        18432,
        vocab_size=129280,
        q_lora_rank=1536,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    ),
}
