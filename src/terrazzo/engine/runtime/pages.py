"""What fresh CPU memory costs, and how to need less of it.

A fault per 4 KiB page takes longer than the copy into it: for a 28 MB buffer 14 ms against 5 ms once the kernel may use
pages of 2 MiB, which it still has to clear (docs/decisions.md). Elsewhere than on Linux with glibc this does nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys

import torch
from torch import Tensor

__all__ = ["keep_freed", "keeps", "return_freed", "use_large_pages", "with_room"]

_LARGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_SMALL_BLOCK_BYTES = 256 << 10
_LARGEST_IN_HEAP_BYTES, _INT_MAX = 32 << 20, (1 << 31) - 1
_ROOM_STEP_BYTES, _ROOM_STEPS = 256, 4096
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_kept_bytes = 128 << 10  # what glibc keeps by itself


def use_large_pages(tensor: Tensor) -> Tensor:
    """Advise the kernel to back `tensor`'s memory, not yet written to, with large pages; returns it."""
    if _libc is not None and tensor.device.type == "cpu" and tensor.nbytes >= 2 * _LARGE_PAGE_BYTES:
        first = -(-tensor.data_ptr() // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        size_bytes = (tensor.data_ptr() + tensor.nbytes - first) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size_bytes), _MADV_HUGEPAGE)
    return tensor


def with_room(size_bytes: int, device: torch.device) -> int:
    """How much to take for a block that comes and goes: up to 1 MiB more than its bytes, and each time a little less.

    An aligned block needs more room in glibc's heap than it has in the end, so that the next one of the same size does
    not fit where it was, and the heap grows by a block a time. A smaller one fits.
    """
    if _libc is None or device.type != "cpu" or size_bytes < 2 * _LARGE_PAGE_BYTES:
        return size_bytes
    return size_bytes + (-next(_blocks) % _ROOM_STEPS) * _ROOM_STEP_BYTES


_blocks = itertools.count()


def keeps(count_bytes: int) -> bool:
    """Whether malloc keeps this much freed memory anyway."""
    return count_bytes <= _kept_bytes


def keep_freed(count_bytes: int) -> None:
    """Let malloc keep up to this much freed memory for what comes next, instead of giving it back at once.

    A step frees and takes the same buffers again and again, and the kernel clears each page that it hands out. The peak
    stays as it was. Blocks over 32 MiB are always given back. A user's own MALLOC_TRIM_THRESHOLD_ is left alone.
    """
    global _kept_bytes
    if (
        _libc is not None
        and hasattr(_libc, "mallopt")
        and "MALLOC_TRIM_THRESHOLD_" not in os.environ
        and not keeps(count_bytes)
    ):
        _kept_bytes = min(count_bytes, _INT_MAX)
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _kept_bytes)


def return_freed() -> None:
    """Let malloc give freed memory back at once, and do without `keep_freed`: where memory is what there is least of.

    By itself glibc comes to serve blocks of up to 32 MiB from a heap that it can only give back from its end.
    """
    global _kept_bytes
    if _libc is not None and hasattr(_libc, "mallopt") and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        _kept_bytes = 0
        _libc.mallopt(_M_MMAP_THRESHOLD, _SMALL_BLOCK_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _SMALL_BLOCK_BYTES)
