"""The mesh of a run as a line of text: which ranks read the same sequences, and what they share."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["mesh_picture"]

MOST_READERS = 8
"""Most readers that are all drawn; of more, only the first two and the last are."""


def mesh_picture(sizes: Mapping[str, int]) -> list[str]:
    """A line that shows how ranks are arranged, and one that explains its signs; empty for data parallelism alone.

    `dp_shard 2 × cp 2 × tp 2` is `[0-1 | 2-3] [4-5 | 6-7]`, and `pp 2 × dp_shard 2` is `[0] [1] → [2] [3]`.

    Args:
        sizes: of the axes, outermost first.
    """
    pp, cp, tp, ep = (sizes.get(axis, 1) for axis in ("pp", "cp", "tp", "ep"))
    if pp * cp * tp * ep == 1:
        return []
    groups, shards = sizes.get("dp_replicate", 1), sizes["dp_shard"]
    readers = [_reader(first, cp, tp) for first in range(0, pp * groups * shards * cp * tp, cp * tp)]
    whole = len(readers) <= MOST_READERS
    copies = [" ".join(readers[first : first + shards]) for first in range(0, len(readers), shards)]
    stages = [" || ".join(copies[first : first + groups]) for first in range(0, len(copies), groups)]
    drawn = " → ".join(stages) if whole else " ".join([*readers[:2], "...", readers[-1]])
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "ep")
    signs = ["each [ ] reads its own sequences" + ", the same in all stages" * (pp > 1)]
    signs += [f"→ the next layers (pp {pp})"] if pp > 1 else []
    signs += [f"| divides them (cp {cp})"] if cp > 1 else []
    signs += [f"0-{tp - 1} divide matrices (tp {tp})"] if tp > 1 else []
    signs += [f"each {ep} neighbours divide experts (ep {ep})"] if ep > 1 else []
    signs += ["|| parts copies"] if groups > 1 and whole else []
    return [f"{drawn}   {axes}", ", ".join(signs)]


def _reader(first: int, cp: int, tp: int) -> str:
    """The ranks that read the same sequences."""
    starts = range(first, first + cp * tp, tp)
    return f"[{' | '.join(str(start) if tp == 1 else f'{start}-{start + tp - 1}' for start in starts)}]"
