"""Everything that can be refused before a process is started or a byte is written.

checks                     all of it, in order
shared_axes                sequences and matrices that ranks share
names_in_model             what it names of the model
written_folders            those that the run writes to
replica_settings           groups of ranks that train by themselves
guard_settings             what the guard looks at, and goes back to
local_checkpoint_settings  checkpoints that stay on the machine
device_memory              memory of devices, and what the planner knows to fail
offload_room               host memory, and disks for swap files
idle_settings              settings that do nothing, which are noted
"""

from terrazzo.train.preflight.checks import check, check_fewer

__all__ = ["check", "check_fewer"]
