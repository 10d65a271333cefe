"""Checkpoints whose files lie on several hosts: each gives its own to the others, who read them by ranges.

Nothing is copied to be read. A host that gives is asked on a connection that begins with a key which ranks have told
each other; a request is a line of JSON, and so is the answer, behind which the bytes come.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from terrazzo.callers import answer_each
from terrazzo.checkpoint.format.manifest import FILE_NAME, MANIFEST, SEAL
from terrazzo.checkpoint.storage.local import LocalFolder
from terrazzo.checkpoint.storage.store import Folder, step_of

__all__ = ["Giver", "Giving", "SpreadFolder"]

_PATIENCE_S = 60.0
"""For a host to answer, or to take what it has asked for."""
_LONGEST = 1 << 20
"""Bytes of a request, and of an answer."""
_AT_ONCE = 4096
"""Parts of a file that are asked for in one request."""


class Giver(NamedTuple):
    """Where a host is asked for its files."""

    address: str
    port: int
    key: str


class Giving:
    """Gives files of the checkpoints in `root` to whoever has the key, in threads of its own, until it is closed."""

    def __init__(self, root: Path, key: str, ears: socket.socket) -> None:
        self._root, self._key, self._ears = root, key, ears
        self._callers, self._expected, self._hung_up = 0, 0, threading.Condition()
        answer_each(ears, self._answer)

    def expect(self, callers: int) -> None:
        """From now on so many are to come and to be given what they ask for, before `close` has waited for all."""
        with self._hung_up:
            self._expected = callers

    def close(self, patience_s: float = 0.0) -> None:
        """Nobody else is heard, once all that are there or expected have hung up, or that long has passed."""
        with self._hung_up:
            self._hung_up.wait_for(lambda: not self._callers and not self._expected, patience_s)
        with contextlib.suppress(OSError):
            self._ears.shutdown(socket.SHUT_RDWR)  # a thread that accepts does not hear of `close`
        self._ears.close()

    def _answer(self, caller: socket.socket) -> None:
        lines = caller.makefile("rb")
        caller.settimeout(_PATIENCE_S)
        if not hmac.compare_digest(lines.readline(len(self._key) + 1).strip(), self._key.encode()):
            return
        caller.settimeout(None)  # it may have nothing to ask for long, and its end is noticed
        with self._hung_up:
            self._callers += 1
        try:
            while asked := lines.readline(_LONGEST):
                self._give(caller, **json.loads(asked))
        finally:
            with self._hung_up:
                self._callers, self._expected = self._callers - 1, max(0, self._expected - 1)
                self._hung_up.notify_all()

    def _give(self, caller: socket.socket, name: str, file: str, parts: Sequence[tuple[int, int]]) -> None:
        if "/" in name or step_of(name) is None or not (FILE_NAME.fullmatch(file) or file in (MANIFEST, SEAL)):
            raise ValueError(file)
        try:
            with LocalFolder(self._root / name).opened(file) as descriptor:
                size = os.fstat(descriptor).st_size
                counts = [max(0, min(count, size - offset)) for offset, count in parts]
                caller.sendall(json.dumps({"size": size, "counts": counts}).encode() + b"\n")
                for (offset, _), count in zip(parts, counts, strict=True):
                    _send(caller, descriptor, offset, count)
        except FileNotFoundError:
            caller.sendall(b"{}\n")


def _send(caller: socket.socket, descriptor: int, offset: int, count: int) -> None:
    while count:
        sent = os.sendfile(caller.fileno(), descriptor, offset, count)
        if not sent:  # cut off since: the other side is not to take what follows for these
            raise OSError("the file has become shorter")
        offset, count = offset + sent, count - sent


class SpreadFolder(Folder):
    """One checkpoint: what is on this host is read here, and all else from hosts that have it.

    Args:
        where: for messages.
        name: of its folder on each host.
        here: that folder on this host, if it has a part of it, and the files that are read there.
        givers: of each other file, who has it. Of the manifest and the seal too, unless they are here.
    """

    def __init__(
        self, where: str, name: str, here: tuple[LocalFolder, Sequence[str]] | None, givers: Mapping[str, Giver]
    ) -> None:
        self.where, self._name, self._givers = where, name, dict(givers)
        self._here = None if here is None else here[0]
        self._inside: Sequence[str] = () if here is None else here[1]
        self._lock, self._mouths = threading.Lock(), dict[Giver, tuple[socket.socket, Any]]()

    def _size_bytes(self, file: str) -> int:
        if self._here is not None and file in self._inside:
            return self._here.size_bytes(file)
        return self._ask(file, [])[0]

    def _read_each(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> list[int]:
        if self._here is not None and file in self._inside:
            return self._here._read_each(file, parts)
        groups = [parts[first : first + _AT_ONCE] for first in range(0, len(parts), _AT_ONCE)]
        return [count for group in groups for count in self._ask(file, group)[1]]

    def _has(self, file: str) -> bool:
        return file in self._inside or file in self._givers

    def cache(self) -> list[Any] | None:
        return None if self._here is None else self._here.cache()

    def _ask(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> tuple[int, list[int]]:
        """The size of a file, and how many bytes there were for each buffer."""
        if (giver := self._givers.get(file)) is None:
            raise FileNotFoundError(file)
        asked = {"name": self._name, "file": file, "parts": [(offset, len(buffer)) for offset, buffer in parts]}
        with self._lock:
            try:
                mouth, lines = self._mouth(giver)
                mouth.sendall(json.dumps(asked).encode() + b"\n")
                if not (said := lines.readline(_LONGEST)):
                    raise ConnectionResetError("it has hung up")
                answer = json.loads(said)
                if not answer:
                    raise FileNotFoundError(file)
                for (_, buffer), count in zip(parts, answer["counts"], strict=True):
                    _fill(lines, buffer[:count])
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as error:
                self.close()
                raise OSError(f"host {giver.address}, port {giver.port}: {error}") from None
        return answer["size"], answer["counts"]

    def _mouth(self, giver: Giver) -> tuple[socket.socket, Any]:
        if giver not in self._mouths:
            mouth = socket.create_connection((giver.address, giver.port), _PATIENCE_S)
            mouth.sendall(f"{giver.key}\n".encode())
            self._mouths[giver] = (mouth, mouth.makefile("rb"))
        return self._mouths[giver]

    def hang_up(self) -> None:
        """Break off what another thread is reading: that ends with an error at once."""
        for mouth, _ in list(self._mouths.values()):
            with contextlib.suppress(OSError):
                mouth.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ask nobody any more; whoever reads again asks anew."""
        mouths, self._mouths = self._mouths, {}
        for mouth, lines in mouths.values():
            lines.close()
            mouth.close()


def _fill(lines: Any, buffer: memoryview) -> None:
    while buffer:
        count = lines.readinto(buffer)
        if not count:
            raise ConnectionResetError("it has hung up")
        buffer = buffer[count:]
