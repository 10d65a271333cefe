"""One flat index space of a unit and its states on this rank: weight, gradient, master weight and moments.

`Bucket.spec` says which of them exist, and which share memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from terrazzo.engine.buckets.gradients.gradient import Gradient
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting, Space, StateStore
from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.buckets.resting.counted_once import CountedOnce
from terrazzo.engine.buckets.resting.with_remainder import WithRemainder
from terrazzo.engine.buckets.weights.full import FullWeights
from terrazzo.engine.buckets.weights.weight_gathers import UpdateWay, update_way
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.formats.bf16_remainder import split_remainder
from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import Family
from terrazzo.engine.partition.box import Box
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.bucket_spec import BucketSpec, StateBytes
from terrazzo.engine.plan.layout import Layout, Range, Slot, travels_in_blocks
from terrazzo.engine.plan.place import ON_DEVICE, Tiers
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.runtime.private_torch import plainly

__all__ = ["Bucket"]


class Bucket:
    """Memory for what a `BucketSpec` describes: parameters of one unit that share a flat index space.

    Args:
        members: the parameters, in layout order.
        ledger: of transient memory.
        keep, tiers, packed: as for `BucketSpec`.

    Attributes:
        spec: the description.
        counted: of elements that several ranks have, which copy counts.
        gradient: of its parameters.
        moments: what the optimizer keeps for each element away from the device or in 8 bits, by its own names.
        changes: counts those of the weights.
        weight, master: at rest, from `build` on; one memory, or part of one, where the description says so.
        exact: the master weights with what they leave out of fp32, where that is kept; else `master` itself.
        outer: the states of the outer step, likewise: weights that a round began with, and momentum; see `DiLoCo`.
        full: the weights that the parameters are views of, from `build` on.
    """

    weight: Resting
    master: Resting
    exact: Resting
    full: FullWeights
    _update: UpdateWay

    def __init__(
        self,
        members: list[Member],
        sharding: ShardingSpec,
        ledger: Ledger,
        keep: bool | None = None,
        tiers: Tiers = ON_DEVICE,
        packed: FrozenFormat | None = None,
    ) -> None:
        axes, first = sharding.axes, members[0].parameter
        align = sharding.precision.align(packed, sharding.diloco)
        layout = Layout([(m.names, tuple(m.parameter.shape)) for m in members], axes.size(sharding.ranks), align)
        self.spec = BucketSpec(
            full_numel=layout.numel,
            plan=sharding.plan,
            precision=sharding.precision,
            ranks=sharding.ranks,
            tiers=tiers,
            trainable=members[0].trainable,
            keep=keep,
            stored=None if first.dtype.is_floating_point else first.dtype,
            on_host=axes.device.type == "cpu",
            tied_ranks=members[0].tied_ranks,
            packed=packed,
            in_blocks=first.dtype.is_floating_point and travels_in_blocks(members[0].shape),
            diloco=sharding.diloco,
        )
        self.members, self.ledger, self.space = members, ledger, Space(layout, axes)
        self.counted = CountedOnce(self.space, self.spec)
        self.gradient = Gradient(self.space, self.spec, members, self.counted, ledger)
        self.moments: dict[str, Resting] = {}
        self.outer: list[Resting] = []
        self._boxes = {member.name: member.box for member in members}
        self.changes = 0
        self._moment_rooms: list[tuple[Range, Resting]] = []

    @property
    def axes(self) -> Axes:
        """The axes of the mesh."""
        return self.space.axes

    @property
    def family(self) -> Family:
        """The family of its parameters, which says over which axes their gradients are summed."""
        return self.members[0].family

    @property
    def slots(self) -> Sequence[Slot]:
        return self.space.layout.slots

    def coordinate(self, axis: str) -> tuple[int, int]:
        """This rank's index along an axis, and how many there are."""
        along = self.axes.along(axis)
        return along.rank, along.size

    def part(self, axes: tuple[str, ...]) -> Range:
        """This rank's part of the flat space when it is split over `axes`."""
        return self.space.range(axes)

    def box(self, slot: Slot) -> Box:
        """This rank's part of the parameter in a slot."""
        return self._boxes[slot.name]

    # -- gradients ---------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradient, and whatever stands in for it; or set a finished one to zero."""
        self.gradient.zero(set_to_none)
        if set_to_none:
            with plainly():
                for member in self.members:
                    member.parameter.grad = None

    # -- building ----------------------------------------------------------------------------------------------

    def build(self, store: StateStore) -> None:
        """Allocate the states, fill them from the parameters' values, and make the parameters views."""
        spec, tiers = self.spec, self.spec.tiers
        if spec.packed is None:
            self.weight = store.state(self.space, spec.weight_axes, spec.weight_dtype, tiers.weight)
        else:
            blocks = spec.packed.blocks
            codes = store.state(self.space.as_bytes(blocks), spec.weight_axes, torch.uint8, tiers.weight)
            self.weight = CodedState(self.space, spec.weight_axes, codes, blocks, torch.bfloat16)
        if spec.has_own_master:
            self.master = store.state(self.space, spec.optim_axes, spec.precision.master, tiers.optim)
        else:
            self.master = self.weight.narrow(spec.optim_axes) if isinstance(self.weight, Buffer) else self.weight
        self.exact = self.master
        if spec.has_remainder:
            remainder = store.state(self.space, spec.optim_axes, torch.int16, tiers.optim)
            self.exact = WithRemainder(self.space, spec.optim_axes, self.master, remainder)
        if spec.trainable:
            self.gradient.build(store)
        for _ in range(spec.outer_states):
            self.outer.append(store.state(self.space, spec.outer_axes, torch.float32, spec.outer_tier))
        for slot, member in zip(self.slots, self.members, strict=True):
            self._fill(slot, member.parameter.detach())
        self.full = FullWeights(self.members, spec, self.space, self.weight, self.ledger)
        self._update = update_way(spec, self.ledger)

    def build_moments(self, store: StateStore, windows: Mapping[str, Range]) -> None:
        """Make room for what the optimizer will keep for each element away from the device or in 8 bits.

        Room that an earlier optimizer has left is used again.

        Args:
            windows: for each state, by name, those of this rank's elements that have it.
        """
        axes, tier, precision = self.spec.optim_axes, self.spec.tiers.optim, self.spec.precision
        form, rooms = precision.narrow, self._moment_rooms
        states: dict[str, Resting] = {}
        for name, room in self.rooms_left(windows).items():
            if room is None:
                if form is None:
                    everything = windows[name] == self.space.range(axes)
                    space = self.space if everything else self.space.windowed(windows[name])
                    state = store.state(space, axes, precision.shown_moments, tier)
                else:
                    state = store.state(self.space.as_bytes(form.blocks), axes, torch.uint8, tier)
                rooms.append((windows[name], state))
                room = len(rooms) - 1
            state = rooms[room][1]
            if form is None:
                states[name] = state
            else:
                states[name] = CodedState(self.space, axes, state, form.blocks.of(name), torch.float32)
        self.moments = states

    def rooms_left(self, windows: Mapping[str, Range]) -> dict[str, int | None]:
        """Choose, for each state, one of the rooms that earlier optimizers have left; None: it needs one of its own."""
        free, rooms = list(range(len(self._moment_rooms))), dict[str, int | None]()
        for name, window in windows.items():
            fitting = (room for room in free if self._moment_rooms[room][0].intersect(window).numel == window.numel)
            rooms[name] = next(fitting, None)
            free = [room for room in free if room != rooms[name]]
        return rooms

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
