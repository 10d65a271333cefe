"""DeepSpeed's stage 0 in bf16 or fp16: fp32 weights beside the model, that do not say whose they are.

They are recognised by their values: rounded, they are the model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from terrazzo.checkpoint.importers.deepspeed.files import Tree, need
from terrazzo.checkpoint.importers.deepspeed.flat import FlatGroup, Stripes, state_of
from terrazzo.checkpoint.importers.deepspeed.trained import Trained, add_groups
from terrazzo.checkpoint.importers.parts.values import Values

__all__ = ["read_unsharded"]

_SAMPLE_NUMEL = 512


def read_unsharded(optimizer: Tree, model: Mapping[str, Values], where: str) -> Trained | None:
    """What an optimizer of stage 0 with fp32 weights of its own trained; None if it could be of other parameters too.

    Args:
        optimizer: its state dict. Of each group there is one flat tensor, or one tensor for each parameter.
        model: the parameters that it may have trained, in the model's order.

    Raises:
        BadInput: it is damaged; `where` names the file.
    """
    flat = "fp32_groups_flat" in optimizer
    saved = need(optimizer, "fp32_groups_flat" if flat else "fp32_groups", list, where)
    groups = [[group] if flat else need(saved, index, list, where) for index, group in enumerate(saved)]
    inner = need(optimizer, "optimizer_state_dict", dict, where)
    trained = Trained()
    parts: list[list[str]] = []
    for index in range(len(groups)):
        weights = [need(groups[index], i, Values, where) for i in range(len(groups[index]))]  # type: ignore[type-abstract]
        names = _only_fit(weights, model, flat)
        if names is None:
            return None
        for part, part_names in zip(weights, names, strict=True):
            _add(trained, FlatGroup([part], [state_of(inner, len(parts))], where), part, part_names, model)
            parts.append(part_names)
    add_groups(trained, inner, parts, where)
    return trained


def _add(trained: Trained, group: FlatGroup, part: Values, names: Sequence[str], model: Mapping[str, Values]) -> None:
    first = 0
    for name in names:
        place = Stripes(model[name].shape, share=part.numel, first=first)
        trained.states[name] = group.states_at(name, place)
        first += place.numel
    trained.notes += group.notes


def _only_fit(parts: Sequence[Values], model: Mapping[str, Values], flat: bool) -> list[list[str]] | None:
    """The names of the parameters in each part, if the first and the last way in the model's order are the same."""
    ways = [_fit(parts, model, flat, backwards) for backwards in (False, True)]
    return ways[0] if ways[0] == ways[1] else None


def _fit(parts: Sequence[Values], model: Mapping[str, Values], flat: bool, backwards: bool) -> list[list[str]] | None:
    left = iter(list(model)[::-1] if backwards else list(model))
    names_of_parts = []
    for part in parts[::-1] if backwards else parts:
        names: list[str] = []
        done = 0
        while done < part.numel or not (flat or names):
            fitting = (name for name in left if _rounds_to(part, done, model[name], flat, backwards))
            name = next(fitting, None)
            if name is None:
                return None
            names.append(name)
            done += model[name].numel
        names_of_parts.append(names[::-1] if backwards else names)
    return names_of_parts[::-1] if backwards else names_of_parts


def _rounds_to(part: Values, done: int, weight: Values, flat: bool, backwards: bool) -> bool:
    """Whether the elements of `part` after `done` (from the end: before) could be what `weight` was rounded from."""
    first = part.numel - done - weight.numel if backwards else done
    if not 0 <= first <= part.numel - weight.numel or not weight.numel or not (flat or part.shape == weight.shape):
        return False
    count = min(weight.numel, _SAMPLE_NUMEL)
    return all(
        torch.equal(part.read(first + start, first + start + count).to(weight.dtype), weight.read(start, start + count))
        for start in (0, weight.numel - count)
    )
