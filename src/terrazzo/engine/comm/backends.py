"""Which collectives a group gets: one algorithm per backend."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from terrazzo.engine.comm.collectives import Collectives, NativeCollectives
from terrazzo.engine.comm.failed_exchanges import MeshGroups
from terrazzo.engine.comm.host.gloo import GlooCollectives
from terrazzo.engine.comm.links import Links
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.process_groups import backends_by_device
from terrazzo.errors import BadInput

__all__ = ["BY_BACKEND", "backend_of", "collectives_for"]

BY_BACKEND: dict[str, type[Collectives]] = {
    "gloo": GlooCollectives,
    "nccl": NativeCollectives,
    "fake": NativeCollectives,
}
"""The collectives of each backend; `fake` is that of simulations. Tests add one whose ranks are threads."""


def collectives_for(
    group: dist.ProcessGroup,
    device: torch.device,
    traffic: Traffic,
    ledger: Ledger,
    axis: str = "",
    mesh_groups: MeshGroups | None = None,
) -> Collectives:
    """The collectives of the backend that serves `device` in `group`, which is that of `axis`. Collective.

    Args:
        mesh_groups: of all axes of the mesh, one after the other; by default this group is alone.

    Raises:
        BadInput: for a backend whose order of sums this version does not know.
    """
    backend = backend_of(group, device)
    if backend not in BY_BACKEND:
        raise BadInput(
            f"The process group's backend for {device.type} is {backend!r}, in whose order of sums nobody has looked; "
            f"this version knows {', '.join(BY_BACKEND)}. Initialise it with "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )
    links = Links(group, _for_host(group), axis, MeshGroups() if mesh_groups is None else mesh_groups)
    return BY_BACKEND[backend](links, traffic, ledger)


def _for_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What carries numbers of the host's memory between the ranks of `group`: itself, or gloo beside NCCL alone."""
    backends = backends_by_device(group)
    if group.size() == 1 or HOST.type in backends or "nccl" not in backends.values():
        return group
    if (gloo := _GLOO_GROUPS.get(group)) is None:
        ranks = dist.get_process_group_ranks(group)
        try:
            gloo = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        except RuntimeError as error:
            error.add_note(
                "Terrazzo's ranks exchange small numbers over gloo, beside NCCL. If it does not find the network "
                "between them, name the interface: GLOO_SOCKET_IFNAME=eth0."
            )
            raise
        _GLOO_GROUPS[group] = gloo
    return gloo


_GLOO_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves `device` in `group`, such as `gloo`."""
    return backends_by_device(group).get(device.type, dist.get_backend(group))
