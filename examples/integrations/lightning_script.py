"""Lightning with its strategy changed. Runs on two CPU ranks in seconds:

torchrun --nproc-per-node 2 examples/integrations/lightning_script.py
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from terrazzo.integrations.lightning import TerrazzoStrategy  # or: import terrazzo.integrations.lightning, and its name


class Regression(pl.LightningModule):
    """An MLP that learns a sum of squares."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), *[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
        )
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.layers(x)), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def main() -> None:
    pl.seed_everything(0)
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True) / 8), batch_size=16)
    trainer = pl.Trainer(
        strategy=TerrazzoStrategy(plan="zero3"),
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f} after {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
