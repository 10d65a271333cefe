"""Whether the machine's own tier of checkpoints can be had: `checkpoint.local`."""

from __future__ import annotations

from pathlib import Path

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.checkpoints.tier import tier_folder
from terrazzo.train.launch.here import ranks_here

__all__ = ["check_local"]


def check_local(config: Config, world_size: int) -> list[str]:
    """A line for the header of the run, if it has such checkpoints; refuses what cannot be."""
    settings = config.checkpoint.local
    if settings.folder is None:
        return []
    if "://" in settings.folder:
        raise BadInput(
            f"checkpoint.local.folder is '{settings.folder}', and is to be on the machine: use /dev/shm or a folder on"
            " a drive of its own. checkpoint.folder may be a URL."
        )
    if (here := ranks_here(world_size)) != world_size:
        raise BadInput(
            f"checkpoint.local.folder is '{settings.folder}', which {here} of {world_size} ranks share: all ranks have"
            " to be on one machine for it. Set checkpoint.local.folder=null, and save more often with checkpoint.every."
        )
    if not Path(settings.folder).is_dir():
        raise BadInput(f"checkpoint.local.folder is '{settings.folder}', which is no folder: make it, or use another.")
    return [f"local: a checkpoint every {settings.every} steps in {tier_folder(config)}, until the run ends"]
