"""Wardens of several machines: what they tell each other, and who is not heard any more."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from terrazzo.telemetry.watchdog import warden_links
from terrazzo.telemetry.watchdog.other_machines import OtherMachines
from terrazzo.telemetry.watchdog.rank_progress import RankProgress
from terrazzo.telemetry.watchdog.stall import Stall
from terrazzo.telemetry.watchdog.warden_links import RunMachine, WardenLinks
from terrazzo.telemetry.watchdog.watchdog import Patience
from tests.telemetry.test_watchdog import Ranks


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warden_links, "_EVERY_S", 0.02)
    monkeypatch.setattr(warden_links, "SILENT_S", 0.3)


class WardenUnderTest:
    """A warden's side of the network, with one rank that waits for the other's."""

    def __init__(self, number: int, listeners: list[socket.socket], ranks: Ranks) -> None:
        places = [RunMachine("ab"[each], "127.0.0.1", listeners[each].getsockname()[1], [each]) for each in range(2)]
        self.number, self.links = number, WardenLinks(places, number, "key", listeners[number])
        self.others, self.progress = OtherMachines(self.links, Patience(0.5, 600)), RankProgress()
        self.progress.take(ranks.tails[number].table, ranks.tails[number].flight().events)
        self.progress_of = {0: RankProgress(), 1: RankProgress(), number: self.progress}

    def message(self) -> dict[str, Any]:
        facts = {"state": "S", "traced": False, "drive": False, "used": 1.5, "left": False, "table": {}}
        facts = facts | {"newest": self.progress.newest, "progress": self.progress.to_json()}
        return {"ranks": {self.number: facts}}

    def look(self) -> Stall | None:
        self.others.send(self.message())
        if (facts := self.others.take_reports(self.progress_of)) is not None:
            return facts
        return self.others.cut_off({self.number: self.progress}) if self.others.any_silent(print) else None


@pytest.fixture
def machines(quick: None) -> Iterator[list[WardenUnderTest]]:
    ranks, listeners = Ranks(2), [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ranks.step()
    ranks.wait(0)
    ranks.wait(1)
    made = [WardenUnderTest(number, listeners, ranks) for number in range(2)]
    deadline = time.monotonic() + 20
    while [each for each in made if each.look() or each.links.report_of(1 - each.number) is None]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield made
    for each in made:
        each.links.leave({}, "ended")
    ranks.close()


def found(machine: WardenUnderTest) -> Stall:
    deadline = time.monotonic() + 20
    while (stall := machine.look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return stall


def test_where_ranks_stand_arrives_as_it_was_told(machines: list[WardenUnderTest]) -> None:
    one, other = machines
    one.others.take_reports(one.progress_of)
    there = one.progress_of[1]
    (key,) = there.waits
    assert there.words(key) == other.progress.words(key)
    assert (there.phase, there.steps, there.step, there.has_come_to(key)) == ("backward", 1, 811, True)
    assert abs(there.newest - other.progress.newest) < 1e9
    assert one.others.system.state(one.others.system.pid(1)) == "S"
    assert one.others.system.processor_s(one.others.system.pid(1)) == 1.5


def test_a_machine_that_is_not_heard_and_is_waited_for_is_cut_off(machines: list[WardenUnderTest]) -> None:
    """Its warden goes without a word, as where the power or the network fails."""
    one, other = machines
    other.links._message = ""
    stall = found(one)
    assert (stall.cause, list(stall.ranks), stall.is_final) == ("partition", [1], True)
    assert re.match(
        r"Host b, of rank 1, is cut off from this one: it has not been heard for \d s\. Missing from all_gather 91 on"
        r" dp_shard, unit layers\.7, backward, step 812\. Rank 0 has waited \d+ s\. Either that machine is lost",
        stall.text,
    ), stall.text


def test_what_one_warden_has_found_ends_the_ranks_of_all(machines: list[WardenUnderTest]) -> None:
    one, other = machines
    other.others.leave(other.message(), Stall("stuck", [1], "Rank 1 does nothing."))
    assert found(one) == Stall("stuck", [1], "Rank 1 does nothing.")


def test_strangers_are_not_listened_to(machines: list[WardenUnderTest]) -> None:
    one, other = machines
    place = other.links.others[0]
    facts = json.dumps(
        {"machine": 1, "now": 0, "message": {"ranks": {}, "leaves": "stall", "stall": ["lost", [], "no"]}}
    )
    with socket.create_connection((place.address, place.port)) as stranger:
        stranger.sendall(f"other\n{facts}\n".encode())
        assert stranger.recv(1) == b"", "it is hung up on"
    assert one.look() is None


@pytest.mark.parametrize(
    ("address", "reached", "cut"),
    [
        ("192.0.2.1", [1], True),  # for documentation: nobody has it
        ("192.0.2.1", [], False),  # as behind a firewall
        ("127.0.0.1", [1], False),  # its kernel answers that nobody listens: its warden is still to come
    ],
)
def test_a_machine_that_was_reached_and_never_heard_is_cut_off_where_its_kernel_answers_nothing(
    address: str, reached: list[int], cut: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection

    def create_connection(place: tuple[str, int], timeout_s: float) -> socket.socket:
        if place[0] == "192.0.2.1":
            raise TimeoutError
        return connect(place, timeout_s)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    ranks, listener = Ranks(2), socket.create_server(("127.0.0.1", 0))
    gone = socket.create_server(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in (listener, gone)]
    places = [RunMachine("a", "127.0.0.1", ports[0], [0]), RunMachine("b", address, ports[1], [1])]
    gone.close()
    ranks.step()
    ranks.wait(0)
    progress = RankProgress()
    progress.take(ranks.tails[0].table, ranks.tails[0].flight().events)
    others = OtherMachines(WardenLinks(places, 0, "key", listener, reached), Patience(0.5, 600))
    deadline, found = time.monotonic() + (20 if cut else 1.0), None
    while found is None and time.monotonic() < deadline:
        assert others.any_silent(print)
        found = others.cut_off({0: progress})
        time.sleep(0.02)
    assert (found is not None) is cut
    if found is not None:
        assert (found.cause, list(found.ranks)) == ("partition", [1])
    others.leave({}, None)
    ranks.close()


def test_who_listens_is_reached_and_nobody_behind_one_who_does_not() -> None:
    there, gone = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    ports = [each.getsockname()[1] for each in (there, gone)]
    gone.close()
    places = [RunMachine(host, "127.0.0.1", port, []) for host, port in zip("abc", (1, *ports), strict=True)]
    assert list(warden_links.reached_of(places, 0)) == [1]
    assert list(warden_links.reached_of([places[0], places[2], places[1]], 0)) == []
    there.close()
