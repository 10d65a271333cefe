"""The memory of a bucket's full weights: it comes and goes under one tensor, of which the parameters are views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Buffer, Resting, Space
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.runtime.pages import use_large_pages, with_room
from terrazzo.engine.runtime.private_torch import plainly

__all__ = ["FullMemory", "Storages"]


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
        """Number of the unit of whose full weights `tensor` is a view; None for none."""
        if tensor.layout is not torch.strided:
            return None
        try:
            return self._units.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # inside a transform of torch.func, say: no weight of ours
            return None


class FullMemory:
    """Memory for all elements of one bucket. It is there at first; that of resident weights never goes.

    Args:
        weight: at rest.
        ledger: counts it, unless it is that of the weights at rest.

    Attributes:
        buffer, data: all elements, 1-D: the same tensor always, whose storage has no bytes while the memory is gone.
    """

    def __init__(self, spec: BucketSpec, space: Space, weight: Resting, ledger: Ledger) -> None:
        self._ledger, self._stays = ledger, spec.resident
        resident = weight if spec.resident else None
        self.buffer = resident if isinstance(resident, Buffer) else space.empty((), spec.compute_dtype)
        self.data = self.buffer.data
        self._storages: Storages | None = None
        if not self._stays:
            ledger.acquire(self.data.nbytes)

    def list_in(self, storages: Storages, unit: int) -> None:
        """Have `storages` say, wherever the memory goes, that the full weights of `unit` are in it."""
        if not self._stays:
            self._storages = storages
            storages.add(self.data, unit)

    def allocate(self) -> None:
        """Have the memory here, with any values where it was not."""
        storage = self.data.untyped_storage()
        if storage.size() == 0:
            storage.resize_(with_room(self.data.nbytes, self.data.device))
            use_large_pages(self.data)
            self._ledger.acquire(self.data.nbytes)

    def free(self, follow: Callable[[], None]) -> None:
        """Give it back, or leave it where numpy has it. `follow` as for `detach`."""
        storage = self.data.untyped_storage()
        if self._stays or not storage.size():
            return
        if not storage.resizable():  # numpy has it
            self.detach(follow)
            return
        self._ledger.release(self.data.nbytes)
        storage.resize_(0)

    def detach(self, follow: Callable[[], None]) -> None:
        """Leave it to whoever has views of it; the next full weights get other memory.

        Args:
            follow: makes the parameters views of that.
        """
        if self._stays or not self.data.untyped_storage().size():
            return
        self._ledger.release(self.data.nbytes)
        with torch.inference_mode(False), plainly():
            left, fresh = self.data.untyped_storage(), torch.empty_like(self.data)
            self.data.data = fresh
            follow()
            fresh.untyped_storage().resize_(0)
        if self._storages is not None:
            self._storages.move(left, self.data)
