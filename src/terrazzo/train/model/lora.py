"""LoRA in `terrazzo train`: adapters of the `peft` library on a frozen, sharded base."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.checkpoint.hub_folder import read_model_config
from terrazzo.checkpoint.loading.weights import weights_for
from terrazzo.config import Config, LoraConfig
from terrazzo.engine import parameters_by_names, persistent_buffers
from terrazzo.errors import BadInput
from terrazzo.integrations.peft import base_name, prepare_adapters
from terrazzo.messages import install
from terrazzo.planner import ModelShape, model_shape
from terrazzo.planner.model import adapters
from terrazzo.planner.model.closed_form import closed_form
from terrazzo.train.model.huggingface import refuse_other_weights

__all__ = ["add_adapters", "check_lora", "load_base", "with_adapters"]

ADAPTER = ".lora_"


def check_lora(config: Config) -> None:
    """Raise `BadInput` for adapters that are not possible: no package, a quantized base, or missing layers."""
    if config.lora.rank is None:
        return
    _import_peft()
    assert config.model.path is not None
    values = read_model_config(config.model.path)
    if "quantization_config" in values:
        raise BadInput(
            f"lora.rank is set and '{config.model.path}' is a model that is quantized already, which cannot be "
            "sharded. Use the unquantized weights: precision.frozen 'nf4' packs them as they are loaded, and keeps "
            "4.25 bits of each element of a frozen matrix, divided by the ranks."
        )
    if closed_form(values) is not None:
        try:
            shape = model_shape(config.model.path)
        except BadInput:  # of its config, which transformers may understand: peft will look at the model itself
            return
        with_adapters(shape, config.lora)


def _import_peft() -> Any:
    """The module; its import costs seconds."""
    try:
        import peft
    except ImportError as error:
        raise BadInput(
            f"lora.rank is set, but the package 'peft' is not installed. {install('peft')}, or leave lora.rank out to "
            "train all weights."
        ) from error
    return peft


def add_adapters(model: nn.Module, config: Config) -> nn.Module:
    """The model on the meta device with adapters, and all else frozen; the same model where `lora.rank` is not set."""
    lora = config.lora
    if lora.rank is None:
        return model
    peft = _import_peft()
    targets = lora.target_modules
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0 if config.objective.kind.against_initial else lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        bias=lora.bias,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
            )  # peft asks it
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise BadInput(f"lora.target_modules is {targets!r}, which peft refuses: {error}") from error
    peft_model: Any = adapted
    peft_model.peft_config["default"].base_model_name_or_path = str(config.model.path)
    prepare_adapters(adapted)
    return adapted


def load_base(model: nn.Module, folder: Path) -> None:
    """Load the weights of a model folder into the base of a sharded model with adapters.

    Raises:
        BadInput: the folder lacks weights of the base, or has others.
    """
    weights = _BaseWeights(model, folder)
    keys: Any = model.load_state_dict(weights, strict=False)
    missing = [name for name in keys.missing_keys if ADAPTER not in name]
    refuse_other_weights(folder, missing, keys.unexpected_keys)


class _BaseWeights(Mapping[str, Tensor]):
    """A model folder's weights under the names that they have beneath adapters; each look-up reads one tensor."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        groups: list[Sequence[str]] = [names for names in parameters_by_names(model) if ADAPTER not in names[0]]
        groups += [buffer.names for buffer in persistent_buffers(model)]
        self._theirs = {name: base_name(name) for names in groups for name in names}
        self._ours = {theirs: name for name, theirs in self._theirs.items()}
        self._weights = weights_for(model, folder, base_name, ADAPTER)

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._theirs[name]]

    def __contains__(self, name: object) -> bool:
        return self._theirs.get(str(name), "") in self._weights

    def __iter__(self) -> Iterator[str]:
        return (self._ours.get(name, name) for name in self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def with_adapters(shape: ModelShape, lora: LoraConfig) -> ModelShape:
    """The planner's view of a model with the adapters of a configuration.

    Raises:
        BadInput: a target that no matrix of the model's blocks has.
    """
    if lora.rank is None:
        return shape
    targets = lora.target_modules
    return adapters.with_adapters(shape, lora.rank, targets if isinstance(targets, str) else tuple(targets), lora.bias)
