"""`accelerate.notebook_launcher` on the CPU: its forked ranks train as one process does on all of their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers import programs

pytest.importorskip("accelerate")

pytestmark = pytest.mark.processes

NOTEBOOK = """
import json
import socket

import torch
from accelerate import notebook_launcher
from torch import nn

from terrazzo.integrations.accelerate import Accelerator


def train(steps):
    accelerator = Accelerator(plan="zero3")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        x = torch.full((2, 4), step + accelerator.process_index / 2)
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        with open("losses.json", "w") as file:
            json.dump([accelerator.num_processes, losses], file)


with socket.socket(socket.AF_INET6) as reserved:  # no other process is given its port, and the ranks can open it
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("::", 0))
    notebook_launcher(train, (4,), num_processes=2, use_port=str(reserved.getsockname()[1]))
"""


def test_a_notebook_trains_on_two_forked_ranks(tmp_path: Path) -> None:
    done = programs.run("-c", NOTEBOOK, cwd=tmp_path, timeout_s=150)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for step in range(4):
        loss = model(torch.tensor([[step + 0.0] * 4, [step + 0.5] * 4])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    ranks, losses = json.loads((tmp_path / "losses.json").read_text())
    assert ranks == 2
    assert losses == pytest.approx(expected, rel=1e-5)
