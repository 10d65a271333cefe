"""Parameters of which a rank keeps a part: how they replace whole ones, and how their modules save and load states.

A state dict of parts would be half a model under the names of a whole one. So a module that has been cut gives none,
and takes whole tensors when it loads one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from terrazzo.engine import Record, record_of
from terrazzo.engine.buckets.parameters.gradient_hooks import has_hooks, successor
from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.errors import BadInput, Misuse

__all__ = ["check_replaceable", "replaced_by_part", "watch_states"]


def check_replaceable(name: str, module: nn.Module, attribute: str) -> None:
    """Refuse a parameter that cannot become another one: something else would go on with the whole.

    Raises:
        BadInput: there.
    """
    full, parameter = f"{name}.{attribute}", module._parameters.get(attribute)
    if parameter is None:
        raise BadInput(
            f"{full!r} is computed from other parameters (a parametrization such as weight_norm), which ranks cannot "
            f"have parts of. Give {name!r} no style, or remove that first, as by "
            "torch.nn.utils.parametrize.remove_parametrizations."
        )
    if has_hooks(parameter):
        raise BadInput(
            f"{full!r} has a hook, which would be given the gradient of this rank's part in place of the whole. "
            "Register it after tz.parallelize if a part is as good, as it is for what looks at each element alone; "
            f"or give {name!r} no style."
        )
    if parameter.grad is not None:
        raise BadInput(
            f"{full!r} has a gradient, of a backward before tz.parallelize, which would be lost. Call "
            "model.zero_grad() first, or step before."
        )


def replaced_by_part(whole: nn.Parameter, record: Record) -> nn.Parameter:
    """This rank's part, in memory of its own, with the class and attributes of the whole parameter."""
    return successor(whole, record.box.of(whole.detach()))


def watch_states(module: nn.Module, name: str) -> None:
    """Have a module that has been cut refuse to list its parts, and cut the whole tensors that it is to load."""
    module.register_state_dict_pre_hook(_Refusing(name))
    module.register_load_state_dict_pre_hook(_cut_loaded)


class _Refusing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # else parameters are asked for, not their values
            raise Misuse(
                f"state_dict() of a model that tz.parallelize has cut: this rank has a part of {self._name!r} and "
                "others alone. After tz.shard, that of the model itself, model.state_dict(), is whole on every rank; "
                "tz.full_state_dict(model) is on rank 0, tz.save_pretrained(model, folder) writes a folder for "
                "transformers, and tz.checkpoint.save(path, model, optimizer, extra) what training continues from."
            )


def _cut_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Torch has made `state` a mapping of its own."""
    for attribute, own in module._parameters.items():
        record, whole = record_of(module, attribute), state.get(f"{prefix}{attribute}")
        if record is None or whole is None or own is None or note_of(own) is not None:
            continue  # a sharded model takes whole tensors itself
        if tuple(whole.shape) == record.box.shape and not record.box.is_all:
            state[f"{prefix}{attribute}"] = record.box.of(whole)
