"""Saving while the run waits: every rank its own ranges, the first rank the manifest, all or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.checkpoint.format.seal import seal_of
from terrazzo.checkpoint.optimizers import Optimizers
from terrazzo.checkpoint.saving.extra import check_extra
from terrazzo.checkpoint.saving.job import SaveJob, record_name
from terrazzo.checkpoint.saving.snapshot import Snapshot, take
from terrazzo.checkpoint.storage.store import CheckpointDraft, not_saved
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.exchange import gather_json, on_first, together
from terrazzo.hosts import Hosts

__all__ = ["save", "save_as_first", "save_on_hosts"]


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any] | None = None,
    *,
    run: str = "",
) -> None:
    """Write the state of a sharded model and its optimizer, or optimizers, as the checkpoint `path`. Collective.

    A state that several ranks hold is written once, each of them a part; buffers are written by rank 0. Memory: this
    rank's ranges are written from where they are, those on another device one at a time. All ranks must see the place.

    Args:
        path: the checkpoint's folder, or a URL that fsspec knows; it must not exist yet.
        extra: plain JSON values that `load` gives back on every rank, such as the step and the data cursor; by default
            none. Keys are text, and lists are no tuples. They are the same on every rank, or those of the first alone.
            Its `step` is noted in the manifest. The random generators of every rank are saved without being asked for.
        run: what tells this run from others that save in the same place; retention goes by it.

    Raises:
        BadInput: `path` exists, `extra` holds what JSON does not give back as it is, a module's `get_extra_state`
            gives something other than None, or `optimizer` is not what steps the model.
        RanksApart: ranks give other values in `extra`, another `run` or name, or an optimizer on some of them alone;
            nothing has been written.
        SaveFailed: a rank could not write its part; nothing is visible under the name `path`.
    """
    _write(take(path, model, optimizer, extra or {}, run))


def save_as_first(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: Callable[[], dict[str, Any]],
) -> None:
    """`save` with what `extra` gives on the first rank, where alone it is called: as other libraries do it. Collective.

    What it raises is raised on all ranks.
    """

    def checked() -> dict[str, Any]:
        check_extra(given := extra())
        return given

    _write(take(path, model, optimizer, on_first(checked, BadInput), ""))


def save_on_hosts(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any],
    hosts: Hosts,
    *,
    run: str,
) -> None:
    """`save` to a folder of each host's own: the files of its ranks, and the manifest of all. Collective.

    Args:
        path: of this host; its name is the same on all.
        hosts: ranks that see the same folder.
    """
    _write(take(path, model, optimizer, extra, run), hosts)


def _write(snapshot: Snapshot, hosts: Hosts | None = None) -> None:
    job = snapshot.job
    draft = job.draft()
    expected: tuple[type[Exception], ...] = (SaveFailed,)
    try:
        if hosts is None:
            on_first(draft.begin)  # before anyone writes into it
        else:
            hosts.on_firsts(draft.begin, SaveFailed)
        expected = (SaveFailed, BadInput)  # what is wrong from here on is what was written
        together(lambda: job.write(draft, snapshot.entry_bytes), SaveFailed)
        if hosts is None:
            on_first(lambda: job.conclude(draft))
        else:
            _conclude_on_each(job, draft, hosts)
    except BaseException as error:
        begins = dist.get_rank() == 0 if hosts is None else hosts.is_first
        if begins:
            draft.abandon()
        if not isinstance(error, expected):
            raise
        raise not_saved(job.where, error) from None


def _conclude_on_each(job: SaveJob, draft: CheckpointDraft, hosts: Hosts) -> None:
    """The first rank makes the manifest of all ranks' records, and each host has it."""
    records = gather_json(draft.noted(record_name(job.rank)).decode())

    def manifest_of_all() -> str:
        for rank, record in enumerate(records):
            if rank not in hosts.here:
                draft.note(record_name(rank), record.encode())
        return job.manifest(draft).decode()

    manifest = on_first(manifest_of_all).encode()
    hosts.on_firsts(lambda: draft.commit(manifest, seal_of(manifest)), SaveFailed)
