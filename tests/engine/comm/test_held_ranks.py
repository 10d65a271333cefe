"""A rank that stands still: for longer than the group's timeout, or shorter; what it is told when it comes back."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes

TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Not the session's: ranks that were stopped are not lent to others."""
    with Pool(2) as ranks:
        yield ranks


def meet(along: Collectives) -> str:
    """How a gather ends, and after how many timeouts."""
    begun = time.monotonic()
    try:
        Transfer(along.all_gather(torch.zeros(16))).finish()
    except (ConnectionError, RuntimeError) as error:
        return f"{error} after {(time.monotonic() - begun) // (2 * TIMEOUT_S):.0f}"
    return "done"


def wait_for(process: int, state: str) -> None:
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


def stopped(near: str) -> list[str]:
    """Rank 1 is stopped before its second gather, and goes on when rank 0 has given up."""
    with patch.dict("os.environ", {"TERRAZZO_PEER_MEMORY": near}):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        along = collectives_for(group, torch.device("cpu"), Traffic(), Ledger())
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    ends = [meet(along)]
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return [*ends, meet(along)]
    wait_for(processes[1], "T")
    ends.append(meet(along))
    os.kill(processes[1], signal.SIGCONT)
    return ends


@pytest.mark.parametrize("near", ["1", "0"], ids=["neighbours", "gloo"])
def test_a_stopped_rank_is_told_of_in_time_and_cannot_go_on_alone(pool: Pool, near: str) -> None:
    survivor, held = pool.run(stopped, near)
    assert survivor[0] == held[0] == "done"
    for _, end in (survivor, held):
        assert end != "done"
        assert end.endswith("after 0"), "longer than two timeouts"
    if near == "1":
        assert re.match(r"Rank 1 has not come to this gather in time: its process \d+ is stopped by a sig", survivor[1])


def hold_the_interpreter() -> str:
    """Rank 1 runs native code that does not let go of the interpreter, for half the timeout."""
    group = dist.new_group(timeout=timedelta(seconds=4 * TIMEOUT_S))
    along = collectives_for(group, torch.device("cpu"), Traffic(), Ledger())
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).usleep(int(TIMEOUT_S * 1e6))
    return meet(along)


def test_a_rank_that_holds_its_interpreter_is_waited_for(pool: Pool) -> None:
    assert pool.run(hold_the_interpreter) == ["done", "done"]
