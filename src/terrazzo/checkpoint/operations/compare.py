"""How two checkpoints of any formats differ, range by range: a few pieces of tensors are in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.source import BUFFER, PIECE_BYTES, WEIGHT, OptimizerInfo, Source
from terrazzo.checkpoint.tensors import name_of
from terrazzo.errors import BadInput

__all__ = ["StateDifference", "compare", "compare_settings"]

_CACHED_NUMEL = 1 << 18  # elements that stay in a cache while they are compared


@dataclass(frozen=True)
class StateDifference:
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


def compare(a: Source, b: Source, kind: str | None = None) -> Iterator[StateDifference]:
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
    by_name = {name: b.resolve(_every_name(a, name)) for name in a.tensors}
    yield from ((name, name, in_b) for name, in_b in by_name.items())
    rest = b.tensors.keys() - by_name.values()
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
        return self.source.read_with_progress(self.name, self.kind, start, stop)


def _states(source: Source, name: str | None) -> dict[str, _State]:
    if name is None:
        return {}
    info = source.tensors[name]
    return {
        _same(kind): _State(source, name, kind, info.shape, state.dtype, state.numel)
        for kind, state in info.states.items()
    }


def _difference(name: str, kind: str, a: _State | None, b: _State | None) -> StateDifference:
    if a is None or b is None:
        return StateDifference(name, kind, f"only in {'A' if b is None else 'B'}")
    if (a.shape, a.numel) != (b.shape, b.numel):
        return StateDifference(
            name, kind, f"{a.numel:,} elements of {list(a.shape)} and {b.numel:,} of {list(b.shape)}"
        )
    note = "" if a.dtype == b.dtype else f"{name_of(a.dtype)} and {name_of(b.dtype)}"
    max_abs, differing = 0.0, 0
    for start in range(0, a.numel, PIECE_BYTES // 8):
        stop = min(start + PIECE_BYTES // 8, a.numel)
        pieces = (values.split(_CACHED_NUMEL) for values in (a.read(start, stop), b.read(start, stop)))
        for largest, count in map(_distance, *pieces):
            differing += count
            if math.isnan(largest) or largest > max_abs:
                max_abs = largest
    return StateDifference(name, kind, note, max_abs, differing, a.numel)


def _distance(x: Tensor, y: Tensor) -> tuple[float, int]:
    """The largest absolute difference of two 1-D tensors, and how many elements differ."""
    if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return 0.0, 0
    if x.dtype == y.dtype and not (x.is_complex() or x.is_floating_point()):
        return _integer_distance(x, y)
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    equal = (x == y) | (x.isnan() & y.isnan())
    return float((x - y).abs().masked_fill_(equal, 0).max()), len(x) - int(equal.count_nonzero())


def _integer_distance(x: Tensor, y: Tensor) -> tuple[float, int]:
    """`_distance` of integers, of which float64 does not tell those beyond 2**53 apart."""
    if x.dtype == torch.uint64:  # moved into the range of int64, in their order
        x, y = (values.view(torch.int64) ^ torch.iinfo(torch.int64).min for values in (x, y))
    x, y = x.to(torch.int64), y.to(torch.int64)
    distance = (torch.maximum(x, y) - torch.minimum(x, y)).double()
    distance[distance < 0] += 2.0**64  # it went around
    return float(distance.max()), int((x != y).count_nonzero())
