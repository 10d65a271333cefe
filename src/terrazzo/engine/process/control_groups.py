"""The control groups that this process is in (Linux, versions 1 and 2), whose files say what it may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["SYS", "control_groups", "text_of"]

SYS = Path("/sys")


def control_groups(*controllers: str, root: Path = SYS) -> Iterator[Path]:
    """Folders of the groups that have any of these controllers, from this process's own upwards.

    A limit holds in all groups below. `root` is where the system's files are, and `proc` is beside it; of groups that
    a container does not show, the folder is listed and is not there.
    """
    for line in text_of(root.parent / "proc/self/cgroup").splitlines():
        _, named, path = line.split(":", 2)
        if named and not set(controllers) & set(named.split(",")):
            continue
        top = root / "fs/cgroup" / named  # of version 2, which names none, the folder itself
        folder = top / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(top))


def text_of(path: Path) -> str:
    """What a file of the system says, without blanks around it; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
