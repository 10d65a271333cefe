"""What the tests of checkpoint importers share: a model with everything that is hard, and a comparison bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.checkpoint import Source

States = dict[tuple[str, str], Tensor]


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 0.25, 0.125]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale.sum() * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A small language model of odd sizes; `tied` shares the embedding with the head, `frozen` freezes a layer."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, inner: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(Layer(5, inner) for _ in range(2))
        self.head = nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.layers[0].requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randint(11, (3, 4), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int = 2, **settings: Any) -> tuple[Net, torch.optim.AdamW]:
    """A network, and the AdamW that has trained its parameters."""
    torch.manual_seed(0)
    net = Net(**settings)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-2, betas=(0.8, 0.9))
    train(net, optimizer, steps)
    return net, optimizer


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> States:
    """The full values in memory, by name and kind of state; buffers are weights, as they are to importers."""
    states = {}
    for name, parameter in model.named_parameters():
        states[name, "weight"] = parameter
        for kind, value in optimizer.state[parameter].items() if optimizer is not None else ():
            states[name, kind] = value
    saved = model.state_dict().keys()
    states |= {(name, "weight"): value for name, value in model.named_buffers() if name in saved}
    return {key: full(value) for key, value in states.items()}


def full(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def assert_same(source: Source, expected: States, kinds: Iterable[str] = ()) -> None:
    """That `source` holds exactly these values, whole and in parts, or those of them that are of `kinds`."""
    expected = {key: value for key, value in expected.items() if not kinds or key[1] in kinds}
    assert {(name, kind) for name, info in source.tensors.items() for kind in info.states} == expected.keys()
    for (name, kind), value in expected.items():
        found = source.whole(name, kind)
        assert found.dtype == value.dtype, (name, kind)
        assert torch.equal(found.reshape(value.shape), value), (name, kind)
        start, stop = value.numel() // 3, value.numel() - value.numel() // 4
        assert torch.equal(source.read(name, kind, start, stop), value.reshape(-1)[start:stop]), (name, kind)
        assert source.tensors[name].states[kind].numel == value.numel()


class RunsCode:
    """Counts how often it was unpickled."""

    ran = 0

    def __reduce__(self) -> Any:
        return ran_code, ()


def ran_code() -> None:
    RunsCode.ran += 1
