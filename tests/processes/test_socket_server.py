"""Connections to a listening socket: some that fail are not the end of it."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import pytest

from terrazzo.processes.socket_server import serve


class Listener(socket.socket):
    """Whose first connections cannot be had."""

    problems: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.problems:
            number = self.problems.pop()
            raise OSError(number, os.strerror(number))
        return super().accept()


def listening(problems: list[int]) -> Listener:
    listener = Listener()
    listener.problems = problems
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def say(client: socket.socket) -> None:
    if client.recv(3) == b"bad":
        raise ValueError("a stranger")
    client.sendall(b"heard")


def called(listener: socket.socket, word: bytes) -> bytes:
    with socket.create_connection(listener.getsockname(), 5) as connection:
        connection.sendall(word)
        return connection.recv(5)


def test_a_connection_that_cannot_be_had_and_a_stranger_are_not_the_end() -> None:
    with listening([errno.EMFILE, errno.ECONNABORTED]) as listener:
        serve(listener, say)
        assert called(listener, b"bad") == b""
        assert called(listener, b"one") == b"heard"


def test_a_thread_that_cannot_be_had_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if self._target is not None and self._target.__name__ == "_handle" and not refused:  # type: ignore[attr-defined]
            refused.append(self)
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with listening([]) as listener:
        serve(listener, say)
        with socket.create_connection(listener.getsockname(), 5) as connection:
            assert connection.recv(5) == b""
        assert refused and called(listener, b"one") == b"heard"


def test_it_ends_with_its_socket() -> None:
    before = set(threading.enumerate())
    listener = listening([])
    close = serve(listener, say)
    assert called(listener, b"one") == b"heard"
    (thread,) = {each for each in set(threading.enumerate()) - before if each._target.__name__ == "_accept"}  # type: ignore[attr-defined]
    address = listener.getsockname()
    close()
    with pytest.raises(ConnectionRefusedError):  # by a socket that a thread waits at, too
        socket.create_connection(address, 5)
    thread.join(5)
    assert not thread.is_alive()
    close()
