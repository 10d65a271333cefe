"""Local checkpoints of several hosts: one may be lost, and what is not as it was written is as if it were not there."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.checkpoint import load_newest
from terrazzo.checkpoint.saving.save import save_on_hosts
from terrazzo.checkpoint.series.partner_hosts import CopyResult, PartnerHosts
from terrazzo.checkpoint.storage.file_sender import FileSender
from terrazzo.checkpoint.storage.local import LocalDraft
from terrazzo.checkpoint.storage.multi_host import MultiHostFolder
from terrazzo.hosts import Hosts
from tests.helpers.threads import exclusive, run_in_threads

HOSTS = [[0], [1, 2], [3]]
STEP = "step-00000006"


def host_of(rank: int) -> int:
    return next(host for host, ranks in enumerate(HOSTS) if rank in ranks)


def root(folder: Path, host: int) -> Path:
    return folder / f"host{host}"


def on_hosts(folder: Path, body: Callable[[PartnerHosts, Any, Any], Any]) -> list[Any]:
    """On four ranks of three hosts, each with a folder of its own."""

    def ranked(rank: int) -> Any:
        hosts = Hosts.that_share(str(host_of(rank)))
        partners = PartnerHosts(str(root(folder, host_of(rank))), "disk", hosts)
        try:
            with exclusive():
                torch.manual_seed(0)
                model = nn.Linear(5, 3)
            model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "zero3")
            return body(partners, model, optimizer)
        finally:
            partners.close()

    return run_in_threads(4, ranked)


def saved(folder: Path, steps: Sequence[int] = (6,), copies: bool = True) -> list[CopyResult | None]:
    """Weights are all their step's number."""
    for host in range(3):
        root(folder, host).mkdir()

    def body(partners: PartnerHosts, model: nn.Module, optimizer: Any) -> CopyResult | None:
        hosts, copied = partners._hosts, None
        for step in steps:
            with tz.gathered(model, write=True) as parameters, torch.no_grad():
                for value in parameters.values():
                    value.fill_(step)
            path = root(folder, hosts.own) / f"step-{step:08d}"
            save_on_hosts(path, model, optimizer, {"step": step}, hosts, run="r")
            if copies:
                partners.begin_copy(step)
                copied = partners.wait_for_copies()
        return copied

    return on_hosts(folder, body)


def taken(folder: Path, run: str = "r", since: int = 0) -> tuple[float | None, dict[str, str]]:
    """The weights that ranks go on with, if they go on, and what was refused."""

    def body(partners: PartnerHosts, model: nn.Module, optimizer: Any) -> tuple[float | None, dict[str, str]]:
        found = partners.find(run, since)
        resumed = load_newest(folder / "none", model, optimizer, besides=found)
        with tz.gathered(model) as parameters:
            values = torch.cat([value.flatten() for value in parameters.values()])
        return (None if resumed is None else float(values.unique().item())), dict(partners.damaged)

    first, *others = on_hosts(folder, body)
    assert all(other == first for other in others)
    result: tuple[float | None, dict[str, str]] = first
    return result


def files(folder: Path, host: int, step: str = STEP) -> list[int]:
    """Of which ranks a host has the files."""
    return sorted(int(path.stem.removeprefix("rank-")) for path in (root(folder, host) / step).glob("rank-*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_each_host_has_its_own_and_those_of_the_one_before(tmp_path: Path) -> None:
    copied = saved(tmp_path)
    assert [files(tmp_path, host) for host in range(3)] == [[0, 3], [0, 1, 2], [1, 2, 3]]
    for rank in range(4):  # as they were written, to the byte
        made = {hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.glob(f"host*/{STEP}/rank-0000{rank}*")}
        assert len(made) == 1
    (told,) = set(copied)
    assert told is not None
    assert (told.step, told.hosts) == (6, 3)
    assert told.count_bytes == sum(path.stat().st_size for path in tmp_path.glob(f"host*/{STEP}/rank-*")) / 2
    assert told.as_dict()["bytes_s"] == pytest.approx(told.count_bytes / 3 / told.seconds)
    assert not list(tmp_path.glob("host*/.*")), "nothing is left of the copying"


@pytest.mark.parametrize("host", range(3))
def test_a_lost_host_is_replaced_by_an_empty_one(host: int, tmp_path: Path) -> None:
    saved(tmp_path, (4, 6))
    shutil.rmtree(root(tmp_path, host))
    root(tmp_path, host).mkdir()
    assert taken(tmp_path) == (6, {})


def test_without_copies_a_lost_host_takes_its_part_with_it_and_lost_neighbours_do_anyway(tmp_path: Path) -> None:
    saved(tmp_path, copies=False)
    assert taken(tmp_path) == (6, {}), "all hosts are there"
    shutil.rmtree(root(tmp_path, 2) / STEP)
    assert taken(tmp_path) == (None, {})
    (other := tmp_path / "other").mkdir()
    saved(other)
    for host in (1, 2):
        shutil.rmtree(root(other, host) / STEP)
    assert taken(other) == (None, {}), "host 1 had the first rank of host 0, and host 2 all of host 1"


def test_a_copy_that_is_torn_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path, (4, 6))
    copy = root(tmp_path, 2) / STEP / "rank-00001.safetensors"
    flip(copy)
    step, damaged = taken(tmp_path)
    assert step == 6, "its host has what it was copied from"
    assert list(damaged) == [f"disk/{STEP}"] and "rank-00001.safetensors" in damaged[f"disk/{STEP}"]
    shutil.rmtree(root(tmp_path, 1))
    root(tmp_path, 1).mkdir()
    assert taken(tmp_path)[0] == 4, "and now nobody has"


def test_a_copy_that_is_cut_off_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path)
    copy = root(tmp_path, 0) / STEP / "rank-00003.safetensors"
    copy.write_bytes(copy.read_bytes()[:-1])
    shutil.rmtree(root(tmp_path, 2))
    step, damaged = taken(tmp_path)
    assert step is None and "was written with" in damaged[f"disk/{STEP}"]


def test_what_arrives_otherwise_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit changes on its way: the copy is never visible, and the run is told."""
    real = LocalDraft.create

    def create(self: LocalDraft, file: str, size_bytes: int) -> Any:
        sink = real(self, file, size_bytes)
        if file == "rank-00003.safetensors" and "host0" in str(self._path):
            write = sink.write
            sink.write = lambda data: write(memoryview(bytes(data)[:-1] + bytes([data[-1] ^ 1])))  # type: ignore[method-assign]
        return sink

    monkeypatch.setattr(LocalDraft, "create", create)
    for copied in saved(tmp_path):
        assert copied is not None
        assert re.search(r"copy of another host's part .*rank-00003.*not what was written", copied.problem)
    assert files(tmp_path, 0) == [0]


def test_a_copy_whose_thread_dies_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: MultiHostFolder, file: str, parts: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(MultiHostFolder, "_request", ask)
    for copied in saved(tmp_path):
        assert copied is not None and copied.count_bytes == 0
        assert re.search(r"copy of another host's part of '.*' was not saved: MemoryError: no room\.$", copied.problem)
        assert copied.as_dict() == {"not_copied": 6, "why": copied.problem}


def test_those_of_another_run_and_older_ones_are_not_used(tmp_path: Path) -> None:
    saved(tmp_path)
    assert taken(tmp_path, run="s") == (None, {})
    assert taken(tmp_path, since=6) == (None, {})


def test_strangers_and_other_files_get_nothing(tmp_path: Path) -> None:
    (tmp_path / STEP).mkdir()
    (tmp_path / STEP / "manifest.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    listener = socket.create_server(("127.0.0.1", 0))
    sender = FileSender(tmp_path, "key", listener)

    def asked(key: str, name: str, file: str) -> bytes:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(f'{key}\n{{"name": "{name}", "file": "{file}", "parts": [[0, 9]]}}\n'.encode())
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 10), b""))

    assert asked("key", STEP, "manifest.json").endswith(b"{}")
    assert asked("kex", STEP, "manifest.json") == b""
    for name, file in ((STEP, "../secret"), ("..", "manifest.json"), (f"../{STEP}", "manifest.json"), ("", "secret")):
        assert asked("key", name, file) == b"", (name, file)
    assert asked("key", "step-00000009", "manifest.json") == b"{}\n", "it has none"
    sender.close()
