"""Models whose units' inputs go to host memory, and stand-ins for devices that copy them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from terrazzo.engine import checkpoint_activations
from terrazzo.engine.offload.activations.moved_tensors import Route
from terrazzo.engine.unit_forwards.activation_checkpointing import offloading_of

WIDTH, DEPTH, ROWS = 96, 4, 64

Use = Callable[[Any], Tensor | None]
"""Runs forwards and backwards of a model; may return a further gradient to compare."""


class Block(nn.Module):
    """A residual block that notes when it runs and on what; further tensors scale it."""

    def __init__(self, number: int, log: list[str], width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.number, self.log = number, log
        self.seen: list[tuple[StorageWeakRef, tuple[int, ...]]] = []

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        self.log.append(f"run {self.number}")
        self.seen.append((StorageWeakRef(x.untyped_storage()), x.stride()))
        y = x + self.down(torch.tanh(self.up(x)))
        for other in (*others, *named.values()):
            y = y + other.to(y.dtype).mean() * y
        return y


class Model(nn.Module):
    """Blocks between two layers; `through` runs the blocks."""

    def __init__(self, through: Callable[[Any, Tensor], Tensor] | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.log: list[str] = []
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(number, self.log, width) for number in range(DEPTH))
        self.through = through or chain

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.through(self, self.first(x)))


def chain(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def data(number: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def loss(model: Any, number: int = 0, rows: int = ROWS) -> Tensor:
    return model(data(number, rows)).square().mean()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def same_bits(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def offloaded(base: Model, mode: str = "full", **options: Any) -> Model:
    model = type(base)(base.through)
    model.load_state_dict(base.state_dict())
    for parameter, original in zip(model.parameters(), base.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    checkpoint_activations(model, mode, units=options.pop("units", [Block]), offload=True, **options)
    return model


def trains_alike(base: Model, use: Use, **options: Any) -> Model:
    """After `use`, the offloading copy has the gradients of plain PyTorch without checkpointing; returns it."""
    model = offloaded(base, **options)
    assert same_bits([use(model), *gradients(model)], [use(base), *gradients(base)])
    if lent_bytes(model):  # to a traceback that was caught
        gc.collect()
    assert lent_bytes(model) == 0, "not all memory came back"
    return model


def lent_bytes(model: Any) -> int:
    """Host memory that tensors are in now."""
    pools = [route.pool for offloading in offloading_of(model) for route in offloading.routes.values()]
    idle = [arena.size_bytes for pool in pools for arena, _ in (*pool.returned, *pool._idle)]
    return sum(pool.total_bytes for pool in pools) - sum(idle)


def once(model: Any) -> None:
    loss(model).backward()


def several_micro_batches(model: Any) -> None:
    for number in range(3):
        loss(model, number).backward()


def several_forwards_then_one_backward(model: Any) -> None:
    (loss(model, 0) + loss(model, 1) + loss(model, 2)).backward()


def backwards_in_the_order_of_forwards(model: Any) -> None:
    losses = [loss(model, number) for number in range(3)]
    while losses:
        losses.pop(0).backward()


def backwards_in_the_opposite_order(model: Any) -> None:
    losses = [loss(model, number) for number in range(3)]
    while losses:
        losses.pop().backward()


def a_forward_that_is_thrown_away(model: Any) -> None:
    loss(model, 0)
    kept = loss(model, 1)
    loss(model, 2)
    kept.backward()
    loss(model, 3)


def evaluation_between_forward_and_backward(model: Any) -> None:
    result = loss(model, 0)
    with torch.no_grad():
        loss(model, 1)
    with torch.inference_mode():
        loss(model, 2)
    result.backward()


def backward_twice(model: Any) -> None:
    result = loss(model)
    result.backward(retain_graph=True)
    result.backward(retain_graph=True)
    result.backward()


def changing_lengths(model: Any) -> None:
    for number, rows in enumerate((64, 200, 64, 3, 77, 128)):
        loss(model, number, rows).backward()


def gradients_of_an_input_alone(model: Any) -> Tensor:
    x = data().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x)[0]


def gradients_of_gradients(model: Any) -> None:
    x = data().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()


def a_forward_that_raises(model: Any) -> None:
    before = loss(model, 0)
    handle = model.blocks[2].register_forward_pre_hook(_raise)
    with pytest.raises(ArithmeticError):
        loss(model, 1)
    handle.remove()
    before.backward()
    loss(model, 2).backward()


def a_backward_that_raises(model: Any) -> None:
    before = loss(model, 0)
    handle = model.blocks[1].up.weight.register_hook(_raise)
    with pytest.raises(ArithmeticError):
        loss(model, 1).backward()
    handle.remove()
    model.zero_grad()
    before.backward()
    loss(model, 2).backward()


def _raise(*_: Any) -> None:
    raise ArithmeticError("on purpose")


class Logged(Route):
    """Notes each copy."""

    log: list[str]

    def copy(self, source: Tensor, target: Tensor) -> Any:
        self.log.append("out" if target._is_view() else "in")
        return super().copy(source, target)


class Late(Route):
    """Copies in order, as a stream does, and each only when somebody waits for it: the slowest device there can be."""

    queue: list[LateCopy]
    lost: list[str]

    def copy(self, source: Tensor, target: Tensor) -> Any:
        if not target._is_view():
            target.fill_(float("nan"))  # what is fetched must not be read before
        self.queue.append(LateCopy(self, weakref.ref(source), weakref.ref(target)))
        return self.queue[-1]


class LateCopy:
    """Holds neither end: whoever lets go of one before it has waited is found out."""

    is_for_this_stream = True

    def __init__(self, route: Late, source: weakref.ref[Tensor], target: weakref.ref[Tensor]) -> None:
        self.route, self.source, self.target = route, source, target

    def wait(self) -> None:
        while self in self.route.queue:
            self.route.queue.pop(0).run()

    def run(self) -> None:
        source, target = self.source(), self.target()
        if source is None or target is None:
            self.route.lost.append("source" if source is None else "target")
        else:
            target.copy_(source)
