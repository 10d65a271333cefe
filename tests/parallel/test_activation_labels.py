"""What modules exchange along `tp` and `cp` belongs together, and is counted of the model that has sent it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.comm.collectives import NativeCollectives
from terrazzo.parallel import Context
from tests.helpers.threaded import ThreadedCollectives
from tests.helpers.threads import exclusive, run_in_threads

PLAN = {"layers.*": "enter", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class Layers(nn.Module):
    """`skipped`: a layer that the next forward leaves out; no input, which ranks compare."""

    skipped: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = x + layer(x)
        return x


def cut(plan: str = "zero0") -> nn.Module:
    mesh = tz.mesh(tp=2)
    with exclusive():
        torch.manual_seed(0)
        model = Layers()
    tz.parallelize(model, mesh, tensor=PLAN, sequence=False)
    return tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, mesh=mesh)[0]


def skipping_layers_of_ones_own(rank: int) -> None:
    model, x = cut(), torch.ones(4, 8)
    model(x).sum().backward()
    model.skipped = rank
    model(x).sum().backward()


def test_ranks_at_other_layers_along_tp_hear_it() -> None:
    with pytest.raises(tz.RanksApart, match=r"activations of 'layers\.[01]\.down'.*must run the same modules"):
        run_in_threads(2, skipping_layers_of_ones_own)


def test_they_hear_it_at_the_end_of_backward_where_messages_carry_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NCCL: ranks compare checksums there."""
    monkeypatch.setattr(ThreadedCollectives, "says_labels", False)
    monkeypatch.setattr(ThreadedCollectives, "_compare_labels", NativeCollectives._leave_trail)
    with pytest.raises(tz.RanksApart, match=r"activations of 'layers\.[01]\.down'.*must run the same modules"):
        run_in_threads(2, skipping_layers_of_ones_own)


@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_ranks_at_other_layers_along_cp_hear_it(mode: str) -> None:
    def on_rank(rank: int) -> None:
        context = Context(dist.group.WORLD, mode)
        rows = torch.ones(1, 2, 4, 8)
        mask = context.mask(context.positions(torch.zeros(1, 8)), 4)
        context.attend(rows, rows, rows, mask, layer=0)
        context.attend(rows, rows, rows, mask, layer=1 + rank)

    with pytest.raises(tz.RanksApart, match=r"activations of layer [12].*must run the same modules"):
        run_in_threads(2, on_rank)


def test_each_model_on_a_mesh_counts_what_it_has_sent() -> None:
    def on_rank(rank: int) -> None:
        first, second = cut(), cut()
        first(torch.ones(4, 8))
        sent = engine_of(first).traffic.by_name()
        assert sent["tp all_reduce"] == 3 * 4 * 8 * 4
        assert "tp all_reduce" not in engine_of(second).traffic.by_name()
        engine_of(second).traffic.reset()
        cut()
        assert engine_of(first).traffic.by_name() == sent

    run_in_threads(2, on_rank)


def test_under_autocast_a_row_with_a_bias_has_the_dtype_of_the_whole_layer() -> None:
    def on_rank(rank: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        tz.parallelize(model, tz.mesh(tp=2), tensor={"0": "colwise", "1": "rowwise"}, sequence=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(torch.ones(2, 8)).dtype == nn.Linear(8, 8)(torch.ones(2, 8)).dtype == torch.bfloat16

    run_in_threads(2, on_rank)
