"""What an optimizer has beside parameters and states."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["NOT_HYPER", "STEP_HOOKS", "Settings", "frozen"]

NOT_HYPER = ("params", "param_names")
"""Keys of a param group whose values are no hyper-parameters."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch keeps what is called around an optimizer's step, and around that of its base class."""

_NOT_OWN = ("state", "param_groups", "defaults", "step", "_driver", *STEP_HOOKS)


class Settings:
    """What its class keeps in attributes, such as a count of steps, and its hyper-parameters, as they are now.

    Args:
        optimizer: may change them afterwards, in place too.

    Attributes:
        attributes: by name, those that are neither torch's nor the engine's.
        groups: hyper-parameters of each param group.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.attributes: dict[str, Any] = {key: frozen(value) for key, value in _own(vars(optimizer)).items()}
        self.groups = [
            {key: frozen(value) for key, value in group.items() if key not in NOT_HYPER}
            for group in optimizer.param_groups
        ]

    def put_back(self, optimizer: Optimizer) -> None:
        """Undo what was changed since, or added; tensors stay the same objects."""
        _put_back(vars(optimizer), _own(vars(optimizer)).keys() - self.attributes.keys(), self.attributes)
        for group, earlier in zip(optimizer.param_groups, self.groups, strict=True):
            _put_back(group, group.keys() - earlier.keys() - {*NOT_HYPER}, earlier)


def frozen(value: Any) -> Any:
    """As it is now, whoever changes it in place: tensors, and dicts, lists, tuples and sets of them."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: frozen(each) for key, each in value.items()}
    return type(value)(map(frozen, value)) if type(value) in (list, tuple, set) else value


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
