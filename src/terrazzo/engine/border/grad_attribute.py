"""When `parameter.grad` is there for loops that look at it: from the end of a backward pass to the begin of the next.

What is there then is a `GradientStandIn` of each gradient, so that `torch.nn.utils.clip_grad_norm_` and any optimizer's
`zero_grad` do what they say. The norms of all parameters travel together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.autograd.listeners import eager, inside_backward
from terrazzo.engine.border.gradient_stand_in import GradientKey, GradientStandIn
from terrazzo.engine.border.measured import measured_gradient
from terrazzo.engine.border.measures import Spread
from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.parameter import register_gradient_hook
from terrazzo.engine.hooks.backward_hooks import GradientListener
from terrazzo.engine.mesh.family import Family
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.clipping import norms
from terrazzo.engine.plan.partition import Member
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.engine.runtime.weak import weakly
from terrazzo.errors import Misuse

__all__ = ["show_gradients"]


def show_gradients(model: nn.Module, engine: Engine) -> None:
    """From now on, `.grad` of a sharded model's parameters is not None where there is a gradient.

    Not inside its forward, where a compiler would ask them what they cannot answer.
    """
    owner = _GradAttributes(engine)
    model.register_forward_pre_hook(eager(weakly(owner, _GradAttributes.begin)), prepend=True)
    model.register_forward_hook(eager(weakly(owner, _GradAttributes.show_again)), always_call=True)


class _BucketStandIns:
    """The trainable parameters of a bucket and what stands in for their gradients.

    Args:
        first: number of its first parameter among those of the model.
    """

    def __init__(self, owner: _GradAttributes, bucket: Bucket, first: int) -> None:
        self.bucket = bucket
        self.is_dense = bucket.sharding.family is Family.DENSE
        self.parameters = [member.parameter for member in bucket.members]
        self.stand_ins = [GradientStandIn.of(member, owner, first + i) for i, member in enumerate(bucket.members)]
        self._numbered = list(zip(range(len(self.parameters)), self.parameters, self.stand_ins, strict=True))
        self.shown: list[tuple[int, nn.Parameter, GradientStandIn]] = []

    @property
    def wanted(self) -> bool:
        """Whether there is a gradient, be it one that further micro-batches add to."""
        return self.bucket.gradient.exists

    def show(self) -> None:
        self.shown = list(compress(self._numbered, self.bucket.gradient.seen))
        for _, parameter, stand_in in self.shown:
            parameter.grad = stand_in

    def hide(self) -> None:
        for _, parameter, _ in self.shown if self.wanted else ():  # else the optimizer's zero_grad has done so
            parameter.grad = None
        self.shown = []

    def dropped(self) -> list[int]:
        """Parameters whose `.grad` someone has set to None.

        Raises:
            Misuse: for one that was set to a tensor.
        """
        seen, indices = self.bucket.gradient.seen, list[int]()
        for index, parameter, stand_in in self.shown:
            grad = parameter.grad
            if grad is stand_in:
                continue
            if grad is None and seen[index]:
                indices.append(index)
            elif grad is not None:
                raise _set_by_hand(self.bucket.members[index])
        return indices

    def unused(self) -> Iterator[tuple[Member, bool]]:
        """Parameters with a `.grad` that no step would use, and whether it stands for a gradient that was forgotten."""
        counted = self.bucket.gradient.seen if self.wanted else [False] * len(self.parameters)
        for index, parameter, stand_in in self._numbered:
            if (grad := parameter.grad) is not None and not (grad is stand_in and counted[index]):
                yield self.bucket.members[index], grad is stand_in


class _GradAttributes(GradientListener):
    """What stands in for the gradients of one model; its hooks keep this alive."""

    def __init__(self, engine: Engine) -> None:
        self._weak_engine = weakref.ref(engine)
        self._buckets = engine.trainable()
        self.keys = [(bucket, index) for bucket in self._buckets for index in range(len(bucket.members))]
        self._entries: list[_BucketStandIns] = []
        self._shown: list[_BucketStandIns] = []
        self._norms: dict[float, dict[GradientKey, Tensor]] = {}
        self._measured = 0
        engine.hooks.listen_to_gradients(self)
        before = weakly(self, _GradAttributes.begin)  # else autograd would add to a stand-in
        for unit in engine.units:
            for bucket in unit.trainable() if not unit.weights.regathered else ():  # else somebody says so before
                for member in bucket.members:
                    register_gradient_hook(member.parameter, before)

    @property
    def _engine(self) -> Engine:
        engine = self._weak_engine()
        assert engine is not None, "the model is gone"
        return engine

    def end_backward(self) -> None:
        """Every gradient gets its stand-in."""
        with plainly():
            self._shown = [entry for entry in self._all_entries() if entry.wanted]
            for entry in self._shown:
                entry.show()

    def _all_entries(self) -> list[_BucketStandIns]:
        if not self._entries:
            firsts = [0]
            for bucket in self._buckets:
                firsts.append(firsts[-1] + len(bucket.members))
            self._entries = [_BucketStandIns(self, *each) for each in zip(self._buckets, firsts, strict=False)]
        return self._entries

    def hide(self) -> None:
        """A backward pass begins, which must find none."""
        if self._shown:
            self.forget_dropped()
            with plainly():
                for entry in self._shown:
                    entry.hide()
            self._shown = []

    def begin_backward(self) -> None:
        """A backward pass begins, and adds to the `.grad` that users have set.

        Raises:
            Misuse: where that would be divided as gradients are which have been multiplied before, or summed over more
                ranks than a user counts.
        """
        self.hide()
        is_mean = self._engine.progress.denominator.is_mean
        with plainly():
            for entry in self._all_entries():
                for member, is_forgotten in entry.unused() if not (is_mean and entry.is_dense) else ():
                    raise _put_back(member) if is_forgotten else _set_before(member)

    def begin(self, *_: Any) -> None:
        """A forward begins, or a gradient comes, maybe before anything has announced a backward pass."""
        if self._shown:
            self.hide()

    def show_again(self, *_: Any) -> None:
        """A forward has ended; one inside backward recomputes a part of it."""
        if not inside_backward() and any(bucket.gradient.finished.changes for bucket in self._buckets):
            self.end_backward()

    def before_use(self) -> None:
        """Gradients are about to be clipped or taken, which are those of the engine alone.

        Raises:
            Misuse: where a parameter that is stepped has another one, which would change nothing.
        """
        with plainly():
            for entry in self._all_entries():
                for member, is_forgotten in entry.unused():
                    if member.group >= 0 and (self._learns() or not _is_zero(member.parameter.grad)):
                        raise _put_back(member) if is_forgotten else _set_by_hand(member)
        self.forget_dropped()

    def _learns(self) -> bool:
        """Whether a step changes weights: torch has states made by one of zeros, at a learning rate of 0."""
        groups = (group for driver in self._engine.drivers.stepping() for group in driver.optimizer.param_groups)
        return any(float(group.get("lr", 1)) != 0 for group in groups)

    def forget_dropped(self) -> None:
        """Forget gradients whose `.grad` someone has set to None since they were shown."""
        with plainly():
            dropped = [(entry.bucket, entry.dropped()) for entry in self._shown if entry.wanted]
        names = [bucket.members[index].name for bucket, indices in dropped for index in indices]
        if not names:
            return
        if all(len(indices) == sum(bucket.gradient.seen) for bucket, indices in dropped):
            self._engine.gradients.zero(set_to_none=True)
            return
        self._prepare_change(names[0])
        for name in names:
            self._engine.progress.note(f"{name}.grad = None")
        for bucket, indices in dropped:
            bucket.gradient.zero_some(indices)  # later micro-batches may add to the others

    def norm(self, key: GradientKey, kind: float) -> Tensor:
        """The norm of one parameter's gradient over all ranks, 0-d fp32. Collective."""
        if self._engine.axes.stages:  # torch's own clipping would scale each stage by the norm of that stage
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
        return measured_gradient(self._engine, *key, func, *rest, **named)

    def _await_scaling(self) -> None:
        for driver in self._engine.drivers:
            driver.off_device.await_scaling()

    def _measure(self, kind: float) -> dict[GradientKey, Tensor]:
        engine = self._engine
        self._await_scaling()
        Spread(engine.axes, engine.sharding.contributed_over, 0).check(f"the gradients' norms of order {kind:g}")
        total = norms(
            ([bucket.gradient.finished.contribution(index)] for bucket, index in self.keys), engine.sharding, kind
        )
        return dict(zip(self.keys, total.float().unbind(), strict=True))

    def change(self, key: GradientKey, what: str, change: Callable[[Tensor], Any]) -> None:
        """Change this rank's elements of one parameter's gradient in place; `what` is done on every rank."""
        bucket, index = key
        name = bucket.members[index].name
        self._prepare_change(name)
        self._engine.progress.note(f"{name}.grad.{what}")
        bucket.gradient.finished.change(index, change)

    def _prepare_change(self, name: str) -> None:
        """Refuse a change of the gradient of `name` where there can be none now.

        Raises:
            Misuse: there.
        """
        self._check_finished(name)
        for driver in self._engine.drivers:
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


def _name(key: GradientKey) -> str:
    bucket, index = key
    return bucket.members[index].name


# What is said of a `.grad` that users have set, and that the engine cannot take.


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def _set_by_hand(member: Member) -> Misuse:
    """Behind a backward, where it would change nothing."""
    return Misuse(
        f"The .grad of {member.name!r} was replaced by a tensor, by hand or before tz.shard, and no step would use it: "
        "the gradients of a sharded model are in memory of the engine, where backward() puts them. Change those in "
        "place (mul_, div_, zero_), or before backward with parameter.register_hook; optimizer.zero_grad() forgets "
        "this one."
    )


def _set_before(member: Member) -> Misuse:
    """Before a backward that adds to it what has been multiplied."""
    return Misuse(
        f"The .grad of {member.name!r} was set to a tensor before backward, which adds to it: the sum would be divided "
        "by fp16's loss scale, or by what set_gradient_denominator was given, or be that of other ranks than those of "
        "the data, along tp or ep. Add that term to the loss, inside the model's forward, and call "
        "optimizer.zero_grad(); or train in bf16 without a denominator and these axes."
    )


def _put_back(member: Member) -> Misuse:
    """A stand-in that has been kept, whose gradient is gone."""
    return Misuse(
        f"The .grad of {member.name!r} was put back after its gradient had been forgotten, by zero_grad() say: it "
        "stands for what the engine holds, and holds no values itself. Run backward again, or leave zero_grad() out "
        "until behind optimizer.step()."
    )
