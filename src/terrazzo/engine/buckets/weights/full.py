"""Full weights of a bucket. Its parameters are views of them, and stay so while the memory comes and goes.

Their life, by the methods that begin each part of it:

    gather           on their way into `FullMemory`, as their `WeightGather` brings them
    install          there: modules and users may read the parameters
    rest_between     gone until backward, but for what `between` keeps
    release, rest    gone; after `rest`, so is what `between` has kept
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from terrazzo.engine.buckets.parameters.at_rest import Guard
from terrazzo.engine.buckets.parameters.edits import Edits
from terrazzo.engine.buckets.parameters.note import Note
from terrazzo.engine.buckets.resting.buffer import Resting, Space, view
from terrazzo.engine.buckets.weights.full_memory import FullMemory, Storages
from terrazzo.engine.buckets.weights.weight_gathers import weight_gather
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.runtime.calls import do_all
from terrazzo.errors import Misuse
from terrazzo.messages import listed

__all__ = ["FullWeights"]


class FullWeights:
    """Full weights of one bucket: gathered and released, or those at rest where these are whole.

    Args:
        spec: of the bucket.
        weight: at rest.
        ledger: of transient memory.

    Attributes:
        buffer, data: their memory, and all its elements, 1-D; the storage has no bytes while they are released.
        edits: what users do to the parameters.
        present: whether modules can read them now.
        pinned: whether `release` keeps them, for the user to read.
    """

    def __init__(
        self, members: Sequence[Member], spec: BucketSpec, space: Space, weight: Resting, ledger: Ledger
    ) -> None:
        self.space, self._resident, self._regathered = space, spec.resident, spec.regathered
        self._memory = FullMemory(spec, space, weight, ledger)
        self._gather = weight_gather(spec, space, self._memory, weight, ledger)
        self.buffer, self.data = self._memory.buffer, self._memory.data
        self.present, self.pinned = True, False
        slots = space.layout.slots
        for slot, member in zip(slots, members, strict=True):
            member.parameter.data = view(self.data, slot)
        traced = not spec.resident or (spec.has_remainder and not spec.has_own_master)
        edits = self.edits = Edits(members, (view(self.data, slot) for slot in slots), self.data, traced)
        self._guard = Guard([(m.parameter, Note(m.name, not spec.resident, edits.alias_of(m))) for m in members])
        if not spec.resident:
            self.release()

    def list_in(self, storages: Storages, unit: int) -> None:
        """Have `storages` say that the full weights of `unit` are these, wherever they go."""
        self._memory.list_in(storages, unit)

    # -- they come ---------------------------------------------------------------------------------------------

    def gather(self, from_rest: bool = False) -> Moves[Tensor]:
        """Bring them to this rank.

        Args:
            from_rest: gather from where weights rest, even where `between` keeps more of them on this rank.
        """
        if not from_rest and self.present:
            self._gather.keep_between()  # to gather the same part as ranks that have released them
        yield from self._gather.fill(from_rest)
        return self.data

    def install(self) -> None:
        """Let modules read them."""
        if not self.present:
            self.present = True
            self._gather.arrived()
            self._guard.open()
            self.edits.bring_back()

    def pin(self, pinned: bool) -> None:
        """Keep them from being released from now on; False: they may be released again."""
        self.pinned = pinned

    # -- they go -----------------------------------------------------------------------------------------------

    def rest_between(self) -> None:
        """Keep the part that the plan's `between` names from forward to backward, and release the rest."""
        if self.present and self._regathered:
            self._gather.keep_between()
            self._release_full()

    def release(self) -> None:
        """Give back their memory."""
        if self.present and not self.pinned:
            self._gather.released()
        self._release_full()

    def _release_full(self) -> None:
        if self._resident or self.pinned:
            return
        try:
            if self.present:
                self.refuse_lost_edits()
        finally:
            self._memory.free(follow=self.edits.move)
            if self.present:
                self._hide(None)

    def rest(self) -> None:
        """Release them and what is kept for backward: weights have changed, or the step is over."""
        do_all((self.release, self._gather.drop_between))

    def detach_storage(self) -> None:
        """Leave their memory to whoever has views of it; the next full weights get other memory."""
        self._memory.detach(follow=self.edits.move)

    def hide(self, arrive: Callable[[], None] | None = None) -> None:
        """Refuse to have resident weights read before `install`: they are being updated elsewhere.

        Args:
            arrive: does so, before whatever touches them; None: that raises.
        """
        if self._resident and self.present:
            self._hide(arrive)

    def _hide(self, arrive: Callable[[], None] | None) -> None:
        self.present = False
        self.edits.put_away()
        self._guard.close(arrive)

    # -- users write into them ---------------------------------------------------------------------------------

    def refuse_lost_edits(self) -> None:
        """Refuse what has been written into gathered weights, or views of them, since they were last taken over.

        Raises:
            Misuse: there.
        """
        if not self._resident and (written := self.edits.take_written()):
            raise Misuse(
                f"{listed([*map(repr, written)])} written to while the weights were gathered: this would be lost. "
                "Write inside 'with tz.gathered(model, write=True):'; a forward that changes its own weights needs a "
                "plan that keeps them whole, such as zero2."
            )

    def drop_edits(self) -> None:
        """Forget what was written into gathered weights, which is lost with them; resident ones keep it."""
        if not self._resident:
            self.edits.forget_written()
