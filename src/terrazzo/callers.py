"""Who calls a socket that listens: each is answered in a thread of its own, until the socket is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

__all__ = ["answer_each"]

_LATER_S = 0.1
"""Until somebody is heard again where the system could not have it now."""


def answer_each(ears: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    """Begin to hear who calls `ears`, and to have `answer` close what it is given, whatever it raises.

    A caller who has gone again, or no descriptor or thread to be had, is not the end of it: others call later.
    """
    _begin(_accept, ears, answer)


def _begin(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _accept(ears: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    while ears.fileno() != -1:
        try:
            caller, _ = ears.accept()
        except OSError:  # closed, or not
            time.sleep(_LATER_S)
            continue
        try:
            _begin(_answered, caller, answer)
        except RuntimeError:  # no thread
            caller.close()
            time.sleep(_LATER_S)


def _answered(caller: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    with caller, contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger, or it has gone
        answer(caller)
