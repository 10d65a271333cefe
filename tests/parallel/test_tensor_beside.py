"""Tensors beside the activations that tensor parallelism exchanges: refused where ranks would have parts of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from tests.helpers.threads import run_in_threads
from tests.parallel.test_tensor_models import check, seeded


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Conditioned(Plain):
    """Scaled and shifted by a vector for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(8, 16)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.beside(condition).unsqueeze(1).chunk(2, -1)
        return x + self.mlp(x * (1 + scale) + shift)


class Diffusion(nn.Module):
    """Blocks that have the condition from the one of number `since` on, by name."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.time, self.since = nn.Linear(8, 8), since
        self.blocks = nn.ModuleList(Plain() if number < since else Conditioned() for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        condition = torch.tanh(self.time(x[:, 0]))
        for number, block in enumerate(self.blocks):
            x = block(x, condition=condition) if number >= self.since else block(x)
        return x


class Gated(Plain):
    """Returns a loss of its own behind the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.mlp(x), self.beside(x).softmax(-1).square().mean()


class Mixture(nn.Module):
    """Blocks, all or the last of which return a loss."""

    def __init__(self, kinds: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            output = block(x)
            x, other = output if isinstance(output, tuple) else (output, 0)
            total = total + other
        return x + total


class Handing(nn.Module):
    """Hands on two streams of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.beside, self.mlp = nn.Linear(8, 8), Mlp()

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if other is None else x + other
        return x + self.mlp(x), self.beside(x)


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Handing(), Handing(), Plain()])

    def forward(self, x: Tensor) -> Tensor:
        x, other = self.blocks[1](*self.blocks[0](x))
        return self.blocks[2](x + other)


class Cross(nn.Module):
    """Attention to what something else has made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q(x), self.k(memory), self.v(memory)))
        return self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.cross = nn.Linear(8, 8), nn.Linear(8, 8), Cross()

    def forward(self, x: Tensor) -> Tensor:
        return self.cross(self.decoder(x), torch.tanh(self.encoder(x)))


MLP = {"blocks.*.mlp": "enter", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
SPLIT = {"blocks.*": "sequence", "blocks.*.beside": "replicate", **MLP}
MATRICES = {"cross.q": "colwise", "cross.k": "colwise", "cross.v": "colwise", "cross.o": "rowwise"}
X = [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))]


def loss_of(model, x):
    return model(x).square().mean()


@pytest.mark.filterwarnings("ignore:In no unit")  # one block is larger than the others
@pytest.mark.parametrize(
    ("make", "plan", "match", "edit"),
    [
        (lambda: Diffusion(0), SPLIT, r"'blocks\.0', a Conditioned.*was given a second.*sequence=False", SPLIT),
        (lambda: Diffusion(2), SPLIT, r"'blocks\.2', a Conditioned.*was given a second.*sequence=False", SPLIT),
        (lambda: Mixture((Gated, Plain)), SPLIT, r"'blocks\.0', a Gated.*returns another.*sequence=False", SPLIT),
        (lambda: Mixture((Plain, Gated)), SPLIT, r"'blocks\.1', a Gated.*returns another.*sequence=False", SPLIT),
        (Two, {"cross": "enter", **MATRICES}, r"'cross', a Cross, was given a second.*style 'enter' but", MATRICES),
    ],
)
def test_a_second_tensor_is_refused_and_the_edit_has_the_gradients_of_one_process(make, plan, match, edit) -> None:
    base = seeded(make)

    def body(rank: int) -> None:
        model = tz.parallelize(copy.deepcopy(base), tz.mesh(tp=2, device="cpu"), tensor=plan)
        with pytest.raises(tz.Misuse, match=match):
            model(X[0])
        with torch.no_grad():
            model(X[0])

    run_in_threads(2, body)
    trained = copy.deepcopy(base)
    loss_of(trained, X[0]).backward()
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(trained.get_parameter(name).grad is not None)
    check(base, X, loss_of, 2, tensor=edit, sequence=False)


def test_parts_that_blocks_hand_to_one_another_are_none() -> None:
    check(seeded(Streams), X, loss_of, 2, tensor=SPLIT)
