"""What threads hide, on two real gloo processes: routes that differ, retries, accumulation, evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine.toys import TABLE_1D, Net, adamw, assert_close, batch, full_parameters, loss_of, sharded, train
from tests.helpers.cover import places
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes


class Route(Net):
    """`use` names the blocks that run; `fail` raises in the backward of the first."""

    use: tuple[int, ...] = (0, 1, 2)
    fail = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, index in enumerate(self.use):
            x = self.blocks[index](x)
            if self.fail and number == 0:
                x.register_hook(_raise)
        return self.head(x)


def _raise(grad: Tensor) -> None:
    raise ZeroDivisionError


Move = tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]
ALL = ((0, 1, 2), (0, 1, 2))

SCRIPTS: dict[str, list[Move]] = {
    "plain": [("step", ALL)] * 3,
    "routes that differ": [("step", ((0,), (1, 2))), ("step", ((0, 1, 2), (2,))), ("step", ((1,), (1,)))],
    "evaluation between": [("evaluate", ALL), ("step", ALL), ("evaluate", ((0,), (1, 2))), ("step", ALL)],
    "accumulation": [("accumulate", ALL), ("step", ALL), ("accumulate", ((0, 1), (1, 2))), ("step", ((2,), (0,)))],
    "a backward that raises": [("step", ALL), ("fail", ALL), ("step", ALL), ("fail", ((0, 1), (0, 1))), ("step", ALL)],
    "forwards that lead nowhere": [("forward", ALL), ("step", ALL), ("forward", ((0,), ())), ("step", ALL)],
}


def _play(model: Any, optimizer: Any, script: list[Move], rank: int) -> None:
    for number, (action, routes) in enumerate(script):
        model.use, tokens = routes[rank], batch(number, rank)
        if action == "evaluate":
            with torch.no_grad():
                loss_of(model, tokens)
        elif action == "forward":
            loss_of(model, tokens)
        elif action == "fail":
            model.fail = True
            with pytest.raises(ZeroDivisionError):
                loss_of(model, tokens).backward()
            model.fail = False
            optimizer.zero_grad()
        elif action == "accumulate":
            with tz.accumulate(model):
                loss_of(model, tokens).backward()
        else:
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


def _play_alone(model: Any, script: list[Move]) -> dict[str, Tensor]:
    """Both ranks' losses, averaged, in one process; actions that leave no trace are left out."""
    optimizer = adamw(model.parameters())
    for number, (action, routes) in enumerate(script):
        if action not in ("step", "accumulate"):
            continue
        losses = []
        for rank in range(2):
            model.use = routes[rank]
            losses.append(loss_of(model, batch(number, rank)))
        torch.stack(losses).mean().backward()
        if action == "step":
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


def _run(base: nn.Module, plan: str, script: list[Move]) -> tuple[dict[str, Tensor], int]:
    model, optimizer = sharded(base, plan)
    _play(model, optimizer, script, dist.get_rank())
    return full_parameters(model), engine_of(model).tally.ledger.live_bytes


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("plan", TABLE_1D)
def test_scripts_end_where_one_process_ends(two_processes: Pool, plan: str, script: str) -> None:
    base = Route()
    wanted = _play_alone(copy.deepcopy(base), SCRIPTS[script])
    for found, live_bytes in two_processes.run(_run, base, plan, SCRIPTS[script], timeout_s=30.0):
        assert_close(found, wanted, 2e-6)
        assert live_bytes == 0


def _twice(plan: str) -> tuple[list[float], list[float], float]:
    base = Net()
    runs = [train(*sharded(base, plan, precision="bf16"), 4, dist.get_rank()) for _ in range(2)]
    model, optimizer = sharded(base, plan)
    train(model, optimizer, 1, dist.get_rank())
    return runs[0], runs[1], engine_of(model).traffic.wait_s


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_runs_repeat_bit_for_bit_and_waiting_is_measured(two_processes: Pool, plan: str) -> None:
    for first, second, wait_s in two_processes.run(_twice, plan):
        assert first == second
        assert 0 < wait_s < 10


DTYPES = (torch.int8, torch.uint8, torch.bool, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
DTYPES += (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


def buffers_of_every_kind() -> None:
    model = Net()
    for dtype in DTYPES:
        values = torch.arange(6).reshape(2, 3) + dist.get_rank()
        model.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", values.to(dtype))
    model, _ = sharded(model, "zero3")
    for name, buffer in model.named_buffers():
        expected = torch.arange(6).reshape(2, 3).to(buffer.dtype)
        assert torch.equal(buffer.to(torch.complex64), expected.to(torch.complex64)), name


def test_buffers_of_every_kind_take_the_first_ranks_values(two_processes: Pool) -> None:
    """Backends carry numbers of some kinds only."""
    two_processes.run(buffers_of_every_kind)
