"""The line that a model brings itself, through which its values go from stage to stage."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["own_line"]


def own_line(model: nn.Module) -> list[str] | None:
    """Globs over names of modules: of a model with `pipeline_line()`, of an `nn.Sequential`, or of one of transformers.

    The latter says by `base_model_pp_plan` which modules its values go through; its head comes last. None where nothing
    says so.
    """
    own: Any = model
    if callable(getattr(model, "pipeline_line", None)):
        return list(own.pipeline_line())
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    theirs = getattr(model, "pp_plan", None) if hasattr(model, "config") else None
    if not theirs:
        return None
    base = f"{own.base_model_prefix}."
    modules = {name: model.get_submodule(name) for name in sorted(theirs, key=lambda name: not name.startswith(base))}
    return [f"{name}.*" if isinstance(module, nn.ModuleList) else name for name, module in modules.items()]
