"""The built-in decoder and tokenizer in the format of `transformers`: a Llama, and a byte-level BPE without merges."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from terrazzo.checkpoint.hub_folder import ModelDescription
from terrazzo.errors import BadInput

__all__ = ["byte_tokenizer_files", "decoder_as_llama"]

_LLAMA = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def decoder_as_llama(
    values: Mapping[str, Any], files: Mapping[str, bytes], end_of_document: int | None
) -> ModelDescription:
    """The built-in decoder as a `LlamaForCausalLM`, or with a window as a `MistralForCausalLM`: the same logits.

    Args:
        values: the fields of its `DecoderConfig`.
        files: of the tokenizer, by name: see `tokenizer_files` and `byte_tokenizer_files`.
        end_of_document: the token at which generation stops.

    Raises:
        BadInput: the decoder has experts, or an attention that neither of the two has.
    """
    if values.get("experts") is not None:
        raise BadInput(
            "The checkpoint is of a decoder with experts (model.experts), which a Llama does not have: keep the"
            " checkpoint, or take its weights by tz.full_state_dict."
        )
    attention = values.get("attention")
    if attention is not None and (
        missing := [name for name in ("stride", "full_every", "prefix") if attention.get(name)]
    ):
        raise BadInput(
            f"The checkpoint is of a decoder with model.attention.{missing[0]}, which neither a Llama nor a Mistral"
            " has: keep the checkpoint, or take its weights by tz.full_state_dict."
        )
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": values["vocab_size"],
        "hidden_size": values["dim"],
        "intermediate_size": values["ffn_dim"],
        "num_hidden_layers": values["layers"],
        "num_attention_heads": values["heads"],
        "num_key_value_heads": values["kv_heads"],
        "head_dim": values["dim"] // values["heads"],
        "max_position_embeddings": values["max_sequence_length"],
        "rms_norm_eps": values["norm_eps"],
        "rope_theta": values["rope_theta"],  # where transformers 4 looks
        "rope_parameters": rope,
        "tie_word_embeddings": values["tie_embeddings"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
    }
    if attention is not None:
        own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": attention["window"]}
        config = {name: value for name, value in config.items() if not name.endswith("_bias")} | own
    return ModelDescription(config, files, _llama_name)


def _llama_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    block = re.fullmatch(r"blocks\.([0-9]+)\.(.+)", stem)
    known = _LLAMA_BLOCK.get(block[2]) if block else _LLAMA.get(stem)
    if known is None or stem == name:
        raise BadInput(f"'{name}' is no parameter of the built-in decoder: give the folder the model was built from.")
    return f"model.layers.{block[1]}.{known}.weight" if block else f"{known}.weight"


_END_OF_DOCUMENT, _END_ID = "<|endoftext|>", 256


def byte_tokenizer_files() -> dict[str, bytes]:
    """The built-in tokenizer for `AutoTokenizer`: UTF-8 bytes as ids 0 to 255, and 256 as the end of a document.

    Text that looks like the end of a document is encoded as plain bytes here too.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": _END_ID, "content": _END_OF_DOCUMENT, "special": True, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(_byte_characters())}, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END_OF_DOCUMENT,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(settings)}


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers have for each byte: itself where it is visible, else one from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
