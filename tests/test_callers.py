"""Who is heard on a socket: others than those who could not be."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import pytest

from terrazzo.callers import answer_each


class Ears(socket.socket):
    """Whose first callers cannot be had."""

    problems: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.problems:
            number = self.problems.pop()
            raise OSError(number, os.strerror(number))
        return super().accept()


def listening(problems: list[int]) -> Ears:
    ears = Ears()
    ears.problems = problems
    ears.bind(("127.0.0.1", 0))
    ears.listen()
    return ears


def say(caller: socket.socket) -> None:
    if caller.recv(3) == b"bad":
        raise ValueError("a stranger")
    caller.sendall(b"heard")


def called(ears: socket.socket, word: bytes) -> bytes:
    with socket.create_connection(ears.getsockname(), 5) as mouth:
        mouth.sendall(word)
        return mouth.recv(5)


def test_a_caller_that_cannot_be_had_and_a_stranger_are_not_the_end() -> None:
    with listening([errno.EMFILE, errno.ECONNABORTED]) as ears:
        answer_each(ears, say)
        assert called(ears, b"bad") == b""
        assert called(ears, b"one") == b"heard"


def test_a_thread_that_cannot_be_had_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if self._target is not None and self._target.__name__ == "_answered" and not refused:  # type: ignore[attr-defined]
            refused.append(self)
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with listening([]) as ears:
        answer_each(ears, say)
        with socket.create_connection(ears.getsockname(), 5) as mouth:
            assert mouth.recv(5) == b""
        assert refused and called(ears, b"one") == b"heard"


def test_it_ends_with_its_socket() -> None:
    before = set(threading.enumerate())
    ears = listening([])
    answer_each(ears, say)
    (thread,) = set(threading.enumerate()) - before
    ears.shutdown(socket.SHUT_RDWR)
    ears.close()
    thread.join(5)
    assert not thread.is_alive()
