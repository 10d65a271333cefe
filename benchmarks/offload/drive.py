"""Swap files beside fio: the engine's reads and writes, and fio's of the same file with as many blocks in flight.

fio is run twice: with its own memory, and with large pages, which the engine has. What a disk can hand over in one
request depends on how scattered the memory is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.offload.turns import Others, attempt, in_fresh_process, seconds, take_turns
from terrazzo.engine.offload.host_arena import HostArena
from terrazzo.engine.offload.nvme.swap_space import SwapSpace
from terrazzo.engine.offload.options import Offload

KINDS = ("read", "write")
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # malloc asks for them by madvise, as the engine does


@dataclass(frozen=True)
class Effort:
    """What is run: bytes of a turn, and turns of each kind."""

    size_bytes: int = 512 << 20
    rounds: int = 9


def settings(folder: Path) -> Offload:
    """As the engine has them where the user chooses nothing."""
    return Offload(path=folder)


def measure(folder: Path, effort: Effort = Effort()) -> dict[str, Any]:
    """Seconds of each contender for reading and for writing."""
    return in_fresh_process(_measure, folder, effort)


def _measure(folder: Path, effort: Effort) -> dict[str, Any]:
    missing: dict[str, str] = {}
    chosen = settings(folder)
    disk = SwapSpace(chosen, 0, effort.size_bytes)
    memory = HostArena(effort.size_bytes, pin_for=None).allocate(effort.size_bytes)
    memory.random_(0, 256)
    offset = disk.reserve(effort.size_bytes)
    own: dict[str, Callable[[], object]] = {
        "read": lambda: disk.read(offset, memory).wait(),
        "write": lambda: disk.write(offset, memory).wait(),
    }
    acts: dict[str, Callable[[], float]] = {f"terrazzo {kind}": _timed(own[kind]) for kind in KINDS}
    own["write"]()
    fio = Fio(disk.paths[0], effort.size_bytes, chosen)
    if attempt(missing, "fio", lambda: fio.seconds("read", {})) is not None:
        acts |= {f"fio {kind}": fio.act(kind, {}) for kind in KINDS}
        acts |= {f"fio, large pages {kind}": fio.act(kind, LARGE_PAGES) for kind in KINDS}
    others = Others()
    turns = take_turns(acts, effort.rounds, others)
    direct = disk.direct
    disk.close()
    return {
        "effort": asdict(effort),
        "block_bytes": chosen.block_bytes,
        "depth": chosen.depth,
        "direct": direct,
        "others": others.kept,
        "turns": turns,
        "missing": missing,
    }


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    return lambda: seconds(work)


@dataclass(frozen=True)
class Fio:
    """fio's own reading and writing of the whole of `path`."""

    path: Path
    size_bytes: int
    chosen: Offload

    def act(self, kind: str, environment: dict[str, str]) -> Callable[[], float]:
        return lambda: self.seconds(kind, environment)

    def seconds(self, kind: str, environment: dict[str, str]) -> float:
        """By its own clock, which leaves out that it starts. Raises `OSError` where it is missing or refuses."""
        if shutil.which("fio") is None:
            raise FileNotFoundError("fio is not installed")
        done = subprocess.run(self.command(kind), env={**os.environ, **environment}, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr or done.stdout)
        return self.size_bytes / float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])

    def command(self, kind: str) -> list[str]:
        return [
            *("fio", "--name=bench", f"--filename={self.path}", f"--rw={kind}", "--allow_file_create=0"),
            *(f"--size={self.size_bytes}", f"--bs={self.chosen.block_bytes}", f"--iodepth={self.chosen.depth}"),
            *("--ioengine=libaio", "--direct=1", "--output-format=json"),
        ]
