"""`initialize` and `add_config_arguments`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from terrazzo.engine import DTYPES
from terrazzo.errors import BadInput
from terrazzo.integrations.deepspeed import zero
from terrazzo.integrations.deepspeed.accelerator import local_device
from terrazzo.integrations.deepspeed.comm import init_distributed
from terrazzo.integrations.deepspeed.optimizers import Parameters, build_optimizer
from terrazzo.integrations.deepspeed.requested import Configuration, read
from terrazzo.integrations.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from terrazzo.integrations.deepspeed.runtime.engine import DeepSpeedEngine
from terrazzo.integrations.deepspeed.runtime.lr_schedules import SCHEDULES
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["add_config_arguments", "initialize"]

DeepSpeedConfig = str | os.PathLike[str] | dict[str, Any] | None


def initialize(  # structure: signature fixed by DeepSpeed
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: DeepSpeedConfig = None,
    mesh_param: Any = None,
    config_params: DeepSpeedConfig = None,
) -> tuple[DeepSpeedEngine, Optimizer | None, DeepSpeedDataLoader | None, Any]:
    """Shard a model as a DeepSpeed JSON says. Collective.

    Args:
        args: its `deepspeed_config` is the JSON's path, if `config` is not given; its `local_rank` is set.
        model: changed in place; in bf16 and fp16 its parameters are cast first, as DeepSpeed does.
        optimizer: an elementwise torch optimizer, or a callable that builds one from `model_parameters`; default: the
            JSON's.
        model_parameters: parameters or param groups; default: all of the model's.
        training_data: a map-style data set, of which the returned loader gives this rank's micro-batches.
        lr_scheduler: a scheduler, or a callable that builds one from the optimizer; default: the JSON's.
        config: a path, or a dict. `config_params` is its old name.

    Returns:
        The engine, its optimizer, the loader and the schedule, as `deepspeed.initialize` does.

    Raises:
        BadInput: keys or arguments that cannot be honoured; all are named, and the model is as it was. What `tz.shard`
            refuses of the model or its optimizer it refuses behind the cast.
    """
    _check_arguments(model, mpu, mesh_param)
    assert model is not None
    chosen = _config_of(args, config if config is not None else config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    configuration = read(chosen, dist.get_world_size(), local_device())
    _check_schedule(configuration)
    configuration.setup.check(model)
    if hasattr(args, "local_rank"):
        args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for note in configuration.notes:
        warn_once(note)
    built = _optimizer(optimizer, model.parameters() if model_parameters is None else model_parameters, configuration)

    _cast(model, configuration)
    configuration.setup.shard(model, built)
    zero.SHARDED[model] = None
    engine = DeepSpeedEngine(model, built, configuration)
    engine.lr_scheduler = _scheduler(lr_scheduler, built, configuration)
    engine.collate_fn = collate_fn
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "read by Terrazzo")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON")
    return parser


def _check_arguments(model: object, mpu: object, mesh_param: object) -> None:
    if not isinstance(model, nn.Module):
        raise BadInput(f"initialize(model=...) is {type(model).__name__}; pass the torch.nn.Module to train.")
    if mesh_param is not None:
        raise BadInput(
            "initialize(mesh_param=...) asks for sequence parallelism; this integration trains data-parallel only."
        )
    for name in ("model", "tensor_model", "pipeline_model"):
        size = getattr(mpu, f"get_{name}_parallel_world_size", lambda: 1)()
        if size > 1:
            raise BadInput(f"initialize(mpu=...) has {name}-parallel groups of {size}; set them to 1.")


def _config_of(args: object, config: DeepSpeedConfig) -> str | os.PathLike[str] | dict[str, Any]:
    named = getattr(args, "deepspeed_config", None)
    if named is not None and config is not None:
        raise BadInput(f"A configuration was given twice, as --deepspeed_config {named} and as config=: leave one out.")
    chosen = named if config is None else config
    if chosen is None:
        raise BadInput("No configuration: pass config= to initialize(), or --deepspeed_config to the script.")
    return chosen


def _cast(model: nn.Module, configuration: Configuration) -> None:
    """DeepSpeed rounds parameters to 16 bits before it makes masters of them; buffers only if told to."""
    dtype = configuration.setup.precision.compute
    if dtype in (torch.bfloat16, torch.float16):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    buffers = configuration.description["precision.buffers"]
    if buffers.origin == "file":
        wanted = DTYPES[buffers.value]
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(wanted)


def _optimizer(
    passed: Optimizer | Callable[[Any], Optimizer] | None, parameters: Parameters, configuration: Configuration
) -> Optimizer | None:
    """What the script passes, or builds by a function; else the JSON's, if it names one."""
    if isinstance(passed, Optimizer):
        built: Optimizer = passed
    elif passed is not None:
        built = passed(parameters)
    elif (name := configuration.description.value("optimizer.name")) is not None:
        built = build_optimizer(name, configuration.section("optimizer.params"), parameters)
    else:
        return None
    built.param_groups[:] = [group for group in built.param_groups if group["params"]]
    return built


def _check_schedule(configuration: Configuration) -> None:
    name = configuration.get("scheduler.type")
    if name is not None and name not in SCHEDULES:
        raise BadInput(f"scheduler.type is {name!r}; this integration has {', '.join(SCHEDULES)}.")


def _scheduler(passed: Any, optimizer: Optimizer | None, configuration: Configuration) -> Any:
    if passed is not None:
        made = callable(passed) and not hasattr(passed, "step")
        return passed(optimizer) if made else passed
    name = configuration.get("scheduler.type")
    if name is None or optimizer is None:
        return None
    return SCHEDULES[name](optimizer, **configuration.section("scheduler.params"))
