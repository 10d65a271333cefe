"""What malloc does with blocks that come and go."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from terrazzo.engine.runtime.pages import with_room

MIB = 1 << 20
PROGRAM = """
import ctypes, torch
from terrazzo.engine.runtime.pages import keep_freed, with_room

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h d u f used free keep".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
keep_freed(1 << 30)
size, kept, blocks = 8 << 20, [], []
before = libc.mallinfo2().arena
for step in range(60):
    block = torch.empty(0, dtype=torch.uint8).untyped_storage()
    block.resize_(with_room(size, torch.device("cpu")) if WITH_ROOM else size)
    blocks.append(block)
    kept += [torch.empty(n) for n in range(1, 40)]  # what stays for backward
    if len(blocks) == 2:
        blocks.pop(0).resize_(0)
print((libc.mallinfo2().arena - before) / size)
"""


def heap_blocks(with_room: bool) -> float:
    """By how many blocks the heap has grown, after 60 of which two are there at a time."""
    program = PROGRAM.replace("WITH_ROOM", str(with_room))
    return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_block_fits_where_the_one_before_last_was() -> None:
    assert heap_blocks(with_room=True) < 6


def test_room_is_small_and_for_large_blocks_on_cpus_alone() -> None:
    cpu = torch.device("cpu")
    sizes = [with_room(5 * MIB, cpu) for _ in range(5000)]
    assert min(sizes) == 5 * MIB and max(sizes) < 6 * MIB
    assert sum(after >= before for before, after in itertools.pairwise(sizes)) <= 2
    assert with_room(MIB, cpu) == MIB and with_room(5 * MIB, torch.device("cuda")) == 5 * MIB
