"""This rank's place in the run, the process group, and the agreement of all ranks on the configuration and the data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from terrazzo.config import Config, LaunchConfig, setting_texts, without_passwords
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.exchange import gather_json
from terrazzo.launch import environment, machine
from terrazzo.launch.rank.rendezvous import meet, waiting_is_said
from terrazzo.messages import listed, of_ranks

__all__ = ["Ranks", "agree_on_config", "agree_on_data", "join"]


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run: `rank` of `world_size`, on `device`, number `local_rank` on its machine."""

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    @property
    def builds_shared_files(self) -> bool:
        """Whether this is the first rank of its machine, which builds files that the others there read."""
        return self.local_rank == 0


def join(launch: LaunchConfig) -> Ranks:
    """Join the process group that the environment describes: gloo for CPU tensors, NCCL for CUDA tensors.

    Raises:
        BadInput: this rank was not told where it is, the ranks cannot meet at the address that they were given, or
            some do not come, or with another kind of device; there are fewer CUDA devices here than ranks.
    """
    environment.require_environment()
    rank, world_size, local_rank = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), environment.local_rank()
    device = torch.device(machine.resolve_device(launch))
    machine.set_threads(launch, machine.ranks_here(world_size))
    if devices.is_cuda(device):
        device = torch.device("cuda", machine.cuda_index(local_rank))
        devices.set_current(device)
    with waiting_is_said(world_size, launch.timeout_s, local_rank):
        store = meet(rank, world_size, launch.timeout_s)
    timeout = timedelta(seconds=launch.timeout_s)
    backend = devices.backend_for(device.type)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _agree_on_device(device.type)
    return Ranks(rank, world_size, device, local_rank)


def _agree_on_device(kind: str) -> None:
    """Raise `BadInput` on every rank where `launch.device=auto` has found GPUs on some machines only. Collective."""
    kinds = gather_json(kind)
    other = next((rank for rank, theirs in enumerate(kinds) if theirs != kinds[0]), None)
    if other is not None:
        raise BadInput(
            f"launch.device is {kinds[0]} on rank 0 and {kinds[other]} on rank {other}: all ranks compute on one"
            " kind of device. Use launch.device=cpu, or machines that all have GPUs, which `nvidia-smi` lists."
        )


def agree_on_config(config: Config) -> None:
    """Raise `BadInput` on every rank when ranks were given different settings, naming them. Collective."""
    settings = setting_texts(config)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if len(set(gather_json(digest))) == 1:
        return
    raise BadInput(
        f"The configuration differs between ranks in {_differing(gather_json(settings))}. Give every rank the same file"
        " and overrides."
    )


def agree_on_data(described: Mapping[str, str], sources: Sequence[str]) -> None:
    """Raise `BadInput` on every rank when ranks have read different data, or with another tokenizer. Collective.

    Each would train on in its own order of its own samples.

    Args:
        described: what this rank has read, in words for each part of it.
        sources: that they were read from.
    """
    everyone = gather_json(dict(described))
    if any(theirs != everyone[0] for theirs in everyone):
        raise BadInput(
            f"The data differ between ranks in {_differing(everyone)}. Every machine reads its own data.source,"
            f" {listed(without_passwords(list(sources)))}: give each the same files, or put them where all"
            " machines read them."
        )


def _differing(everyone: list[dict[str, str]]) -> str:
    """The keys whose values differ between ranks, with the ranks of each value."""
    differing: list[str] = []
    for key in sorted(set().union(*everyone)):
        values: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            values.setdefault(theirs.get(key, "not set"), []).append(rank)
        if len(values) > 1:
            by_value = "; ".join(f"{value} on {of_ranks(ranks)}" for value, ranks in values.items())
            differing.append(f"{key} ({by_value})")
    return ", ".join(differing)
