"""A block of host memory, such as that of all of a model's offloaded states.

It is page-aligned, as files read past the page cache ask for, and pinned where there is CUDA: a copy between a device
and memory that may be paged out is several times slower, and makes the host wait. Pinning takes milliseconds even for a
small block, so everything is pinned once and used again.

Pages lie on the NUMA node of the thread that touches them first, and pinning touches them: bind that thread before, see
`runtime.topology.bound_to`.
"""

from __future__ import annotations

import functools
import mmap

import torch
from torch import Tensor

from terrazzo.engine.plan.layout import PAGE_BYTES, padded_bytes
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.pages import use_large_pages
from terrazzo.errors import BadInput, Misuse
from terrazzo.messages import gib_text
from terrazzo.processes.ending import Ending

__all__ = ["HostArena"]


class HostArena:
    """One block of host memory, handed out piece by piece and never taken back.

    Args:
        size_bytes: rounded up to whole pages of `PAGE_BYTES`.
        pin_for: the device for whose copies it is locked in memory; None, or a CPU: it is not.

    Attributes:
        pinned_bytes: locked in memory; 0 or `size_bytes`.

    Tensors stay valid for as long as they are used, but once the arena is closed or gone they are not pinned any more.

    Raises:
        BadInput: when the system refuses the memory, or to pin it.
    """

    def __init__(self, size_bytes: int, pin_for: torch.device | None) -> None:
        self.size_bytes = padded_bytes(max(1, size_bytes))
        self.pinned_bytes = 0
        self._taken_bytes = 0
        mapped = _map(self.size_bytes)
        self._memory: Tensor | None = use_large_pages(torch.frombuffer(mapped, dtype=torch.uint8))
        self._unpin: Ending | None = None
        if pin_for is not None and devices.is_cuda(pin_for):
            # A child of a fork must not share these pages: copying on write would take them from under the device.
            mapped.madvise(getattr(mmap, "MADV_DONTFORK", mmap.MADV_NORMAL))
            _register(self._memory)
            self.pinned_bytes = self.size_bytes
            self._unpin = Ending(self, functools.partial(devices.unpin, self._memory, pin_for))

    def allocate(self, count_bytes: int) -> Tensor:
        """The next `count_bytes`, as uint8 [count_bytes] that starts on a page of its own; zero at first.

        Raises:
            Misuse: when there is not so much left, or the arena is closed.
        """
        if self._memory is None:
            raise Misuse("Memory was asked of a host arena that is closed: take all that is needed before close().")
        start = padded_bytes(self._taken_bytes)
        if not 0 <= count_bytes <= self.size_bytes - start:
            raise Misuse(
                f"{count_bytes:,} bytes were asked of a host arena with {self.size_bytes - start:,} of its "
                f"{self.size_bytes:,} left: make it as large as all that is taken, each in whole pages of {PAGE_BYTES}."
            )
        self._taken_bytes = start + count_bytes
        return self._memory[start : start + count_bytes]

    def close(self) -> None:
        """Unpin the memory and let go of it; it goes back to the system with the last tensor in it. May be repeated."""
        self._memory = None
        if self._unpin is not None:
            self._unpin()
        self.pinned_bytes = 0


def _map(size_bytes: int) -> mmap.mmap:
    """Private memory: what `mmap` gives by default is shared, which large pages and `fork` treat differently."""
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise BadInput(
            f"The system refuses {gib_text(size_bytes)} of host memory for what is offloaded ({error}): offload less, "
            "use more hosts, or place states on nvme."
        ) from error


def _register(memory: Tensor) -> None:
    """Pin `memory`; see cudaHostRegister in CUDA's runtime API."""
    code = devices.pin(memory)
    if code != 0:
        raise BadInput(
            f"CUDA cannot pin {gib_text(memory.nbytes)} of host memory (cudaHostRegister returned error {code}; "
            f"RLIMIT_MEMLOCK is {_lock_limit()}): raise the limit with 'ulimit -l unlimited' or in the container's "
            "settings, offload less, or set offload.pin to false, which makes copies slower."
        )


def _lock_limit() -> str:
    try:
        import resource
    except ImportError:
        return "unknown"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
