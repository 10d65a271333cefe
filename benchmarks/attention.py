"""One layer's attention within a sliding window, beside torch's with a square mask and beside whole causal attention.

Each case is a process of its own, so that its peak of memory is its own: forward and backward of fp32 queries, keys and
values of one sequence, on one thread of a CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.parallel import Context
from terrazzo.telemetry import PeakMemory

HEADS, CHANNELS = 8, 64
KINDS = {
    "window": "tiles within the window",
    "strided": "the same, and every 64th token before",
    "square": "torch, a square boolean mask",
    "causal": "torch, whole causal attention",
}
STRIDE = 64


def attention(kind: str, rows: list[Tensor], window: int) -> Tensor:
    """Of queries, keys and values, `[1, heads, tokens, channels]` each."""
    query, key, value = rows
    tokens = query.shape[2]
    if kind == "causal":
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    if kind == "square":
        distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=(distance >= 0) & (distance < window))
    context = Context(None)
    return context.attend(query, key, value, context.mask(None, tokens, window, STRIDE if kind == "strided" else None))


def measure(kind: str, tokens: int, window: int) -> str:
    """CPU seconds of forward and backward, and what the peak of memory is beyond that of the inputs."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, HEADS, tokens, CHANNELS, generator=draw).requires_grad_() for _ in range(3)]
    warm = [each[:, :, :64].detach().requires_grad_() for each in rows]
    attention(kind, warm, 16).sum().backward()
    memory = PeakMemory(torch.device("cpu"))
    before, start = memory.peak_bytes, time.process_time()
    out = attention(kind, rows, window)
    middle = time.process_time()
    out.backward(torch.ones_like(out))
    end = time.process_time()
    mebibytes = (memory.peak_bytes - before) / 2**20
    return f"| {tokens:,} | {KINDS[kind]} | {middle - start:.2f} | {end - middle:.2f} | {mebibytes:,.0f} |"


def main() -> None:
    """Print a table, or the row of one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--kind", choices=list(KINDS), help="one case, in this process")
    arguments = parser.parse_args()
    if arguments.kind:
        print(measure(arguments.kind, arguments.tokens[0], arguments.window))
        return
    print("| tokens | attention | forward, s | backward, s | peak, MiB |\n|--:|---|--:|--:|--:|")
    for tokens in arguments.tokens:
        for kind in KINDS:
            case = ["--tokens", str(tokens), "--window", str(arguments.window), "--kind", kind]
            subprocess.run([sys.executable, "-m", "benchmarks.attention", *case], check=True)


if __name__ == "__main__":
    main()
