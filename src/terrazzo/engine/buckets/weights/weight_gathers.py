"""Ways for the weights of a bucket to come to this rank, and what is there of them between forward and backward.

There is one way for each thing that weights are sent as, `BucketSpec.weight_wire`:

    wire         how weights come                               what `between` names
    DtypeWire    straight into the memory of full weights       a part of full weights, in their place, until the
    BlockWire    in a message of its own, which is decoded      next full weights are there
    PackedWire   into the end of the memory of full weights,    a part of the codes, beside full weights, from the
                 where they are decoded                         gather of forward on until these are released

New weights come to where weights rest as `BucketSpec.update_wire`, by one of the ways in `_UPDATES`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Buffer, Resting, Space
from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.buckets.weights.block_message import BlockMessage
from terrazzo.engine.buckets.weights.full_memory import FullMemory
from terrazzo.engine.comm.transfer import Handle, Moves, outlives_chain
from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.plan.bucket_bytes import scratch_bytes
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.weight_wire import BlockWire, DtypeWire, PackedWire, WeightWire

__all__ = ["unpack", "update_way", "weight_gather"]


def weight_gather(spec: BucketSpec, space: Space, memory: FullMemory, weight: Resting, ledger: Ledger) -> WeightGather:
    """Return the way of a bucket's weights.

    Args:
        memory: that they come to.
        weight: at rest.
        ledger: of transient memory.

    Raises:
        NotImplementedError: for a wire that has none.
    """
    if (way := _GATHERS.get(type(spec.weight_wire))) is None:
        raise NotImplementedError(
            f"Weights cannot be gathered as {type(spec.weight_wire).__name__}: add its way to _GATHERS."
        )
    return way(spec, space, memory, weight, ledger)


UpdateWay = Callable[[Buffer, tuple[str, ...]], Moves[None]]
"""Fills a buffer of new weights from the parts that splitting over the longer list of axes leaves on each rank."""


def update_way(spec: BucketSpec, ledger: Ledger) -> UpdateWay:
    """Return the way of a bucket's new weights to where they rest.

    Raises:
        NotImplementedError: for a wire that has none.
    """
    if (way := _UPDATES.get(type(spec.update_wire))) is None:
        raise NotImplementedError(
            f"New weights cannot be sent as {type(spec.update_wire).__name__}: add its way to _UPDATES."
        )
    return functools.partial(way, spec.update_wire, spec.compute_dtype, ledger)


class WeightGather(ABC):
    """One way. It is told how far full weights are, for what `between` names to be there in time.

    Attributes:
        between: what `between` names, where it is not the weights at rest themselves; None while it is not there.
    """

    def __init__(self, spec: BucketSpec, space: Space, memory: FullMemory, weight: Resting, ledger: Ledger) -> None:
        self._space, self._memory, self._weight, self._ledger = space, memory, weight, ledger
        self._wire, self._scratch_bytes = spec.weight_wire, scratch_bytes(spec)
        self._gathers_into_place = spec.gathers_into_place
        is_apart = spec.regathered and spec.between_axes != spec.weight_axes
        self._between_axes = spec.between_axes if is_apart else None
        self.between: Buffer | None = None

    @abstractmethod
    def fill(self, from_rest: bool) -> Moves[None]:
        """Bring full weights to their memory, allocated as late as can be.

        Args:
            from_rest: from where weights rest, even where what `between` names is there.
        """

    @abstractmethod
    def keep_between(self) -> None:
        """Full weights are about to go until backward: keep a part of them."""

    @abstractmethod
    def arrived(self) -> None:
        """Full weights are there, and can be read."""

    @abstractmethod
    def released(self) -> None:
        """Full weights are about to go, and not until backward."""

    def drop_between(self) -> None:
        """Drop what `between` names: it is not needed any longer."""
        if self.between is not None:
            self._ledger.release(self.between.data.nbytes)
            self.between = None


class _DtypeGather(WeightGather):
    def fill(self, from_rest: bool) -> Moves[None]:
        self._memory.allocate()
        yield from self._memory.buffer.gather(self._source(from_rest))

    def _source(self, from_rest: bool) -> Resting:
        return self._weight if from_rest or self.between is None else self.between

    def keep_between(self) -> None:
        if self.between is None and self._between_axes is not None:
            part = self._memory.buffer.narrow(self._between_axes)
            self.between = Buffer(part.space, part.axes, part.data.clone())
            self._ledger.acquire(part.data.nbytes)

    def arrived(self) -> None:
        self.drop_between()

    def released(self) -> None:
        pass  # `between` names a part of them, which is not there beside them


class _BlockGather(_DtypeGather):
    _wire: BlockWire

    def fill(self, from_rest: bool) -> Moves[None]:
        source, memory = self._source(from_rest), self._memory
        if not source.axes:  # whole on this rank: nothing is sent
            yield from super().fill(from_rest)
            return
        message = BlockMessage(self._space, (), self._wire.form.blocks, memory.data.dtype, self._ledger)
        with self._ledger.holding(message.nbytes):
            if self._gathers_into_place or not isinstance(source, Buffer):
                memory.allocate()
                own = memory.buffer.narrow(source.axes).data
                yield from source.load(own)
            else:
                own = source.data
            yield from message.bring(own, source.axes)
            memory.allocate()
            message.unpack(memory.data)


class _PackedGather(WeightGather):
    _weight: CodedState
    _wire: PackedWire

    def fill(self, from_rest: bool) -> Moves[None]:
        blocks, full = self._wire.form.blocks, self._memory.data
        self._memory.allocate()
        source = self._weight.codes if from_rest or self.between is None else self.between
        if isinstance(source, Buffer) and not source.axes and source.data.device == full.device:
            yield Handle(queued=True)  # nothing is moved, but decoding belongs beside the computation or to its use
            codes = source.data
        else:
            room = _room_for(self._space, blocks, full)
            codes = yield from room.gather(source)
            if self.between is None and self._between_axes is not None and not from_rest:
                self._copy_codes(room.narrow(self._between_axes))
        with self._ledger.holding(self._scratch_bytes):
            unpack(codes, blocks, full)

    def _copy_codes(self, codes: Buffer) -> None:
        copied = outlives_chain(lambda: torch.empty_like(codes.data)).copy_(codes.data)
        self.between = Buffer(codes.space, codes.axes, copied)
        self._ledger.acquire(copied.nbytes)

    def keep_between(self) -> None:
        pass  # codes have been there since the gather

    def arrived(self) -> None:
        pass  # codes stay beside them

    def released(self) -> None:
        self.drop_between()


def _room_for(space: Space, blocks: BlockCodes, full: Tensor) -> Buffer:
    """Buffer for all the bytes of whole weights, at the end of the memory `full` that they will be decoded into.

    A tile's values are written below the bytes of the next, as long as tiles are decoded one after the other.
    """
    coded = space.as_bytes(blocks)
    raw = full.view(torch.uint8)
    start = (raw.numel() - coded.layout.numel) // _ALIGN_BYTES * _ALIGN_BYTES
    return Buffer(coded, (), raw[start : start + coded.layout.numel])


_ALIGN_BYTES = 64


def unpack(codes: Tensor, blocks: BlockCodes, into: Tensor) -> None:
    """Decode whole weights.

    Args:
        codes: uint8, of all blocks; they may lie at the end of `into`, and are lost then.
        into: 1-D, of any dtype; the values are those that bf16 holds.
    """
    for part, coded in blocks.tiles(into):
        into[part] = blocks.decode(codes[coded]).bfloat16()  # as they are saved, whatever is computed in


_GATHERS: dict[type[WeightWire], type[WeightGather]] = {
    DtypeWire: _DtypeGather,
    BlockWire: _BlockGather,
    PackedWire: _PackedGather,
}


def _update_in_dtype(
    wire: DtypeWire, through: torch.dtype, ledger: Ledger, buffer: Buffer, axes: tuple[str, ...]
) -> Moves[None]:
    yield from buffer.complete(axes)


def _update_in_blocks(
    wire: BlockWire, through: torch.dtype, ledger: Ledger, buffer: Buffer, axes: tuple[str, ...]
) -> Moves[None]:
    """Send new weights in blocks; this rank's own part becomes what the others see of it, too.

    Args:
        through: the dtype that elements are rounded to before.
        ledger: of transient memory.
    """
    message = BlockMessage(buffer.space, buffer.axes, wire.form.blocks, through, ledger)
    with ledger.holding(message.nbytes):
        yield from message.bring(buffer.narrow(axes).data, axes)
        message.unpack(buffer.data)


_UPDATES: dict[type[WeightWire], Callable[..., Moves[None]]] = {
    DtypeWire: _update_in_dtype,
    BlockWire: _update_in_blocks,
}
