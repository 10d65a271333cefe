"""What is noted, on every rank alike, where gradients are forgotten or set to zero."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.progress.raised_passes import RaisedPasses
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse

__all__ = ["note_zeroed"]


def note_zeroed(
    buckets: Iterable[Bucket],
    schedule: Schedule,
    progress: Progress,
    raised: RaisedPasses,
    set_to_none: bool,
    first: int = 0,
) -> None:
    """Gradients are about to be forgotten, or set to zero: on every rank, where there are any.

    Args:
        buckets: all trainable ones of the model.
        first: number of the first param group of the optimizer that does so.

    Raises:
        Misuse: where zeros are asked for, and there are no finished gradients yet.
    """
    gradients, which = [bucket.gradient for bucket in buckets], "" if set_to_none else "set_to_none=False"
    failed = raised.any or schedule.backward is not None
    if not (set_to_none or failed) and any(gradient.unfinished for gradient in gradients):
        raise Misuse(
            "zero_grad(set_to_none=False) was called while gradients were still being accumulated: there are none "
            "yet to be zeros that a step would use. Call zero_grad() instead, or run the last micro-batch's "
            "backward outside 'with tz.accumulate(model)' first."
        )
    if failed or any(gradient.exists for gradient in gradients):
        progress.note(f"zero_grad({which})" + (f" of param group {first} and on" if first else ""))
    raised.gradients_zeroed()
