"""Parameters whose values are elsewhere: truthful about themselves, silent about values, and readable when gathered."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import ModelState
from terrazzo.engine.buckets.parameters.at_rest import AtRest
from tests.engine.toys import Net, adamw, assert_equal, batch, full_parameters, loss_of, on_ranks, sharded, train
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

NAME = "blocks.1.up.weight"


@pytest.fixture
def model() -> Any:
    with fake_group(4):
        yield tz.shard(Net(), adamw, "zero3")[0]


@pytest.fixture
def weight(model: Any) -> nn.Parameter:
    return model.get_parameter(NAME)


# -- when it is at rest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "here"),
    [  # as sharded, in its unit's forward, before backward, in its unit's backward, after the step, gathered
        ("zero3", [False, True, False, True, False, True]),
        ("shard_grad_op", [False, True, True, True, False, True]),
        ("zero1", [True] * 6),
        ("zero1@cpu", [True, True, True, True, False, True]),
    ],
)
def test_what_a_parameter_is_at_each_moment(plan: str, here: list[bool]) -> None:
    def moments(rank: int) -> list[bool]:
        model, optimizer = sharded(Net(), plan)
        weight = model.get_parameter(NAME)
        found = [type(weight) is not AtRest]
        model.get_submodule("blocks.1.up").register_forward_hook(lambda *_: found.append(type(weight) is not AtRest))
        loss = loss_of(model, batch(0, rank))
        found.append(type(weight) is not AtRest)
        weight.register_hook(lambda _: found.append(type(weight) is not AtRest))
        loss.backward()
        optimizer.step()
        found.append(type(weight) is not AtRest)
        with tz.gathered(model) as parameters:
            assert parameters[NAME] is weight is model.get_parameter(NAME)
            return [*found, type(weight) is not AtRest]

    assert on_ranks(2, moments) == [here, here]


# -- what may be asked -----------------------------------------------------------------------------------------


def test_questions_about_a_parameter_are_answered(weight: nn.Parameter) -> None:
    assert weight.shape == weight.size() == (27, 13)
    assert (weight.size(0), weight.dim(), weight.ndim, len(weight)) == (27, 2, 2, 27)
    assert weight.numel() == weight.nelement() == 351
    assert weight.dtype == torch.float32 and weight.is_floating_point() and not weight.is_complex()
    assert weight.device == torch.device("cpu") and not weight.is_cuda and not weight.is_meta
    assert weight.element_size() == weight.itemsize == 4
    assert weight.stride() == (13, 1) and weight.is_contiguous()
    assert weight.requires_grad and weight.is_leaf and weight.grad is None
    assert isinstance(weight, nn.Parameter)
    assert hash(weight) == hash(weight)
    assert {weight: 1}[weight] == 1


def test_its_text_says_that_it_is_sharded(weight: nn.Parameter) -> None:
    for text in (repr(weight), str(weight), f"{weight}"):
        assert "sharded" in text and "(27, 13)" in text and "float32" in text


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_its_text_is_that_of_any_parameter_while_its_values_are_here(plan: str) -> None:
    base = Net()
    with fake_group(1):
        model = tz.shard(copy.deepcopy(base), None, plan)[0]
        with tz.gathered(model):
            assert repr(model.head.bias) == repr(base.head.bias)
            assert str(model.head.bias) == str(base.head.bias)


def test_one_in_nested_lists_is_refused_too(weight: nn.Parameter) -> None:
    for tensor in (weight, torch.zeros_like(weight)):
        with pytest.raises(tz.Misuse, match="inside of a list in a list"):
            torch.zeros(3, 3)[([tensor], 0)]


def test_the_model_answers_as_before(model: Any) -> None:
    plain = Net()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert repr(model) == repr(plain)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_bf16_parameters_say_so() -> None:
    with fake_group(4):
        model, _ = tz.shard(Net(), adamw, "zero3", precision="bf16")
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("plan", ["zero3", "shard_grad_op"])
def test_parameters_are_the_same_objects_all_along(plan: str) -> None:
    def body(rank: int) -> bool:
        model, optimizer = sharded(Net(), plan)
        before = list(model.parameters())
        train(model, optimizer, 2, rank)
        with tz.gathered(model):
            inside = list(model.parameters())
        return all(a is b is c for a, b, c in zip(before, inside, model.parameters(), strict=True))

    assert all(on_ranks(2, body))


# -- what may not be read --------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p + 1,
    "reverse add": lambda p: 1 + p,
    "matmul": lambda p: p @ torch.ones(13),
    "index": lambda p: p[0],
    "item": lambda p: p.item(),
    "tolist": lambda p: p.tolist(),
    "set data": lambda p: setattr(p, "data", torch.ones(27, 13)),
    "data": lambda p: p.data.tolist(),
    "detach": lambda p: p.detach().tolist(),
    "sum of rows": lambda p: p.sum(0),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.numpy(force=True),
    "linear": lambda p: F.linear(torch.ones(1, 13), p),
    "linear bias": lambda p: F.linear(torch.ones(1, 13), torch.ones(27, 13), p),
    "stack": lambda p: torch.stack([p, p]),
    "copy into": lambda p: p.copy_(torch.ones(27, 13)),
    "copy from": lambda p: torch.ones(27, 13).copy_(p),
    "fill": lambda p: p.fill_(0),
    "init": lambda p: nn.init.zeros_(p),
    "to": lambda p: p.to(torch.bfloat16),
    "equal": lambda p: torch.equal(p, p),
    "truth": lambda p: bool(p),
    "iterate": lambda p: list(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "view": lambda p: p.view(-1),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
}


@pytest.mark.parametrize("read", READS)
def test_reading_or_writing_values_names_the_parameter(weight: nn.Parameter, read: str) -> None:
    with pytest.raises(tz.Misuse, match=rf"{NAME}.*sharded.*tz\.gathered"):
        READS[read](weight)
    with torch.no_grad(), pytest.raises(tz.Misuse, match=NAME):
        READS[read](weight)


def test_a_submodule_that_no_unit_gathers_now_raises(model: Any) -> None:
    with pytest.raises(tz.Misuse, match=r"blocks\.0\.up"):
        model.blocks[0].up(torch.ones(1, 13))


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.half(), lambda m: m.double()])
def test_moving_or_casting_a_sharded_model_is_refused(model: Any, move: Callable[[Any], Any]) -> None:
    with pytest.raises(tz.Misuse):
        move(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_whole_weights_stay_readable(plan: str) -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(base, plan)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    for found in on_ranks(2, body):
        assert_equal(found, dict(base.named_parameters()))


def test_deepcopy_of_a_model_or_optimizer_is_refused(model: Any) -> None:
    with pytest.raises(tz.Misuse, match="deep-copied"):
        copy.deepcopy(model)


def test_deepcopy_of_an_optimizer_is_refused() -> None:
    with fake_group(2):
        _, optimizer = tz.shard(Net(), adamw, "zero3")
        with pytest.raises(tz.Misuse, match="deep-copied"):
            copy.deepcopy(optimizer)


# -- gathered --------------------------------------------------------------------------------------------------


def test_gathered_has_the_order_of_the_model_and_further_names_behind() -> None:
    """Whatever order param groups, and so buckets, have, and whichever unit a tied weight is in."""

    def body(rank: int) -> None:
        model = Net()
        model.head.weight = model.embed.weight
        model.blocks[0].up.weight.requires_grad_(False)
        groups = [{"params": [each]} for each in reversed([*model.parameters()]) if each.requires_grad]
        names, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
        tz.shard(model, torch.optim.SGD(groups, lr=0.1), "zero3")
        with tz.gathered(model) as parameters:
            assert list(parameters) == [*names, *(name for name in every if name not in names)]
            assert all(value is own for value, own in zip(parameters.values(), model.parameters(), strict=False))

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "shard_grad_op", "hpz"])
def test_gathered_gives_every_value_under_every_name(plan: str) -> None:
    base = Net()
    base.head.weight = base.embed.weight
    wanted = {name: p.detach() for name, p in base.named_parameters(remove_duplicate=False)}

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(base, plan, 4)
        with tz.gathered(model) as parameters:
            assert all(parameters[name] is model.get_parameter(name) for name in parameters)
            return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}

    for found in on_ranks(4, body):
        assert_equal(found, wanted)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "shard_grad_op", "hfsdp", "hpz"])
def test_written_values_are_kept_and_trained_on(plan: str) -> None:
    base = Net()
    doubled = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)

    def body(rank: int) -> tuple[dict[str, Tensor], bool]:
        model, optimizer = sharded(base, plan, 4)
        other, other_optimizer = sharded(doubled, plan, 4)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(2)
        written = full_parameters(model)
        same = train(model, optimizer, 2, rank) == train(other, other_optimizer, 2, rank)
        return written, same

    for written, same in on_ranks(4, body):
        assert_equal(written, dict(doubled.named_parameters()))
        assert same


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_without_write_changes_are_refused_where_weights_are_split(plan: str) -> None:
    base = Net()

    def write(model: nn.Module) -> None:
        with tz.gathered(model) as parameters, torch.no_grad():
            parameters["head.bias"] + 1
            if plan == "zero3":
                parameters["head.bias"].fill_(7)

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(base, plan)
        if plan == "zero3":
            with pytest.raises(tz.Misuse, match=r"'head\.bias' written to.*write=True"):
                write(model)
        else:
            write(model)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_equal(found, dict(base.named_parameters()))


def masters(model: nn.Module) -> dict[tuple[str, int], Tensor]:
    return {(p.name, p.start): p.tensor.clone() for p in ModelState(model).pieces() if p.kind == "weight"}


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "hfsdp"])
def test_masters_are_replaced_only_where_a_value_changed(plan: str) -> None:
    base = Net()

    def body(rank: int) -> tuple[Any, Any]:
        model, _ = sharded(base, plan, 4, precision="bf16")
        before = masters(model)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            assert parameters["head.bias"].dtype == torch.bfloat16
            parameters["head.bias"][3] = 0.5
        return before, masters(model)

    changed = 0
    for before, after in on_ranks(4, body):
        assert before.keys() == after.keys()
        for (name, start), value in before.items():
            assert value.dtype == torch.float32
            for offset in (value != after[name, start]).nonzero().flatten().tolist():
                assert (name, start + offset) == ("head.bias", 3)
                assert after[name, start][offset].item() == 0.5
                changed += 1
    assert changed == 1


def test_a_forward_inside_gathered_works_and_values_rest_again_after() -> None:
    base = Net()

    def body(rank: int) -> float:
        model, _ = sharded(base, "zero3")
        with tz.gathered(model) as parameters:
            total = sum(p.float().abs().sum() for p in parameters.values())
            assert total > 0
        with pytest.raises(tz.Misuse):
            model.head.weight.tolist()
        with torch.no_grad():
            return loss_of(model, batch()).item()

    assert all(loss == loss_of(base, batch()).item() for loss in on_ranks(2, body))


def write_and_raise(model: nn.Module) -> None:
    with tz.gathered(model, write=True) as parameters, torch.no_grad():
        parameters["head.bias"].fill_(7)
        raise ZeroDivisionError


def test_an_exception_inside_gathered_writes_nothing() -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = sharded(base, "zero3")
        with pytest.raises(ZeroDivisionError):
            write_and_raise(model)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_equal(found, dict(base.named_parameters()))


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_pickled_parameter_is_an_ordinary_one(plan: str) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), plan)
        with tz.gathered(model) as parameters:
            file = io.BytesIO()
            torch.save(parameters[NAME], file)
            file.seek(0)
            back = torch.load(file)
            assert type(back) is nn.Parameter and torch.equal(back, parameters[NAME])

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_pickled_module_is_an_ordinary_one(plan: str, copied: bool) -> None:
    base = Net()

    def body(rank: int) -> None:
        model, _ = sharded(base, plan)
        file = io.BytesIO()
        with tz.gathered(model):
            block = model.blocks[0]
            torch.save(copy.deepcopy(block) if copied else block, file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
        assert_equal(dict(found.named_parameters()), dict(base.blocks[0].named_parameters()))
        assert all(type(each) is nn.Parameter for each in found.parameters())
        found(torch.ones(1, 13)).sum().backward()
        assert found.up.weight.grad is not None and found.state_dict().keys() == base.blocks[0].state_dict().keys()

    on_ranks(2, body)
