"""What is trained: models in sizes that make one thing or another the bottleneck, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.cpu.models import Decoder, Divisible, ManySmall, Shape, mixtral


@dataclass(frozen=True)
class Case:
    """A model, a batch and a recipe; each rank computes `accumulate * batch * shape.sequence` tokens per step.

    Attributes:
        batch: sequences in a micro-batch of one rank.
        about: for a reader.
        accumulate: micro-batches in a step.
        clip: the global norm that gradients are clipped to, if any.
        small: many small tensors in the place of a decoder.
        sharing: ranks that are given the same batch: those of a tensor-parallel group, or of a context-parallel one.
        stages: these have other layers, and are no neighbours.
        mixture: a Mixtral of transformers in the place of a decoder.
    """

    shape: Shape
    batch: int
    about: str
    precision: Literal["fp32", "bf16"] = "fp32"
    accumulate: int = 1
    clip: float | None = None
    small: bool = False
    sharing: int = 1
    stages: bool = False
    mixture: bool = False

    def data_rank(self, rank: int, world_size: int) -> int:
        """Ranks of the same one are given the same batches."""
        return rank % (world_size // self.sharing) if self.stages else rank // self.sharing

    def describe(self) -> str:
        """One line for a report."""
        parameters = list(self.model("meta").parameters())
        numel, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
        tokens = self.batch * self.shape.sequence
        size = f"{numel / 1e6:.1f} M parameters in {len(parameters)} tensors, {self.shape.blocks} blocks"
        some = f", {trained / 1e6:.2f} M of them trained" if trained != numel else ""
        times = f"{self.accumulate} × {tokens}" if self.accumulate > 1 else str(tokens)
        ranks = "rank" if self.sharing == 1 else f"{self.sharing} ranks"
        return f"{size}{some}, {times} tokens per {ranks}, {self.precision}: {self.about}"

    def model(self, device: str = "cpu") -> nn.Module:
        """A fresh model from torch's default generator."""
        with torch.device(device):
            if self.mixture:
                return mixtral(self.shape)
            if self.sharing > 1:
                return Divisible(self.shape)
            return ManySmall(self.shape) if self.small else Decoder(self.shape)

    def tokens(self, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, sequence] each, the same for every contender."""
        generator = torch.Generator().manual_seed(1_000_003 * micro_batch + rank)
        size = (self.batch, self.shape.sequence + 1)
        drawn = torch.randint(self.shape.vocabulary, size, generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


CASES = {
    "traffic": Case(Shape(14, 768, 1024, 64), 1, "moving parameters takes longer than using them"),
    "balanced": Case(Shape(8, 512, 1024, 128), 4, "moving and using take about as long"),
    "compute": Case(Shape(6, 256, 512, 256), 8, "arithmetic takes nearly all of the time"),
    "bf16": Case(Shape(14, 768, 1024, 64), 1, "computed in bf16, summed and stepped in fp32", precision="bf16"),
    "accumulate": Case(Shape(8, 768, 1024, 64), 1, "eight micro-batches in a step", accumulate=8),
    "checkpointing": Case(Shape(8, 768, 1024, 64, checkpointing=True), 1, "blocks are run again in backward"),
    "experts": Case(Shape(4, 512, 1024, 64, experts=8), 1, "eight stacked experts per block, one for each token"),
    "lora": Case(Shape(14, 768, 1024, 64, rank=8), 1, "low-rank updates of a frozen model"),
    "small": Case(Shape(20, 64, 256, 32), 1, "a thousand small tensors, clipped", clip=1.0, small=True),
    "matrices-small": Case(Shape(4, 256, 1024, 128), 2, "matrices in two parts, small ones", sharing=2),
    "matrices-large": Case(Shape(4, 1024, 8192, 256), 2, "matrices in two parts, large ones", sharing=2),
    "sequences": Case(Shape(4, 256, 1024, 2048), 1, "sequences in two parts, long ones", sharing=2),
    "sequences-wide": Case(Shape(8, 768, 1024, 256), 1, "sequences in two parts, a wide model", sharing=2),
    "stages": Case(Shape(8, 512, 1024, 128), 2, "layers in two halves", accumulate=8, sharing=2, stages=True),
    "mixture": Case(Shape(4, 256, 1024, 128, experts=8), 2, "a Mixtral of transformers, top 2 of 8", mixture=True),
    "mixture-small": Case(Shape(4, 128, 512, 64, experts=8), 2, "the same, a small one", mixture=True),
    "muon": Case(Shape(6, 256, 512, 128), 2, "each update makes all matrices of the blocks orthogonal"),
    "tiny": Case(Shape(3, 64, 128, 32), 2, "for trying the benchmark itself"),
}
