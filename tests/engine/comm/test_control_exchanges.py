"""Exchanges of a few numbers: whatever two ranks have come to, both hear it, and nothing is mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import terrazzo as tz
from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels import declared_calls
from terrazzo.engine.labels.label import Label, collective_call, labelled, measuring
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.mesh.axes import Axes
from tests.engine.toys import on_ranks
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

MANY = 5000  # numbers that fit in no row


def along_world() -> Collectives:
    return collectives_for(dist.group.WORLD, torch.device("cpu"), Traffic(), Ledger())


ACTS: dict[str, Callable[[Collectives], Any]] = {
    "two": lambda along: along.maximum(torch.zeros(2, dtype=torch.int64)),
    "many": lambda along: along.maximum(torch.zeros(MANY, dtype=torch.int64)),
    "more": lambda along: along.maximum(torch.zeros(2 * MANY, dtype=torch.int64)),
    "floats": lambda along: along.maximum(torch.zeros(2, dtype=torch.float64)),
    "rows": lambda along: along.gather_rows(torch.zeros(2, dtype=torch.int64)),
    "summed": lambda along: along.reduced(torch.zeros(2, dtype=torch.int64), torch.sum),
    "greatest": lambda along: along.reduced(torch.zeros(2, dtype=torch.int64), torch.amax),
    "sent": lambda along: along.broadcast(torch.zeros(2, dtype=torch.int64)),
    "sent by another": lambda along: along.broadcast(torch.zeros(2, dtype=torch.int64), 1),
    "much sent": lambda along: along.broadcast(torch.zeros(MANY, dtype=torch.int64)),
}
PAIRS = [
    ("two", "many"),
    ("many", "more"),
    ("two", "floats"),
    ("two", "rows"),
    ("summed", "greatest"),
    ("sent", "rows"),
    ("sent", "sent by another"),
    ("much sent", "many"),
]


def what_comes_apart() -> list[str]:
    """What this rank hears of each pair of exchanges, of which the ranks do one each; run by each process."""
    told = []
    for pair in PAIRS:
        along = collectives_for(dist.new_group(), torch.device("cpu"), Traffic(), Ledger())
        with pytest.raises(tz.RanksApart) as apart:
            ACTS[pair[dist.get_rank()]](along)
        told.append(str(apart.value))
        with pytest.raises(tz.RanksApart) as again:
            along.maximum(torch.tensor([dist.get_rank()]))
        assert str(again.value) == told[-1], "what comes next says why there is nothing to exchange by"
    return told


def calls_that_come_apart() -> str:
    """What this rank hears as one makes an average, and the other ends a block of its own; run by each process."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("dp_shard",))
    model, _ = tz.shard(nn.Linear(6, 6), torch.optim.SGD, "zero2", mesh=mesh)
    try:
        if dist.get_rank() == 0:
            tz.EMA(model)
        else:
            with tz.gathered(model, write=True):
                pass
    except tz.RanksApart as apart:
        return str(apart)
    return ""


def in_a_call_that_one_knows() -> str:
    """What this rank hears as one makes a call that the other has not imported; run by each process."""
    along = collectives_for(dist.new_group(), torch.device("cpu"), Traffic(), Ledger())
    here = collective_call("tz.new(model)", "Make it on every rank.") if dist.get_rank() else Label(Purpose.NORM)
    with labelled(here), pytest.raises(tz.RanksApart) as apart:
        along.maximum(torch.zeros(2))
    return str(apart.value)


def what_comes_from_the_first() -> list[int]:
    """Sizes of what the first rank answers in exchanges that give what they should; run by each process."""
    along, rank, sizes, broadcast = along_world(), dist.get_rank(), list[int](), dist.broadcast

    def noting(message: Tensor, *others: Any, **named: Any) -> Any:
        sizes.append(message.nbytes)
        return broadcast(message, *others, **named)

    with mock.patch.object(dist, "broadcast", noting):
        for numel in (0, 3, 128):
            rows = torch.stack([torch.arange(numel), torch.arange(1, 1 + numel)])
            assert torch.equal(along.gather_rows(rows[rank]), rows)
            assert torch.equal(along.maximum(rows[rank].clone()), rows.amax(0))
            assert torch.equal(along.reduced(rows[rank] > 1, torch.sum), (rows > 1).sum(0)), "of another dtype"
            along.broadcast(sent := rows[rank].clone(), 1)
            assert torch.equal(sent, rows[1])
    return sizes


@pytest.mark.processes
def test_each_rank_gets_what_comes_of_all_rows_and_not_the_rows(two_processes: Pool) -> None:
    """So that a meeting of many ranks moves as many rows as these are, and not their square."""
    row = 1040
    for sizes in two_processes.run(what_comes_from_the_first):
        assert sizes == [row] * 8 + [row, 2 * 1024 - 1024, row, row, row], "and of long rows what does not fit in one"


@pytest.mark.processes
def test_whatever_ranks_have_come_to_both_hear_it(two_processes: Pool) -> None:
    """Gloo ends a process when a message is longer than the place for it."""
    for told in two_processes.run(what_comes_apart):
        for (own, others), said in zip(PAIRS, told, strict=True):
            assert "rank 0 at an agreement, as on what all ranks are given (a" in said, (own, others, said)
            assert "; rank 1 at an agreement" in said and said.count("on every rank, in the same order") == 1, said
    for said in two_processes.run(calls_that_come_apart):
        assert "rank 0 at tz.EMA(model); rank 1 at the end of 'with tz.gathered(model, write=True)'." in said
    for said in two_processes.run(in_a_call_that_one_knows):
        assert "rank 0 at the norm of all gradients; rank 1 at tz.new(model)." in said
        assert said.endswith(" Make it on every rank.")


def elsewhere_along_other_axes() -> list[tuple[str, str]]:
    """What a rank hears as one after the other clips where the others make an average; run by each process."""
    told = []
    for elsewhere in range(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model, _ = tz.shard(nn.Linear(6, 6), torch.optim.SGD, "hybrid_shard", mesh=mesh)
        model(torch.ones(2, 6)).sum().backward()
        dist.barrier()
        with pytest.raises(RuntimeError) as apart:
            tz.clip_grad_norm_(model, 1.0) if dist.get_rank() == elsewhere else tz.EMA(model)
        told.append((apart.type.__name__, str(apart.value)))
        dist.barrier()
    return told


@pytest.mark.processes
def test_ranks_apart_along_other_axes_of_a_mesh_all_hear_where_each_is() -> None:
    """Also those that exchange with none who is elsewhere; none waits until its time is over."""
    with Pool(4) as pool:
        of_ranks = pool.run(elsewhere_along_other_axes, timeout_s=60.0)
    for elsewhere, told in enumerate(zip(*of_ranks, strict=True)):
        ((kind, said),) = {*told}
        others = ", ".join(str(rank) for rank in range(4) if rank != elsewhere)
        assert kind == "RanksApart" and f"rank {elsewhere} at the norm of all gradients" in said, said
        assert f"ranks {others} at tz.EMA(model)" in said, said


@pytest.mark.parametrize("elsewhere", [0, 3])
def test_all_ranks_of_all_axes_hear_where_each_is(elsewhere: int) -> None:
    """Also those along whose axis nobody is elsewhere."""

    def body(rank: int) -> str:
        axes = Axes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), Tally())
        label = Label(Purpose.NORM) if rank == elsewhere else collective_call("tz.EMA(model)")
        try:
            with labelled(label):
                (axes.total if rank == elsewhere else axes.broadcast)(torch.zeros(3), axes.data)
                axes.meet(axes.data)  # of ranks whom the values of the first have reached
        except tz.RanksApart as apart:
            return str(apart)
        return ""

    (said,) = {*on_ranks(4, body)}
    others = ", ".join(str(rank) for rank in range(4) if rank != elsewhere)
    assert f"rank {elsewhere} at the norm of all gradients" in said and f"ranks {others} at tz.EMA(model)" in said


OVER: dict[str, Callable[[Axes, Sequence[str]], Any]] = {
    "maximum": lambda axes, over: axes.anywhere(False, over),
    "rows": lambda axes, over: axes.rows(torch.zeros(3), over),
    "broadcast": lambda axes, over: axes.broadcast(torch.zeros(3), over),
    "total": lambda axes, over: axes.total(torch.zeros(3), over),
    "differing": lambda axes, over: axes.differing({"a": 1}, over),
}


@pytest.mark.parametrize("act", OVER)
@pytest.mark.parametrize("fewer", [(0, 2), (3,)])
def test_the_same_over_fewer_axes_is_something_else(act: str, fewer: tuple[int, ...]) -> None:
    """Each would have what is of its own row for what is of all, and nobody would hear of it."""

    def body(rank: int) -> str:
        axes = Axes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), Tally())
        try:
            with labelled(collective_call("tz.EMA(model)")):
                OVER[act](axes, ["dp_shard"] if rank in fewer else axes.data)
                axes.meet(axes.data)  # of ranks whom the values of the first have reached
        except tz.RanksApart as apart:
            return str(apart)
        return ""

    for said in on_ranks(4, body):
        assert "numbers along dp_shard)" in said and "numbers along dp_shard and dp_replicate)" in said, said


@pytest.mark.parametrize("numel", [0, 3, MANY])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32, torch.int64, torch.complex64])
def test_numbers_come_as_they_are(numel: int, dtype: torch.dtype) -> None:
    """In a row, and behind it."""
    of_ranks = [torch.arange(rank, rank + numel).fmod(7).to(dtype) for rank in range(3)]

    def body(rank: int) -> None:
        along, own = along_world(), of_ranks[rank].clone().requires_grad_(dtype.is_floating_point)
        assert torch.equal(along.gather_rows(own.view(1, -1)), torch.stack(of_ranks).unsqueeze(1))
        if not dtype.is_complex and dtype != torch.bool:
            assert torch.equal(along.maximum(own.detach().clone()), torch.stack(of_ranks).amax(0))
        if dtype != torch.bool:
            sent = own.detach().clone()
            along.broadcast(sent, 1)
            assert torch.equal(sent, of_ranks[1])

    on_ranks(3, body)


def test_each_purpose_has_its_words() -> None:
    said = [str(Label(purpose, 1, 2)) for purpose in Purpose]
    assert len({*said}) == len(Purpose) and not [each for each in said if "{" in each]
    assert str(Label(Purpose.EXPERTS_BACK, 1)) == "gradients of what the experts of module 1 gave"


def test_no_number_is_read_by_names_of_other_things() -> None:
    activations = Label(Purpose.ACTIVATIONS, 1, 7, Names(modules=("mlp.up", "mlp.down")))
    assert str(activations) == "activations of 'mlp.down', exchange 7 along their axis"
    assert str(activations.of_code(Label(Purpose.FORWARD, 1, 3).code)) == "the weights of unit 1 for training forward 3"
    end = Label(Purpose.END_OF_BACKWARD, number=3, names=Names(units=("", "blocks.0")))
    assert str(end.of_code(Label(Purpose.GRADIENT, 1, 3).code)).startswith("the gradient of unit 'blocks.0' in")
    assert str(end.of_code(activations.code)).startswith("activations of layer 1,")
    assert str(end.of_code(Label(Purpose.EXPERTS, 1).code)) == "rows for the experts of module 1"
    measure = measuring("embed.weight.norm()")
    assert str(measure.of_code(measure.code)) == "embed.weight.norm()"
    assert str(measure.of_code(measuring("head.bias.sum()").code)) == "another measure"


@mock.patch.dict(declared_calls._declared)
def test_no_two_calls_have_one_number() -> None:
    first = collective_call("tz.model_save(clip)")
    assert collective_call("tz.model_save(clip)") == first
    assert str(Label().of_code(first.code)) == "tz.model_save(clip)", "of all that this process has declared"
    for other in (("tz.end_save(model)",), ("tz.model_save(clip)", "another edit")):  # the first has the same number
        with pytest.raises(ValueError, match="would have the same number in messages"):
            collective_call(*other)


def test_errors_have_the_edits_of_both_places() -> None:
    edits = r"same number of forwards.*asked for on every rank, in the same order"
    with fake_group(2), pytest.raises(tz.RanksApart, match=edits):
        Label(Purpose.END_OF_FORWARD).check_trail([-1, Label(Purpose.FORWARD, 1).code], [-1, 0], 1)
