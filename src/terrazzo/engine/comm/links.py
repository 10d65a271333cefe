"""This rank's links to the others along one mesh axis, which all that is exchanged there goes through."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections import Counter

import torch.distributed as dist

from terrazzo.engine.comm.failed_exchanges import Exchange, MeshGroups, hang_up_gloo
from terrazzo.engine.labels.label import Label
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.process_groups import backends_by_device
from terrazzo.processes.ending import leaves_to_parent, require_own

__all__ = ["Links"]

_MODELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[bool]] = weakref.WeakKeyDictionary()
"""How many models exchange in a group by links of their own, and how many by shared ones."""


class Links:
    """The process groups of the ranks along one axis.

    Args:
        group: of these ranks.
        host_group: of the same ranks, for what is in the host's memory; `group` itself, where that can.
        axis: by which waits are counted; empty where there are no others.
        mesh_groups: of all axes of the mesh. Where models share them, each is counted; else they are of one, the next.

    Attributes:
        axis, mesh_groups: as given.
        model: the number of the model that they are of; 0 where models share them.
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
        self.model = 0 if mesh_groups.shared else self.next_model()
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

    def next_model(self) -> int:
        """The number of the model that comes to these links, of those of the group: all ranks make them in one order.

        Those that share links, for what their modules exchange, are counted apart: labels have other purposes there.
        """
        models = _MODELS.setdefault(self._group, Counter())
        models[self.mesh_groups.shared] += 1
        return models[self.mesh_groups.shared]

    def begin(self, label: Label) -> Exchange:
        """The exchange with that label, which this rank begins now."""
        return Exchange(self.mesh_groups, self.group, label)
