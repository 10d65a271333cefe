"""One flat bucket of a unit, described without tensors: how each state is split, where it rests, and what a step moves.

A unit has a bucket for each group of parameters that can share one, see docs/concepts/units.md. Which states exist, and
which share memory, follows from the plan's four places and the precision's dtypes alone:

    weight and master, same axes, same dtype          one memory
    weight and master, same axes, weight only a cast  the master alone; the weight is cast as it is gathered
    weight less split, same dtype                     the master is a view into the weight
    weight less split, other dtype                    two memories
    weight not split, dtype as computed with          modules see that memory itself, nothing is gathered

Frozen matrices may be kept in 4 bits: `packed`. They are gathered so, and decoded into full weights, which never stay
from forward to backward; in their place stays what `between` keeps of the bytes, from the gather of forward on.

On different tiers they are two memories. Away from the device so are a weight and a master of different dtypes, whose
cast would cross over in the wider of the two, and in files those of different axes.

A `Bucket` is memory for one. The bill, the dry run and the planner ask the description alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.mesh.family import seeing_other_data
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.gradient_wire import Axis, GradientWire
from terrazzo.engine.plan.kept_weights import Keep
from terrazzo.engine.plan.moves import GradientFate, MoveBytes, ReductionMoves, Sums
from terrazzo.engine.plan.place import ON_DEVICE, Plan, Tiers
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.plan.weight_wire import BlockWire, DtypeWire, PackedWire, WeightWire

__all__ = ["BucketSpec"]


@dataclass(eq=False, kw_only=True)
class BucketSpec:
    """Parameters of one unit that share a flat index space.

    Args:
        full_numel: elements of the space on the ranks of all data axes, padding included.
        plan: its places hold only axes with more than one rank.
        ranks: the axes with more than one rank over which gradients are summed, innermost first; data axes come first.
        tiers: where its states rest.
        trainable: or frozen.
        keep: what stays of full weights from forward to backward.
        stored: dtype of parameters that are no floating-point numbers, which no precision changes.
        on_host: whether collectives reach the host's memory: ranks on CPUs.
        tied_ranks: the ranks along `pp` that have these parameters, where several do.
        packed: in which frozen weights rest and are gathered; None: in a dtype.
        in_blocks: whether its parameters may be sent in blocks, as matrices may; see `travels_in_blocks`.
        diloco: how replicas train by themselves, if they do.
    """

    full_numel: int
    plan: Plan
    precision: Precision
    ranks: Mapping[str, Axis]
    tiers: Tiers = ON_DEVICE
    trainable: bool = True
    keep: Keep = Keep.AS_PLANNED
    stored: torch.dtype | None = None
    on_host: bool = False
    tied_ranks: tuple[int, ...] = ()
    packed: FrozenFormat | None = None
    in_blocks: bool = False
    diloco: DiLoCo | None = None
    _numels: dict[tuple[str, ...], int] = field(default_factory=dict, init=False, repr=False)

    # -- which states there are, and over which axes they are split --------------------------------------------

    @cached_property
    def weight_axes(self) -> tuple[str, ...]:
        """Axes over which weights at rest are split."""
        return self.plan.weight.axes

    @cached_property
    def between_axes(self) -> tuple[str, ...]:
        """Axes over which what is kept of full weights from forward to backward is split."""
        return () if self.keep is Keep.ALL else self.plan.between.axes

    @cached_property
    def optim_axes(self) -> tuple[str, ...]:
        """Axes over which master weights and what the optimizer keeps are split; frozen weights have neither."""
        return self.plan.optim.axes if self.trainable else self.plan.weight.axes

    def copied_along(self, split: tuple[str, ...], apart: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Axes along which ranks have the same of a state.

        Args:
            split: the axes over which it is split.
            apart: those along which each rank has one of its own.
        """
        return tuple(axis for axis in self.ranks if axis not in (*split, *apart))

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of full weights."""
        return self.stored or self.precision.compute

    @property
    def own_dtype(self) -> torch.dtype:
        """Dtype of weights at rest whose memory is not that of their master."""
        return self.stored or self.precision.weight

    @property
    def shares_memory(self) -> bool:
        """Whether a weight and its master are one memory, or one within the other."""
        same_axes, tier = self.weight_axes == self.optim_axes, self.tiers.weight
        if tier != self.tiers.optim or self._rounds_updates:
            return False
        if self.own_dtype == self.precision.master:
            return same_axes or tier != "nvme"
        return tier == "device" and same_axes and self.weight_axes != () and self.own_dtype == self.compute_dtype

    @cached_property
    def has_own_master(self) -> bool:
        """Whether master weights have memory of their own."""
        return self.trainable and not self.shares_memory

    @property
    def has_remainder(self) -> bool:
        """Whether what master weights in bf16 leave out of fp32 is kept beside them."""
        return self.trainable and self.precision.keeps_remainder

    @cached_property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of weights at rest."""
        return self.own_dtype if self.has_own_master or not self.trainable else self.precision.master

    @cached_property
    def resident(self) -> bool:
        """Whether modules see the weights at rest themselves, so that nothing is gathered."""
        as_computed = self.weight_dtype == self.compute_dtype and self.packed is None
        return as_computed and not self.weight_axes and self.tiers.weight == "device"

    @cached_property
    def regathered(self) -> bool:
        """Whether backward gathers full weights again, because they do not stay from forward to backward."""
        if self.resident or self.keep is Keep.ALL:
            return False
        is_away = not self.weight_axes and self.tiers.weight != "device"  # whole, but to be fetched
        return self.keep is Keep.BETWEEN or self.between_axes != () or is_away or self.packed is not None

    @cached_property
    def updated_off_device(self) -> bool:
        """Whether the optimizer steps it away from the device."""
        return self.trainable and self.tiers.optim != "device"

    @cached_property
    def moments_apart(self) -> bool:
        """Whether what the optimizer keeps for each element is the bucket's, and not tensors of the optimizer's own."""
        return self.updated_off_device or (self.trainable and self.precision.narrow is not None)

    @cached_property
    def gathers_apart(self) -> bool:
        """Whether new weights are gathered in device memory of their own, on their way to where they rest."""
        return not self._reached(self.tiers.weight) and self.weight_axes != self.optim_axes

    def _reached(self, tier: str) -> bool:
        """Whether collectives reach memory on a tier."""
        return tier == "device" or (tier == "cpu" and self.on_host)

    # -- what weights and gradients are sent as ----------------------------------------------------------------

    @cached_property
    def weight_wire(self) -> WeightWire:
        """Format of weights as they are gathered for computing."""
        if self.packed is not None:
            return PackedWire(self.packed)
        if self.precision.gather is not None and self.in_blocks:
            return BlockWire(self.precision.gather)
        return DtypeWire(self.compute_dtype)

    @cached_property
    def update_wire(self) -> WeightWire:
        """Format of new weights on their way from the optimizer's to where weights rest.

        If it rounds, those at rest are what ranks see of the optimizer's.
        """
        return self.weight_wire if self._rounds_updates else DtypeWire(self.weight_dtype)

    @property
    def _rounds_updates(self) -> bool:
        """Whether new weights are rounded as they are sent; where none are, nothing is."""
        return self.weight_wire.rounds and self.weight_axes != self.optim_axes

    @cached_property
    def gradient_wire(self) -> GradientWire:
        """Formats of gradients as they are summed over ranks, and the residuals that rest of them."""
        in_blocks = self.trainable and self.in_blocks
        return GradientWire(self.ranks, self.optim_axes, self.precision, in_blocks, self.device_kind)

    @property
    def average_tier(self) -> str:
        """Tier of an average of trained weights: host memory where the optimizer's state is off the device."""
        return "device" if self.tiers.optim == "device" else "cpu"

    @property
    def residual_tier(self) -> str:
        """Tier of residuals: host memory where gradients are off the device."""
        return "device" if self.tiers.grad == "device" else "cpu"

    @property
    def device_kind(self) -> str:
        """Kind of the device on which messages are encoded."""
        return "cpu" if self.on_host else "cuda"

    # -- sizes -------------------------------------------------------------------------------------------------

    def numel(self, axes: tuple[str, ...]) -> int:
        """Elements of one rank when the space is split over `axes`, in their order."""
        if (known := self._numels.get(axes)) is None:
            known = self._numels[axes] = -(-self.full_numel // math.prod([self.ranks[axis].size for axis in axes]))
        return known

    def pending_dtype(self, fate: GradientFate) -> torch.dtype:
        """The dtype of an unreduced gradient, which only adds up on this rank or is on its way to the wire."""
        return self.precision.accumulate if fate is GradientFate.LOCAL else self.precision.reduce

    @property
    def gathers_into_place(self) -> bool:
        """Whether memory for full weights is there before they come; else as they are decoded."""
        return not self.weight_wire.message_bytes(self.full_numel) or self.tiers.weight != "device"

    # -- collectives -------------------------------------------------------------------------------------------

    @cached_property
    def weight_gathers(self) -> Sequence[MoveBytes]:
        """Gathers of full weights from where they rest."""
        return self._gathers(self.weight_axes, (), self.weight_wire, "weights")

    @cached_property
    def between_gathers(self) -> Sequence[MoveBytes]:
        """Gathers of full weights in backward, from what `between` keeps of them."""
        return self._gathers(self.between_axes, (), self.weight_wire, "weights")

    @cached_property
    def update_gathers(self) -> Sequence[MoveBytes]:
        """Gathers of new weights from where they were stepped to where they rest."""
        return self._gathers(self.optim_axes, self.weight_axes, self.update_wire, "updated weights")

    @cached_property
    def sums(self) -> Sums:
        """Reductions of gradients: to the plan's `grad` place, and then to `optim`'s."""
        grad, optim = self.plan.grad.axes, self.optim_axes
        partial_axes = grad or optim
        partial = self._scatters((), partial_axes)
        finish = [
            *self._scatters(partial_axes, optim),
            *self.gradient_wire.all_reduces(self.copied_along(optim), self.numel(optim)),
        ]
        finishing_bytes = self.numel(partial_axes) * self.precision.accumulate.itemsize if partial and finish else 0
        return Sums(
            earlier=ReductionMoves(self._scatters((), grad), grad, (), grad, 0),
            last=ReductionMoves(partial, partial_axes, finish, optim, finishing_bytes),
        )

    def _gathers(
        self, source: tuple[str, ...], target: tuple[str, ...], wire: WeightWire, what: str
    ) -> list[MoveBytes]:
        moves, own = [], self.numel(source)
        for cut in range(len(source) - 1, len(target) - 1, -1):
            wider = self.numel(source[:cut])
            moves.append(MoveBytes("all_gather", what, source[cut], wire.sent_bytes(wider - own)))
            own = wider
        return moves

    def _scatters(self, source: tuple[str, ...], target: tuple[str, ...]) -> list[MoveBytes]:
        moves, full = list[MoveBytes](), self.numel(source)
        for cut in range(len(source), len(target)):
            own = self.numel(target[: cut + 1])
            moves.append(self.gradient_wire.scatter(target[cut], full, own))
            full = own
        return moves

    # -- outer steps -------------------------------------------------------------------------------------------

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """Axes over which states of outer steps are split: all of a replica along which ranks see other data."""
        return (*self.optim_axes, *(axis for axis in seeing_other_data(self.ranks) if axis not in self.optim_axes))

    @property
    def outer_states(self) -> int:
        """Number of states of outer steps, each in fp32."""
        return 0 if self.diloco is None or not self.trainable else self.diloco.states

    @property
    def outer_tier(self) -> str:
        """Tier of states of outer steps: host memory where the optimizer's state is off the device."""
        return "device" if self.tiers.optim == "device" else "cpu"

    @property
    def outer_gathers_apart(self) -> bool:
        """Whether an outer step's new weights are gathered in device memory of their own, on their way to masters."""
        in_place = self._reached(self.tiers.optim) and not self.has_remainder
        return not in_place and self.outer_axes != self.optim_axes

    @property
    def outer_gathers(self) -> list[MoveBytes]:
        """Gathers of an outer step's new weights to where the optimizer's are."""
        return self._gathers(self.outer_axes, self.optim_axes, DtypeWire(torch.float32), "outer weights")
