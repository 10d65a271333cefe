"""What a user does to a sharded model, act by act and moment by moment: as in plain PyTorch, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
import terrazzo.engine
from terrazzo.engine import LossScaling, ShardedModule
from tests.engine.toys import on_ranks
from tools.user_acts import ACTS, Answer, Moment, Plans

NAMED = r"tz\.|model\.parameters|optimizer\.|in place|modified by an inplace"
"""What an edit names; torch's own refusal of weights that backward needs has none."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 1)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.inner(x + self.shift.to(x.dtype))))
        return output


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _write(tensors: Any) -> None:
    with torch.no_grad():
        for each in tensors:
            each.mul_(0.9)


def _read(model: Any, optimizer: Any) -> Any:
    return sum(float(each.detach().norm()) for each in model.parameters())


def _copy(model: Any, optimizer: Any) -> Any:
    return [each.detach().clone() for each in model.parameters()]


def _other_data(model: Any, optimizer: Any) -> None:
    for each in model.parameters():
        each.data = each.detach() * 0.9


def _data(model: Any, optimizer: Any) -> None:
    for each in model.parameters():
        each.data.mul_(0.9)


def _groups(model: Any, optimizer: Any) -> None:
    _write(each for group in optimizer.param_groups for each in group["params"])


def _frozen(model: Any, optimizer: Any) -> None:
    model.inner.weight.requires_grad_(False)


def _replaced(model: Any, optimizer: Any) -> None:
    model.inner.weight = nn.Parameter(torch.zeros(5, 3))


def _registered(model: Any, optimizer: Any) -> None:
    model.inner.prompt = nn.Parameter(torch.zeros(3))


def _added(model: Any, optimizer: Any) -> None:
    model.inner = nn.Sequential(model.inner, nn.Linear(5, 5))


def _grad_given(model: Any, optimizer: Any) -> None:
    model.inner.weight.grad = torch.ones(5, 3, dtype=model.inner.weight.dtype)


def _grad_changed(model: Any, optimizer: Any) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def _grad_dropped(model: Any, optimizer: Any) -> None:
    model.inner.weight.grad = None


def _clipped(model: Any, optimizer: Any) -> Any:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def _states(model: Any, optimizer: Any) -> None:
    for kept in optimizer.state.values():
        if kept["momentum_buffer"] is not None:
            kept["momentum_buffer"].zero_()


def _state_of(model: Any, optimizer: Any) -> None:
    optimizer.state[model.inner.weight]["momentum_buffer"].zero_()


def _state_given(model: Any, optimizer: Any) -> None:
    kept = {"momentum_buffer": torch.zeros_like(model.inner.weight)}
    optimizer.state[model.inner.weight] = kept


def _state_dict(model: Any, optimizer: Any) -> Any:
    return [value.clone() for value in model.state_dict().values()]


def _loaded(model: Any, optimizer: Any) -> None:
    torch.manual_seed(1)
    model.load_state_dict({name: torch.full(value.shape, 0.1) for name, value in Small().state_dict().items()})


def _saved(model: Any, optimizer: Any) -> Any:
    return [kept["momentum_buffer"].clone() for kept in optimizer.state_dict()["state"].values()]


def _restored(model: Any, optimizer: Any) -> None:
    kept = {number: {"momentum_buffer": torch.full_like(each, 0.1)} for number, each in enumerate(SHAPES)}
    (group,) = optimizer.param_groups
    settings = {**{key: value for key, value in group.items() if key != "params"}, "params": [*kept], "lr": 0.05}
    optimizer.load_state_dict({"state": kept, "param_groups": [settings]})


SHAPES = [torch.empty(each.shape) for each in Small().parameters()]


def _buffer(model: Any, optimizer: Any) -> None:
    model.shift.mul_(0.5)


def _copied(model: Any, optimizer: Any) -> Any:
    return copy.deepcopy(model.head)(torch.ones(5)).detach()


def _forward(model: Any, optimizer: Any) -> Any:
    with torch.no_grad():
        return model(torch.ones(3))


def _grad_taken(model: Any, optimizer: Any) -> Any:
    return torch.autograd.grad(model(torch.ones(3)).sum(), [model.inner.weight, model.head.bias])


def _wanted(model: Any, optimizer: Any) -> None:
    model(torch.ones(3)).sum().backward(inputs=[model.inner.weight])


DEEDS: dict[str, Callable[[Any, Any], Any]] = {
    "take-grad": _grad_taken,
    "wanted": _wanted,
    "measure": _read,
    "read": _copy,
    "write": lambda model, optimizer: _write(model.parameters()),
    "write-data": _data,
    "other-data": _other_data,
    "groups": _groups,
    "freeze": _frozen,
    "replace": _replaced,
    "register": _registered,
    "add": _added,
    "give-grad": _grad_given,
    "change-grad": _grad_changed,
    "drop-grad": _grad_dropped,
    "clip": _clipped,
    "states": _states,
    "state-of": _state_of,
    "give-state": _state_given,
    "state-dict": _state_dict,
    "load": _loaded,
    "buffer": _buffer,
    "save-optimizer": _saved,
    "load-optimizer": _restored,
    "copy-optimizer": lambda model, optimizer: copy.deepcopy(optimizer).param_groups[0]["lr"],
    "copy-model": lambda model, optimizer: copy.deepcopy(model).head.in_features,
    "copy-module": _copied,
    "forward": _forward,
}
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": tz.Precision(weight=torch.float16, compute=torch.float16, loss_scaling=LossScaling(init=64.0)),
}
PLANS = {Plans.WHOLE: "zero2", Plans.SPLIT: "zero3"}
Deed = Callable[[Any, Any], Any]


def run(model: Any, optimizer: Any, deed: Deed, moment: Moment) -> tuple[list[Any], Tensor]:
    """Three steps, with the deed in or behind the second; what it returned, and the last output.

    Raises:
        Early: what came of the deed itself, and not of what followed.
    """
    x, done = torch.arange(12.0).view(4, 3) / 12, list[Any]()

    def do(at: Moment, among: tuple[Moment, ...]) -> None:
        if at is moment and at in among:
            try:
                done.append(deed(model, optimizer))
            except RuntimeError as error:
                raise Early(error) from error

    def step(*among: Moment) -> None:
        loss = model(x).square().mean()
        do(Moment.BEFORE_BACKWARD, among)
        loss.backward()
        do(Moment.BEFORE_STEP, among)
        optimizer.step()
        do(Moment.BEHIND_STEP, among)
        optimizer.zero_grad()

    step()
    step(Moment.BEFORE_BACKWARD, Moment.BEFORE_STEP, Moment.BEHIND_STEP)
    with torch.no_grad():
        model(x)
    do(Moment.BETWEEN, (Moment.BETWEEN,))
    if moment in (Moment.GATHERED, Moment.WRITING):
        is_sharded = isinstance(model, ShardedModule)
        with tz.gathered(model, write=moment is Moment.WRITING) if is_sharded else contextlib.nullcontext():
            do(moment, (moment,))
    step()
    with torch.no_grad():
        return done, model(x)


class Early(Exception):
    pass


def answer(deed: Deed, plan: str, moment: Moment, precision: str = "fp32") -> tuple[Answer, str]:
    """What comes of the deed, and the message of what was raised."""
    torch.manual_seed(0)
    base = Small()
    alone = copy.deepcopy(base)
    try:
        wanted = run(alone, sgd(alone.parameters()), deed, moment)
    except RuntimeError as error:
        return Answer.NEVER, str(error)

    def body(rank: int) -> tuple[Answer, str]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, sgd(model.parameters()), plan, precision=PRECISIONS[precision])
        try:
            found = run(model, optimizer, deed, moment)
        except (Early, RuntimeError) as error:
            return Answer.REFUSED if isinstance(error, Early) else Answer.LATER, str(error)
        if precision == "fp32":
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        else:
            torch.testing.assert_close(found[1].float(), wanted[1], rtol=2e-2, atol=2e-2)
        return Answer.DONE, ""

    one, other = on_ranks(2, body)
    assert one == other
    return one


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plans", Plans)
@pytest.mark.parametrize("name", ACTS)
def test_each_act_comes_to_what_the_table_says(name: str, plans: Plans) -> None:
    """Three steps in one process on the same data are the oracle of those that are done."""
    act = ACTS[name]
    for moment, promised in act.answers(plans).items():
        if act.is_timeless and moment is not (Moment.BEFORE_STEP if "grad" in act.code else Moment.BETWEEN):
            continue
        found, message = answer(DEEDS[name], PLANS[plans], moment)
        assert found is promised, f"{moment}: {message}"
        if found in (Answer.REFUSED, Answer.LATER):
            assert re.search(NAMED, message), message


@pytest.mark.parametrize("name", [name for name, act in ACTS.items() if act.updating is not None])
def test_each_act_while_an_update_is_under_way(name: str) -> None:
    found, message = answer(DEEDS[name], "zero2@cpu", Moment.BEHIND_STEP)
    assert found is ACTS[name].updating, message


NO_SUM = {("give-grad", "fp16"): Answer.LATER}
"""What differs by precision: a sum with what has no loss scale."""


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", ["zero0", "zero2@cpu", "zero3@cpu-all"])
@pytest.mark.parametrize(
    "name", ["write", "write-data", "other-data", "give-grad", "drop-grad", "change-grad", "clip", "states", "load"]
)
def test_what_is_done_is_done_in_each_precision_and_on_each_tier(name: str, plan: str, precision: str) -> None:
    promised = ACTS[name].answers(Plans.SPLIT if plan.startswith("zero3") else Plans.WHOLE)
    moment = next(moment for moment, each in promised.items() if each is Answer.DONE)
    moment = Moment.BEFORE_STEP if ACTS[name].is_timeless and "grad" in ACTS[name].code else moment
    found, message = answer(DEEDS[name], plan, moment, precision)
    assert found is NO_SUM.get((name, precision), Answer.DONE), f"{moment}: {message}"


def _loaded_alone(model: Any, optimizer: Any, rank: int) -> None:
    model.load_state_dict(Small().state_dict() if rank == 0 else {}, strict=False)


def _only_first(deed: Deed) -> Callable[[Any, Any, int], None]:
    return lambda model, optimizer, rank: deed(model, optimizer) if rank == 0 else None


ALONE: dict[str, tuple[Moment, Callable[[Any, Any, int], None]]] = {
    "zero": (Moment.BEFORE_STEP, _only_first(lambda model, optimizer: optimizer.zero_grad())),
    "zero-in-place": (Moment.BEFORE_STEP, _only_first(lambda model, optimizer: model.zero_grad(set_to_none=False))),
    "drop-grad": (Moment.BEFORE_STEP, _only_first(_grad_dropped)),
    "change-grad": (Moment.BEFORE_STEP, _only_first(_grad_changed)),
    "write": (Moment.WRITING, _only_first(DEEDS["write"])),
    "load": (Moment.BETWEEN, _loaded_alone),
}


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", ["zero0", "zero2@cpu", "zero3@cpu-all"])
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_alone_does_is_noticed(name: str, plan: str, precision: str) -> None:
    moment, deed = ALONE[name]

    def body(rank: int) -> str:
        torch.manual_seed(0)
        model = Small()
        model, optimizer = tz.shard(model, sgd(model.parameters()), plan, precision=PRECISIONS[precision])
        try:
            run(model, optimizer, functools.partial(deed, rank=rank), moment)
        except Early as error:
            return type(error.__cause__).__name__
        except RuntimeError as error:
            return type(error).__name__
        return "nothing"

    assert on_ranks(2, body) == ["RanksApart"] * 2


def test_the_table_has_what_is_done_here_and_names_modules_that_are_there() -> None:
    engine = Path(tz.engine.__file__).parent
    assert ACTS.keys() == DEEDS.keys()
    assert {act.by for act in ACTS.values() if not (engine / f"{act.by}.py").exists()} == {"torch"}
