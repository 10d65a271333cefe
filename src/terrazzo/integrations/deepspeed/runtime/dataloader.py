"""The data loader that `initialize(training_data=...)` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class DeepSpeedDataLoader(DataLoader[Any]):
    """Micro-batches of this rank's share of a data set.

    Shares are a `DistributedSampler`'s with its own defaults: shuffled by seed 0, in the same order in every epoch
    unless `data_sampler.set_epoch` is called. Each `iter()` starts over, and what it returns is the loader itself.

    Args:
        sampler: in place of it.
        options: for torch's DataLoader.
    """

    data: Iterator[Any] | None = None

    def __init__(
        self, dataset: Dataset[Any], sampler: Sampler[Any] | None = None, shuffle: bool = True, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise BadInput(
                f"training_data is a {type(dataset).__name__}; DeepSpeed's loader samples a data set with a length by "
                "index. Pass a map-style data set, or iterate over a torch DataLoader of your own."
            )
        if sampler is None:
            sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), shuffle=shuffle)
        options["pin_memory"] = options.get("pin_memory", True) and devices.count() > 0
        super().__init__(dataset, sampler=sampler, **options)
        self.data_sampler = sampler

    def __iter__(self) -> Any:
        self.data = super().__iter__()
        return self

    def __next__(self) -> Any:
        if self.data is None:
            iter(self)
        assert self.data is not None
        return next(self.data)


class RepeatingLoader:
    """A loader that starts over when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
