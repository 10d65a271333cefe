"""The tiers `cpu` and `nvme` behind one interface: host memory and swap files for states off the device.

What a model needs on each tier is known before it is built, so host memory is one arena and swap files are allocated
once; nothing is allocated in a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Buffer, Resting, Space
from terrazzo.engine.instrumentation.recorder import SILENT, Recorder
from terrazzo.engine.offload.host_arena import HostArena
from terrazzo.engine.offload.needs import SENDS, Need, disk_bytes, host_bytes, staging_count
from terrazzo.engine.offload.nvme.nvme_buffer import NvmeBuffer, NvmeTier
from terrazzo.engine.offload.nvme.swap_space import SwapSpace
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.offload.sending import Sending
from terrazzo.engine.plan.layout import padded_bytes
from terrazzo.engine.runtime.device import Stream
from terrazzo.engine.runtime.topology import bound_to, ranks_here, step_threads
from terrazzo.engine.runtime.worker import Job, Worker

__all__ = ["Store"]


@dataclass
class UpdateCounts:
    """Counts of updates on the CPU: elements stepped and the seconds it took; `recorder` is called with each."""

    numel: int = 0
    seconds: float = 0.0
    recorder: Recorder = field(default=SILENT, repr=False)

    def took(self, values: Tensor, since: float) -> None:
        """`values` have been updated, from `since` until now."""
        self.numel += values.numel()
        self.seconds += time.perf_counter() - since
        self.recorder.moved("update", since, values.nbytes)


class Store:
    """Host memory and swap files of one model's offloaded states on this rank.

    Args:
        device: of the mesh.
        rank: of this process among all.
        local_ranks: how many ranks share this host, for where no launcher tells it.

    Attributes:
        copies_out, copies_in: from the device and to it, by threads; PCIe carries both at the same time.
        sending: new weights to the device, on `copies_in`.
        updates: what is counted of updates of offloaded states, from the start on.
    """

    def __init__(self, device: torch.device, settings: Offload, need: Need, rank: int, local_ranks: int = 1) -> None:
        self.device, self.settings, self._need, self._local_ranks = device, settings, need, local_ranks
        self.copies_out, self.copies_in, self.updates = Stream.new(device), Stream.new(device), UpdateCounts()
        self._pin_for = device if settings.pin else None
        arena_bytes = host_bytes(need, settings)
        self.arenas = [self._arena(arena_bytes)] if arena_bytes else []
        self.nvme = self._open_nvme(need, rank) if need.nvme else None
        cells = [self.host(padded_bytes(need.send_bytes)) for _ in range(SENDS if need.send_bytes else 0)]
        self.sending = Sending(self.copies_in, cells)
        self._writer = Worker("terrazzo-write") if need.cpu or need.nvme else None
        self._landing: deque[Job] = deque()

    @cached_property
    def step_threads(self) -> tuple[int, frozenset[int]]:
        """How many threads an update has, and the CPUs that they are bound to; none: they are not bound."""
        threads, cpus = step_threads(self.device, ranks_here(otherwise=self._local_ranks))
        return self.settings.threads or threads, cpus

    def _open_nvme(self, need: Need, rank: int) -> NvmeTier:
        settings = self.settings
        swap = SwapSpace(settings, rank, disk_bytes(need))
        buffers = [self.host(padded_bytes(need.load_bytes)) for _ in range(settings.depth if need.load_bytes else 0)]
        return NvmeTier(swap, settings.cell_numel, buffers, self.copies_in)

    def _arena(self, size_bytes: int) -> HostArena:
        """Pinning touches its pages, which then lie on the device's NUMA node."""
        with bound_to(self.step_threads[1]):
            return HostArena(size_bytes, self._pin_for)

    def host(self, count_bytes: int) -> Tensor:
        """Page-aligned host memory, uint8, zero at first."""
        assert self.arenas, "no host memory was asked for"
        return self.arenas[0].allocate(count_bytes)

    def grow(self, states: Sequence[int]) -> None:
        """Make room in host memory for further states of so many bytes each."""
        if states:
            self.arenas.insert(0, self._arena(sum(map(padded_bytes, states))))

    def extra_host(self, count_bytes: int) -> Tensor:
        """Host memory for what not every step needs: partial sums of micro-batches; kept from then on."""
        self.arenas.append(self._arena(padded_bytes(count_bytes)))
        return self.arenas[-1].allocate(count_bytes)

    def save(self, state: Resting, source: Buffer) -> Job | None:
        """Replace what `state` holds by what `source` does; None when that is done, else what it ends with.

        Two may be under way: a slow disk must not let gradients pile up.
        """
        if self.device.type == "cpu" and isinstance(state, Buffer):
            state.save(source)
            return None
        mark = Stream.current(self.device).mark()

        def copied() -> None:
            with self.copies_out.completing(mark):
                state.save(source)

        assert self._writer is not None, "nothing rests away from the device"
        while len(self._landing) > 1:
            self._landing.popleft().wait()
        self._landing.append(self._writer.submit(copied))
        return self._landing[-1]

    def state(self, space: Space, axes: tuple[str, ...], dtype: torch.dtype, tier: str) -> Resting:
        """A place for one state on `tier`, zero at first."""
        if tier == "device":
            return space.zeros(axes, dtype)
        numel = space.range(axes).numel
        if tier == "nvme":
            assert self.nvme is not None, "nothing was to be on nvme"
            offset = self.nvme.swap.reserve(padded_bytes(numel * dtype.itemsize))
            cell_numel, blocks = self.nvme.cell_numel, space.layout.blocks
            cell_numel = cell_numel if blocks is None else blocks.size_bytes(cell_numel)  # whose elements are bytes
            return NvmeBuffer(space, axes, dtype, self.nvme, offset, cell_numel)
        return Buffer(space, axes, self.host(numel * dtype.itemsize).view(dtype))

    def staging(self) -> Sequence[Tensor]:
        """Buffers for cells under way in an update."""
        cell_bytes = self._need.staging_bytes
        if not cell_bytes:
            return []
        return [self.host(padded_bytes(cell_bytes)) for _ in range(staging_count(self.settings))]

    def set_recorder(self, recorder: Recorder) -> None:
        """Report to `recorder` updates, and what is read from `nvme` and written to it."""
        self.updates.recorder = recorder
        if self.nvme is not None:
            self.nvme.swap.traffic.recorder = recorder

    def usage(self) -> dict[str, float]:
        """Bytes held beside the device, bytes read and written so far and seconds with such transfers under way,
        elements updated on the CPU and the seconds it took.
        """
        traffic = self.nvme.swap.traffic if self.nvme is not None else None
        return {
            "host_bytes": sum(arena.size_bytes for arena in self.arenas),
            "pinned_bytes": sum(arena.pinned_bytes for arena in self.arenas),
            "disk_bytes": self.nvme.swap.size_bytes if self.nvme is not None else 0,
            "read_bytes": traffic.read_bytes if traffic else 0,
            "written_bytes": traffic.written_bytes if traffic else 0,
            "read_s": traffic.read_s if traffic else 0.0,
            "write_s": traffic.write_s if traffic else 0.0,
            "stepped_numel": self.updates.numel,
            "step_s": self.updates.seconds,
        }

    def close(self) -> None:
        """Remove the swap files. Nothing that was on `nvme` can be used afterwards."""
        if self.nvme is not None:
            self.nvme.swap.close()
