"""State dicts of a sharded model and its optimizer: those of plain PyTorch, whatever the plan, there and back."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import ShardedModule
from tests.engine.toys import Net, assert_equal, batch, loss_of, mesh_for, on_ranks
from tests.helpers.cover import places
from tests.helpers.threads import exclusive

PLANS = ("zero0", "zero1", "zero2", "zero3", "hybrid_shard", "zero3@cpu-all")


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)  # the fused kernel rounds by where elements lie


def steps(model: Any, optimizer: Optimizer, first: int, count: int = 2) -> None:
    """On every rank the same batch: of two, four or eight equal gradients the mean is that gradient to the bit."""
    for step in range(first, first + count):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(count: int = 2) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw([{"params": model.blocks.parameters(), "lr": 3e-3}, {"params": [*rest(model)]}])
    steps(model, optimizer, 0, count)
    return model, optimizer


def rest(model: Any) -> list[nn.Parameter]:
    return [*model.embed.parameters(), *model.head.parameters()]


def sharded(plan: str, ranks: int, trained: tuple[Any, Any], **options: Any) -> tuple[Any, Any]:
    """A copy of a model and its optimizer: ranks share the random generator, so none of them makes one."""
    return tz.shard(*copy.deepcopy(trained), plan, mesh=mesh_for(plan, ranks), **options)


def assert_same(found: Any, wanted: Any) -> None:
    """The same optimizer's state dict, to the bit, of whole tensors."""
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, kept in wanted["state"].items():
        assert list(found["state"][number]) == list(kept)
        for kind, value in kept.items():
            other = found["state"][number][kind]
            assert type(other) is Tensor and other.dtype == value.dtype and torch.equal(other, value), (number, kind)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", PLANS)
def test_they_are_those_of_plain_pytorch(plan: str) -> None:
    wanted, plain = alone(3)
    fresh = alone(0)

    def body(rank: int) -> tuple[Any, Any, Any, Any]:
        model, optimizer = sharded(plan, 4, fresh)
        first = optimizer.state_dict()
        steps(model, optimizer, 0, 3)
        return first, model.state_dict(), optimizer.state_dict(), model.state_dict(prefix="model.")

    for first, state, kept, prefixed in on_ranks(4, body):
        assert_same(first, fresh[1].state_dict())
        assert_equal(state, wanted.state_dict())
        assert list(state) == list(wanted.state_dict())
        assert state._metadata == wanted.state_dict()._metadata
        assert_same(kept, plain.state_dict())
        assert list(prefixed) == [f"model.{name}" for name in state]


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("plan", PLANS)
def test_those_of_plain_pytorch_are_gone_on_from_to_the_bit_and_back(plan: str) -> None:
    """Two steps alone, two sharded, two alone again."""
    fresh, (before, optimizer_before) = alone(0), alone(2)
    wanted, plain = alone(6)

    def body(rank: int) -> tuple[Any, Any]:
        model, optimizer = sharded(plan, 2, fresh)
        optimizer.param_groups[0]["lr"] = 1.0  # which that state dict has otherwise
        found = model.load_state_dict(before.state_dict())
        assert not found.missing_keys and not found.unexpected_keys
        optimizer.load_state_dict(optimizer_before.state_dict())
        steps(model, optimizer, 2)
        return model.state_dict(), optimizer.state_dict()

    for state, kept in on_ranks(2, body):
        model, optimizer = copy.deepcopy(fresh)
        model.load_state_dict(state)
        optimizer.load_state_dict(kept)
        steps(model, optimizer, 4)
        assert_equal(model.state_dict(), wanted.state_dict())
        assert_same(optimizer.state_dict(), plain.state_dict())


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", tz.Precision(moments=torch.bfloat16)])
@pytest.mark.parametrize("plan", ["zero2", "zero3@cpu"])
def test_in_16_bits_a_run_goes_on_as_if_it_had_not_been_stopped(plan: str, precision: Any) -> None:
    fresh, other_weights = alone(0), alone(1)

    def run(stops: bool) -> Any:
        def body(rank: int) -> tuple[Any, Any]:
            model, optimizer = sharded(plan, 2, fresh, precision=precision)
            steps(model, optimizer, 0)
            if stops:
                state, kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model, optimizer = sharded("zero3", 2, other_weights, precision=precision)
                model.load_state_dict(state)
                optimizer.load_state_dict(kept)
            steps(model, optimizer, 2)
            return model.state_dict(), optimizer.state_dict()

        return on_ranks(2, body)

    for (found, kept), (wanted, other) in zip(run(True), run(False), strict=True):
        assert_equal(found, wanted)
        assert_same(kept, other)
        dtype = torch.bfloat16 if precision == "bf16-pure" else torch.float32
        assert {value.dtype for value in found.values()} == {dtype}  # of the masters


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_frozen_weights_that_are_computed_with_in_sixteen_bits_keep_all_of_theirs(plan: str) -> None:
    base = Net()
    base.blocks[0].requires_grad_(requires_grad=False)
    wanted = {name: value.detach().clone() for name, value in base.named_parameters()}

    def body(rank: int) -> tuple[Any, Any]:
        model, _ = tz.shard(copy.deepcopy(base), None, plan, precision=tz.Precision(compute="bf16"))
        assert model.blocks[0].up.weight.dtype == torch.bfloat16
        before = model.state_dict()
        model.load_state_dict(before)
        return before, model.state_dict()

    for before, after in on_ranks(2, body):
        assert_equal(before, wanted)
        assert_equal(after, wanted)


def test_parameters_that_had_no_gradient_have_no_state_and_frozen_ones_keep_their_numbers() -> None:
    def built() -> tuple[Any, Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(3, 2), "left": nn.Linear(3, 2), "still": nn.Linear(3, 2)})
        model["still"].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters(), amsgrad=True)

    def step(model: Any, optimizer: Optimizer) -> Any:
        (model["used"](torch.ones(1, 3)) + model["still"](torch.ones(1, 3))).square().sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    fresh, wanted = built(), step(*built())
    assert wanted["state"].keys() == {0, 1}

    def body(rank: int) -> Any:
        model, optimizer = copy.deepcopy(fresh)

        class Called(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: Tensor) -> Tensor:
                return self.inner["used"](x) + self.inner["still"](x)

        whole, optimizer = tz.shard(Called(), optimizer, "zero3")
        whole(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        kept = optimizer.state_dict()
        optimizer.load_state_dict(kept)
        return kept, optimizer.state_dict()

    for found in on_ranks(2, body):
        for kept in found:
            assert_same(kept, wanted)


def test_states_of_frozen_parameters_are_left_out_with_a_warning() -> None:
    said = r"states of 'embed\.weight', which are frozen.* not kept"

    def body(rank: int) -> None:
        model, optimizer = alone()
        state = optimizer.state_dict()
        model.embed.requires_grad_(False)
        with exclusive(), warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=said):
                tz.shard(model, optimizer, "zero1")
        with pytest.warns(UserWarning, match=said):
            tz.shard(model, optimizer, "zero1")  # nothing had been changed
        with pytest.warns(UserWarning, match=said):
            optimizer.load_state_dict(state)
        assert len(optimizer.state_dict()["state"]) == len(state["state"]) - 1
        made = Net()
        made.embed.requires_grad_(False)
        adagrad = torch.optim.Adagrad(made.parameters())  # it has states already, of no step
        state = adagrad.state_dict()
        tz.shard(made, adagrad, "zero1")
        adagrad.load_state_dict(state)

    on_ranks(1, body)


def test_two_values_for_one_tied_parameter_are_refused() -> None:
    untied, tied = Net(), Net()
    tied.head.weight = tied.embed.weight
    state = untied.state_dict()

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(tied), None, "zero3")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(tz.BadInput, match=r"'embed\.weight' and 'head\.weight' have different values"):
            model.load_state_dict(state)
        assert_equal(model.state_dict(), before)
        model.load_state_dict(state | {"head.weight": state["embed.weight"].clone()})

    on_ranks(2, body)


def test_hooks_for_state_dicts_are_called_and_tied_weights_share_memory() -> None:
    base = Net()
    base.head.weight = base.embed.weight

    def body(rank: int) -> list[Any]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), "zero3")
        told: list[Any] = []
        model.register_state_dict_post_hook(lambda module, state, prefix, local: told.append(len(state)))
        optimizer.register_state_dict_post_hook(lambda own, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda own, state: told.append(state["more"]))
        optimizer.register_load_state_dict_post_hook(lambda own: told.append(own is optimizer))
        steps(model, optimizer, 0, 1)
        state, kept = model.state_dict(), optimizer.state_dict()
        optimizer.load_state_dict(kept)
        tied = state["head.weight"] is state["embed.weight"]
        assert isinstance(model, ShardedModule) and isinstance(
            model.state_dict(keep_vars=True)["head.bias"], nn.Parameter
        )
        return [*told, tied]

    assert on_ranks(2, body)[0] == [15, 1, True, 15, True]


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    fresh = alone(0)

    def body(rank: int) -> None:
        model, optimizer = sharded("zero3", 2, fresh)
        steps(model, optimizer, 0)
        before, weights = optimizer.state_dict(), model.state_dict()

        def refused(words: str, given: Any) -> None:
            with pytest.raises(tz.BadInput, match=words):
                optimizer.load_state_dict(given)

        refused(r"not a dict of 'epoch', 'optimizer'.*tz\.checkpoint\.load", {"epoch": 1, "optimizer": before})
        refused("not a list", [before])
        refused("'state' is a int, and is to have a dict", {"state": 3, "param_groups": 3})
        refused("'state' is a dict of 0, and is to have a dict", {**before, "state": {0: 3}})
        refused("'param_groups' is a int, and is to be a list", {**before, "param_groups": 3})
        refused(r"param groups of \[13, 3\].*has \[12, 3\]", _with_more(before))
        other = copy.deepcopy(before)
        del other["state"][3]["exp_avg"]
        refused(r"'blocks\.0\.down\.bias' has \['exp_avg_sq', 'step'\].*settings", other)
        other = copy.deepcopy(before)
        other["state"][3]["exp_avg"] = torch.zeros(7)
        refused(r"'exp_avg' of 'blocks\.0\.down\.bias' is \(7,\) and should be \(13,\)", other)
        other = copy.deepcopy(before)
        other["state"][3]["exp_avg"] += rank
        with pytest.raises(tz.RanksApart, match=r"other states of 'blocks\.0\.down\.bias: exp_avg'\. Nothing has been"):
            optimizer.load_state_dict(other)
        if rank == 0:
            other["state"].clear()
        with pytest.raises(tz.RanksApart, match="Nothing has been loaded"):
            optimizer.load_state_dict(other)
        with pytest.raises(tz.BadInput):
            optimizer.load_state_dict(before if rank else {})
        assert_same(optimizer.state_dict(), before)
        assert_equal(model.state_dict(), weights)

    on_ranks(2, body)


def _with_more(state: Any) -> Any:
    groups = copy.deepcopy(state["param_groups"])
    groups[0]["params"].append(99)
    return {**state, "param_groups": groups}


class Counting(torch.optim.SGD):
    """One of a user's own."""

    elementwise = True

    def state_dict(self) -> Any:
        return {**super().state_dict(), "mine": 3}

    def load_state_dict(self, state_dict: Any) -> None:
        self.mine = state_dict["mine"]
        super().load_state_dict(state_dict)


def test_an_optimizer_that_saves_in_its_own_way_does_so_and_one_that_loads_so_is_refused() -> None:
    base = Net()

    def body(rank: int) -> Any:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, Counting(model.parameters(), lr=0.1, momentum=0.9), "zero3")
        steps(model, optimizer, 0, 1)
        kept = optimizer.state_dict()
        with pytest.raises(tz.BadInput, match=r"Counting has a load_state_dict of its own.*post_hook"):
            optimizer.load_state_dict(kept)
        return kept

    kept = on_ranks(2, body)[0]
    assert kept["mine"] == 3 and len(kept["state"]) == 15


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
@pytest.mark.parametrize("call", ["model", "optimizer", "load"])
def test_one_rank_alone_is_told_at_once(call: str, plan: str) -> None:
    """In bf16, where masters are split in either plan."""

    fresh = alone(0)

    def body(rank: int) -> None:
        model, optimizer = sharded(plan, 2, fresh, precision="bf16")
        steps(model, optimizer, 0, 1)
        kept = optimizer.state_dict()
        calls = {"model": model.state_dict, "optimizer": optimizer.state_dict}
        if rank == 0:
            calls.get(call, lambda: optimizer.load_state_dict(kept))()
        steps(model, optimizer, 1, 1)

    with pytest.raises(tz.RanksApart, match="The ranks have not run the same") as told:  # of that rank or the other
        on_ranks(2, body)
    assert "raised on rank 1" in told.value.__notes__[0] or "is of all ranks" in str(told.value)


def test_nobody_else_s_weights_are_saved_or_loaded_inside_an_average() -> None:
    fresh = alone(0)

    def body(rank: int) -> None:
        model, optimizer = sharded("zero3", 2, fresh)
        average = tz.EMA(model, 0.5)
        steps(model, optimizer, 0, 1)
        average.update()
        kept = optimizer.state_dict()
        with average.swapped():
            assert_equal(model.state_dict(), tz.full_state_dict(model, keep=True))
            for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(kept)):
                with pytest.raises(tz.Misuse, match="swapped"):
                    call()

    on_ranks(2, body)


def test_what_others_have_put_into_a_destination_stays() -> None:
    """As torch's `state_dict` leaves it; a name that the model has, too, is the model's."""
    base, theirs = Net(), torch.arange(3.0)

    def body(rank: int) -> dict[str, Any]:
        model, _ = tz.shard(copy.deepcopy(base), None)
        found: dict[str, Any] = OrderedDict(theirs=theirs)
        found["head.bias"] = torch.zeros(1)
        assert model.state_dict(destination=found) is found
        return found

    for found in on_ranks(2, body):
        assert found.pop("theirs") is theirs
        assert_equal(found, base.state_dict())
