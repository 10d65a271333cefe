"""What saving and loading take, beside torch.distributed.checkpoint, DeepSpeed and torch.save."""
