"""A unit: the parameters that are gathered and reduced together, normally one transformer block's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.transfer import Moves, Transfer
from terrazzo.engine.worker import Job

__all__ = ["Unit"]


class Unit:
    """One unit's buckets, and the one gather that may be under way for them.

    Attributes:
        name: of its module in the model; empty for the root.
        index: position in the order of registration, root first.
    """

    def __init__(self, name: str, index: int, module: nn.Module, buckets: list[Bucket]) -> None:
        self.name, self.index, self.buckets = name, index, buckets
        self._module = weakref.ref(module)  # the module's hooks lead here: a strong edge back would be a cycle
        self._gathering: Transfer | None = None
        self._update: Job | None = None
        self._trainable_numel = sum(slot.numel for bucket in self.trainable() for slot in bucket.slots)

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {self.numel:,} elements)"

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the model is gone"
        return module

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
        """Whether backward gathers weights again that forward has put down."""
        return any(not bucket.resident and not bucket.keeps_full for bucket in self.buckets)

    @property
    def fills_gradually(self) -> bool:
        """Whether gradients come one after the other while backward runs; a compiled unit gives all at its end."""
        module = self.module
        compiled = module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        return self.has_gradients and not compiled

    @property
    def present(self) -> bool:
        return all(bucket.present for bucket in self.buckets)

    @property
    def has_gradients(self) -> bool:
        return any(bucket.trainable for bucket in self.buckets)

    @property
    def half_filled(self) -> bool:
        """Whether gradients for half of the trainable elements, or more, are here."""
        return 2 * sum(bucket.gradient.filled_numel for bucket in self.buckets) >= self._trainable_numel

    def trainable(self) -> Iterator[Bucket]:
        return (bucket for bucket in self.buckets if bucket.trainable)

    def fetch(self) -> None:
        """Start gathering full weights, unless they are here or on their way; weights from a drive, a step further."""
        if self._gathering is not None:
            if any(bucket.tiers.weight == "nvme" for bucket in self.buckets):
                self._gathering.advance()
        elif not self.present or self._update is not None:
            self._gathering = Transfer(self._gather_all())

    def _gather_all(self) -> Moves:
        yield from self.publish()
        for bucket in self.buckets:
            if not bucket.present:
                yield from bucket.gather()
        return self.buckets[0].full.data

    def wait(self) -> None:
        """Return once modules can read the full weights."""
        self.fetch()
        if self._gathering is not None:
            self._gathering.finish()
            self._gathering = None
        for bucket in self.buckets:
            bucket.install()

    def begin_update(self, update: Job) -> None:
        """Its master weights change from now on, until `update` has ended: weights at rest wait for that."""
        self._update = update
        for bucket in self.trainable():
            bucket.hide()

    @property
    def updating(self) -> bool:
        """Whether an update is under way, or has ended and the weights at rest are not in line yet."""
        return self._update is not None

    def catch_up(self) -> None:
        """Wait for the update that is under way, and bring resting weights in line."""
        if self._gathering is not None:
            self.wait()
        elif self._update is not None:
            Transfer(self.publish()).finish()

    def rest_between(self) -> None:
        """From forward to backward: keep what the plan's `between` names."""
        self._settle()
        for bucket in self.buckets:
            bucket.rest_between()

    def release(self) -> None:
        """Give back the memory of full weights."""
        self._settle()
        for bucket in self.buckets:
            bucket.release()

    def rest(self) -> None:
        """Go back to the plan's `weight` place alone."""
        self._settle()
        for bucket in self.buckets:
            bucket.rest()

    def _settle(self) -> None:
        if self._gathering is not None:
            self.wait()

    def reduce(self, denominator: float | None) -> Moves:
        """Sum the unit's gradients over ranks; see `Gradient.reduce`."""
        buckets = list(self.trainable())
        for bucket in buckets:
            data = yield from bucket.gradient.reduce(denominator)
        return data

    def publish(self) -> Moves:
        """Bring resting weights in line with updated master weights, once their update has ended."""
        if self._update is not None:
            self._update.wait()
            self._update = None
            for bucket in self.trainable():
                yield from bucket.publish(copied=bucket.own_weight is not None)
                if bucket.resident:
                    bucket.install()
        return self.buckets[0].full.data

    def republish(self) -> Moves:
        """Bring resting weights in line with master weights that have been written or stepped on this thread."""
        for bucket in self.trainable():
            yield from bucket.publish()
        return self.buckets[0].full.data
