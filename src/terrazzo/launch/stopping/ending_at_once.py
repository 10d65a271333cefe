"""Signals that end a process while it waits in C++, such as for ranks that have not come.

Python calls its handlers on the main thread once that is back in Python, which may be never. The descriptor of
`signal.set_wakeup_fd` is written to at once, and a thread reads it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from terrazzo.launch.stopping.notices import say_now
from terrazzo.launch.stopping.received_signals import ASKING, receive_by

__all__ = ["ended_at_once"]


@contextmanager
def ended_at_once(words: str | None) -> Iterator[None]:
    """Within this context signals that are `ASKING` end this process, with 128 and their number. On the main thread.

    Args:
        words: what is said then, if anything.
    """
    before = receive_by(lambda number, frame: None, ASKING)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    former = signal.set_wakeup_fd(writing)
    threading.Thread(target=_end, args=(reading, words), daemon=True).start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former)
        os.close(writing)


def _end(reading: int, words: str | None) -> None:
    """End this process at the first such signal; return once nobody can write of one any more."""
    with os.fdopen(reading, "rb", buffering=0) as received:
        while number := received.read(1):
            if number[0] in ASKING:
                try:
                    if words is not None:
                        say_now(words)
                finally:
                    os._exit(128 + number[0])
