"""What users set `.grad` to, found when a backward begins or gradients are used.

parameter.grad is                     before a backward                      after it
None, and was shown                   -                                      that gradient is forgotten
a tensor                              autograd adds to it; refused where     refused: no step would use it
                                      the sum would not be what users mean
a stand-in of a forgotten gradient    the same                               refused
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from terrazzo.engine.interception.gradients.gradient_answers import GradientAnswers
from terrazzo.engine.interception.gradients.shown_gradients import ShownGradients
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.errors import Misuse

__all__ = ["refuse_set_before", "refuse_unused", "take_over_dropped"]


def take_over_dropped(shown: Sequence[ShownGradients], answers: GradientAnswers) -> None:
    """Forget gradients whose `.grad` has been set to None since they were shown.

    Raises:
        Misuse: for a `.grad` that was set to a tensor.
    """
    with plainly():
        dropped = [(entry.bucket, _dropped(entry)) for entry in shown if entry.wanted]
    names = [bucket.members[index].name for bucket, indices in dropped for index in indices]
    if not names:
        return
    if all(len(indices) == sum(bucket.gradient.seen) for bucket, indices in dropped):
        answers.engine.gradients.zero(set_to_none=True)
        return
    answers.prepare_change(names[0])
    for name in names:
        answers.engine.progress.note(f"{name}.grad = None")
    for bucket, indices in dropped:
        bucket.gradient.zero_some(indices)  # later micro-batches may add to the others


def refuse_set_before(entries: Sequence[ShownGradients], engine: Engine) -> None:
    """A backward begins, and adds to the `.grad` that users have set.

    Raises:
        Misuse: where that would be divided as gradients are which have been multiplied before, or summed over more
            ranks than a user counts.
    """
    is_mean = engine.progress.denominator.is_mean
    with plainly():
        for entry in entries:
            for member, is_forgotten in _unused(entry) if not (is_mean and entry.is_dense) else ():
                raise _put_back(member) if is_forgotten else _set_before(member)


def refuse_unused(entries: Sequence[ShownGradients], engine: Engine) -> None:
    """Gradients are about to be clipped or taken, which are those of the engine alone.

    Raises:
        Misuse: where a parameter that is stepped has another one, which would change nothing.
    """
    with plainly():
        for entry in entries:
            for member, is_forgotten in _unused(entry):
                if member.group >= 0 and (_learns(engine) or not _is_zero(member.parameter.grad)):
                    raise _put_back(member) if is_forgotten else _set_by_hand(member)


def _dropped(entry: ShownGradients) -> list[int]:
    """Parameters of a bucket whose shown `.grad` is None now."""
    seen, indices = entry.bucket.gradient.seen, list[int]()
    for index, parameter, stand_in in entry.shown:
        grad = parameter.grad
        if grad is stand_in:
            continue
        if grad is None and seen[index]:
            indices.append(index)
        elif grad is not None:
            raise _set_by_hand(entry.bucket.members[index])
    return indices


def _unused(entry: ShownGradients) -> Iterator[tuple[Member, bool]]:
    """Parameters with a `.grad` that no step would use, and whether it stands for a gradient that was forgotten."""
    seen = entry.bucket.gradient.seen
    for index, parameter, stand_in in entry.numbered:
        if (grad := parameter.grad) is not None and not (grad is stand_in and entry.wanted and seen[index]):
            yield entry.bucket.members[index], grad is stand_in


def _learns(engine: Engine) -> bool:
    """Whether a step changes weights: torch has states made by one of zeros, at a learning rate of 0."""
    groups = (group for driver in engine.drivers.stepping() for group in driver.optimizer.param_groups)
    return any(float(group.get("lr", 1)) != 0 for group in groups)


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def _set_by_hand(member: Member) -> Misuse:
    """The error for a tensor in `.grad` after a backward, where it would change nothing."""
    return Misuse(
        f"The .grad of {member.name!r} was replaced by a tensor, by hand or before tz.shard, and no step would use it: "
        "the gradients of a sharded model are in memory of the engine, where backward() puts them. Change those in "
        "place (mul_, div_, zero_), or before backward with parameter.register_hook; optimizer.zero_grad() forgets "
        "this one."
    )


def _set_before(member: Member) -> Misuse:
    """The error for a tensor in `.grad` before a backward that adds to it what has been multiplied."""
    return Misuse(
        f"The .grad of {member.name!r} was set to a tensor before backward, which adds to it: the sum would be divided "
        "by fp16's loss scale, or by what set_gradient_denominator was given, or be that of other ranks than those of "
        "the data, along tp or ep. Add that term to the loss, inside the model's forward, and call "
        "optimizer.zero_grad(); or train in bf16 without a denominator and these axes."
    )


def _put_back(member: Member) -> Misuse:
    """The error for a stand-in that has been kept, whose gradient is gone."""
    return Misuse(
        f"The .grad of {member.name!r} was put back after its gradient had been forgotten, by zero_grad() say: it "
        "stands for what the engine holds, and holds no values itself. Run backward again, or leave zero_grad() out "
        "until after optimizer.step()."
    )
