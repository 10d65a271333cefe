"""Blocks inside which the user has the full weights of a model, to read them or to write them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.take_over import refuse_packed_edits, take_over_data, take_over_gathered
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.consensus.written_weights import broadcast_first, compare_written
from terrazzo.engine.hooks.model_hooks import ModelHooks
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.replicas.rounds import Rounds
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse

__all__ = ["GatheredBlocks", "Write"]

Write = bool | Literal["first rank"]

_WRITTEN = {
    True: collective_call("the end of 'with tz.gathered(model, write=True)'"),
    "first rank": collective_call("the end of 'with tz.gathered(model, write=\"first rank\")'"),
}

_INSIDE = (
    "A forward, load_state_dict() or another call that moves weights came inside 'with tz.gathered(model, "
    "write=True):', under a plan that splits them: what has been written would be lost. End the block before it."
)


class GatheredBlocks:
    """The blocks of `tz.gathered` of one model; one may be in another."""

    def __init__(
        self, units: Sequence[Unit], schedule: Schedule, hooks: ModelHooks, axes: Axes, rounds: Rounds | None
    ) -> None:
        self._units, self._schedule, self._hooks, self._axes, self._rounds = units, schedule, hooks, axes, rounds
        self._buckets: list[Bucket] = [bucket for unit in units for bucket in unit.buckets]
        self._inside: Literal["read", "write"] | None = None

    @property
    def is_open(self) -> bool:
        """Whether this is inside of one."""
        return self._inside is not None

    def require_unwritten(self) -> None:
        """Refuse to move weights inside a block that writes them.

        Raises:
            Misuse: there.
        """
        if self._inside == "write" and any(unit.weights.transient for unit in self._units):
            raise Misuse(_INSIDE)

    def show_changed(self) -> None:
        """Weights at rest have changed: inside a block that only reads, full ones follow. Collective."""
        if self._inside == "read":
            self._schedule.gather_all()

    @contextlib.contextmanager
    def block(
        self, write: Write, settle: Callable[[], None], publish: Callable[[], None]
    ) -> Iterator[dict[str, Tensor]]:
        """See `tz.gathered`.

        Args:
            settle: brings every state to rest, before anything is gathered.
            publish: brings resting weights in line with master weights that have been written.
        """
        outer = self._inside
        named = self._named()
        if outer is not None and (outer == "write" or not write) and all(unit.weights.present for unit in self._units):
            yield named  # who began takes over what is written
            if write == "first rank":
                self._agree_on_written(write)
            return
        settle()
        for bucket in self._buckets:
            bucket.full.refuse_lost_edits()  # through views that have been kept
        self._schedule.gather_all()
        self._enter("write" if write else "read")
        try:
            yield named
            if write:
                self._take_over_written(write)
        except BaseException:
            for bucket in self._buckets:
                bucket.full.drop_edits()
            if outer is not None:  # whose weights have what was written
                self._schedule.gather_all()
            raise
        finally:
            self._enter(outer)
            if outer is None:
                for bucket in self._buckets:
                    bucket.full.detach_storage()
            self._schedule.rest()
        if write:
            publish()

    def _named(self) -> dict[str, Tensor]:
        """Parameters by name, as `tz.gathered` gives them: further names of tied ones after all."""
        members = [member for bucket in self._buckets for member in bucket.members]
        members.sort(key=lambda member: member.position)
        named: dict[str, Tensor] = {member.name: member.parameter for member in members}
        return named | {name: member.parameter for member in members for name in member.names[1:]}

    @torch.no_grad()
    def _take_over_written(self, write: Literal[True, "first rank"]) -> None:
        self._agree_on_written(write)
        packed = [bucket for bucket in self._buckets if bucket.spec.packed is not None]
        if packed or self._axes.stage_axis:  # other stages may have some
            all_or_none(self._axes, functools.partial(_refuse_edits, packed))
        for bucket in self._buckets:
            take_over_gathered(bucket)

    @torch.no_grad()
    def _agree_on_written(self, write: Literal[True, "first rank"]) -> None:
        """Compare what ranks have written into gathered weights, or take what the first one has."""
        take_over_data(self._buckets)
        with labelled(_WRITTEN[write]):
            if write == "first rank":
                broadcast_first(self._buckets)
            else:
                replica_axis = () if self._rounds is None else self._rounds.alike_over
                compare_written(self._axes, self._buckets, replica_axis)

    def _enter(self, inside: Literal["read", "write"] | None) -> None:
        self._inside = inside
        self._hooks.refuse_forwards(_INSIDE if inside == "write" else None)
        for bucket in self._buckets:
            bucket.full.pin(inside == "read")


def _refuse_edits(packed: Sequence[Bucket]) -> None:
    for bucket in packed:
        refuse_packed_edits(bucket)
