"""Ranks that meet at an address: one that cannot be used, ranks that come late, and ranks that never come."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from terrazzo.errors import BadInput
from terrazzo.train.joining import meet


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, which MASTER_PORT names."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        number: int = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return number


def test_an_address_that_cannot_be_used_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=rf"Rank 1 cannot reach localhost:{port}, .*MASTER_PORT"):
        meet(1, 2, 0.3)
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(BadInput, match="cannot open localhost:70000"):
        meet(0, 2, 0.3)
    monkeypatch.setenv("MASTER_PORT", "many")
    with pytest.raises(BadInput, match="cannot open localhost:many"):
        meet(0, 2, 0.3)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", port))
        taken.listen()
        with pytest.raises(BadInput, match=rf"Rank 0 cannot open localhost:{port}.*in use") as caught:
            meet(0, 2, 0.3)
    assert "\n" not in str(caught.value)


def all_meet(ranks: dict[int, float], world_size: int, timeout_s: float) -> dict[int, str]:
    """How ranks fare that come after so many seconds."""
    met = threading.Barrier(len(ranks))

    def come(rank: int) -> str:
        time.sleep(ranks[rank])
        try:
            store = meet(rank, world_size, timeout_s)
        except BadInput as error:
            return str(error)
        store.set(f"seen/{rank}", "1")
        store.wait([f"seen/{number}" for number in ranks])
        met.wait(20)  # the first rank's store is the others'
        return "met"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(come, ranks), strict=True))


def test_ranks_that_come_late_are_waited_for(port: int) -> None:
    assert set(all_meet({0: 0.2, 1: 0.0, 2: 0.5}, 3, 20.0).values()) == {"met"}


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    for said in all_meet({0: 0.0, 2: 0.1, 4: 0.0}, 5, 1.0).values():
        assert said.startswith(f"Ranks 1, 3 have not come to localhost:{port}, ")
