"""Values that stay in their files until ranges of them are asked for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terrazzo.checkpoint.source import by_runs
from terrazzo.engine.partition.rectangles import Rectangle, rectangles_of
from terrazzo.errors import BadInput, Damaged

__all__ = ["Chunk", "Chunked", "LoadedTensor", "Region", "Values"]


class Values(ABC):
    """One tensor of a checkpoint.

    Attributes:
        shape, dtype: its own.
        identity: equal for two names of the same values in the files; None where that cannot be seen.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: Hashable = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements `start..stop`, flat and row-major, 1-D and newly allocated. Raises `BadInput`."""

    def read_box(self, part: Rectangle) -> Tensor:
        """A rectangle of it, of that shape and newly allocated. Raises `BadInput`."""
        return by_runs(self.read, self.shape, part, self.dtype)

    def item(self) -> float:
        """The value of a tensor of one element."""
        return self.read(0, 1).item()


class LoadedTensor(Values):
    """A tensor that torch holds: of a few elements, or mapped into memory from its file.

    Raises:
        BadInput: it is not dense, or has more elements than there are bytes for; `where` names it.
    """

    def __init__(self, tensor: Tensor, where: str) -> None:
        dense = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not dense or tensor.is_quantized or tensor.device.type != "cpu":
            raise BadInput(f"{where} is not a dense tensor ({type(tensor).__name__}, {tensor.layout}): save it as one.")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise BadInput(f"{where} repeats its values to {list(tensor.shape)}: save tensor.contiguous() instead.")
        self._tensor = tensor.detach()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        if tensor.numel():
            self.identity = (tensor.data_ptr(), self.shape, tensor.stride())

    def read(self, start: int, stop: int) -> Tensor:
        if self._tensor.is_contiguous():
            return self._tensor.view(-1)[start:stop].clone()
        parts = [self._tensor[part.slices].reshape(-1) for part in rectangles_of(self.shape, start, stop)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def read_box(self, part: Rectangle) -> Tensor:
        return self._tensor[part.slices].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Region:
    """Where a file holds a tensor: its first byte, and the distances of its elements, in elements.

    Raises:
        Damaged: the file has too few bytes; `what` names the tensor.
    """

    file: Path
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    what: str

    def read(self, index: Sequence[slice]) -> Tensor:
        """A part of it, newly allocated. Nothing else is read and nothing stays mapped."""
        counts = [part.stop - part.start for part in index]
        first = sum(part.start * stride for part, stride in zip(index, self.strides, strict=True))
        span = 1 + sum((count - 1) * stride for count, stride in zip(counts, self.strides, strict=True))
        itemsize = self.dtype.itemsize
        data = self._mapped(self.offset + first * itemsize, span * itemsize)
        strides = [stride * itemsize for stride in self.strides]
        spread = np.lib.stride_tricks.as_strided(data, (*counts, itemsize), (*strides, 1), writeable=False)
        return torch.from_numpy(np.array(spread, order="C")).view(self.dtype).view(counts)

    def _mapped(self, start: int, count: int) -> NDArray[np.uint8]:
        try:
            return np.memmap(self.file, np.uint8, "r", start, (count,))
        except (OSError, ValueError) as error:
            last = start + count - 1
            raise Damaged(f"'{self.file}' cannot give {self.what}, bytes {start} to {last}: {error}.") from None


class Chunk(ABC):
    """A block of a tensor that lies in one file."""

    box: Rectangle

    @abstractmethod
    def region(self) -> Region:
        """Where."""


class Chunked(Values):
    """A tensor in blocks, each element in exactly one: the caller has made sure of that."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, chunks: Sequence[Chunk], identity: Hashable = None
    ) -> None:
        self.shape, self.dtype, self.identity = shape, dtype, identity
        self._chunks = [chunk for chunk in chunks if chunk.box.numel]

    def read(self, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=self.dtype)
        done = 0
        for box in rectangles_of(self.shape, start, stop):
            self._fill(values[done : done + box.numel].view(box.sizes), box)
            done += box.numel
        return values

    def read_box(self, part: Rectangle) -> Tensor:
        values = torch.empty(part.sizes, dtype=self.dtype)
        self._fill(values, part)
        return values

    def _fill(self, out: Tensor, box: Rectangle) -> None:
        for chunk in self._chunks:
            if (common := chunk.box.intersect(box)) is not None:
                out[common.within(box)] = chunk.region().read(common.within(chunk.box))
