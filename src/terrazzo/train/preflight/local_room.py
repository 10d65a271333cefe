"""Whether local checkpoints can be taken, as `checkpoint.local` wants them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from terrazzo.config import Config
from terrazzo.engine import Plan
from terrazzo.engine.offload.nvme.swap_folder import free_bytes, is_memory
from terrazzo.errors import BadInput
from terrazzo.launch.machine import ranks_here
from terrazzo.messages import gib_text
from terrazzo.planner import Setup
from terrazzo.planner.memory.states import state_terms
from terrazzo.train.checkpoints.local_folder import ONE_HOST, host_folder, local_folder

__all__ = ["check_local", "local_room"]


def check_local(config: Config, world_size: int) -> list[str]:
    """A line for the run's header, if it takes local checkpoints; raises `BadInput` if it cannot."""
    settings = config.checkpoint.local
    if settings.folder is None:
        return []
    if settings.partner == "required" and ranks_here(world_size) == world_size:
        raise BadInput(f"checkpoint.local.partner is 'required', and {ONE_HOST}")
    if not Path(here := host_folder(config)).is_dir():
        raise BadInput(f"checkpoint.local.folder is '{here}', which is no folder: make it, or use another.")
    return [
        f"local: a checkpoint every {settings.every} steps in {local_folder(config)}, {_copies(config, world_size)}"
    ]


def _copies(config: Config, world_size: int) -> str:
    """What is kept on other hosts, and for how long."""
    if ranks_here(world_size) == world_size:
        return "until the run ends"
    if config.checkpoint.local.partner == "none":
        return "each host's own part and no copy of it, until the run ends: with a host it is lost"
    return "each host's own part and a copy of another's, until the run ends"


def local_room(config: Config, setup: Setup, world_size: int) -> list[str]:
    """A line on the room that local checkpoints take on each host, which is counted nowhere else; none without them.

    There are two while one is replaced, and two of another host's part if copies are kept.
    """
    if config.checkpoint.local.folder is None:
        return []
    folder, here = Path(host_folder(config)), ranks_here(world_size)
    split = state_terms(replace(setup, plan=Plan.named("zero3")))  # each element is saved by one rank
    values = {term.name: term.value for term in split}
    times = 4 if here < world_size and config.checkpoint.local.partner != "none" else 2
    residuals = next((term.value for term in state_terms(setup) if term.name == "residuals"), 0.0)
    residuals /= 2  # of the two copies one is saved, by every rank that has some
    needed = here * times * ((values["master"] or values["weights"]) + values["moments"] + residuals)
    free, what = free_bytes(folder), "this host's memory" if is_memory(folder) else "its drive"
    there = f"of which {gib_text(free)} are free" + (": it may not fit" if needed > free else "")
    return [f"checkpoint.local takes up to {gib_text(needed)} of {what}, {there}"]
