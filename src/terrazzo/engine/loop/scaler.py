"""Dynamic loss scaling, invisible to the user's loop.

The model's outputs, and what its modules put aside, pass through `scale_backward`: forward, it hands them over in fp32;
backward, it multiplies what comes back by the scale before anything is rounded to fp16. The engine divides the scale
out when it divides by the `Denominator`. The loss itself is never scaled, so neither are logged losses, gradients seen
after backward, or norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.plan.precision import LossScaling
from terrazzo.errors import Diverged, Misuse

__all__ = ["Denominator", "LossScaler", "scale_backward"]


_LARGEST = 2.0**127  # the largest power of two that fp32 has


class LossScaler:
    """The running scale.

    Attributes:
        scale: factor on gradients inside the model; a power of two.
        skipped_steps: steps that an overflow on any rank has cancelled, since the start.
        in_use: whether gradients of the backward now under way have been multiplied by it.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.settings, self.scale = settings, settings.init
        self.skipped_steps = 0
        self.in_use = False
        self._good_steps = 0
        self._patience = settings.hysteresis

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step.

        Raises:
            Diverged: on an overflow at the minimum scale.
        """
        settings = self.settings
        if not overflow:
            self._good_steps += 1
            if self._good_steps % settings.interval == 0:
                self.scale = min(self.scale * settings.growth, _LARGEST)
                self._patience = settings.hysteresis
            return
        self.skipped_steps += 1
        self._good_steps = 0
        self._patience = max(0, self._patience - 1)
        if self._patience > 0:
            return
        if self.scale <= settings.minimum:
            raise Diverged(
                f"Gradients overflowed at the minimum loss scale {settings.minimum:g} ({self.skipped_steps} steps "
                "skipped so far): they are non-finite at any scale. Lower the learning rate, clip, or train in bf16."
            )
        self.scale = max(settings.minimum, self.scale * settings.backoff)

    def state(self) -> dict[str, float]:
        """Plain numbers to restore by `load_state`."""
        return {
            "scale": self.scale,
            "skipped_steps": self.skipped_steps,
            "good_steps": self._good_steps,
            "patience": self._patience,
        }

    def load_state(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.skipped_steps = int(state["skipped_steps"])
        self._good_steps = int(state["good_steps"])
        self._patience = max(0, int(state["patience"]))  # releases that counted on below zero have saved that


@dataclass
class Denominator:
    """What sums of gradients are divided by, once they are finished.

    Attributes:
        ranks: over which gradients are summed.
        chosen: by the user, in place of their number; None where that is meant.
        scaler: of what has been multiplied in; None where gradients are not scaled.
        used: whether gradients have been divided that no step has taken yet.
    """

    ranks: int
    chosen: float | None = None
    scaler: LossScaler | None = None
    used: bool = False

    def choose(self, chosen: float | None) -> None:
        """Set what the user chooses.

        Raises:
            Misuse: where gradients have been divided by another one already.
        """
        if self.used and chosen != self.chosen:
            raise Misuse(
                f"The gradient denominator was set to {chosen!r} when gradients had been divided by {self.unscaled:g} "
                "already, in the last micro-batch's backward. Call set_gradient_denominator before that backward, or "
                "behind optimizer.step() or zero_grad() for the next step."
            )
        self.chosen = chosen

    @property
    def unscaled(self) -> float:
        """The part that the user chooses; the same on every rank."""
        return float(self.ranks if self.chosen is None else self.chosen)

    @property
    def is_mean(self) -> bool:
        """Whether it is the number of ranks alone: what each adds to its gradients is then added to their mean."""
        return self.chosen is None and self.scaler is None

    def numbers(self) -> dict[str, float]:
        """What ranks must have alike."""
        scaling = self.scaler.state() if self.scaler else {}
        return {"denominator": self.unscaled, **{f"loss scaler's {name}": each for name, each in scaling.items()}}

    def __call__(self) -> float:
        self.used = True
        return self.unscaled * (self.scaler.scale if self.scaler else 1.0)


class _ScaleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, scaler: LossScaler) -> Tensor:
        ctx.scaler, ctx.dtype = scaler, output.dtype
        return output.to(torch.float32, copy=True)  # never the input itself: the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.scaler.in_use = True
        return (grads[0] * ctx.scaler.scale).to(ctx.dtype), None


def scale_backward(output: Tensor, scaler: LossScaler) -> Tensor:
    """`output` in fp32, whose gradient is multiplied by the scale on its way in."""
    scaled: Tensor = _ScaleBackward.apply(output, scaler)  # type: ignore[no-untyped-call]
    return scaled
