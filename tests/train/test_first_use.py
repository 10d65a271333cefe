"""What a process has resident before its model, measured once libraries have loaded what a step needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from terrazzo.planner.memory.overheads import PROCESS_BYTES, PROCESS_BYTES_UPPER
from terrazzo.train.session.warm_kernels import load_kernels

PROGRAM = """
import torch
import torch.nn.functional as F
from terrazzo.telemetry import resident_bytes
from terrazzo.train.session.warm_kernels import load_kernels
from terrazzo.train.model.decoder import Decoder, DecoderConfig

fresh = resident_bytes()
load_kernels(torch.float32)
loaded = resident_bytes()
model = Decoder(DecoderConfig(64, dim=32, layers=2, heads=2, kv_heads=2, ffn_dim=64, max_sequence_length=32))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.zeros(2, 16, dtype=torch.int64)
F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
optimizer.step()
print(fresh, loaded, resident_bytes())
"""


@pytest.mark.long
def test_a_small_step_takes_a_fraction_of_what_libraries_do() -> None:
    """The model has 30,000 parameters: half a megabyte in all."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout
    fresh, loaded, ended = map(int, told.split())
    assert ended - loaded < 8 * 2**20 < loaded - fresh
    assert 0.75 * PROCESS_BYTES < ended < 1.25 * PROCESS_BYTES < PROCESS_BYTES_UPPER  # what the planner adds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_random_number_is_drawn(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    load_kernels(dtype)
    assert torch.equal(torch.get_rng_state(), before)
