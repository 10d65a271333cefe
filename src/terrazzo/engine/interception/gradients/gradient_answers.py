"""What stand-ins of gradients are answered: norms and other measures over all ranks, and changes in place.

The norms of all parameters are computed together, and once until a gradient changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.counted_once import sums_over
from terrazzo.engine.interception.measuring.measured import measured_gradient
from terrazzo.engine.interception.measuring.measures import Spread
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.clipping import norm_dtype, norms
from terrazzo.engine.progress.noted_numbers import NotedNumbers
from terrazzo.errors import Misuse

__all__ = ["GradientAnswers", "GradientKey"]

GradientKey = tuple[Bucket, int]
"""A bucket and the index of one of its members."""


class GradientAnswers:
    """The gradients of one model, as each `GradientStandIn` asks for its own.

    Attributes:
        keys: all of its gradients, in the order of their numbers.
    """

    def __init__(self, engine: Engine) -> None:
        self._weak_engine = weakref.ref(engine)
        self._buckets = engine.trainable()
        self.keys = [(bucket, index) for bucket in self._buckets for index in range(len(bucket.members))]
        self._norms: dict[float, dict[GradientKey, Tensor]] = {}
        self._measured = 0
        self._latest = _LatestNumbers(())

    @property
    def engine(self) -> Engine:
        """The engine of the model, which is there for as long as anybody asks for its gradients."""
        engine = self._weak_engine()
        assert engine is not None, "the model is gone"
        return engine

    def norm(self, key: GradientKey, kind: float) -> Tensor:
        """The norm of one parameter's gradient over all ranks, 0-d, as of `norm_dtype`. Collective."""
        if self.engine.axes.stage_axis:  # torch's own clipping would scale each stage by the norm of that stage
            raise Misuse(
                f"The norm of {_name(key)!r} was asked for, of a model in stages (pp): a norm over the gradients that "
                "this rank has is not that of the model. Use tz.clip_grad_norm_(model, max_norm), which gives it."
            )
        self._check_finished(_name(key))
        changes = sum(bucket.gradient.finished.changes for bucket in self._buckets)
        if changes != self._measured:
            self._norms.clear()
            self._measured = changes
        if kind not in self._norms:
            self._norms[kind] = self._measure(kind)
        return self._norms[kind][key].clone()

    def measured(self, key: GradientKey, func: Any, *rest: Any, **named: Any) -> Any:
        """What `func`, one that measures, makes of one parameter's gradient."""
        self._check_finished(_name(key))
        self._await_scaling()
        return measured_gradient(self.engine, *key, func, *rest, **named)

    def _await_scaling(self) -> None:
        for driver in self.engine.drivers:
            driver.off_device.await_scaling()

    def _measure(self, kind: float) -> dict[GradientKey, Tensor]:
        engine = self.engine
        self._await_scaling()
        Spread(engine.axes, sums_over(engine.sharding), 0).check(f"the gradients' norms of order {kind:g}")
        total = norms(
            ([bucket.gradient.finished.contribution(index)] for bucket, index in self.keys), engine.sharding, kind
        )
        return dict(zip(self.keys, total.to(norm_dtype(engine.sharding)).unbind(), strict=True))

    def change(
        self,
        key: GradientKey,
        what: str,
        change: Callable[[Tensor], Any],
        numbers: Sequence[Tensor] = (),
        *,
        hides_overflow: bool = False,
    ) -> None:
        """Change this rank's elements of one parameter's gradient in place; `what` is done on every rank.

        Args:
            numbers: that it is done with, as far as they are in a device's memory.
            hides_overflow: whether what is not finite may be so after it: a step of fp16 is skipped all the same.
        """
        bucket, index = key
        name = bucket.members[index].name
        self.prepare_change(name)
        self.engine.progress.note(f"{name}.grad.{what}", self._noted(numbers) if numbers else None)
        if hides_overflow:
            bucket.gradient.finished.note_finite(index)
        bucket.gradient.finished.change(index, change)

    def _noted(self, numbers: Sequence[Tensor]) -> NotedNumbers:
        """Numbers on a device, copied to the host once where all gradients are changed by the same, as in clipping."""
        if not self._latest.is_of(numbers):
            self._latest = _LatestNumbers(numbers)
        return self._latest.noted

    def zero(self, key: GradientKey) -> None:
        """Set one parameter's gradient to zero: no step will have what was sent of it."""
        bucket, index = key
        self.change(key, "zero_()", Tensor.zero_)
        for residual in bucket.gradient.residuals:
            residual.roll_back([index])

    def prepare_change(self, name: str) -> None:
        """Refuse a change of the gradient of `name` where there can be none now.

        Raises:
            Misuse: there.
        """
        self._check_finished(name)
        for driver in self.engine.drivers:
            if driver.off_device.steps_in_backward:
                raise Misuse(
                    f"The gradient of {name!r} was changed, but with offload step 'backward' units are "
                    "updated while backward runs. Use tz.Offload(step='overlapped')."
                )
            driver.catch_up()  # an update may still read it

    def _check_finished(self, name: str) -> None:
        if any(bucket.gradient.unfinished for bucket in self._buckets):
            raise Misuse(
                f"The gradient of {name!r} was looked at or changed while gradients were still being accumulated. Run "
                "the last micro-batch's backward outside 'with tz.accumulate(model)' first; zero_grad() of the "
                "optimizer or the model forgets them."
            )


class _LatestNumbers:
    """Numbers in tensors, noted as they were."""

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self._of = [(weakref.ref(each), each._version) for each in numbers]
        self.noted = NotedNumbers({str(place): each for place, each in enumerate(numbers)})

    def is_of(self, numbers: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, not written to since."""
        return len(self._of) == len(numbers) and all(
            before() is each and version == each._version
            for (before, version), each in zip(self._of, numbers, strict=True)
        )


def _name(key: GradientKey) -> str:
    bucket, index = key
    return bucket.members[index].name
