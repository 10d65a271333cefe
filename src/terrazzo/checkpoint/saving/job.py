"""One rank's part in a save, as plain values: the same whether this process does it or another one.

Each rank writes its file, then a record of it; the first rank turns the records into the manifest and commits.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from terrazzo.checkpoint.format.manifest import (
    MAX_MANIFEST_BYTES,
    Extent,
    File,
    Manifest,
    State,
    Tile,
    index_space,
    is_crowded,
)
from terrazzo.checkpoint.format.manifest import Tensor as TensorEntry
from terrazzo.checkpoint.format.rank_layout import FileEntry, TilePlace, rank_file_name
from terrazzo.checkpoint.format.seal import seal_of
from terrazzo.checkpoint.storage.places import open_store
from terrazzo.checkpoint.storage.rank_file import write_rank_file
from terrazzo.checkpoint.storage.store import CheckpointDraft
from terrazzo.errors import SaveFailed

__all__ = ["FAILED", "RankRecord", "SaveJob", "record_name"]

FAILED = "failed.note"
"""The note in which a rank says why there will be no checkpoint."""


@dataclass(frozen=True)
class RankRecord:
    """What a rank tells the first one of the file that it has written.

    Attributes:
        entries: as they stand in the file, and for each in `digests` those of its blocks.
        alone: what of the manifest is this rank's alone, if anything is.
    """

    file: File
    entries: list[FileEntry]
    digests: list[list[str]]
    alone: dict[str, Any] | None

    def to_json(self) -> str:
        """One line."""
        entries = [entry._asdict() for entry in self.entries]
        return json.dumps({**vars(self), "file": self.file.model_dump(), "entries": entries})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankRecord:
        """What `to_json` gave."""
        values: dict[str, Any] = json.loads(text)
        return cls(
            **{**values, "file": File(**values["file"]), "entries": [_entry(entry) for entry in values["entries"]]}
        )


@dataclass(frozen=True)
class SaveJob:
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
    entries: list[FileEntry]
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
    def from_json(cls, text: str) -> SaveJob:
        """What `to_json` gave."""
        values: dict[str, Any] = json.loads(text)
        entries = [_entry(entry) for entry in values.pop("entries")]
        return cls(**values, entries=entries)

    def draft(self) -> CheckpointDraft:
        """The checkpoint being written, for whoever does a part of it."""
        return open_store(self.store).draft(self.name, self.nonce)

    def write(
        self,
        draft: CheckpointDraft,
        entry_bytes: Callable[[FileEntry], memoryview],
        on_block: Callable[[], None] = lambda: None,
    ) -> None:
        """Write this rank's file, whose bytes `entry_bytes` gives, and its record. Raises `OSError`, `Damaged`.

        `on_block` is called after each block that was written or read back.
        """
        written = write_rank_file(draft, rank_file_name(self.rank), self.entries, entry_bytes, on_block)
        record = RankRecord(written.file, self.entries, written.digests, self.alone)
        draft.note(record_name(self.rank), record.to_json().encode())

    def fail(self, draft: CheckpointDraft, problem: str) -> None:
        """Tell the other ranks, as far as that is possible: the disk that failed may not take this either."""
        with contextlib.suppress(Exception):  # of whatever kind the store has
            draft.note(FAILED, f"rank {self.rank}: {problem}".encode())

    def conclude(self, draft: CheckpointDraft) -> None:
        """Make the checkpoint of all ranks' records visible. Raises `SaveFailed` as `manifest` does."""
        manifest = self.manifest(draft)
        draft.commit(manifest, seal_of(manifest))

    def manifest(self, draft: CheckpointDraft) -> bytes:
        """The manifest of all ranks' records.

        Raises:
            SaveFailed: elements are missing or there twice, or no load would read the manifest.
        """
        data = self._manifest(draft).model_dump_json().encode()
        if len(data) > MAX_MANIFEST_BYTES or is_crowded(data):
            raise SaveFailed(
                f"Its manifest is {len(data):,} bytes, and at most {MAX_MANIFEST_BYTES:,} can be loaded, of few small"
                " values: give a smaller extra, or save from fewer ranks."
            )
        return data

    def _manifest(self, draft: CheckpointDraft) -> Manifest:
        assert self.common is not None
        shapes: dict[str, list[int]] = dict(self.common["tensors"])
        states: dict[str, dict[str, _Gathered]] = {name: {} for name in shapes}
        files: list[File] = []
        ranks: list[dict[str, Any]] = []
        for rank in range(self.world_size):
            record = RankRecord.from_json(draft.noted(record_name(rank)))
            files.append(record.file)
            ranks += [] if record.alone is None else [record.alone]
            for entry, digests in zip(record.entries, record.digests, strict=True):
                shapes.setdefault(entry.name, list(entry.shape))
                kinds = states.setdefault(entry.name, {})
                kinds.setdefault(entry.kind, _Gathered(entry)).add(entry, digests, rank, record.file.header_bytes)
        tensors = {
            name: TensorEntry(shape=shapes[name], states={kind: one.state() for kind, one in kinds.items()})
            for name, kinds in states.items()
        }
        return Manifest(**{**self.common, "files": files, "tensors": tensors, "ranks": ranks})


def record_name(rank: int) -> str:
    """The name of the record that `rank` writes beside its file."""
    return f"rank-{rank:05d}.note"


def _entry(values: dict[str, Any]) -> FileEntry:
    """From JSON, which has no tuples."""
    tile = None if values["tile"] is None else TilePlace(*map(tuple, values["tile"]))
    return FileEntry(**{**values, "shape": tuple(values["shape"]), "tile": tile})


class _Gathered:
    """What all ranks have written of one state, `first` of it the one that came first."""

    def __init__(self, first: FileEntry) -> None:
        self._first = first
        self._ranges: dict[TilePlace, list[Extent]] = {}

    def add(self, entry: FileEntry, digests: list[str], rank: int, header_bytes: int) -> None:
        """A range that `rank` has written behind its header."""
        if (entry.shape, entry.numel, entry.dtype) != (self._first.shape, self._first.numel, self._first.dtype):
            raise self._failed(f"{list(entry.shape)} of {entry.dtype} is not {list(self._first.shape)} of another rank")
        space = index_space(entry.shape, entry.numel)
        ranges = self._ranges.setdefault(entry.tile or TilePlace((0,) * len(space), space), [])
        if entry.start < entry.stop:
            offset = header_bytes + entry.offset
            ranges.append(Extent(start=entry.start, stop=entry.stop, file=rank, offset=offset, digests=digests))

    def state(self) -> State:
        """All of it, in order. Raises `SaveFailed` unless each element was written once, as far as can be counted."""
        tiles = []
        for (offsets, sizes), ranges in sorted(self._ranges.items()):
            ranges.sort(key=lambda extent: extent.start)
            edges = [0, *(edge for extent in ranges for edge in (extent.start, extent.stop)), math.prod(sizes)]
            if edges[::2] != edges[1::2]:
                raise self._failed(f"of {list(sizes)} at {list(offsets)} the ranges {edges[1:-1]} are there")
            tiles.append(Tile(offsets=list(offsets), sizes=list(sizes), ranges=ranges))
        if (numel := sum(math.prod(tile.sizes) for tile in tiles)) != self._first.numel:
            raise self._failed(f"{numel} of {self._first.numel} elements are there")
        return State(dtype=self._first.dtype, numel=self._first.numel, tiles=tiles)

    def _failed(self, problem: str) -> SaveFailed:
        what = f"{self._first.name}, {self._first.kind}"
        return SaveFailed(f"Ranks have not written each element of {what} once: {problem}. Please report this.")
