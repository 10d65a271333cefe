"""What libraries load at a process's first step, loaded before a model has memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from terrazzo.train.model.decoder import Decoder, DecoderConfig

__all__ = ["load_kernels"]


def load_kernels(dtype: torch.dtype) -> None:
    """Run a step of a model of a few numbers on the CPU; no random number is drawn.

    Code of kernels, autograd's threads and their arenas are resident from when they are first used, some 20 to 50 MB.
    They are the process's, whatever it trains, so they are to be there when it is measured what is resident before the
    model: else a small run seems to need several times what it was promised.

    Args:
        dtype: that products are computed in.
    """
    sizes = DecoderConfig(64, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32, max_sequence_length=16)
    with torch.device("meta"):
        model = Decoder(sizes)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.enable_grad():
        F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
