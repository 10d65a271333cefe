"""Activation checkpointing composed with gathering: within a unit, across units, selective, and refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import checkpoint_activations
from terrazzo.engine.unit_forwards.activation_checkpointing import SAVED_OPS
from tests.engine.toys import (
    TABLE_1D,
    Net,
    adamw,
    batch,
    follows_one_process,
    loss_of,
    mesh_for,
    on_ranks,
    plain_loop,
    sharded,
    train,
    unpickled,
    without_collector,
)
from tests.helpers.cover import places


class Spanning(Net):
    """One checkpointed region around two units and a half of the root's own work."""

    def forward(self, tokens: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)) * 2

        x = checkpoint(inner, self.embed(tokens), use_reentrant=False)
        return self.head(self.blocks[2](x))


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", TABLE_1D)
def test_a_checkpointed_region_across_units(plan: str) -> None:
    follows_one_process(Spanning(), plain_loop, plan)


@pytest.mark.parametrize("plan", ["shard_grad_op", "zero3"])
def test_a_checkpointed_region_around_the_whole_model(plan: str) -> None:
    """While the order is not settled, the engine watches what autograd keeps; the region does so always."""

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        plain_loop(lambda tokens: checkpoint(model, tokens, use_reentrant=False), optimizer, data)

    follows_one_process(Net(), loop, plan)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"mode": "full", "every": 2},
        {"mode": "selective"},
        {"mode": "selective_half"},
        {"mode": "none"},
    ],
)
@pytest.mark.parametrize("plan", ["zero0", "zero3", "hpz"])
def test_checkpointed_units_train_bit_for_bit_as_without(plan: str, options: dict[str, Any]) -> None:
    base = Net()
    plain = on_ranks(4, lambda rank: train(*sharded(base, plan, 4), 3, rank))

    def body(rank: int) -> list[float]:
        model = copy.deepcopy(base)
        checkpoint_activations(model, **options)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, 4))
        return train(model, optimizer, 3, rank)

    assert on_ranks(4, body) == plain


@pytest.mark.parametrize("gather", [None, "int8"])
@pytest.mark.parametrize("plan", ["zero2", "zero3", "shard_grad_op"])
def test_units_inside_of_a_selectively_checkpointed_one(plan: str, gather: Any) -> None:
    """Torch counts the operations of the region, in which the engine gathers weights: in backward it gathers others."""
    base, precision = Net(), dataclasses.replace(tz.Precision.named("fp32"), gather=gather)

    def losses(mode: str, ops: list[str] | None = None) -> list[list[float]]:
        def body(rank: int) -> list[float]:
            model = copy.deepcopy(base)
            checkpoint_activations(model, mode, units="Block", ops=ops)
            built = adamw(model.parameters())
            return train(*tz.shard(model, built, plan, units=["Block", "blocks.*.up"], precision=precision), 3, rank)

        return on_ranks(2, body)

    assert losses("selective") == losses("selective", ["mul", "relu"]) == losses("none")


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
@pytest.mark.parametrize(
    "options", [{"mode": "full"}, {"mode": "full", "offload": True}, {"mode": "selective"}, {"mode": "selective_half"}]
)
def test_a_copy_trains_weights_of_its_own(options: dict[str, Any], copied: Callable[[nn.Module], Any]) -> None:
    original, alone = Net(), Net()
    checkpoint_activations(original, **options)
    twin = copied(original)
    twin.load_state_dict(alone.state_dict())
    with Count(torch.ops.aten.relu) as count:
        loss_of(twin, batch()).backward()
    loss_of(alone, batch()).backward()
    assert count.calls == 2 * len(alone.blocks)  # run again in backward
    for found, wanted in zip(twin.parameters(), alone.parameters(), strict=True):
        assert found.grad is not None and wanted.grad is not None and torch.equal(found.grad, wanted.grad)
    assert all(parameter.grad is None for parameter in original.parameters())


@pytest.mark.parametrize("mode", ["full", "selective", "selective_half"])
def test_a_deleted_model_is_freed_at_once(mode: str) -> None:
    """But not before a backward that runs it again."""
    model = Net()
    checkpoint_activations(model, mode, offload=mode == "full")
    kept, forward, gone = model.embed.weight, model.blocks[0].forward, weakref.ref(model.blocks[0])
    with without_collector():
        loss = loss_of(model, batch())
        del model
        assert gone() is not None
        loss.backward()
        del loss
        assert gone() is None and kept.grad is not None
    with pytest.raises(tz.Misuse, match="A forward was called of a module that is gone"):
        forward(torch.ones(13))


def test_a_forward_says_what_it_takes() -> None:
    model = Net()
    checkpoint_activations(model, "full")
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(Net().blocks[0].forward)


class Count(TorchDispatchMode):
    """How often an operator runs, in any overload."""

    def __init__(self, packet: Any) -> None:
        super().__init__()
        self.packet, self.calls = packet, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket is self.packet
        return func(*args, **(kwargs or {}))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + 1.0).exp()


@pytest.mark.parametrize(("ops", "calls"), [(["add"], 1), (["mul"], 2)])
def test_an_operators_result_is_kept_whichever_overload_made_it(ops: list[str], calls: int) -> None:
    """`+` calls `aten.add.Tensor`, and not `aten.add.default`, which does not exist."""
    model = nn.Sequential(Shifted())
    checkpoint_activations(model, "selective", units=[Shifted], ops=ops)
    with Count(torch.ops.aten.add) as count:
        model(torch.ones(3)).sum().backward()
    assert count.calls == calls


class Gated(nn.Module):
    """Seven matrices, in the order of a Llama block."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each(x).view(2, 4, 2, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("selective_half", 3), ("full", 6)])
def test_every_second_product_is_computed_again(mode: str, again: int) -> None:
    """Keys, output and up; the last one, down, needs no result of its own."""
    model, x = nn.Sequential(Gated()), torch.randn(2, 4, 8)
    alone = copy.deepcopy(model)
    checkpoint_activations(model, mode, units=[Gated])
    with Count(torch.ops.aten.mm) as count, Count(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu) as kernel:
        model(x).sum().backward()
    assert count.calls == 6 + 14 - 3 + again  # forward but for the bias's; backward but for the input's gradient
    assert kernel.calls == 1 + (mode == "full"), "attention is kept"
    alone(x).sum().backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert found.grad is not None and wanted.grad is not None and torch.equal(found.grad, wanted.grad)


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_products_of_experts_are_kept_as_all_others(mode: str, again: int) -> None:
    """One kernel for all of a layer, which plans count as kept under `selective`."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([3, 8], dtype=torch.int32)
            inner = nn.functional.silu(nn.functional.grouped_mm(x, self.up, offs=ends))
            return nn.functional.grouped_mm(inner, self.down, offs=ends)

    model, x = nn.Sequential(Experts()), torch.randn(8, 16, dtype=torch.bfloat16)
    checkpoint_activations(model, mode, units=[Experts])
    with Count(torch.ops.aten._grouped_mm) as count:
        model(x).square().sum().backward()
    assert count.calls == 2 + 3 + again  # the last one needs no result of its own


def test_attention_is_kept_whichever_fused_kernel_torch_takes() -> None:
    """Which one it is, a device and its libraries decide: cuDNN's comes first on Hopper. By torch's own list."""
    known = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    fused = re.compile(r"_scaled_dot_product_(cudnn|efficient|flash)_attention(_for_cpu)?")
    assert {name for name in SAVED_OPS if "attention" in name} == {name for name in known if fused.fullmatch(name)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "ful"}, "Did you mean 'full'"),
        ({"mode": "full", "every": 0}, "1 or more"),
        ({"mode": "full", "every": 1.5}, "an integer"),
        ({"mode": "full", "every": True}, "every True"),
        ({"mode": "selective", "ops": ["mmm"]}, "mmm"),
        ({"mode": "selective", "ops": ["name"]}, "no operator 'name'"),
        ({"mode": "full", "ops": ["mm"]}, r"'mm'.*'selective'.*'full'"),
        ({"mode": "none", "ops": ["mm"]}, r"'mm'.*'selective'.*'none'"),
    ],
)
def test_checkpointing_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(tz.BadInput, match=words):
        checkpoint_activations(Net(), **options)


class Verbose(nn.Module):
    """Its forward has a keyword that `torch.utils.checkpoint.checkpoint` has too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)

    def forward(self, x: Tensor, debug: bool = False, early_stop: float = 0.0) -> Tensor:
        return self.up(x) * (2.0 if debug else 1.0) + early_stop


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_keywords_that_torchs_checkpoint_has_are_the_forwards(mode: str) -> None:
    model, x = nn.ModuleList([Verbose()]), torch.ones(2, 3)
    wanted = model[0](x, debug=True, early_stop=1.0)
    checkpoint_activations(model, mode, units=[Verbose])  # type: ignore[arg-type]
    found = model[0](x, debug=True, early_stop=1.0)
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert torch.equal(model[0].up.bias.grad, torch.full((3,), 4.0))
