"""A loop of your own on Lightning's Fabric, with its strategy changed. Runs on two CPU ranks in seconds:

torchrun --nproc-per-node 2 examples/integrations/fabric_script.py
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from terrazzo.integrations.lightning.fabric import TerrazzoStrategy

ACCUMULATED = 2


def main() -> None:
    seed_everything(0, verbose=False)
    fabric = Fabric(strategy=TerrazzoStrategy(plan="zero3"), accelerator="cpu", devices=2)
    fabric.launch()

    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(512, 8)
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True) / 8), batch_size=16))

    state = {"model": model, "optimizer": optimizer, "step": 0}
    for _ in range(3):
        for index, (inputs, targets) in enumerate(data):
            last = (index + 1) % ACCUMULATED == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss / ACCUMULATED)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
    fabric.save("fabric.ckpt", state)
    mean = fabric.all_reduce(loss.detach())
    fabric.print(f"loss {mean:.4f} after {state['step']} steps", flush=True)


if __name__ == "__main__":
    main()
