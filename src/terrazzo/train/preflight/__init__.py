"""Everything that can be refused before a process is started or a byte is written.

checks           all checks, in order, and those that take a few lines
refusals         what is refused of the configuration alone, by `terrazzo config check` too
axis_sizes       whether ranks can share sequences, heads and experts, by numbers alone
shared_axes      whether they can share the model: its matrices, experts and layers
written_folders  whether the run can write to its folders
local_room       whether local checkpoints can be taken
device_memory    whether the run fits on its devices, and what the planner refuses
offload_room     whether host memory and disks have room for what is offloaded
idle_keys        notes on settings that have no effect
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.train.preflight.checks import check
else:
    __getattr__, __dir__ = lazily(__name__)

__all__ = ["check"]
