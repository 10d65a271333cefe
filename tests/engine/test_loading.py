"""What modules do to a state dict as it is loaded, against the same in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from tests.engine.toys import on_ranks
from tests.helpers.fake import fake_group


class Turned(nn.Linear):
    """Keeps files in the layout of an earlier version."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.loaded: list[Any] = []
        self.register_state_dict_post_hook(_turn)
        self.register_load_state_dict_pre_hook(_turn_back)
        self.register_load_state_dict_post_hook(lambda module, keys: module.loaded.append(list(keys.missing_keys)))


def _turn(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].t().clone()


def _turn_back(module: Any, state: Any, prefix: str, metadata: Any, *lists: Any) -> None:
    if f"{prefix}kernel" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()
    elif f"{prefix}weight" in state:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Turned(4), nn.ReLU(), nn.Sequential(Turned(4)))


class Lazy(Mapping[str, Tensor]):
    """Counts what is looked up."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held, self.looked_up = held, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.looked_up.append(name)
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, name: object) -> bool:
        return name in self.held


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("renamed", [False, True])
def test_hooks_around_loading_are_called(plan: str, renamed: bool) -> None:
    other = model_of()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    state = dict(other.state_dict())
    if renamed:
        state["0.kernel"] = state.pop("0.weight")
    given = {name: value.clone() for name, value in state.items()}

    def body(rank: int) -> None:
        model, _ = tz.shard(model_of(), None, plan)
        lazy = Lazy(state)
        assert model.load_state_dict(lazy) == ([], [])
        with tz.gathered(model) as parameters:
            for name, parameter in other.named_parameters():
                assert torch.equal(parameters[name], parameter), name
        assert model[0].loaded == [[]]
        assert state.keys() == given.keys()
        assert lazy.looked_up.count("2.0.bias") == 2  # its shape, its values

    on_ranks(2, body)
    assert all(torch.equal(state[name], value) for name, value in given.items())


def test_a_round_trip_through_hooks_changes_nothing() -> None:
    with fake_group(1):
        model, _ = tz.shard(model_of(), None, "zero0")
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model.load_state_dict(model.state_dict())
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, 3).numpy(), r"1\.weight is a ndarray, and no tensor"),
        (3, r"1\.weight is a int, and no tensor"),
        (torch.zeros(2, 3, device="meta"), r"1\.weight is on the meta device, and has no values"),
        (torch.zeros(3, 2), r"1\.weight is \(3, 2\) and should be \(2, 3\); 2\.running_mean is a list"),
    ],
    ids=["numpy", "number", "meta", "shape"],
)
def test_what_cannot_be_loaded_is_listed_and_nothing_is_changed(value: Any, said: str) -> None:
    with fake_group(1):
        model, _ = tz.shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.BatchNorm1d(2)), None, "zero0")
        before = {name: each.clone() for name, each in model.state_dict().items()}
        given = {name: each + 1 for name, each in before.items()} | {"1.weight": value}
        if "running_mean" in said:
            given["2.running_mean"] = [0.0, 0.0]  # type: ignore[assignment]
        with pytest.raises(tz.BadInput, match=said):
            model.load_state_dict(given)
        for name, each in model.state_dict().items():
            assert torch.equal(each, before[name]), name


class OfItsOwn(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, *others)


class Remapping(nn.Sequential):
    def load_state_dict(self, state: Any, *options: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict({f"0.{name}": value for name, value in state.items()}, *options)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(OfItsOwn(2, 2)), r"'0', a OfItsOwn, has a _load_from_state_dict of its own.*hook.*before tz"),
        (Remapping(nn.Linear(2, 2)), r"'the model', a Remapping, has a load_state_dict of its own"),
    ],
    ids=["module", "model"],
)
def test_modules_that_load_otherwise_are_refused(model: nn.Module, said: str) -> None:
    with fake_group(1):
        sharded, _ = tz.shard(copy.deepcopy(model), None, "zero0")
        with pytest.raises(tz.BadInput, match=said):
            sharded.load_state_dict(sharded.state_dict())


def test_a_hooks_objection_is_an_error_and_nothing_is_loaded() -> None:
    def object_to(module: Any, state: Any, prefix: str, metadata: Any, strict: Any, missing: Any, *lists: Any) -> None:
        lists[1].append("made by another program")

    with fake_group(1):
        model, _ = tz.shard(nn.Linear(2, 2), None, "zero0")
        model.register_load_state_dict_pre_hook(object_to)
        with pytest.raises(tz.BadInput, match="made by another program"):
            model.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
        assert bool(model.weight.any())


def test_torchs_own_modules_load() -> None:
    with fake_group(1):
        model, _ = tz.shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), None, "zero0")
        model.load_state_dict(model.state_dict())
