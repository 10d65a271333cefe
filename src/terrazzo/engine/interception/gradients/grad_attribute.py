"""When `parameter.grad` is there for loops that look at it: from the end of a backward pass to the begin of the next.

What is there then is a `GradientStandIn` of each gradient, so that `torch.nn.utils.clip_grad_norm_` and any optimizer's
`zero_grad` do what they say. What it is asked, `GradientAnswers` answer; what users put in its place, `grad_edits`
finds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from terrazzo.engine.autograd.listeners import eager, inside_backward
from terrazzo.engine.buckets.parameters.gradient_hooks import register_gradient_hook
from terrazzo.engine.hooks.backward_hooks import GradientListener
from terrazzo.engine.interception.gradients.grad_edits import refuse_set_before, refuse_unused, take_over_dropped
from terrazzo.engine.interception.gradients.gradient_answers import GradientAnswers
from terrazzo.engine.interception.gradients.shown_gradients import ShownGradients
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.engine.runtime.weak import weakly

__all__ = ["show_gradients"]


def show_gradients(model: nn.Module, engine: Engine) -> None:
    """From now on, `.grad` of a sharded model's parameters is not None where there is a gradient.

    Not inside its forward, where a compiler would ask them what they cannot answer.
    """
    attributes = _GradAttributes(engine)
    model.register_forward_pre_hook(eager(weakly(attributes, _GradAttributes.begin)), prepend=True)
    model.register_forward_hook(eager(weakly(attributes, _GradAttributes.show_again)), always_call=True)


class _GradAttributes(GradientListener):
    """The `.grad` of all parameters of one model, shown and hidden; its hooks keep this alive."""

    def __init__(self, engine: Engine) -> None:
        self._buckets, self._answers = engine.trainable(), GradientAnswers(engine)
        self._stand_ins: list[ShownGradients] = []  # of all buckets, once there has been a gradient
        self._shown: list[ShownGradients] = []
        engine.hooks.listen_to_gradients(self)
        # Autograd must not add to a stand-in. Where weights are gathered for backward, its begin is noticed before any
        # gradient comes; elsewhere a gradient may be the first that is seen of it.
        before = weakly(self, _GradAttributes.begin)
        for unit in (unit for unit in engine.units if not unit.weights.regathered):
            for bucket in unit.trainable():
                for member in bucket.members:
                    register_gradient_hook(member.parameter, before)

    def _all_stand_ins(self) -> list[ShownGradients]:
        if not self._stand_ins:
            firsts = [0]
            for bucket in self._buckets:
                firsts.append(firsts[-1] + len(bucket.members))
            pairs = zip(self._buckets, firsts, strict=False)
            self._stand_ins = [ShownGradients(self._answers, *each) for each in pairs]
        return self._stand_ins

    # -- in the order of a step --------------------------------------------------------------------------------

    def begin(self, *_: Any) -> None:
        """A forward begins, or a gradient comes, maybe before anything has announced a backward pass."""
        if self._shown:
            self._hide()

    def show_again(self, *_: Any) -> None:
        """A forward has ended; one inside backward recomputes a part of it."""
        if not inside_backward() and any(bucket.gradient.finished.changes for bucket in self._buckets):
            self.end_backward()

    def begin_backward(self) -> None:
        """A backward pass begins, and adds to the `.grad` that users have set."""
        self._hide()
        refuse_set_before(self._all_stand_ins(), self._answers.engine)

    def _hide(self) -> None:
        """A pass begins, which must find no stand-in."""
        if self._shown:
            take_over_dropped(self._shown, self._answers)
            with plainly():
                for entry in self._shown:
                    entry.hide()
            self._shown = []

    def end_backward(self) -> None:
        """Every gradient gets its stand-in."""
        with plainly():
            self._shown = [entry for entry in self._all_stand_ins() if entry.wanted]
            for entry in self._shown:
                entry.show()

    def before_use(self) -> None:
        """Gradients are about to be clipped or taken, which are those of the engine alone."""
        refuse_unused(self._all_stand_ins(), self._answers.engine)
        take_over_dropped(self._shown, self._answers)
