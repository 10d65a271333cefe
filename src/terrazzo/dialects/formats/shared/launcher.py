"""How many ranks there are on how many machines: in keys of the target's, or as its launcher is told."""

from __future__ import annotations

from terrazzo.dialects.core.draft import Draft

__all__ = ["leave_to_launcher", "ranks_of_each", "write_ranks"]


def ranks_of_each(draft: Draft) -> int | None:
    """Ranks of one machine; None where that is not known, or no whole number."""
    ranks, nodes = draft.value("mesh.world"), draft.value("mesh.nodes", 1)
    return None if ranks is None or ranks % nodes else int(ranks // nodes)


def write_ranks(draft: Draft, each: str, machines: str) -> None:
    """Write the ranks of one machine, and of how many there are where it is not one."""
    nodes = draft.value("mesh.nodes")
    if nodes is not None and nodes > 1:
        draft.put("mesh.nodes", machines, nodes)
    if (ranks := ranks_of_each(draft)) is not None:
        alone = f"on one machine; of several, {machines} says how many, and this the ranks of each"
        draft.put("mesh.world", each, ranks, alone if nodes is None else "")
    elif draft.value("mesh.world") is not None:
        draft.lossy(
            "mesh.world", f"{each} is of each machine, and {draft.value('mesh.world')} are not {nodes} times it"
        )


def leave_to_launcher(draft: Draft, also: str = "", program: str = "") -> None:
    """Say with which words ranks are started. `also`: another launcher's; `program`: what the words end with."""
    nodes, each = draft.value("mesh.nodes", 1), ranks_of_each(draft) or "N"
    machines = f"--nnodes {nodes} " if nodes > 1 else ""
    words = f"torchrun {machines}--nproc-per-node {each} {program}".rstrip()
    draft.holds(("mesh.world", "mesh.nodes"), f"said to the launcher: {also}{words}")
