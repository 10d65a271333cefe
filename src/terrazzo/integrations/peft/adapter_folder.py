"""An adapter of a sharded model as a PEFT folder, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.checkpoint.exporters.new_folder import new_folder
from terrazzo.engine import parameter_table, whole_weights
from terrazzo.errors import BadInput, Misuse, SaveFailed
from terrazzo.exchange import together
from terrazzo.integrations.peft.names import base_model, peft_model, saved_names
from terrazzo.messages import listed

__all__ = ["load_adapter", "save_adapter"]

ADAPTER_FILE = "adapter_model.safetensors"
SCALES = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings of an adapter that its tensors' names and shapes do not tell."""


def save_adapter(model: nn.Module, folder: str | Path, adapter: str = "default") -> None:
    """Write an adapter of a sharded model as a PEFT folder, in the precision of its master weights. Collective.

    Args:
        folder: appears when it is complete; it must not exist.

    Raises:
        BadInput: `folder` exists, or the adapter is of a kind that cannot be taken apart by name.
        SaveFailed: a file could not be written; nothing is left.
    """
    from safetensors.torch import save_file

    saved = saved_names(model, adapter)
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
    config, base = copy.deepcopy(peft_model(model).peft_config[adapter]), base_model(model)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    described = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else described)


def load_adapter(model: nn.Module, folder: str | Path, adapter: str = "default") -> None:
    """Load a PEFT folder into an adapter that a sharded model already has. Optimizer state stays. Collective.

    Raises:
        BadInput: no safetensors (pickled weights are never read), or an adapter of other settings, names or shapes.
    """
    shapes = {name: each.shape for each in parameter_table(model) for name in each.names}
    values = together(lambda: _read_adapter(model, Path(folder), adapter, shapes), Misuse)
    model.load_state_dict(values, strict=False)  # collective: not while another rank may have raised


def _read_adapter(
    model: nn.Module, folder: Path, adapter: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """What the folder has for each of the model's parameters, by its name."""
    from peft import PeftConfig
    from safetensors.torch import load_file

    if not (folder / ADAPTER_FILE).is_file():
        raise BadInput(f"'{folder}' holds no {ADAPTER_FILE}. Give a folder that save_adapter or PEFT wrote.")
    theirs, ours = PeftConfig.from_pretrained(str(folder)), peft_model(model).peft_config[adapter]
    tensors, saved = load_file(str(folder / ADAPTER_FILE)), saved_names(model, adapter)
    wanted = {name: shapes[parameter] for name, parameter in saved.items()}
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{key} is {getattr(theirs, key, None)!r} there and {getattr(ours, key, None)!r} here"
        for key in SCALES
        if getattr(theirs, key, None) != getattr(ours, key, None)
    ]
    wrong += [
        f"{name} is {there.get(name, 'not there')} and should be {wanted.get(name, 'absent')}"
        for name in sorted(wanted.keys() | there.keys())
        if wanted.get(name) != there.get(name)
    ]
    if wrong:
        raise BadInput(
            f"The adapter in '{folder}' is not one of this model ({len(wrong)} differences): {listed(wrong, 5, ';')}. "
            f"Build the model with get_peft_model(base, LoraConfig.from_pretrained({str(folder)!r})), and shard that."
        )
    return {parameter: tensors[name] for name, parameter in saved.items()}
