"""Test modules as pytest rewrites them, kept beside their sources: of a fresh tree each xdist worker makes a part.

Every worker imports every module, and would rewrite them all at the same time as the others: 13 s of computing each.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

__all__ = ["make_a_part", "make_ahead"]


def make_ahead(config: pytest.Config, folder: Path) -> threading.Thread:
    """Begin, in a thread, while workers start: until then a second core has nothing to do."""
    thread = threading.Thread(target=_make_without_garbage, args=(config, folder), daemon=True)
    thread.start()
    return thread


def make_a_part(config: pytest.Config, folder: Path) -> None:
    """Rewrite this worker's part of the modules below `folder` that nobody has rewritten, and write them down."""
    if (worker := getattr(config, "workerinput", None)) is not None:
        _make(config, folder, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def _make_without_garbage(config: pytest.Config, folder: Path) -> None:
    gc.disable()  # trees of sources are many objects
    try:
        _make(config, folder)
    finally:
        gc.enable()


def _make(config: pytest.Config, folder: Path, first: int = 0, parts: int = 1) -> None:
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None or sys.dont_write_bytecode:
        return
    modules = sorted(folder.rglob("test_*.py"), key=lambda path: (-path.stat().st_size, path))
    for path in modules[first::parts]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(kept.parent) and not _is_of(path, kept):
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, stat, kept)


def _is_of(path: Path, kept: Path) -> bool:
    """By its first bytes, which pytest checks too: to read all code is half a second."""
    stat = path.stat()
    source = b"".join((int(each) & 0xFFFFFFFF).to_bytes(4, "little") for each in (0, stat.st_mtime, stat.st_size))
    try:
        with kept.open("rb") as file:
            return file.read(16) == importlib.util.MAGIC_NUMBER + source
    except OSError:
        return False
