"""What every checkpoint is to a reader, whoever wrote it: named tensors with states, and any range of their elements.

`load`, `terrazzo checkpoint` and the exporters know checkpoints only as this. A format is one subclass.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.format.runs import Runs
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.engine.plan.diloco import OUTER_MOMENTUM
from terrazzo.engine.plan.error_feedback import RESIDUAL, RESIDUAL_OF_SUMS
from terrazzo.engine.plan.layout import PAGE_BYTES, Range
from terrazzo.engine.states.state_names import first_of
from terrazzo.errors import BadInput

__all__ = [
    "AVERAGE",
    "BESIDE_OPTIMIZER",
    "BUFFER",
    "PIECE_BYTES",
    "WEIGHT",
    "OptimizerInfo",
    "Source",
    "StateInfo",
    "TensorInfo",
    "by_runs",
    "is_of_optimizer",
]

WEIGHT, BUFFER, AVERAGE = "weight", "buffer", "average"
"""Kinds of state. `weight` is the master weight where there was one, `average` is what `tz.EMA` keeps of it."""

BESIDE_OPTIMIZER = {
    AVERAGE: "the average of the weights (tz.EMA)",
    OUTER_MOMENTUM: "the momentum of the outer step (DiLoCo)",
    RESIDUAL: "what codes of gradients have lost (error feedback)",
    RESIDUAL_OF_SUMS: "what codes of sums of gradients have lost (error feedback)",
}
"""The kinds of state, in words, that Terrazzo's own checkpoints alone have, beside an optimizer's own."""

PIECE_BYTES = 32 << 20
"""How much of a tensor is in memory at a time, for what reads whole checkpoints."""


@dataclass(frozen=True)
class StateInfo:
    """One state of a tensor. `numel` is the tensor's for a state per element; another for one like Adam's `step`."""

    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class TensorInfo:
    """A parameter or buffer: its global shape, and its states by kind (`weight`, `exp_avg`, `step`, `buffer`, ...)."""

    shape: tuple[int, ...]
    states: Mapping[str, StateInfo]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimizer without its tensors.

    Attributes:
        name: its class, such as `AdamW`; empty where the format does not say.
        groups: for each param group its hyper-parameters as plain JSON values, and under `params` the names of its
            parameters in order.
        scaler: counters of the fp16 loss scaler, as `ShardedOptimizer.scaler_state` names them; empty without one.
    """

    name: str
    groups: list[dict[str, Any]]
    scaler: dict[str, float] = field(default_factory=dict)


class Source(ABC):
    """A checkpoint that can be read. Opening one reads descriptions only, and nothing in it is run.

    Attributes:
        format: what people call the format.
        where: the path, for messages.
        tensors: by original fully qualified name; a tied tensor once.
        aliases: further names of tied tensors, each to the name in `tensors`.
        optimizer: None where the checkpoint holds no optimizer state.
        step: finished optimizer steps; 0 where the format does not say.
        extra: plain JSON values that came with it.
        ranks: of each rank that saved, the states of its random generators; empty where the format has none.
        notes: what of the weights, and of plain values, is not taken over and why, a line each.
        optimizer_notes: likewise of the optimizer.
        file_notes: likewise of further files, which the library that wrote them reads itself.
        identity: equal for equal contents, else for one path where the format tells nothing of them; ranks compare it.
        cache: equal for processes whose reads come from the same memory, one kernel's; None where that is not known.
        advance: hears how many bytes more were read, from what reads a whole checkpoint; nobody does unless it is set.
    """

    format: str
    names_ties: bool = False
    """Whether `aliases` is complete: two names in `tensors` are then two tensors."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, TensorInfo] = {}
        self.aliases: dict[str, str] = {}
        self.optimizer: OptimizerInfo | None = None
        self.step = 0
        self.extra: dict[str, Any] = {}
        self.ranks: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.optimizer_notes: list[str] = []
        self.file_notes: list[str] = []
        self.identity = os.path.realpath(where)
        self.cache: list[Any] | None = None
        self.advance: Callable[[int], None] = lambda count_bytes: None

    @property
    def all_notes(self) -> list[str]:
        """What of the checkpoint is not taken over and why, a line each."""
        return [*self.notes, *self.optimizer_notes, *self.file_notes]

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements `start..stop` (flat, row-major) of a state that `tensors` lists, 1-D, on the CPU, in its dtype.

        Reads little more than the bytes asked for. Raises `BadInput` naming the file, tensor and byte range where they
        are damaged or missing, and for elements that the state does not have.
        """
        numel = self.tensors[name].states[kind].numel
        if not 0 <= start <= stop <= numel:
            raise BadInput(f"'{self.where}' has {numel} elements of {name}, {kind}, and not {start}..{stop}.")
        return self._read(name, kind, start, stop)

    @abstractmethod
    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """What `read` gives, of a range that is inside of the state."""

    def read_with_progress(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """`read`, as one step on the way through all of the checkpoint."""
        values = self.read(name, kind, start, stop)
        self.advance(values.nbytes)
        return values

    def read_box(self, name: str, kind: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A rectangle of a state per element: of the shape `sizes`, from `offsets` on, on the CPU, in its dtype.

        Reads little more than the bytes asked for, however the checkpoint is cut. Raises `BadInput` as `read` does, and
        for what is not inside the tensor.
        """
        part, state = self._part(name, kind, offsets, sizes), self.tensors[name].states[kind]

        def read(start: int, stop: int) -> Tensor:
            return self.read(name, kind, start, stop)

        return by_runs(read, self.tensors[name].shape, part, state.dtype)

    def _part(self, name: str, kind: str, offsets: Sequence[int], sizes: Sequence[int]) -> Rectangle:
        """The part of a tensor that is asked for."""
        shape, part = self.tensors[name].shape, Rectangle(tuple(offsets), tuple(sizes))
        if self.tensors[name].states[kind].numel != math.prod(shape):
            raise BadInput(f"{name}, {kind} in '{self.where}' is not of the shape {list(shape)}: ask for all of it.")
        inside = len(part.offsets) == len(part.sizes) == len(shape) and all(
            0 <= first <= first + size <= end for first, size, end in zip(*vars(part).values(), shape, strict=True)
        )
        if not inside:
            raise BadInput(f"{name} in '{self.where}' is {list(shape)}: {part} is not inside.")
        return part

    def about(self) -> dict[str, Any]:
        """What only Terrazzo's own checkpoints say of themselves, as plain JSON values; empty of other formats."""
        return {}

    def check(  # noqa: B027
        self, wanted: Callable[[str], bool], part: int, parts: int, beside: Collection[int] = ()
    ) -> None:
        """Compare the bytes of the kinds that are `wanted` with their digests, of `parts` equal parts the one `part`.

        `beside` are those that others with the same `cache` check meanwhile: if one fails, this source is not used.
        Raises `Damaged`. Formats without digests have nothing to compare.
        """

    def resolve(self, names: Iterable[str]) -> str | None:
        """Under which of its names, if any, a tensor is in `tensors`."""
        listed = (self.aliases.get(name, name) for name in names)
        return next((name for name in listed if name in self.tensors), None)

    def whole(self, name: str, kind: str) -> Tensor:
        """A whole state: of the tensor's shape where it is per element, else 1-D."""
        info = self.tensors[name]
        values = self.read(name, kind, 0, info.states[kind].numel)
        return values.view(info.shape) if values.numel() == info.numel else values


def is_of_optimizer(kind: str) -> bool:
    """Whether a state is the optimizer's own, of whichever replica."""
    return first_of(kind) not in {WEIGHT, BUFFER, *BESIDE_OPTIMIZER}


def by_runs(read: Callable[[int, int], Tensor], shape: tuple[int, ...], part: Rectangle, dtype: torch.dtype) -> Tensor:
    """A rectangle of a tensor of which `read` gives flat ranges, some bytes between them where that saves reads."""
    values, runs = torch.empty(part.numel, dtype=dtype), Runs(shape, part)
    for group in runs.groups(Range(0, math.prod(shape)), PAGE_BYTES // dtype.itemsize):
        first = group[0][1].start
        values_there = read(first, group[-1][1].stop)
        for before, run in group:
            values[before : before + run.numel] = values_there[run.start - first : run.stop - first]
    return values.view(part.sizes)
