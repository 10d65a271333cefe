"""Lightning's Trainer: its strategy, its checkpoints, and the root around a LightningModule."""
