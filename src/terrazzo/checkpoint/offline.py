"""Work on checkpoints without a run: every digest recomputed, two compared, any format rewritten as Terrazzo's.

All of it is one process without a process group, and has a few pieces of tensors in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.exporters import PIECE_BYTES
from terrazzo.checkpoint.job import Job
from terrazzo.checkpoint.manifest import DTYPES, File
from terrazzo.checkpoint.native import Checkpoint, DigestBlock
from terrazzo.checkpoint.read import open_source, own_folder
from terrazzo.checkpoint.shard import Entry, arrange, bytes_of
from terrazzo.checkpoint.source import BUFFER, WEIGHT, OptimizerInfo, Source
from terrazzo.checkpoint.store import Folder
from terrazzo.checkpoint.stores import store_and_name
from terrazzo.errors import BadInput, Damaged, SaveFailed

__all__ = [
    "Advance",
    "Audit",
    "Difference",
    "Watched",
    "check_new",
    "compare",
    "compare_settings",
    "convert",
    "open_audit",
]

Advance = Callable[[int], None]
"""Hears how many more bytes are done, from any thread."""

_BLOCKS_AT_ONCE = 16  # a task of a thread: 64 MiB
_CACHED_NUMEL = 1 << 18  # elements that stay in a cache while they are compared


class Watched(Source):
    """Another source, which says how many bytes are read from it."""

    def __init__(self, source: Source, advance: Advance) -> None:
        super().__init__(source.where)
        self._source, self._advance = source, advance
        self.tensors, self.aliases, self.optimizer = source.tensors, source.aliases, source.optimizer
        self.step, self.extra, self.notes, self.identity = source.step, source.extra, source.notes, source.identity

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        values = self._source.read(name, kind, start, stop)
        self._advance(values.nbytes)
        return values


# -- verifying -----------------------------------------------------------------------------------------------------


def open_audit(path: str) -> Audit:
    """See `Audit`. Raises `BadInput` for other formats too."""
    if (folder := own_folder(path)) is not None:
        return Audit(folder)
    found = open_source(path)
    raise BadInput(f"'{path}' is of the format {found.format}: it holds no digests to verify it against.")


class Audit:
    """A Terrazzo checkpoint of which any byte may be wrong, and files missing or of another size.

    Raises:
        Damaged: the manifest or its seal is missing or changed, so that there is nothing to go by.
        BadInput: it is of another version.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder, self._checkpoint = folder, Checkpoint(folder, sizes=False)

    @property
    def size_bytes(self) -> int:
        """Of all its files, as they were written."""
        return sum(file.size_bytes for file in self._checkpoint.manifest.files)

    def problems(self, threads: int, advance: Advance) -> list[str]:
        """Recompute every digest; all that is wrong, naming file, tensor and bytes."""
        problems, present = [], []
        by_file = self._checkpoint.blocks()
        for file in self._checkpoint.manifest.files:
            size_bytes, problem = _size_problem(self._folder, file)
            there = [block for block in by_file[file.name] if block.offset + block.count_bytes <= size_bytes]
            if problem is not None:
                problems.append(f"{problem}{_gone(by_file[file.name][len(there) :])}")
            present += there
        tasks = [present[first : first + _BLOCKS_AT_ONCE] for first in range(0, len(present), _BLOCKS_AT_ONCE)]
        with ThreadPoolExecutor(threads) as pool:  # hashing and reading release the interpreter's lock
            bad = [found for task in pool.map(lambda blocks: self._check(blocks, advance), tasks) for found in task]
        return problems + [text for _, text in _joined(self._folder, bad)]

    def _check(self, blocks: Sequence[DigestBlock], advance: Advance) -> list[tuple[DigestBlock, str]]:
        buffer, bad = memoryview(bytearray(max(block.count_bytes for block in blocks))), []
        for block in blocks:
            if (problem := block.problem(self._folder, buffer)) is not None:
                bad.append((block, problem))
            advance(block.count_bytes)
        return bad


def _size_problem(folder: Folder, file: File) -> tuple[int, str | None]:
    """How large a file is, and what is wrong with that."""
    try:
        size_bytes = folder.size_bytes(file.name)
    except Damaged as error:
        return 0, str(error)
    if size_bytes == file.size_bytes:
        return size_bytes, None
    was = file.size_bytes
    what = f"bytes {size_bytes} to {was - 1} are missing" if size_bytes < was else f"byte {was} and on are not its own"
    return size_bytes, f"'{folder.where}/{file.name}' has {size_bytes} bytes and was written with {was}: {what}."


def _gone(blocks: Sequence[DigestBlock]) -> str:
    """What went with the end of a file."""
    names = list(dict.fromkeys(block.what for block in blocks))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" Gone with it: {'; '.join(names[:3])}{more}." if names else ""


def _joined(folder: Folder, bad: Iterable[tuple[DigestBlock, str]]) -> list[tuple[DigestBlock, str]]:
    """Changed blocks that follow each other in one state, as one."""
    joined: list[tuple[DigestBlock, str]] = []
    for block, text in bad:
        last, said = joined[-1] if joined else (block, "")
        follows = (last.file, last.what, last.offset + last.count_bytes) == (block.file, block.what, block.offset)
        if follows and said == last.changed(folder) and text == block.changed(folder):
            last = replace(last, count_bytes=last.count_bytes + block.count_bytes)
            joined[-1] = last, last.changed(folder)
        else:
            joined.append((block, text))
    return joined


# -- comparing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How a state of a tensor differs between two checkpoints A and B.

    Attributes:
        note: what differs besides values; where shapes do, or one is missing, values are not compared.
        max_abs: the largest absolute difference; NaN where a NaN meets a number.
        differing: how many elements differ. Two NaN do not.
    """

    name: str
    kind: str
    note: str = ""
    max_abs: float = 0.0
    differing: int = 0
    numel: int = 0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.note and not self.differing


def compare(a: Source, b: Source, kind: str | None = None) -> Iterator[Difference]:
    """Every state that both have, or only those of `kind`, range by range. A tied tensor is compared once.

    Kinds of which one has no state at all are `compare_settings`' matter. Raises `BadInput` when `kind` is one.
    """
    shared = _kinds(a) & _kinds(b)
    wanted = shared if kind is None else {_same(kind)}
    if not wanted <= shared:
        raise BadInput(f"'{kind}' is no state that both have; those are: {', '.join(sorted(shared))}.")
    for name, in_a, in_b in _matches(a, b):
        states_a, states_b = _states(a, in_a), _states(b, in_b)
        for state in [*states_a, *(state for state in states_b if state not in states_a)]:
            if state in wanted:
                yield _difference(name, state, states_a.get(state), states_b.get(state))


def compare_settings(a: Source, b: Source) -> list[str]:
    """How step, kinds of state and hyper-parameters differ, a line each."""
    lines = [f"step: {a.step} and {b.step}"] if a.step != b.step else []
    lines += [f"{kind}: only in {'A' if kind in _kinds(a) else 'B'}" for kind in sorted(_kinds(a) ^ _kinds(b))]
    one, other = (source.optimizer or OptimizerInfo("none", []) for source in (a, b))
    if one.name and other.name and one.name != other.name:
        lines.append(f"optimizer: {one.name} and {other.name}")
    if len(one.groups) != len(other.groups):
        return [*lines, f"param groups: {len(one.groups)} and {len(other.groups)}"]
    for index, groups in enumerate(zip(one.groups, other.groups, strict=True)):
        lines += [f"group {index}, {line}" for line in _group_differences(a, b, *groups)]
    return lines + list(_unequal(one.scaler, other.scaler, "loss scaler, "))


def _group_differences(a: Source, b: Source, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    in_a = {b.resolve(_every_name(a, name)) or name for name in one.get("params", ())}
    in_b = {b.aliases.get(name, name) for name in other.get("params", ())}
    if in_a != in_b:
        yield f"parameters: {len(in_a)} and {len(in_b)}, of which {len(in_a & in_b)} are the same"
    yield from _unequal({**one, "params": 0}, {**other, "params": 0})


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in [*one, *(key for key in other if key not in one)]:
        if key not in one or key not in other:
            yield f"{prefix}{key}: only in {'A' if key in one else 'B'}"
        elif one[key] != other[key]:
            yield f"{prefix}{key}: {one[key]} and {other[key]}"


def _same(kind: str) -> str:
    """Many formats cannot tell a buffer from a weight."""
    return WEIGHT if kind == BUFFER else kind


def _kinds(source: Source) -> set[str]:
    return {_same(kind) for info in source.tensors.values() for kind in info.states}


def _every_name(source: Source, name: str) -> list[str]:
    return [name, *(alias for alias, known in source.aliases.items() if known == name)]


def _matches(a: Source, b: Source) -> Iterator[tuple[str, str | None, str | None]]:
    """A name of each tensor, and that under which A and B list it, if they do. What only one ties comes twice."""
    found = {name: b.resolve(_every_name(a, name)) for name in a.tensors}
    yield from ((name, name, in_b) for name, in_b in found.items())
    rest = b.tensors.keys() - found.values()
    yield from ((name, a.resolve(_every_name(b, name)), name) for name in b.tensors if name in rest)


@dataclass(frozen=True)
class _State:
    """One state of a tensor, to be read."""

    source: Source
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int

    def read(self, start: int, stop: int) -> Tensor:
        return self.source.read(self.name, self.kind, start, stop)


def _states(source: Source, name: str | None) -> dict[str, _State]:
    if name is None:
        return {}
    info = source.tensors[name]
    return {
        _same(kind): _State(source, name, kind, info.shape, state.dtype, state.numel)
        for kind, state in info.states.items()
    }


def _difference(name: str, kind: str, a: _State | None, b: _State | None) -> Difference:
    if a is None or b is None:
        return Difference(name, kind, f"only in {'A' if b is None else 'B'}")
    if (a.shape, a.numel) != (b.shape, b.numel):
        return Difference(name, kind, f"{a.numel:,} elements of {list(a.shape)} and {b.numel:,} of {list(b.shape)}")
    note = "" if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}".replace("torch.", "")
    max_abs, differing = 0.0, 0
    for start in range(0, a.numel, PIECE_BYTES // 8):
        stop = min(start + PIECE_BYTES // 8, a.numel)
        pieces = (values.split(_CACHED_NUMEL) for values in (a.read(start, stop), b.read(start, stop)))
        for largest, count in map(_distance, *pieces):
            differing += count
            if math.isnan(largest) or largest > max_abs:
                max_abs = largest
    return Difference(name, kind, note, max_abs, differing, a.numel)


def _distance(x: Tensor, y: Tensor) -> tuple[float, int]:
    """The largest absolute difference of two 1-D tensors, and how many elements differ."""
    if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return 0.0, 0
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    equal = (x == y) | (x.isnan() & y.isnan())
    return float((x - y).abs().masked_fill_(equal, 0).max()), len(x) - int(equal.count_nonzero())


# -- converting ----------------------------------------------------------------------------------------------------


def check_new(path: str) -> None:
    """Raises `BadInput` when there is something under the name `path`, or it cannot be a checkpoint's."""
    store, name = store_and_name(path)
    if name.startswith("."):
        raise BadInput(f"A checkpoint cannot be named '{name}': hidden names are those of saves that are not finished.")
    if store.occupied(name):
        raise BadInput(f"'{path}' exists already and is not replaced: remove it, or use another name.")


def convert(source: Source, path: str, advance: Advance) -> None:
    """Write all of `source` as the Terrazzo checkpoint `path`, bit for bit, in one file and without random generators.

    Raises:
        BadInput: `path` exists, or a state has a dtype that safetensors files cannot hold.
        Damaged: the source's bytes are not what was written.
        SaveFailed: it could not be written; nothing is left.
    """
    check_new(path)
    store, name = store_and_name(path)
    entries, nonce = arrange(list(_entries(source))), os.urandom(4).hex()
    job = Job(store.where, name, nonce, 0, 1, entries, alone=None, common=_common(source))

    def data(entry: Entry) -> memoryview:
        advance(entry.count_bytes)
        return bytes_of(source.read(entry.name, entry.kind, entry.start, entry.stop))

    draft = job.draft()
    try:
        draft.begin()
        job.write(draft, data)
        job.conclude(draft)
    except BaseException as error:
        draft.abandon()
        if isinstance(error, OSError):
            raise SaveFailed(f"The checkpoint '{path}' was not written, and nothing of it is left: {error}.") from error
        raise


def _entries(source: Source) -> Iterator[Entry]:
    """Every state in pieces, none of which is large."""
    for name, info in source.tensors.items():
        for kind, state in info.states.items():
            dtype = str(state.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise BadInput(f"'{name}', {kind} in '{source.where}' is {dtype}, which safetensors files cannot hold.")
            step = PIECE_BYTES // state.dtype.itemsize
            for start in range(0, max(state.numel, 1), step):
                stop = min(start + step, state.numel)
                yield Entry(name, kind, start, stop, info.shape, state.numel, dtype)


def _common(source: Source) -> dict[str, Any]:
    software = {"terrazzo": version("terrazzo"), "torch": torch.__version__, "converted from": source.format}
    return {
        "run": "",
        "step": source.step,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": software,
        "topology": {"world_size": 1, "plan": {}, "mesh": {}, "precision": {}},
        "tensors": {name: list(info.shape) for name, info in source.tensors.items()},
        "aliases": source.aliases,
        "optimizer": None if source.optimizer is None else asdict(source.optimizer),
        "extra": source.extra,
    }
