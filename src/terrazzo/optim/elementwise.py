"""Elementwise optimizers that torch does not have."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number
from terrazzo.optim.optimizer_step import ParamGroup, loss_of, refuse_complex, refuse_sparse

__all__ = ["AdEMAMix", "Lion"]


class _Elementwise(Optimizer):
    """Each element is updated from its own values alone, each parameter for itself."""

    elementwise = True
    _beta_count: ClassVar[int]
    """How many betas there are."""
    _counts: ClassVar[tuple[str, ...]] = ()
    """Settings that are whole numbers."""

    def __init__(self, params: Any, **settings: Any) -> None:
        self._check(settings)
        super().__init__(params, settings)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As torch's; settings of its own are checked as those of all groups are."""
        self._check({key: param_group.get(key, value) for key, value in self.defaults.items()})
        refuse_complex(self, param_group)
        super().add_param_group(param_group)

    def _check(self, settings: ParamGroup) -> None:
        for key, value in settings.items():
            if key == "betas":
                is_right = isinstance(value, list | tuple) and len(value) == self._beta_count
                is_right = is_right and all(is_number(each) and 0 <= each < 1 for each in value)
                edit = f"{self._beta_count}, each at least 0 and less than 1"
            elif key in self._counts:
                is_right, edit = is_count(value, 0), "a whole number, 0 or more"
            else:
                number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                is_right, edit = is_number(number) and 0 <= number < math.inf, "0 or more"
            if not is_right:
                raise BadInput(f"tz.optim.{type(self).__name__}: {key} is {value!r}; give {edit}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = loss_of(closure)
        refuse_sparse(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, self.state[parameter], parameter, parameter.grad)
        return loss

    @abstractmethod
    def _update(self, group: ParamGroup, state: dict[str, Any], parameter: nn.Parameter, gradient: Tensor) -> None:
        """Step one parameter; `state` is empty before its first step."""


class Lion(_Elementwise):
    """Steps by the sign of a momentum (Chen et al. 2023, arXiv 2302.06675). It keeps one number for each element.

    A rate three to ten times smaller than AdamW's, and as much more weight decay, are usual.

    Args:
        params: as of any torch optimizer.
        betas: of the average whose sign is taken, and of the average that is kept.
        weight_decay: decoupled.

    Raises:
        BadInput: for settings that are no numbers, negative or infinite, betas that are not from 0 to 1, complex
            parameters, and in a step for a sparse gradient.
    """

    _beta_count = 2

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def _update(self, group: ParamGroup, state: dict[str, Any], parameter: nn.Parameter, gradient: Tensor) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean: Tensor = state["exp_avg"]
        (first, second), rate = group["betas"], group["lr"]
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_(mean.lerp(gradient, 1 - first).sign_().mul_(rate))
        mean.lerp_(gradient, 1 - second)


class AdEMAMix(_Elementwise):
    """AdamW with a second, slow average of gradients (Pagliardini et al. 2024, arXiv 2409.03137).

    It keeps three numbers for each element.

    Args:
        params: as of any torch optimizer.
        betas: of the fast average, of the squares, and of the slow one.
        eps: added to the root of the squares.
        weight_decay: decoupled.
        alpha: weight of the slow average.
        warmup_steps: in which the weight of the slow average grows from 0, and its beta from the fast one's; the paper
            takes the whole run. 0 for none.

    Raises:
        BadInput: for settings that are no numbers, negative or infinite, betas that are not from 0 to 1, complex
            parameters, and in a step for a sparse gradient.
    """

    _beta_count = 3
    _counts = ("warmup_steps",)

    def __init__(  # structure: signature fixed by the paper's settings
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        alpha: float = 5.0,
        warmup_steps: int = 0,
    ) -> None:
        settings = {"eps": eps, "weight_decay": weight_decay, "alpha": alpha, "warmup_steps": warmup_steps}
        super().__init__(params, lr=lr, betas=betas, **settings)

    def _update(self, group: ParamGroup, state: dict[str, Any], parameter: nn.Parameter, gradient: Tensor) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq", "exp_avg_slow")})
        state["step"] += 1
        step, rate, (first, second, _) = int(state["step"].item()), group["lr"], group["betas"]
        alpha, third = _slow(group, step)
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_slow"].lerp_(gradient, 1 - third)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**step)).add_(group["eps"])
        update = (state["exp_avg"] / (1 - first**step)).add_(state["exp_avg_slow"], alpha=alpha).div_(root)
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_(update.mul_(rate))


def _slow(group: ParamGroup, step: int) -> tuple[float, float]:
    """Weight and beta of the slow average in a step, counted from 1. They are constant after the warm-up."""
    (first, _, third), steps = group["betas"], group["warmup_steps"]
    if step >= steps or not 0 < first < third:
        return group["alpha"] * min(1.0, step / steps if steps else 1.0), third
    share, low, high = step / steps, math.log(first), math.log(third)
    return group["alpha"] * share, math.exp(low * high / ((1 - share) * high + share * low))
