"""Records of steps: what they add up to, who was waited for, and that nothing else changes by them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.instrumentation.times import Moments, Times
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.exit_codes import STALLED
from terrazzo.telemetry import StepRecorder, has_ended, lines_of
from terrazzo.telemetry.log.exit_note import ExitNote, exit_of, leave_exit
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from tests.helpers.processes import Pool
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.processes

LATE_S = 0.15
MIXTURE = DecoderConfig(
    31,
    dim=16,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_dim=26,
    max_sequence_length=8,
    experts=MixtureConfig(count=2, top_k=2, ffn_dim=16),
)
"""Each token goes to both experts, so that half of the rows leave whatever the router says."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def net() -> tuple[nn.Module, Iterator[torch.Tensor], dict[str, Any]]:
    """A model, its batches, and how it is sharded."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return Net(), iter(lambda: torch.randn(8, 32, generator=generator), None), {"units": [nn.Linear]}


def mixture() -> tuple[nn.Module, Iterator[torch.Tensor], dict[str, Any]]:
    """The same, of a decoder whose experts the ranks share."""
    mesh, tokens = tz.mesh(ep=2, device="cpu"), torch.arange(16).view(2, 8)
    return tz.parallelize(Decoder(MIXTURE), mesh), itertools.repeat(tokens), {"units": [Block], "mesh": mesh}


def trained(plan: str, folder: str | None, late_at: str = "", make: Any = net, steps: int = 3) -> list[float]:
    """Losses of so many steps; rank 1 is late at one place of each, if there is one."""

    def come(where: str) -> None:
        if where == late_at and dist.get_rank() == 1:
            time.sleep(LATE_S)

    torch.manual_seed(0)
    model, batches, how = make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = tz.shard(model, optimizer, plan=plan, **how)
    telemetry = tz.telemetry.attach(model, folder, every=steps) if folder is not None else None
    losses = []
    for _ in range(steps):
        come("forward")
        loss = model(next(batches)).square().mean()
        loss.backward()
        come("clip")
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if telemetry is not None:
        telemetry.close()
    return losses


def record_in(folder: Path) -> dict[str, Any]:
    line, _ = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert (line["kind"], line["step"], line["steps"], line["clock"]) == ("step", 3, 3, "all")
    return dict(line)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_losses_are_the_same_to_the_bit_with_and_without_records(
    two_processes: Pool, tmp_path: Path, plan: str
) -> None:
    plain = two_processes.run(trained, plan, None)
    assert two_processes.run(trained, plan, str(tmp_path)) == plain
    record = record_in(tmp_path)
    for parts in (record["phase_s"], record["cause_s"]):
        assert sum(parts.values()) == pytest.approx(record["step_s"], rel=0.01)
        assert min(parts.values()) > -1e-4
    assert record["phase_s"]["forward"] > 0 and record["phase_s"]["backward"] > 0


@pytest.mark.parametrize("late_at", ["forward", "clip"])
def test_a_wait_for_a_late_rank_stands_apart_wherever_it_is(two_processes: Pool, tmp_path: Path, late_at: str) -> None:
    """Rank 0 writes, and rank 1 is late: in a gather's thread, or in an exchange of a few numbers."""
    two_processes.run(trained, "zero3", str(tmp_path), late_at)
    record = record_in(tmp_path)
    causes = record["cause_s"]
    assert causes["late_peer"] > max(0.8 * LATE_S, causes["gather"] + causes["reduce"])
    phase = {"forward": "forward", "clip": "clip"}[late_at]
    assert record["phase_s"][phase] > 0.8 * LATE_S
    comm = record["comm"]["dp_shard all_gather" if late_at == "forward" else "dp_shard control"]
    assert 0.8 * LATE_S < comm["late_s"] <= comm["exposed_s"]


def test_what_is_sent_is_what_was_promised(two_processes: Pool, tmp_path: Path) -> None:
    """32 × 32 weights and 32 biases in a unit, padded to 128 elements, half on the other rank, four bytes each."""
    two_processes.run(trained, "zero3", str(tmp_path))
    record = record_in(tmp_path)
    unit_bytes = (32 * 32 + 128) // 2 * 4
    assert record["comm"]["dp_shard reduce_scatter"]["sent_bytes"] == 3 * unit_bytes
    for kind, sent in record["promised"]["sent_bytes"].items():
        assert record["comm"][f"dp_shard {kind}"]["sent_bytes"] == sent
    assert record["memory_bytes"]["weight"] == 3 * unit_bytes
    assert record["memory_bytes"]["moments"] >= 2 * 3 * unit_bytes
    assert record["memory_bytes"]["transient"] == record["promised"]["transient"]


def test_rows_of_experts_are_exchanges_whose_seconds_add_up(two_processes: Pool, tmp_path: Path) -> None:
    """Rows of 16 numbers go to experts and come back, and their gradients likewise, in each of two layers."""
    two_processes.run(trained, "zero3", str(tmp_path), "forward", mixture)
    record = record_in(tmp_path)
    rows, causes = record["comm"]["ep all_to_all"], record["cause_s"]
    tokens, ways, layers = 2 * 8, 4, 2
    assert rows["n"] == ways * layers
    assert rows["sent_bytes"] == tokens * 16 * 4 * ways * layers
    assert 0 <= rows["late_s"] < rows["exposed_s"] <= rows["total_s"]
    assert causes["exchange"] == pytest.approx(rows["exposed_s"] - rows["late_s"], rel=1e-6)
    assert sum(causes.values()) == pytest.approx(record["step_s"], rel=0.01)
    assert causes["late_peer"] > 0.8 * LATE_S  # ranks meet before they exchange rows
    assert record["comm"]["ep control"]["late_s"] + record["comm"]["dp_shard all_gather"]["late_s"] > 0.8 * LATE_S


def test_a_wait_is_cut_where_the_last_rank_came() -> None:
    times = Times()
    times.waited(10.0, 14.0, Moments(begun=9.0, ready=13.0, done=14.0))
    assert (times.total_s, times.exposed_s, times.late_s) == (5.0, 4.0, 3.0)
    times.waited(20.0, 21.0, Moments(begun=15.0, ready=16.0, done=20.5))  # all were there long before
    assert (times.exposed_s, times.late_s) == (5.0, 3.0)
    times.waited(30.0, 34.0, Moments(begun=32.0, ready=33.0, done=34.0))  # behind another exchange at first
    assert (times.exposed_s, times.late_s) == (9.0, 4.0)
    assert times.total_s == 5.0 + 5.5 + 4.0, "no less than the host waited"
    times.waited(40.0, 41.0, Moments(begun=40.0, done=41.0))
    assert (times.total_s, times.late_s) == (15.5, 4.0)
    times.waited(50.0, 52.0)  # nobody notes when it was done
    assert (times.total_s, times.exposed_s, times.late_s) == (17.5, 12.0, 4.0)


def test_what_modules_and_the_engine_exchange_along_one_axis_is_one_row() -> None:
    def body(_: int) -> Any:
        model = Net()
        engine = engine_of(tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")[0])
        recorder, traffic = StepRecorder(engine), engine.traffic
        traffic.along["tp"] = Traffic()
        traffic.record("control", 8, axis="tp")
        traffic.along["tp"].record("control", 24)
        recorder.step_done()
        return recorder.record()["comm"]["tp control"]

    assert [(row["n"], row["sent_bytes"]) for row in run_in_threads(2, body)] == [(2, 32)] * 2


def test_records_need_an_optimizer_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "metrics.jsonl").write_text('{"kind": "step", "step": 10}\n')

    def body(rank: int) -> tuple[str, ...]:
        model = tz.shard(Net(), None, plan="zero3")[0]
        with pytest.raises(tz.Misuse) as lacking:
            tz.telemetry.attach(model, tmp_path)
        optimizer: Any = torch.optim.SGD(engine_of(model).units[0].module.parameters())
        tz.attach(model, optimizer)
        with pytest.raises(tz.BadInput) as every:
            tz.telemetry.attach(model, tmp_path, every=0)
        with pytest.raises(tz.BadInput, match="every=True: use 1 or more"):
            tz.telemetry.attach(model, tmp_path, every=True)
        with pytest.raises(tz.BadInput, match="first_step=-1: use 0 or more"):  # on all ranks, of one of them
            tz.telemetry.attach(model, tmp_path, first_step=-rank)
        apart = {"stall_s": (None, 5.0), "first_step": (0, 2), "every": (1, 2), "tensorboard": (False, True)}
        for name, values in apart.items():
            given: dict[str, Any] = {"stall_s": None, name: values[rank]}
            with pytest.raises(tz.RanksApart, match=rf"{name} is .* on rank 0 and .* on rank 1"):
                tz.telemetry.attach(model, tmp_path, **given)
        with pytest.raises(tz.RanksApart, match=r"folder is '.*/0' on rank 0 and '.*/1' on rank 1"):
            tz.telemetry.attach(model, tmp_path / str(rank), stall_s=None)
        assert not (tmp_path / "metrics.jsonl").exists()
        with pytest.raises(tz.BadInput) as folder:
            tz.telemetry.attach(model, tmp_path / "file" / "run")
        with pytest.raises(tz.BadInput) as earlier:
            tz.telemetry.attach(model, tmp_path / "earlier")
        attached = tz.telemetry.attach(model, tmp_path / "own", stall_s=None)
        with pytest.raises(tz.Misuse, match=r"recorded already: call close\(\)"):
            tz.telemetry.attach(model, tmp_path / "second", stall_s=None)
        attached.close()
        tz.telemetry.attach(model, tmp_path / "second", stall_s=None).close()
        return str(lacking.value), str(every.value), str(folder.value), str(earlier.value)

    one, other = run_in_threads(2, body)
    assert one == other
    lacking, every, folder, earlier = one
    assert "found records of an earlier run" in earlier
    assert (tmp_path / "earlier" / "metrics.jsonl").read_text() == '{"kind": "step", "step": 10}\n'
    assert "give one to tz.shard" in lacking
    assert "every=0: use 1 or more" in every
    assert "give it a folder that rank 0 can write into" in folder


def test_a_loop_that_goes_on_keeps_the_records_of_its_earlier_steps(tmp_path: Path) -> None:
    def life(rank: int, first_step: int) -> None:
        model, optimizer = tz.shard(*_subject(), plan="zero1")
        telemetry = tz.telemetry.attach(model, tmp_path, every=2, first_step=first_step)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        telemetry.close()

    for first_step in (0, 2):
        run_in_threads(2, functools.partial(life, first_step=first_step))
        assert exit_of(tmp_path) is None, "of a run that goes on, `terrazzo watch` would say that it has ended"
        leave_exit(tmp_path, ExitNote(STALLED, "stuck", "rank 1 does nothing"))
    found = [(line["kind"], line["step"]) for line in lines_of(tmp_path / "metrics.jsonl")]
    assert found == [("step", 2), ("begin", 2), ("step", 4), ("step", 6), ("end", 6)]
    assert has_ended(lines_of(tmp_path / "metrics.jsonl"))


def test_of_several_optimizers_the_one_that_steps_first_ends_steps(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        apart = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
        model, (often, rare) = tz.shard(model, apart, plan="zero1")
        telemetry = tz.telemetry.attach(model, tmp_path, every=2, stall_s=None)
        for step in range(4):
            model(torch.ones(2, 8)).sum().backward()
            for optimizer in (often, rare)[: 1 + step % 2]:
                optimizer.step()
                optimizer.zero_grad()
        telemetry.close()

    run_in_threads(1, body)
    found = [(line["kind"], line["step"]) for line in lines_of(tmp_path / "metrics.jsonl")]
    assert found == [("step", 2), ("step", 4), ("end", 4)]


def test_of_ranks_that_fail_at_once_the_first_note_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (ExitNote(STALLED, "stuck", f"rank {rank}", rank) for rank in range(2))
    dumps = json.dumps

    def overtaken(values: Mapping[str, Any]) -> str:
        if values["rank"] == 1:  # has found no note, and now the other one writes
            leave_exit(tmp_path, first)
        return dumps(values)

    monkeypatch.setattr("json.dumps", overtaken)
    leave_exit(tmp_path, second)
    assert exit_of(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_a_note_is_left_where_files_have_one_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError("a file system without links")

    monkeypatch.setattr(os, "link", no_links)
    first, second = (ExitNote(STALLED, "stuck", f"rank {rank}", rank) for rank in range(2))
    leave_exit(tmp_path, first)
    leave_exit(tmp_path, second)
    assert exit_of(tmp_path) == first


def _subject() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
