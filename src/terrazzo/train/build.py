"""From a configuration to what `tz.shard` takes beside a model: plan, offload, precision, mesh, optimizer.

And to the learning rate, as torch's `LambdaLR`, so that any optimizer and any checkpoint understands it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from terrazzo.config import BatchConfig, Config, MeshConfig, OffloadConfig, OptimizerConfig, ScheduleConfig
from terrazzo.engine import (
    DTYPE_FIELDS,
    ELEMENTWISE,
    OFFLOADS,
    PLANS,
    Offload,
    Plan,
    Precision,
    check_optimizer,
)
from terrazzo.errors import BadInput, did_you_mean

__all__ = [
    "batch_arithmetic",
    "build_offload",
    "build_optimizer",
    "build_plan",
    "build_precision",
    "build_schedule",
    "check_settings",
    "construct",
    "learning_rate_share",
    "mesh_shape",
    "optimizer_class",
]

OFFLOADED_STATES = ("weight", "grad", "optim")


# -- plan, offload, precision, mesh, batch ---------------------------------------------------------------------------


def build_plan(config: Config) -> Plan:
    """The plan by its name or from its four places; raises `BadInput` when it breaks the prefix rule."""
    plan = config.plan
    if plan.weight is not None and plan.between is not None and plan.grad is not None and plan.optim is not None:
        built = Plan(plan.weight, plan.between, plan.grad, plan.optim)
    else:
        built = Plan.named(plan.name or "zero3")
    built = _with_tiers(built, config.offload)
    if built.needs_replicas and plan.mesh.dp_replicate == 1:
        raise BadInput(
            f"plan {built.name} splits states inside of groups of ranks, and the groups hold copies of each other, but"
            " this run has one group: set plan.mesh.dp_replicate to the number of groups, such as"
            " plan.mesh.dp_replicate=2, or take a plan that needs none, such as plan=zero3."
        )
    built.resolve(("dp_replicate", "dp_shard") if plan.mesh.dp_replicate > 1 else ("dp_shard",))
    return built


def _with_tiers(plan: Plan, offload: OffloadConfig) -> Plan:
    """The plan with the tiers of the offload section in place of its own, under the name of a preset if it is one."""
    given = {state: getattr(offload, state) for state in OFFLOADED_STATES}
    if not any(given.values()):
        return plan
    base = plan.base
    moved = plan.on(**given, name=f"{base}@custom")
    names = [base, *(f"{base}@{offload}" for offload in OFFLOADS)] if base in PLANS else []
    return next((Plan.named(name) for name in names if Plan.named(name).places() == moved.places()), moved)


def build_offload(config: Config) -> Offload:
    """How offloaded states are kept and updated; raises `BadInput` for an update that clipping or scaling rules out."""
    section = config.offload
    scaled = build_precision(config).loss_scaling is not None
    obstacle = "clips gradients (train.clip)" if config.train.clip else "scales the loss (precision)" if scaled else ""
    if section.step == "backward" and obstacle:
        raise BadInput(
            f"offload.step is 'backward', which updates each unit before the others' gradients exist, but this run"
            f" {obstacle}, which needs all of them first: use offload.step=overlapped, which is exact too, or"
            f" {'train.clip=null' if config.train.clip else 'another precision'}."
        )
    step = ("overlapped" if obstacle else "backward") if section.step == "auto" else section.step
    return Offload(
        path=section.path,
        step=step,
        threads=section.threads,
        pin=section.pin,
        direct=section.direct,
        block_mib=section.block_mib,
        depth=section.depth,
        digest=section.digest,
    )


def build_precision(config: Config) -> Precision:
    """The named precision with the given dtypes in place of its own."""
    base = Precision.named(config.precision.name)
    given = {key: getattr(config.precision, key) for key in DTYPE_FIELDS}
    dtypes: dict[str, Any] = {key: given[key] or getattr(base, key) for key in DTYPE_FIELDS}
    return Precision(**dtypes, loss_scaling=base.loss_scaling)


def mesh_shape(mesh: MeshConfig, world_size: int) -> tuple[int, ...]:
    """(replicas, shards), or (ranks,); raises `BadInput` when they do not multiply to the number of ranks."""
    shard = mesh.dp_shard or world_size // mesh.dp_replicate
    if mesh.dp_replicate * shard != world_size:
        given = f" × plan.mesh.dp_shard {mesh.dp_shard}" if mesh.dp_shard else ""
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise BadInput(
            f"plan.mesh.dp_replicate {mesh.dp_replicate}{given} does not make up the {world_size} ranks of this run:"
            f" their product must be {world_size}. dp_replicate can be any of {', '.join(map(str, fits))}, with"
            f" dp_shard left out or {world_size} divided by it."
        )
    return (mesh.dp_replicate, shard) if mesh.dp_replicate > 1 else (shard,)


def batch_arithmetic(batch: BatchConfig, world_size: int) -> int:
    """Micro-batches per step on each rank; raises `BadInput` with the arithmetic when they do not come out whole."""
    at_once = batch.micro_batch * world_size
    if batch.global_batch % at_once:
        below = batch.global_batch // at_once * at_once
        options = [str(size) for size in (below, below + at_once) if size]
        raise BadInput(
            f"batch.global_batch {batch.global_batch} does not divide: batch.micro_batch {batch.micro_batch} ×"
            f" {world_size} ranks = {at_once} sequences at once, and {batch.global_batch} / {at_once} ="
            f" {batch.global_batch / at_once:.4g} micro-batches. Use global_batch {' or '.join(options)}, or another"
            " micro_batch or number of ranks."
        )
    return batch.global_batch // at_once


# -- optimizer and learning rate -------------------------------------------------------------------------------------


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The torch.optim class of that name, its options checked; raises `BadInput` for unknown names."""
    known = {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if config.name not in known:
        same = next((name for name in known if name.lower() == config.name.lower()), config.name)
        if same in known:
            check_optimizer(object.__new__(known[same]))  # else its name would be suggested, and then refused
        shardable = sorted(name for name, value in known.items() if value in ELEMENTWISE)
        raise BadInput(
            f"optimizer.name is '{config.name}', which torch.optim does not have.{did_you_mean(same, shardable)} Those"
            f" that can be sharded: {', '.join(shardable)}."
        )
    chosen: type[torch.optim.Optimizer] = known[config.name]
    options = set(inspect.signature(chosen).parameters) - {"params", "lr", "weight_decay"}
    for option in config.options:
        if option not in options:
            raise BadInput(
                f"optimizer.options.{option} is not an argument of torch.optim.{config.name}."
                f"{did_you_mean(option, options)} Known: {', '.join(sorted(options))}."
            )
    return chosen


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over `model`'s trainable parameters, in a group with and a group without weight decay.

    Parameters with fewer than two dimensions (norms, biases) and those named by `no_decay` are not decayed.

    Raises:
        BadInput: a glob of `no_decay` that no parameter's name matches, or settings that the optimizer refuses.
    """
    names = [name for name, _ in model.named_parameters()]
    for glob in config.no_decay:
        if not any(fnmatchcase(name, glob) for name in names):
            raise BadInput(
                f"optimizer.no_decay has '{glob}', which no parameter's name matches.{did_you_mean(glob, names)} Names"
                f" are such as {', '.join(names[:3])}; * stands for any part of one. Correct it, or remove it."
            )
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def decays(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim >= 2 and not any(fnmatchcase(name, glob) for glob in config.no_decay)

    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    if "weight_decay" not in inspect.signature(optimizer_class(config)).parameters:
        groups = [{"params": [p for _, p in named]}]
    return construct(config, [group for group in groups if group["params"]])


def check_settings(config: OptimizerConfig) -> None:
    """Raise `BadInput` for an optimizer that cannot be sharded or does not accept its settings."""
    chosen = optimizer_class(config)
    check_optimizer(object.__new__(chosen))
    # torch's own add_param_group imports its compiler, which takes a second that only the ranks need to wait.
    keep = {"add_param_group": lambda optimizer, group: optimizer.param_groups.append(optimizer.defaults | group)}
    _construct(type(chosen.__name__, (chosen,), keep), config, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])


def construct(config: OptimizerConfig, params: Sequence[Any]) -> torch.optim.Optimizer:
    """The optimizer of that name over parameters or param groups; raises `BadInput` for settings it refuses."""
    return _construct(optimizer_class(config), config, params)


def _construct(
    chosen: type[torch.optim.Optimizer], config: OptimizerConfig, params: Sequence[Any]
) -> torch.optim.Optimizer:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in config.options.items()}
    arguments: dict[str, Any] = {"lr": config.lr, **options}
    try:
        return chosen(params, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"torch.optim.{config.name} does not accept these settings: {error}.") from error


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
    # The last step (steps - 1) gets exactly the final share; later ones, if any, keep it.
    progress = min(1.0, (step - start) / max(1, steps - 1 - start))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.name == "cosine" else 1 - progress
    return config.final_fraction + (1 - config.final_fraction) * remaining


def build_schedule(config: ScheduleConfig, steps: int, optimizer: Optimizer) -> LambdaLR:
    """A torch scheduler over every parameter group of `optimizer`; call its `step()` after each optimizer step."""
    return LambdaLR(optimizer, partial(learning_rate_share, config, steps))
