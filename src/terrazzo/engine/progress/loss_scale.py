"""The loss scale, invisible to the user's loop: none, or under fp16 a number that grows and shrinks step by step.

`scaled_passes` multiplies gradients by it inside of the model; the engine divides it out when it divides by the
`Denominator`. The loss itself is never scaled, so neither are logged losses, gradients seen after backward, or norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

from terrazzo.engine.plan.precision import LossScaling
from terrazzo.errors import BadInput, Diverged, Misuse
from terrazzo.given_numbers import is_number, is_power_of_two
from terrazzo.messages import listed

__all__ = ["DynamicLossScale", "LossScale"]

_GIVE_SAVED = "Give what optimizer.scaler_state() gave."
_LARGEST = 2.0**127  # the largest power of two that fp32 has


class LossScale:
    """What steps tell the loss scale of a model, and ask of it; this one scales nothing.

    Attributes:
        scales: whether gradients inside of the model are multiplied by it, and are others than those outside.
        scale: that factor.
        skipped_steps: steps that an overflow on any rank has cancelled, since the start.
    """

    scales: ClassVar[bool] = False
    scale = 1.0
    skipped_steps = 0

    def skips(self, overflowed: Callable[[], bool]) -> bool:
        """Whether a step is not to be taken.

        Args:
            overflowed: whether a gradient on any rank is not finite; collective, and the host waits for it.

        Raises:
            Diverged: on an overflow at the minimum scale.
        """
        return False

    def state(self) -> dict[str, float]:
        """Plain numbers to restore by `load_state`; none where nothing is scaled."""
        return {}

    def load_state(self, state: Mapping[str, float], accumulating: bool) -> None:
        """Go on with what `state` gave, if that was any.

        Args:
            accumulating: whether there are gradients that an earlier scale is in.

        Raises:
            BadInput: for what `state` cannot have given.
            Misuse: there.
        """


class DynamicLossScale(LossScale):
    """A power of two that grows while gradients are finite, and shrinks after steps where they were not."""

    scales = True

    def __init__(self, settings: LossScaling) -> None:
        self.settings, self.scale = settings, settings.init
        self._good_steps = 0
        self._patience = settings.hysteresis

    def skips(self, overflowed: Callable[[], bool]) -> bool:
        overflow = overflowed()
        self.update(overflow)
        return overflow

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
        return {
            "scale": self.scale,
            "skipped_steps": self.skipped_steps,
            "good_steps": self._good_steps,
            "patience": self._patience,
        }

    def load_state(self, state: Mapping[str, float], accumulating: bool) -> None:
        if not state:
            return
        if accumulating:
            raise Misuse(
                "A loss scale was loaded while gradients were still being accumulated, which have been multiplied by "
                "the one before. Load it before the step's first micro-batch, or call optimizer.zero_grad() first."
            )
        if missing := self.state().keys() - state.keys():
            raise BadInput(f"The state of a loss scale lacks {listed(sorted(missing))}. {_GIVE_SAVED}")
        scale, *counts = (state[key] for key in ("scale", "skipped_steps", "good_steps", "patience"))
        if not (is_number(scale) and is_power_of_two(scale)):
            raise BadInput(f"The loss scale to load is {scale!r}, and a power of two rounds nothing. {_GIVE_SAVED}")
        if not all(is_number(count) and math.isfinite(count) for count in counts):
            raise BadInput(f"The state of a loss scale has {dict(state)}, which are to be counts. {_GIVE_SAVED}")
        self.scale = float(scale)
        self.skipped_steps, self._good_steps = (max(0, int(count)) for count in counts[:2])
        self._patience = max(0, int(counts[2]))  # releases that counted on below zero have saved that
