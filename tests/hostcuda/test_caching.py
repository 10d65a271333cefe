"""The caching allocator's policy: one test for each rule, with the number that follows from torch's source.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp`: `round_size`, `get_pool`, `get_allocation_size`,
`should_split`, `get_free_block`, `try_merge_blocks`, `insert_events` and `process_events`, `release_cached_blocks`, and
for expandable segments `find_expandable_block`, `map_block` and `unmap_block`. Sizes there are constants of
`c10/core/AllocatorConfig.h`.
"""

from __future__ import annotations

import random

import pytest

from hostcuda.caching import Event, Held, NoMemory, peak, replay
from tests.hostcuda.ranks import Ranks

MIB = 2**20


class Program:
    """A list of events, with sizes in MiB, and what is held at its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.blocks = 0

    def take(self, mib: float, stream: int = 0) -> int:
        self.blocks += 1
        self.events.append(Event("allocate", self.blocks, int(mib * MIB), stream))
        return self.blocks

    def free(self, *blocks: int) -> None:
        self.events += [Event("free", block) for block in blocks]

    def held(self, expandable: bool = False, capacity_mib: int | None = None) -> Held:
        capacity = None if capacity_mib is None else capacity_mib * MIB
        return list(replay(self.events, expandable, capacity))[-1]

    def reserved(self, expandable: bool = False, capacity_mib: int | None = None) -> float:
        return self.held(expandable, capacity_mib).reserved / MIB


@pytest.mark.parametrize(
    ("size", "allocated", "reserved_mib"),
    [
        (1, 512, 2),
        (512, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (10 * MIB + 1, 10 * MIB + 512, 12),
        (11 * MIB, 12 * MIB, 12),  # 1 MiB is left, and stays with the request
    ],
)
def test_sizes_are_rounded_and_segments_made(size: int, allocated: int, reserved_mib: int) -> None:
    (held,) = replay([Event("allocate", 1, size)])
    assert held == Held(size, allocated, reserved_mib * MIB)


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    program = Program()
    program.take(1), program.take(1)
    assert program.reserved() == 2
    program.take(0.25)
    assert program.reserved() == 4


def test_small_segments_are_cut_to_the_last_512_bytes() -> None:
    program = Program()
    for _ in range(4096):
        program.take(512 / MIB)
    assert program.held() == Held(2 * MIB, 2 * MIB, 2 * MIB)


@pytest.mark.parametrize(("mib", "allocated_mib"), [(19, 20), (18, 18)])
def test_a_large_block_is_cut_if_more_than_1_mib_is_left(mib: int, allocated_mib: int) -> None:
    program = Program()
    program.free(program.take(20))
    program.take(mib)
    assert program.held() == Held(mib * MIB, allocated_mib * MIB, 20 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    program = Program()
    program.free(program.take(30), program.take(20))
    program.take(16), program.take(30)
    assert program.reserved() == 50


def test_free_neighbours_are_merged() -> None:
    program = Program()
    first, second, third = (program.take(6) for _ in range(3))
    program.free(first, third, second)
    program.take(20)
    assert program.reserved() == 20


def test_what_is_in_use_keeps_its_neighbours_apart() -> None:
    program = Program()
    first, _, third = (program.take(6) for _ in range(3))
    program.free(first, third)
    program.take(9)  # 6, and 6 with the segment's last 2, are free
    assert program.reserved() == 40


def test_streams_do_not_share() -> None:
    program = Program()
    program.free(program.take(20, stream=1))
    program.take(20, stream=2)
    assert program.reserved() == 40


def test_small_and_large_do_not_share() -> None:
    program = Program()
    program.free(program.take(20))
    program.take(1)
    assert program.reserved() == 22


@pytest.mark.parametrize("expandable", [False, True])
def test_a_recorded_block_waits_for_all_its_streams(expandable: bool) -> None:
    program = Program()
    block = program.take(20)
    program.events += [Event("record", block, stream=1), Event("record", block, stream=2)]
    program.free(block)
    assert program.held(expandable) == Held(0, 0, 20 * MIB)
    program.events.append(Event("reached", stream=1))
    program.take(20)
    assert program.reserved(expandable) == 40
    program.events.append(Event("reached", stream=2))
    program.take(20)
    assert program.reserved(expandable) == 40


def test_without_room_whole_segments_go_back() -> None:
    program = Program()
    program.free(program.take(20), program.take(20))
    program.take(30)
    assert program.reserved(capacity_mib=60) == 30  # both


def test_a_segment_in_use_does_not_go_back() -> None:
    program = Program()
    program.take(6), program.free(program.take(6))
    program.take(30)
    assert program.reserved(capacity_mib=50) == 50
    with pytest.raises(NoMemory, match="on a device of 51380224 with 20971520 in use"):
        program.reserved(capacity_mib=49)


def test_without_room_streams_are_waited_for() -> None:
    program = Program()
    block = program.take(20)
    program.events.append(Event("record", block, stream=1))
    program.free(block)
    program.take(30)
    assert program.reserved(capacity_mib=40) == 30


# -- expandable segments ----------------------------------------------------------------------------------------------


def test_large_ones_grow_by_pages_of_20_mib() -> None:
    program = Program()
    program.take(30)
    assert program.reserved(expandable=True) == 40
    program.take(5)
    assert program.reserved(expandable=True) == 40
    program.take(10)  # 5 are free at the end
    assert program.reserved(expandable=True) == 60


def test_small_ones_grow_by_pages_of_2_mib() -> None:
    program = Program()
    for _ in range(5):
        program.take(0.75)
    assert program.reserved(expandable=True) == 4  # a request lies across two pages
    assert program.reserved() == 6


def test_slightly_longer_requests_need_a_page_and_not_a_segment() -> None:
    program = Program()
    for mib in (30, 32, 34, 36):
        program.free(program.take(mib))
    assert program.reserved() == 30 + 32 + 34 + 36
    assert program.reserved(expandable=True) == 40


def test_large_blocks_are_cut_to_the_last_512_bytes_there() -> None:
    program = Program()
    program.free(program.take(20))
    program.take(20 - 512 / MIB), program.take(40)
    assert program.held(expandable=True) == Held(60 * MIB - 512, 60 * MIB - 512, 60 * MIB)


def test_a_block_that_can_grow_is_taken_last() -> None:
    """Of 8 MiB between others and of 6 MiB at the end, 5 MiB go to the 8: the end serves 26 MiB with one more page."""
    program = Program()
    program.take(10), program.free(hole := program.take(8)), program.take(16)
    assert hole == 2
    program.take(5), program.take(26)
    assert program.reserved(expandable=True) == 60


def test_whole_pages_go_back() -> None:
    program = Program()
    program.take(10), program.free(program.take(50))
    program.take(20, stream=2)
    assert program.reserved(expandable=True) == 80
    assert program.reserved(expandable=True, capacity_mib=60) == 40


def test_what_has_gone_back_is_mapped_again_at_the_lowest_address() -> None:
    program = Program()
    hole = program.take(40)
    program.take(20), program.free(hole)
    program.take(40, stream=2)
    assert program.reserved(expandable=True, capacity_mib=80) == 60
    program.free(program.blocks)
    program.take(40)
    assert program.reserved(expandable=True, capacity_mib=80) == 60


# -- any program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_reserved_has_room_for_what_is_allocated(seed: int, expandable: bool) -> None:
    """And never more than the device has, and all of it goes back once nothing is in use."""
    chance, program, used = random.Random(seed), Program(), list[int]()
    for _ in range(400):
        if used and chance.random() < 0.5:
            program.free(used.pop(chance.randrange(len(used))))
        else:
            used.append(program.take(chance.choice([0.01, 0.7, 1.5, 9, 12, 40]) * chance.uniform(0.5, 1), stream=1))
    series = list(replay(program.events, expandable))
    assert all(held.requested <= held.allocated <= held.reserved for held in series)
    most = peak(series)
    tight = most.requested + (most.reserved - most.requested) // 2
    try:
        assert peak(replay(program.events, expandable, tight)).reserved <= tight
    except NoMemory:
        assert tight < most.reserved
    program.free(*used)
    program.take(1000, stream=2)
    room = most.reserved // MIB + 1000
    assert program.reserved(expandable, capacity_mib=room) <= room
    assert program.reserved(expandable, capacity_mib=max(1000, most.reserved // MIB + 2)) == 1000


# -- what the device records ------------------------------------------------------------------------------------------


def _recorded() -> list[Event]:
    import torch

    from hostcuda import memory

    before, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    memory.begin()
    first = torch.empty(1000, device="cuda")
    with torch.cuda.stream(side):
        second = torch.empty(10, device="cuda", dtype=torch.uint8)
    first.record_stream(side)
    first.record_stream(side)
    del first, before
    torch.cuda.synchronize()
    third = torch.empty(3, device="cuda")
    memory.end()
    del second, third
    return list(memory.events())


@pytest.mark.xdist_group("hostcuda")
def test_the_device_records_what_happens_to_its_memory(one_rank: Ranks) -> None:
    (found,) = one_rank.run(_recorded)
    assert [event.kind for event in found] == ["allocate", "allocate", "record", "free", "reached", "allocate"]
    first, second, record, freed, reached, third = found
    assert (first.size, second.size, third.size) == (4000, 10, 12)
    assert first.stream == third.stream != second.stream
    assert record.block == freed.block == first.block
    assert record.stream == reached.stream == second.stream
    assert [held.requested for held in replay(found)] == [4000, 4010, 4010, 10, 10, 22]
