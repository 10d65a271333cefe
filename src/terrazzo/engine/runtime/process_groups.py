"""What torch knows of a process group: its backends by kind of device, and how long ranks wait for each other."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["backends_by_device", "timeout_s_of"]


def backends_by_device(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The backend of each kind of device that the group exchanges tensors of, such as `gloo`; by default of all ranks.

    `init_process_group()` without a backend, and with `cuda:nccl`, makes a group for CUDA tensors alone.
    """
    pairs = str(dist.get_backend_config(group)).split(",")
    return dict(pair.split(":") for pair in pairs if ":" in pair)


def timeout_s_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """How long ranks of the group, or all ranks, wait for each other, with tensors on that device."""
    group = dist.group.WORLD if group is None else group
    assert group is not None, "ranks have a group"
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # a backend that knows of none
        timeout = dist.default_pg_timeout
    return timeout.total_seconds()
