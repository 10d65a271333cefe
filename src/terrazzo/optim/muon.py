"""Muon for the matrices of hidden layers, and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW, adamw

from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number
from terrazzo.optim.matrix_optimizer import MatrixOptimizer
from terrazzo.optim.optimizer_step import ParamGroup, refuse_complex

__all__ = ["Muon"]

_OF_ADAMW = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")


class Muon(MatrixOptimizer):
    """Momentum of each matrix made orthogonal by Newton-Schulz iterations (Jordan et al. 2024), with AdamW beside it.

    Bit by bit `torch.optim.Muon` on the groups of matrices and `torch.optim.AdamW` on the others, in any loop and under
    every plan of `tz.shard`: a matrix goes whole to one rank for its update, in bf16, in which it is made orthogonal.
    With weights and gradients in bf16 two things differ. With `nesterov=False` torch divides the momentum that it keeps
    by its norm, in place, which is a fault; here that stays as it is. And behind `tz.shard` the update of a matrix with
    more rows than columns is added with one rounding, where torch's kernel has two.

        matrices, others = tz.optim.hidden_matrices(model)
        optimizer = tz.optim.Muon(matrices, others, lr=0.02, adamw={"lr": 3e-4})

    Args:
        matrices: parameters of two dims or more, or param groups of them; of more than two, the last two are a matrix.
        others: parameters, or param groups of them, that AdamW steps.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of the matrices, as of
            `torch.optim.Muon`; a param group may have its own.
        adamw: settings of `torch.optim.AdamW` for the others: `lr`, `betas`, `eps`, `weight_decay`, `amsgrad`,
            `maximize`, `foreach`, `capturable`, `differentiable`, `fused`.

    Raises:
        BadInput: for parameters of fewer than two dims, or complex ones, among the matrices, for settings that there
            are not, and in a step for a sparse gradient.
    """

    def __init__(  # structure: signature fixed by torch.optim.Muon
        self,
        matrices: Any,
        others: Any = (),
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adamw: dict[str, Any] | None = None,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        settings |= {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        settings |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self._of = {"muon": _checked("muon", settings), "adamw": _checked("adamw", {} if adamw is None else adamw)}
        groups = [*_groups(matrices, "muon"), *_groups(others, "adamw")]
        super().__init__(groups, {})

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As torch's; `algorithm` in it is "muon" (which it is if left out) or "adamw"."""
        algorithm = param_group.setdefault("algorithm", "muon")
        if algorithm not in self._of:
            raise BadInput(f"A param group's algorithm is {algorithm!r}: give 'muon' or 'adamw'.")
        for key, value in self._of[algorithm].items():
            param_group.setdefault(key, value)
        _checked(algorithm, {key: param_group[key] for key in self._of[algorithm]})
        if algorithm == "muon":  # AdamW steps them
            refuse_complex(self, param_group)
        super().add_param_group(param_group)
        flat = [tuple(each.shape) for each in param_group["params"] if each.ndim < 2]
        if algorithm == "muon" and flat:
            del self.param_groups[-1]
            raise BadInput(
                f"tz.optim.Muon was given a parameter of shape {flat[0]} among the matrices: they have two dims or "
                "more. Give it among the others, which AdamW steps; tz.optim.hidden_matrices(model) tells them apart."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_of": self._of}  # torch's leaves out what it does not know

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, for copies, pickles and state dicts. Those of torch's own classes lack some settings."""
        before = vars(self).get("param_groups", [])
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            own = before[index]["algorithm"] if index < len(before) else "muon"
            for key, value in self._of[group.setdefault("algorithm", own)].items():
                group.setdefault(key, value)

    def is_of_matrices(self, group: ParamGroup) -> bool:
        return bool(group["algorithm"] == "muon")

    def may_be_fused(self, group: ParamGroup) -> bool:
        return not self.is_of_matrices(group)

    def prepare(self, group: ParamGroup, state: MutableMapping[str, Any], gradient: Tensor) -> Tensor:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        mean: Tensor = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        return update.to(self.wire, copy=not group["nesterov"])

    def whole(self, group: ParamGroup, matrix: Tensor) -> Tensor:
        a, b, c = group["ns_coefficients"]
        tall = matrix.size(0) > matrix.size(1)
        update = matrix.T if tall else matrix
        update.div_(update.norm().clamp(min=group["eps"]))
        for _ in range(group["ns_steps"]):
            gram = update @ update.T
            gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            update = torch.addmm(update, gram, update, beta=a)
        return update.T if tall else update

    @classmethod
    def workspace_bytes(cls, shape: tuple[int, int]) -> int:
        return (math.prod(shape) + 2 * min(shape) ** 2) * cls.wire.itemsize

    def apply(self, group: ParamGroup, values: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        rate = float(group["lr"])
        values.mul_(1 - rate * group["weight_decay"])
        values.add_(update, alpha=-_adjusted(rate, group["adjust_lr_fn"], shape))

    def step_elements(self, group: ParamGroup) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        beta1, beta2 = group["betas"]
        settings = {"has_complex": AdamW._init_group(self, group, *lists), "beta1": beta1, "beta2": beta2}  # type: ignore[arg-type]
        step: Any = adamw
        step(*lists, **settings, **{key: group[key] for key in _OF_ADAMW})


def _checked(algorithm: str, settings: ParamGroup) -> ParamGroup:
    """All settings of a group, with the defaults of torch's class.

    Raises:
        BadInput: torch's class refuses them, or takes what cannot be: an infinite rate, a number of iterations below 0,
            a momentum of 1 or more, or other than three coefficients.
    """
    kind: Any = {"muon": torch.optim.Muon, "adamw": AdamW}[algorithm]
    try:
        checked: ParamGroup = kind([nn.Parameter(torch.zeros(1, 1))], **settings).defaults
        if not math.isfinite(checked["lr"]):
            raise ValueError(f"lr is {checked['lr']!r}: give a finite number")
        if algorithm == "muon" and not (is_count(checked["ns_steps"], 0) and checked["ns_steps"] < 100):
            raise ValueError(f"ns_steps is {checked['ns_steps']!r}: give a whole number from 0 to 99")
        if algorithm == "muon" and not _are_coefficients(checked["ns_coefficients"]):
            raise ValueError(f"ns_coefficients is {checked['ns_coefficients']!r}: give three numbers")
        if algorithm == "muon" and not checked["momentum"] < 1:
            raise ValueError(f"momentum is {checked['momentum']!r}: give a number from 0 to less than 1")
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"tz.optim.Muon does not accept these settings: {str(error).rstrip('.')}.") from None
    return {key: value for key, value in checked.items() if key != "decoupled_weight_decay"}


def _are_coefficients(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(is_number(each) for each in value)


def _adjusted(rate: float, how: str | None, shape: tuple[int, int]) -> float:
    rows, columns = shape
    if how == "match_rms_adamw":
        return rate * (0.2 * math.sqrt(max(rows, columns)))
    return rate * math.sqrt(max(1, rows / columns))


def _groups(params: Any, algorithm: str) -> list[ParamGroup]:
    """Param groups from parameters, with names or without, or from groups of them."""
    which = "matrices" if algorithm == "muon" else "others"
    if isinstance(params, Tensor):  # it would be taken for its rows
        raise BadInput(
            f"tz.optim.Muon was given a {type(params).__name__} as {which}: give a list, of parameters or of param "
            "groups, [...]."
        )
    params = list(params)
    are_groups = [isinstance(each, dict) for each in params]
    if any(are_groups) and not all(are_groups):
        raise BadInput(
            f"tz.optim.Muon was given param groups and parameters in one list of {which}: put the parameters into a "
            'group as well, {"params": [...]}.'
        )
    if any(are_groups):
        return [{**group, "algorithm": algorithm} for group in params]
    return [{"params": params, "algorithm": algorithm}] if params else []
