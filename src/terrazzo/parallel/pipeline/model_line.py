"""The line that a model brings itself, through which its values go from stage to stage."""

from __future__ import annotations

from typing import Any

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.messages import listed
from terrazzo.parallel.peft_adapters import base_of

__all__ = ["own_line", "own_tied"]


def own_line(model: nn.Module) -> list[str] | None:
    """Globs over names of modules: of a model with `pipeline_line()`, of an `nn.Sequential`, or of one of transformers.

    The latter says by `base_model_pp_plan` which modules its values go through; its head comes last. None where nothing
    says so. With adapters of peft around it a model has the line of its base.
    """
    base, prefix = base_of(model)
    globs = _line_of(base)
    return None if globs is None else [f"{prefix}{glob}" for glob in globs]


def own_tied(model: nn.Module) -> list[str]:
    """The parameters that a model reads behind its line, as its `pipeline_tied()` says; none without one."""
    base, prefix = base_of(model)
    own: Any = base
    return [f"{prefix}{name}" for name in own.pipeline_tied()] if callable(getattr(base, "pipeline_tied", None)) else []


def _line_of(model: nn.Module) -> list[str] | None:
    own: Any = model
    if callable(getattr(model, "pipeline_line", None)):
        return list(own.pipeline_line())
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    theirs = getattr(model, "pp_plan", None) if hasattr(model, "config") else None
    if not theirs:
        return None
    base = f"{own.base_model_prefix}."
    if absent := sorted(set(theirs) - {name for name, _ in model.named_modules()}):
        raise BadInput(
            f"The pp_plan of {type(model).__name__} names {listed(absent)}, which it does not have: give its line"
            " yourself, as tz.Pipeline(line=[...])."
        )
    modules = {name: model.get_submodule(name) for name in sorted(theirs, key=lambda name: not name.startswith(base))}
    return [f"{name}.*" if isinstance(module, nn.ModuleList) else name for name, module in modules.items()]
