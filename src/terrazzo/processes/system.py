"""What Linux says of the machine and of this process in files, `/sys` and `/proc`; nothing elsewhere.

Whoever asks may name another folder for `/sys`, as tests do; `proc` is beside it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "SYS",
    "birth_of",
    "boot_id",
    "control_groups",
    "is_ending",
    "is_stopped",
    "is_traced",
    "memory_file",
    "oom_kills",
    "pid_namespace",
    "processor_s",
    "state_of",
    "text_of",
    "waits_for_drive",
]

SYS = Path("/sys")

_PF_EXITING = 0x4
"""A flag of a process in `/proc/PID/stat` (Linux, include/linux/sched.h)."""


def text_of(path: Path) -> str:
    """What a file of the system says, without blanks around it; empty where there is none."""
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""


def boot_id(root: Path = SYS) -> str:
    """Another one on each machine and after each start, the same in its containers; empty where there is none."""
    return text_of(root.parent / "proc/sys/kernel/random/boot_id")


def control_groups(*controllers: str, root: Path = SYS) -> Iterator[Path]:
    """Folders of the control groups (versions 1 and 2) of this process that have any of these controllers.

    From its own group upwards: a limit holds in all groups below. Of groups that a container does not show, the folder
    is listed and is not there.
    """
    for line in text_of(root.parent / "proc/self/cgroup").splitlines():
        _, named, path = line.split(":", 2)
        if named and not set(controllers) & set(named.split(",")):
            continue
        top = root / "fs/cgroup" / named  # of version 2, which names none, the folder itself
        folder = top / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(top))


def is_ending(pid: int, root: Path = SYS) -> bool:
    """Whether a process that has not been waited for is on its way out, whatever it may still be sent."""
    words = _stat(pid, root)
    return len(words) > 6 and bool(int(words[6]) & _PF_EXITING)


def is_stopped(pid: int, root: Path = SYS) -> bool:
    """Whether a process stands still until it is told to go on: by SIGSTOP, Ctrl-Z in its shell, or a debugger."""
    return state_of(pid, root) in ("T", "t")


def state_of(pid: int, root: Path = SYS) -> str:
    """The letter of a process's state; empty where there is no such process."""
    return "".join(_stat(pid, root)[:1])


def birth_of(pid: int, root: Path = SYS) -> str:
    """When a process began: another time than that of an earlier one of its number; empty where there is none."""
    return "".join(_stat(pid, root)[19:20])


def pid_namespace(root: Path = SYS) -> str:
    """That of this process, such as `pid:[4026531836]`: a container has its own pids. Empty where there are none."""
    try:
        return os.readlink(root.parent / "proc/self/ns/pid")
    except OSError:
        return ""


def waits_for_drive(pid: int, root: Path = SYS) -> bool:
    """Whether a thread of a process waits for what cannot be interrupted: a drive, or a file system, as a rule."""
    tasks = (root.parent / f"proc/{pid}/task").glob("*")
    return any(text_of(task / "stat").rpartition(")")[2].split()[:1] == ["D"] for task in tasks)


def is_traced(pid: int, root: Path = SYS) -> bool:
    """Whether a debugger holds a process."""
    lines = text_of(root.parent / f"proc/{pid}/status").splitlines()
    return any(line.startswith("TracerPid:") and line.split()[1:] != ["0"] for line in lines)


def processor_s(pid: int, root: Path = SYS) -> float:
    """Seconds that a process has used of processors, with all that it has started, as far as these are there still."""
    words = _stat(pid, root)
    own = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK") if len(words) > 15 else 0.0
    children = " ".join(text_of(task / "children") for task in (root.parent / f"proc/{pid}/task").glob("*"))
    return own + sum(processor_s(int(child), root) for child in children.split())


def memory_file(name: str) -> int:
    """A descriptor of a new empty file in memory, or on the disk where the system has no such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def oom_kills(root: Path = SYS) -> int | None:
    """Processes that the kernel has ended so far for want of memory; None where it does not tell.

    Those of this process's control group, whatever ran out, or of the whole machine where the group does not count.
    """
    groups = control_groups("memory", root=root)
    files = (folder / name for folder in groups for name in ("memory.events", "memory.oom_control"))
    for file in (*files, root.parent / "proc/vmstat"):
        for line in text_of(file).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _stat(pid: int, root: Path) -> list[str]:
    """The words of `/proc/PID/stat` after the program's name: its state first; none where there is no such process."""
    return text_of(root.parent / f"proc/{pid}/stat").rpartition(")")[2].split()
