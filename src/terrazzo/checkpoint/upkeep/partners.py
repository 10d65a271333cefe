"""Local checkpoints of several hosts: each has the files of its own ranks, and a copy of those of the host before it.

So one host may be lost: what it had is on its partner. A copy is taken in the background, in blocks, and becomes
visible file by file once it has been read back under the digests that the files were written with.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from terrazzo.checkpoint.format.manifest import BLOCK_BYTES, MANIFEST, SEAL, File, blocks_of
from terrazzo.checkpoint.loading.native import Checkpoint
from terrazzo.checkpoint.optimizers import Optimizers
from terrazzo.checkpoint.saving.save import save_spread
from terrazzo.checkpoint.storage.blocks import DigestBlock
from terrazzo.checkpoint.storage.local import LocalDraft, LocalFolder
from terrazzo.checkpoint.storage.shard import file_name
from terrazzo.checkpoint.storage.spread import Giver, Giving, SpreadFolder
from terrazzo.checkpoint.storage.store import Folder, step_name, step_of
from terrazzo.checkpoint.upkeep.series import complete_checkpoints
from terrazzo.ending import start_thread
from terrazzo.errors import BadInput, Damaged, SaveFailed, TerrazzoError
from terrazzo.exchange import gather_json, patiently
from terrazzo.files import sync_folder
from terrazzo.hosts import Hosts, listening, own_address

__all__ = ["Copied", "Partners"]


class Copied(NamedTuple):
    """What all hosts have taken of each other of one step.

    Attributes:
        seconds: that the slowest has taken.
        problem: why one could not be had, of which they have nothing then that counts; empty where all have.
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


class Partners:
    """Several hosts, each with a folder `root` of its own. Collective to make.

    Args:
        label: how all ranks call these folders, whose paths may differ between hosts.
        copies: each takes copies; else none of them does.

    Attributes:
        damaged: what `find` has refused, and why.
    """

    def __init__(self, root: str, label: str, hosts: Hosts, *, copies: bool = True) -> None:
        self._root, self._label, self._hosts, self.copies = Path(root), label, hosts, copies
        self.damaged: dict[str, str] = {}
        key, ears = secrets.token_hex(16), listening() if hosts.is_first else None
        of_ranks = gather_json(None if ears is None else [own_address(), ears.getsockname()[1], key])
        self._givers = [Giver(*of_ranks[ranks[0]]) for ranks in hosts.ranks]
        self._giving = None if ears is None else Giving(self._root, key, ears)
        self._copying: _Copying | None = None
        self._step: int | None = None  # that is being copied
        self._reading: list[SpreadFolder] = []
        self._found: dict[str, Mapping[str, Sequence[int]]] = {}  # by path and file, the hosts that have it

    # -- what there is ---------------------------------------------------------------------------------------------

    def find(self, run: str, since: int) -> dict[str, Folder]:
        """How each checkpoint of `run` is read that is newer than step `since`, and that the hosts have all files of.

        By path; oldest first. Every byte that is there is read once, by the ranks of its host, and what is not as it
        was written is as if it were not there. Collective.
        """
        self.done_reading()
        of_ranks = gather_json(list(self._have(run, since)))
        found: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.damaged = {}
        for host, ranks in enumerate(self._hosts.ranks):
            for part in (part for rank in ranks for part in of_ranks[rank]):
                found.setdefault((part["name"], part["identity"]), []).append((host, part))
                self.damaged |= {f"{self._label}/{part['name']}": why for why in part["damaged"]}
        whole = {key: holders for key, parts in found.items() if (holders := _holders(parts)) is not None}
        self._found = {f"{self._label}/{name}": whole[name, identity] for name, identity in sorted(whole)}
        return {path: self._folder(os.path.basename(path), holders) for path, holders in self._found.items()}

    def _have(self, run: str, since: int) -> Iterator[dict[str, Any]]:
        """Of each such checkpoint this rank's share of the files that are on this host."""
        position, count = self._hosts.here.index(dist.get_rank()), len(self._hosts.here)
        for path in complete_checkpoints(self._root) if self._root.is_dir() else ():
            folder = LocalFolder(Path(path))
            try:
                opened = Checkpoint(folder, sizes=False)
            except TerrazzoError:
                continue
            if opened.manifest.run != run or (step_of(path) or 0) <= since:
                continue
            there, blocks = [file for file in opened.manifest.files if folder.has(file.name)], opened.blocks()
            problems = {file.name: _damage(folder, file, blocks[file.name]) for file in there[position::count]}
            yield {
                "name": folder.path.name,
                "identity": opened.identity,
                "wanted": [file.name for file in opened.manifest.files],
                "files": [file for file, problem in problems.items() if not problem],
                "damaged": [problem for problem in problems.values() if problem],
            }

    def _folder(self, name: str, holders: Mapping[str, Sequence[int]]) -> SpreadFolder:
        here = [file for file, hosts in holders.items() if self._hosts.own in hosts]
        mine = (LocalFolder(self._root / name), here) if here else None
        givers = {file: self._givers[hosts[0]] for file, hosts in holders.items() if file not in here}
        self._reading.append(SpreadFolder(f"{self._label}/{name}", name, mine, givers))
        return self._reading[-1]

    def done_reading(self) -> None:
        """What `find` has found is read no more."""
        while self._reading:
            self._reading.pop().close()

    # -- copies ----------------------------------------------------------------------------------------------------

    def save(self, path: str, model: nn.Module, optimizer: Optimizers, extra: dict[str, Any], run: str) -> None:
        """Each host its own ranks' part, in its own folder; see `save_spread`. Collective."""
        save_spread(path, model, optimizer, extra, self._hosts, run=run)

    def copy(self, step: int) -> bool:
        """Begin to take what the host before has of a checkpoint that all hosts have just saved; False: none does."""
        if not self.copies:
            return False
        self._step = step
        if self._giving is not None:
            self._giving.expect(1)  # the host after this one
            before = self._hosts.before
            names = [file_name(rank) for rank in self._hosts.ranks[before]]
            self._copying = _Copying(self._root, step_name(step), dict.fromkeys(names, self._givers[before]))
        return True

    def newest_copied(self, path: str) -> str | None:
        """The name of the newest that `find` has found, `path` or an older one, of which two hosts have each file."""
        older = [each for each in self._found if (step_of(each) or 0) <= (step_of(path) or 0)]
        copied = [each for each in older if not any(self._lacking_of(each))]
        return os.path.basename(max(copied, key=lambda each: step_of(each) or 0)) if copied else None

    def _lacking_of(self, path: str) -> list[dict[str, int]]:
        return [_lacking(self._found[path], host, self._hosts.count) for host in range(self._hosts.count)]

    def complete(self, path: str) -> None:
        """Begin to take, of one that `find` has found, what one host alone has: the host after it takes that."""
        lacking = self._lacking_of(path)
        if self.copies and any(lacking):
            self._step, mine = step_of(path), lacking[self._hosts.own]
            if self._hosts.is_first and mine:
                givers = {file: self._givers[host] for file, host in mine.items()}
                self._copying = _Copying(self._root, os.path.basename(path), givers)

    def wait(self) -> Copied | None:
        """Until every host has its copy, or could not have it; None where none was begun since. Collective."""
        step, self._step = self._step, None
        if step is None:
            return None
        copying, self._copying = self._copying, None
        try:
            done = patiently(lambda: None if copying is None else copying.result(), SaveFailed)
        except SaveFailed as error:
            return Copied(step, self._hosts.count, 0, 0.0, str(error))
        taken = [each for each in gather_json(done) if each is not None]
        return Copied(step, len(taken), sum(nbytes for nbytes, _ in taken), max(seconds for _, seconds in taken))

    def abandon(self) -> None:
        """Take no more of a copy that is under way."""
        self._step, copying, self._copying = None, self._copying, None
        if copying is not None:
            copying.cancel()

    def close(self, patience_s: float = 0.0) -> None:
        """Nobody is given anything any more. Copies under way, to this host and from it, are given that long."""
        deadline = time.monotonic() + patience_s
        if self._copying is not None:
            self._copying.wait(patience_s)
        self.abandon()
        self.done_reading()
        if self._giving is not None:
            self._giving.close(max(0.0, deadline - time.monotonic()))


class _Copying:
    """A thread that takes files from other hosts into a folder beside, and puts them where they belong.

    Args:
        givers: of each file; of the manifest and the seal too, unless they are here.
    """

    def __init__(self, root: Path, name: str, givers: Mapping[str, Giver]) -> None:
        self._root, self._name, self._givers = root, name, givers
        self._there = SpreadFolder(f"another host's {name}", name, None, givers)
        self._cancelled, self._problem, self._taken = threading.Event(), "it was broken off", (0, 0.0)
        self._thread = start_thread("terrazzo-partner", self._work, self._cancelled.set)

    def wait(self, patience_s: float) -> None:
        """For its end, that long at most."""
        self._thread.join(patience_s)

    def cancel(self) -> None:
        self._cancelled.set()
        self._there.hang_up()
        self._thread.join()

    def result(self) -> tuple[int, float]:
        """Bytes, and seconds that they have taken. Raises `SaveFailed`."""
        self._thread.join()
        if self._problem:
            raise SaveFailed(
                f"The copy of another host's part of '{self._root / self._name}' was not saved:"
                f" {self._problem.removesuffix('.')}."
            )
        return self._taken

    def _work(self) -> None:
        start = time.perf_counter()
        try:
            count_bytes = self._copy()
        except (OSError, TerrazzoError) as error:
            self._problem = str(error)
        except BaseException as error:  # whatever it was, there is no copy
            self._problem = f"{type(error).__name__}: {error}"
        else:
            self._taken = (count_bytes, time.perf_counter() - start)
            self._problem = "it was broken off" if self._cancelled.is_set() else ""

    def _copy(self) -> int:
        folder = self._root / self._name
        there = self._there
        draft = LocalDraft(self._root, self._name, secrets.token_hex(4))
        draft.begin()
        try:
            opened = Checkpoint(there if SEAL in self._givers else LocalFolder(folder), sizes=False)
            files, blocks = [file for file in opened.manifest.files if file.name in self._givers], opened.blocks()
            folder.mkdir(0o700, exist_ok=True)
            for file in files:
                self._take(there, draft, file.name, file.size_bytes)
                if self._cancelled.is_set():
                    return 0
                if problem := _damage(draft.folder(), file, blocks[file.name]):
                    raise Damaged(problem)
                os.rename(draft.folder().path / file.name, folder / file.name)
            if SEAL in self._givers:
                self._take_manifest(there, draft, folder)
            sync_folder(folder)
        finally:
            there.close()
            draft.abandon()
        return sum(file.size_bytes for file in files)

    def _take_manifest(self, there: Folder, draft: LocalDraft, folder: Path) -> None:
        for name in (SEAL, MANIFEST):
            self._take(there, draft, name, there.size_bytes(name))
        if not self._cancelled.is_set():
            Checkpoint(draft.folder(), sizes=False)  # as it was written
            for name in (SEAL, MANIFEST):
                os.rename(draft.folder().path / name, folder / name)

    def _take(self, there: Folder, draft: LocalDraft, name: str, size_bytes: int) -> None:
        buffer, sink = memoryview(bytearray(BLOCK_BYTES)), draft.create(name, size_bytes)
        try:
            for first, last in blocks_of(size_bytes):
                if self._cancelled.is_set():
                    break
                there.read_into(name, first, buffer[: last - first])
                sink.write(buffer[: last - first])
        except BaseException:
            sink.abandon()
            raise
        sink.finish()


def _damage(folder: LocalFolder, file: File, blocks: Sequence[DigestBlock]) -> str:
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


def _holders(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, list[int]] | None:
    """By file the hosts that have it, the manifest and the seal included; None where one is nowhere."""
    holders: dict[str, list[int]] = {file: [] for file in parts[0][1]["wanted"]}
    for host, part in parts:
        for file in part["files"]:
            holders[file].append(host)
    hosts = list(dict.fromkeys(host for host, _ in parts))
    return {**holders, MANIFEST: hosts, SEAL: hosts} if all(holders.values()) else None


def _lacking(holders: Mapping[str, Sequence[int]], host: int, count: int) -> dict[str, int]:
    """What `host` is to take so that two have each file, and from whom; the manifest and the seal if it has none."""
    alone = {file: hosts[0] for file, hosts in holders.items() if len(hosts) == 1 and file not in (MANIFEST, SEAL)}
    files = {file: holder for file, holder in alone.items() if (holder + 1) % count == host}
    if not files or host in holders[MANIFEST]:
        return files
    return {**files, **dict.fromkeys((MANIFEST, SEAL), holders[MANIFEST][0])}
