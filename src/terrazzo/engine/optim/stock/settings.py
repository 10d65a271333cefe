"""What an optimizer has beside parameters and states: attributes, hyper-parameters, hooks around its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["NOT_HYPER", "STEP_HOOKS", "Settings", "hyper_parameters", "move_step_hooks", "snapshot"]

NOT_HYPER = ("params", "param_names")
"""Keys of a param group whose values are no hyper-parameters."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch keeps what is called around an optimizer's step, and around that of its base class."""

_NOT_OWN = ("state", "param_groups", "defaults", "step", "_driver", *STEP_HOOKS)


class Settings:
    """Attributes of an optimizer's class, such as a count of steps, and its hyper-parameters, as they are now.

    Args:
        optimizer: may change them afterwards, in place too.

    Attributes:
        attributes: by name, those that are neither torch's nor the engine's.
        groups: hyper-parameters of each param group.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.attributes: dict[str, Any] = {key: snapshot(value) for key, value in _own(vars(optimizer)).items()}
        self.groups = [
            {key: snapshot(value) for key, value in group.items() if key not in NOT_HYPER}
            for group in optimizer.param_groups
        ]

    def put_back(self, optimizer: Optimizer) -> None:
        """Undo what was changed since, or added; tensors stay the same objects."""
        _put_back(vars(optimizer), _own(vars(optimizer)).keys() - self.attributes.keys(), self.attributes)
        for group, earlier in zip(optimizer.param_groups, self.groups, strict=True):
            _put_back(group, group.keys() - earlier.keys() - {*NOT_HYPER}, earlier)


def hyper_parameters(optimizer: Optimizer) -> dict[str, float | Tensor]:
    """Every number in its param groups, by where it is; tensors of one element as they are."""
    settings = [(number, *item) for number, group in enumerate(optimizer.param_groups) for item in group.items()]
    entries = [(f"param_groups[{number}][{key!r}]", value) for number, key, value in settings if key not in NOT_HYPER]
    return {key: number for each in entries for key, number in _numbers(*each)}


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float | Tensor]]:
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(f"{key}[{index}]", part)
    elif isinstance(value, int | float):
        yield key, float(value)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield key, value


def move_step_hooks(optimizer: Optimizer, last_before: int, first_after: int) -> None:
    """Call the hook of one number last before each step, and that of another first after it."""
    before, after = (vars(optimizer)[name] for name in STEP_HOOKS)
    before.move_to_end(last_before)
    after.move_to_end(first_after, last=False)


def snapshot(value: Any) -> Any:
    """A copy of `value` that nobody changes in place: of tensors, and of dicts, lists, tuples and sets of them."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: snapshot(each) for key, each in value.items()}
    return type(value)(map(snapshot, value)) if type(value) in (list, tuple, set) else value


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key not in _NOT_OWN}


def _put_back(attributes: dict[str, Any], added: set[str], earlier: dict[str, Any]) -> None:
    for key in added:
        del attributes[key]
    for key, value in earlier.items():
        if isinstance(value, Tensor) and isinstance(attributes.get(key), Tensor):
            attributes[key].copy_(value)
        else:
            attributes[key] = value
