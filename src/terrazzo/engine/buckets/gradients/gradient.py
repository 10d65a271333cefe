"""The gradient of a bucket on this rank, on its way from autograd to the optimizer.

It takes three forms; the second is there only between micro-batches that are reduced one by one:

    form        what it is                           from                          until
    unreduced   UnreducedGradient: the whole space,  the first gradient of a pass  `reduce` takes it
                of this rank's data alone
    partial     SummedGradient: the plan's `grad`    `reduce` of a micro-batch     the next `reduce` adds it to its own
                place, summed over ranks             that is not the last
    finished    FinishedGradient: `optim`'s place,   `reduce` of the last one      an update has it, and `zero`
                of all micro-batches, divided

Partial sums and the finished gradient rest on the plan's tier.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.gradients.block_sums import Encode, encode_all, gather_sums, sum_scattered
from terrazzo.engine.buckets.gradients.finished import FinishedGradient
from terrazzo.engine.buckets.gradients.residual import Residual
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.buckets.gradients.unreduced import UnreducedGradient
from terrazzo.engine.buckets.resting.buffer import Buffer, Space, StateStore
from terrazzo.engine.buckets.resting.counted_once import CountedOnce
from terrazzo.engine.comm.collectives import MessageRoute
from terrazzo.engine.comm.sums import divide
from terrazzo.engine.comm.tags import TIED_FLAGS, TIED_GRADIENTS
from terrazzo.engine.comm.transfer import Moves, Released, converted, next_stream, outlives_chain, tail
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.plan.moves import Divisor, GradientFate, MoveBytes, ReductionMoves
from terrazzo.engine.runtime.device import HOST

__all__ = ["Gradient"]


_TAGS = {"tied": TIED_GRADIENTS, "control": TIED_FLAGS}


class Gradient:
    """The gradients of all parameters of one flat space, in whichever form they are.

    Args:
        members: the parameters.
        counted: whether this rank's gradient of one counts.
        store: gives what rests of them its places.
        ledger: counts transient memory.
        spec: says how gradients are summed over ranks, in which dtypes, where sums rest, and which residuals there are.

    Attributes:
        seen: for each parameter, whether a gradient of it is known to have come since the last `zero`: on this rank, or
            on another that has told so by `sum_tied` or `agree_on_seen`.
        finished: the finished gradient.
        residuals: what its codes have lost, with error feedback: of gradients, and of sums that are sent in codes too.
    """

    def __init__(
        self,
        space: Space,
        spec: BucketSpec,
        members: Sequence[Member],
        counted: CountedOnce,
        store: StateStore,
        ledger: Ledger,
    ) -> None:
        self.space, self.spec, self.ledger, self._store = space, spec, ledger, store
        self._tier = spec.tiers.grad
        self.seen = [False] * len(members)
        self._unstepped = [False] * len(members)  # what has been finished, and no step has taken
        self.finished = FinishedGradient(space, spec, counted, store)
        self.residuals = [Residual(space, each, spec.residual_tier, store) for each in spec.gradient_wire.residuals]
        self._numels = [math.prod(member.shape) for member in members]
        self._counts = [counted.gives_gradient(member) for member in members]
        self._unreduced: UnreducedGradient | None = None
        self._partial: SummedGradient | None = None
        self._partial_at_rest: Buffer | None = None

    # -- within a micro-batch ----------------------------------------------------------------------------------

    def accumulate(self, index: int, parameter: nn.Parameter, fate: GradientFate) -> None:
        """Add a parameter's `.grad` to the unreduced gradient, and set it to None.

        Args:
            index: which parameter.
            fate: of the unreduced gradient, which is allocated if this is its first part.
        """
        if parameter.grad is not None:
            self.add(index, parameter.grad, fate)
            parameter.grad = None

    def add(self, index: int, grad: Tensor, fate: GradientFate) -> None:
        """Add `grad`, the gradient of parameter `index`, to the unreduced gradient. `fate` as for `accumulate`."""
        self.begin(fate).add(index, grad if self._counts[index] else torch.zeros_like(grad))
        self.seen[index] = True

    @property
    def filled_numel(self) -> int:
        """Number of elements of the unreduced gradient that autograd has brought.

        Parameters that ranks along `tp` divide count as a whole, so that all ranks count the same.
        """
        return 0 if self._unreduced is None else sum(compress(self._numels, self._unreduced.filled))

    def begin(self, fate: GradientFate) -> UnreducedGradient:
        """Return the unreduced gradient; allocate it if there is none. `fate` as for `accumulate`."""
        if self._unreduced is None:
            self._unreduced = self._make_unreduced(fate, lent=False)
        return self._unreduced

    def expect(self, fate: GradientFate) -> None:
        """Allocate the unreduced gradient before its unit's backward, in memory of the communication stream.

        The next chain on that stream can then reuse it as soon as it has been reduced. `fate` as for `accumulate`.
        """
        comm_streams = self.space.axes.comm_streams
        if comm_streams is not None and self.spec.ranks and self._unreduced is None:
            self._unreduced = comm_streams.lend(lambda: self._make_unreduced(fate, lent=True))

    def _make_unreduced(self, fate: GradientFate, *, lent: bool) -> UnreducedGradient:
        data = self.space.empty((), self.spec.pending_dtype(fate)).data
        self.ledger.acquire(data.nbytes)
        return UnreducedGradient(self.space.layout, data, lent)

    def _take_unreduced(self, fate: GradientFate) -> tuple[Tensor, bool]:
        """Take the unreduced gradient out, inside of a chain; zeros where there is none.

        Gradients that come from now on go into another one.

        Returns:
            Its elements, and whether their memory is the communication stream's, lent to the computation.
        """
        taken, self._unreduced = self._unreduced or self._make_unreduced(fate, lent=True), None
        return taken.complete(), taken.lent

    def sum_tied(self) -> None:
        """Replace the unreduced gradient by the sum over the ranks along `pp` that have these parameters too.
        Collective over them.

        The terms are added in the order of ranks, so all get the same bits. A parameter counts as seen if any of these
        has seen a gradient of it.
        """
        axes, tied = self.space.axes, self.spec.tied_ranks
        own = self.begin(GradientFate.LOCAL).complete()
        with self.ledger.holding(own.nbytes * (len(tied) - 1)):
            own.copy_(functools.reduce(torch.add, _of_tied(axes, tied, own, "tied")))
        seen = torch.tensor(self.seen, device=HOST)
        self.agree_on_seen(functools.reduce(torch.logical_or, _of_tied(axes, tied, seen, "control")).tolist())

    def agree_on_seen(self, flags: Iterable[int]) -> None:
        """Ranks have told of which parameters gradients have come to any of them.

        Args:
            flags: of each parameter, 0 where no rank did.
        """
        self.seen = [own or bool(flag) for own, flag in zip(self.seen, flags, strict=True)]

    # -- over the ranks ----------------------------------------------------------------------------------------

    def reduce(self, divisor: Divisor, fate: GradientFate) -> Moves[Tensor]:
        """Sum the unreduced gradient over ranks; parameters without one count as zero.

        Args:
            fate: `FINISHED`, whose sum is divided, or `REDUCED`, whose sum stays at the plan's `grad` place.
        """
        ledger, reduction = self.ledger, self.spec.sums.of(fate)
        pending, lent = self._take_unreduced(fate)
        held_bytes = pending.nbytes
        data = yield from self._sum(pending, reduction.partial, divisor)
        if reduction.partial:  # the memory of its terms goes as soon as it has arrived
            yield Released(ledger, held_bytes, pending, lent=lent)
            del pending
            held_bytes = 0
        elif not lent and self._partial is not None:
            outlives_chain(lambda: pending)  # held: it is added, beside, to what earlier micro-batches have left
        partial_bytes = self._partial.data.nbytes if self._partial is not None and self._tier == "device" else 0
        data = self._add_partial(data)
        if fate is not GradientFate.FINISHED:
            self._keep_partial(Buffer(self.space, reduction.axes, data), partial_bytes)
        else:
            yield Released(ledger, partial_bytes, lent=True)
            ledger.acquire(reduction.finishing_bytes)
            with tail():
                if reduction.partial and reduction.partial_axes == reduction.axes:
                    next_stream()  # nothing that is used has to be given back
                data = yield from self._complete(data, reduction, divisor)
            yield Released(ledger, reduction.finishing_bytes)
        yield Released(ledger, held_bytes, lent=True)
        return data

    def _add_partial(self, data: Tensor) -> Tensor:
        """Return the sum of `data` and of what earlier micro-batches have left."""
        if self._partial is None:
            return data
        partial, self._partial = outlives_chain(self._partial.wait), None  # held: its memory is
        with partial.opened(partial.range) as sums:
            if self._tier != "device":
                earlier = sums.to(data.device, non_blocking=True)  # pinned, and written again after this copy
                return converted(data, sums.dtype).add_(earlier)
            return sums.add_(data)

    def _keep_partial(self, sums: Buffer, counted_bytes: int) -> None:
        """Keep the sums of micro-batches before the last, which go no further than the host's memory."""
        sums = replace(sums, data=converted(sums.data, self.spec.precision.accumulate))
        if self._tier == "device":
            self._partial = SummedGradient(sums)
            self.ledger.acquire(sums.nbytes - counted_bytes)
            return
        if self._partial_at_rest is None:
            host = self._store.extra_host(sums.nbytes).view(sums.dtype)
            self._partial_at_rest = Buffer(self.space, sums.axes, host)
        self._partial = SummedGradient(self._partial_at_rest, self._store.save(self._partial_at_rest, sums))

    def _complete(self, partial: Tensor, reduction: ReductionMoves, divisor: Divisor) -> Moves[Tensor]:
        """Sum over the remaining axes, divide once, and bring the finished gradient to its tier."""
        summed = yield from self._sum(partial, reduction.finish, divisor)
        data = converted(summed, self.spec.precision.accumulate)
        if not any(move.divides for move in reduction.finish):
            data = divide(data, divisor.product)
        self.finished.land(Buffer(self.space, reduction.axes, data))
        self._unstepped = [True] * len(self.seen)
        return data

    def _sum(self, data: Tensor, moves: Iterable[MoveBytes], divisor: Divisor) -> Moves[Tensor]:
        """Return `data` summed over the ranks of each move in turn; one of these may divide."""
        wire, dtype = self.spec.precision.reduce, self.spec.precision.accumulate
        for move in moves:
            along, divides_by = self.space.axes.along(move.over), divisor.product if move.divides else 1
            if move.form is not None:
                scatters = move.kind == "reduce_scatter"
                encode = self._encoding(0 if scatters else 1, divisor.loss_scale)
                with self.ledger.holding(move.received_bytes):
                    if scatters:
                        summed = yield from sum_scattered(along, data, move.form.blocks, dtype, encode)
                        data = divide(summed, divides_by)
                    else:
                        data = yield from gather_sums(along, data, move.form.blocks, encode)
            elif move.kind == "reduce_scatter":
                data = yield from along.reduce_scatter(data.to(wire), dtype)
            else:
                data = yield from along.all_reduce(data.to(wire), dtype, divides_by)
        return data

    def _encoding(self, number: int, loss_scale: float) -> Encode:
        """Return the encoder of gradients (0) or of their sums (1): with error feedback it adds their residual."""
        return functools.partial(self.residuals[number].encode, loss_scale=loss_scale) if self.residuals else encode_all

    # -- between steps -----------------------------------------------------------------------------------------

    def drop(self) -> Tensor | None:
        """Forget the unreduced gradient; returns its elements, None where there is none."""
        dropped, self._unreduced = self._unreduced, None
        if dropped is None:
            return None
        self.ledger.release(dropped.data.nbytes)
        return dropped.complete()

    def handed_over(self, stepped: Sequence[Range]) -> SummedGradient:
        """Return the finished gradient for an update of `stepped`; see `FinishedGradient`."""
        slots = self.space.layout.slots
        return self.finished.handed_over(stepped, (slot.range for slot in compress(slots, self.seen)))

    def note_step(self, own: Iterable[int]) -> None:
        """Note that the optimizer of the parameters `own` has stepped."""
        for index in own:
            self._unstepped[index] = False

    def awaits_step(self, own: Iterable[int]) -> bool:
        """Whether any of the parameters `own` has a finished gradient that no step has taken."""
        return any(self._unstepped[index] and self.seen[index] for index in own)

    @property
    def exists(self) -> bool:
        """Whether there is one, finished or not."""
        return self.finished.exists or self.unfinished

    @property
    def unfinished(self) -> bool:
        """Whether micro-batches have left gradients that no last one has finished."""
        return self._unreduced is not None or self._partial is not None

    def drop_unfinished(self) -> None:
        """Forget gradients of a step that was abandoned or has been consumed."""
        unreduced = self._unreduced.data if self._unreduced is not None else None
        partial = self._partial.data if self._partial is not None and self._tier == "device" else None
        for part in (unreduced, partial):
            if part is not None:
                self.ledger.release(part.nbytes)
        self._unreduced = self._partial = None

    def zero(self, set_to_none: bool) -> None:
        """Forget every gradient, finished or not; or set finished ones to zero, which an optimizer still steps on."""
        self.drop_unfinished()
        for residual in self.residuals:
            residual.roll_back()
        self._unstepped = [False] * len(self.seen)
        if set_to_none or not self.finished.exists:
            self.finished.forget()
            self.seen = [False] * len(self.seen)
        else:
            self.finished.zero()

    def zero_some(self, indices: Iterable[int], set_to_none: bool = True) -> None:
        """Do as `zero` does, for some of the parameters: the others keep theirs."""
        slots, indices = self.space.layout.slots, list(indices)
        for residual in self.residuals:
            residual.roll_back(indices)
        self.note_step(indices)  # nothing of them awaits one
        for index in indices:
            if self._unreduced is not None:
                self._unreduced.forget(index)
            if self._partial is not None:
                self._partial.change(Tensor.zero_, slots[index].range)
            self.finished.change(index, Tensor.zero_)  # after the factor, for 0 times NaN is NaN
            if set_to_none:
                self.seen[index] = False
        if not any(self.seen) and not self.unfinished:
            self.zero(set_to_none=True)


def _of_tied(axes: Axes, tied: Sequence[int], own: Tensor, kind: str) -> list[Tensor]:
    """Exchange a tensor among ranks along `pp`: those of all, in order; `own` is this rank's. Collective; blocks."""
    links, here = axes.along(axes.stage_axis[0]), axes.pp_rank
    others, handles = {rank: torch.empty_like(own) for rank in tied if rank != here}, []
    for source in tied:  # all begin their messages in one order: NCCL waits for each before the next on its route
        if source == here:
            handles += [links.send(own, MessageRoute(kind, here, rank), _TAGS[kind]) for rank in others]
        else:
            handles.append(links.receive(others[source], MessageRoute(kind, source, here), _TAGS[kind]))
    for handle in handles:
        handle.wait()
    return [own if rank == here else others[rank] for rank in tied]
