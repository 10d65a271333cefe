"""State dicts under `terrazzo.fully_shard`: what torch's own functions make of them, beside torch's own engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Adam

import terrazzo as tz
from tests.engine.toys import Net as Toy
from tests.engine.toys import assert_equal, batch, on_ranks
from tests.engine.toys import loss_of as loss_of_tokens
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.integrations.test_fsdp2 import Apply, Net, batches, loss_of, marked, options_of

States = dict[str, Any]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def deferred(apply: Apply, name: str) -> Net:
    """On the meta device, as long as nobody gives it values."""
    with torch.device("meta"):
        return marked(apply, Net(), **options_of(name))


def initialised(model: Net) -> Net:
    """The same values whatever the engine."""
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    full = {name: torch.randn(tuple(each.shape)) * 0.1 for name, each in model.named_parameters()}
    set_model_state_dict(model, full, options=BROADCAST)
    return model


def steps(model: Net, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for x in batches(last, dist.get_rank())[first:]:
        loss = loss_of(model, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class ByDcp:
    """Full states by the functions of `torch.distributed.checkpoint`, as in the FSDP2 example of PyTorch."""

    def save(self, model: Any, optimizer: Any) -> tuple[States, States]:
        return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)

    def load_model(self, model: Any, state: States) -> None:
        set_model_state_dict(model, state, options=BROADCAST)

    def load_optimizer(self, model: Any, optimizer: Any, state: States) -> None:
        set_optimizer_state_dict(model, optimizer, state, options=BROADCAST)


class ByHand:
    """Full states by hand from DTensors, the other way in that example."""

    def save(self, model: Any, optimizer: Any) -> tuple[States, States]:
        weights = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
        given = optimizer.state_dict()
        states = {number: {k: _full(v) for k, v in kept.items()} for number, kept in given["state"].items()}
        return weights, {"state": states, "param_groups": given["param_groups"]}

    def load_model(self, model: Any, state: States) -> None:
        shown = model.state_dict()
        split = {
            name: nn.Parameter(distribute_tensor(value, shown[name].device_mesh, shown[name].placements))
            for name, value in state.items()
        }
        model.load_state_dict(split, strict=False, assign=True)

    def load_optimizer(self, model: Any, optimizer: Any, state: States) -> None:
        _init_optim_state(optimizer)
        own = optimizer.state_dict()
        for number, kept in own["state"].items():
            for kind, value in kept.items():
                full = state["state"][number][kind]
                split = isinstance(value, DTensor)
                kept[kind] = distribute_tensor(full, value.device_mesh, value.placements) if split else full
        for group, other in zip(own["param_groups"], state["param_groups"], strict=True):
            group |= {key: value for key, value in other.items() if key != "params"}
        optimizer.load_state_dict(own)


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def through(apply: Apply, name: str, way: Any, started: bool) -> tuple[list[float], States, States]:
    """Three steps, saved, and three more in a new model that is told; as full states on rank 0."""
    model = initialised(deferred(apply, name))
    optimizer = Adam(model.parameters(), lr=1e-2)
    losses = steps(model, optimizer, 0, 3)
    weights, states = copy.deepcopy(way.save(model, optimizer))  # torch's optimizer still counts in its `step`
    told = copy.deepcopy([weights, states])  # and so does the one that is told
    dist.broadcast_object_list(told)
    again = deferred(apply, name)
    if started:  # sharded before it is told
        initialised(again).unshard()
        again.reshard()
    way.load_model(again, dict(told[0]))
    other = Adam(again.parameters(), lr=1.0)
    way.load_optimizer(again, other, told[1])
    losses += steps(again, other, 3, 6)
    assert losses[3:] == steps(model, optimizer, 3, 6)
    return losses, weights, states


def beside_torch(name: str, way: Any, started: bool) -> Any:
    return through(torch_fully_shard, name, way, started), through(tz.fully_shard, name, way, started)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "way", "started"),
    [
        pytest.param("bf16", ByDcp(), True, marks=pytest.mark.long),
        ("replicas", ByDcp(), False),
        pytest.param("defaults", ByHand(), True, marks=pytest.mark.long),
        pytest.param("kept", ByHand(), False, marks=pytest.mark.long),
    ],
)
def test_saved_and_continued_as_with_torchs_own(name: str, way: Any, started: bool, two_processes: Pool) -> None:
    for theirs, ours in two_processes.run(beside_torch, name, way, started):
        groups = [given[2].pop("param_groups", None) for given in (theirs, ours)]
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
        assert groups[0] == groups[1]


def sharded_states(name: str) -> None:
    model = initialised(deferred(tz.fully_shard, name))
    optimizer = Adam(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0, 2)
    full = tz.full_state_dict(model, keep=True)
    placements = (Replicate(), Shard(0)) if name == "replicas" else (Shard(0),)
    for key, parameter in model.named_parameters():
        assert parameter.placements == placements, key
    within = nn.ModuleDict({"net": model}).state_dict()
    assert {f"net.{key}": value.placements for key, value in model.state_dict().items()} == {
        key: value.placements for key, value in within.items()
    }
    assert "net.layers.1" in within._metadata
    for flat in (False, True):
        weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        for key, value in weights.items():
            assert value.placements == placements
            assert torch.equal(value.full_tensor(), full[key]), key
            rows = value.full_tensor().chunk(value.device_mesh.size(-1))
            mine = value.device_mesh.get_local_rank(value.device_mesh.ndim - 1)
            own = rows[mine] if mine < len(rows) else rows[0][:0]  # of a single row another rank has it
            assert torch.equal(value.to_local(), own), key
        again = initialised(deferred(tz.fully_shard, name))
        other = Adam(again.parameters(), lr=1.0)
        again.unshard()
        again.reshard()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=states, options=options)
        assert {id(each) for each in other.param_groups[0]["params"]} == {id(each) for each in again.parameters()}
        block = model.layers[1].state_dict(prefix="x.")
        assert torch.equal(block["x.up.bias"].full_tensor(), full["layers.1.up.bias"])
        assert steps(again, other, 2, 4) == steps(model, optimizer, 2, 4) or flat
        full = tz.full_state_dict(model, keep=True)


@pytest.mark.processes
@pytest.mark.parametrize("name", mostly_long(["defaults", "replicas", "offload"], "replicas"))
def test_sharded_states_are_dtensors_of_rows(name: str, two_processes: Pool) -> None:
    two_processes.run(sharded_states, name)


def refusals() -> None:
    model = initialised(deferred(tz.fully_shard, "defaults"))
    optimizer = Adam(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    calls: list[tuple[str, Callable[[], Any]]] = [
        (
            "state of 'embed.weight' has .*'exp_avg', 'exp_avg_sq'.*and this Adam keeps .*step",
            lambda: _without(optimizer, state, "step"),
        ),
        ("groups of .*2.*, and this Adam has", lambda: _fewer(optimizer, state)),
    ]
    for words, call in calls:
        with pytest.raises(tz.BadInput, match=words):
            call()
    optimizer.load_state_dict(state)
    model.load_state_dict(model.state_dict())
    steps(model, optimizer, 1, 2)
    zeros = torch.zeros_like(model.head.weight)
    with pytest.raises(tz.Misuse, match=r"torch\.zeros\(p\.shape"):
        zeros.add_(1)


def _without(optimizer: Any, state: States, kind: str) -> None:
    states = {number: {k: v for k, v in kept.items() if k != kind} for number, kept in state["state"].items()}
    optimizer.load_state_dict({**state, "state": states})


def _fewer(optimizer: Any, state: States) -> None:
    optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]})


@pytest.mark.processes
def test_states_of_other_models_are_refused(two_processes: Pool) -> None:
    two_processes.run(refusals)


def test_frozen_weights_keep_the_bits_that_are_not_computed_with() -> None:
    """As torch's own, which casts them to `param_dtype` as they are gathered."""
    base = Toy()
    base.blocks[0].requires_grad_(requires_grad=False)

    def body(rank: int) -> dict[str, torch.Tensor]:
        model, mesh = copy.deepcopy(base), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        tz.fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        loss_of_tokens(model, batch()).backward()
        assert model.blocks[0].up.weight.dtype == torch.bfloat16
        return {name: value.full_tensor() for name, value in model.state_dict().items()}

    for found in on_ranks(2, body):
        assert_equal(found, dict(base.named_parameters()))
