"""A copy of another host's files of one checkpoint: received by a thread, checked, and put where they belong."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from terrazzo.checkpoint.format.manifest import BLOCK_BYTES, MANIFEST, SEAL, File, blocks_of
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.storage.blocks import DigestBlock
from terrazzo.checkpoint.storage.file_sender import SenderAddress
from terrazzo.checkpoint.storage.local import LocalDraft, LocalFolder
from terrazzo.checkpoint.storage.multi_host import MultiHostFolder
from terrazzo.checkpoint.storage.store import CheckpointFolder
from terrazzo.errors import BadInput, Damaged, SaveFailed, TerrazzoError
from terrazzo.files import sync_folder
from terrazzo.processes.ending import start_thread

__all__ = ["PartnerCopy", "file_problem"]


class PartnerCopy:
    """Receives files from other hosts into a draft, and moves each to the checkpoint's folder once it is checked.

    Args:
        root: the folder that the checkpoint is in, on this host.
        senders: of each file; of the manifest and the seal too, unless they are here.
    """

    def __init__(self, root: Path, name: str, senders: Mapping[str, SenderAddress]) -> None:
        self._root, self._name, self._senders = root, name, senders
        self._source = MultiHostFolder(f"another host's {name}", name, None, senders)
        self._cancelled, self._problem, self._received = threading.Event(), "it was broken off", (0, 0.0)
        self._thread = start_thread("terrazzo-partner", self._work, self._cancelled.set)

    def wait(self, patience_s: float) -> None:
        """For its end, that long at most."""
        self._thread.join(patience_s)

    def cancel(self) -> None:
        """Break it off, and return once nothing is written any more."""
        self._cancelled.set()
        self._source.hang_up()
        self._thread.join()

    def result(self) -> tuple[int, float]:
        """Bytes, and seconds that they have taken. Raises `SaveFailed`."""
        self._thread.join()
        if self._problem:
            raise SaveFailed(
                f"The copy of another host's part of '{self._root / self._name}' was not saved:"
                f" {self._problem.removesuffix('.')}."
            )
        return self._received

    def _work(self) -> None:
        start = time.perf_counter()
        try:
            count_bytes = self._receive_all()
        except (OSError, TerrazzoError) as error:
            self._problem = str(error)
        except BaseException as error:  # whatever it was, there is no copy
            self._problem = f"{type(error).__name__}: {error}"
        else:
            self._received = (count_bytes, time.perf_counter() - start)
            self._problem = "it was broken off" if self._cancelled.is_set() else ""

    def _receive_all(self) -> int:
        folder, source = self._root / self._name, self._source
        draft = LocalDraft(self._root, self._name, secrets.token_hex(4))
        draft.begin()
        try:
            opened = TerrazzoCheckpoint(source if SEAL in self._senders else LocalFolder(folder), sizes=False)
            files, blocks = [file for file in opened.manifest.files if file.name in self._senders], opened.blocks()
            folder.mkdir(0o700, exist_ok=True)
            for file in files:
                self._receive(draft, file.name, file.size_bytes)
                if self._cancelled.is_set():
                    return 0
                if problem := file_problem(draft.folder(), file, blocks[file.name]):
                    raise Damaged(problem)
                os.rename(draft.folder().path / file.name, folder / file.name)
            if SEAL in self._senders:
                self._receive_manifest(draft, folder)
            sync_folder(folder)
        finally:
            source.close()
            draft.abandon()
        return sum(file.size_bytes for file in files)

    def _receive_manifest(self, draft: LocalDraft, folder: Path) -> None:
        for name in (SEAL, MANIFEST):
            self._receive(draft, name, self._source.size_bytes(name))
        if not self._cancelled.is_set():
            TerrazzoCheckpoint(draft.folder(), sizes=False)  # as it was written
            for name in (SEAL, MANIFEST):
                os.rename(draft.folder().path / name, folder / name)

    def _receive(self, draft: LocalDraft, name: str, size_bytes: int) -> None:
        buffer, sink = memoryview(bytearray(BLOCK_BYTES)), draft.create(name, size_bytes)
        try:
            for first, last in blocks_of(size_bytes):
                if self._cancelled.is_set():
                    break
                self._source.read_into(name, first, buffer[: last - first])
                sink.write(buffer[: last - first])
        except BaseException:
            sink.abandon()
            raise
        sink.finish()


def file_problem(folder: CheckpointFolder, file: File, blocks: Sequence[DigestBlock]) -> str:
    """Why a file is not what was written; empty where it is."""
    buffer = memoryview(bytearray(max(block.count_bytes for block in blocks)))
    try:
        if (size := folder.size_bytes(file.name)) != file.size_bytes:
            return f"'{folder.where}/{file.name}' has {size} bytes and was written with {file.size_bytes}."
        for block in blocks:
            block.check(folder, buffer)
    except (Damaged, BadInput) as error:
        return str(error)
    return ""
