"""The flight recorder: what is written while ranks train, what is read back, and the trace that is drawn of it."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import terrazzo as tz
from terrazzo import cli
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import BadInput
from terrazzo.telemetry import flights_of, save_flight, table_of_units, trace_of
from terrazzo.telemetry.flight import folder, ring
from terrazzo.telemetry.flight.recorder import RingRecorder
from terrazzo.telemetry.flight.ring import CAPACITY, EventKind, Flight, FlightEvent, Ring, Tail
from terrazzo.telemetry.flight.spans import spans_of
from terrazzo.telemetry.flight.units import unit_times
from tests.checkpoint.faults import reap, spawn_child
from tests.helpers.processes import Pool
from tests.helpers.threads import run_in_threads
from tests.telemetry.test_steps import Net

TABLE: dict[str, Any] = {
    "rank": 0,
    "world": 1,
    "pid": 1,
    "host": "a",
    "boot": "b",
    "groups": {"": [0]},
    "units": ["", "one", "two"],
    "names": ["forward", "backward", "recompute", "other"],
    "tracks": [],
}


def trained(plan: str, run: str | None, offload: Mapping[str, Any] | None = None, steps: int = 3) -> list[float]:
    """Losses of so many steps of two micro-batches."""
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    more = {"offload": tz.Offload(**offload)} if offload is not None else {}
    model, optimizer = tz.shard(model, optimizer, plan=plan, units=[nn.Linear], **more)
    telemetry = tz.telemetry.attach(model, run) if run is not None else None
    losses = []
    for step in range(steps):
        for _ in range(2):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))
            loss = model(x).square().mean()
            loss.backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if telemetry is not None:
        telemetry.close()
    return losses


@pytest.fixture
def flights(two_processes: Pool, tmp_path: Path) -> list[Flight]:
    two_processes.run(trained, "zero3", str(tmp_path))
    return flights_of(tmp_path)


@pytest.mark.processes
def test_units_and_the_trace_are_found_of_a_run_that_is_named_by_its_metrics(
    flights: list[Flight], tmp_path: Path
) -> None:
    line = {"kind": "step", "step": 3, "steps": 3, "step_s": 1.0, "cause_s": {"compute": 1.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    shown, drawn = (
        CliRunner().invoke(cli.app, [verb, str(tmp_path / "metrics.jsonl")]) for verb in ("verdict", "trace")
    )
    assert "Seconds of a step by unit, rank 0" in shown.output
    assert drawn.output.strip() == str(tmp_path / "trace.json")


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_losses_are_the_same_to_the_bit_with_and_without(two_processes: Pool, tmp_path: Path, plan: str) -> None:
    plain = two_processes.run(trained, plan, None)
    assert two_processes.run(trained, plan, str(tmp_path)) == plain
    assert [flight.table["rank"] for flight in flights_of(tmp_path)] == [0, 1]


@pytest.mark.processes
def test_every_exchange_is_there_and_ranks_have_issued_the_same(flights: list[Flight]) -> None:
    """A step of two micro-batches: three units are gathered for forward and backward, and reduced, each time."""
    one, other = ([told for told in flight.events if told.kind == EventKind.ISSUED] for flight in flights)
    tracks = flights[0].table["tracks"]
    assert tracks == flights[1].table["tracks"]
    for mine, theirs in zip(one, other, strict=True):
        fields = ("track", "ordinal", "unit", "number", "purpose", "value")
        assert [getattr(mine, name) for name in fields] == [getattr(theirs, name) for name in fields]
    counts = [sum(tracks[told.track][1] == kind for told in one) for kind in ("all_gather", "reduce_scatter")]
    assert counts[1] == 3 * 3 * 2  # steps, units, micro-batches
    assert 3 * 3 * 2 < counts[0] <= 2 * 3 * 3 * 2  # what backward begins with is here still
    unit_bytes = (32 * 32 + 128) // 2 * 4  # of the flat space, padded to 128 elements: half of it is sent
    assert {told.value for told in one if tracks[told.track][1] == "reduce_scatter"} == {unit_bytes}
    steps = [told.ordinal for told in flights[0].events if told.kind == EventKind.STEP]
    assert steps == [1, 2, 3]
    micro = {told.micro for told in one if tracks[told.track][1] == "reduce_scatter"}
    assert micro == {1, 2}


@pytest.mark.processes
def test_no_exchange_ends_before_its_last_rank_has_come(flights: list[Flight]) -> None:
    issued: dict[Any, int] = defaultdict(int)
    for flight in flights:
        for told in flight.events:
            if told.kind == EventKind.ISSUED:
                issued[told.track, told.ordinal] = max(issued[told.track, told.ordinal], told.time)
    done = [told for flight in flights for told in flight.events if told.kind == EventKind.DONE]
    assert len(done) >= 2 * (3 * 3 * 2 + 3 * 3 * 2)
    for told in done:
        assert issued[told.track, told.ordinal] <= told.time
        assert told.since <= told.value <= told.time


def rows_of(trace: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    rows: dict[Any, list[Any]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        yield row[0]["cat"], sorted(row, key=lambda event: (event["ts"], -event["dur"]))


@pytest.mark.processes
def test_nothing_overlaps_on_a_row_of_the_trace_but_units_inside_of_units(flights: list[Flight]) -> None:
    trace = json.loads(json.dumps(trace_of(flights, 2)))
    seen = set()
    for group, row in rows_of(trace):
        seen.add(group)
        ends: list[float] = []
        for event in row:
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or (group == "unit" and event["ts"] + event["dur"] <= ends[-1] + 1e-3)
            ends.append(event["ts"] + event["dur"])
    assert seen == {"step", "phase", "unit", "wait", "exchange"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in events) == 0
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["name"] for event in events if event["cat"] == "step"} == {"step 2", "step 3"}
    units = {event["name"] for event in events if event["cat"] == "unit"}
    assert {f"blocks.{index} {doing}" for index in range(3) for doing in ("forward", "backward")} <= units
    assert {"dp_shard all_gather", "dp_shard reduce_scatter"} <= {e["name"] for e in events if e["cat"] == "exchange"}
    assert {"forward", "backward", "clip", "update"} <= {e["name"] for e in events if e["cat"] == "phase"}
    memory = [event["args"]["bytes"] for event in trace["traceEvents"] if event["name"] == "transient memory"]
    assert max(memory) > 0 and len(memory) > 10


@pytest.mark.processes
def test_moves_between_tiers_are_drawn(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(trained, "zero3@nvme", str(tmp_path / "run"), {"path": str(tmp_path)})
    for flight in flights_of(tmp_path / "run"):
        names = {bar.name for bar in spans_of(flight) if bar.group == "tier"}
        assert names == {"update", "read", "write"}


def memory_of_rings() -> list[str]:
    links = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [name for link in links if "terrazzo-flight" in (name := os.readlink(link) if link.is_symlink() else "")]


def attached(run: str) -> int:
    """How many rings there are behind a model that was recorded, and is gone."""
    before = len(memory_of_rings())
    trained("zero2", run, steps=1)
    gc.collect()
    return len(memory_of_rings()) - before


@pytest.mark.processes
def test_nothing_stays_open_behind_a_model_that_is_gone(two_processes: Pool, tmp_path: Path) -> None:
    assert two_processes.run(attached, str(tmp_path)) == [0, 0]


# -- the ring ------------------------------------------------------------------------------------------------------


def test_the_newest_records_are_kept_and_a_follower_that_was_overtaken_goes_on() -> None:
    written = Ring(Ring.memory())
    tail = Tail(written.descriptor)
    assert tail.new() == [] and tail.table == {}
    written.describe(TABLE)
    for number in range(1, 4):
        written.write(EventKind.STEP, 0, (number, 0, 0))
    assert [told.ordinal for told in tail.new()] == [1, 2, 3]
    assert tail.new() == [] and tail.table == TABLE
    for number in range(4, CAPACITY + 10):
        written.write(EventKind.STEP, 0, (number, 0, 0))
    seen = [told.ordinal for told in tail.new()]
    assert len(seen) >= CAPACITY - 1
    assert seen == list(range(CAPACITY + 10 - len(seen), CAPACITY + 10))
    assert [told.ordinal for told in tail.flight().events] == list(range(10, CAPACITY + 10))
    written.write(EventKind.STEP, 0, (7, 0, 0))
    assert [told.ordinal for told in tail.new()] == [7]


def test_a_record_that_is_torn_is_left_out() -> None:
    written = Ring(Ring.memory())
    written.describe(TABLE)
    for number in range(1, 4):
        written.write(EventKind.STEP, 0, (number, 0, 0))
    at = ring._EVENTS_AT + 2 * 64
    written._memory[at + 62 : at + 64] = b"\x07\x07"
    tail = Tail(written.descriptor)
    assert [told.ordinal for told in tail.flight().events] == [1, 3]
    assert [told.ordinal for told in tail.new()] == [1]  # it may be written now


def test_the_memory_of_a_rank_that_was_killed_is_there(tmp_path: Path) -> None:
    descriptor = Ring.memory()

    def body() -> None:
        written = Ring(descriptor)
        written.describe(TABLE | {"folder": str(tmp_path)})
        written.write(EventKind.STEP, 0, (5, 0, 0))
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(spawn_child(body)) == -signal.SIGKILL
    (tmp_path / "flight").mkdir()
    save_flight(Tail(descriptor).flight())
    (flight,) = flights_of(tmp_path)
    assert [told.ordinal for told in flight.events] == [5]
    os.close(descriptor)


def test_a_rank_that_cannot_write_its_flight_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flight").write_text("in the way")

    def body(rank: int) -> None:
        model = nn.Linear(2, 2)
        kept = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero0")
        tz.telemetry.attach(kept[0], tmp_path, stall_s=None).close()

    run_in_threads(1, body)
    begun, ended = (f"'{tmp_path}/flight/rank-00000.{end}' cannot be written" for end in ("live", "ended"))
    said = capfd.readouterr().err
    assert said.count(begun) == said.count(ended) == 1


def test_threads_that_name_things_at_once_lose_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An updater of offloaded states writes beside the thread that trains."""
    dumps, is_slow = json.dumps, threading.Event()

    def slow_of_first(table: Any) -> str:
        text = dumps(table)
        if threading.current_thread().name == "0":
            is_slow.set()
            time.sleep(0.02)  # others add their names before it is put down
        return text

    memory = Ring(Ring.memory())
    recorder = RingRecorder(memory, 0, 1)
    monkeypatch.setattr("json.dumps", slow_of_first)

    def name(thread: int) -> None:
        for number in range(20):
            recorder.track("dp_shard", f"{thread}.{number}", False)
            recorder.moved(f"{thread}.{number}", 0.0, 0)

    threads = [threading.Thread(target=recorder.moved, args=("slow", 0.0, 0), name="0")]
    threads += [threading.Thread(target=name, args=(thread,)) for thread in (1, 2, 3)]
    threads[0].start()
    is_slow.wait()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = sorted(f"{thread}.{number}" for thread in (1, 2, 3) for number in range(20))
    table, events = Tail(memory.descriptor).flight()
    assert sorted(kind for _, kind, _ in table["tracks"]) == wanted
    assert sorted(table["names"]) == [*wanted, "slow"]
    assert sorted(table["names"][event.track] for event in events) == [*wanted, "slow"]
    os.close(memory.descriptor)


def test_a_table_that_cannot_be_read_is_the_one_before_and_events_wait_for_the_first() -> None:
    written = Ring(Ring.memory())
    tail = Tail(written.descriptor)
    written.write(EventKind.STEP, 0, (1, 0, 0))
    assert tail.new() == [], "what its numbers mean is not known"
    written.describe(TABLE)
    assert [told.ordinal for told in tail.new()] == [1]
    start = ring._PAGE + written._place * ring._TABLE_BYTES
    written._memory[start : start + 8] = b"########"
    assert tail.table == TABLE
    os.close(written.descriptor)


def test_names_that_have_no_room_are_left_out() -> None:
    written = Ring(Ring.memory())
    written.describe(TABLE | {"units": ["x" * 100] * 6000})
    assert Tail(written.descriptor).table == TABLE | {"units": []}


# -- what is drawn of it -------------------------------------------------------------------------------------------


def flight_of(*records: tuple[Any, ...], **table: Any) -> Flight:
    """Of (time, event, track, unit, ordinal)."""
    found = []
    for number, (at, event, track, *rest) in enumerate(records):
        unit, ordinal = (*rest, 0, 0)[:2]
        found.append(ring.FlightEvent(at, number + 1, ordinal, 0, 0, 0, unit, 0, 0, event, track, 0, 0, number + 1))
    return Flight(TABLE | table, found)


def test_a_backward_lasts_until_the_next_one_and_what_has_raised_ends_with_what_is_around_it() -> None:
    flight = flight_of(
        (10, EventKind.BEGINS, 0, 0),
        (20, EventKind.BEGINS, 0, 1),  # never ends: its forward raised
        (30, EventKind.ENDS, 0, 0),
        (40, EventKind.BEGINS, 1, 2),
        (50, EventKind.BEGINS, 2, 1),
        (60, EventKind.ENDS, 0, 1),
        (70, EventKind.BEGINS, 1, 1),
        (80, EventKind.PHASE, 3),
        (90, EventKind.ENDS, 0, 2),  # whose beginning is lost
    )
    bars = [(bar.name, bar.start, bar.end) for bar in spans_of(flight) if bar.group == "unit"]
    assert bars == [
        ("one forward", 20, 30),
        ("the root unit forward", 10, 30),
        ("two backward", 40, 50),
        ("one recompute", 50, 60),
        ("one backward", 70, 80),
    ]


def test_clocks_of_other_machines_are_moved_to_where_steps_end() -> None:
    own = flight_of(*((100 * step, EventKind.STEP, 0, 0, step) for step in (1, 2, 3)))
    apart = 5_000_000
    other = flight_of(*((100 * step + apart, EventKind.STEP, 0, 0, step) for step in (2, 3, 4)), rank=1, boot="c")
    events = [event for event in trace_of([own, other], 9)["traceEvents"] if event["ph"] == "X"]
    ends = {(event["pid"], event["name"]): event["ts"] + event["dur"] for event in events}
    assert ends[0, "step 3"] == pytest.approx(ends[1, "step 3"])
    assert ends[1, "step 4"] == pytest.approx(ends[1, "step 3"] + 0.1)


def test_spans_beyond_the_rows_of_a_trace_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = flight_of(*((100 * step, EventKind.STEP, 0, 0, step) for step in (1, 2, 3)))
    drawn = sum(event["ph"] == "X" for event in trace_of([own], 9)["traceEvents"])
    monkeypatch.setattr("terrazzo.telemetry.flight.trace._ROWS", 0)
    assert trace_of([own], 9)["otherData"]["spans_left_out"] == drawn > 0


def test_a_run_that_has_recorded_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no flight record"):
        flights_of(tmp_path)
    (tmp_path / "flight").mkdir()
    ended = tmp_path / "flight" / "rank-00000.ended"
    whole = flight_of((1, EventKind.STEP, 0, 0, 1)).as_bytes()
    ended.write_bytes(whole)
    assert [told.ordinal for told in flights_of(tmp_path)[0].events] == [1]
    ended.write_bytes(whole[:-10])  # a full disk
    assert flights_of(tmp_path)[0].events == []
    no_table = flight_of().as_bytes().replace(b'"rank"', b'"tank"')
    for damaged in (b"of something else", whole[:30], whole[:60], no_table):
        ended.write_bytes(damaged)
        with pytest.raises(BadInput, match="is damaged, or not a flight record of this version"):
            flights_of(tmp_path)


def test_a_run_that_goes_on_is_read_from_its_memory_and_one_of_another_machine_is_not(tmp_path: Path) -> None:
    written = Ring(Ring.memory())
    written.describe(TABLE)
    written.write(EventKind.STEP, 0, (5, 0, 0))
    live = {"pid": os.getpid(), "descriptor": written.descriptor, "boot": folder.boot_id()}
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank-00000.live").write_text(json.dumps(live))
    assert [told.ordinal for told in flights_of(tmp_path)[0].events] == [5]
    result = CliRunner().invoke(cli.app, ["trace", str(tmp_path), "--out", str(tmp_path / "it.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "it.json").read_text())["otherData"] == {
        "ranks": 1,
        "hosts": ["a"],
        "spans_left_out": 0,
    }
    here, there = os.pipe()
    os.write(there, b"not to be read")
    for other in ({"boot": "another"}, {"descriptor": here}, {"descriptor": "../x"}, {"pid": None}):
        (tmp_path / "flight" / "rank-00000.live").write_text(json.dumps(live | other))
        with pytest.raises(BadInput, match="has no flight record"):
            flights_of(tmp_path)
    assert os.read(here, 99) == b"not to be read"
    os.close(here)
    os.close(there)


@pytest.mark.processes
def test_each_unit_has_its_seconds_of_a_step(flights: list[Flight]) -> None:
    """They are no more than the steps took, and what a unit does inside of another is its own."""
    times = unit_times(flights[0])
    assert [each.unit for each in times] == ["blocks.0", "blocks.1", "blocks.2"] or times[0].unit == "the root unit"
    steps = [bar for bar in spans_of(flights[0]) if bar.group == "step"][1:]
    whole = sum(bar.end - bar.start for bar in steps) / 1e9 / len(steps)
    assert 0 < sum(each.total for each in times) <= whole
    assert all(each.forward > 0 and each.backward > 0 for each in times if each.unit != "the root unit")
    assert sum(each.gather_wait for each in times) > 0
    table = table_of_units(flights[0])
    assert table is not None
    assert table.head[:2] == ("unit", "forward")
    assert len(table.rows) == len(times)


def test_a_unit_has_its_own_time_without_those_inside_of_it_and_waits() -> None:
    """In nanoseconds: a root unit from 0 to 100 in the second step, `one` from 10 to 60, which waits from 20 to 30."""
    label, at = (1, 1, int(Purpose.FORWARD)), itertools.count().__next__

    def told(
        kind: EventKind, time: int, track: int = 0, ordinal: int = 0, since: int = 0, of: Any = (0, 0, 0)
    ) -> FlightEvent:
        return FlightEvent(time, at(), ordinal, since, 0, 0, *of, int(kind), track, 0, 1, 0)

    records = [
        told(EventKind.STEP, 0, ordinal=1),
        told(EventKind.BEGINS, 0),
        told(EventKind.BEGINS, 10, of=(1, 0, 0)),
        told(EventKind.ISSUED, 15, ordinal=1, of=label),
        told(EventKind.WAITS, 20, ordinal=1),
        told(EventKind.WAITED, 30, ordinal=1, since=20),
        told(EventKind.ENDS, 60, of=(1, 0, 0)),
        told(EventKind.ENDS, 100),
        told(EventKind.STEP, 200, ordinal=2),
    ]
    table = {**TABLE, "tracks": [["dp_shard", "all_gather", False]]}
    root, one = unit_times(Flight(table, records))
    assert (root.unit, one.unit) == ("the root unit", "one")
    assert [round(1e9 * value) for value in (root.forward, one.forward, one.gather_wait)] == [50, 40, 10]
