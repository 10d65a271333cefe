"""What the tests of swap files share: settings, bytes, and file systems made for one test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from terrazzo.engine.offload.nvme.swap_space import SwapSpace, page_aligned
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.plan.layout import PAGE_BYTES


def disk_in(*folders: Path, pages: int = 64, block: int = 4, direct: bool = False, digest: bool = False) -> SwapSpace:
    """A SwapSpace of so many pages, with so many in a block."""
    settings = Offload(folders, block_mib=block * PAGE_BYTES / 2**20, depth=4, direct=direct, digest=digest)
    return SwapSpace(settings, 0, pages * PAGE_BYTES)


def random_pages(count: int) -> Tensor:
    return page_aligned(count * PAGE_BYTES).random_()


def read_back(disk: SwapSpace, offset: int, pages: int) -> Tensor:
    into = random_pages(pages)
    disk.read(offset, into).wait()
    return into


def at_page(pages: int) -> int:
    return pages * PAGE_BYTES


@contextmanager
def mounted(folder: Path, kind: str, options: str = "size=1m") -> Iterator[Path]:
    """A file system of its own; skips the test where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", kind, "-o", options, "none", folder], capture_output=True).returncode
    ):
        pytest.skip(f"this user cannot mount a {kind}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a test that fails may have files open


def changed(path: Path, position: int) -> None:
    """Flip one bit of a file, behind the back of the process that has it open."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def supports_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True
