"""Checkpoints with a manifest that somebody made, and a model that must come to no harm from them."""

from __future__ import annotations

import copy
import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terrazzo import checkpoint
from terrazzo.checkpoint.format.seal import seal_of
from terrazzo.errors import BadInput, Damaged
from tests.checkpoint.subject import build, differences, put, state_of
from tests.helpers.threads import run_in_threads

LONG_S = 10.0  # a refusal takes milliseconds
HEADROOM_BYTES = 512 << 20  # beyond what the process has mapped: what a lie may not make it take
RANK_FILE = "rank-00000.safetensors"

Manifest = dict[str, Any]
Change = Callable[[Manifest], object]


def sealed(folder: Path, data: bytes) -> Path:
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_bytes(seal_of(data))
    return folder


class Target:
    """A rank's model, which loads forged versions of the checkpoint `saved`."""

    def __init__(self, saved: Path) -> None:
        self.saved, self.forged = saved, saved.parent / "forged"
        self.manifest: Manifest = json.loads((saved / "manifest.json").read_text())
        self.model, self.optimizer = build(2)
        self.good = state_of(self.model, self.optimizer)
        put(self.model, self.optimizer, 5)
        self.before = state_of(self.model, self.optimizer)

    def forge(self, data: bytes) -> Path:
        shutil.rmtree(self.forged, ignore_errors=True)
        shutil.copytree(self.saved, self.forged)
        return sealed(self.forged, data)

    def changed(self, change: Change) -> bytes:
        manifest = copy.deepcopy(self.manifest)
        change(manifest)
        return json.dumps(manifest).encode()

    def refuses(self, data: bytes, what: str, kind: type[BadInput] = Damaged, words: str = "") -> None:
        """Loading it raises `kind`, in time, in little memory, and changes nothing."""
        path = self.forge(data)
        began = time.monotonic()
        problem = self.problem(path, kind)
        assert problem is not None, f"{what}: was not noticed"
        assert words in problem, f"{what}: {problem}"
        assert len(problem) < 100_000, what
        assert time.monotonic() - began < LONG_S, what
        assert differences(state_of(self.model, self.optimizer), self.before) == [], what

    def problem(self, path: Path, kind: type[BadInput]) -> str | None:
        """What is wrong with a checkpoint, if anything; other errors than `kind` are raised."""
        try:
            with little_memory():
                checkpoint.load(path, self.model, self.optimizer)
        except kind as error:
            return str(error)
        return None

    def takes(self, data: bytes, what: str) -> None:
        """Loading it gives the state that was saved."""
        checkpoint.load(self.forge(data), self.model, self.optimizer)
        assert differences(state_of(self.model, self.optimizer), self.good) == [], what
        put(self.model, self.optimizer, 5)


@contextmanager
def little_memory() -> Iterator[None]:
    """Only `HEADROOM_BYTES` more can be mapped."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def one_rank(saved: Path, work: Callable[[Target], object]) -> None:
    run_in_threads(1, lambda rank: work(Target(saved)), timeout_s=170)


def all_refused(saved: Path, changes: dict[str, Change], kind: type[BadInput] = BadInput) -> None:
    def work(target: Target) -> None:
        for what, change in changes.items():
            target.refuses(target.changed(change), what, kind)

    one_rank(saved, work)


def put_at(*path: str | int, value: Any) -> Change:
    """A change of the entry at the end of `path`."""

    def change(manifest: Manifest) -> None:
        at: Any = manifest
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value

    return change


def without(*path: str | int) -> Change:
    def change(manifest: Manifest) -> None:
        at: Any = manifest
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]

    return change
