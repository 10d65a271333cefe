"""Inputs of checkpointed units in host memory: really moved, back in time, and equal to the bit in every situation."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import checkpoint_activations
from terrazzo.engine.offload.activations import host_pool, offloaded_activations
from terrazzo.engine.offload.host_arena import HostArena
from terrazzo.engine.unit_forwards.activation_checkpointing import offloading_of
from tests.engine.offload.moving import (
    DEPTH,
    ROWS,
    WIDTH,
    Block,
    Late,
    Logged,
    Model,
    Use,
    a_backward_that_raises,
    a_forward_that_is_thrown_away,
    a_forward_that_raises,
    backward_twice,
    backwards_in_the_opposite_order,
    backwards_in_the_order_of_forwards,
    chain,
    changing_lengths,
    evaluation_between_forward_and_backward,
    gradients,
    gradients_of_an_input_alone,
    gradients_of_gradients,
    lent_bytes,
    loss,
    offloaded,
    once,
    same_bits,
    several_forwards_then_one_backward,
    several_micro_batches,
    trains_alike,
)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies and runs of blocks, in order."""
    monkeypatch.setattr(offloaded_activations, "Route", Logged)
    monkeypatch.setattr(Logged, "log", [], raising=False)
    return Logged.log


@pytest.fixture(params=["at once", "late"])
def _both_speeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies end when they begin, or only when they are waited for."""
    if request.param == "late":
        monkeypatch.setattr(offloaded_activations, "Route", Late)
        monkeypatch.setattr(Late, "queue", [], raising=False)
        monkeypatch.setattr(Late, "lost", [], raising=False)
    yield
    if request.param == "late":
        assert not Late.queue and not Late.lost


# -- where the memory is, and when -------------------------------------------------------------------------------------


def test_forward_frees_every_input_but_the_last() -> None:
    base = Model()
    checkpointed, model = copy.deepcopy(base), offloaded(base)
    checkpoint_activations(checkpointed, "full", units=[Block])
    alive = {}
    for name, each in {"kept": checkpointed, "offloaded": model}.items():
        result = loss(each)
        alive[name] = [not block.seen[0][0].expired() for block in each.blocks]
        del result
    assert alive == {"kept": [True] * DEPTH, "offloaded": [False] * (DEPTH - 1) + [True]}


def test_backward_fetches_the_input_before_the_one_that_runs(log: list[str]) -> None:
    model = offloaded(Model())
    log.clear()
    model.log.clear()
    for block in model.blocks:
        block.log = log
    once(model)
    forward = ["out", "run 0", "out", "run 1", "out", "run 2", "out", "run 3"]
    assert log == [*forward, "in", "run 3", "in", "run 2", "in", "run 1", "run 0"]


def test_a_graph_that_is_kept_keeps_nothing_on_the_device(log: list[str]) -> None:
    result = loss(offloaded(Model()))
    for fetched in (DEPTH - 1, DEPTH, DEPTH):
        log.clear()
        result.backward(retain_graph=True)
        assert log.count("in") == fetched


def test_memory_comes_back_without_the_garbage_collector() -> None:
    model = offloaded(Model())
    gc.disable()
    try:
        kept = loss(model, 0)
        assert lent_bytes(model) == DEPTH * 4 * ROWS * WIDTH
        loss(model, 1).backward()
        assert lent_bytes(model) == DEPTH * 4 * ROWS * WIDTH
        del kept
        assert lent_bytes(model) == 0
    finally:
        gc.enable()


def test_nothing_is_allocated_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(HostArena):
        def __init__(self, size_bytes: int, pin: bool) -> None:
            made.append(size_bytes)
            super().__init__(size_bytes, pin)

    monkeypatch.setattr(host_pool, "HostArena", Counted)
    model = offloaded(Model())
    for number in range(5):
        loss(model, number).backward()
    assert made == [4 * ROWS * WIDTH] * DEPTH


# -- every way to use a model ------------------------------------------------------------------------------------------


USES = [
    once, several_micro_batches, several_forwards_then_one_backward, backwards_in_the_order_of_forwards,
    backwards_in_the_opposite_order, a_forward_that_is_thrown_away, evaluation_between_forward_and_backward,
    changing_lengths, gradients_of_an_input_alone, a_forward_that_raises, a_backward_that_raises,
]  # fmt: skip
REPEATED = [backward_twice, gradients_of_gradients]  # which torch does not allow under selective checkpointing


@pytest.mark.cover(strength=1)
@pytest.mark.usefixtures("_both_speeds")
@pytest.mark.parametrize("use", [*USES, *REPEATED])
def test_every_use_gives_the_gradients_of_plain_pytorch(use: Use) -> None:
    trains_alike(Model(), use)
    trains_alike(Model(), use, every=2)
    if use not in REPEATED:
        trains_alike(Model(), use, mode="selective")


# -- what is moved, and what stays -------------------------------------------------------------------------------------


def each_block_twice(model: Any, x: Tensor) -> Tensor:
    return chain(model, chain(model, x))


def by_keyword(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x=x)
    return x


def with_what_came_first(model: Any, x: Tensor) -> Tensor:
    start = x
    for block in model.blocks:
        x = block(x, start, again=start)
    return x


def side_by_side(model: Any, x: Tensor) -> Tensor:
    return sum((block(x) for block in model.blocks), torch.zeros(()))


def transposed(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x.t().contiguous().t())
    return x


def with_gaps(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(torch.cat([x, x], 1)[:, :WIDTH])
    return x


def off_the_alignment(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape))
    return x


def with_masks_and_weights(model: Any, x: Tensor) -> Tensor:
    mask, table = torch.ones(200, 200, dtype=torch.bool), torch.ones(200, 200)
    weight = model.first.weight
    for block in model.blocks:
        x = block(x, mask, weight, weight[: WIDTH // 2], table=table, detached=weight.detach())
    return x


def in_a_region_of_its_own(model: Any, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return model.blocks[2](model.blocks[1](x))

    x = model.blocks[0](x)
    return model.blocks[3](checkpoint(region, x, use_reentrant=False))


@pytest.mark.parametrize(
    ("through", "out", "back"),
    [
        (chain, DEPTH, DEPTH - 1),
        (each_block_twice, 2 * DEPTH, 2 * DEPTH - 1),
        (by_keyword, DEPTH, DEPTH - 1),
        (with_what_came_first, DEPTH, DEPTH - 1),
        (side_by_side, 1, 1),
        (transposed, DEPTH, DEPTH - 1),
        (with_gaps, 0, 0),
        (off_the_alignment, 0, 0),
        (with_masks_and_weights, DEPTH, DEPTH - 1),
        (in_a_region_of_its_own, 2, 1),
    ],
)
def test_what_the_forward_made_is_moved_once(
    through: Callable[[Any, Tensor], Tensor], out: int, back: int, log: list[str]
) -> None:
    trains_alike(Model(through), once)
    assert (log.count("out"), log.count("in")) == (out, back)


@pytest.mark.usefixtures("_both_speeds")
@pytest.mark.parametrize("through", [each_block_twice, with_what_came_first, side_by_side, in_a_region_of_its_own])
def test_tensors_that_several_calls_keep_train_alike(through: Callable[[Any, Tensor], Tensor]) -> None:
    for use in (once, several_forwards_then_one_backward, backward_twice):
        trains_alike(Model(through), use)


@pytest.mark.parametrize("through", [transposed, with_gaps])
def test_recomputation_sees_the_strides_of_forward(through: Callable[[Any, Tensor], Tensor]) -> None:
    model = trains_alike(Model(through), once)
    assert all(len({stride for _, stride in block.seen}) == 1 and len(block.seen) == 2 for block in model.blocks)


def test_small_inputs_stay(log: list[str]) -> None:
    trains_alike(Model(), lambda model: loss(model, rows=(16 << 10) // (4 * WIDTH)).backward())
    assert log == []
    trains_alike(Model(), lambda model: loss(model, rows=(16 << 10) // (4 * WIDTH) + 1).backward())
    assert log.count("out") == DEPTH


def test_under_frozen_layers_what_has_no_gradient_stays(log: list[str]) -> None:
    base = Model()
    base.first.requires_grad_(False)
    base.blocks[0].requires_grad_(False)
    trains_alike(base, once)
    assert log.count("out") == DEPTH - 2


def test_units_inside_units_leave_the_moves_to_the_outer_one(log: list[str]) -> None:
    class Pair(nn.Module):
        def __init__(self, one: nn.Module, two: nn.Module) -> None:
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    class Paired(Model):
        def __init__(self, through: Any = None) -> None:
            super().__init__(through)
            self.blocks = nn.ModuleList(Pair(*self.blocks[i : i + 2]) for i in range(0, DEPTH, 2))

    trains_alike(Paired(), once, units=[Pair, Block])
    assert (log.count("out"), log.count("in")) == (DEPTH // 2, DEPTH // 2 - 1)


def test_an_outer_hook_sees_what_it_would_see_without() -> None:
    """Memory profilers and `save_on_cpu` around the whole model stay in charge."""
    base = Model()
    checkpointed, model = copy.deepcopy(base), offloaded(base)
    checkpoint_activations(checkpointed, "full", units=[Block])
    seen: dict[str, list[torch.Size]] = {"checkpointed": [], "offloaded": []}
    for each, found in zip((checkpointed, model), seen.values(), strict=True):
        with torch.autograd.graph.saved_tensors_hooks(lambda x, f=found: f.append(x.shape) or x, lambda x: x):  # type: ignore[misc]
            once(each)
    assert seen["offloaded"] == seen["checkpointed"] != []


@pytest.mark.parametrize("number", range(DEPTH))
def test_an_input_changed_in_place_is_refused(number: int) -> None:
    """As without offload, where autograd refuses it."""

    def through(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            y = block(x)
            if block.number == number:
                x.add_(1)
            x = y
        return x

    base = Model(through)
    checkpointed, model = copy.deepcopy(base), offloaded(base)
    checkpoint_activations(checkpointed, "full", units=[Block])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once(checkpointed)
    with pytest.raises(tz.Misuse, match=rf"shape \({ROWS}, {WIDTH}\), was changed in place"):
        once(model)


def test_a_table_changed_in_place_is_refused() -> None:
    def through(model: Any, x: Tensor) -> Tensor:
        table = torch.ones(3)
        x = model.blocks[0](x, table)
        table.add_(1)
        return x

    with pytest.raises(tz.Misuse, match=r"shape \(3,\), was changed in place"):
        once(offloaded(Model(through)))


def test_a_tensor_that_changes_after_it_has_left_is_moved_again() -> None:
    """Autograd alone would refuse this: there is no copy that it could go back to."""

    def through(model: Any, x: Tensor) -> Tensor:
        y = model.blocks[1](model.blocks[0](x))
        return y + model.blocks[2](x + 1 if model is base else x.add_(1))

    base = Model(through)
    trains_alike(base, once)


def test_a_deep_copy_moves_its_own_inputs() -> None:
    base, model = Model(), offloaded(Model())
    twin = copy.deepcopy(model)
    twin.load_state_dict(base.state_dict())
    kept = loss(twin)
    assert lent_bytes(twin) == DEPTH * 4 * ROWS * WIDTH and lent_bytes(model) == 0
    kept.backward()
    once(base)
    assert same_bits(gradients(twin), gradients(base))
    assert len(offloading_of(twin)) == 1 and not offloading_of(twin) & offloading_of(model)


def test_offload_without_checkpointing_is_refused() -> None:
    with pytest.raises(tz.BadInput, match=r"choose 'full'.* or 'selective'"):
        checkpoint_activations(Model(), "none", offload=True)
