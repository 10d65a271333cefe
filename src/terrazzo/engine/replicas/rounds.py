"""The rounds of replicas that train by themselves, and their outer steps: see `DiLoCo`.

Each rank has a part of the weights that a round began with, and of their momentum, cut over the ranks of its replica.
It exchanges outer gradients of that part with the ranks of the other replicas that have the same part. They are summed
in the order of the replicas, and all take the same bytes: so all replicas go on from the same bits.

Replicas that stream exchange a fragment at a time within a round, one behind the other, beside training, which sends
nothing along their axis. What else does, such as a comparison of what ranks are told to load, ends the exchange under
way first, on all of them: so the order of collectives is the same, wherever each has been in that exchange. Its outer
gradients wait, and are taken when they would have been; they do not depend on when they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Resting
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.mesh.axes import ANYWHERE_NUMEL, DIFFERING_NUMEL, Axes
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.replicas.outer_exchange import OuterPart, begin_exchange, messages_of, tiles_of
from terrazzo.engine.replicas.outer_weights import set_master
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.weak import weakly
from terrazzo.errors import Misuse, RanksApart

__all__ = ["Rounds", "dry_run_compare"]


class _StreamedStep(NamedTuple):
    """The outer step of a fragment whose exchange goes on beside training.

    Attributes:
        exchange: brings the mean of outer gradients, in memory that is counted until `counted` is closed.
    """

    buckets: Sequence[Bucket]
    parts: Sequence[OuterPart]
    exchange: Transfer[Tensor]
    counted: ExitStack
    merges_behind: int


class Rounds:
    """The rounds of one model: optimizer steps of each replica by itself, outer steps of fragments among them where
    replicas stream, and at the end an outer step of all.

    Args:
        units: the trained buckets of each unit that has some, built.
        axes: of this rank's replica.

    Attributes:
        steps: of the optimizer in this round.
        number: rounds that there were.
    """

    def __init__(self, settings: DiLoCo, units: Sequence[Sequence[Bucket]], axes: Axes, tally: Tally) -> None:
        self.settings, self.steps, self.number = settings, 0, 0
        self._buckets = list(chain(*units))
        self._fragments = [list(chain(*part)) for part in settings.cut(units)]
        self._axes, self._ledger = axes, tally.ledger
        self._under_way: _StreamedStep | None = None
        self._label = Label(Purpose.OUTER)
        axes.before_replicas_meet(weakly(self, Rounds._end_exchange))

    @property
    def begins(self) -> bool:
        """Whether the next optimizer step is the first of a round."""
        return not self.steps

    @property
    def alike_over(self) -> tuple[str, ...]:
        """The axis along which replicas have the same weights now; none within a round."""
        return self._axes.replica_axis if self.begins else ()

    @torch.no_grad()
    def begin(self) -> None:
        """Note the weights that a round begins with: master weights, which nothing updates now. Collective.

        Raises:
            RanksApart: on every rank, where replicas have other weights.
        """
        for bucket in self._buckets:
            first = bucket.outer[0]
            for cut in bucket.exact.cuts(first.range):
                with bucket.exact.opened(cut) as weights, first.opened(cut, "replace") as noted:
                    noted.copy_(weights)
        self._compare()

    @torch.no_grad()
    def restart(self) -> None:
        """The next optimizer step is the first of a round, of weights that have been loaded. On all replicas alike."""
        self.steps = 0
        self._end_exchange()
        if self._under_way is not None:
            self._under_way.counted.close()
            self._under_way = None

    def _end_exchange(self) -> None:
        """Have the exchange under way end, of which no step is taken yet. Collective: all replicas have begun it."""
        if self._under_way is not None:
            self._under_way.exchange.finish()

    def require_ended(self, what: str) -> None:
        """Refuse `what` within a round, where each replica has weights of its own.

        Raises:
            Misuse: there.
        """
        if self.steps:
            every = self.settings.round_steps
            raise Misuse(
                f"{what} {self.steps} optimizer steps into a round of {every}, where each replica (dp_replicate) has "
                f"weights of its own: do it after an outer step, {every - self.steps} steps later."
            )

    @torch.no_grad()
    def count_step(self) -> bool:
        """The optimizer has stepped; whether there is something to `run`."""
        self.steps += 1
        if self._under_way is not None:
            self._under_way.exchange.advance_if_ended()
        settings = self.settings
        return self.steps == settings.round_steps or self._merges or settings.fragment_behind(self.steps) is not None

    @torch.no_grad()
    def run(self) -> Sequence[Bucket]:
        """End the outer step that is due, and begin the next; or take that of a round's end. Collective.

        Returns:
            The buckets whose master weights have been set: their weights at rest have to follow.
        """
        changed = self._merge() if self._merges else []
        if self.steps == self.settings.round_steps:
            return self._meet()
        if (fragment := self.settings.fragment_behind(self.steps)) is not None:
            buckets, counted = self._fragments[fragment], ExitStack()
            parts = next(messages_of(self.settings, buckets, whole=True), [])
            self._next_label()
            exchange = self._begin_exchange(parts, counted)
            self._under_way = _StreamedStep(buckets, parts, exchange, counted, self.steps + self.settings.delay)
            changed = self._merge() if self._merges else changed
        return changed

    @property
    def _merges(self) -> bool:
        """Whether weights take in the outer step that is under way now."""
        return self._under_way is not None and self._under_way.merges_behind == self.steps

    def _merge(self) -> Sequence[Bucket]:
        assert self._under_way is not None, "there is one to end"
        buckets, parts, exchange, counted, _ = self._under_way
        with counted:
            self._step(parts, exchange.finish())
        self._under_way = None
        for bucket in buckets:
            set_master(bucket, self.settings.kept, self._label)
        return buckets

    def _meet(self) -> Sequence[Bucket]:
        self._next_label()
        for parts in messages_of(self.settings, self._buckets):
            with ExitStack() as counted:
                self._step(parts, self._begin_exchange(parts, counted).finish())
        for bucket in self._buckets:
            set_master(bucket, 0.0, self._label)
        self.steps, self.number = 0, self.number + 1
        return self._buckets

    def _next_label(self) -> None:
        self._label = replace(self._label, number=self._label.number + 1)

    def _compare(self) -> None:
        checksum = torch.zeros((), dtype=torch.int64, device=HOST)
        for bucket in self._buckets:
            with bucket.outer[0].opened(bucket.outer[0].range) as noted:
                checksum = checksum * 31 + digest(noted).to(HOST)
        apart = self._axes.differing({"weights": checksum}, self._axes.replica_axis)
        if self._axes.anywhere(bool(apart), self._axes.within_replica):
            raise RanksApart(
                f"The replicas (dp_replicate) begin round {self.number + 1} with other weights than each other, and "
                "its outer step would mix them. Load the same checkpoint on all of them; what is written into weights "
                "between two rounds must be the same on all."
            )

    def _begin_exchange(self, parts: Sequence[OuterPart], counted: ExitStack) -> Transfer[Tensor]:
        return begin_exchange(self.settings, parts, self._axes, self._label, self._ledger, counted)

    def _step(self, parts: Sequence[OuterPart], gradients: Tensor) -> None:
        """Take the step with the mean of outer gradients."""
        for bucket, tile, within in tiles_of(parts, self._axes.device):
            self._update(bucket.outer, tile, gradients[within])

    def _update(self, states: Sequence[Resting], tile: Range, gradient: Tensor) -> None:
        """Each product is rounded by itself: the bits are those of any way to cut, and of plain PyTorch."""
        lr, momentum = self.settings.lr, self.settings.momentum
        with states[0].opened(tile, "change") as weights:
            step = gradient.to(weights.device)
            if momentum:
                with states[1].opened(tile, "change") as kept:
                    step = kept.mul_(momentum).add_(step).mul(momentum).add_(step)
            weights.sub_(step.mul(lr))


def dry_run_compare(axes: Axes, tally: Tally) -> None:
    """Count in `tally` what ranks send to see whether a round begins with the same weights everywhere."""
    for axis in axes.live(axes.whole_mesh):
        numel = DIFFERING_NUMEL if axis in axes.replica_axis else ANYWHERE_NUMEL
        tally.traffic.record("control", numel * torch.int64.itemsize)
