"""The base of a sharded model with a LoRA adapter added to its weights, as a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.checkpoint.exporters.new_folder import new_folder
from terrazzo.engine import engine_of, parameters_by_names, persistent_buffers, whole_weights
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.exchange import together
from terrazzo.integrations.peft.names import BASE_LAYER, base_model, base_name, saved_names
from terrazzo.integrations.peft.prepare import require_unmerged
from terrazzo.messages import listed

__all__ = ["save_merged"]

_PARTS = ("lora_A", "lora_embedding_A")
"""Where a layer has its adapters by name."""


def save_merged(model: nn.Module, folder: str | Path, adapter: str = "default") -> None:
    """Write the base with a LoRA adapter added to its weights as a model folder; the model stays as it is. Collective.

    Memory: the model in host memory on rank 0, one parameter elsewhere. Weights keep the dtype that the base has, those
    in 4 bits too.

    Raises:
        BadInput: `folder` exists, or an adapter that is more than a product added to a matrix (DoRA, embeddings,
            convolutions, biases of its own, modules_to_save), or on a matrix that other modules have, too; adapters
            that were merged before `tz.shard`; a model in stages.
        SaveFailed: a file could not be written; nothing is left.
    """
    if (axes := engine_of(model).axes).stage_axis:
        raise BadInput(
            f"save_merged of a model in stages (pp {axes.size(axes.stage_axis)}) would add adapters that each rank has "
            "of its own layers alone. Use save_adapter, and merge in one process: PeftModel.from_pretrained(base,"
            " folder).merge_and_unload()."
        )
    require_unmerged(model)
    layers, base = dict(_mergeable(model, adapter)), base_model(model)
    own = saved_names(model, adapter).values()
    pairs = [name for name in own if ".lora_A." in name or ".lora_B." in name]
    deltas = {name: value.to("cpu", copy=True) for name, value in whole_weights(model, pairs)}
    names = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    engine, state = engine_of(model), dict[str, Tensor]()
    packed = {slot.name for bucket in engine.buckets() if bucket.spec.packed is not None for slot in bucket.slots}
    for name, value in whole_weights(model, names):
        if dist.get_rank() == 0:
            value = value.to("cpu", engine.precision.weight if name in packed else value.dtype, copy=True)
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

    shared = [names for names in parameters_by_names(model) if len(names) > 1]
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not any(adapter in getattr(module, part) for part in _PARTS):
            continue  # of other adapters alone: its base stays as it is
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
