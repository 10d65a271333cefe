"""Loads what libraries would load at the first step, before the model takes memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from terrazzo.train.model.decoder import Decoder, DecoderConfig

__all__ = ["load_kernels"]


def load_kernels(dtype: torch.dtype) -> None:
    """Run a step of a tiny model on the CPU; no random number is drawn.

    Kernels' code, autograd's threads and their memory arenas become resident when first used: 20 to 50 MB, whatever is
    trained. Loaded here, they count as resident before the model; else a small run would seem to need several times
    what it was promised.

    Args:
        dtype: of matrix products.
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
