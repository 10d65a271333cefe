"""A plugin: a test that its time limit cannot end, since it is stuck in C code, ends its process and says where it was.

The limit raises an error in the main thread, as soon as that is in Python code. xdist goes on in a new process, where
it would begin with the same test again: this one fails there at once.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.helpers.alone import limit_of

GRACE_S = float(os.environ.get("TERRAZZO_TESTS_GRACE_S", "60"))
"""How long after its limit a test is taken to be stuck."""

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # the real one: while tests run, it is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0]) if marker else limit_of(item.config)
    if not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if (note := _note(item)) is not None:
            note.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if (note := _note(item)) is not None:
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            pytest.fail("it ended the process that ran it", pytrace=False)


def _note(item: pytest.Item) -> Path | None:
    """A file that is there while the test runs, in a run with xdist."""
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return None
    name = hashlib.sha1(f"{worker['testrunuid']} {item.nodeid}".encode()).hexdigest()
    return Path(tempfile.gettempdir(), f"terrazzo-test-{name}")
