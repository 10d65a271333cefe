"""One flat index space of a unit and its states on this rank: weight, gradient, master weight and moments.

`Bucket.spec` says which of them exist, and which share memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.buckets.gradients.gradient import Gradient
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting, StateStore
from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.buckets.resting.moment_states import MomentStates
from terrazzo.engine.buckets.resting.with_remainder import WithRemainder
from terrazzo.engine.buckets.weights.full import FullWeights
from terrazzo.engine.buckets.weights.weight_gathers import update_way
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.formats.bf16_remainder import split_remainder
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.plan.bucket_bytes import StateBytes
from terrazzo.engine.plan.layout import Slot
from terrazzo.engine.runtime.private_torch import plainly

__all__ = ["Bucket"]


class Bucket(BucketLayout):
    """Memory for a `BucketLayout`: what its `spec` describes.

    Args:
        laid_out: its parameters, whose values fill the states; they become views of the full weights.
        store: gives the states their places.
        ledger: of transient memory.

    Attributes:
        weight, master: at rest; one memory, or part of one, where the description says so.
        exact: the master weights with what they leave out of fp32, where that is kept; else `master` itself.
        gradient: of its parameters.
        outer: the states of the outer step: weights that a round began with, and momentum; see `DiLoCo`.
        moments: what the optimizer keeps for each element away from the device or in 8 bits.
        full: the weights that the parameters are views of.
        changes: counts those of the weights.
    """

    def __init__(self, laid_out: BucketLayout, store: StateStore, ledger: Ledger) -> None:
        super().__init__(laid_out.members, laid_out.spec, laid_out.space)
        spec, self.ledger, self.changes = self.spec, ledger, 0
        self.weight = self._weight(store)
        self.master = self._master(store)
        self.exact = self._exact(store)
        self.gradient = Gradient(self.space, spec, self.members, self.counted, store, ledger)
        self.outer: list[Resting] = [
            store.state(self.space, spec.outer_axes, torch.float32, spec.outer_tier) for _ in range(spec.outer_states)
        ]
        self.moments = MomentStates(self.space, spec)
        for slot, member in zip(self.slots, self.members, strict=True):
            self._fill(slot, member.parameter.detach())
        self.full = FullWeights(self.members, spec, self.space, self.weight, ledger)
        self._update = update_way(spec, ledger)

    def _weight(self, store: StateStore) -> Resting:
        spec, tier = self.spec, self.spec.tiers.weight
        if spec.packed is None:
            return store.state(self.space, spec.weight_axes, spec.weight_dtype, tier)
        blocks = spec.packed.blocks
        codes = store.state(self.space.as_bytes(blocks), spec.weight_axes, torch.uint8, tier)
        return CodedState(self.space, spec.weight_axes, codes, blocks, torch.bfloat16)

    def _master(self, store: StateStore) -> Resting:
        spec = self.spec
        if spec.has_own_master:
            return store.state(self.space, spec.optim_axes, spec.precision.master, spec.tiers.optim)
        return self.weight.narrow(spec.optim_axes) if isinstance(self.weight, Buffer) else self.weight

    def _exact(self, store: StateStore) -> Resting:
        spec = self.spec
        if not spec.has_remainder:
            return self.master
        remainder = store.state(self.space, spec.optim_axes, torch.int16, spec.tiers.optim)
        return WithRemainder(self.space, spec.optim_axes, self.master, remainder)

    # -- gradients ---------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradient, and whatever stands in for it; or set a finished one to zero."""
        self.gradient.zero(set_to_none)
        if set_to_none:
            with plainly():
                for member in self.members:
                    member.parameter.grad = None

    # -- values ------------------------------------------------------------------------------------------------

    def states(self) -> list[Resting]:
        """What holds the parameters' values: the weight, and the masters if they are memory of their own."""
        has_others = self.spec.has_own_master or self.spec.has_remainder
        return [self.exact, self.weight] if has_others else [self.weight]

    def measured_at_rest(self) -> Iterator[StateBytes]:
        """Yield what `at_rest` promises of all states but the gradient, as they lie in memory or files."""
        spec, tiers = self.spec, self.spec.tiers
        yield StateBytes("weight", tiers.weight, self.weight.nbytes)
        if spec.has_own_master:
            yield StateBytes("master", tiers.optim, self.master.nbytes)
        if isinstance(self.exact, WithRemainder):
            yield StateBytes("master", tiers.optim, self.exact.remainder.nbytes)
        yield from (StateBytes("moments", tiers.optim, state.nbytes) for state in self.moments.values())
        yield from (StateBytes("outer", spec.outer_tier, state.nbytes) for state in self.outer)
        if spec.trainable:
            yield from (StateBytes("residuals", spec.residual_tier, each.nbytes) for each in self.gradient.residuals)

    def write(self, slot: Slot, value: Tensor) -> None:
        """Set one parameter from its full value: this rank keeps its own part of it."""
        self.note_change()
        self._fill(slot, value)

    def note_change(self) -> None:
        """Note that the weights have new values: no backward of what was computed from those before may read them."""
        self.changes += 1
        self.full.edits.outdate()

    def _fill(self, slot: Slot, value: Tensor) -> None:
        flat = value.reshape(-1)
        for state in self.states():
            for part in state.cuts(slot.range):
                with state.opened(part, "change") as data:
                    values = flat[part.within(slot.range)]
                    data.copy_(self.as_published(values) if state is self.weight else values)

    def as_published(self, values: Tensor) -> Tensor:
        """Return what weights at rest are where masters are set to `values`: none that no master has.

        Args:
            values: 1-D, of any dtype, from the beginning of a block.
        """
        if self.spec.trainable:
            values = values.to(self.exact.dtype)
        if self.spec.has_remainder:
            values, _ = split_remainder(values)
        return self.update_as_seen(values)

    def round_written(self) -> None:
        """Round whole weights, which have been written into, to what masters hold of them and what is sent of these."""
        is_wider = torch.promote_types(self.weight.dtype, self.exact.dtype) != self.exact.dtype
        if isinstance(self.weight, Buffer) and (is_wider or self.spec.update_wire.rounds):
            self.weight.data.copy_(self.as_published(self.weight.data))

    def as_seen(self, values: Tensor) -> Tensor:
        """Return what ranks see of weights at rest that are gathered. `values`: 1-D, from the beginning of a block."""
        return self.spec.weight_wire.as_seen(values, self.spec.compute_dtype)

    def update_as_seen(self, values: Tensor) -> Tensor:
        """Return what new values become as weights at rest. `values` as for `as_seen`."""
        return self.spec.update_wire.as_seen(values, self.spec.compute_dtype)

    # -- after an update ---------------------------------------------------------------------------------------

    def publish(self, copied: bool = False) -> Moves[None]:
        """Bring the weights at rest in line with the master weights, after an update.

        Args:
            copied: whether this rank's own part of the weights has been brought in line already; see `own_weight`.
        """
        self.note_change()
        if self.spec.gathers_apart:
            with self.ledger.holding(self.weight.nbytes):
                gathered = self.space.empty(self.spec.weight_axes, self.spec.weight_dtype)
                yield from self._bring_new(gathered, self.master)
                self.weight.save(gathered)
        elif isinstance(self.weight, Buffer):
            yield from self._bring_new(self.weight, None if copied else self.master)
        elif self.spec.has_own_master and not copied:
            for part in self.weight.cuts(self.weight.range):
                with self.weight.opened(part, "replace") as weight, self.master.opened(part) as master:
                    weight.copy_(master)

    def _bring_new(self, weight: Buffer, own: Resting | None) -> Moves[None]:
        """Fill `weight` from the master weights of all ranks.

        Args:
            own: those of this rank; None where its part of `weight` is there.
        """
        if own is not None:
            yield from weight.fill_own(own)
        yield from self._update(weight, self.spec.optim_axes)

    @property
    def own_weight(self) -> Resting | None:
        """Place for this rank's part of the new weights, if an update can put it there; None: `publish` has to."""
        spec = self.spec
        if not spec.has_own_master:
            return None
        if isinstance(self.weight, Buffer):
            return self.weight.narrow(spec.optim_axes)
        return self.weight if spec.weight_axes == spec.optim_axes and spec.tiers.optim == "nvme" else None
