"""A long run keeps its threads, descriptors, memory and files; a model that is dropped gives all of them back."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine.census import census, live_bytes
from tests.engine.offload.runs import MODES, SMALL_BLOCK, TIERS
from tests.engine.toys import Net, adamw, train
from tests.helpers.fake import fake_group

pytestmark = pytest.mark.alone  # threads and tensors of other tests would be counted


class Held(NamedTuple):
    """By this process."""

    threads: int
    descriptors: int
    tensors: int


def held() -> Held:
    gc.collect()
    tensors = sum(1 for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    return Held(threading.active_count(), len(os.listdir("/proc/self/fd")), tensors)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def built(folder: Path, tiers: str, mode: Any = "overlapped") -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 80), nn.Tanh(), nn.Linear(80, 64))
    offload = tz.Offload(path=folder, step=mode, block_mib=SMALL_BLOCK, depth=2, direct=False)
    plan = tz.Plan.named("zero3").on(**TIERS[tiers])
    offload = offload.used_under(plan)
    return tz.shard(model, adamw(model.parameters()), plan, units=[nn.Linear], offload=offload, precision="bf16")


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("tiers", ["cpu-all", "all on nvme"])
def test_many_steps(tiers: str, steps: int, tmp_path: Path) -> None:
    """Clipped, and accumulated from two micro-batches now and then."""
    x = torch.randn(4, 8)
    with fake_group(1):
        model, optimizer = built(tmp_path, tiers)
        usage, now = engine_of(model).store.usage, []
        for number in range(steps):
            if number % 10 == 0:
                with tz.accumulate(model):
                    model(x).square().mean().backward()
            model(x).square().mean().backward()
            tz.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if number in (steps // 2, steps - 1):
                engine_of(model).settle()
                now.append((held(), resident_bytes(), {k: v for k, v in usage().items() if "bytes" in k}))
        (first, first_rss, first_usage), (last, last_rss, last_usage) = now
        assert last == first
        assert last_rss - first_rss < 4 * 2**20
        assert {k: v for k, v in last_usage.items() if not k.startswith(("read", "written"))} == {
            k: v for k, v in first_usage.items() if not k.startswith(("read", "written"))
        }
        assert usage()["stepped_numel"] >= steps * sum(p.numel() for p in model.parameters())


def until(condition: Callable[[], bool]) -> None:
    """Threads end a moment after their owners."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def no_threads() -> bool:
    """But the one that stays."""
    names = {thread.name for thread in threading.enumerate()} - {"terrazzo-reaper"}
    return not any(name.startswith("terrazzo") for name in names)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tiers", ["cpu", "all on nvme", "shares"])
def test_a_dropped_model_gives_everything_back(tiers: str, mode: str, tmp_path: Path) -> None:
    """Without the garbage collector, an update under way or not."""

    def files() -> int:
        return len(list(tmp_path.iterdir()))

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    gc.collect()
    until(no_threads)  # of earlier tests
    with fake_group(1):
        built(tmp_path, tiers, mode)  # what is begun once has begun
        until(lambda: no_threads() and files() == 0)
        threads, descriptors = held()
        for number in range(3):
            with census():
                model, optimizer = built(tmp_path, tiers, mode)
                assert files() == (tiers != "cpu")
                for _ in range(number):
                    model(torch.randn(4, 8)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                del model, optimizer
                until(lambda: live_bytes() == 0)
            until(lambda: files() == 0)
            until(lambda: held()[0] <= threads and held()[1] <= descriptors)


def test_a_model_that_failed_gives_everything_back(tmp_path: Path) -> None:
    """The error's own traceback is all that may still hold it."""
    with fake_group(1):
        torch.manual_seed(0)
        model = Net(width=96)
        offload = tz.Offload(path=tmp_path, block_mib=SMALL_BLOCK, direct=False)
        model, optimizer = tz.shard(model, adamw(model.parameters()), "zero3@nvme-all", offload=offload)
        train(model, optimizer, 1, 0)
        os.truncate(next(tmp_path.iterdir()), 0)
        with pytest.raises(tz.SwapFailed):
            train(model, optimizer, 2, 0)
        del model, optimizer

    def gone() -> bool:
        gc.collect()  # errors and the frames they came through hold each other
        return no_threads() and not list(tmp_path.iterdir())

    until(gone)
