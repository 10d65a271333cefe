"""Linear layers that multiply in 8-bit floats, as `precision.linears` says."""

from __future__ import annotations

import torch
from torch import nn

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.engine import DTYPE_NAMES
from terrazzo.errors import BadInput
from terrazzo.marks import Mark
from terrazzo.train.settings.plan import build_precision

__all__ = ["convert_linears", "linears_note", "try_linears"]

_CONVERTED = Mark[tz.nn.Converted]("terrazzo_converted")


def convert_linears(model: nn.Module, config: Config) -> None:
    """Convert a model's linear layers, on the meta device; raises `BadInput` if none can be."""
    precision = config.precision
    if precision.recipe is None:
        return
    try:
        _CONVERTED.leave(model, tz.nn.float8(model, precision.recipe, skip=precision.skip))
    except BadInput as error:
        raise BadInput(f"precision.linears is '{precision.linears}'. {error}") from None


def linears_note(model: nn.Module) -> list[str]:
    """A line on what has been converted and what not; none without conversion."""
    return [f"precision: {converted}" for converted in _CONVERTED.all_in(model)]


def try_linears(config: Config, device: torch.device) -> None:
    """Raise `BadInput` if a rank's device cannot multiply as `precision.linears` says."""
    if config.precision.recipe is None:
        return
    compute = build_precision(config).compute
    if device.type != "cpu" and compute != torch.bfloat16:
        raise BadInput(
            f"precision.linears is '{config.precision.linears}', whose products come back in bf16 on {device}, and "
            f"precision.compute is {DTYPE_NAMES[compute]}: set precision.name to bf16."
        )
    tz.nn.float8(nn.Linear(16, 16), config.precision.recipe, skip=[], device=device)
