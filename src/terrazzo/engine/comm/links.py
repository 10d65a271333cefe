"""This rank's links to the others along one mesh axis, which all that is exchanged there goes through."""

from __future__ import annotations

import ctypes
import functools
import os

import torch.distributed as dist

from terrazzo.engine.comm.failed_exchanges import Exchange, MeshGroups, hang_up_gloo
from terrazzo.engine.labels.label import moving
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.process_groups import backends_by_device
from terrazzo.processes.ending import leaves_to_parent, require_own

__all__ = ["Links"]


class Links:
    """The process groups of the ranks along one axis.

    Args:
        group: of these ranks.
        host_group: of the same ranks, for what is in the host's memory; `group` itself, where that can.
        axis: by which waits are counted; empty where there are no others.
        mesh_groups: of all axes of the mesh.

    Attributes:
        axis, mesh_groups: as given.
        size, rank: how many ranks the axis has, and this one's place among them.
        ranks: which ones they are among all.
        is_gloo: whether gloo carries what is in the host's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, axis: str, mesh_groups: MeshGroups
    ) -> None:
        self._group, self._host_group = group, host_group
        self.axis, self.mesh_groups = axis, mesh_groups
        self.size, self.rank = group.size(), group.rank()
        self.ranks = dist.get_process_group_ranks(group)
        self._process = os.getpid()
        leaves_to_parent(self)
        self.is_gloo = backends_by_device(host_group).get(HOST.type) == "gloo"
        mesh_groups.add(group, *([functools.partial(hang_up_gloo, host_group)] if self.is_gloo else []))

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            Misuse: in a forked child, which has no part in it.
        """
        require_own(self._process)
        return self._group

    @property
    def host_group(self) -> dist.ProcessGroup:
        """What carries numbers of the host's memory; likewise."""
        require_own(self._process)
        return self._host_group

    def leave_to_parent(self) -> None:
        """Keep the groups, in a forked child: gloo's destructor would wait for threads that are not here."""
        for group in (self._group, self._host_group, dist.group.WORLD):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def begin(self) -> Exchange:
        """The exchange that this rank begins now."""
        return Exchange(self.mesh_groups, self.group, moving.get())
