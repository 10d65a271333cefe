"""Serves a listening socket: each connection is handled in a thread of its own, until it is told to close."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

__all__ = ["serve"]

_RETRY_S = 0.1
"""Seconds to wait if the system cannot accept a connection now."""


def serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> Callable[[], None]:
    """Accept connections in the background, and close each when `handle` ends, whatever it raises.

    Clients that disconnect, or a lack of descriptors or threads, do not end this: others may connect later.

    Args:
        handle: must not call torch: the threads are daemons, which the exit of the process cuts off, and that must not
            happen within C++ (see `terrazzo.processes.ending`).

    Returns:
        What closes `listener`, after which nothing is accepted. Its own `close` does not do: a thread that waits in
        `accept` keeps the socket open for one more connection.
    """
    _start_thread(_accept, listener, handle)

    def close() -> None:
        with contextlib.suppress(OSError):  # closed already
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    return close


def _start_thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _accept(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    while listener.fileno() != -1:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed, or not
            time.sleep(_RETRY_S)
            continue
        try:
            _start_thread(_handle, connection, handle)
        except RuntimeError:  # no thread
            connection.close()
            time.sleep(_RETRY_S)


def _handle(connection: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger, or it has gone
        handle(connection)
