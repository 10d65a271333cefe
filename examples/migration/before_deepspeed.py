"""A training script for DeepSpeed.

deepspeed examples/migration/before_deepspeed.py
"""

from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)])
inputs = torch.randn(512, 32)
data = TensorDataset(inputs, inputs.roll(1, dims=1))

engine, optimizer, loader, scheduler = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    training_data=data,
    config=str(Path(__file__).with_name("deepspeed.json")),
)

for epoch in range(3):
    for batch, target in loader:
        loss = nn.functional.mse_loss(engine(batch.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"epoch {epoch + 1} | step {engine.global_steps} | loss {loss.item():.4f} | lr {engine.get_lr()[0]:.4f}")

engine.save_checkpoint("checkpoints", client_state={"epoch": epoch})
engine.save_16bit_model("weights", "model.safetensors")
torch.distributed.destroy_process_group()
