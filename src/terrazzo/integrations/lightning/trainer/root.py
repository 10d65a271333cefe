"""What is sharded in place of a LightningModule."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

__all__ = ["Root"]


class Root(nn.Module):
    """A root around a LightningModule, so that its steps run inside one forward of the root.

    It has the module's own children, parameters and buffers, under the same names. Calling the module outside a step
    goes through the root, too.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_step"] = module  # not a child
        self._running = False
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._running else self(*args, **kwargs)

        module.forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; Lightning puts the step that is due in its place."""
        self._running = True
        try:
            return self.__dict__["_step"].forward(*args, **kwargs)
        finally:
            self._running = False
