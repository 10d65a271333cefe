"""One process that stands for one rank of a large job: collectives return at once and move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `world_size` ranks in which this process is `rank`; destroyed on exit."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
