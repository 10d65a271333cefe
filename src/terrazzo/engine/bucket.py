"""One flat index space of a unit and its states on this rank: weight, gradient and master weight.

A unit has one bucket of trainable parameters and one per kind of frozen ones. Which states exist, and which share
memory, follows from the plan's four places and the precision's dtypes alone:

    weight and master, same axes, same dtype          one memory
    weight and master, same axes, weight only a cast  the master alone; the weight is cast as it is gathered
    weight less split, same dtype                     the master is a view into the weight
    weight less split, other dtype                    two memories
    weight not split, dtype as computed with          modules see that memory itself, nothing is gathered
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from terrazzo.engine.axes import Axes
from terrazzo.engine.buffer import Buffer, Space
from terrazzo.engine.layout import Layout, Slot
from terrazzo.engine.pages import use_large_pages
from terrazzo.engine.parameter import Guard
from terrazzo.engine.place import Plan
from terrazzo.engine.precision import Precision
from terrazzo.engine.transfer import Moves

__all__ = ["Bucket", "Member", "Recipe"]


@dataclass
class Member:
    """One parameter: every name it has, where it is registered, and the optimizer's param group (-1: none)."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    group: int = -1

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad


@dataclass(frozen=True)
class Recipe:
    """What every bucket of a model follows. `plan`'s places hold only axes with more than one rank."""

    axes: Axes
    plan: Plan
    precision: Precision


@dataclass(eq=False)
class Bucket:
    """Parameters of one unit that share a flat index space.

    Attributes:
        members: the parameters, in layout order.
        keep: hold full weights between forward and backward whatever the plan says (the root unit, which would be
            gathered again at once).
        filled_numel: elements of the parameters whose gradients are in the unreduced gradient.
    """

    members: list[Member]
    recipe: Recipe
    keep: bool = False
    seen: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        axes, plan, precision = self.recipe.axes, self.recipe.plan, self.recipe.precision
        layout = Layout([(m.names, tuple(m.parameter.shape)) for m in self.members], axes.size())
        self.space = Space(layout, axes)
        self.trainable = self.members[0].trainable
        original = self.members[0].parameter.dtype
        self.compute_dtype = precision.compute if original.is_floating_point else original
        stored = precision.weight if original.is_floating_point else original
        self.weight_axes = plan.weight.axes
        self.between_axes = () if self.keep else plan.between.axes
        self.optim_axes = plan.optim.axes if self.trainable else plan.weight.axes
        self.has_own_master = self.trainable and not self._weight_serves_as_master(stored)
        self.weight_dtype = stored if self.has_own_master or not self.trainable else precision.master
        self.resident = not self.weight_axes and self.weight_dtype == self.compute_dtype
        self.seen = [False] * len(self.members)
        self.grad: Tensor | None = None
        self.pending: Tensor | None = None
        self._partial: Tensor | None = None
        self._empty()

    def _weight_serves_as_master(self, stored: torch.dtype) -> bool:
        master = self.recipe.precision.master
        if stored == master:
            return True
        return self.weight_axes == self.optim_axes != () and stored == self.compute_dtype

    @property
    def slots(self) -> Sequence[Slot]:
        return self.space.layout.slots

    # -- building ----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Allocate the states, fill them from the parameters' values, and make the parameters views."""
        self.weight = self.space.zeros(self.weight_axes, self.weight_dtype)
        self.master = self.weight.narrow(self.optim_axes)
        if self.has_own_master:
            self.master = self.space.zeros(self.optim_axes, self.recipe.precision.master)
        for slot, member in zip(self.slots, self.members, strict=True):
            self.write(slot, member.parameter.detach())
        self.full = self.weight if self.resident else self.space.empty((), self.compute_dtype)
        self._held: Buffer | None = None
        self._present = True
        self._guard = Guard([(member.parameter, member.name) for member in self.members])
        for slot, member in zip(self.slots, self.members, strict=True):
            member.parameter.data = self._view(self.full.data, slot)
        if not self.resident:
            self.recipe.axes.ledger.take(self.full.data.nbytes)
            self.release()

    def write(self, slot: Slot, value: Tensor) -> None:
        """Set one parameter from its full value: this rank keeps its own part of it."""
        flat = value.reshape(-1)
        for state in (self.master, self.weight) if self.has_own_master else (self.weight,):
            held = state.range.intersect(slot.range)
            if held.numel:
                state.part(slot.range).copy_(flat[held.within(slot.range)])

    def take_written(self) -> None:
        """Adopt what was written into the gathered weights.

        A master weight is replaced only where the value it rounds to was changed, so that reading and writing back in a
        lower precision loses nothing.
        """
        if not self.resident:
            written = self.full.narrow(self.weight_axes).data
            self.weight.data.copy_(
                torch.where(written == self.weight.data.to(written.dtype), self.weight.data, written)
            )
        if self.has_own_master:
            written = self.weight.narrow(self.optim_axes).data
            master = self.master.data
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))

    def _view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat.as_strided(slot.shape, slot.strides, flat.storage_offset() + slot.offset)

    # -- weights -----------------------------------------------------------------------------------------------

    @property
    def present(self) -> bool:
        """Whether modules can read the full weights now."""
        return self._present

    def gather(self) -> Moves:
        """Bring the full weights to this rank, from where they rest."""
        source = self._held or self.weight
        storage = self.full.data.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.data.nbytes)
            use_large_pages(self.full.data)
            self.recipe.axes.ledger.take(self.full.data.nbytes)
        return (yield from self.full.gather(source))

    def install(self) -> None:
        """Let modules read the gathered weights."""
        if not self._present:
            self._present = True
            self._drop_held()
            self._guard.open()

    def rest_between(self) -> None:
        """From forward to backward: keep the part of the full weights that the plan's `between` names."""
        if self.resident or not self._present or self.between_axes == ():
            return
        if self.between_axes != self.weight_axes and self._held is None:
            kept = self.full.narrow(self.between_axes)
            self._held = Buffer(self.space, kept.axes, kept.data.clone())
            self.recipe.axes.ledger.take(kept.data.nbytes)
        self.release()

    def release(self) -> None:
        """Give back the memory of the full weights."""
        if self.resident:
            return
        storage = self.full.data.untyped_storage()
        if storage.size():
            self.recipe.axes.ledger.give(storage.size())
            storage.resize_(0)
        if self._present:
            self._present = False
            self._guard.close()

    def rest(self) -> None:
        """Release everything that is not `weight`'s own place: the weights have changed or the step is over."""
        self.release()
        self._drop_held()

    def _drop_held(self) -> None:
        if self._held is not None:
            self.recipe.axes.ledger.give(self._held.data.nbytes)
            self._held = None

    def publish(self) -> Moves:
        """After an update: bring the weights at rest in line with the master weights."""
        return (yield from self.weight.gather(self.master))

    # -- gradients ---------------------------------------------------------------------------------------------

    def take_gradient(self, index: int, dtype: torch.dtype) -> None:
        """Move a parameter's `.grad` into the unreduced gradient, adding to what earlier micro-batches left there.

        Args:
            index: which member.
            dtype: of the unreduced gradient, if this is its first part.
        """
        parameter = self.members[index].parameter
        if parameter.grad is None:
            return
        if self.pending is None:
            self.pending = self._start_pending(dtype)
        target = self._view(self.pending, self.slots[index])
        if self._filled[index]:
            target.add_(parameter.grad)
        else:
            target.copy_(parameter.grad)
            self.filled_numel += self.slots[index].numel
        parameter.grad = None
        self._filled[index] = self.seen[index] = True

    def _empty(self) -> None:
        """Nothing is in the unreduced gradient."""
        self._filled, self.filled_numel = [False] * len(self.members), 0

    def _start_pending(self, dtype: torch.dtype) -> Tensor:
        pending = self.space.empty((), dtype).data
        for gap in self.space.layout.gaps:
            pending[gap.start : gap.stop].zero_()
        self.recipe.axes.ledger.take(pending.nbytes)
        return pending

    def reduce(self, denominator: float | None) -> Moves:
        """Sum the unreduced gradient over ranks; parameters without one count as zero.

        Args:
            denominator: divides the finished sum on the last micro-batch; None on earlier ones, whose sums stay at the
                plan's `grad` place.
        """
        precision, ledger = self.recipe.precision, self.recipe.axes.ledger
        last = denominator is not None
        first = self.first_reduction(last)
        pending = self._take_pending(precision.reduce)
        held_bytes = pending.nbytes
        data = yield from Buffer(self.space, (), pending).reduce(first, precision.reduce, precision.accumulate)
        if data is not pending:
            del pending  # its memory goes as soon as its sum has arrived
            ledger.give(held_bytes)
            held_bytes = 0
        if self._partial is not None:
            ledger.give(self._partial.nbytes)
            data, self._partial = self._partial.add_(data), None
        if denominator is None:
            self._partial = data
            ledger.take(data.nbytes)
        else:
            counted = data.nbytes if not held_bytes and self.moves_after(first) else 0
            ledger.take(counted)
            data = yield from self._finish(Buffer(self.space, first, data), denominator)
            ledger.give(counted)
        ledger.give(held_bytes)
        return data

    def first_reduction(self, last: bool) -> tuple[str, ...]:
        """The axes over which a micro-batch's gradient is reduced before it meets those of earlier micro-batches."""
        return self.recipe.plan.grad.axes or (self.optim_axes if last else ())

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Data axes whose ranks hold the same optimizer state."""
        return tuple(axis for axis in self.recipe.axes.names if axis not in self.optim_axes)

    def moves_after(self, first: tuple[str, ...]) -> bool:
        """Whether a sum over `first` still has to be reduced further at the end of a step."""
        return first != self.optim_axes or bool(self.recipe.axes.live(self.replica_axes))

    def _finish(self, partial: Buffer, denominator: float) -> Moves:
        """From the plan's `grad` place to `optim`'s, summed over every data rank and divided once."""
        wire, dtype = self.recipe.precision.reduce, self.recipe.precision.accumulate
        own = Buffer(self.space, self.optim_axes, (yield from partial.reduce(self.optim_axes, wire, dtype)))
        data = yield from own.average(self.replica_axes, wire, dtype, denominator)
        self.grad = data if self.grad is None else self.grad.add_(data)
        return self.grad

    def _take_pending(self, dtype: torch.dtype) -> Tensor:
        if self.pending is None:
            self.pending = self._start_pending(dtype)
        for slot, filled in zip(self.slots, self._filled, strict=True):
            if not filled:
                self.pending[slot.range.start : slot.range.stop].zero_()
        pending = self.pending
        self.pending = None
        self._empty()
        return pending

    @property
    def unfinished(self) -> bool:
        """Whether micro-batches have left gradients that no last one has finished."""
        return self.pending is not None or self._partial is not None

    def drop_unfinished(self) -> None:
        """Forget gradients of a step that was abandoned or has been consumed."""
        for part in (self.pending, self._partial):
            if part is not None:
                self.recipe.axes.ledger.give(part.nbytes)
        self.pending = self._partial = None
        self._empty()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget every gradient, finished or not; or set finished ones to zero, which an optimizer still steps on."""
        self.drop_unfinished()
        if set_to_none or self.grad is None:
            self.grad, self.seen = None, [False] * len(self.members)
        else:
            self.grad.zero_()
