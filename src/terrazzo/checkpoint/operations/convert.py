"""Any format rewritten as a Terrazzo checkpoint, by one process without a process group, a few pieces at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from terrazzo.checkpoint.format.manifest import DTYPES, TIES, TIES_NOT_KNOWN, head
from terrazzo.checkpoint.format.rank_layout import FileEntry, arrange
from terrazzo.checkpoint.saving.job import SaveJob
from terrazzo.checkpoint.source import PIECE_BYTES, Source
from terrazzo.checkpoint.storage.places import check_new, store_and_name
from terrazzo.checkpoint.tensors import bytes_of, name_of
from terrazzo.errors import BadInput, SaveFailed

__all__ = ["convert"]


def convert(source: Source, path: str) -> None:
    """Write all of `source` as the Terrazzo checkpoint `path`, bit for bit, in one file and without random generators.

    Raises:
        BadInput: `path` exists, or a state has a dtype that safetensors files cannot hold.
        Damaged: the source's bytes are not what was written.
        SaveFailed: it could not be written; nothing is left.
    """
    check_new(path)
    store, name = store_and_name(path)
    entries, nonce = arrange(list(_entries(source))), os.urandom(4).hex()
    job = SaveJob(store.where, name, nonce, 0, 1, entries, alone=None, common=_common(source))

    def entry_bytes(entry: FileEntry) -> memoryview:
        return bytes_of(source.read_with_progress(entry.name, entry.kind, entry.start, entry.stop))

    draft = job.draft()
    try:
        draft.begin()
        job.write(draft, entry_bytes)
        job.conclude(draft)
    except BaseException as error:
        draft.abandon()
        if isinstance(error, OSError):
            raise SaveFailed(f"The checkpoint '{path}' was not written, and nothing of it is left: {error}.") from error
        raise


def _entries(source: Source) -> Iterator[FileEntry]:
    """Every state in pieces, none of which is large."""
    for name, info in source.tensors.items():
        for kind, state in info.states.items():
            dtype = name_of(state.dtype)
            if dtype not in DTYPES:
                raise BadInput(f"'{name}', {kind} in '{source.where}' is {dtype}, which safetensors files cannot hold.")
            step = PIECE_BYTES // state.dtype.itemsize
            for start in range(0, max(state.numel, 1), step):
                stop = min(start + step, state.numel)
                yield FileEntry(name, kind, start, stop, info.shape, state.numel, dtype)


def _common(source: Source) -> dict[str, Any]:
    known = {} if source.names_ties else {TIES: TIES_NOT_KNOWN}
    return {
        **head("", source.step, **{"converted from": source.format}, **known),
        "topology": {"world_size": 1, "plan": {}, "mesh": {}, "precision": {}},
        "tensors": {name: list(info.shape) for name, info in source.tensors.items()},
        "aliases": source.aliases,
        "optimizer": None if source.optimizer is None else asdict(source.optimizer),
        "extra": source.extra,
    }
