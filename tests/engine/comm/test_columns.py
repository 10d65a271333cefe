"""Exchanges over many machines: the same bits as if every rank sent to every other, in fewer messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.host import columns, neighbours
from terrazzo.engine.comm.host.announced_data import Stamp
from terrazzo.engine.comm.host.columns import ROUNDS, Columns, columns_of
from terrazzo.engine.comm.host.gloo import GlooCollectives
from terrazzo.engine.comm.host.neighbours import Memory, find_neighbours
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import RanksApart
from tests.engine.comm.test_collectives import check_everything
from tests.helpers.processes import Pool
from tests.helpers.threads import in_threads

CHUNK = 37


def is_of_data(tag: int) -> bool:
    """Beside announcements."""
    return tag % 4 >= 2


class Counting:
    """A process group that counts messages, and how many are under way."""

    def __init__(self, group: Any) -> None:
        self.group, self.sent, self.under_way, self.most = group, 0, 0, 0

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        self.sent += is_of_data(tag)
        return self._noted(self.group.send(tensors, rank, tag), tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        return self._noted(self.group.recv(tensors, rank, tag), tag)

    def _noted(self, work: Any, tag: int) -> Any:
        if not is_of_data(tag):
            return work
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        class Noted:
            def wait(_) -> None:
                work.wait()
                self.under_way -= 1

        return Noted()


def on_gloo(machines: Sequence[int], body: Callable[[int, Any, Any], Any]) -> list[Any]:
    """`body(rank, group, all_gather)` on ranks that are threads, with real gloo between them."""
    count, store = len(machines), dist.HashStore()
    barrier, box = threading.Barrier(count, timeout=60), [torch.empty(0)] * count
    local = threading.local()

    def run(rank: int) -> Any:
        def all_gather(values: Tensor) -> Tensor:
            box[rank] = values
            barrier.wait()
            rows = torch.stack(box)
            barrier.wait()
            return rows

        local.rank = rank
        group = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=60))
        return body(rank, group, all_gather)

    with patch.object(neighbours, "_machine", lambda: machines[local.rank]), patch.object(columns, "MANY_FAR", 1):
        return in_threads(barrier, run)


def contribution(rank: int, count: int) -> Tensor:
    """Of sizes that make another order of sums another result."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count * CHUNK, generator=generator) * 10.0 ** (rank % 5)


def both_ways(machines: Sequence[int]) -> list[tuple[Columns, int, int]]:
    """Check a gather and a reduction on each rank; its table, the messages that it sent, and most under way."""
    count = len(machines)
    parts = [contribution(rank, count) for rank in range(count)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part

    def body(rank: int, group: Any, all_gather: Any) -> tuple[Columns, int, int]:
        near = find_neighbours(rank, range(count), all_gather, ("gather", "reduce"), 60.0)
        table = columns_of(rank, range(count), near, all_gather)
        assert table is not None
        near = near if table.width > 1 else {}
        counting: Any = Counting(group)
        full = torch.zeros(count, CHUNK)
        full[rank] = parts[rank][:CHUNK]
        table.gather(counting, Stamp.of(Label(), False, 0, 1), near, full.view(-1))
        assert torch.equal(full, torch.stack([part[:CHUNK] for part in parts]))
        sums: list[Tensor] = []

        def add(sources: Sequence[Tensor | Memory]) -> None:
            values = [s.read(0, torch.empty(CHUNK)) if isinstance(s, Memory) else s.clone() for s in sources]
            begun = values[0]
            for value in values[1:]:
                begun = begun + value
            sums.append(begun)

        table.reduce(counting, Stamp.of(Label(), False, 1, 1), near, parts[rank].clone(), add)
        assert torch.equal(sums[0], total.view(count, CHUNK)[rank])
        return table, counting.sent, counting.most

    return on_gloo(machines, body)


def test_ranks_of_machines_form_columns() -> None:
    for rank, (table, sent, _) in enumerate(both_ways([1, 1, 2, 2, 3, 3])):
        assert table.rows == [[0, 1], [2, 3], [4, 5]]
        assert rank in table.own_row
        assert sent == 2 * 2, "a gather and a reduction, to each other machine once"


def test_ranks_of_a_machine_need_not_be_consecutive() -> None:
    assert [table.rows for table, _, _ in both_ways([1, 2, 2, 1])] == [[[0, 3], [1, 2]]] * 4


def test_ranks_without_neighbours_exchange_in_rounds() -> None:
    for table, sent, most in both_ways([0] * 7):
        assert table.width == 1
        assert sent == 2 * 6
        assert most == 2 * ROUNDS


def test_machines_of_different_sizes_exchange_in_rounds() -> None:
    assert all(table.rows == [[0], [1], [2], [3], [4]] for table, _, _ in both_ways([1, 1, 1, 2, 2]))


def test_few_far_ranks_need_no_columns() -> None:
    assert (
        columns_of(0, range(33), [], lambda own: torch.stack([own, *(torch.tensor([n, 1]) for n in range(32))])) is None
    )


def through_columns(width: int) -> tuple[int, int]:
    """Everything that collectives promise, by columns of machines of `width` ranks; and most memory for a sum."""
    machine = dist.get_rank() // width + 1 if width > 1 else 0
    with patch.object(neighbours, "_machine", lambda: machine), patch.object(columns, "MANY_FAR", 1):
        check_everything()
        ledger = Ledger()
        along = collectives_for(dist.group.WORLD, torch.device("cpu"), Traffic(), ledger)
        assert isinstance(along, GlooCollectives)
        assert along._columns is not None
        assert along._columns.width == width
        Transfer(along.reduce_scatter(torch.ones(4 * CHUNK), torch.float32)).finish()
        assert along.receive_bytes(4 * CHUNK * 4) == ledger.peak_bytes
        return ledger.peak_bytes // (CHUNK * 4), ledger.live_bytes


@pytest.mark.processes
def test_collectives_by_columns() -> None:
    with Pool(4) as pool:
        assert pool.run(through_columns, 2, timeout_s=240) == [(2 + 1 + 2, 0)] * 4
        assert pool.run(through_columns, 1, timeout_s=240) == [(3, 0)] * 4


def of_another_size() -> str:
    """What a rank hears where the last one's data are longer; run by each process, of machines of their own."""
    with patch.object(neighbours, "_machine", lambda: 0), patch.object(columns, "MANY_FAR", 1):
        along: Any = collectives_for(dist.group.WORLD, torch.device("cpu"), Traffic(), Ledger())
    assert along._columns is not None
    chunk = CHUNK + (dist.get_rank() == 2)
    with pytest.raises(RanksApart) as apart:
        Transfer(along.all_gather(torch.zeros(3 * chunk)), Label(Purpose.GRADIENT, 1, 5)).finish()
    return str(apart.value)


@pytest.mark.processes
def test_columns_refuse_data_of_another_size_and_all_hear_it_at_once() -> None:
    """Also a rank whose data have come, and which waits until its own have gone; a message too long ends gloo."""
    with Pool(3) as pool:
        for said in pool.run(of_another_size, timeout_s=240):
            gradient = "at the gradient of unit 1 in backward 5, the last of its step"
            assert f"{gradient} ({4 * CHUNK} bytes)" in said and f"{gradient} ({4 * CHUNK + 4} bytes)" in said, said
