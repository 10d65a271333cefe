"""The format as its documentation says it: to a reader that knows nothing but that page; and what reading costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import ModelState
from tests.checkpoint.documented import read_as_documented
from tests.engine.toys import Net, adamw, batch, loss_of
from tests.helpers import programs
from tests.helpers.threads import exclusive, run_in_threads


def test_a_stranger_reads_what_was_written(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, torch.Tensor]:
        with exclusive():
            torch.manual_seed(0)
            model = Net()
            model.register_buffer("seen", torch.arange(5))
            model.empty = nn.Parameter(torch.empty(0, 3))
        model, optimizer = tz.shard(model, adamw(model.parameters()), "zero2", units=["blocks.*"])
        loss_of(model, batch()).backward()
        optimizer.step()
        checkpoint.save(tmp_path / "a", model, optimizer, {"step": 1})
        with tz.gathered(model) as parameters:
            return {name: value.detach().clone() for name, value in parameters.items()}

    weights = run_in_threads(3, body)[0]
    found = read_as_documented(tmp_path / "a")
    assert {name for name, kind in found if kind == "weight"} == set(weights)
    for name, value in weights.items():
        assert np.array_equal(found[name, "weight"], value.reshape(-1).numpy())
    assert found["seen", "buffer"].tolist() == [0, 1, 2, 3, 4]
    assert found["head.weight", "step"].tolist() == [1.0]


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_recipes_with_the_same_masters_exchange_checkpoints_to_the_bit(tmp_path: Path, before: str, after: str) -> None:
    def built(precision: str) -> tuple[nn.Module, Any]:
        with exclusive():
            torch.manual_seed(0)
            model = Net()
        return tz.shard(model, adamw(model.parameters()), "zero1", units=["blocks.*"], precision=precision)

    def masters(model: nn.Module) -> dict[tuple[str, str, int], torch.Tensor]:
        return {(piece.name, piece.kind, piece.start): piece.tensor.clone() for piece in ModelState(model).pieces()}

    def body(rank: int) -> None:
        model, optimizer = built(before)
        loss_of(model, batch()).backward()
        optimizer.step()
        checkpoint.save(tmp_path / "a", model, optimizer, {})
        expected = masters(model)
        model, optimizer = built(after)
        checkpoint.load(tmp_path / "a", model, optimizer)
        found = masters(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        with tz.gathered(model) as parameters:
            compute = torch.bfloat16 if after == "bf16" else torch.float32
            assert parameters["head.weight"].dtype == compute

    run_in_threads(2, body)


MEMORY = """
import sys, torch, terrazzo as tz, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)))  # 16 MiB each
model, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters()), "zero3", units=[torch.nn.Linear])
model(torch.ones(1, 2048)).sum().backward()
optimizer.step()
optimizer.zero_grad()

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

def grown(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    work()
    return status("VmHWM:") - before

path = sys.argv[1] + "/a"
print(grown(lambda: tz.checkpoint.save(path, model, optimizer, {})))
print(grown(lambda: tz.checkpoint.load(path, model, optimizer)))
"""


def test_saving_and_loading_192_mib_take_a_range_of_memory_and_not_the_state(tmp_path: Path) -> None:
    done = programs.run("-c", MEMORY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    save_mib, load_mib = map(float, done.stdout.split())
    assert save_mib < 24, "a block or two, and the lists of parts"
    assert load_mib < 16 * 2 + 24, "one parameter's range, and blocks"
