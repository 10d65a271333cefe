"""Counts the bytes that tensors really hold, by walking Python's objects; knows nothing of the engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from terrazzo.engine.interception.gradients.gradient_stand_in import GradientStandIn


def live_bytes() -> int:
    """Bytes of every storage that a tensor made inside `census()` still refers to, each storage once.

    But for what stands in for gradients between steps: one number for each parameter, of the size of a Python object;
    and for the numbers of ranks that a mesh has, which outlives models.
    """
    storages, objects = {}, gc.get_objects()
    ranks = {each._rank_map.untyped_storage()._cdata for each in objects if type(each) is DeviceMesh}
    for candidate in objects:
        if issubclass(type(candidate), Tensor) and candidate.device.type == "cpu" and not _stands_in(candidate):
            with torch._C.DisableTorchFunctionSubclass():
                storage = candidate.untyped_storage()
            storages[storage._cdata] = storage.size()
    return sum(nbytes for storage, nbytes in storages.items() if storage not in ranks)


def _stands_in(candidate: Tensor) -> bool:
    return type(candidate) is GradientStandIn


@contextlib.contextmanager
def census() -> Iterator[None]:
    """Inside, `live_bytes` sees only what is made inside, and nothing is freed but by reference counts.

    What is frozen stays so: the suite's own objects are, and later tests would look through them all.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class PeakBytes(TorchDispatchMode):
    """Asks `live_bytes` after every operator: the most that was held at once is in `peak_bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, live_bytes())
        return result
