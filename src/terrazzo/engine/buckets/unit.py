"""A unit: the parameters that are gathered and reduced together, normally one transformer block's."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket, adopt_displaced
from terrazzo.engine.links.label import Label, Purpose, title_of
from terrazzo.engine.links.side import Side
from terrazzo.engine.links.transfer import Moves, Transfer, at_once, for_computation
from terrazzo.engine.plan.sharding import ShardingSpec
from terrazzo.engine.plan.spec import Pass
from terrazzo.engine.runtime.calls import do_all
from terrazzo.engine.runtime.compiled import compilation_of, has_fixed_addresses
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.engine.runtime.worker import Job

__all__ = ["Unit", "adopt_edits"]


class Unit:
    """One unit's buckets, and the moves of weights that may be under way for them.

    It is a `Runnable` of the schedule's: what that says of a method is not said again here. What may be under way:

        by              weights at rest                 full weights                    until
        begin_update    behind the masters              none, or not to be read         catch_up, or the next gather
        publish         on their way from the masters   none, or whoever reads waits    finish_publishing
        gather          stay as they are                on their way                    wait

    Args:
        names: of all units of the model.
        index: position in the order of registration, root first.

    Attributes:
        name: of its module in the model; empty for the root.
        once_here: called, once, when its full weights are there to be read.
    """

    def __init__(self, names: tuple[str, ...], index: int, module: nn.Module, buckets: list[Bucket]) -> None:
        self.names, self.index, self.buckets = names, index, buckets
        self.name = names[index]
        self._module = weakref.ref(module)  # the module's hooks lead here: a strong edge back would be a cycle
        self._gathering: list[Transfer[object]] = []
        self._publishing: Transfer[None] | None = None
        self.once_here: Callable[[], None] | None = None
        self._updates: list[Job] = []  # the one under way, or none; a list, which a chain can empty without the unit
        self._trainable_numel = sum(math.prod(m.shape) for bucket in self.trainable() for m in bucket.members)

    def __repr__(self) -> str:
        return f"<{self.title}, {self.numel:,} elements>"

    @property
    def title(self) -> str:
        """What messages call it."""
        return title_of(self.name)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the model is gone"
        return module

    @property
    def sharding(self) -> ShardingSpec:
        """What its buckets follow, as those of all units do."""
        return self.buckets[0].sharding

    @property
    def is_root(self) -> bool:
        return not self.name

    @property
    def numel(self) -> int:
        """Elements of the unit's flat spaces, padding included."""
        return sum(bucket.space.layout.numel for bucket in self.buckets)

    @property
    def transient(self) -> bool:
        """Whether full weights come and go."""
        return any(not bucket.resident for bucket in self.buckets)

    @property
    def regathered(self) -> bool:
        return any(bucket.regathered for bucket in self.buckets)

    @property
    def side(self) -> Side | None:
        return self.sharding.axes.side

    @property
    def compiled(self) -> bool:
        """Whether torch has compiled its module."""
        return compilation_of(self._module()) is not None

    @property
    def captured(self) -> bool:
        """Whether torch runs it as a CUDA graph, which reads weights at fixed addresses."""
        return has_fixed_addresses(compilation_of(self._module()))

    @property
    def fills_gradually(self) -> bool:
        return self.has_gradients and not self.compiled  # whose gradients come all at its end

    @property
    def generation(self) -> int:
        """Changes whenever its weights do."""
        return sum(bucket.changes for bucket in self.buckets)

    @property
    def present(self) -> bool:
        return all(bucket.present for bucket in self.buckets)

    @property
    def has_gradients(self) -> bool:
        return any(bucket.trainable for bucket in self.buckets)

    def add_stages(self) -> None:
        for bucket in self.trainable():
            if bucket.stages:
                bucket.gradient.add_stages(bucket.stages, bucket.pending_dtype(Pass.ADDS))

    @property
    def half_filled(self) -> bool:
        return 2 * sum(bucket.gradient.filled_numel for bucket in self.buckets) >= self._trainable_numel

    def trainable(self) -> Iterator[Bucket]:
        return (bucket for bucket in self.buckets if bucket.trainable)

    @property
    def at_hand(self) -> bool:
        arriving = self._publishing is not None
        here = all(bucket.present or (bucket.resident and arriving) for bucket in self.buckets)
        return bool(self._gathering) or (here and not self._updates)

    def gather(self, label: Label, from_rest: bool = False) -> None:
        self._finish_gather()
        if self._updates:
            publish = _publish_updated(self.buckets, self._updates)
            self._gathering = [Transfer(_then_gather(publish, self.updated, self.buckets, from_rest), label, self.side)]
        else:
            self._gathering = [Transfer(chain, label, self.side) for chain in _gathers(self.buckets, from_rest)]

    def advance(self) -> None:
        """Weights on their way from a drive come a step further; those that were updated are brought in line."""
        if self._gathering:
            if any(bucket.tiers.weight == "nvme" for bucket in self.buckets):
                for transfer in self._gathering:
                    if transfer.in_flight is not None:
                        transfer.advance()
        elif self._updates:
            self._gathering = [Transfer(_publish_updated(self.buckets, self._updates), self.updated, self.side)]

    @property
    def updated(self) -> Label:
        """The label of the exchange that brings resting weights in line."""
        return Label(Purpose.UPDATED, self.index, names=self.names)

    def wait(self) -> None:
        self.finish_publishing()
        self.advance()
        for transfer in self._gathering:
            transfer.finish()
        self._gathering = []
        for bucket in self.buckets:
            bucket.install()
        if self.once_here is not None:
            tell, self.once_here = self.once_here, None
            tell()

    def begin_update(self, update: Job) -> None:
        """Note that its master weights change until `update` has ended: weights at rest wait for that."""
        self._updates[:] = [update]
        for bucket in self.trainable():
            bucket.hide()

    @property
    def updating(self) -> bool:
        """Whether an update is under way, or has ended and the weights at rest are not in line yet."""
        return bool(self._updates)

    def catch_up(self) -> None:
        """Wait for the update that is under way, and bring resting weights in line."""
        self.finish_publishing()
        if self._gathering:
            self.wait()
        elif self._updates:
            Transfer(_publish_updated(self.buckets, self._updates), self.updated).finish()

    def rest_between(self) -> None:
        self._finish_gather()
        do_all(bucket.rest_between for bucket in self.buckets)

    def release(self) -> None:
        self._finish_gather()
        do_all(bucket.release for bucket in self.buckets)

    def rest(self) -> None:
        self.finish_publishing()
        self._finish_gather()
        do_all(bucket.rest for bucket in self.buckets)

    def _finish_gather(self) -> None:
        if self._gathering:
            self.wait()

    def expect_gradients(self, this_pass: Pass) -> None:
        for bucket in self.trainable():
            bucket.gradient.expect(bucket.pending_dtype(this_pass))

    def reduce(self, denominator: float | None) -> Moves[list[Tensor]]:
        sums = []
        for bucket in self.trainable():
            sums.append((yield from bucket.gradient.reduce(denominator)))  # noqa: PERF401 - which cannot yield
        return sums  # held until the computation may use them

    def zero_grad(self, set_to_none: bool) -> None:
        for bucket in self.trainable():
            bucket.zero_grad(set_to_none)

    def publish(self, among: Collection[Bucket] | None = None) -> None:
        """Start bringing resting weights in line with master weights that have been written or stepped on this thread.

        `finish_publishing` must follow, and does where chains run beside the computation: before the unit's next
        forward, or as soon as anything touches one of its parameters.

        Args:
            among: the buckets that have been; all if None.
        """
        written = [bucket for bucket in self.trainable() if among is None or bucket in among]
        moving = Transfer(_publish_written(written), self.updated, self.side)
        if moving.done:
            return
        self._publishing = moving
        for bucket in written if self.side is not None else ():
            bucket.hide(functools.partial(_finish_publishing, weakref.ref(self)))

    def finish_publishing(self) -> None:
        """Return once resting weights are in line with what `publish` found."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.finish()
            for bucket in (bucket for bucket in self.buckets if bucket.resident):
                bucket.install()


def adopt_edits(units: Iterable[Unit]) -> None:
    """Take over what the user has written into the weights of a model's units, or refuse it."""
    with plainly():  # parameters at rest would answer each question in Python
        buckets = [bucket for unit in units for bucket in unit.buckets]
        adopt_displaced(buckets)
        for bucket in buckets:
            bucket.adopt_edits()


# A unit holds the moves that are under way for it, and they must not hold the unit: it would never be freed without the
# collector where a forward or a backward has left them unfinished.


def _finish_publishing(unit: Callable[[], Unit | None]) -> None:
    if (found := unit()) is not None:
        found.finish_publishing()


def _publish_written(buckets: Sequence[Bucket]) -> Moves[None]:
    """Bring resting weights in line with master weights that have been written or stepped on this thread."""
    for bucket in for_computation(lambda: buckets):  # held: their memory is, and the model may be dropped meanwhile
        yield from bucket.publish()


def _gathers(buckets: Sequence[Bucket], from_rest: bool) -> list[Moves[Tensor]]:
    return [bucket.gather(from_rest) for bucket in buckets if not bucket.resident]


def _then_gather(publish: Moves[None], updated: Label, buckets: Sequence[Bucket], from_rest: bool) -> Moves[None]:
    yield from at_once([Transfer(publish, updated)])
    yield from at_once([Transfer(chain) for chain in _gathers(buckets, from_rest)])


def _publish_updated(buckets: Sequence[Bucket], updates: list[Job]) -> Moves[None]:
    """Bring resting weights in line with masters that are being updated in the background, once that has ended."""
    if updates:
        with buckets[0].sharding.axes.tally.traffic.times_of("", "update").waiting():
            updates[0].wait()
        updates.clear()
        for bucket in (bucket for bucket in for_computation(lambda: buckets) if bucket.trainable):
            yield from bucket.publish(copied=bucket.own_weight is not None)
            if bucket.resident:
                bucket.install()
