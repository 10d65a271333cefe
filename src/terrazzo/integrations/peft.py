"""PEFT adapters on a sharded model. `get_peft_model` and `tz.shard` are called as always, in this order:

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    model, optimizer = tz.shard(model, optimizer, plan="zero3")
    ...
    save_adapter(model, "my-adapter")             # PeftModel.from_pretrained(base, "my-adapter") loads it

The frozen base is split as the plan says, and has no gradient and no optimizer state. PEFT's own `save_pretrained`
cannot read sharded weights; the functions here can. All of them are called by every rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.checkpoint.exporters import new_folder
from terrazzo.engine import (
    DTYPES,
    FrozenFormat,
    ModelState,
    Precision,
    parameter_names,
    persistent_buffers,
    whole_weights,
)
from terrazzo.errors import BadInput, Misuse, SaveFailed, listed
from terrazzo.exchange import together
from terrazzo.words import dtype_named

__all__ = ["base_name", "load_adapter", "precision_of", "prepare_adapters", "save_adapter", "save_merged"]

ADAPTER_FILE = "adapter_model.safetensors"
BASE = "base_model.model."
BASE_LAYER = ".base_layer."
SCALES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings of an adapter that its tensors' names and shapes do not tell."""


def base_name(name: str) -> str:
    """The name of a base parameter before there were adapters."""
    return re.sub(r"(\.base_layer)+\.", ".", name.removeprefix(BASE))


def precision_of(quantization: Any, precision: Precision | str = "bf16") -> Precision:
    """The precision that keeps a frozen base as a `BitsAndBytesConfig` of transformers says, for `tz.shard`.

    The model itself is loaded without that config: what it says of storage is done when weights are sharded.

    Args:
        quantization: the config, or a mapping of its keys, such as the `quantization_config` of a config.json.
        precision: of all else, but for `compute`, which is `bnb_4bit_compute_dtype` where that is given.

    Raises:
        BadInput: 8 bits, FP4, or modules that are left out by name.
    """
    given = quantization if isinstance(quantization, Mapping) else vars(quantization)
    said = {key.removeprefix("_"): value for key, value in given.items()}
    if not said.get("load_in_4bit"):
        raise BadInput(
            "This quantization config does not have load_in_4bit, and a base is kept in 4 bits alone: set it."
        )
    if (kind := said.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise BadInput(
            f"bnb_4bit_quant_type is {kind!r} (fp4 unless it is given), and a base is kept in NF4 alone: set it to "
            "'nf4'."
        )
    if skipped := said.get("llm_int8_skip_modules"):
        raise BadInput(
            f"llm_int8_skip_modules names {listed([*map(repr, skipped)], 5)}, and here what lies outside of the blocks "
            "is left in 16 bits, such as the head, and nothing else by name: leave it out."
        )
    form = FrozenFormat.NF4_DOUBLE if said.get("bnb_4bit_use_double_quant") else FrozenFormat.NF4
    base = Precision.named(precision) if isinstance(precision, str) else precision
    compute = said.get("bnb_4bit_compute_dtype") or base.compute
    return replace(
        base, frozen=form, compute=compute if isinstance(compute, torch.dtype) else DTYPES[dtype_named(compute)]
    )


def prepare_adapters(model: nn.Module) -> None:
    """Check that `tz.shard` can take `model`, and on the meta device see to it that adapters begin as PEFT's do.

    To be called between `get_peft_model` and `tz.shard`: needed for a model on the meta device, whose adapters would
    otherwise be drawn like the weights of the base.

    Raises:
        BadInput: not a PEFT model, a quantized base, prompts that are learnt, or an initialisation that needs weights.
    """
    base = _base_of(model)
    if getattr(base, "is_quantized", False) or any(not p.is_floating_point() for p in base.parameters()):
        raise BadInput(
            "The base of this PEFT model is quantized already, which cannot be sharded. Load it without a "
            "quantization_config, and give tz.shard a precision whose frozen is 'nf4': it keeps the base in 4 bits, "
            "divided by the ranks."
        )
    for config in _peft(model).peft_config.values():
        if config.is_prompt_learning:
            raise BadInput(f"Adapters of type {config.peft_type.value} add prompts; use one that adds to layers: LoRA.")
    if any(parameter.is_meta for parameter in model.parameters()):
        _initialise_as_peft(model, base)


def _initialise_as_peft(model: nn.Module, base: nn.Module) -> None:
    """Give the adapters on the meta device their own initial values, instead of the base model's."""
    from peft.tuners.lora import LoraLayer

    config, own = next(iter(_peft(model).peft_config.values())), set()
    if config.peft_type.value != "LORA" or config.init_lora_weights not in (True, "gaussian") or config.use_dora:
        raise BadInput(
            "On the meta device only plain LoRA adapters with init_lora_weights True or 'gaussian' can be initialised. "
            "Build the model on a real device for others."
        )
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            if layer.lora_embedding_A:
                raise BadInput(
                    "LoRA on an embedding cannot be initialised on the meta device: leave it out of targets."
                )
            for name, down in layer.lora_A.items():
                up, std = layer.lora_B[name], 1 / layer.r[name]
                up.reset_parameters = _filling(up, nn.init.zeros_)
                if config.init_lora_weights == "gaussian":
                    down.reset_parameters = _filling(down, functools.partial(nn.init.normal_, std=std))
                own |= {id(up), id(down)}
    drawn: Any = getattr(base, "_init_weights", None)
    method = None if drawn is None else weakref.WeakMethod(drawn)

    def init_weights(module: nn.Module) -> None:
        if method is not None and id(module) not in own and (draw := method()) is not None:
            draw(module)

    model._init_weights = init_weights  # type: ignore[assignment]


def _filling(module: nn.Module, fill: Callable[[Tensor], object]) -> Callable[[], None]:
    """`fill` on the module's weight, to come: it is still on the meta device."""
    reference = weakref.ref(module)

    def reset_parameters() -> None:
        live: Any = reference()
        fill(live.weight)

    return reset_parameters


def save_adapter(model: nn.Module, folder: str | Path, adapter: str = "default") -> None:
    """Write an adapter of a sharded model as a PEFT folder, in the precision of its master weights. Collective.

    Args:
        folder: appears when it is complete; it must not exist.

    Raises:
        BadInput: `folder` exists, or the adapter is of a kind that cannot be taken apart by name.
        SaveFailed: a file could not be written; nothing is left.
    """
    from safetensors.torch import save_file

    saved = _saved_names(model, adapter)
    values = {name: value.to("cpu", copy=True) for name, value in whole_weights(model, saved.values())}
    tensors = {name: values[parameter] for name, parameter in saved.items()}

    def write() -> None:
        if dist.get_rank() == 0:
            with new_folder(Path(folder), sum(tensor.nbytes for tensor in tensors.values())) as partial:
                _write_config(model, adapter, partial)
                save_file(tensors, str(partial / ADAPTER_FILE), metadata={"format": "pt"})

    together(write, SaveFailed)


def _write_config(model: nn.Module, adapter: str, folder: Path) -> None:
    """adapter_config.json, as PEFT writes it."""
    config, base = copy.deepcopy(_peft(model).peft_config[adapter]), _base_of(model)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    described = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else described)


def load_adapter(model: nn.Module, folder: str | Path, adapter: str = "default") -> None:
    """Load a PEFT folder into an adapter that a sharded model already has. Optimizer state stays. Collective.

    Raises:
        BadInput: no safetensors (pickled weights are never read), or an adapter of other settings, names or shapes.
    """
    together(lambda: _load_adapter(model, Path(folder), adapter), Misuse)


def _load_adapter(model: nn.Module, folder: Path, adapter: str) -> None:
    from peft import PeftConfig
    from safetensors.torch import load_file

    if not (folder / ADAPTER_FILE).is_file():
        raise BadInput(f"'{folder}' holds no {ADAPTER_FILE}. Give a folder that save_adapter or PEFT wrote.")
    theirs, ours = PeftConfig.from_pretrained(str(folder)), _peft(model).peft_config[adapter]
    tensors, saved = load_file(str(folder / ADAPTER_FILE)), _saved_names(model, adapter)
    shapes = {name: each.shape for each in ModelState(model).parameters() for name in each.names}
    wanted = {name: shapes[parameter] for name, parameter in saved.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{key} is {getattr(theirs, key, None)!r} there and {getattr(ours, key, None)!r} here"
        for key in SCALES
        if getattr(theirs, key, None) != getattr(ours, key, None)
    ]
    wrong += [
        f"{name} is {found.get(name, 'not there')} and should be {wanted.get(name, 'absent')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if wrong:
        raise BadInput(
            f"The adapter in '{folder}' is not one of this model ({len(wrong)} differences): {listed(wrong, 5, ';')}. "
            f"Build the model with get_peft_model(base, LoraConfig.from_pretrained({str(folder)!r})), and shard that."
        )
    model.load_state_dict({parameter: tensors[name] for name, parameter in saved.items()}, strict=False)


def save_merged(model: nn.Module, folder: str | Path, adapter: str = "default") -> None:
    """Write the base with a LoRA adapter added to its weights as a model folder; the model stays as it is. Collective.

    Memory: the model in host memory on rank 0, one parameter elsewhere. Weights keep the dtype that the base has.

    Raises:
        BadInput: `folder` exists, or an adapter that is more than a product added to a matrix (DoRA, embeddings,
            convolutions, biases of its own, modules_to_save), or on a matrix that other modules have, too.
        SaveFailed: a file could not be written; nothing is left.
    """
    layers, base = dict(_mergeable(model, adapter)), _base_of(model)
    own = _saved_names(model, adapter).values()
    pairs = [name for name in own if ".lora_A." in name or ".lora_B." in name]
    deltas = {name: value.to("cpu", copy=True) for name, value in whole_weights(model, pairs)}
    names = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    state: dict[str, Tensor] = {}
    for name, value in whole_weights(model, names):
        if dist.get_rank() == 0:
            value = value.to("cpu", copy=True)
            layer = name.removesuffix(f"{BASE_LAYER}weight")
            if layer != name and layer in layers:
                down, up = (deltas[f"{layer}.lora_{side}.{adapter}.weight"] for side in "AB")
                product = up @ down
                product = product.T if layers[layer].fan_in_fan_out else product
                value = (value + product * layers[layer].scaling[adapter]).to(value.dtype)
            state[base_name(name)] = value
    state |= {base_name(b.name): b.tensor.cpu() for b in persistent_buffers(model)}

    def write() -> None:
        if dist.get_rank() == 0:
            with new_folder(Path(folder), sum(tensor.nbytes for tensor in state.values())) as partial:
                base.save_pretrained(str(partial), state_dict=state)

    together(write, SaveFailed)


def _mergeable(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """The LoRA layers by name; refuses what is not a product of two matrices on a matrix."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    shared = [names for names in parameter_names(model) if len(names) > 1]
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            plain = isinstance(module, LoraLayer) and adapter in module.lora_A
            weight = getattr(module.get_base_layer(), "weight", None) if plain else None
            if tied := next((names for names in shared if f"{name}{BASE_LAYER}weight" in names), None):
                raise BadInput(
                    f"{name} has its matrix in common with {listed([each for each in tied if name not in each])}, to "
                    "which the adapter does not belong. Use save_adapter, or untie them before get_peft_model."
                )
            if weight is None or weight.ndim != 2 or module.lora_variant.get(adapter) or module.lora_bias.get(adapter):
                raise BadInput(
                    f"{name} ({type(module).__name__}) cannot be merged under sharding. Use save_adapter, and "
                    "merge in one process: PeftModel.from_pretrained(base, folder).merge_and_unload()."
                )
            yield name, module


def _peft(model: nn.Module) -> Any:
    """`model` as PEFT's class. Raises: `BadInput` for another."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise BadInput(
            f"This {type(model).__name__} has no adapters. Call get_peft_model(model, config) before tz.shard."
        )
    return model


def _base_of(model: nn.Module) -> Any:
    return _peft(model).get_base_model()


def _saved_names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Names in a PEFT folder → names of parameters. PEFT says which, shown an empty tensor for each parameter."""
    from peft import get_peft_model_state_dict

    configs = _peft(model).peft_config
    if adapter not in configs:
        raise BadInput(f"The model has no adapter {adapter!r}; it has {sorted(configs)}.")
    shown = {name: torch.empty(0) for name, _ in model.named_parameters(remove_duplicate=False)}
    names = {id(tensor): name for name, tensor in shown.items()}
    with _unread(model):
        kept = get_peft_model_state_dict(model, state_dict=shown, adapter_name=adapter, save_embedding_layers=False)
    if unknown := [name for name, tensor in kept.items() if id(tensor) not in names]:
        raise BadInput(
            f"An adapter of type {configs[adapter].peft_type.value} computes what it saves ({unknown[0]!r}), so it "
            "cannot be saved or loaded under sharding. Use LoRA."
        )
    return {name: names[id(tensor)] for name, tensor in kept.items()}


@contextlib.contextmanager
def _unread(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of `modules_to_save` list their tensors without reading them: PEFT wants the names."""
    from peft.utils.other import ModulesToSaveWrapper

    copies = [
        copy for m in model.modules() if isinstance(m, ModulesToSaveWrapper) for copy in m.modules_to_save.values()
    ]
    for module in copies:
        module.state_dict = functools.partial(module.state_dict, keep_vars=True)
    try:
        yield
    finally:
        for module in copies:
            del module.state_dict
