"""The example on two ranks, and its checkpoint in one process that nothing launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import programs

pytest.importorskip("accelerate")

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "examples" / "integrations" / "accelerate_script.py"
ALONE = """
import torch
from safetensors.torch import load_file
from torch import nn

from terrazzo.integrations.accelerate import Accelerator

accelerator = Accelerator(plan="zero1")
layers = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
assert accelerator.num_processes == 1
accelerator.load_state("checkpoint")
full = accelerator.get_state_dict(model)
assert all(torch.equal(full[name], values) for name, values in load_file("weights/model.safetensors").items())
assert len(full) == 18
moments = [state for state in optimizer.state.values() if state["exp_avg"].any()]
assert moments and all(state["step"] == 32 for state in moments)
assert scheduler.scheduler.last_epoch == 64
accelerator.backward(model(torch.ones(2, 64)).sum())
optimizer.step()
print("resumed")
"""


def test_the_example_trains_and_one_process_resumes_it(tmp_path: Path) -> None:
    ranks = programs.on_ranks(2, str(SCRIPT), cwd=tmp_path, timeout_s=150)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    printed = [line for rank in ranks for line in rank.stdout.splitlines() if line.startswith("epoch")]
    losses = [float(line.split()[-1]) for line in printed]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    alone = programs.run("-c", ALONE, cwd=tmp_path, timeout_s=150)
    assert (alone.returncode, alone.stdout) == (0, "resumed\n"), alone.stderr
