"""Local checkpoints of a run on two hosts, each with a rank: what becomes of a copy that is under way, or fails."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo.checkpoint.series.partner_hosts import CopyResult, PartnerHosts
from terrazzo.checkpoint.storage.multi_host import MultiHostFolder
from terrazzo.config import config_from_dict
from terrazzo.errors import SaveFailed
from terrazzo.train.checkpoints import local_checkpoints, local_folder
from tests.helpers.threads import exclusive, run_in_threads

Save = Callable[[int], CopyResult | None]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each has a folder."""
    for name in ("host0", "host1", "durable"):
        (tmp_path / name).mkdir()
    (tmp_path / "durable" / ".run").write_text("r")
    monkeypatch.setattr(local_folder, "host_folder", lambda config: str(tmp_path / f"host{dist.get_rank()}"))
    return tmp_path


def on_hosts(
    hosts: Path, body: Callable[[local_checkpoints.LocalCheckpoints, Save], Any], **settings: Any
) -> list[Any]:
    checkpoint = {"folder": str(hosts / "durable"), "local": {"folder": str(hosts), "every": 10, **settings}}
    config = config_from_dict({"checkpoint": checkpoint})

    def ranked(rank: int) -> Any:
        checkpoints = local_checkpoints.LocalCheckpoints(config)
        with exclusive():
            torch.manual_seed(0)
            model = nn.Linear(5, 3)
        model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "zero3")
        try:
            return body(checkpoints, lambda step: checkpoints.save(model, optimizer, {"step": step}, "r"))
        finally:
            checkpoints.close()

    return run_in_threads(2, ranked)


def files(hosts: Path) -> list[str]:
    return sorted(f"{path.parts[-4]} {path.parent.name} {path.stem}" for path in hosts.glob("host*/*/step-*/rank-*"))


BOTH = [f"host{host} step-{{:08d}} rank-0000{rank}" for host in range(2) for rank in range(2)]


def of_step(step: int) -> list[str]:
    """Of both hosts, once each has a copy of the other's part."""
    return [name.format(step) for name in BOTH]


@pytest.fixture
def hung_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checkpoints of which neither host gives what it has: of step 10, unless a test has others."""
    real, names = MultiHostFolder._request, ["step-00000010"]

    def ask(self: MultiHostFolder, file: str, parts: Any) -> Any:
        if self._name in names:
            raise ConnectionResetError("it has hung up")
        return real(self, file, parts)

    monkeypatch.setattr(MultiHostFolder, "_request", ask)
    return names


@pytest.mark.usefixtures("hung_up")
def test_a_run_goes_on_without_a_copy_until_there_is_one_again(hosts: Path) -> None:
    for none, failed, copied in on_hosts(hosts, lambda checkpoints, save: [save(10), save(20), save(30)]):
        assert none is None and (failed.step, failed.count_bytes) == (10, 0)
        assert re.search(r"copy of another host's part of '.*step-00000010' .*: it has hung up", failed.problem)
        assert (copied.step, copied.problem, copied.count_bytes > 0) == (20, "", True)


def test_what_has_copies_stays_until_a_newer_one_has_some(hosts: Path, hung_up: list[str]) -> None:
    """The copy of step 20 fails. A host that is lost while step 30 is written takes the run back to step 10."""
    hung_up[:] = ["step-00000020"]

    def body(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> list[Any]:
        seen = []
        for step in (10, 20, 30, 40):
            save(step)
            dist.barrier()
            seen.append({path.name for path in hosts.glob(f"host{dist.get_rank()}/*/step-*")})
            dist.barrier()
        return seen

    for seen in on_hosts(hosts, body):
        assert [sorted(int(name[-2:]) for name in names) for names in seen] == [[10], [10, 20], [10, 30], [30, 40]]


def test_what_has_copies_stays_until_what_a_run_goes_on_from_has_some(hosts: Path, hung_up: list[str]) -> None:
    hung_up[:] = ["step-00000020"]
    on_hosts(hosts, lambda checkpoints, save: [save(10), save(20), checkpoints._files.wait_for_copies()])
    hung_up.clear()

    def go_on(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> Any:
        path = [*checkpoints.find(None)][-1]
        checkpoints.note_resume(path)
        kept = {each.name for each in hosts.glob("host*/*/step-*")}
        dist.barrier()
        return kept, save(30), {each.name for each in hosts.glob("host*/*/step-00000010")}

    for kept, copied, older in on_hosts(hosts, go_on):
        assert kept == {"step-00000010", "step-00000020"}
        assert (copied.step, copied.problem) == (20, "")
        assert not older, "step 20 has copies now"


def test_a_run_that_fails_gives_a_copy_under_way_a_moment(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MultiHostFolder._request

    def ask(self: MultiHostFolder, file: str, parts: Any) -> Any:
        time.sleep(0.05)
        return real(self, file, parts)

    monkeypatch.setattr(MultiHostFolder, "_request", ask)

    def body(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> None:
        save(10)
        checkpoints.close(30.0)

    on_hosts(hosts, body)
    assert files(hosts) == of_step(10)


def test_a_copy_that_was_received_before_its_sender_looked_is_not_waited_for(
    hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 has its copy before host 0 comes to begin its own, and the run fails then."""
    real = PartnerHosts.begin_copy

    def begin_copy(self: PartnerHosts, step: int) -> bool:
        sender, deadline = self._sender, time.monotonic() + 20
        assert sender is not None
        while dist.get_rank() == 0 and "host1 step-00000010 rank-00000" not in files(hosts):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while dist.get_rank() == 0 and sender._receivers:
            time.sleep(0.01)
        return real(self, step)

    monkeypatch.setattr(PartnerHosts, "begin_copy", begin_copy)

    def body(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> float:
        save(10)
        start = time.monotonic()
        checkpoints.close(30.0)
        return time.monotonic() - start

    assert max(on_hosts(hosts, body)) < 15
    assert files(hosts) == of_step(10)


@pytest.mark.usefixtures("hung_up")
def test_a_run_that_requires_a_partner_ends_with_its_copy(hosts: Path) -> None:
    with pytest.raises(SaveFailed, match=r"it has hung up.* checkpoint\.local\.partner=auto goes on without one\."):
        on_hosts(hosts, lambda checkpoints, save: [save(10), save(20)], partner="required")


def test_going_back_takes_no_copy_of_what_is_removed(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A durable one is newer than the local one whose copy is under way, and a rollback goes back to it."""
    real, going_on = MultiHostFolder._request, threading.Event()

    def ask(self: MultiHostFolder, file: str, parts: Any) -> Any:
        going_on.wait(120)
        return real(self, file, parts)

    monkeypatch.setattr(MultiHostFolder, "_request", ask)

    def body(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> list[CopyResult | None]:
        save(10)
        threading.Timer(0.2, going_on.set).start()  # the thread is asked to end, and then comes to it
        checkpoints.note_resume(None)
        assert not files(hosts)
        return [save(20), save(30)]

    for first, second in on_hosts(hosts, body):
        assert first is None, "nobody has a copy of step 10"
        assert second is not None and (second.step, second.count_bytes > 0) == (20, True)


def test_a_host_that_replaces_a_lost_one_has_its_part_and_a_copy_before_the_next_save(hosts: Path) -> None:
    def begin(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> Any:
        save(10)
        return checkpoints._files.wait_for_copies()

    on_hosts(hosts, begin)
    assert files(hosts) == of_step(10)
    was = {path: path.read_bytes() for path in hosts.glob("host1/*/step-*/*")}
    shutil.rmtree(hosts / "host1")
    (hosts / "host1").mkdir()

    def go_on(checkpoints: local_checkpoints.LocalCheckpoints, save: Save) -> Any:
        (path,) = checkpoints.find(None)
        checkpoints.note_resume(path)
        return checkpoints._files.wait_for_copies()

    for copied in on_hosts(hosts, go_on):
        assert (copied.step, copied.hosts, copied.problem) == (10, 1, "")
    assert {path: path.read_bytes() for path in hosts.glob("host1/*/step-*/*")} == was
    assert on_hosts(hosts, go_on) == [None, None], "nothing is taken of what two have"
