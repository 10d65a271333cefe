"""A disk that loses power after any call: whatever it kept, older checkpoints load, and a save that returned is there.

The model is the weakest that POSIX allows. A file has the bytes of its last fsync, a folder the entries of its last
fsync or any later ones: each folder independently. Every state that this leaves is laid out and loaded from.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from terrazzo import checkpoint
from terrazzo.checkpoint import step_path
from tests.checkpoint.faults import Call, Tap, harmless
from tests.checkpoint.subject import Witness, build, fast_folder, put, save
from tests.helpers.threads import run_in_threads

Layout = tuple[tuple[str, bytes | None], ...]  # paths in order; None is a folder


@dataclass(eq=False)
class File:
    """Its bytes after the last fsync, and before that none: room may have been made, but nothing is in it."""

    kept: bytes = b""


@dataclass(eq=False)
class Folder:
    """Its entries now, and as of the last fsync."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    kept: dict[str, File | Folder] = field(default_factory=dict)

    def walk(self) -> Iterator[Folder]:
        """It and the folders below it, wherever they are or were."""
        yield self
        for entry in {id(e): e for e in [*self.entries.values(), *self.kept.values()]}.values():
            if isinstance(entry, Folder):
                yield from entry.walk()


class Disk:
    """What a disk under `top` would hold, followed call by call."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._root = _as_it_is(top)
        self._layouts: set[Layout] = set()
        self._lock = threading.RLock()  # reading a file is a call too

    def follow(self, call: Call) -> None:
        """Take note of what a call that has returned did; its state after that is one in which power may be lost."""
        with self._lock:
            self._do(call.name, Path(call.path), call)
            if call.changes:
                self._layouts |= set(self.layouts())

    def _do(self, name: str, path: Path, call: Call) -> None:
        if name == "fsync":
            self._flush(path)
        elif name == "mkdir":
            self._entries(path).setdefault(path.name, Folder())
        elif name in ("unlink", "rmdir", "remove"):
            self._entries(path).pop(path.name, None)
        elif name in ("rename", "replace"):
            target = Path(call.target)
            self._entries(target)[target.name] = self._entries(path).pop(path.name)
        elif name == "open" and call.changes:
            self._entries(path).setdefault(path.name, File())

    def layouts(self) -> Iterator[Layout]:
        """Every state that a loss of power may leave now."""
        folders = list(self._root.walk())
        unsure = [folder for folder in folders if folder.entries != folder.kept]
        for chosen in itertools.product([False, True], repeat=len(unsure)):
            newest = {id(folder) for folder, new in zip(unsure, chosen, strict=True) if new}
            yield tuple(_laid_out(self._root, newest, ""))

    def all_so_far(self) -> set[Layout]:
        """Every state of any moment since the beginning."""
        return self._layouts

    def _flush(self, path: Path) -> None:
        entry = self._entry(path)
        if isinstance(entry, Folder):
            entry.kept = dict(entry.entries)
        else:
            entry.kept = path.read_bytes()

    def _entry(self, path: Path) -> File | Folder:
        entry: File | Folder = self._root
        for part in path.relative_to(self._top).parts:
            assert isinstance(entry, Folder)
            entry = entry.entries[part]
        return entry

    def _entries(self, path: Path) -> dict[str, File | Folder]:
        folder = self._entry(path.parent)
        assert isinstance(folder, Folder)
        return folder.entries


def _as_it_is(path: Path) -> Folder:
    """Everything that is there is on the disk."""
    entries: dict[str, File | Folder] = {
        child.name: _as_it_is(child) if child.is_dir() else File(child.read_bytes()) for child in path.iterdir()
    }
    return Folder(entries, dict(entries))


def _laid_out(folder: Folder, newest: set[int], path: str) -> Iterator[tuple[str, bytes | None]]:
    for name, entry in sorted((folder.entries if id(folder) in newest else folder.kept).items()):
        if isinstance(entry, Folder):
            yield f"{path}{name}", None
            yield from _laid_out(entry, newest, f"{path}{name}/")
        else:
            yield f"{path}{name}", entry.kept


def lay_out(layout: Layout, top: Path) -> None:
    """Make `top` hold exactly that."""
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    for path, data in layout:
        if data is None:
            (top / path).mkdir()
        else:
            (top / path).write_bytes(data)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


def followed(top: Path, work: Callable[[], object]) -> Disk:
    """The disk after `work`."""
    disk = Disk(top)
    with Tap(top, harmless, after=disk.follow):
        work()
    return disk


def attempt(root: Path, step: int) -> None:
    model, optimizer = build(step)
    put(model, optimizer, step)
    checkpoint.save(step_path(root, step), model, optimizer, {"step": step})


def seen_after(top: Path, layout: Layout, witness: Witness) -> list[int]:
    """The steps that are visible, each checked to load, after a loss of power that left `layout`."""
    lay_out(layout, top / "after")
    witness.root = top / "after" / "runs" / "a"
    return witness.sees()


def test_power_is_lost_at_any_moment_of_a_save(top: Path) -> None:
    def body(rank: int) -> None:
        witness = Witness(top, range(1, 3))
        root = top / "disk" / "runs" / "a"
        save(root, 1)
        disk = followed(top / "disk", lambda: attempt(root, 2))
        layouts = disk.all_so_far()
        seen = [seen_after(top, layout, witness) for layout in layouts]
        assert len(layouts) >= 10
        assert [1] in seen and [1, 2] in seen and len(set(map(tuple, seen))) == 2
        assert all(seen_after(top, layout, witness) == [1, 2] for layout in disk.layouts()), "it had returned"

    run_in_threads(1, body)


def test_power_is_lost_after_the_first_save_of_a_folder(top: Path) -> None:
    def body(rank: int) -> None:
        witness = Witness(top, range(1, 2))
        os.mkdir(top / "disk")
        disk = followed(top / "disk", lambda: attempt(top / "disk" / "runs" / "a", 1))
        for layout in disk.layouts():
            assert seen_after(top, layout, witness) == [1], "the folder itself was not on the disk"

    run_in_threads(1, body)


def test_power_is_lost_at_any_moment_of_a_removal(top: Path) -> None:
    def body(rank: int) -> None:
        witness = Witness(top, range(1, 3))
        root = top / "disk" / "runs" / "a"
        save(root, 1)
        save(root, 2)
        disk = followed(top / "disk", lambda: checkpoint.prune(root, keep_last=1))
        seen = {tuple(seen_after(top, layout, witness)) for layout in disk.all_so_far()}
        assert seen == {(1, 2), (2,)}

    run_in_threads(1, body)


def test_power_is_lost_at_any_moment_of_a_save_of_two_ranks(top: Path) -> None:
    (top / "disk" / "runs" / "a").mkdir(parents=True)
    disk = followed(top / "disk", lambda: run_in_threads(2, lambda rank: attempt(top / "disk" / "runs" / "a", 2)))
    on_the_way, at_the_end = sorted(disk.all_so_far(), key=repr), list(disk.layouts())

    def check(rank: int) -> None:
        witness = Witness(top / "after" / "runs" / "a", range(2, 3))
        for layouts, allowed in ((on_the_way, ([], [2])), (at_the_end, ([2],))):
            for layout in layouts:
                if rank == 0:
                    lay_out(layout, top / "after")
                dist.barrier()
                assert witness.sees() in allowed
                dist.barrier()

    run_in_threads(2, check)


def test_the_disk_of_the_model_forgets_what_was_not_flushed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()

    def careless() -> None:
        os.mkdir(tmp_path / "disk" / "new")
        descriptor = os.open(tmp_path / "disk" / "new" / "file", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, b"data")
        os.close(descriptor)
        os.rename(tmp_path / "disk" / "new", tmp_path / "disk" / "final")

    states = set(followed(tmp_path / "disk", careless).layouts())
    assert states == {(), (("final", None),), (("final", None), ("final/file", b""))}
