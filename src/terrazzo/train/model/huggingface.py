"""Any causal language model of `transformers`, from a config or a local folder, as the trainer needs it.

Nothing is downloaded, no code that comes with a model is run, and weights are read from safetensors only.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.errors import BadInput
from terrazzo.messages import install
from terrazzo.parallel.transformers_support import DOCUMENTS_APART
from terrazzo.planner.model.meta import bounded, causal_lm_config, refused
from terrazzo.planner.model.transformers import harmless

__all__ = [
    "build_body",
    "build_causal_lm",
    "check_cuts_attention",
    "check_scored",
    "num_flops_per_token",
    "one_sequence_per_row",
    "refuse_other_weights",
    "scored_class",
    "tensor_styles",
    "weight_files",
]


def build_causal_lm(spec: Mapping[str, Any] | str | Path, device: torch.device, *, dropout: bool = True) -> nn.Module:
    """See `terrazzo.train.model.causal_lm.build_model`, which is the public way in."""
    transformers = _import_transformers()
    config = _config_of(transformers, spec)
    if not dropout:
        _drop_nothing(transformers, config)
    model = _build(transformers.AutoModelForCausalLM, config, device)
    for module in model.modules():
        if not dropout and isinstance(module, nn.modules.dropout._DropoutNd):  # of a share that the code has
            module.p = 0.0
    return model


def _drop_nothing(transformers: Any, config: Any) -> None:
    """Set the shares that are dropped, `attn_pdrop`, `hidden_dropout`, `layerdrop` and the like, to 0."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            _drop_nothing(transformers, value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def build_body(spec: str | Path, device: torch.device) -> Any:
    """`build_causal_lm` without the head; also raises `BadInput` if transformers has no such model with a score."""
    transformers = _import_transformers()
    config = _config_of(transformers, spec)
    _scored_class_of(transformers, config)
    return _build(transformers.AutoModel, config, device)


def scored_class(spec: str | Path) -> str:
    """The name of the class in `transformers` that has the tensors of `build_body` and a score."""
    transformers = _import_transformers()
    return _scored_class_of(transformers, _config_of(transformers, spec))


def tensor_styles(model_type: str) -> dict[str, str]:
    """The plan of tensor parallelism that `transformers` has for a type of model; empty where it has none."""
    transformers = _import_transformers()
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    scored_class = known[model_type].base_model_tp_plan if model_type in known else None
    return dict(scored_class or {})


def check_scored(model: nn.Module) -> None:
    """Raise `BadInput` if `model` has other tensors than the class with a score that `transformers` has for it."""
    transformers = _import_transformers()
    config: Any = copy.deepcopy(model.config)
    config.num_labels = 1
    theirs = _build(transformers.AutoModelForSequenceClassification, config, torch.device("meta"))
    ours, named = ({name: value.shape for name, value in one.state_dict().items()} for one in (model, theirs))
    if other := sorted(name for name in ours.keys() | named.keys() if ours.get(name) != named.get(name)):
        raise BadInput(
            f"objective 'reward' puts one 'score' over a model's body, and {type(theirs).__name__}, which transformers"
            f" has for model_type {config.model_type!r}, has other tensors: {', '.join(other[:3])}. Give a decoder such"
            " as 'llama', 'qwen3' or 'gpt2' as model.path."
        )


def _scored_class_of(transformers: Any, config: Any) -> str:
    known = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in known:
        raise BadInput(
            f"objective 'reward' needs a model that transformers {transformers.__version__} has with a score, and of"
            f" model_type {config.model_type!r} it has no model for sequence classification. Give a decoder such as"
            " 'llama', 'qwen3' or 'gpt2' as model.path."
        )
    scored: type = known[type(config)]
    return scored.__name__


def _config_of(transformers: Any, spec: Mapping[str, Any] | str | Path) -> Any:
    return _causal_lm_config(transformers, dict(spec) if isinstance(spec, Mapping) else read_model_config(Path(spec)))


def _build(auto: Any, config: Any, device: torch.device) -> nn.Module:
    """The model of a class of `transformers` that chooses by the config."""
    try:
        with device, bounded("The model's config"):
            model: nn.Module = auto.from_config(config, dtype=torch.float32)
    except (BadInput, MemoryError):
        raise
    except Exception as error:
        raise refused("The model's config", config.model_type, error) from error
    return model


def _import_transformers() -> Any:
    """The module; its import costs seconds, so it waits until a `transformers` model is asked for."""
    try:
        import transformers
    except ImportError as error:
        raise BadInput(
            f"A Hugging Face model was asked for, but the package 'transformers' is not installed. {install('hf')}."
            " The built-in decoder needs nothing."
        ) from error
    return transformers


def _causal_lm_config(transformers: Any, values: dict[str, Any]) -> Any:
    """The `PretrainedConfig` of `values`, for training: no key-value cache, no name of code to run."""
    name, values = "The model's config", harmless(values, "The model's config")
    others = {key: value for key, value in values.items() if key != "model_type"}
    config = causal_lm_config(transformers, values.get("model_type"), others, name)
    config.use_cache = False
    return config


def check_cuts_attention(values: Mapping[str, Any]) -> None:
    """Raise `BadInput` where the model of a config.json is not known to keep documents in one sequence apart."""
    if values.get("model_type") not in DOCUMENTS_APART:
        raise BadInput(
            f"data.attention is 'document', and a model of model_type {values.get('model_type')!r} is not known to cut"
            f" attention between documents in one sequence; these do: {', '.join(sorted(DOCUMENTS_APART))}. Leave"
            " data.attention out, or set data.packing to 'single'."
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted by name.

    Raises:
        BadInput: there are none; weights in pickled formats are not read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(
            f"The model folder {str(folder)!r} holds no *.safetensors file. Save the model with "
            "save_pretrained (pickled weights, .bin or .pt, are never read), or set model.weights to random "
            "for new ones."
        )
    return files


def num_flops_per_token(model: nn.Module, sequence_length: int, *, scores_tokens: bool = True) -> int:
    """An estimate of training FLOPs per token after PaLM's appendix B (see `Decoder.num_flops_per_token`).

    Every parameter counts as a matrix element except an input embedding that is not the head as well; of a mixture's
    experts the routed share counts. 0 when the config does not tell layers and width.

    Args:
        scores_tokens: whether the model has a head for the vocabulary, tied or not.
    """
    config: Any = getattr(model, "config", None)
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    if not layers or not width:
        return 0
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    attention: int = 12 * layers * config.num_attention_heads * head_dim * sequence_length
    tied = scores_tokens and getattr(config, "tie_word_embeddings", True)
    return int(_matmul_flops(model, config, tied)) + attention


def _matmul_flops(model: nn.Module, config: Any, tied: bool) -> float:
    """FLOPs of a token in the matrices that it meets: 6 per element, 4 per frozen one, which gets no gradient."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    share = getattr(config, "num_experts_per_tok", None) or experts
    flops, frozen = 0.0, False
    for name, parameter in model.named_parameters():
        frozen = frozen or not parameter.requires_grad
        each = 6 if parameter.requires_grad else 4
        flops += each * parameter.numel() * (share / experts if ".experts." in name else 1.0)
    if not tied:
        flops -= (4 if frozen else 6) * config.vocab_size * config.hidden_size  # as the rest of a base is
    return flops


def refuse_other_weights(folder: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise `BadInput` if a model folder's weights lack names, or have names that the model has not."""
    if missing or unexpected:
        raise BadInput(
            f"The weights in '{folder}' are not those of its config.json: missing {missing[:3] or 'nothing'}, "
            f"unexpected {unexpected[:3] or 'nothing'}. Save the model again."
        )


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Within this context `transformers` does not look for sequences packed into one row, which ours are not.

    On the meta device there are no values to look at, and it would make a mask that a real run does not have.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, _PACKING, None)
    if original is not None:
        setattr(masking, _PACKING, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        if original is not None:
            setattr(masking, _PACKING, original)


_PACKING = "find_packed_sequence_indices"
