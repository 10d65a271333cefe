"""Exchanging small plain values between ranks as JSON: nothing that arrives is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["agree", "gather_json"]


def gather_json(value: Any) -> list[Any]:
    """Every rank's `value` (anything JSON can hold), in rank order, on every rank. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    world_size = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(received, padded)
    return [json.loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(received, sizes, strict=True)]


def agree(problem: str | None) -> str | None:
    """The first rank's problem, on every rank; None when no rank has one. Collective."""
    return next((other for other in gather_json(problem) if other is not None), None)
