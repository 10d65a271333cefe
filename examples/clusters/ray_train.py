"""A loop of your own under Ray Train: its workers are the ranks, and Ray makes the process group.

python examples/clusters/ray_train.py

Ray's result has the metrics of what was reported with a checkpoint; `folder` is one that all workers see.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz


def loop(config: dict[str, Any]) -> list[float]:
    """What each worker runs; the process group is there already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = tz.shard(model, optimizer, plan=config["plan"], units=[nn.Linear])
    data, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(config["steps"]):
        x = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(x), x.square().mean(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder := config.get("folder"):
        tz.checkpoint.save(Path(folder, f"step-{len(losses):08d}"), model, optimizer)
    return losses


def main() -> None:
    from ray import train  # type: ignore[import-not-found, unused-ignore]
    from ray.train.torch import TorchConfig, TorchTrainer  # type: ignore[import-not-found, unused-ignore]

    def worker(config: dict[str, Any]) -> None:
        loss, is_first = loop(config)[-1], dist.get_rank() == 0
        saved = train.Checkpoint.from_directory(config["folder"]) if is_first else None
        train.report({"loss": loss}, checkpoint=saved)

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            worker,
            train_loop_config={"plan": "zero3", "steps": 40, "folder": folder},
            scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
            torch_config=TorchConfig(backend="gloo"),  # with GPUs: "cpu:gloo,cuda:nccl"
        )
        result = trainer.fit()
    print(result.metrics, result.checkpoint)


if __name__ == "__main__":
    main()
