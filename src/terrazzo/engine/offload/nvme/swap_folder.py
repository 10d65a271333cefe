"""Folders for swap files: whether they can be used, what kind of disk is behind them, how much fits."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from terrazzo.errors import BadInput
from terrazzo.processes.system import SYS, text_of

__all__ = ["free_bytes", "inspect_folder", "is_memory", "is_network", "mount_of", "require_folder"]

_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gpfs",
    "lustre", "nfs", "nfs4", "smb3", "virtiofs",
}  # fmt: skip
_CONSUMER = re.compile(
    r"\b(9[0-9]0|8[0-9]0) (PRO|EVO|QVO)|\bWDS|WD[_ ]?(BLACK|Blue)|^CT\d+P|KINGSTON|Sabrent|Corsair", re.I
)


class Mount(NamedTuple):
    """The mount that a folder is on: the type of file system, and `major:minor` of its block device."""

    kind: str
    device: str


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write below `path`."""
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def inspect_folder(path: str | os.PathLike[str], root: Path = SYS) -> list[str]:
    """Reasons against swap files in `path`, one sentence each; `root` has the system's files.

    Raises:
        BadInput: if it is missing, not a folder, or cannot be written to.
    """
    folder = Path(path)
    require_folder(folder)
    _require_writable(folder)
    mount = mount_of(folder, root)
    facts = (_of_kind(folder, mount.kind), *_of_disks(folder, mount.device, root))
    warnings = [warning for warning in facts if warning]
    return list(dict.fromkeys(warnings))


def require_folder(folder: Path) -> None:
    """Refuse a `folder` that is missing, or something else than a folder.

    Raises:
        BadInput: there.
    """
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise BadInput(f"'{folder}' in offload.path is not a folder: give a folder on a local disk.")
    raise BadInput(f"The folder '{folder}' in offload.path does not exist: make it, or name one that exists.")


def is_network(folder: Path) -> bool:
    """Whether other hosts may have files here, which locks need not tell of."""
    return mount_of(folder).kind in _NETWORK


def is_memory(folder: Path) -> bool:
    """Whether files here are host memory."""
    return mount_of(folder).kind in _MEMORY


def mount_of(path: Path, root: Path = SYS) -> Mount:
    """The mount that `path` lies on; ("", "") where the system does not say."""
    real, innermost, longest = os.path.realpath(path), Mount("", ""), -1
    for point, mount in _mounts(root.parent / "proc/self/mountinfo"):
        if len(point) >= longest and (real == point or real.startswith(point.rstrip("/") + "/")):
            innermost, longest = mount, len(point)
    return innermost


def _mounts(mounts: Path) -> Iterator[tuple[str, Mount]]:
    """Mount points in the order they were mounted: of two on one point, the later covers the earlier."""
    for line in text_of(mounts).splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        yield point, Mount(right.split(" ")[0], fields[2])


def _require_writable(folder: Path) -> None:
    """Find out by writing: permissions alone do not tell of read-only mounts, root squash and the like."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"The folder '{folder}' in offload.path cannot be written to ({error.strerror}): "
            "name one that this user may write to."
        ) from None


def _of_kind(folder: Path, kind: str) -> str:
    if kind in _MEMORY:
        return f"'{folder}' is a {kind}, which is host memory: use the tier cpu, or a folder on a disk."
    if kind in _NETWORK:
        return (
            f"'{folder}' is on a network file system ({kind}), far slower than a local disk, and swap files that dead "
            "runs leave there are not removed: name a folder on a local disk."
        )
    if kind == "overlay":
        return f"'{folder}' is in a container's own layer (overlay): mount a volume of a local disk and name that."
    return ""


def _of_disks(folder: Path, device: str, root: Path) -> Iterator[str]:
    for disk in _disks(root / "dev/block" / device) if device else ():
        if text_of(disk / "queue/rotational") == "1" and not disk.name.startswith("vd"):  # virtual ones say 1
            yield f"'{folder}' is on a rotating disk ({disk.name}), tens of times slower than NVMe: use an SSD."
        model = text_of(disk / "device/model")
        if _CONSUMER.search(model):
            yield (
                f"'{folder}' is on a consumer SSD ({model}): optimizer state on it is written whole in every step, and "
                "such drives are rated for some hundred TB; watch its wear (smartctl -A)."
            )


def _disks(entry: Path) -> Iterator[Path]:
    """The whole disks behind a block device: of a partition its disk, of RAID, LVM or encryption what is below."""
    if not entry.exists():
        return
    disk = entry.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    below = sorted((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else []
    if not below:
        yield disk
    for part in below:
        yield from _disks(part)
