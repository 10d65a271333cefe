"""The models and batches of the parity tests: small, of odd shapes, one variant per feature under test."""

from __future__ import annotations

import functools
import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.engine import FrozenFormat
from tests.engine.four_bits import rounded

VOCABULARY = 19
WIDTH = 13
WIDE = 65
EXPERTS = 4


class Block(nn.Module):
    """A residual block with a 0-d parameter; `tied` shares one weight between its two matrices."""

    def __init__(self, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        hidden = width if tied else 2 * width + 1
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.tensor(0.5))
        if tied:
            self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head: the root unit, and a unit for each `Block`."""

    def __init__(self, tied_blocks: bool = False, experts: int = 0, width: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.experts = nn.ModuleList(Block() for _ in range(experts))
        self.blocks = nn.ModuleList(Block(tied_blocks) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Routed(Net):
    """Blocks run only where the batch says so: bit i of the first token routes it through block i of `experts`.

    Besides these units, `gain` is a parameter of the root unit that only batches with bit 1 use.
    """

    def __init__(self) -> None:
        super().__init__(experts=EXPERTS, blocks=2)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        route = int(tokens[0, 0])
        x = self.embed(tokens)
        for index, expert in enumerate(self.experts):
            if route >> index & 1:
                x = expert(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain if route & 2 else x)


class Reordered(Routed):
    """The experts run before the blocks but are registered behind them."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["experts"] = self._modules.pop("experts")


class Fickle(Block):
    """In each batch one of its biases is not used, so that its gradients, and its states, come and go."""

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        hidden = F.linear(self.norm(x), self.up.weight, None if odd else self.up.bias)
        return x + self.scale * F.linear(F.gelu(hidden), self.down.weight, self.down.bias if odd else None)


class Wide(Net):
    """A rank's part of a block has more than 8,192 elements; bit 2 of the first token tells which biases are used."""

    def __init__(self) -> None:
        super().__init__(width=WIDE)
        self.blocks = nn.ModuleList(Fickle(width=WIDE) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, bool(int(tokens[0, 0]) & 4))
        return self.head(x)


IN_FOUR_BITS = ("blocks.0.up.weight", "blocks.1.up.weight", "blocks.1.down.weight")
"""What `Net` keeps in 4 bits where that is asked for: frozen, a matrix of a linear layer, and inside of a unit."""

_building = threading.Lock()


def base_model(variant: str) -> nn.Module:
    """The model that every rank and the reference copy; never trained itself.

    Ranks that are threads ask for it at once, and have one random generator among them.
    """
    with _building:
        return _built(variant)


@functools.cache
def _built(variant: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if variant in ("unused", "reordered"):
            return Routed() if variant == "unused" else Reordered()
        if variant == "wide":
            return Wide()
        model = Net(tied_blocks=variant == "tied")
        if variant in ("tied", "tied_across"):  # across two blocks, and inside the root unit
            model.head.weight = model.embed.weight
            model.blocks[2].up.weight = model.blocks[0].up.weight
        if variant in ("frozen", *FrozenFormat):
            for frozen in (model.embed.weight, model.blocks[0].up.weight, *model.blocks[1].parameters()):
                frozen.requires_grad_(False)
        if variant in tuple(FrozenFormat):
            for frozen in (model.get_parameter(name) for name in IN_FOUR_BITS):
                frozen.data = rounded(frozen.data, variant)
        return model


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    """Token ids [2, 6] that every process can make again.

    The first token routes: expert 0 runs always, expert 1 on odd ranks, expert 2 in odd steps and then in the first
    micro-batch only, expert 3 never.
    """
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
    tokens[0, 0] = 1 + 2 * (rank % 2) + 4 * (step % 2 == 1 and micro == 0)
    return tokens


def criterion(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return criterion(model(tokens[:, :-1]), tokens)
