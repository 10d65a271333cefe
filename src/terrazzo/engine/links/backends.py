"""Which collectives a group gets: one algorithm per backend."""

from __future__ import annotations

import torch
import torch.distributed as dist

from terrazzo.engine.links.collectives import Collectives, NativeCollectives
from terrazzo.engine.links.gloo import GlooCollectives
from terrazzo.engine.links.traffic import Ledger, Traffic
from terrazzo.errors import BadInput

__all__ = ["KINDS", "backend_of", "collectives_for"]

KINDS: dict[str, type[Collectives]] = {
    "gloo": GlooCollectives,
    "nccl": NativeCollectives,
    "fake": NativeCollectives,
}
"""By backend; `fake` is that of simulations. Tests add one whose ranks are threads."""


def collectives_for(
    group: dist.ProcessGroup, device: torch.device, traffic: Traffic, ledger: Ledger, axis: str = ""
) -> Collectives:
    """The collectives of the backend that serves `device` in `group`, which is that of `axis`.

    Raises:
        BadInput: for a backend whose order of sums this version does not know.
    """
    backend = backend_of(group, device)
    if backend not in KINDS:
        raise BadInput(
            f"The process group's backend for {device.type} is {backend!r}, in whose order of sums nobody has looked; "
            f"this version knows {', '.join(KINDS)}. Initialise it with "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )
    return KINDS[backend](group, traffic, ledger, axis)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves `device` in `group`, such as `gloo`."""
    config = str(dist.get_backend_config(group))
    by_device = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    return by_device.get(device.type, dist.get_backend(group))
