"""Large pages for large CPU buffers that come and go.

Fresh memory costs a fault per 4 KiB page, more than the copy into it: for a 28 MB buffer 14 ms against 5 ms once the
kernel may use 2 MiB pages (docs/decisions.md). Elsewhere than on Linux this does nothing.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

__all__ = ["use_large_pages"]

_LARGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def use_large_pages(tensor: Tensor) -> Tensor:
    """Advise the kernel to back `tensor`'s memory, not yet written to, with large pages; returns it."""
    if _libc is not None and tensor.device.type == "cpu" and tensor.nbytes >= 2 * _LARGE_PAGE_BYTES:
        first = -(-tensor.data_ptr() // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        size_bytes = (tensor.data_ptr() + tensor.nbytes - first) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size_bytes), _MADV_HUGEPAGE)
    return tensor
