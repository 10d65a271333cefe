"""The full weights of a bucket. Its parameters are views of them, and stay so while the memory comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from terrazzo.engine.buckets.buffer import Buffer, Resting, Space, view
from terrazzo.engine.buckets.edits import Edits, Watched
from terrazzo.engine.buckets.packed import PackedWeight, room_for, unpack
from terrazzo.engine.buckets.parameter import Guard, Note
from terrazzo.engine.buckets.wire import BlockMessage
from terrazzo.engine.comm.traffic import Ledger
from terrazzo.engine.comm.transfer import Handle, Moves, for_computation
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.partition import Member
from terrazzo.engine.runtime.calls import do_all
from terrazzo.engine.runtime.pages import use_large_pages, with_room
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.errors import Misuse, listed

__all__ = ["FullWeights", "Storages"]


class Storages:
    """The units whose full weights come and go, by the address of the storage that these lie in."""

    def __init__(self) -> None:
        self._units: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._units)

    def add(self, data: Tensor, unit: int) -> None:
        """Note that the full weights `data` of a unit are in their storage from now on."""
        self._units[data.untyped_storage()._cdata] = unit

    def move(self, left: torch.UntypedStorage, data: Tensor) -> None:
        """Note that the full weights that were in the storage `left`, if any, are in that of `data`."""
        if (unit := self._units.pop(left._cdata, None)) is not None:
            self.add(data, unit)

    def unit_of(self, tensor: Tensor) -> int | None:
        """The unit of whose full weights `tensor` is a view; None for none."""
        if tensor.layout is not torch.strided:
            return None
        try:
            return self._units.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # inside a transform of torch.func, say: no weight of ours
            return None


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
        self.space, self._weight, self._ledger, self._resident = space, weight, ledger, spec.resident
        self._format, self._gathers_into_place = spec.gather_format, spec.gathers_into_place
        self._stays = spec.resident or spec.keeps_full
        self._held_axes = None if self._stays or spec.between_axes == spec.weight_axes else spec.between_axes
        self._held: Buffer | None = None  # from forward to backward, in place of these; of packed ones beside them
        self._packed = spec.packed is not None
        self._storages: Storages | None = None
        self.present, self.pinned = True, False
        resident = weight if spec.resident else None
        self.buffer = resident if isinstance(resident, Buffer) else space.empty((), spec.compute_dtype)
        self.data = self.buffer.data
        slots = space.layout.slots
        for slot, member in zip(slots, members, strict=True):
            member.parameter.data = view(self.data, slot)
        self._guard = Guard([(member.parameter, Note(member.name, split=not spec.resident)) for member in members])
        pairs = zip(members, slots, strict=True)
        watched = [Watched(m.name, m.parameter, m.registered, view(self.data, slot)) for m, slot in pairs]
        self.edits = Edits(watched, self.data, spec.resident)
        if not spec.resident:
            ledger.acquire(self.data.nbytes)
            self.release()

    def list_in(self, storages: Storages, unit: int) -> None:
        """Have `storages` say that the full weights of `unit` are these, wherever they go."""
        if not self._resident:
            self._storages = storages
            storages.add(self.data, unit)

    # -- they come ---------------------------------------------------------------------------------------------

    def gather(self, from_rest: bool = False) -> Moves[Tensor]:
        """Bring them to this rank.

        Args:
            from_rest: gather from where weights rest, even where `between` keeps more of them on this rank.
        """
        if not from_rest and self.present:
            self._hold()  # as ranks that have put them down did
        held = None if from_rest else self._held
        if isinstance(self._weight, PackedWeight):
            self._have_memory()
            return (yield from self._gather_packed(self._weight, held, from_rest))
        source: Resting = self._weight if held is None else held
        if self._format is None or not source.axes:
            self._have_memory()
            return (yield from self.buffer.gather(source))
        message = BlockMessage(self.space, (), self._format, self.data.dtype, self._ledger)
        with self._ledger.holding(message.nbytes):
            if self._gathers_into_place or not isinstance(source, Buffer):
                self._have_memory()
                own = self.buffer.narrow(source.axes).data
                yield from source.load(own)
            else:
                own = source.data
            yield from message.bring(own, source.axes)
            self._have_memory()
            message.unpack(self.data)
        return self.data

    def _have_memory(self) -> None:
        storage = self.data.untyped_storage()
        if storage.size() == 0:
            storage.resize_(with_room(self.data.nbytes, self.data.device))
            use_large_pages(self.data)
            self._ledger.acquire(self.data.nbytes)

    def _gather_packed(self, weight: PackedWeight, held: Buffer | None, from_rest: bool) -> Moves[Tensor]:
        """Gather bytes, and decode them into the full weights; what `between` keeps of them stays beside these."""
        source, form = weight.codes if held is None else held, weight.form
        whole = isinstance(source, Buffer) and not source.axes and source.data.device == self.data.device
        if whole and isinstance(source, Buffer):
            yield Handle(queued=True)  # nothing is moved, but decoding belongs beside the computation or to its use
            codes = source.data
        else:
            room = room_for(self.space, form, self.data)
            codes = yield from room.gather(source)
            if held is None and self._held_axes is not None and not from_rest:
                kept = room.narrow(self._held_axes)
                copied = for_computation(lambda: torch.empty_like(kept.data)).copy_(kept.data)
                self._held = Buffer(kept.space, kept.axes, copied)
                self._ledger.acquire(copied.nbytes)
        unpack(codes, form, self.data)
        return self.data

    def install(self) -> None:
        """Let modules read them."""
        if not self.present:
            self.present = True
            if not self._packed:
                self._drop_held()
            self._guard.open()
            self.edits.bring_back()

    def pin(self, pinned: bool) -> None:
        """Keep them from being released from now on; False: they may be released again."""
        self.pinned = pinned

    # -- they go -----------------------------------------------------------------------------------------------

    def rest_between(self) -> None:
        """Keep the part that the plan's `between` names from forward to backward, and release the rest."""
        if self.present and not self._stays:
            self._hold()
            self._release_full()

    def _hold(self) -> None:
        if self._held is None and self._held_axes is not None and not self._packed:
            kept = self.buffer.narrow(self._held_axes)
            self._held = Buffer(self.space, kept.axes, kept.data.clone())
            self._ledger.acquire(kept.data.nbytes)

    def _drop_held(self) -> None:
        if self._held is not None:
            self._ledger.release(self._held.data.nbytes)
            self._held = None

    def release(self) -> None:
        """Give back their memory."""
        if self._packed and self.present and not self.pinned:
            self._drop_held()
        self._release_full()

    def _release_full(self) -> None:
        if self._resident or self.pinned:
            return
        try:
            if self.present:
                self.refuse_lost_edits()
        finally:
            storage = self.data.untyped_storage()
            if not storage.resizable():  # numpy has it
                self.free_storage()
            elif storage.size():
                self._ledger.release(self.data.nbytes)
                storage.resize_(0)
            if self.present:
                self._hide(None)

    def rest(self) -> None:
        """Release them and what is kept for backward: weights have changed, or the step is over."""
        do_all((self.release, self._drop_held))

    def free_storage(self) -> None:
        """Leave their memory to whoever has views of it; the next full weights get other memory."""
        if self._resident or not self.data.untyped_storage().size():
            return
        self._ledger.release(self.data.nbytes)
        with torch.inference_mode(False), plainly():
            left, fresh = self.data.untyped_storage(), torch.empty_like(self.data)
            self.data.data = fresh
            self.edits.move()
            fresh.untyped_storage().resize_(0)
        if self._storages is not None:
            self._storages.move(left, self.data)

    def hide(self, arrive: Callable[[], None] | None = None) -> None:
        """Resident weights are being updated elsewhere: refuse to have them read before `install`.

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
