"""A host sends files of its checkpoints to hosts that ask for them.

A receiver's connection begins with a key that ranks have exchanged; each request is a line of JSON, and so is each
answer, behind which the bytes come. `multi_host` has the side that receives.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from terrazzo.checkpoint.format.manifest import FILE_NAME, MANIFEST, SEAL
from terrazzo.checkpoint.storage.local import LocalFolder
from terrazzo.checkpoint.storage.store import step_of
from terrazzo.processes.socket_server import serve

__all__ = ["ANSWER_S", "LONGEST_LINE", "FileSender", "SenderAddress"]

ANSWER_S = 60.0
"""For a host to answer, or to take what it has asked for."""
LONGEST_LINE = 1 << 20
"""Bytes of a request, and of an answer."""


class SenderAddress(NamedTuple):
    """Where a host is asked for its files."""

    address: str
    port: int
    key: str


class FileSender:
    """Sends files of the checkpoints in `root` to receivers that have the key, in threads of its own, until closed.

    Args:
        listener: a socket that listens, which `close` closes.
    """

    def __init__(self, root: Path, key: str, listener: socket.socket) -> None:
        self._root, self._key = root, key
        self._receivers, self._expected, self._changed = 0, "", threading.Condition()
        self._close = serve(listener, self._handle)

    def expect(self, name: str) -> None:
        """A receiver is to come for the checkpoint of that name, and `close` waits for it; empty: none is to come.

        To be called before a receiver can know that there is such a checkpoint: it may have gone again soon after.
        """
        with self._changed:
            self._expected = name

    def close(self, patience_s: float = 0.0) -> None:
        """Send no more, once all receivers that are there or expected have hung up, or that long has passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._receivers and not self._expected, patience_s)
        self._close()

    def _handle(self, receiver: socket.socket) -> None:
        lines, names = receiver.makefile("rb"), set[str]()
        receiver.settimeout(ANSWER_S)
        if not hmac.compare_digest(lines.readline(len(self._key) + 1).strip(), self._key.encode()):
            return
        receiver.settimeout(None)  # it may have nothing to ask for long, and its end is noticed
        with self._changed:
            self._receivers += 1
        try:
            while request := lines.readline(LONGEST_LINE):
                wanted = json.loads(request)
                names.add(wanted["name"])
                self._send(receiver, **wanted)
        finally:
            with self._changed:
                self._receivers -= 1
                if self._expected in names:
                    self._expected = ""
                self._changed.notify_all()

    def _send(self, receiver: socket.socket, name: str, file: str, parts: Sequence[tuple[int, int]]) -> None:
        if "/" in name or step_of(name) is None or not (FILE_NAME.fullmatch(file) or file in (MANIFEST, SEAL)):
            raise ValueError(file)
        try:
            with LocalFolder(self._root / name).opened(file) as descriptor:
                size = os.fstat(descriptor).st_size
                counts = [max(0, min(count, size - offset)) for offset, count in parts]
                receiver.sendall(json.dumps({"size": size, "counts": counts}).encode() + b"\n")
                for (offset, _), count in zip(parts, counts, strict=True):
                    _send_bytes(receiver, descriptor, offset, count)
        except FileNotFoundError:
            receiver.sendall(b"{}\n")


def _send_bytes(receiver: socket.socket, descriptor: int, offset: int, count: int) -> None:
    while count:
        sent = os.sendfile(receiver.fileno(), descriptor, offset, count)
        if not sent:  # cut off since: the receiver is not to take what follows for these
            raise OSError("the file has become shorter")
        offset, count = offset + sent, count - sent
