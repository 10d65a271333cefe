"""The weights of a unit: gathered, released, and brought in line with masters that have been stepped."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.comm.transfer import Moves, Transfer, at_once, outlives_chain
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.runtime.calls import do_all
from terrazzo.engine.runtime.worker import Job

__all__ = ["UnitWeights"]


@dataclass
class _UnderWay:
    """The update that masters are in, or that weights at rest have yet to follow; the chain that follows it ends it."""

    job: Job | None = None


class UnitWeights:
    """Weights of all buckets of one unit, and the moves that may be under way for them:

        by              weights at rest                 full weights                    until
        begin_update    older than the masters          none, or not to be read         catch_up, or the next gather
        publish         on their way from the masters   none, or whoever reads waits    finish_publishing
        gather          stay as they are                on their way                    wait

    A gather may begin in either of the other two, and then comes after it: in its chain, or on its stream.

    They implement `RunnableWeights` of the schedule, which documents the methods without a docstring.

    Args:
        names, index: as of `Unit`.

    Attributes:
        updated: the label of the exchange that brings resting weights in line.
    """

    def __init__(self, names: tuple[str, ...], index: int, buckets: Sequence[Bucket]) -> None:
        self._buckets, self._trainable = buckets, [bucket for bucket in buckets if bucket.spec.trainable]
        self._streams = buckets[0].axes.comm_streams
        self.updated = Label(Purpose.UPDATED, index, names=Names(units=names))
        self._gathering: list[Transfer[object]] = []
        self._publishing: Transfer[None] | None = None
        self._update = _UnderWay()
        self._when_present: Callable[[], None] | None = None

    @property
    def transient(self) -> bool:
        """Whether full weights come and go."""
        return any(not bucket.spec.resident for bucket in self._buckets)

    @property
    def regathered(self) -> bool:
        return any(bucket.spec.regathered for bucket in self._buckets)

    @property
    def generation(self) -> int:
        """Number that changes whenever its weights do."""
        return sum(bucket.changes for bucket in self._buckets)

    @property
    def present(self) -> bool:
        return all(bucket.full.present for bucket in self._buckets)

    @property
    def at_hand(self) -> bool:
        arriving = self._publishing is not None
        readable = all(bucket.full.present or (bucket.spec.resident and arriving) for bucket in self._buckets)
        return bool(self._gathering) or (readable and not self.updating)

    def gather(self, label: Label, from_rest: bool = False) -> None:
        self._finish_gather()
        if self.updating:
            publish = _publish_updated(self._buckets, self._update)
            self._gathering = [
                Transfer(_then_gather(publish, self.updated, self._buckets, from_rest), label, self._streams)
            ]
        else:
            self._gathering = [Transfer(chain, label, self._streams) for chain in _gathers(self._buckets, from_rest)]

    def advance(self) -> None:
        self._advance_from_files()
        self._start_publishing_updated()

    def _advance_from_files(self) -> None:
        """Move a gather that begins with reading files one step on."""
        if any(bucket.spec.tiers.weight == "nvme" for bucket in self._buckets):
            for transfer in self._gathering:
                if transfer.in_flight is not None:
                    transfer.advance()

    def _start_publishing_updated(self) -> None:
        """Start to bring updated weights in line, where no gather is under way that does so itself."""
        if self.updating and not self._gathering:
            self._gathering = [Transfer(_publish_updated(self._buckets, self._update), self.updated, self._streams)]

    def wait(self) -> None:
        self.finish_publishing()
        self._advance_from_files()
        self._start_publishing_updated()
        for transfer in self._gathering:
            transfer.finish()
        self._gathering = []
        for bucket in self._buckets:
            bucket.full.install()
        if self._when_present is not None:
            call, self._when_present = self._when_present, None
            call()

    def call_when_present(self, call: Callable[[], None] | None) -> None:
        """Call `call`, once, when full weights can be read the next time; None: call nothing."""
        self._when_present = call

    def begin_update(self, update: Job) -> None:
        """Note that master weights change until `update` has ended: weights at rest wait for that."""
        self._update.job = update
        for bucket in self._trainable:
            bucket.full.hide()

    @property
    def updating(self) -> bool:
        """Whether an update is under way, or has ended and the weights at rest are not in line yet."""
        return self._update.job is not None

    def catch_up(self) -> None:
        """Wait for the update that is under way, and bring resting weights in line."""
        self.finish_publishing()
        if self._gathering:
            self.wait()
        elif self.updating:
            Transfer(_publish_updated(self._buckets, self._update), self.updated).finish()

    def rest_between(self) -> None:
        self._finish_gather()
        do_all(bucket.full.rest_between for bucket in self._buckets)

    def release(self) -> None:
        self._finish_gather()
        do_all(bucket.full.release for bucket in self._buckets)

    def rest(self) -> None:
        self.finish_publishing()
        self._finish_gather()
        do_all(bucket.full.rest for bucket in self._buckets)

    def _finish_gather(self) -> None:
        if self._gathering:
            self.wait()

    def publish(self, among: Collection[Bucket] | None = None) -> None:
        """Bring resting weights in line with master weights that have been written or stepped on this thread.

        Where chains run beside the computation this only starts it: `finish_publishing` follows before the unit's next
        forward, or as soon as anything touches one of its parameters. Where the host does the work it has ended then:
        of what new weights are sent in, one unit's is held at a time.

        Args:
            among: the buckets that have been; all if None.
        """
        written = [bucket for bucket in self._trainable if among is None or bucket in among]
        moving = Transfer(_publish_written(written), self.updated, self._streams)
        if self._streams is None:
            moving.finish()
        if moving.done:
            return
        self._publishing = moving
        for bucket in written:
            bucket.full.hide(functools.partial(_finish_publishing, weakref.ref(self)))

    def finish_publishing(self) -> None:
        """Return once resting weights are in line with what `publish` found."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.finish()
            for bucket in (bucket for bucket in self._buckets if bucket.spec.resident):
                bucket.full.install()


# A `UnitWeights` holds the moves under way, and these must not hold it: a cycle that an unfinished forward or backward
# leaves would only be freed by the collector. So the moves are functions of buckets.


def _finish_publishing(weights: Callable[[], UnitWeights | None]) -> None:
    if (live := weights()) is not None:
        live.finish_publishing()


def _publish_written(buckets: Sequence[Bucket]) -> Moves[None]:
    """Bring resting weights in line with master weights that have been written or stepped on this thread."""
    for bucket in outlives_chain(lambda: buckets):  # held: their memory is, and the model may be dropped meanwhile
        yield from bucket.publish()


def _gathers(buckets: Sequence[Bucket], from_rest: bool) -> list[Moves[Tensor]]:
    return [bucket.full.gather(from_rest) for bucket in buckets if not bucket.spec.resident]


def _then_gather(publish: Moves[None], updated: Label, buckets: Sequence[Bucket], from_rest: bool) -> Moves[None]:
    yield from at_once([Transfer(publish, updated)])
    yield from at_once([Transfer(chain) for chain in _gathers(buckets, from_rest)])


def _publish_updated(buckets: Sequence[Bucket], update: _UnderWay) -> Moves[None]:
    """Bring resting weights in line with masters that are being updated in the background, once that has ended."""
    if update.job is not None:
        with buckets[0].axes.tally.traffic.times_of("", "update").waiting():
            update.job.wait()
        update.job = None
        for bucket in (bucket for bucket in outlives_chain(lambda: buckets) if bucket.spec.trainable):
            yield from bucket.publish(copied=bucket.own_weight is not None)
            if bucket.spec.resident:
                bucket.full.install()
