"""A training script for Accelerate.

accelerate launch --config_file examples/migration/accelerate.yaml tools/migration/before_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
    x = torch.randn(512, 64)
    data = DataLoader(TensorDataset(x, x.square().mean(1, keepdim=True)), batch_size=16, shuffle=True)

    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    for epoch in range(4):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1} | loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")

    accelerator.save_state("checkpoint")
    accelerator.save_model(model, "weights")
    accelerator.end_training()


if __name__ == "__main__":
    main()
