"""What users write and load has to be the same on every rank: taken over, taken from the first, or refused by name."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import whole_weights
from terrazzo.engine.consensus.joint_checks import all_or_none, check_alike
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.sharding import compared_facts
from tests.engine.toys import Net, full_parameters, on_ranks, sharded

PLANS = ["zero0", "zero2", "zero3"]


def with_sevens(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("plan", PLANS)
def test_what_one_rank_alone_writes_is_refused_by_name(plan: str) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), plan)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            parameters["embed.weight"].zero_()
            if rank == 1:
                parameters["head.bias"].fill_(7.0)

    with pytest.raises(tz.RanksApart, match=r"differ in 'head\.bias'\. .*first rank"):
        on_ranks(2, body)


@pytest.mark.parametrize(
    ("plan", "precision"), [("zero0", "fp32"), ("zero2", "bf16"), ("zero3", "bf16"), ("hpz", "fp32")]
)
def test_what_the_first_rank_writes_is_taken_on_all(plan: str, precision: Any) -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(copy.deepcopy(base), plan, 4 if plan == "hpz" else 2, precision=precision)
        with tz.gathered(model, write="first rank") as parameters, torch.no_grad():
            if rank == 0:
                parameters["head.bias"].fill_(7.0)
                parameters["blocks.0.up.weight"].data = torch.full((27, 13), 0.5, dtype=parameters["head.bias"].dtype)
            with tz.gathered(model, write="first rank") as inner:
                inner["blocks.1.up.bias"].data.fill_(float(rank + 3))
        return {name: value.float() for name, value in full_parameters(model).items()}

    wanted = {name: value.detach().clone() for name, value in base.named_parameters()}
    wanted |= {"head.bias": torch.full((17,), 7.0), "blocks.0.up.weight": torch.full((27, 13), 0.5)}
    wanted["blocks.1.up.bias"] = torch.full((27,), 3.0)
    ranks = 4 if plan == "hpz" else 2
    for found in on_ranks(ranks, body):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


def test_whether_a_rank_has_failed_is_exchanged_in_the_hosts_memory() -> None:
    axes: Any = SimpleNamespace(device=torch.device("meta"), whole_mesh=(), maximum=lambda values, along: values)
    assert all_or_none(axes, lambda: 3) == 3


@pytest.mark.parametrize("axis", ["dp_shard", "pp", "tp"])
def test_ranks_with_other_versions_are_refused_along_every_axis(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_facts, "versions", lambda: {"torch version": f"2.{dist.get_rank()}"})

    def body(rank: int) -> None:
        axes = Axes(tz.mesh(**{axis: 2}, device="cpu"), Tally())
        with pytest.raises(tz.BadInput, match=r"torch version \('2\.0' on rank 0; '2\.1' on rank 1\)"):
            compared_facts.check_versions(axes)

    on_ranks(2, body)


def test_another_write_is_refused() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero2")
        with pytest.raises(tz.BadInput, match="'first rank'"), tz.gathered(model, write="rank 0"):  # type: ignore[arg-type]
            pass

    on_ranks(1, body)


@pytest.mark.parametrize("plan", PLANS)
def test_a_state_dict_on_one_rank_alone_is_refused_before_anything_changes(plan: str) -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(copy.deepcopy(base), plan)
        with pytest.raises(tz.RanksApart, match=r"'embed\.weight'.*Nothing has been loaded"):
            model.load_state_dict(with_sevens(base) if rank == 0 else {}, strict=False)
        with pytest.raises(tz.BadInput, match=r"takes names with full tensors|Rank 1 cannot do its part"):
            model.load_state_dict(with_sevens(base) if rank == 0 else None)
        return full_parameters(model)

    for found in on_ranks(2, body):
        torch.testing.assert_close(found, dict(base.named_parameters()))


@pytest.mark.parametrize("plan", PLANS)
def test_other_values_on_one_rank_are_refused_by_name(plan: str) -> None:
    class Counted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

    def body(rank: int) -> None:
        model, _ = sharded(Counted(), plan)
        state = with_sevens(Counted())
        state["blocks.1.up.bias"][3] += rank
        state["count"] += rank
        model.load_state_dict(state)

    with pytest.raises(tz.RanksApart, match=r"other values of 'blocks\.1\.up\.bias', 'count'"):
        on_ranks(2, body)


def test_names_in_another_order_on_one_rank_are_refused_before_anything_is_gathered() -> None:
    def body(rank: int) -> float:
        model, _ = sharded(Net(), "zero3")
        names = ["blocks.0.up.weight", "blocks.1.up.weight"]
        with pytest.raises(tz.RanksApart, match="the same names in the same order"):
            next(iter(whole_weights(model, names[:: 1 if rank else -1])))
        with pytest.raises(tz.RanksApart, match="the same names in the same order"):
            next(iter(whole_weights(model, names if rank else ["nowhere"])))
        return sum(value.sum().item() for _, value in whole_weights(model, names))

    first, second = on_ranks(2, body)
    assert first == second


def test_names_of_any_script_are_told_of() -> None:
    """Of which one character takes many bytes of what ranks tell each other, and other ranks' take fewer."""
    name = "𝄞" * 250

    def body(rank: int) -> None:
        axes = Axes(init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), Tally())
        with pytest.raises(tz.BadInput, match=r"𝄞\.\.\. \('a' on rank 0; 'aaaa' on rank 1\)"):
            check_alike(axes, {name: "aaaa" if rank else "a"}, axes.data)

    on_ranks(2, body)
