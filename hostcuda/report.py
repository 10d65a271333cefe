"""What the device has noticed, where in the program, and how often."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAULTS", "Finding", "Report", "report"]

FAULTS = ("race", "early free", "foreign")
"""Kinds of findings that are bugs. The others are what a program may do and should know: `sync`, a host that waits for
the device; `pageable`, a copy that waits although it is asked not to; `record_stream`."""

_OWN = str(Path(__file__).parent)


@dataclass(frozen=True)
class Finding:
    """One kind of thing at one place.

    Attributes:
        where: the innermost frames of the application, innermost first.
        phase: what the program said it was doing.
    """

    kind: str
    text: str
    where: str
    thread: str
    phase: str

    def __str__(self) -> str:
        return f"[{self.phase}] {self.kind}: {self.text}\n    at {self.where}, in {self.thread}"


class Report:
    """Findings and how often each came up.

    Attributes:
        frames: part of the path of files whose frames `where` shows; of all but torch's if none of those is there.
    """

    def __init__(self) -> None:
        self.frames = ""
        self.counts: Counter[Finding] = Counter()
        self._phase, self._warns = "", False

    def warn_of_syncs(self, mode: int) -> None:
        """As `torch.cuda.set_sync_debug_mode` does, in modes 0 and 1."""
        if mode not in (0, 1):
            raise NotImplementedError(f"hostcuda does not simulate the sync debug mode {mode}, which raises errors")
        self._warns = mode == 1

    def note(self, kind: bytes, text: bytes) -> None:
        """Called by the native library, in the thread that does what is noticed."""
        thread = threading.current_thread().name
        self.counts[Finding(kind.decode(), text.decode(), self.place(), thread, self._phase)] += 1
        if kind == b"sync" and self._warns:
            warnings.warn(f"called a synchronizing CUDA operation: {text.decode()}", stacklevel=2)

    def place(self) -> str:
        """Where in the application this thread is."""
        stack = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe())]  # reads no source
        frames = [(code, line) for code, line in stack if not code.co_filename.startswith(_OWN)]
        own = [(code, line) for code, line in frames if self.frames and self.frames in code.co_filename]
        others = [(code, line) for code, line in frames if "/torch/" not in code.co_filename] or frames
        shown = own[:3] or others[:2]
        return " < ".join(f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in shown)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is found inside, in any thread, is found in the phase `name`."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def of(self, *kinds: str, phase: str | None = None) -> Counter[Finding]:
        """The findings of some kinds, in one phase if it is given."""
        items = self.counts.items()
        return Counter({f: n for f, n in items if f.kind in kinds and phase in (None, f.phase)})

    @property
    def faults(self) -> Counter[Finding]:
        """Findings that are bugs."""
        return self.of(*FAULTS)

    def take(self) -> Counter[Finding]:
        """All findings so far; they are forgotten here."""
        counts, self.counts = self.counts, Counter()
        return counts


report = Report()
