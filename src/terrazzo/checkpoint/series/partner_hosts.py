"""Local checkpoints of several hosts: each has the files of its own ranks, and a copy of those of the host before it.

So one host may be lost: what it had is on its partner. A copy is received in the background, in blocks
(`partner_copy`), and becomes visible file by file once it has been read back under the digests that the files were
written with.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from terrazzo.checkpoint.format.manifest import MANIFEST, SEAL
from terrazzo.checkpoint.format.rank_layout import rank_file_name
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.optimizers import Optimizers
from terrazzo.checkpoint.saving.save import save_on_hosts
from terrazzo.checkpoint.series.listing import complete_checkpoints
from terrazzo.checkpoint.series.partner_copy import PartnerCopy, file_problem
from terrazzo.checkpoint.storage.file_sender import FileSender, SenderAddress
from terrazzo.checkpoint.storage.local import LocalFolder
from terrazzo.checkpoint.storage.multi_host import MultiHostFolder
from terrazzo.checkpoint.storage.store import CheckpointFolder, step_name, step_of
from terrazzo.errors import SaveFailed, TerrazzoError
from terrazzo.exchange import gather_json, patiently
from terrazzo.hosts import Hosts, open_listener, own_address

__all__ = ["CopyResult", "PartnerHosts"]


class CopyResult(NamedTuple):
    """What all hosts have received of each other of one step.

    Attributes:
        seconds: that the slowest has taken.
        problem: why one could not have its copy, so that none of them counts; empty where all have.
    """

    step: int
    hosts: int
    count_bytes: int
    seconds: float
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As it is logged; the bandwidth is that of one host, in bytes per second."""
        if self.problem:
            return {"not_copied": self.step, "why": self.problem}
        rate = self.count_bytes / self.hosts / self.seconds if self.seconds else 0.0
        return {"copied": self.step, "bytes": self.count_bytes, "seconds": self.seconds, "bytes_s": rate}


class PartnerHosts:
    """Several hosts, each with a folder `root` of its own. Collective to make.

    Args:
        label: how all ranks call these folders, whose paths may differ between hosts.
        copies: each host receives a copy; else none does.

    Attributes:
        damaged: what `find` has refused, and why.
    """

    def __init__(self, root: str, label: str, hosts: Hosts, *, copies: bool = True) -> None:
        self._root, self._label, self._hosts, self.copies = Path(root), label, hosts, copies
        self.damaged: dict[str, str] = {}
        key, listener = secrets.token_hex(16), open_listener() if hosts.is_first else None
        of_ranks = gather_json(None if listener is None else [own_address(), listener.getsockname()[1], key])
        self._addresses = [SenderAddress(*of_ranks[ranks[0]]) for ranks in hosts.ranks]
        self._sender = None if listener is None else FileSender(self._root, key, listener)
        self._copy: PartnerCopy | None = None
        self._copied_step: int | None = None  # whose copies are under way, on any host
        self._open: list[MultiHostFolder] = []
        self._hosts_by_path: dict[str, Mapping[str, Sequence[int]]] = {}  # by path and file, the hosts that have it

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, run: str, since: int) -> dict[str, CheckpointFolder]:
        """How each checkpoint of `run` is read that is newer than step `since`, and that the hosts have all files of.

        By path; oldest first. Every byte that is there is read once, by the ranks of its host, and what is not as it
        was written is as if it were not there. Collective.
        """
        self.done_reading()
        of_ranks = gather_json(list(self._parts_here(run, since)))
        parts_of: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.damaged = {}
        for host, ranks in enumerate(self._hosts.ranks):
            for part in (part for rank in ranks for part in of_ranks[rank]):
                parts_of.setdefault((part["name"], part["identity"]), []).append((host, part))
                self.damaged |= {f"{self._label}/{part['name']}": why for why in part["damaged"]}
        whole = {key: hosts for key, parts in parts_of.items() if (hosts := _hosts_by_file(parts)) is not None}
        self._hosts_by_path = {f"{self._label}/{name}": whole[name, identity] for name, identity in sorted(whole)}
        return {path: self._folder(os.path.basename(path), hosts) for path, hosts in self._hosts_by_path.items()}

    def _parts_here(self, run: str, since: int) -> Iterator[dict[str, Any]]:
        """For each such checkpoint, this rank's share of the files that are on this host."""
        position, count = self._hosts.here.index(dist.get_rank()), len(self._hosts.here)
        for path in complete_checkpoints(self._root) if self._root.is_dir() else ():
            folder = LocalFolder(Path(path))
            try:
                opened = TerrazzoCheckpoint(folder, sizes=False)
            except TerrazzoError:
                continue
            if opened.manifest.run != run or (step_of(path) or 0) <= since:
                continue
            present, blocks = [file for file in opened.manifest.files if folder.has(file.name)], opened.blocks()
            problems = {file.name: file_problem(folder, file, blocks[file.name]) for file in present[position::count]}
            yield {
                "name": folder.path.name,
                "identity": opened.identity,
                "wanted": [file.name for file in opened.manifest.files],
                "files": [file for file, problem in problems.items() if not problem],
                "damaged": [problem for problem in problems.values() if problem],
            }

    def _folder(self, name: str, hosts_of: Mapping[str, Sequence[int]]) -> MultiHostFolder:
        local_files = [file for file, hosts in hosts_of.items() if self._hosts.own in hosts]
        local = (LocalFolder(self._root / name), local_files) if local_files else None
        senders = {file: self._addresses[hosts[0]] for file, hosts in hosts_of.items() if file not in local_files}
        self._open.append(MultiHostFolder(f"{self._label}/{name}", name, local, senders))
        return self._open[-1]

    def done_reading(self) -> None:
        """Close what `find` has opened."""
        while self._open:
            self._open.pop().close()

    # -- saving, and copies ----------------------------------------------------------------------------------------

    def save(self, path: str, model: nn.Module, optimizer: Optimizers, extra: dict[str, Any], run: str) -> None:
        """Each host its own ranks' part, in its own folder; see `save_on_hosts`. Collective."""
        if self.copies:
            self._expect_receiver(os.path.basename(path))  # before the host after this one can have begun to copy
        try:
            save_on_hosts(path, model, optimizer, extra, self._hosts, run=run)
        except BaseException:
            self._expect_receiver("")
            raise

    def _expect_receiver(self, name: str) -> None:
        if self._sender is not None:
            self._sender.expect(name)

    def begin_copy(self, step: int) -> bool:
        """Begin to receive what the host before has of a checkpoint that all have just saved; False: no host does."""
        if not self.copies:
            return False
        self._copied_step = step
        if self._hosts.is_first:
            before = self._hosts.before
            names = [rank_file_name(rank) for rank in self._hosts.ranks[before]]
            self._copy = PartnerCopy(self._root, step_name(step), dict.fromkeys(names, self._addresses[before]))
        return True

    def newest_copied(self, path: str) -> str | None:
        """The name of the newest that `find` has found, `path` or an older one, of which two hosts have each file."""
        older = [each for each in self._hosts_by_path if (step_of(each) or 0) <= (step_of(path) or 0)]
        copied = [each for each in older if not any(self._missing_by_host(each))]
        return os.path.basename(max(copied, key=lambda each: step_of(each) or 0)) if copied else None

    def _missing_by_host(self, path: str) -> list[dict[str, int]]:
        return [_missing(self._hosts_by_path[path], host, self._hosts.count) for host in range(self._hosts.count)]

    def begin_missing_copies(self, path: str) -> None:
        """Begin to receive, of one that `find` has found, the files that one host alone has: the host after it does."""
        missing = self._missing_by_host(path)
        if self.copies and any(missing):
            self._copied_step, files = step_of(path), missing[self._hosts.own]
            if self._hosts.is_first and files:
                senders = {file: self._addresses[host] for file, host in files.items()}
                self._copy = PartnerCopy(self._root, os.path.basename(path), senders)

    def wait_for_copies(self) -> CopyResult | None:
        """Until every host has its copy, or could not have it; None where none was begun since. Collective."""
        step, self._copied_step = self._copied_step, None
        if step is None:
            return None
        copy, self._copy = self._copy, None
        try:
            received = patiently(lambda: None if copy is None else copy.result(), SaveFailed)
        except SaveFailed as error:
            self._expect_receiver("")  # it may have failed before it asked for anything
            return CopyResult(step, self._hosts.count, 0, 0.0, str(error))
        of_hosts = [each for each in gather_json(received) if each is not None]
        count_bytes, seconds = sum(nbytes for nbytes, _ in of_hosts), max(seconds for _, seconds in of_hosts)
        return CopyResult(step, len(of_hosts), count_bytes, seconds)

    def cancel_copies(self) -> None:
        """Receive no more of a copy that is under way, and expect nobody to do so; all hosts are to call it."""
        self._cancel()
        self._expect_receiver("")

    def _cancel(self) -> None:
        self._copied_step, copy, self._copy = None, self._copy, None
        if copy is not None:
            copy.cancel()

    def close(self, patience_s: float = 0.0) -> None:
        """Send nothing any more. Copies under way, to this host and from it, are given that long. Not collective."""
        deadline = time.monotonic() + patience_s
        if self._copy is not None:
            self._copy.wait(patience_s)
        self._cancel()
        self.done_reading()
        if self._sender is not None:
            self._sender.close(max(0.0, deadline - time.monotonic()))


def _hosts_by_file(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, list[int]] | None:
    """The hosts that have each file, the manifest and the seal included; None where a file is nowhere."""
    hosts_of: dict[str, list[int]] = {file: [] for file in parts[0][1]["wanted"]}
    for host, part in parts:
        for file in part["files"]:
            hosts_of[file].append(host)
    hosts = list(dict.fromkeys(host for host, _ in parts))
    return {**hosts_of, MANIFEST: hosts, SEAL: hosts} if all(hosts_of.values()) else None


def _missing(hosts_of: Mapping[str, Sequence[int]], host: int, count: int) -> dict[str, int]:
    """The files that `host` is to receive so that two have each, and from which host; with the manifest and the seal
    if it has none.
    """
    alone = {file: hosts[0] for file, hosts in hosts_of.items() if len(hosts) == 1 and file not in (MANIFEST, SEAL)}
    files = {file: holder for file, holder in alone.items() if (holder + 1) % count == host}
    if not files or host in hosts_of[MANIFEST]:
        return files
    return {**files, **dict.fromkeys((MANIFEST, SEAL), hosts_of[MANIFEST][0])}
