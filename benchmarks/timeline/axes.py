"""What ranks exchange that share matrices or sequences, and what of it computation waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import terrazzo as tz
from benchmarks.timeline.measure import become
from benchmarks.timeline.model import SCALE, WIDTH
from benchmarks.timeline.waits import waits
from hostcuda.device import report, virtual
from terrazzo.parallel import Context, context_of
from terrazzo.parallel.context import attention_kernels
from terrazzo.train.model.decoder import Attention, Block, Decoder, DecoderConfig

__all__ = ["DEPTH", "exchanged"]

DEPTH, HEADS, KV_HEADS, FFN = 4, 32, 8, 14336
STAGES = ("forward", "backward")

SHAPE = DecoderConfig(
    vocab_size=SCALE,  # the least: embedding and head are no part of this
    dim=WIDTH // SCALE,
    layers=DEPTH,
    heads=HEADS,
    kv_heads=KV_HEADS,
    ffn_dim=FFN // SCALE,
    max_sequence_length=1,
)
"""As many heads as at full size, whose channels are fewer: so attention's FLOPs and bytes shrink as all others do."""


class _Blocks(nn.Module):
    """A decoder's blocks alone."""

    context: Context | None = None

    def __init__(self, length: int) -> None:
        super().__init__()
        decoder = Decoder(replace(SHAPE, max_sequence_length=length))
        self.rotary, self.blocks = decoder.rotary, decoder.blocks
        self.plan = {glob: style for glob, style in decoder.tensor_plan().items() if glob.startswith("blocks.")}

    def use_context(self, context: Context) -> None:
        """Be given parts of sequences from now on."""
        for module in self.modules():
            if isinstance(module, _Blocks | Attention):
                module.context = context

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[1, tokens, width] to the same shape."""
        seen = None if self.context is None else self.context.mask(positions, x.shape[1])
        cos, sin = self.rotary.at(positions)
        for block in self.blocks:
            x = block(x, cos, sin, seen)
        return x


def exchanged(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each axis and cell. Kernels that are no products of matrices take no time."""
    with mock.patch.object(attention_kernels, "_is_cuda_flash", return_value=False):  # has a GPU's kernels alone
        for axis in job["axes"]:
            for cell in job["cells"]:
                become({**cell["figures"], "memory": 1e30})
                yield {**axis, **cell["cell"], **_measured(axis, int(cell["cell"]["tokens"]) // SCALE)}
                if report.faults:
                    raise RuntimeError(f"{axis}: " + "\n".join(map(str, report.faults)))


def _measured(axis: dict[str, Any], length: int) -> dict[str, Any]:
    """Seconds of a block's share of a step: of computation, exchanges, and waits for these, by name.

    Args:
        length: tokens of a sequence, which the ranks share.
    """
    mesh = tz.mesh(**{axis["axis"]: axis["size"]}, device="cuda")
    model = _Blocks(length)
    tz.parallelize(model, mesh, tensor=model.plan if axis["axis"] == "tp" else None, context=axis["mode"] or "gather")
    model, _ = tz.shard(model, torch.optim.AdamW, "zero0", units=[Block], precision="bf16", mesh=mesh)
    context, positions = context_of(model), torch.arange(length).unsqueeze(0)
    there = torch.device("cuda")
    own = positions.to(there) if context is None else context.place(positions, there)
    x = torch.randn(1, own.shape[1], WIDTH // SCALE, device=there, dtype=torch.bfloat16, requires_grad=True)
    model(x, own).float().sum().backward()  # the first of all may differ
    torch.cuda.synchronize()
    moments_s, heard_s = [virtual.now_s()], dict[str, float]()
    before_s = virtual.spent_s()["kernels"]
    with virtual.tracing() as spans, virtual.listening() as heard, tz.accumulate(model):
        loss = model(x, own).float().sum()
        moments_s.append(virtual.queued_s())
        loss.backward()
        torch.cuda.synchronize()
        moments_s.append(virtual.now_s())
    for each in heard:
        heard_s[each.name] = heard_s.get(each.name, 0.0) + each.seconds / DEPTH
    found: dict[str, Any] = {"computing_s": (virtual.spent_s()["kernels"] - before_s) / DEPTH, "exchanges_s": heard_s}
    for stage, (begin_s, end_s) in zip(STAGES, pairwise(moments_s), strict=True):
        waited = waits(spans, begin_s, end_s)
        found[f"{stage}_waits_s"] = {name: seconds / DEPTH for name, seconds in waited.items()}
    return found
