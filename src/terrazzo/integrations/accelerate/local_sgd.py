"""Accelerate's `LocalSGD`, which is refused where a script makes it, and not in its first step.

A script has the class from Accelerate itself, and its constructor is the one place that is given the Accelerator before
any step: so the class is changed for the whole process. Accelerators of other classes are passed on as they are.
"""

from __future__ import annotations

import functools

import accelerate
from accelerate.local_sgd import LocalSGD
from torch import nn

from terrazzo.errors import BadInput

__all__ = ["refuse_local_sgd"]


def refuse_local_sgd(kind: type) -> None:
    """From now on `LocalSGD` takes no Accelerator of this class, but where it would do nothing."""
    original = LocalSGD.__init__

    @functools.wraps(original)
    def checked(
        self: LocalSGD,
        accelerator: accelerate.Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if enabled and isinstance(accelerator, kind) and accelerator.num_processes > 1:  # type: ignore[attr-defined]
            raise BadInput(
                "LocalSGD lets each rank step alone and averages weights every "
                f"{local_sgd_steps} steps; ranks of a sharded model step together. Pass enabled=False, or leave it "
                "out. Ranks that accumulate talk less, too: Accelerator(gradient_accumulation_steps=..., plan='zero1')."
            )
        original(self, accelerator, model, local_sgd_steps, enabled)

    LocalSGD.__init__ = checked
