"""What the documentation says a run tells is what its lines have, and its programs are there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import torch
from torch import nn

import terrazzo as tz
from terrazzo import cli
from terrazzo.engine import engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.telemetry import StepMetrics, StepRecorder
from tests.helpers.threads import run_in_threads
from tests.test_commands import ROOT

CUDA = {"reserved", "retries", "activations"}
"""What `memory_bytes` has on CUDA alone."""


def a_record(_: int) -> dict[str, Any]:
    model = nn.Linear(4, 4)
    model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="zero3")
    recorder = StepRecorder(engine_of(model))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    recorder.step_done()
    skew = recorder.skew([recorder.numbers()])
    return recorder.record() | {"skew": skew}


def told() -> set[str]:
    """Every name that lines have, as the documentation has them: an exchange's own without its axis and kind."""
    record = run_in_threads(2, a_record)[0]
    found = {f"train.{field.name}" for field in dataclasses.fields(StepMetrics)}
    for name, value in record.items():
        found.add(f"step.{name}")
        inner = next(iter(value.values())) if name == "comm" else value
        found |= {f"step.{name}.{each}" for each in inner} if isinstance(inner, dict) else set()
    return found


def test_each_signal_of_the_table_is_in_the_lines_of_a_run() -> None:
    text = (ROOT / "docs/concepts/step-record.md").read_text().split("## What a run tells")[1]
    names = set(re.findall(r"`((?:step|train)\.[a-z_.]+)`", text))
    of_cuda = {f"step.memory_bytes.{name}" for name in CUDA}
    assert len(names) > 25
    assert names - told() == of_cuda & names
    source = inspect.getsource(devices.allocator) + inspect.getsource(StepRecorder)
    assert all(f'"{name}"' in source for name in CUDA)
    verbs = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    assert set(re.findall(r"`terrazzo (\w+)", text)) <= verbs
