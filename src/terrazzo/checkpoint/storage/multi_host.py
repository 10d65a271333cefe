"""One checkpoint whose files are on several hosts: each is read where it is, by ranges, and nothing is copied for it.

`file_sender` has the side of the host that is asked.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.checkpoint.storage.file_sender import ANSWER_S, LONGEST_LINE, SenderAddress
from terrazzo.checkpoint.storage.local import LocalFolder
from terrazzo.checkpoint.storage.store import CheckpointFolder

__all__ = ["MultiHostFolder"]

_AT_ONCE = 4096
"""Parts of a file that are asked for in one request."""


class MultiHostFolder(CheckpointFolder):
    """Reads what is on this host from its folder, and all else from the hosts that have it.

    Args:
        where: for messages.
        name: of its folder on each host.
        local: that folder on this host, if it has a part of it, and the files that are read there.
        senders: for each other file, a host that has it; for the manifest and the seal too, unless they are here.
    """

    def __init__(
        self,
        where: str,
        name: str,
        local: tuple[LocalFolder, Sequence[str]] | None,
        senders: Mapping[str, SenderAddress],
    ) -> None:
        self.where, self._name, self._senders = where, name, dict(senders)
        self._local = None if local is None else local[0]
        self._local_files: Sequence[str] = () if local is None else local[1]
        self._lock, self._connections = threading.Lock(), dict[SenderAddress, tuple[socket.socket, Any]]()

    def _size_bytes(self, file: str) -> int:
        if self._local is not None and file in self._local_files:
            return self._local.size_bytes(file)
        return self._request(file, [])[0]

    def _read_each(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> list[int]:
        if self._local is not None and file in self._local_files:
            return self._local._read_each(file, parts)
        groups = [parts[first : first + _AT_ONCE] for first in range(0, len(parts), _AT_ONCE)]
        return [count for group in groups for count in self._request(file, group)[1]]

    def _has(self, file: str) -> bool:
        return file in self._local_files or file in self._senders

    def cache(self) -> list[Any] | None:
        return None if self._local is None else self._local.cache()

    def _request(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> tuple[int, list[int]]:
        """The size of a file, and how many bytes there were for each buffer."""
        if (sender := self._senders.get(file)) is None:
            raise FileNotFoundError(file)
        request = {"name": self._name, "file": file, "parts": [(offset, len(buffer)) for offset, buffer in parts]}
        with self._lock:
            try:
                connection, lines = self._connect(sender)
                connection.sendall(json.dumps(request).encode() + b"\n")
                if not (line := lines.readline(LONGEST_LINE)):
                    raise ConnectionResetError("it has hung up")
                answer = json.loads(line)
                if not answer:
                    raise FileNotFoundError(file)
                for (_, buffer), count in zip(parts, answer["counts"], strict=True):
                    _fill(lines, buffer[:count])
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as error:
                self.close()
                raise OSError(f"host {sender.address}, port {sender.port}: {error}") from None
        return answer["size"], answer["counts"]

    def _connect(self, sender: SenderAddress) -> tuple[socket.socket, Any]:
        if sender not in self._connections:
            connection = socket.create_connection((sender.address, sender.port), ANSWER_S)
            connection.sendall(f"{sender.key}\n".encode())
            self._connections[sender] = (connection, connection.makefile("rb"))
        return self._connections[sender]

    def hang_up(self) -> None:
        """Break off what another thread is reading: that ends with an error at once."""
        for connection, _ in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; whoever reads again connects anew."""
        connections, self._connections = self._connections, {}
        for connection, lines in connections.values():
            lines.close()
            connection.close()


def _fill(lines: Any, buffer: memoryview) -> None:
    while buffer:
        count = lines.readinto(buffer)
        if not count:
            raise ConnectionResetError("it has hung up")
        buffer = buffer[count:]
