"""Test modules as pytest rewrites them, kept beside their sources: of a fresh tree each xdist worker makes a part.

Every worker imports every module, and would rewrite them all at the same time as the others: 13 s of computing each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

__all__ = ["make_a_part"]


def make_a_part(config: pytest.Config, folder: Path) -> None:
    """Rewrite this worker's part of the modules below `folder` that nobody has rewritten, and write them down."""
    worker = getattr(config, "workerinput", None)
    state = config.stash.get(rewrite.assertstate_key, None)
    if worker is None or state is None or sys.dont_write_bytecode:
        return
    modules = sorted(folder.rglob("test_*.py"), key=lambda path: (-path.stat().st_size, path))
    for path in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(path, kept) is None:
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, stat, kept)
