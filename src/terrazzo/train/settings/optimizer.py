"""Builds the optimizer of a configuration, a class of `torch.optim` or `tz.optim` by name, and its schedule.

The schedule is torch's `LambdaLR`, so that any optimizer and any checkpoint can handle it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from terrazzo.config import OptimizerConfig, ScheduleConfig
from terrazzo.engine import ELEMENTWISE, check_elementwise
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.name_globs import matches_any, matches_one
from terrazzo.optim import HEADS, AdEMAMix, Division, Lion, Muon, divided

__all__ = [
    "build_optimizer",
    "build_schedule",
    "check_names",
    "check_settings",
    "construct",
    "division_of",
    "group_names",
    "learning_rate_share",
    "optimizer_class",
    "resume_schedule",
    "steps_matrices",
]


_OWN = (Lion, AdEMAMix, Muon)
"""The optimizers of tz.optim."""


_NOT_HERE = {
    "capturable": "a run captures no step in a CUDA graph",
    "differentiable": "a run takes no gradient through a step",
}
"""Options of torch's optimizers that make a step slower or impossible, for what a run does not do."""


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class of torch.optim or tz.optim that a configuration names; its options are checked.

    Raises:
        BadInput: no such class, an optimizer that cannot be sharded, an option that it does not take, or an option of
            another type; checked in this order, as another optimizer takes other options.
    """
    known = {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    known |= {each.__name__: each for each in _OWN}
    if config.name not in known:
        same = next((name for name in known if name.lower() == config.name.lower()), config.name)
        if same in known:
            check_elementwise(known[same])  # else its name would be suggested, and then refused
        shardable = sorted(name for name, value in known.items() if value in (*ELEMENTWISE, *_OWN))
        raise BadInput(
            f"optimizer.name is '{config.name}', which neither torch.optim nor tz.optim has."
            f"{did_you_mean(same, shardable)} Those that can be sharded: {', '.join(shardable)}."
        )
    chosen: type[torch.optim.Optimizer] = known[config.name]
    try:
        check_elementwise(chosen)
    except BadInput as error:
        raise BadInput(f"optimizer.name: {error}") from None
    stepped = _of_the_rest(config)
    parameters = inspect.signature(known[stepped.name]).parameters
    options = set(parameters) - {"params", "lr", "weight_decay"}
    of = (
        config.name
        if stepped is config
        else f"{stepped.name}, which steps what is no matrix; of matrices there is optimizer.muon"
    )
    for option, value in config.options.items():
        if option not in options:
            raise BadInput(
                f"optimizer.options.{option} is not an argument of {of}."
                f"{did_you_mean(option, options)} Known: {', '.join(sorted(options))}."
            )
        if value and option in _NOT_HERE:
            raise BadInput(f"optimizer.options.{option} is {value!r}, and {_NOT_HERE[option]}: remove it.")
        if (kind := _other_kind(parameters[option], value)) is not None:
            raise BadInput(f"optimizer.options.{option} is {value!r}, and is {kind} to {stepped.name}: write it so.")
    return chosen


def steps_matrices(config: OptimizerConfig) -> bool:
    """Whether the optimizer updates whole matrices, and everything else as AdamW does."""
    return config.name == Muon.__name__


def _of_the_rest(config: OptimizerConfig) -> OptimizerConfig:
    """The settings of the optimizer that steps everything, or everything but matrices."""
    return config.model_copy(update={"name": "AdamW"}) if steps_matrices(config) else config


def _other_kind(parameter: inspect.Parameter, value: Any) -> str | None:
    """The expected type of an option, if `value` has another one that an optimizer would silently accept."""
    default = parameter.default
    if value is None and default is None:
        return None
    if isinstance(default, bool) or "bool" in str(parameter.annotation):
        return None if isinstance(value, bool) else f"true or false{' or null' if default is None else ''}"
    if isinstance(default, int | float) and not (isinstance(value, int | float) and not isinstance(value, bool)):
        return "a number"
    return None


def build_optimizer(config: OptimizerConfig, model: nn.Module, groups: Collection[str] = ()) -> torch.optim.Optimizer:
    """The optimizer over `model`'s trainable parameters, in a group with and a group without weight decay.

    Parameters with fewer than two dimensions (norms, biases), unless `decay` is "all", and those named by `no_decay`
    are not decayed. Matrices that are updated whole are in two such groups of their own, before the others.

    Args:
        groups: those of the model of which `model` is a stage, as `group_names` has them: one of which there are no
            parameters here is there, too, so that all stages have the same.

    Raises:
        BadInput: settings that the optimizer refuses.
    """
    kept = {name: group for name, group in _groups(config, model).items() if group["params"] or name in groups}
    if not steps_matrices(config):
        return construct(config, list(kept.values()))
    muon = config.muon
    settings: dict[str, Any] = {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.ns_steps}
    return Muon(
        [group for name, group in kept.items() if name.startswith(_MATRICES)],
        [group for name, group in kept.items() if not name.startswith(_MATRICES)],
        lr=config.lr if muon.lr is None else muon.lr,
        adjust_lr_fn=muon.adjust_lr,
        adamw={"lr": config.lr, **_options(config)},
        **settings,
    )


def group_names(config: OptimizerConfig, model: nn.Module) -> list[str]:
    """The param groups of a model that is whole, for `build_optimizer` of its stages."""
    return [name for name, group in _groups(config, model).items() if group["params"]]


_MATRICES = "matrices"
"""What the names of groups begin with that are updated whole."""


def _groups(config: OptimizerConfig, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Param groups by name, which may have no parameters."""

    def decays(name: str, parameter: nn.Parameter) -> bool:
        named = config.decay == "all" or parameter.ndim >= 2
        return named and not matches_any(name, config.no_decay)

    def in_two(title: str, named: Sequence[tuple[str, nn.Parameter]], weight_decay: float) -> dict[str, dict[str, Any]]:
        return {
            title: {"params": [p for n, p in named if decays(n, p)], "weight_decay": weight_decay},
            f"{title} without decay": {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        }

    if steps_matrices(config):
        division, of_matrices = division_of(config, model), config.muon.weight_decay
        decay = config.weight_decay if of_matrices is None else of_matrices
        others = in_two("others", division.others, config.weight_decay)
        return in_two(_MATRICES, division.matrices, decay) | others
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if "weight_decay" not in inspect.signature(optimizer_class(config)).parameters:
        return {"all": {"params": [p for _, p in named]}}
    return in_two("all", named, config.weight_decay)


def division_of(config: OptimizerConfig, model: nn.Module) -> Division:
    """The division of a model's parameters into matrices that are updated whole, and others."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def here(globs: Sequence[str]) -> list[str]:
        return [glob for glob in globs if matches_one(names, glob)]

    others = HEADS if config.muon.others is None else here(config.muon.others)
    return divided(model, others, here(config.muon.matrices))


def check_names(config: OptimizerConfig, names: Sequence[str]) -> None:
    """Raise `BadInput` for a glob that matches none of the `names` of parameters.

    They are those of the whole model: a stage of a pipeline has only a part of them.
    """
    muon = config.muon
    globs_of = {"no_decay": config.no_decay, "muon.matrices": muon.matrices, "muon.others": muon.others or []}
    for key, glob in ((key, glob) for key, globs in globs_of.items() for glob in globs):
        if not matches_one(names, glob):
            raise BadInput(
                f"optimizer.{key} has '{glob}', which no parameter's name matches.{did_you_mean(glob, names)} Names"
                f" are such as {', '.join(names[:3])}; * stands for any part of one. Correct it, or remove it."
            )


def check_settings(config: OptimizerConfig) -> None:
    """Raise `BadInput` for an optimizer that cannot be sharded, or does not step with its settings."""
    optimizer_class(config)
    config = _of_the_rest(config)  # of matrices the schema checks them
    chosen = optimizer_class(config)
    if (error := _error_of_a_step(chosen, config)) is None:
        return
    for option, value in config.options.items():
        others = {key: other for key, other in config.options.items() if key != option}
        if _error_of_a_step(chosen, config.model_copy(update={"options": others})) is None:
            default = inspect.signature(chosen).parameters[option].default
            raise BadInput(
                f"optimizer.options.{option} is {value!r}, with which {chosen.__name__} makes no step ({_said(error)}):"
                f" its default is {default!r}."
            ) from error
    raise _not_accepted(config, error) from error


def _error_of_a_step(chosen: type[torch.optim.Optimizer], config: OptimizerConfig) -> Exception | None:
    """What an optimizer raises as it is made for a small parameter and steps it; whatever it is, given such options."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    # torch's add_param_group, and what is wrapped around its step, import its compiler: seconds, only for ranks to wait
    keep = {"add_param_group": lambda optimizer, group: optimizer.param_groups.append(optimizer.defaults | group)}
    try:
        made = type(chosen.__name__, (chosen,), keep)([{"params": [parameter]}], **_arguments(config))
        with torch.set_grad_enabled(bool(made.defaults.get("differentiable", False))):
            inspect.unwrap(chosen.step)(made)
    except Exception as error:
        return error
    return None


def construct(config: OptimizerConfig, params: Sequence[Any]) -> torch.optim.Optimizer:
    """The optimizer over parameters or param groups; raises `BadInput` for settings that it refuses.

    For one that updates whole matrices, it is the optimizer of everything else.
    """
    config = _of_the_rest(config)
    return _construct(optimizer_class(config), config, params)


def _construct(
    chosen: type[torch.optim.Optimizer], config: OptimizerConfig, params: Sequence[Any]
) -> torch.optim.Optimizer:
    try:
        return chosen(params, **_arguments(config))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_accepted(config, error) from error


def _not_accepted(config: OptimizerConfig, error: Exception) -> BadInput:
    return BadInput(f"{config.name} does not accept these settings: {_said(error)}.")


def _said(error: Exception) -> str:
    """An error in words, with its kind where the message alone says little."""
    text = str(error).rstrip(".")
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _arguments(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, **_options(config)}


def _options(config: OptimizerConfig) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.options.items()}


def learning_rate_share(config: ScheduleConfig, steps: int, step: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of a run of `steps`, as a share of the peak.

    Warm-up is linear and its first step already learns: share 1/warmup_steps at step 0. Cosine decay is Loshchilov &
    Hutter 2017 (arXiv:1608.03983) without restarts; warm-up-stable-decay is Hu et al. 2024 (arXiv:2404.06395).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start = config.warmup_steps
    if config.name == "wsd":
        start = max(start, steps - (config.decay_steps or max(1, steps // 5)))
    if config.name == "constant" or step < start:
        return 1.0
    # The last step (steps - 1) gets exactly the final share; later ones, if any, keep it. A run's only step learns.
    falling = steps - 1 - start
    progress = min(1.0, (step - start) / falling) if falling > 0 else float(steps > 1)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.name == "cosine" else 1 - progress
    return config.final_fraction + (1 - config.final_fraction) * remaining


def build_schedule(config: ScheduleConfig, steps: int, optimizer: Optimizer) -> LambdaLR:
    """A torch scheduler over every parameter group of `optimizer`; call its `step()` after each optimizer step."""
    return LambdaLR(optimizer, partial(learning_rate_share, config, steps))


def resume_schedule(schedule: LambdaLR, state: dict[str, Any]) -> None:
    """Continue after `state`, a scheduler's state dict, with its peak rates, but this schedule's own shares.

    Until then the optimizer has the next step's rate by the schedule of the run that saved it.
    """
    schedule.load_state_dict(state)
    for group, peak, share in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * share(schedule.last_epoch)
