"""What torch's CUDA caching allocator would hold for the allocations of a program: its policy, replayed on a list.

A pure function of the list; it needs neither torch nor the simulated device. The policy is that of torch 2.13 with its
default settings, `expandable_segments` aside, as `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`
tell it:

- Sizes are rounded up to 512 bytes. Those of at most 1 MiB come out of segments of 2 MiB, larger ones below 10 MiB out
  of segments of 20 MiB, and from there on each has a segment of its own, of whole 2 MiB.
- A free block goes to a request of the same stream and the same kind of segment, the smallest block that is large
  enough, of those the one at the lowest address. What is left of it becomes a block again: in small segments from 512
  bytes on, in large ones above 1 MiB. Less than that stays with the request. Free neighbours are merged.
- A block that other streams are recorded on is free once they have come to where they were when it was given back.
- When the device has no room, segments that are wholly free go back to it, and the request is tried again.
- Expandable segments: one range of addresses for each stream and kind, mapped in pages of 2 or 20 MiB at the lowest
  address where the request fits beside what is free. Remainders become blocks from 512 bytes on. A block that can grow
  counts as large as its range when the smallest is looked for. Without room, whole pages that are free go back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Event", "Held", "NoMemory", "peak", "replay"]

MIB = 1 << 20
ROUND = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
LARGE_ROUND = 2 * MIB
ENDLESS = MIDDLE_SEGMENT << 40
"""Addresses of an expandable segment, whole pages. torch takes 1⅛ of the device's memory, more than can be mapped."""


class Event(NamedTuple):
    """What a program does.

    Attributes:
        kind: `allocate` (block, size, stream), `free` (block), `record` (block, stream): that stream uses it too, or
            `reached` (stream): all that the stream has been given so far is over, and the host knows.
        block: its number; any that is not in use.
        size: bytes that were asked for, more than 0.
    """

    kind: str
    block: int = 0
    size: int = 0
    stream: int = 0


class Held(NamedTuple):
    """Bytes after an event: what was asked for, what `torch.cuda.memory_allocated` says, and `memory_reserved`."""

    requested: int
    allocated: int
    reserved: int


class NoMemory(RuntimeError):
    """The device has no room, although everything has been given back that can be."""


def replay(events: Iterable[Event], expandable: bool = False, capacity: int | None = None) -> Iterator[Held]:
    """What is held after each event.

    Args:
        expandable: with `expandable_segments:True`.
        capacity: bytes of the device; endless if None.

    Raises: `NoMemory`; `KeyError` for a block that is not in use.
    """
    cache = _Cache(expandable, ENDLESS if capacity is None else capacity)
    used: dict[int, tuple[_Block, int]] = {}
    requested = allocated = 0
    for event in events:
        if event.kind == "allocate":
            block = cache.allocate(event.size, event.stream)
            used[event.block] = block, event.size
            requested, allocated = requested + event.size, allocated + block.size
        elif event.kind == "free":
            block, size = used.pop(event.block)
            requested, allocated = requested - size, allocated - block.size
            cache.free(block)
        elif event.kind == "record":
            used[event.block][0].recorded.add(event.stream)
        elif event.kind == "reached":
            cache.reached(event.stream)
        else:
            raise ValueError(f"{event.kind!r} is no kind of event: allocate, free, record or reached.")
        yield Held(requested, allocated, cache.reserved)


def peak(held: Iterable[Held]) -> Held:
    """The most of each, at whatever times; zeros for none."""
    most = Held(0, 0, 0)
    for now in held:
        most = Held(*map(max, most, now))
    return most


class _Block:
    """A range of addresses of one segment, between its neighbours there."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "recorded", "size")

    def __init__(self, pool: _Pool, address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.free = True
        self.recorded: set[int] = set()  # streams that use it too, or that it waits for
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def room(self) -> int:
        """What it could grow to."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes; the rest, as a block of its own."""
        rest = _Block(self.pool, self.address + size, self.size - size, self.mapped)
        rest.before, rest.after, self.after = self, self.after, rest
        if rest.after is not None:
            rest.after.before = rest
        self.size = size
        return rest

    def absorb(self, other: _Block) -> None:
        """Take in a neighbour."""
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class _Pool:
    """Free blocks of one stream and one kind of segment, by size and then by address."""

    def __init__(self, small: bool) -> None:
        self.small, self.page = small, SMALL_SEGMENT if small else MIDDLE_SEGMENT
        self.blocks: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []  # by address

    def put(self, block: _Block) -> None:
        """A block is free, or unmapped: it becomes one with neighbours that are so too."""
        for other in (block.before, block.after):
            if other is not None and other.free and other.mapped == block.mapped:
                self.take(other)
                block.absorb(other)
        if block.mapped:
            insort(self.blocks, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: _Block) -> None:
        """The block is no longer among these."""
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def best(self, size: int) -> _Block | None:
        """The block for a request, if any is large enough."""
        at = bisect_left(self.blocks, (size,))
        if at == len(self.blocks):
            return None
        following = (self.blocks[other][2] for other in range(at + 1, len(self.blocks)))
        block = self.blocks[at][2]
        for other in following:
            if other.room >= block.room:
                break
            block = other
        return block


class _Cache:
    """All pools of a device. `reserved` is what they have of its memory."""

    def __init__(self, expandable: bool, capacity: int) -> None:
        self._expandable, self._capacity = expandable, capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._waiting: dict[int, list[_Block]] = {}  # by stream: blocks that have been given back
        self._segments = 0
        self.reserved = 0

    def allocate(self, size: int, stream: int) -> _Block:
        """Raises: `NoMemory`."""
        size = -(-size // ROUND) * ROUND
        key = stream, size <= SMALL
        if (pool := self._pools.get(key)) is None:
            pool = self._pools[key] = _Pool(key[1])
        block = pool.best(size) or self._new(pool, size)
        if block is None:
            self._give_back()
            block = self._new(pool, size)
        if block is None:
            raise NoMemory(f"no room for {size} bytes on a device of {self._capacity} with {self.reserved} in use")
        pool.take(block)
        block.free = False
        least = ROUND if pool.small or self._expandable else SMALL + 1
        if block.size - size >= least:
            pool.put(block.cut(size))
        return block

    def free(self, block: _Block) -> None:
        for stream in block.recorded:
            self._waiting.setdefault(stream, []).append(block)
        if not block.recorded:
            self._free_now(block)

    def reached(self, stream: int) -> None:
        """Blocks that only waited for this stream are free."""
        for block in self._waiting.pop(stream, ()):
            block.recorded.remove(stream)
            if not block.recorded:
                self._free_now(block)

    def _free_now(self, block: _Block) -> None:
        block.free = True
        block.pool.put(block)

    # -- the device's memory -------------------------------------------------------------------------------------------

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """A free block of at least `size` bytes, of memory that the device has had; None where it has no room."""
        if self._expandable:
            return self._grown(pool, size)
        whole = -(-size // LARGE_ROUND) * LARGE_ROUND if size >= MIDDLE else pool.page
        if not self._reserve(whole):
            return None
        block = self._range(pool, whole)
        pool.put(block)
        return block

    def _reserve(self, size: int) -> bool:
        fits = self.reserved + size <= self._capacity
        self.reserved += size if fits else 0
        return fits

    def _range(self, pool: _Pool, size: int, mapped: bool = True) -> _Block:
        """Addresses that nothing else has, above all before."""
        self._segments += 1
        return _Block(pool, self._segments * 2 * ENDLESS, size, mapped)

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """The lowest place of an expandable segment where the request fits, mapped."""
        if not pool.unmapped:
            pool.put(self._range(pool, ENDLESS, mapped=False))
        place = next(place for _, unmapped in pool.unmapped if (place := _place(unmapped, size)) is not None)
        while not place.mapped or place.size < size:
            unmapped = place if not place.mapped else place.after
            assert unmapped is not None
            missing = size if unmapped is place else size - place.size
            pages = min(-(-missing // pool.page) * pool.page, unmapped.size)
            if not self._reserve(pages):
                return None
            pool.take(unmapped)
            rest = unmapped.cut(pages) if pages < unmapped.size else None
            unmapped.mapped = True
            if rest is not None:
                pool.put(rest)
            pool.put(unmapped)  # which takes in `place`
            place = unmapped
        return place

    def _give_back(self) -> None:
        """Wait for all streams; then whole segments, or whole pages, that are free go back to the device."""
        for stream in list(self._waiting):
            self.reached(stream)
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self._expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        begin = -(-block.address // pool.page) * pool.page
        pages = (block.address + block.size) // pool.page * pool.page - begin
        if pages <= 0:
            return
        pool.take(block)
        inner = block.cut(begin - block.address) if begin > block.address else block
        rest = inner.cut(pages) if pages < inner.size else None
        inner.mapped = False
        for part in dict.fromkeys((block, inner, rest)):
            if part is not None:
                pool.put(part)
        self.reserved -= pages


def _place(unmapped: _Block, size: int) -> _Block | None:
    """The block from which on `size` bytes are free or unmapped: that before `unmapped` if it is free, or itself."""
    start = unmapped.before if unmapped.before is not None and unmapped.before.free else unmapped
    found, block = 0, start
    while found < size:
        found += block.size
        if block.after is None or not block.after.free:
            break
        block = block.after
    return start if found >= size else None
