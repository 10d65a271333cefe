"""Everything that can be refused before a process is started or a byte is written.

checks             all of it, in order
axes               sequences and matrices that ranks share
named              what it names of the model
written            those that the run writes to
guarded            what the guard looks at, and goes back to
local_checkpoints  checkpoints that stay on the machine
room               memory of devices, and what the planner knows to fail
swap               host memory, and disks for swap files
idle               settings that do nothing, which are noted
"""

from terrazzo.train.preflight.checks import check

__all__ = ["check"]
