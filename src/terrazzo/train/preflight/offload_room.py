"""Whether host memory and disks have room for what a run offloads."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from terrazzo.config import Config
from terrazzo.engine.offload.nvme.swap_file import left_behind_bytes
from terrazzo.engine.offload.nvme.swap_folder import free_bytes, inspect_folder, is_memory
from terrazzo.launch.machine import ranks_here, resolve_device
from terrazzo.messages import gib_text
from terrazzo.planner import MemoryFigures
from terrazzo.planner.figures import Term
from terrazzo.planner.machine.devices import DRIVE_RATED_BYTES
from terrazzo.telemetry import available_host_bytes
from terrazzo.train.settings.folders import is_own, swap_folders

__all__ = ["check_folders", "host_lacks_room", "offload_notes"]


def check_folders(config: Config) -> list[str]:
    """Warnings about the folders for swap files; raises `BadInput` if one cannot be used."""
    notes = [note for folder in swap_folders(config) for note in inspect_folder(_existing(config, folder))]
    return list(dict.fromkeys(notes))


def host_lacks_room(config: Config, memory: MemoryFigures, world_size: int) -> str | None:
    """Why the host or its disks cannot hold what is offloaded; None if they can, or that is not known.

    On a CPU the host's memory is the device's, and `device_memory` counts what is kept there.
    """
    if resolve_device(config.launch) == "cuda" and (reason := _too_much_on_host(memory, world_size)):
        return reason
    needed = sum(term.value for term in memory.disk) * ranks_here(world_size)
    return _too_much_on_disk(config, swap_folders(config), needed)


def offload_notes(config: Config, memory: MemoryFigures, world_size: int) -> list[str]:
    """Notes on how much a run wears its drives, and on host memory that is to be page-locked."""
    notes = []
    if written := ranks_here(world_size) * sum(term.value for term in memory.disk_writes):
        steps, of_rated = config.train.steps, written * config.train.steps / DRIVE_RATED_BYTES
        share = f"{of_rated:.1%}" if of_rated >= 0.001 else "less than 0.1%"
        notes.append(
            f"each step writes {_gb(written)} to offload.path on this machine, the {steps:,} steps of this run"
            f" {_gb(written * steps)}: {share} of what one drive rated for 600 TB may be written"
        )
    pinned = sum(term.value for term in memory.host)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locks = resolve_device(config.launch) == "cuda" and config.offload.pin
    if locks and limit != resource.RLIM_INFINITY and pinned > limit:
        notes.append(
            f"{gib_text(pinned)} of host memory are to be page-locked on each rank, and RLIMIT_MEMLOCK is"
            f" {gib_text(limit)}: if the driver keeps to it, raise it (ulimit -l unlimited) or set offload.pin=false"
        )
    return notes


def _existing(config: Config, folder: Path) -> Path:
    """The folder, or if the run is to make it, the existing folder in which it will be made."""
    if not is_own(config, folder):
        return folder
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def _too_much_on_host(memory: MemoryFigures, world_size: int) -> str | None:
    ranks, free = ranks_here(world_size), available_host_bytes()
    needed = ranks * sum(term.value for term in memory.host)
    if free is None or needed <= free:
        return None
    return (
        f"The {ranks} ranks of this machine would keep {gib_text(needed)} in host memory, of which {gib_text(free)} are"
        f" free. Largest of a rank: {_largest(memory.host)}. Use offload.optim=nvme with an offload.path, a smaller"
        " share (offload.optim={cpu: 0.5}), or more machines."
    )


def _too_much_on_disk(config: Config, folders: Sequence[Path], needed_bytes: float) -> str | None:
    """Why the disks have no room for swap files, which are spread evenly over the folders; several may be on one disk.

    Files that dead runs have left count as free: they are removed when the run makes its own.
    """
    existing = {folder: _existing(config, folder) for folder in folders}
    disks = {folder: os.stat(path).st_dev for folder, path in existing.items()}
    for folder, path in existing.items():
        share = sum(disks[one] == disks[folder] for one in folders) / len(folders)
        wanted, free = needed_bytes * share, free_bytes(path)
        if is_memory(path):
            free = min(free, available_host_bytes() or free)
        free += sum(left_behind_bytes(one) for one in existing if disks[one] == disks[folder])
        if wanted > free:
            return (
                f"Swap files of this machine's ranks would take {gib_text(wanted)} on the disk of '{folder}'"
                f" (offload.path), where {gib_text(free)} are free. Make room there, name further folders on other"
                " disks in offload.path, or keep a share of the states elsewhere (offload.optim={nvme: 0.5})."
            )
    return None


def _largest(terms: Sequence[Term]) -> str:
    return ", ".join(f"{term.name} {gib_text(term.value)}" for term in sorted(terms, key=lambda term: -term.value)[:3])


def _gb(count_bytes: float) -> str:
    return f"{count_bytes / 1e12:.2f} TB" if count_bytes >= 1e12 else f"{count_bytes / 1e9:.3g} GB"
