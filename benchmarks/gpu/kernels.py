"""What a GPU's libraries reach: attention by kernel, and a decoder's products by width, forward and backward.

    python -m benchmarks.gpu.kernels [--out kernels.json]

These are inputs of a plan, as a device's peak is: attention's kernel is what torch chooses by device and version. The
operations of causal attention are counted for the lower half alone, 2.5 times as many backward as forward.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.environment import versions
from benchmarks.gpu.rank import timed

__all__ = ["FULL", "TINY", "Sizes", "attention_flops", "measure", "products", "table"]

KERNELS = {
    "torch's choice": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Sizes:
    """What is measured, in `tokens` of a micro-batch.

    Attributes:
        heads: by head size.
        kv_heads: fewer than heads, as Llama 3's, for torch's choice alone.
        calls: timed ones, of which the median counts, each of `within`: so the host is ahead of the shortest.
    """

    heads: tuple[tuple[int, int], ...] = ((64, 32), (128, 32))
    kv_heads: int = 8
    sequences: tuple[int, ...] = (1024, 4096, 16_384)
    widths: tuple[int, ...] = (2048, 4096, 8192)
    tokens: tuple[int, ...] = (4096, 16_384)
    calls: int = 8
    within: int = 5


FULL = Sizes()
TINY = Sizes(((8, 2),), 1, (16,), (32,), (16,), 2, 2)


def measure(device: str = "cuda", sizes: Sizes = FULL) -> dict[str, Any]:
    """Everything, as a record that JSON can hold; TFLOP/s by row."""
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    where = torch.device(device)
    libraries = versions("torch") | {"cuDNN": str(torch.backends.cudnn.version())}
    return {"device": name, "versions": libraries, "sizes": asdict(sizes)} | {
        "attention": list(_attention(where, sizes)),
        "products": list(_products(where, sizes)),
    }


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_flops(batch: int, heads: int, sequence: int, size: int) -> int:
    """Of causal forward: two products of half a square each."""
    return 2 * batch * heads * sequence**2 * size


def _attention(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for (size, heads), sequence in product(sizes.heads, sizes.sequences):
        for kernel, backend in KERNELS.items():
            for kv_heads in (heads, sizes.kv_heads) if backend is None else (heads,):
                row = {"head size": size, "heads": heads, "kv heads": kv_heads, "sequence": sequence, "kernel": kernel}
                try:
                    yield row | _one_attention(device, sizes, row, backend)
                except RuntimeError as error:  # a kernel that is not for this
                    yield row | {"failed": str(error).splitlines()[0]}


def _one_attention(
    device: torch.device, sizes: Sizes, row: dict[str, Any], backend: SDPBackend | None
) -> dict[str, float]:
    size, heads, kv_heads, sequence = (row[key] for key in ("head size", "heads", "kv heads", "sequence"))
    batch = max(1, max(sizes.tokens) // sequence)

    def drawn(count: int) -> Tensor:
        # As a projection leaves it: [batch, sequence, heads, size], seen by heads.
        made = torch.randn(batch, sequence, count, size, device=device, dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    query, key, value = drawn(heads), drawn(kv_heads), drawn(kv_heads)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=kv_heads != heads)

    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        out = forward()
        gradient = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

        forward_s, backward_s = _median_s(forward, device, sizes), _median_s(backward, device, sizes)
    flops = attention_flops(batch, heads, sequence, size)
    rates = {"forward": flops / forward_s, "backward": 2.5 * flops / backward_s}
    rates["both"] = 3.5 * flops / (forward_s + backward_s)
    return {name: rate / 1e12 for name, rate in rates.items()}


# -- products ----------------------------------------------------------------------------------------------------------


def products(width: int) -> dict[str, tuple[int, int]]:
    """In and out of a Llama block's matrices: two key and value heads of an eighth of the width, 3.5 widths between."""
    between = 7 * width // 2
    return {"query, output": (width, width), "key, value": (width, width // 4), "up": (width, between)} | {
        "down": (between, width)
    }


def _products(device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for width, tokens in product(sizes.widths, sizes.tokens):
        for name, (inner, outer) in products(width).items():
            row = {"width": width, "tokens": tokens, "matrix": name, "in": inner, "out": outer}
            yield row | _one_product(device, sizes, tokens, inner, outer)


def _one_product(device: torch.device, sizes: Sizes, tokens: int, inner: int, outer: int) -> dict[str, float]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, weight, gradient = drawn(tokens, inner), drawn(outer, inner), drawn(tokens, outer)
    ways = {
        "forward": lambda: F.linear(x, weight),
        "to inputs": lambda: gradient @ weight,
        "to weights": lambda: gradient.t() @ x,
    }
    seconds = {way: _median_s(call, device, sizes) for way, call in ways.items()}
    flops = 2 * tokens * inner * outer
    rates = {way: flops / each for way, each in seconds.items()} | {"both": 3 * flops / sum(seconds.values())}
    return {name: rate / 1e12 for name, rate in rates.items()}


def _median_s(call: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    def several() -> None:
        for _ in range(sizes.within):
            call()

    several()
    return statistics.median(timed(several, sizes.calls, device)) / sizes.within


# -- the table ---------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Markdown of a record."""
    told = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    parts = [f"{record['device']}; {told}. TFLOP/s in bf16."]
    for name, ways in (("attention", ("forward", "backward")), ("products", ("forward", "to inputs", "to weights"))):
        rows = record[name]
        keys = [key for key in rows[0] if key not in (*ways, "both", "failed")]
        lines = ["| " + " | ".join([*keys, *ways, "both"]) + " |", "|" + "---|" * len(keys) + "--:|" * (len(ways) + 1)]
        for row in rows:
            cells = [f"{row[way]:.0f}" if way in row else "-" for way in (*ways, "both")]
            lines.append("| " + " | ".join([*(str(row[key]) for key in keys), *cells]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: toy sizes, to try it")
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    options = parser.parse_args()
    record = measure(options.device, FULL if options.device == "cuda" else TINY)
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
