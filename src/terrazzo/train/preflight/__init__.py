"""Everything that can be refused before a process is started or a byte is written.

checks                     all checks, in order
shared_axes                whether ranks can share sequences, matrices, experts and layers
names_in_model             whether the model has what settings name
written_folders            whether the run can write to its folders
replica_settings           whether each group that trains by itself has samples
local_checkpoint_settings  whether local checkpoints can be taken
device_memory              whether the run fits on its devices, and what the planner refuses
offload_room               whether host memory and disks have room for what is offloaded
idle_settings              notes on settings that have no effect
"""

from terrazzo.train.preflight.checks import check, check_fewer

__all__ = ["check", "check_fewer"]
