"""State in and out: pieces across plans and ranks, full state dicts, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import ModelState, OptimizerStates, Piece, engine_of
from tests.engine.toys import (
    EVERY_PLAN,
    Net,
    adamw,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    mesh_for,
    on_ranks,
    sharded,
    train,
    train_alone,
)
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

# -- pieces ----------------------------------------------------------------------------------------------------

Archive = dict[tuple[str, str], Tensor]
"""Flat states by (name, kind)."""


def archive_of(ranks: list[list[Piece]]) -> Archive:
    """Put every rank's pieces together; each element must come exactly once."""
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for pieces in ranks:
        for piece in pieces:
            assert piece.tensor.shape == (piece.stop - piece.start,)
            assert piece.start not in parts.setdefault((piece.name, piece.kind), {}), (piece.name, piece.kind)
            parts[piece.name, piece.kind][piece.start] = piece.tensor
    return {key: torch.cat([part for _, part in sorted(found.items())]) for key, found in parts.items()}


@dataclass(frozen=True)
class ArchiveReader:
    """A `StateReader` of whole states."""

    archive: Archive

    def has(self, name: str, kind: str) -> bool:
        return (name, kind) in self.archive

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self.archive[name, kind][start:stop]


def copied(model: nn.Module) -> list[Piece]:
    return [_copy(piece) for piece in ModelState(model).pieces()]


def _copy(piece: Piece) -> Piece:
    kept = piece.tensor.detach().clone()
    return replace(piece, read=lambda: kept)


def assert_same(found: Archive, wanted: Archive) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def make(base: nn.Module, plan: str, world_size: int, precision: str = "fp32") -> tuple[Any, Any]:
    model = copy.deepcopy(base)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim <= 1]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return tz.shard(model, optimizer, plan, mesh=mesh_for(plan, world_size), precision=precision)


def trained(base: nn.Module, plan: str, world_size: int, precision: str = "fp32") -> Archive:
    def body(rank: int) -> list[Piece]:
        model, optimizer = make(base, plan, world_size, precision)
        train(model, optimizer, 3, rank)
        return copied(model)

    return archive_of(on_ranks(world_size, body))


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_pieces_of_all_ranks_are_the_whole_state(plan: str) -> None:
    base = Net()
    archive = trained(base, plan, 4)
    shapes = {name: p.numel() for name, p in base.named_parameters()}
    assert set(archive) == {(name, kind) for name in shapes for kind in ("weight", "exp_avg", "exp_avg_sq", "step")}
    for (name, kind), value in archive.items():
        assert value.numel() == (1 if kind == "step" else shapes[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_travels_between_plans_and_world_sizes_bit_for_bit(precision: str) -> None:
    """zero1 on 1 rank, zero3 on 3, hpz on 2 x 2, zero2 on 2, zero0 on 3: what comes out is what went in."""
    base = Net()
    archive = trained(base, "zero1", 1, precision)
    untrained = Net()
    for plan, world_size in (("zero3", 3), ("hpz", 4), ("zero2", 2), ("hfsdp", 4), ("zero0", 3), ("zero3", 1)):

        def body(rank: int, plan: str = plan, world_size: int = world_size, archive: Archive = archive) -> list[Piece]:
            model, _ = make(untrained, plan, world_size, precision)
            ModelState(model).restore(ArchiveReader(archive))
            return copied(model)

        found = archive_of(on_ranks(world_size, body))
        assert_same(found, archive)
        archive = found


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_restored_run_continues_bit_for_bit(plan: str) -> None:
    base, untrained = Net(), Net()
    archive = trained(base, plan, 4)

    def uninterrupted(rank: int) -> list[float]:
        model, optimizer = make(base, plan, 4)
        return train(model, optimizer, 6, rank)[3:]

    def resumed(rank: int) -> list[float]:
        model, optimizer = make(untrained, plan, 4)
        train(model, optimizer, 1, rank, first=50)  # state that must not survive
        ModelState(model).restore(ArchiveReader(archive))
        return train(model, optimizer, 3, rank, first=3)

    assert on_ranks(4, resumed) == on_ranks(4, uninterrupted)


def test_parameters_without_state_are_restored_to_having_none() -> None:
    base = Net()

    def first(rank: int) -> list[Piece]:
        model, _optimizer = sharded(base, "zero3")
        x = model.embed.weight  # the embedding alone is used
        assert x.shape == (17, 13)
        with tz.gathered(model):
            pass
        return copied(model)

    archive = archive_of(on_ranks(2, first))
    assert {kind for _, kind in archive} == {"weight"}

    def second(rank: int) -> list[Piece]:
        model, optimizer = sharded(Net(), "zero1")
        train(model, optimizer, 2, rank)
        ModelState(model).restore(ArchiveReader(archive))
        return copied(model)

    assert_same(archive_of(on_ranks(2, second)), archive)


def test_tied_and_frozen_parameters_come_once_under_their_first_name() -> None:
    base = Net()
    base.head.weight = base.embed.weight
    base.blocks[1].requires_grad_(False)

    def body(rank: int) -> list[Piece]:
        model = copy.deepcopy(base)
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        model, optimizer = tz.shard(model, optimizer, "zero1")
        train(model, optimizer, 1, rank)
        return copied(model)

    archive = archive_of(on_ranks(3, body))
    assert {name for name, _ in archive} == {name for name, _ in base.named_parameters()}
    assert ("blocks.1.up.weight", "exp_avg") not in archive
    assert torch.equal(archive["blocks.1.up.weight", "weight"], base.blocks[1].up.weight.reshape(-1))


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    ],
    ids=["sgd", "adagrad", "amsgrad", "nadam", "rmsprop"],
)
def test_every_kind_of_state_is_restored(build: Any) -> None:
    base = Net()

    def make_it(model: nn.Module, plan: str) -> tuple[Any, Any]:
        return tz.shard(copy.deepcopy(model), build, plan)

    def before(rank: int) -> list[Piece]:
        model, optimizer = make_it(base, "zero3")
        train(model, optimizer, 3, rank)
        return copied(model)

    archive = archive_of(on_ranks(2, before))

    def after(rank: int) -> list[Piece]:
        model, _ = make_it(Net(), "zero1")
        ModelState(model).restore(ArchiveReader(archive))
        return copied(model)

    found = archive_of(on_ranks(3, after))
    assert found.keys() == archive.keys()
    for key, value in archive.items():
        assert torch.equal(found[key], value), key


# -- full state dicts ------------------------------------------------------------------------------------------


class Lazy(Mapping[str, Tensor]):
    """Hands out one tensor at a time, and remembers what was asked for."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.asked = state, []  # type: ignore[var-annotated]

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("wrap", [dict, Lazy])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_full_state_dict_is_loaded(plan: str, wrap: Any) -> None:
    base, other = Net(), Net()
    other.register_buffer("count", torch.tensor(5.0))
    base.register_buffer("count", torch.tensor(0.0))
    alone = copy.deepcopy(other)
    optimizer = adamw(alone.parameters())
    train_alone(alone, optimizer, 1, 4)

    def body(rank: int) -> tuple[dict[str, Tensor], float, float]:
        model, optimizer = sharded(base, plan, 4)
        model.load_state_dict(wrap(other.state_dict()))
        loaded = full_parameters(model)
        count = model.count.item()
        train(model, optimizer, 1, rank)
        with torch.no_grad():
            return loaded, count, loss_of(model, batch(9)).item()

    for loaded, count, loss in on_ranks(4, body):
        assert_equal(loaded, dict(other.named_parameters()))
        assert count == 5.0
        assert loss == pytest.approx(loss_of(alone, batch(9)).item(), abs=1e-5)


def test_a_tied_parameter_may_come_under_either_name() -> None:
    for name in ("embed.weight", "head.weight"):
        with fake_group(1):
            base = Net()
            base.head.weight = base.embed.weight
            state = {k: v.clone() for k, v in base.state_dict().items() if k not in ("embed.weight", "head.weight")}
            state[name] = torch.full((17, 13), 3.0)
            model, _ = tz.shard(base, None, "zero3")
            model.load_state_dict(state)
            assert bool((full_parameters(model)["embed.weight"] == 3).all())


def test_a_module_under_two_names_takes_its_own_state_dict() -> None:
    """Its persistent buffers come under both names, or under either."""

    def model() -> nn.Module:
        norm = nn.BatchNorm1d(13)
        return nn.ModuleDict({"first": nn.Sequential(nn.Linear(3, 13), norm), "again": norm, "head": nn.Linear(13, 2)})

    torch.manual_seed(1)
    plain = model()
    plain["again"].running_mean.fill_(3.0)
    state = plain.state_dict()
    assert {"first.1.running_mean", "again.running_mean"} <= state.keys()
    for left_out in ("", "first.1.", "again."):
        given = {name: value for name, value in state.items() if not left_out or not name.startswith(left_out)}
        with fake_group(1):
            sharded_model, _ = tz.shard(model(), None, "zero3")
            assert tuple(sharded_model.load_state_dict(given)) == ([], [])
            assert bool((sharded_model["first"][1].running_mean == 3).all())
            assert_equal(full_parameters(sharded_model), dict(plain.named_parameters(remove_duplicate=False)))
    with fake_group(1):
        sharded_model, _ = tz.shard(model(), None, "zero3")
        neither = {name: value for name, value in state.items() if not name.endswith("running_mean")}
        with pytest.raises(tz.BadInput, match=r"missing 'first.1.running_mean',"):
            sharded_model.load_state_dict(neither)


def refused(state: Mapping[str, Any], *words: str, **options: Any) -> None:
    """Loading `state` raises on every rank, naming `words`, and changes nothing."""
    base = Net()
    base.register_buffer("count", torch.tensor(1.0))

    def body(rank: int) -> tuple[str, dict[str, Tensor], float]:
        model, _ = sharded(base, "zero3")
        with pytest.raises(tz.BadInput) as caught:
            model.load_state_dict(state, **options)
        return str(caught.value), full_parameters(model), model.count.item()

    for text, found, count in on_ranks(2, body):
        assert all(word in text for word in words), text
        assert_equal(found, dict(base.named_parameters()))
        assert count == 1.0


def ones() -> dict[str, Tensor]:
    return {**{name: torch.ones_like(p) for name, p in Net().named_parameters()}, "count": torch.tensor(2.0)}


def test_missing_and_unexpected_names_are_listed_and_nothing_is_changed() -> None:
    state = ones()
    del state["head.bias"], state["blocks.1.up.weight"], state["count"]
    refused(
        {**state, "hed.bias": torch.ones(17)}, "head.bias", "blocks.1.up.weight", "count", "hed.bias", "strict=False"
    )


def test_what_is_no_state_dict_is_refused_with_what_to_pass() -> None:
    """A program's whole file, a wrapper's names, a path."""
    refused({"epoch": 3, "net": ones(), "opt": {"state": {}}}, "unexpected 'epoch', 'net'", "pass state_dict['net']")
    refused({"net": {f"module.{name}": one for name, one in ones().items()}}, "pass state_dict['net']")
    refused({f"module.{name}": one for name, one in ones().items()}, "begin with 'module.'", "removeprefix('module.')")
    refused({"opt": {"state": {}}}, "unexpected 'opt'. Pass strict=False")
    refused("model.pt", "not a str", "tz.checkpoint.load_weights(model, path)")  # type: ignore[arg-type]


def test_wrong_shapes_are_all_listed_and_nothing_is_changed() -> None:
    state = {**ones(), "head.bias": torch.ones(18), "embed.weight": torch.ones(13, 17)}
    refused(state, "head.bias", "(18,)", "(17,)", "embed.weight", "(13, 17)")
    refused(state, "head.bias", strict=False)


def test_a_buffer_of_the_wrong_shape_is_refused() -> None:
    refused({**ones(), "count": torch.ones(3)}, "count")


def test_not_strict_loads_what_matches() -> None:
    base = Net()

    def body(rank: int) -> tuple[Any, dict[str, Tensor]]:
        model, _ = sharded(base, "zero3")
        return model.load_state_dict(
            {"head.bias": torch.ones(17), "nose": torch.ones(1)}, strict=False
        ), full_parameters(model)

    for result, found in on_ranks(2, body):
        assert result.unexpected_keys == ["nose"]
        assert set(result.missing_keys) == set(found) - {"head.bias"}
        assert torch.equal(found.pop("head.bias"), torch.ones(17))
        assert_equal(found, {name: p for name, p in base.named_parameters() if name != "head.bias"})


# -- what is refused -------------------------------------------------------------------------------------------


def test_a_state_dict_inside_gathered_is_a_plain_one() -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(base, "zero3")
        with tz.gathered(model):
            return {name: value.clone() for name, value in model.state_dict().items()}

    for found in on_ranks(2, body):
        assert_equal(found, base.state_dict())


def test_states_of_another_shape_are_refused_before_anything_changes() -> None:
    with fake_group(1):
        model, optimizer = sharded(Net(), "zero1", 1)
        train(model, optimizer, 1, 0)
        states = OptimizerStates(engine_of(model), optimizer)

        def whole() -> dict[str, dict[str, Tensor]]:
            found: dict[str, dict[str, Tensor]] = {}
            for name, kind, value in states.whole():
                found.setdefault(name, {})[kind] = torch.as_tensor(value).clone()
            return found

        before = whole()
        name = "blocks.0.up.weight"
        for kind, value in [("exp_avg_sq", before[name]["exp_avg_sq"].T), ("step", torch.ones(2))]:
            with pytest.raises(tz.BadInput, match=rf"'{kind}' of '{name}' is"):
                states.load({**before, name: {**before[name], kind: value}})
        assert all(
            torch.equal(value, before[name][kind]) for name, own in whole().items() for kind, value in own.items()
        )
        states.load(before)


GIVEN: dict[str, Any] = {
    "set": lambda state, p: state.__setitem__(p, {}),
    "set as default": lambda state, p: state.setdefault(p, {}),
    "updated": lambda state, p: state.update({p: {}}),
    "joined": lambda state, p: state.__ior__({p: {}}),
    "deleted": lambda state, p: state.__delitem__(p),
    "popped": lambda state, p: state.pop(p, None),
}


@pytest.mark.parametrize("way", GIVEN)
def test_state_that_is_given_by_parameter_is_refused(way: str) -> None:
    def body(rank: int) -> None:
        model, optimizer = make(Net(), "zero2", 2)
        train(model, optimizer, 1, rank)
        kept = dict(optimizer.state)
        with pytest.raises(tz.Misuse, match=r"state was asked for 'embed\.weight', or given"):
            GIVEN[way](optimizer.state, model.embed.weight)
        with pytest.raises(tz.Misuse, match=r"state was asked for 'embed\.weight', or given"):
            optimizer.state = {model.embed.weight: {}}
        assert dict(optimizer.state) == kept
        optimizer.state = dict(kept)
        train(model, optimizer, 1, rank, first=1)

    on_ranks(2, body)


class OnesAsWeights:
    """A `StateReader` of weights alone, all 1."""

    def has(self, name: str, kind: str) -> bool:
        return kind == "weight"

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start)


def test_frozen_weights_restored_between_forward_and_backward_are_noticed() -> None:
    """As in plain PyTorch, where a graph refuses what has been written since."""
    base = Net()
    base.blocks[1].requires_grad_(requires_grad=False)

    def body(rank: int) -> None:
        model, optimizer = make(base, "zero3", 2)
        train(model, optimizer, 1, rank)
        loss = loss_of(model, batch(1, rank))
        ModelState(model).restore(OnesAsWeights())
        with pytest.raises(RuntimeError, match=r"restored|changed|written"):
            loss.backward()

    on_ranks(2, body)
