"""Everything that can be refused before a process is started or a byte is written.

checks           all checks, in order, and those that take a few lines
shared_axes      whether ranks can share sequences, matrices, experts and layers
written_folders  whether the run can write to its folders
local_room       whether local checkpoints can be taken
device_memory    whether the run fits on its devices, and what the planner refuses
offload_room     whether host memory and disks have room for what is offloaded
idle_keys        notes on settings that have no effect
"""

from terrazzo.train.preflight.checks import check

__all__ = ["check"]
