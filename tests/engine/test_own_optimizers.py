"""Optimizers whose step does more than torch's own, and lists of param groups that were changed."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from terrazzo.engine.optim.stock.param_groups import choose_kernel
from terrazzo.errors import RanksApart
from tests.engine.toys import Net, assert_close, batch, full_parameters, loss_of, on_ranks, step
from tests.helpers.fake import fake_group

WIDE_MOMENTS: dict[str, Any] = {"precision": tz.Precision(moments=torch.float64)}
"""A way to have each tensor stepped apart from others that rounds nothing."""
IGNORES_WIDE_MOMENTS = pytest.mark.filterwarnings("ignore:precision. moments in fp64")


class Decaying(torch.optim.SGD):
    """Decays every parameter before its step."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        return super().step(closure)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("zero1", {}),
        ("zero2@cpu", {}),
        ("zero2@cpu", {"offload": tz.Offload(step="synchronous")}),
        ("zero3", {"precision": tz.Precision(moments="bf16")}),
    ],
)
def test_each_parameter_is_decayed_once(plan: str, options: dict[str, Any]) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Decaying(alone.parameters(), lr=0.1)
    torch.optim.SGD(alone.parameters())  # from now on, torch calls hooks around the step of the base class, too
    for number in range(3):
        step(alone, optimizer, loss_of(alone, batch(number)))

    def body(rank: int) -> tuple[dict[str, Tensor], int]:
        own = copy.deepcopy(base)
        model, own_optimizer = tz.shard(own, Decaying(own.parameters(), lr=0.1), plan, **options)
        for number in range(3):
            step(model, own_optimizer, loss_of(model, batch(number)))
        return full_parameters(model), len(own_optimizer.param_groups[0]["params"])

    for found, shown in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)
        assert shown > 0  # between steps, a group has its tensors


@pytest.mark.parametrize("plan", ["zero0", "zero2@cpu"])
@pytest.mark.parametrize("change", [list.pop, list.reverse])
def test_a_list_of_groups_that_was_changed_is_refused(plan: str, change: Any) -> None:
    def body(rank: int) -> None:
        base = Net()
        parameters = list(base.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}]
        model, optimizer = tz.shard(base, torch.optim.SGD(groups, lr=0.1), plan)
        step(model, optimizer, loss_of(model, batch()))
        change(optimizer.param_groups)
        with pytest.raises(tz.Misuse, match="removed or reordered"):
            step(model, optimizer, loss_of(model, batch()))

    on_ranks(2, body)


class Counting(torch.optim.SGD):
    """Each step is as long as it has taken steps, and counts in attributes and in its groups."""

    elementwise = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count, self.seen, self.history = 0, torch.zeros(()), [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.seen += 1
        self.history.append(self.count)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    length = self.count + float(self.seen) + len(self.history) + group["steps"]
                    parameter.sub_(parameter.grad, alpha=group["lr"] * length)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        ("zero3", None),
        ("zero3@cpu", None),
        ("zero2@nvme", None),
        ("zero3", tz.Precision(moments="bf16")),  # type: ignore[arg-type]
    ],
    ids=["zero3", "cpu", "nvme", "moments"],
)
def test_what_a_step_counts_is_counted_once(plan: str, precision: Any, tmp_path: Path) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Counting(alone.parameters(), lr=0.01)
    for number in range(3):
        step(alone, optimizer, loss_of(alone, batch(number)))

    def body(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(base)
        options = {} if precision is None else {"precision": precision}
        tier = {"offload": tz.Offload(path=tmp_path)} if "nvme" in plan else {}
        model, counting = tz.shard(own, Counting(own.parameters(), lr=0.01), plan, **options, **tier)
        for number in range(3):
            step(model, counting, loss_of(model, batch(number)))
        assert (counting.count, float(counting.seen), counting.history) == (3, 3.0, [0, 1, 2, 3])
        assert counting.param_groups[0]["steps"] == 3
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_a_skipped_step_is_not_counted() -> None:
    def body(rank: int) -> None:
        model, counting = Net(), None
        model, counting = tz.shard(model, Counting(model.parameters(), lr=0.01), "zero2", precision="fp16")
        seen = counting.seen
        step(model, counting, loss_of(model, batch(0)) * float("inf"))
        assert counting.skipped_steps == 1
        assert (counting.count, float(counting.seen), counting.history) == (0, 0.0, [0])
        assert counting.seen is seen
        assert "steps" not in counting.param_groups[0]
        step(model, counting, loss_of(model, batch(1)))
        assert (counting.count, counting.param_groups[0]["steps"]) == (1, 1)

    on_ranks(2, body)


def test_a_kernel_that_was_declined_is_not_taken() -> None:
    """`foreach=False` is a choice."""
    for choice in ({"foreach": False}, {"foreach": True}, {"fused": False}):
        with fake_group(2):
            model = Net()
            _, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters(), **choice), "zero2@cpu")
            assert not optimizer.param_groups[0]["fused"]
    with fake_group(2):
        model = Net()
        _, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters()), "zero2@cpu")
        assert optimizer.param_groups[0]["fused"]


def test_a_kernel_is_taken_for_what_has_it_alone() -> None:
    """Whatever the groups of a user's own optimizer hold."""
    net = Net()
    own = Decaying([{"params": list(net.parameters()), "algorithm": "adamw"}], lr=0.1)
    muon = tz.optim.Muon(*tz.optim.hidden_matrices(net))
    for each in (own, muon):
        choose_kernel(each)
    assert [group.get("fused") for group in (*own.param_groups, *muon.param_groups)] == [None, None, True]


def test_gradients_of_a_model_whose_optimizer_is_gone() -> None:
    def body(rank: int) -> float:
        model = Net()
        model, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters()), "zero2@cpu")
        step(model, optimizer, loss_of(model, batch(0)))
        del optimizer
        loss_of(model, batch(1)).backward()
        return float(tz.clip_grad_norm_(model, float("inf")))

    assert all(norm > 0 for norm in on_ranks(2, body))


class Failing(torch.optim.SGD):
    """Raises in a step, where no hook is called behind it."""

    elementwise = True
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise FloatingPointError("in the middle of a step")
        return super().step(closure)


@pytest.mark.parametrize("touch", ["forward", "gathered", "state_dict", "save"])
def test_after_a_step_that_raised_the_groups_hold_parameters_at_the_next_touch(touch: str, tmp_path: Path) -> None:
    with fake_group(1):
        base = Net()
        given = list(base.parameters())
        model, optimizer = tz.shard(base, Failing(given, lr=0.1), "zero1")
        optimizer.fails = True
        with pytest.raises(FloatingPointError):
            step(model, optimizer, loss_of(model, batch()))
        if touch == "forward":
            with torch.no_grad():
                loss_of(model, batch())
        elif touch == "gathered":
            with tz.gathered(model):
                pass
        elif touch == "state_dict":
            model.state_dict()
        else:
            tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        held = optimizer.param_groups[0]["params"]
        assert len(held) == len(given) and all(one is other for one, other in zip(held, given, strict=True))


class Assigning(torch.optim.Optimizer):
    """Gives parameters new memory rather than new values."""

    elementwise = True

    def __init__(self, parameters: Any, lr: float, way: str) -> None:
        super().__init__(parameters, {"lr": lr})
        self.way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.state[parameter]["sum"] = self.state[parameter].get("sum", 0) + parameter.grad
                new = parameter - group["lr"] * self.state[parameter]["sum"]
                if self.way == "data":
                    parameter.data = new
                else:
                    parameter.set_(new)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("way", ["data", "set"])
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("zero0", {}),
        ("zero1", {}),
        ("zero3", {}),
        ("zero3@cpu", {}),
        ("zero2@nvme", {}),
        pytest.param("zero3", WIDE_MOMENTS, marks=IGNORES_WIDE_MOMENTS),
    ],
    ids=["zero0", "zero1", "zero3", "cpu", "nvme", "moments"],
)
def test_new_values_in_new_memory_are_kept(way: str, plan: str, options: dict[str, Any], tmp_path: Path) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Assigning(alone.parameters(), 0.1, way)
    for number in range(3):
        step(alone, optimizer, loss_of(alone, batch(number)))

    def body(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(base)
        tier = {"offload": tz.Offload(path=tmp_path)} if "nvme" in plan else {}
        model, assigning = tz.shard(own, Assigning(own.parameters(), 0.1, way), plan, **options, **tier)
        for number in range(3):
            step(model, assigning, loss_of(model, batch(number)))
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


class RaisingBehind(torch.optim.SGD):
    """Raises once it has updated everything."""

    elementwise = True
    raises = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.raises:
            raise FloatingPointError("behind the update")


def _with_a_step_that_raises(model: Any, optimizer: RaisingBehind, which: int) -> None:
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        optimizer.raises = number == which
        with contextlib.suppress(FloatingPointError):
            optimizer.step()


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("which", [1, 2], ids=["inner", "last"])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_what_a_step_has_updated_before_it_raised_is_on_all_ranks(which: int, plan: str) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    _with_a_step_that_raises(alone, RaisingBehind(alone.parameters(), lr=0.1, momentum=0.9), which)

    def body(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(base)
        optimizer = RaisingBehind(own.parameters(), lr=0.1, momentum=0.9)
        model, sharded = tz.shard(own, optimizer, plan)
        _with_a_step_that_raises(model, sharded, which)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_weights_of_a_lower_precision_follow_their_masters_behind_a_step_that_raised() -> None:
    def body(rank: int) -> None:
        optimizer: Any = None
        model, optimizer = tz.shard(Net(), lambda given: RaisingBehind(given, lr=0.1), "zero1", precision="bf16")
        _with_a_step_that_raises(model, optimizer, which=2)
        with torch.no_grad():
            found = model(batch())
        alone = Net()
        alone.load_state_dict(model.state_dict())
        assert torch.equal(found, alone.bfloat16()(batch()))

    on_ranks(2, body)


def test_a_graph_from_before_a_step_that_raised_is_not_differentiated() -> None:
    """Its weights are others now; torch says so too, of weights that have changed in place."""

    def loop(model: Any, optimizer: RaisingBehind) -> None:
        earlier = loss_of(model, batch(0))
        loss_of(model, batch(1)).backward()
        optimizer.raises = True
        with pytest.raises(FloatingPointError):
            optimizer.step()
        earlier.backward()

    alone = Net()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loop(alone, RaisingBehind(alone.parameters(), lr=0.1))
    with fake_group(1):
        model, optimizer = tz.shard(Net(), lambda given: RaisingBehind(given, lr=0.1), "zero0")
        with pytest.raises(tz.Misuse, match="weights have been changed since its forward"):
            loop(model, optimizer)


class ByFirstGroup(torch.optim.Optimizer):
    """One rate for all groups, that of the first."""

    elementwise = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.param_groups[0]["lr"]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter]
                    kept["sum"] = kept.get("sum", 0) + parameter.grad
                    parameter.sub_(kept["sum"], alpha=rate)


def _groups(model: torch.nn.Module, lr: float = 0.1) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "lr": lr}, {"params": parameters[1::2], "lr": lr / 50}]


APART: Any = [
    pytest.param("zero1", {}, id="zero1"),
    pytest.param("zero3@cpu", {}, id="cpu"),
    pytest.param("zero2@nvme", {}, id="nvme"),
    pytest.param("zero3", WIDE_MOMENTS, id="moments", marks=IGNORES_WIDE_MOMENTS),
]
"""The optimizer's own step, and each way to step a tensor apart from it."""
IN_BACKWARD: Any = pytest.param("zero3@cpu", {"offload": tz.Offload(step="backward")}, id="in-backward")


def _follows_alone(
    kind: type[torch.optim.Optimizer], loss: Any, plan: str, options: dict[str, Any], path: Path
) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = kind(_groups(alone), lr=0.1)  # type: ignore[call-arg]
    for number in range(4):
        step(alone, optimizer, loss(alone, number))
    if "nvme" in plan:
        options = {"offload": tz.Offload(path=path)}

    def body(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(base)
        model, own_optimizer = tz.shard(own, kind(_groups(own), lr=0.1), plan, **options)  # type: ignore[call-arg]
        for number in range(4):
            step(model, own_optimizer, loss(model, number))
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


@pytest.mark.parametrize(("plan", "options"), [*APART, IN_BACKWARD])
def test_a_step_sees_all_param_groups(plan: str, options: dict[str, Any], tmp_path: Path) -> None:
    _follows_alone(ByFirstGroup, lambda model, number: loss_of(model, batch(number)), plan, options, tmp_path)


def _of_some_blocks(model: Any, number: int) -> Tensor:
    """The second gets gradients in every other step, the last one and the root never."""
    shown = torch.linspace(-1, 1, 26).view(2, 13) * (number + 1)
    return model.blocks[0](shown if number % 2 else model.blocks[1](shown)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("plan", "options"), APART)
def test_parameters_without_gradients_are_decayed_as_in_one_process(
    plan: str, options: dict[str, Any], tmp_path: Path
) -> None:
    _follows_alone(Decaying, _of_some_blocks, plan, options, tmp_path)


def _with_momentum_from_the_second_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):
        optimizer.param_groups[0]["momentum"] = 0.9 if number else 0.0
        step(model, optimizer, loss_of(model, batch(number)))


@pytest.mark.parametrize("plan", ["zero3", "zero2@cpu"])
def test_states_that_nothing_would_restore_are_not_left_out(plan: str, tmp_path: Path) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    _with_momentum_from_the_second_step(alone, optimizer)
    wanted = optimizer.state_dict()["state"]

    def body(rank: int) -> None:
        for momentum in (0.0, 0.9):
            own = copy.deepcopy(base)
            model, sharded = tz.shard(own, torch.optim.SGD(own.parameters(), lr=0.1, momentum=momentum), plan)
            _with_momentum_from_the_second_step(model, sharded)
            assert_close(full_parameters(model), dict(alone.named_parameters()), 2e-6)
            if momentum:
                found = sharded.state_dict()["state"]
                for number, kept in wanted.items():
                    torch.testing.assert_close(found[number]["momentum_buffer"], kept["momentum_buffer"])
                continue
            with pytest.raises(tz.Misuse, match="keeps 'momentum_buffer' for param group 0"):
                sharded.state_dict()
            with pytest.raises(tz.Misuse, match="SGD its momentum say, and turn them off"):
                tz.checkpoint.save(tmp_path / "a", model, sharded, {})
        assert not (tmp_path / "a").exists()

    on_ranks(2, body)


class Slowing(torch.optim.SGD):
    """Each zero_grad makes the next step shorter."""

    elementwise, steps = True, 0

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().zero_grad(set_to_none)


class Remembering(Net):
    """Keeps what it has seen until its gradients are zeroed; `zero_grad` takes no argument."""

    seen = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(tokens) / self.seen  # type: ignore[no-any-return]

    def zero_grad(self) -> None:  # type: ignore[override]
        self.seen = 0
        super().zero_grad()


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_what_else_a_zero_grad_does_is_done(by: str, plan: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number in range(3):
            loss_of(model, batch(number)).backward()
            optimizer.step()
            (model if by == "model" else optimizer).zero_grad()

    base = Remembering()
    alone = copy.deepcopy(base)
    loop(alone, Slowing(alone.parameters(), lr=0.1))

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = tz.shard(copy.deepcopy(base), lambda given: Slowing(given, lr=0.1), plan)
        loop(model, optimizer)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_a_no_sync_of_a_models_own_is_not_taken_for_torchs() -> None:
    class Own(Net):
        def no_sync(self) -> None:
            raise AssertionError

    with fake_group(1):
        model, _ = tz.shard(Own(), None, "zero1")
        with pytest.raises(tz.Misuse, match=r"Own has a no_sync of its own.*tz\.accumulate"):
            model.no_sync()


class FailingLate(torch.optim.SGD):
    """Raises in its `fails`-th step of a tensor, after it has changed that."""

    elementwise = True
    fails = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if type(self).fails and any(group["params"] for group in self.param_groups):
            type(self).fails -= 1
            if not type(self).fails:
                raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("failing", [(0,), (0, 1)])
def test_a_raise_between_tensors_leaves_all_ranks_the_same_weights_and_states_as_they_rest(
    failing: tuple[int, ...],
) -> None:
    base = Net()

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
        class Own(FailingLate):
            pass

        own = copy.deepcopy(base)
        built = Own(own.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = tz.shard(own, built, "zero3", precision=tz.Precision(moments="bf16"))
        step(model, optimizer, loss_of(model, batch(0)))
        before = full_parameters(model)
        loss_of(model, batch(1)).backward()
        Own.fails = 2 if rank in failing else 0
        with pytest.raises(ZeroDivisionError) if rank in failing else contextlib.nullcontext():
            optimizer.step()
        torn = full_parameters(model)
        kept = {value.dtype for state in optimizer.state.values() for value in state.values()}
        optimizer.zero_grad()
        with contextlib.nullcontext() if len(failing) == 2 else pytest.raises(RanksApart, match=r"called . times here"):
            step(model, optimizer, loss_of(model, batch(2)))
        return before, torn, kept

    (before, first, kept), (_, second, also) = on_ranks(2, body)
    assert_close(first, second, 0.0)
    assert kept == also == {torch.bfloat16}
    changed = torch.cat([(first[name] != before[name]).flatten() for name in before])
    assert changed.any() and not changed.all()
