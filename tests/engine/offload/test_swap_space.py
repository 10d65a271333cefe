"""Swap files hold what was written, at the right place, and leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import resource
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from terrazzo.engine.offload.nvme import swap_space as disk_module
from terrazzo.engine.offload.nvme.swap_folder import free_bytes, inspect_folder
from terrazzo.engine.offload.nvme.swap_space import SwapSpace, SwapTraffic, page_aligned
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.errors import Misuse
from tests.engine.offload.swap import at_page, disk_in, mounted, random_pages, read_back, supports_direct

pytestmark = pytest.mark.alone  # threads, descriptors and memory of other tests would be counted


def folders_in(root: Path, count: int) -> list[Path]:
    folders = [root / f"disk{index}" for index in range(count)]
    for folder in folders:
        folder.mkdir()
    return folders


def open_files(folder: Path) -> list[str]:
    """This process's descriptors of files in `folder`, removed ones too."""
    names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [name for name in names if str(folder) in name]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("folders", [1, 2, 3])
@pytest.mark.parametrize("digest", [False, True], ids=["plain", "digest"])
def test_any_part_reads_as_last_written(tmp_path: Path, folders: int, digest: bool) -> None:
    pages, choose = 53, random.Random(folders)
    shadow = torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8)
    disk = disk_in(*folders_in(tmp_path, folders), pages=pages, block=3, digest=digest)
    for _ in range(150):
        start, stop = sorted(choose.sample(range(pages + 1), 2))
        part = slice(at_page(start), at_page(stop))
        if choose.random() < 0.5:
            shadow[part] = data = random_pages(stop - start)
            disk.write(at_page(start), data).wait()
        else:
            assert torch.equal(read_back(disk, at_page(start), stop - start), shadow[part])
    assert torch.equal(read_back(disk, 0, pages), shadow)
    disk.close()


def test_blocks_go_round_the_folders(tmp_path: Path) -> None:
    disk = disk_in(*folders_in(tmp_path, 3), pages=7, block=2)
    data = page_aligned(7 * PAGE_BYTES)
    for page in range(7):
        data[at_page(page) : at_page(page + 1)] = page + 1
    disk.write(0, data).wait()
    stored = [list(path.read_bytes()[::PAGE_BYTES]) for path in disk.paths]
    assert stored == [[1, 2, 7], [3, 4], [5, 6]]
    assert [path.parent.name for path in disk.paths] == ["disk0", "disk1", "disk2"]
    disk.close()


def test_many_transfers_under_way_at_once(tmp_path: Path) -> None:
    disk = disk_in(*folders_in(tmp_path, 2), pages=300, block=2)
    parts = [random_pages(3) for _ in range(100)]
    writes = [disk.write(at_page(3 * index), part) for index, part in enumerate(parts)]
    for pending in writes:
        pending.wait()
        pending.wait()
    found = [random_pages(3) for _ in parts]
    reads = [disk.read(at_page(3 * index), part) for index, part in enumerate(found)]
    for pending in reads:
        pending.wait()
    assert all(map(torch.equal, found, parts))
    disk.close()


def test_direct_transfers_bypass_the_page_cache(tmp_path: Path) -> None:
    if not supports_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    disk = disk_in(tmp_path, pages=40, block=16, direct=True)
    data = random_pages(37)
    disk.write(at_page(2), data).wait()
    assert torch.equal(read_back(disk, at_page(2), 37), data)
    assert disk.direct
    names = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    (number,) = [number for number, name in names.items() if name == os.path.realpath(disk.paths[0])]
    (flags,) = [
        line.split()[1] for line in Path(f"/proc/self/fdinfo/{number}").read_text().splitlines() if "flags" in line
    ]
    assert int(flags, 8) & os.O_DIRECT
    disk.close()


def test_as_many_blocks_in_flight_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, write = disk_in(tmp_path, pages=32, block=2), os.pwritev
    running, most, lock, end = 0, 0, threading.Lock(), threading.Event()

    def counted(*arguments: object) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if running == 4:  # the depth that disk_in asks for: see whether one more comes
            threading.Timer(0.1, end.set).start()
        assert end.wait(120)
        with lock:
            running -= 1
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", counted)
    disk.write(0, random_pages(32)).wait()
    assert most == 4
    disk.close()


def test_what_was_never_written_is_zero(tmp_path: Path) -> None:
    disk = disk_in(*folders_in(tmp_path, 2), pages=10, direct=supports_direct(tmp_path))
    assert not read_back(disk, 0, 10).any()
    disk.close()


def test_reserved_regions_are_whole_pages_that_nobody_else_has(tmp_path: Path) -> None:
    disk = disk_in(tmp_path, pages=4)
    assert [disk.reserve(size) for size in (1, PAGE_BYTES + 1, 0, PAGE_BYTES)] == [
        0,
        at_page(1),
        at_page(3),
        at_page(3),
    ]
    with pytest.raises(Misuse, match="region of 1 bytes does not fit after byte 16384"):
        disk.reserve(1)
    disk.close()


def test_files_are_private_of_exact_size_with_their_space_taken(tmp_path: Path) -> None:
    disk = disk_in(*folders_in(tmp_path, 2), pages=10, block=4)
    found = [os.stat(path) for path in disk.paths]
    assert [file.st_size for file in found] == [at_page(6), at_page(4)]
    assert all(file.st_blocks * 512 >= file.st_size for file in found)
    assert {stat.S_IMODE(file.st_mode) for file in found} == {0o600}
    disk.close()


def test_more_folders_than_blocks(tmp_path: Path) -> None:
    disk = disk_in(*folders_in(tmp_path, 3), pages=1, block=4)
    data = random_pages(1)
    disk.write(0, data).wait()
    assert torch.equal(read_back(disk, 0, 1), data)
    disk.close()


def test_a_file_is_named_after_its_rank(tmp_path: Path) -> None:
    disk = SwapSpace(Offload(tmp_path, direct=False), 12, PAGE_BYTES)
    (name,) = os.listdir(tmp_path)
    assert name.startswith("terrazzo-swap-")
    assert name.endswith("-rank00012.bin")
    disk.close()


def test_runs_of_one_name_on_one_folder_do_not_meet(tmp_path: Path) -> None:
    first, second = disk_in(tmp_path), disk_in(tmp_path)
    data, other = random_pages(8), random_pages(8)
    for disk, written in ((first, data), (second, other)):
        disk.write(0, written).wait()
    assert torch.equal(read_back(first, 0, 8), data)
    first.close()
    assert [tmp_path / name for name in os.listdir(tmp_path)] == second.paths
    assert torch.equal(read_back(second, 0, 8), other)
    second.close()


def test_close_waits_and_removes_everything(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    disk = disk_in(*folders_in(tmp_path, 2), pages=64)
    pending = disk.write(0, random_pages(64))
    disk.close()
    pending.wait()
    assert not list(tmp_path.glob("*/*"))
    assert not set(threading.enumerate()) - threads
    assert not open_files(tmp_path)
    disk.close()
    for start in (disk.read, disk.write):
        with pytest.raises(Misuse, match="is closed"):
            start(0, random_pages(1))


def test_a_disk_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    disk.write(0, random_pages(8)).wait()
    del disk
    gc.collect()
    deadline = time.monotonic() + 10  # another thread does it
    while (os.listdir(tmp_path) or open_files(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not os.listdir(tmp_path)
    assert not open_files(tmp_path)


def test_a_thousand_transfers_leave_threads_descriptors_and_memory_as_they_were(tmp_path: Path) -> None:
    disk = disk_in(tmp_path, pages=64, block=2, digest=True)
    data, into = random_pages(16), random_pages(16)

    def transfers(count: int) -> tuple[int, int, int]:
        for index in range(count):
            disk.write(at_page(index % 4 * 16), data).wait()
            disk.read(at_page(index % 4 * 16), into).wait()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return threading.active_count(), len(open_files(tmp_path)), pages * resource.getpagesize()

    threads, descriptors, resident_bytes = transfers(100)
    found = transfers(500)
    assert found[0] <= threads and found[1] == descriptors > 0
    assert found[2] < resident_bytes + (4 << 20)
    disk.close()


def test_traffic_counts_bytes_exactly(tmp_path: Path) -> None:
    disk = disk_in(*folders_in(tmp_path, 2), pages=64, block=3)
    for pages in (1, 7, 64):
        disk.write(0, random_pages(pages)).wait()
    read_back(disk, at_page(5), 11)
    assert (disk.traffic.written_bytes, disk.traffic.read_bytes) == (at_page(72), at_page(11))
    assert disk.traffic.write_s > 0 < disk.traffic.read_s
    disk.close()


def test_seconds_count_once_for_transfers_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(10.0, 1.0)
    monkeypatch.setattr(disk_module.time, "perf_counter", lambda: next(clock))
    traffic = SwapTraffic()
    traffic.begin(writes=True, blocks=2)  # at 10
    traffic.begin(writes=False, blocks=1)  # at 11
    traffic.end(writes=True, moved_bytes=5)
    traffic.begin(writes=True, blocks=1)
    traffic.end(writes=False, moved_bytes=7)  # at 12
    traffic.end(writes=True, moved_bytes=5)
    traffic.end(writes=True, moved_bytes=5)  # at 13
    assert (traffic.read_bytes, traffic.written_bytes, traffic.read_s, traffic.write_s) == (7, 15, 1.0, 3.0)


@pytest.mark.parametrize(
    ("tensor", "offset"),
    [
        (page_aligned(8192)[4096 - 64 : 8192 - 64], 0),
        (page_aligned(8192)[:1000], 0),
        (page_aligned(8192).view(2, 4096), 0),
        (page_aligned(8192).view(torch.float32), 0),
        (page_aligned(16384)[::2], 0),
        (torch.empty(4096, dtype=torch.uint8, device="meta"), 0),
        (page_aligned(4096), 100),
    ],
    ids=["address", "length", "2-D", "float32", "strided", "meta", "offset"],
)
def test_what_cannot_be_transferred_is_refused(tmp_path: Path, tensor: torch.Tensor, offset: int) -> None:
    disk = disk_in(tmp_path)
    for start in (disk.read, disk.write):
        with pytest.raises(Misuse, match="expected contiguous 1-D uint8 on the CPU"):
            start(offset, tensor)
    disk.close()


@pytest.mark.parametrize("page", [-1, 63, 64])
def test_nothing_beyond_the_end_is_touched(tmp_path: Path, page: int) -> None:
    disk = disk_in(tmp_path, pages=64)
    for start in (disk.read, disk.write):
        with pytest.raises(Misuse, match="are not within this SwapSpace's 262144"):
            start(at_page(page), random_pages(2))
    disk.close()


@pytest.mark.parametrize("count_bytes", [0, 1, 4096, 12345])
def test_page_aligned_memory(count_bytes: int) -> None:
    memory = page_aligned(count_bytes)
    assert (memory.dtype, tuple(memory.shape), memory.data_ptr() % 4096) == (torch.uint8, (count_bytes,), 0)
    assert not memory.any()


def test_much_page_aligned_memory_may_lie_in_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    memory = page_aligned(16 << 20)
    address, flags, here = memory.data_ptr() + (8 << 20), "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags


def test_free_bytes_of_a_file_system_of_known_size(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        (folder / "file").write_bytes(bytes(300_000))
        assert free_bytes(folder) == (1 << 20) - 74 * 4096


MOUNTS = """\
2 1 259:3 / {root} rw shared:7 - xfs /dev/nvme0n1p3 rw
3 2 0:40 / {root}/with\\040space rw - nfs4 server:/export rw
4 2 0:41 / {root}/memory rw - tmpfs none rw
5 2 0:42 / {root}/layer rw - overlay overlay rw
6 2 9:0 / {root}/raid rw - xfs /dev/md0 rw
1 0 8:1 / / rw - ext4 /dev/sda1 rw
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A list of mounts below tmp_path, and a /sys that knows a consumer NVMe drive and a RAID of it and a hard disk."""
    mounts, sys = tmp_path / "proc/self/mountinfo", tmp_path / "sys"
    mounts.parent.mkdir(parents=True)
    mounts.write_text(MOUNTS.format(root=tmp_path))
    for name, model, rotational in (("nvme0n1", "Samsung SSD 980 PRO 2TB", "0"), ("sdb", "ST18000NM", "1")):
        for file, text in (("device/model", model), ("queue/rotational", rotational)):
            (sys / "devices" / name / file).parent.mkdir(parents=True)
            (sys / "devices" / name / file).write_text(f"{text}\n")
    (sys / "devices/nvme0n1/nvme0n1p3").mkdir()
    (sys / "devices/nvme0n1/nvme0n1p3/partition").write_text("3\n")
    (sys / "devices/md0/slaves").mkdir(parents=True)
    (sys / "dev/block").mkdir(parents=True)
    links = {
        "dev/block/259:3": "../../devices/nvme0n1/nvme0n1p3",
        "dev/block/9:0": "../../devices/md0",
        "devices/md0/slaves/nvme0n1p3": "../../nvme0n1/nvme0n1p3",
        "devices/md0/slaves/sdb": "../../sdb",
    }
    for link, target in links.items():
        (sys / link).symlink_to(target)
    return sys


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("plain", [r"consumer SSD \(Samsung SSD 980 PRO 2TB\)"]),
        ("with space/below", [r"network file system \(nfs4\)"]),
        ("memory", ["a tmpfs, which is host memory"]),
        ("layer", ["container's own layer"]),
        ("raid", [r"consumer SSD \(Samsung", r"rotating disk \(sdb\)"]),
    ],
)
def test_what_speaks_against_a_folder(tmp_path: Path, machine: Path, folder: str, says: list[str]) -> None:
    (tmp_path / folder).mkdir(parents=True)
    found = inspect_folder(tmp_path / folder, machine)
    assert len(found) == len(says)
    for warning, pattern in zip(found, says, strict=True):
        assert re.search(pattern, warning)


def test_nothing_speaks_against_a_folder_of_which_nothing_is_known(tmp_path: Path) -> None:
    assert inspect_folder(tmp_path, tmp_path / "none") == []
    assert not os.listdir(tmp_path)
