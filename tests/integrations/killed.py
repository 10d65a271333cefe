"""Checkpoints as a kill leaves them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist


def between_renames(path: Path) -> None:
    """The old one has left its name, and the new one does not have it yet. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        path.rename(f"{path}.new-00c0ffee")
        (path.parent / f".{path.name}.replaced-00c0ffee").mkdir()
    dist.barrier()
