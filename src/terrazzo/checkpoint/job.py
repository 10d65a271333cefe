"""One rank's part in a save, as plain values: the same whether this process does it or another one.

Each rank writes its file, then a record of it; the first rank turns the records into the manifest and commits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from terrazzo.checkpoint.manifest import Extent, Manifest, State
from terrazzo.checkpoint.manifest import Tensor as TensorEntry
from terrazzo.checkpoint.seal import seal_of
from terrazzo.checkpoint.shard import Entry, file_name, write_file
from terrazzo.checkpoint.store import Draft
from terrazzo.checkpoint.stores import open_store

__all__ = ["FAILED", "Job", "record_name"]

FAILED = "failed.note"
"""The note in which a rank says why there will be no checkpoint."""


@dataclass(frozen=True)
class Job:
    """What one rank has to do.

    Attributes:
        store, name: where the checkpoint goes.
        nonce: tells attempts apart; the same on all ranks.
        entries: this rank's, arranged.
        alone: what of the manifest is this rank's alone, if anything is.
        common: on the first rank the manifest's other fields, and in `tensors` shapes only; else None.
    """

    store: str
    name: str
    nonce: str
    rank: int
    world_size: int
    entries: list[Entry]
    alone: dict[str, Any] | None
    common: dict[str, Any] | None

    @property
    def where(self) -> str:
        """The checkpoint, for messages."""
        return f"{self.store}/{self.name}"

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**vars(self), "entries": [entry._asdict() for entry in self.entries]})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` gave."""
        values: dict[str, Any] = json.loads(text)
        entries = [Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in values.pop("entries")]
        return cls(**values, entries=entries)

    def draft(self) -> Draft:
        """The checkpoint being written, for whoever does a part of it."""
        return open_store(self.store).draft(self.name, self.nonce)

    def write(
        self, draft: Draft, data: Callable[[Entry], memoryview], moved: Callable[[], None] = lambda: None
    ) -> None:
        """Write this rank's file, whose bytes are `data` of each entry, and its record. Raises `OSError`, `Damaged`.

        `moved` is called after each block that was written or read back.
        """
        written = write_file(draft, file_name(self.rank), self.entries, data, moved)
        entries = [entry._asdict() for entry in self.entries]
        record = {
            "file": written.file.model_dump(),
            "entries": entries,
            "digests": written.digests,
            "alone": self.alone,
        }
        draft.note(record_name(self.rank), json.dumps(record).encode())

    def fail(self, draft: Draft, problem: str) -> None:
        """Tell the other ranks, as far as that is possible: the disk that failed may not take this either."""
        with contextlib.suppress(Exception):  # of whatever kind the store has
            draft.note(FAILED, f"rank {self.rank}: {problem}".encode())

    def conclude(self, draft: Draft) -> None:
        """Make the checkpoint of all ranks' records visible."""
        manifest = self._manifest(draft).model_dump_json().encode()
        draft.commit(manifest, seal_of(manifest))

    def _manifest(self, draft: Draft) -> Manifest:
        assert self.common is not None
        shapes: dict[str, list[int]] = self.common["tensors"]
        tensors = {name: TensorEntry(shape=shape, states={}) for name, shape in shapes.items()}
        files: list[dict[str, Any]] = []
        ranks: list[dict[str, Any]] = []
        for rank in range(self.world_size):
            record = json.loads(draft.noted(record_name(rank)))
            files.append(record["file"])
            ranks += [] if record["alone"] is None else [record["alone"]]
            for entry, digests in zip(record["entries"], record["digests"], strict=True):
                _add(tensors, entry, digests, rank, record["file"]["header_bytes"])
        for tensor in tensors.values():
            for state in tensor.states.values():
                state.ranges.sort(key=lambda extent: extent.start)
        return Manifest(**{**self.common, "files": files, "tensors": tensors, "ranks": ranks})


def record_name(rank: int) -> str:
    """Of the record that `rank` writes beside its file."""
    return f"rank-{rank:05d}.note"


def _add(tensors: dict[str, TensorEntry], entry: dict[str, Any], digests: list[str], rank: int, header: int) -> None:
    tensor = tensors.setdefault(entry["name"], TensorEntry(shape=entry["shape"], states={}))
    state = tensor.states.setdefault(entry["kind"], State(dtype=entry["dtype"], numel=entry["numel"], ranges=[]))
    if entry["start"] < entry["stop"]:
        offset = header + entry["offset"]
        state.ranges.append(Extent(start=entry["start"], stop=entry["stop"], file=rank, offset=offset, digests=digests))
