"""The lint of finalizers finds waits that are planted behind calls, and nothing where only a note is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint.__main__ import check

OTHER = """
import queue
from concurrent.futures import ThreadPoolExecutor

class Disk:
    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.notes: queue.SimpleQueue[int] = queue.SimpleQueue()
    def close(self) -> None:
        self._threads.shutdown()
    def leave(self) -> None:
        self.notes.put(1)

def remove(path):
    path.unlink()
"""

PLANTED = {
    "a method that a finalizer is given": (
        """
import weakref
from .other import Disk
class Store:
    def __init__(self, disk: Disk) -> None:
        weakref.finalize(self, disk.close)
""",
        "engine/offload/other.py:10: 'self._threads.shutdown'",
    ),
    "a method of an attribute": (
        """
from .other import Disk
class Store:
    def __init__(self) -> None:
        self.disk = Disk(None)
    def __del__(self) -> None:
        self._end()
    def _end(self) -> None:
        self.disk.close()
""",
        "engine/offload/other.py:10: 'self._threads.shutdown'",
    ),
    "a method of a base class": (
        """
from .other import Disk
class Mine(Disk):
    def __del__(self) -> None:
        self.close()
""",
        "engine/offload/other.py:10: 'self._threads.shutdown'",
    ),
    "a function of another module": (
        """
import weakref
from terrazzo.engine.offload import other
def begin(model, path):
    weakref.ref(model, lambda _: other.remove(path))
""",
        "engine/offload/other.py:15: 'path.unlink'",
    ),
    "a partial of a function inside a function": (
        """
import functools, weakref
def begin(model, job):
    def end(job):
        job.result()
    weakref.finalize(model, functools.partial(end, job))
""",
        "engine/offload/planted.py:5: 'job.result'",
    ),
    "what is not of the package": (
        """
import shutil, weakref
def begin(model, path):
    weakref.finalize(model, shutil.rmtree, path)
""",
        "engine/offload/planted.py:4: 'shutil.rmtree'",
    ),
    "a lock": (
        """
import threading
class Store:
    def __init__(self) -> None:
        self._guard = threading.Lock()
    def __del__(self) -> None:
        with self._guard:
            pass
""",
        "engine/offload/planted.py:7: 'with self._guard'",
    ),
    "a thread": (
        """
import threading
class Store:
    def __del__(self) -> None:
        threading.Thread().start()
""",
        "engine/offload/planted.py:5: 'threading.Thread().start'",
    ),
    "an object that handles signals": (
        """
import signal, time
class Stop:
    def __call__(self, number, frame) -> None:
        time.sleep(1)
def begin():
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
""",
        "engine/offload/planted.py:5: 'time.sleep'",
    ),
}


def findings(root: Path, planted: str) -> list[str]:
    package = root / "terrazzo"
    (package / "engine" / "offload").mkdir(parents=True)
    for name, source in {"__init__": "", "engine/offload/other": OTHER, "engine/offload/planted": planted}.items():
        (package / name).with_suffix(".py").write_text(source)
    return [str(found).removeprefix(f"{package}/") for found in check(package, layered=True)]


@pytest.mark.parametrize("name", PLANTED)
def test_a_wait_that_is_planted_is_found(name: str, tmp_path: Path) -> None:
    source, expected = PLANTED[name]
    found = findings(tmp_path, source)
    assert any(text.startswith(expected) and "which runs at any moment" in text for text in found), found
    assert all("may wait" in text for text in found), found


def test_notes_flags_and_names_put_together_are_harmless(tmp_path: Path) -> None:
    source = """
import signal, weakref
from .other import Disk

class Store:
    def __init__(self, disk: Disk) -> None:
        self.disk, self.asked = disk, False
        weakref.finalize(self, disk.leave)
        signal.signal(signal.SIGTERM, self.ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.weak = weakref.ref(self)
    def ask(self, number, frame) -> None:
        self.asked = ", ".join([str(number)])
    def __del__(self) -> None:
        self.disk.leave()
    def close(self) -> None:
        self.disk.close()
"""
    assert findings(tmp_path, source) == []
