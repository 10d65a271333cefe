"""The loss of a head without its logits, beside all logits, torch's own and torchtune's, on one thread of a CPU.

    python -m benchmarks.loss

Each case is a process of its own, so that its peak of memory is its own; contenders take turns. torchtune cuts the
logits, not the products' operands: what it saves is their copies in fp32. Liger-Kernel and Apple's
cut-cross-entropy are written in Triton, which has no CPU: they are not here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.telemetry import PeakMemory

SIZES = ((1024, 256, 16384), (2048, 512, 16000), (8192, 128, 32768))
"""Tokens, width and vocabulary."""
TURNS = 5
CHUNKS = 8
"""Of torchtune's loss, by default."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Torch's `cross_entropy` of all logits, in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def own(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Terrazzo's."""
    return tz.nn.linear_cross_entropy(hidden, weight, targets)


def torch_own(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Torch's, since 2.13."""
    loss: Tensor = F.linear_cross_entropy(hidden, weight, targets, reduction="sum")
    return loss


def torchtune(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Torchtune's, with the head called on chunks of tokens as its models call it."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    rows = [F.linear(chunk, weight).unsqueeze(0) for chunk in hidden.chunk(CHUNKS)]
    loss: Tensor = CEWithChunkedOutputLoss(CHUNKS)(rows, targets.unsqueeze(0))
    return loss * len(targets)


CONTENDERS: dict[str, Loss] = {"all logits": all_logits, "here": own, "torch": torch_own, "torchtune": torchtune}


def installed() -> list[str]:
    """The contenders that this environment has."""
    has = {"torch": hasattr(F, "linear_cross_entropy"), "torchtune": importlib.util.find_spec("torchtune") is not None}
    return [name for name in CONTENDERS if has.get(name, True)]


def measure(contender: str, sizes: Sequence[int], dtype: torch.dtype) -> dict[str, float]:
    """One forward and backward.

    Returns:
        CPU seconds `cpu_s`; `peak_mb`, megabytes beyond the inputs and the gradients that stay; and the loss.
    """
    torch.set_num_threads(1)
    loss_of = CONTENDERS[contender]
    tokens, width, vocabulary = sizes
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    few = 256  # before the peak is taken, what a first call allocates
    rows, words = (each[:few].detach().requires_grad_() for each in (hidden, weight))
    loss_of(rows, words, targets[:few] % few).backward()
    memory = PeakMemory(torch.device("cpu"))
    before, start = memory.peak_bytes, time.process_time()
    loss = loss_of(hidden, weight, targets)
    loss.backward()
    end = time.process_time()
    stays = sum(each.numel() * each.itemsize for each in (hidden, weight))
    return {"cpu_s": end - start, "peak_mb": (memory.peak_bytes - before - stays) / 1e6, "loss": loss.item()}


def table(turns: Sequence[dict[str, dict[str, float]]], sizes: Sequence[int]) -> list[str]:
    """Rows of Markdown: medians over turns, and of ratios to all logits within a turn."""
    tokens, width, vocabulary = sizes
    rows = []
    for name in turns[0]:
        cpu_s, peak_mb = (median(turn[name][what] for turn in turns) for what in ("cpu_s", "peak_mb"))
        slower, larger = (
            median(turn[name][what] / turn["all logits"][what] for turn in turns) for what in ("cpu_s", "peak_mb")
        )
        numbers = f"{cpu_s:.2f} | {slower:.2f} | {peak_mb:,.0f} | {larger:.3f}"
        rows.append(f"| {tokens:,} × {width} × {vocabulary:,} | {name} | {numbers} |")
    return rows


def main() -> None:
    """Print the table, or one case's numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--case", nargs=4, metavar=("CONTENDER", "TOKENS", "WIDTH", "VOCABULARY"), help="one, here")
    arguments = parser.parse_args()
    if arguments.case:
        name, *sizes = arguments.case
        print(json.dumps(measure(name, [int(each) for each in sizes], getattr(torch, arguments.dtype))))
        return
    print("| tokens × width × vocabulary | loss | CPU s | × all logits | peak MB | × all logits |")
    print("|---|---|--:|--:|--:|--:|")
    for sizes in SIZES:
        turns = [{name: _process(name, sizes, arguments.dtype) for name in installed()} for _ in range(TURNS)]
        losses = {name: numbers["loss"] for name, numbers in turns[0].items()}
        if max(losses.values()) - min(losses.values()) > 1e-2 * losses["all logits"]:
            raise SystemExit(f"losses differ: {losses}")
        print("\n".join(table(turns, sizes)), flush=True)


def _process(name: str, sizes: Sequence[int], dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loss", "--dtype", dtype, "--case", name, *map(str, sizes)]
    numbers: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return numbers


if __name__ == "__main__":
    main()
