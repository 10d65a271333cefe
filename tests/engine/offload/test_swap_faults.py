"""A swap file that is lost, changed, or has no room ends the run with a clear error, never with wrong numbers."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.engine.offload.nvme.swap_file import sweep
from terrazzo.engine.offload.nvme.swap_folder import inspect_folder
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.errors import BadInput, SwapFailed
from tests.engine.offload.swap import at_page, changed, disk_in, mounted, random_pages, read_back, supports_direct

LAST_CHECKPOINT = "Start again from the last checkpoint"


def failing(real: Callable[..., Any], error: int, after: int = 0) -> Callable[..., Any]:
    """`real`, that fails with `error` from its call number `after` on."""
    calls, lock = 0, threading.Lock()

    def call(*arguments: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            due = calls > after
        if due:
            raise OSError(error, os.strerror(error))
        return real(*arguments)

    return call


def without_space_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that cannot allocate ahead."""
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, errno.EOPNOTSUPP))


@pytest.mark.parametrize("length", [0, 5000, at_page(7), at_page(63) + 100])
@pytest.mark.parametrize("digest", [False, True], ids=["plain", "digest"])
def test_a_file_cut_off_under_the_run(tmp_path: Path, length: int, digest: bool) -> None:
    disk = disk_in(tmp_path, digest=digest)
    data = random_pages(64)
    disk.write(0, data).wait()
    os.truncate(disk.paths[0], length)
    with pytest.raises(SwapFailed, match=f"'{disk.paths[0]}' ends too early .* at byte {length}: .*{LAST_CHECKPOINT}"):
        read_back(disk, 0, 64)
    disk.close()


def test_a_write_does_not_fill_up_a_file_that_was_cut_off(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    disk.write(0, random_pages(64)).wait()
    os.truncate(disk.paths[0], at_page(10))
    with pytest.raises(SwapFailed, match="ends too early"):
        disk.write(at_page(60), random_pages(4)).wait()
    assert disk.paths[0].stat().st_size == at_page(10)
    disk.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("pages", [8.0, 9.5], ids=["at a page", "within a page"])
def test_a_file_cut_off_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: float, direct: bool
) -> None:
    if direct and not supports_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    disk, read = disk_in(tmp_path, block=16, direct=direct), os.preadv

    def late(*arguments: Any) -> int:
        os.truncate(disk.paths[0], int(pages * PAGE_BYTES))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", late)
    with pytest.raises(SwapFailed, match=f"ends too early at byte {int(pages * PAGE_BYTES)}"):
        read_back(disk, 0, 16)
    disk.close()


def test_a_deleted_file_stays_in_use_and_is_told_of_once(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    data, other = random_pages(8), random_pages(8)
    disk.write(0, data).wait()
    os.unlink(disk.paths[0])
    with pytest.warns(UserWarning, match=f"deleted the swap file '{disk.paths[0]}'") as caught:
        assert torch.equal(read_back(disk, 0, 8), data)
    assert [warning.filename for warning in caught] == [str(Path(__file__).with_name("swap.py"))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk.write(at_page(8), other).wait()
        assert torch.equal(read_back(disk, at_page(8), 8), other)
        disk.close()


@pytest.mark.parametrize(("written", "read"), [((0, 16), (0, 16)), ((4, 3), (4, 3)), ((5, 2), (0, 64))])
def test_changed_bytes_are_found_with_a_digest(tmp_path: Path, written: tuple[int, int], read: tuple[int, int]) -> None:
    disk = disk_in(tmp_path, digest=True)
    disk.write(at_page(written[0]), random_pages(written[1])).wait()
    read_back(disk, at_page(read[0]), read[1])
    changed(disk.paths[0], at_page(sum(written)) - 1)
    with pytest.raises(SwapFailed, match=f"'{disk.paths[0]}' holds other bytes than were written .*{LAST_CHECKPOINT}"):
        read_back(disk, at_page(read[0]), read[1])
    disk.close()


def test_the_digest_names_the_byte_in_its_file(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    disk = disk_in(*folders, block=4, digest=True)
    disk.write(0, random_pages(64)).wait()
    changed(disk.paths[1], at_page(6))
    with pytest.raises(SwapFailed, match=f"'{disk.paths[1]}' holds other bytes .* at byte {at_page(4)}:"):
        read_back(disk, 0, 64)
    disk.close()


def test_changed_bytes_are_not_found_without_a_digest(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    data = random_pages(8)
    disk.write(0, data).wait()
    changed(disk.paths[0], 77)
    assert (read_back(disk, 0, 8) != data).nonzero().tolist() == [[77]]
    disk.close()


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        says = (
            rf"0\.00 GiB \({at_page(300)} bytes\) does not fit into '{folder}' .*which has .*\({1 << 20} bytes\) free"
        )
        with pytest.raises(BadInput, match=says):
            disk_in(folder, pages=300)
        assert not os.listdir(folder)
        disk_in(folder, pages=200).close()


def test_no_file_stays_if_the_second_has_no_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        (tmp_path / "large").mkdir()
        with pytest.raises(BadInput, match=f"does not fit into '{folder}'"):
            disk_in(tmp_path / "large", folder, pages=600)
        assert not os.listdir(tmp_path / "large") + os.listdir(folder)
        names = os.listdir("/proc/self/fd")
        assert not [name for name in names if str(tmp_path) in os.path.realpath(f"/proc/self/fd/{name}")]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errno.ENOSPC, "does not fit into"),
        (errno.EDQUOT, "does not fit into"),
        (errno.EFBIG, "does not fit into"),
        (errno.EIO, r"cannot be used \(Input/output error\)"),
    ],
)
def test_space_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, says: str) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, error))
    with pytest.raises(BadInput, match=says):
        disk_in(tmp_path)
    assert not os.listdir(tmp_path)


def test_space_that_cannot_be_taken_ahead_runs_out_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_space_taken(monkeypatch)
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        disk = disk_in(folder, pages=300)
        data = random_pages(200)
        disk.write(0, data).wait()
        assert torch.equal(read_back(disk, 0, 200), data)
        with pytest.raises(SwapFailed, match=f"cannot be written at byte .*No space left.* free.*{LAST_CHECKPOINT}"):
            disk.write(at_page(200), random_pages(100)).wait()
        disk.close()


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (errno.ENOSPC, SwapFailed, r"cannot be written at byte \d+ \(No space left on device\): '.*' has .* free"),
        (errno.EIO, SwapFailed, r"cannot be written \(Input/output error\) at byte \d+: .*dmesg"),
    ],
)
def test_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, kind: type[Exception], says: str
) -> None:
    disk = disk_in(tmp_path)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, error, after=3))
    with pytest.raises(kind, match=f"{disk.paths[0]}.*{says}.*"):
        disk.write(0, random_pages(64)).wait()
    disk.close()
    assert not os.listdir(tmp_path)


def test_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_in(tmp_path)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO))
    with pytest.raises(
        SwapFailed, match=rf"cannot be read \(Input/output error\) at byte \d+: .*{LAST_CHECKPOINT}.*dmesg"
    ):
        read_back(disk, 0, 64)
    disk.close()


def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO))
        unheard = disk.write(0, random_pages(1))
        with pytest.raises(SwapFailed):
            unheard.wait()
    for start in (disk.read, disk.write):
        with pytest.raises(SwapFailed, match="Input/output error"):
            start(at_page(8), random_pages(1))
    with pytest.raises(SwapFailed):
        unheard.wait()
    disk.close()


def test_no_block_is_in_flight_when_wait_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, write, slow = disk_in(tmp_path, pages=8), os.pwritev, threading.Event()

    def first_fails(*arguments: Any) -> int:
        if arguments[2] == 0:
            threading.Timer(0.05, slow.set).start()
            raise OSError(errno.EIO, "broken")
        assert slow.wait(120)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", first_fails)
    data = random_pages(8)
    with pytest.raises(SwapFailed):
        disk.write(0, data).wait()
    assert disk.paths[0].read_bytes()[at_page(4) :] == data[at_page(4) :].numpy().tobytes()
    assert disk.traffic.written_bytes == at_page(4)
    disk.close()


def test_transfers_that_the_system_cuts_short_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, read, write = disk_in(tmp_path, block=16), os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][: at_page(2)]], at))
    monkeypatch.setattr(os, "pwritev", lambda file, data, at: write(file, [data[0][: at_page(1)]], at))
    data = random_pages(50)
    disk.write(at_page(3), data).wait()
    assert torch.equal(read_back(disk, at_page(3), 50), data)
    disk.close()


@pytest.mark.parametrize("call", [disk_in, inspect_folder])
def test_folders_that_are_none(tmp_path: Path, call: Callable[[Path], object]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=rf"'{tmp_path}/none' in offload\.path does not exist: make it"):
        call(tmp_path / "none")
    for name in ("file", "link"):
        with pytest.raises(BadInput, match=rf"'{tmp_path}/{name}' in offload\.path is not a folder"):
            call(tmp_path / name)


@pytest.mark.parametrize("call", [disk_in, inspect_folder])
def test_a_read_only_file_system(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with (
        mounted(tmp_path / "fixed", "tmpfs", "ro") as folder,
        pytest.raises(BadInput, match=f"{folder}.*Read-only file"),
    ):
        call(folder)


@pytest.mark.parametrize("call", [disk_in, inspect_folder])
def test_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object]) -> None:
    if os.geteuid():
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    else:  # permissions do not bind root
        monkeypatch.setattr(os, "open", failing(os.open, errno.EACCES))
    with pytest.raises(BadInput, match=rf"{tmp_path}'.*\(Permission denied\): name"):
        call(tmp_path)


def usable_without_direct(folder: Path) -> None:
    with pytest.warns(UserWarning, match=rf"'{folder}' \(.+\) refuses O_DIRECT.*offload\.direct") as caught:
        disk = disk_in(folder, direct=True)
    assert len(caught) == 1
    assert not disk.direct
    data = random_pages(9)
    disk.write(0, data).wait()
    assert torch.equal(read_back(disk, 0, 9), data)
    disk.close()
    assert not os.listdir(folder)


def test_a_file_system_that_refuses_direct_transfers(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "ramfs") as folder:
        usable_without_direct(folder)


def test_direct_transfers_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refused(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    usable_without_direct(tmp_path)


def test_direct_transfers_refused_at_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev

    def picky(descriptor: int, data: Any, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwritev", picky)
    usable_without_direct(tmp_path)


def test_files_that_cannot_be_allocated_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_space_taken(monkeypatch)
    disk = disk_in(tmp_path)
    assert disk.paths[0].stat().st_size == at_page(64)
    assert not read_back(disk, 0, 64).any()
    disk.close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(fcntl.flock, errno.ENOLCK))
    disk = disk_in(tmp_path)
    assert sweep([tmp_path]) == []
    assert disk.paths[0].exists()
    disk.close()
    assert not os.listdir(tmp_path)


def test_a_sweep_leaves_what_is_not_a_swap_file(tmp_path: Path) -> None:
    stale = tmp_path / "terrazzo-swap-old-00ff-rank00003.bin"
    others = [tmp_path / name for name in ("terrazzo-swap-old.bin", "model.bin", "terrazzo-swap-x-rank00001.bin.bak")]
    for path in (stale, *others):
        path.write_bytes(b"x")
    (tmp_path / "terrazzo-swap-link-rank00000.bin").symlink_to(others[1])
    (tmp_path / "terrazzo-swap-folder-rank00000.bin").mkdir()
    os.mkfifo(tmp_path / "terrazzo-swap-pipe-rank00000.bin")
    assert sweep([tmp_path, tmp_path / "none"]) == [str(stale)]
    assert not stale.exists()
    assert all(path.exists() for path in others)
    assert len(os.listdir(tmp_path)) == 6


def test_a_sweep_between_making_and_locking_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append("")
            swept.extend(sweep([tmp_path]))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    disk = disk_in(tmp_path)
    assert len(swept) == 2
    assert [str(tmp_path / name) for name in os.listdir(tmp_path)] == [str(disk.paths[0])] != swept[1:]
    disk.close()
