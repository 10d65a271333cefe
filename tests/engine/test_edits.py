"""What users write into parameters outside of the engine's own ways: taken over, or refused by name; never lost."""

from __future__ import annotations

import contextlib
import copy
import errno
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.take_over import take_over_gathered
from terrazzo.engine.model import gathered_blocks
from tests.engine.toys import EVERY_PLAN, Net, assert_close, batch, full_parameters, loss_of, mesh_for, on_ranks
from tests.helpers.cover import places
from tests.helpers.fake import fake_group
from tests.helpers.threads import exclusive

WHOLE = ("zero0", "zero1", "zero2")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def step(model: Any, optimizer: Any, number: int, rank: int) -> None:
    loss_of(model, batch(number, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.05, 0.05)


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def child_converted(model: Any) -> None:
    model.blocks[0].to(torch.float64)


def emptied(model: Any) -> None:
    model.head.weight.data = torch.empty(0)


def replaced(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(17, 13))


def removed(model: Any) -> None:
    del model.head.bias
    model.head.bias = None


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize("edit", [in_place, other_data, through_data])
@pytest.mark.parametrize("tier", ["", "@cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("plan", WHOLE)
def test_edits_of_whole_weights_are_trained_on(plan: str, precision: str, tier: str, edit: Any) -> None:
    """The master weights are clamped too: after a step of SGD no weight is further from zero than the step."""
    base = Net()

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(
            model, torch.optim.SGD(model.parameters(), lr=1e-4), plan + tier, precision=precision
        )
        step(model, optimizer, 0, rank)
        if tier:
            full_parameters(model)  # no update is under way any more
        edit(model)
        edited = full_parameters(model)
        step(model, optimizer, 1, rank)
        return edited, full_parameters(model)

    for edited, after in on_ranks(2, body):
        for name, value in after.items():
            assert edited[name].abs().max() <= 0.0501
            assert value.abs().max() <= 0.051, name


@pytest.mark.parametrize("plan", [*WHOLE, "zero1@cpu", "zero3", "zero3@cpu"])
def test_masters_narrower_than_weights_are_computed_with_from_the_start(plan: str) -> None:
    """Whichever way values come: no forward sees what a step would not begin with."""
    given = [copy.deepcopy(Net()) for _ in range(4)]

    def body(rank: int) -> list[Tensor]:
        model = copy.deepcopy(given[0])
        model, _ = tz.shard(model, sgd(model.parameters()), plan, precision=tz.Precision(master="bf16"))
        seen = [model(batch())]
        model.load_state_dict(given[1].state_dict())
        seen.append(model(batch()))
        with tz.gathered(model, write=True) as weights, torch.no_grad():
            for name, value in given[2].named_parameters():
                weights[name].copy_(value)
        seen.append(model(batch()))
        if plan in WHOLE:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), given[3].parameters(), strict=True):
                    parameter.copy_(value)
            seen.append(model(batch()))
        return seen

    found = on_ranks(2, body)
    wanted = [model.bfloat16().float()(batch()) for model in given]
    for seen in found:
        for number, (output, plain) in enumerate(zip(seen, wanted, strict=False)):
            assert torch.equal(output, plain), number


@pytest.mark.parametrize("plan", WHOLE)
def test_a_kept_alias_of_data_may_be_written_to_later(plan: str) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model = Net()
        model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=1e-4), plan, precision="bf16")
        aliases = [parameter.data for parameter in model.parameters()]
        for number in range(3):
            step(model, optimizer, number, rank)
            for alias in aliases:
                alias.clamp_(-0.05, 0.05)
        step(model, optimizer, 3, rank)
        return full_parameters(model)

    for weights in on_ranks(2, body):
        assert max(value.abs().max() for value in weights.values()) <= 0.051


@pytest.mark.parametrize("plan", WHOLE)
def test_data_may_be_read_between_a_forward_and_its_backward(plan: str) -> None:
    base = Net()

    def body(rank: int, reads: bool) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, sgd(model.parameters()), plan, precision="bf16")
        for number in range(2):
            losses = []
            for micro in range(2):
                losses.append(loss_of(model, batch(2 * number + micro, rank)))
                for parameter in model.parameters() if reads else ():
                    assert parameter.data.norm() > 0
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    plain = on_ranks(2, lambda rank: body(rank, False))
    for found, wanted in zip(on_ranks(2, lambda rank: body(rank, True)), plain, strict=True):
        assert_close(found, wanted, 0)


@pytest.mark.parametrize("plan", WHOLE)
def test_as_in_one_process(plan: str) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = sgd(alone.parameters())
    for number in range(3):
        for rank in range(2):
            (loss_of(alone, batch(number, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        in_place(alone)

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, sgd(model.parameters()), plan)
        for number in range(3):
            step(model, optimizer, number, rank)
            in_place(model)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()))


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("edit", [child_converted, emptied, replaced, removed])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_what_cannot_be_kept_is_refused_by_name(plan: str, edit: Any) -> None:
    world = 2 if mesh_plan(plan) is False else 4

    def body(rank: int) -> None:
        model = Net()
        model, optimizer = tz.shard(model, sgd(model.parameters()), plan, mesh=mesh_for(plan, world))
        step(model, optimizer, 0, rank)
        edit(model)
        step(model, optimizer, 1, rank)

    with pytest.raises(tz.Misuse, match=r"blocks\.0\.up\.weight|head\.(weight|bias)"):
        on_ranks(world, body)


def mesh_plan(plan: str) -> bool:
    return plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")


@pytest.mark.parametrize("edit", [in_place, other_data])
def test_edits_of_gathered_weights_need_write(edit: Any) -> None:
    def body(rank: int, write: bool) -> dict[str, Tensor]:
        model, _ = tz.shard(Net(), None, "zero3")
        with tz.gathered(model, write=write):
            edit(model)
        return full_parameters(model)

    for found in on_ranks(2, lambda rank: body(rank, True)):
        assert all(value.abs().max() <= 0.0501 for value in found.values())
    with pytest.raises(tz.Misuse, match=r"embed\.weight.*"):
        on_ranks(2, lambda rank: body(rank, False))


def nothing_is_gathered(model: nn.Module) -> bool:
    for parameter in model.parameters():
        with contextlib.suppress(tz.Misuse):
            parameter.tolist()
            return False
    return True


def test_a_refused_write_leaves_no_weights_behind() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), None, "zero3")
        with pytest.raises(tz.Misuse, match=r"embed\.weight.*written to") as caught, tz.gathered(model):
            in_place(model)
        assert nothing_is_gathered(model)
    notes = "".join(caught.value.__notes__)
    assert all(f"'blocks.{number}.up.weight'" in notes for number in range(3))


def test_a_disk_that_is_full_leaves_no_weights_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is what the user hears of, not of the edits that went with it."""
    calls: list[Bucket] = []

    def full(bucket: Bucket) -> None:
        calls.append(bucket)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        take_over_gathered(bucket)

    with fake_group(2):
        model, _ = tz.shard(Net(), None, "zero3")
        monkeypatch.setattr(gathered_blocks, "take_over_gathered", full)
        with pytest.raises(OSError, match="No space left"), tz.gathered(model, write=True):
            in_place(model)
        assert nothing_is_gathered(model)


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_what_was_written_before_an_error_stays_where_weights_are_whole(plan: str) -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, plan, precision="bf16")
        before = full_parameters(model)["embed.weight"]
        with contextlib.suppress(KeyError), tz.gathered(model, write=True) as parameters, torch.no_grad():
            parameters["embed.weight"].add_(1)
            raise KeyError
        after = full_parameters(model)["embed.weight"]
        assert torch.equal(after, before + 1 if plan == "zero2" else before)

    on_ranks(2, body)


def test_a_forward_that_changes_its_own_weights() -> None:
    """Taken over where weights are whole, as in plain PyTorch; refused by name where they come and go."""

    def body(rank: int, plan: str) -> dict[str, Tensor]:
        model = Net()
        model.embed.forward = lambda tokens: F.embedding(tokens, model.embed.weight, max_norm=0.5)
        model, optimizer = tz.shard(model, sgd(model.parameters()), plan, precision="bf16")
        for number in range(3):
            step(model, optimizer, number, 0)
        return full_parameters(model)

    for found in on_ranks(2, lambda rank: body(rank, "zero2")):
        norms = found["embed.weight"].norm(dim=1)[batch(2, 0)[:, :-1].flatten()]
        assert norms.max() < 0.6
    with pytest.raises(tz.Misuse, match=r"embed\.weight.*written to"):
        on_ranks(2, lambda rank: body(rank, "zero3"))


class TutorialEMA:
    """Averages of a model's weights as tutorials write them: backups and averages are given by reference."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.shadow: dict[str, Tensor] = {}
        self.backup: dict[str, Tensor] = {}

    def register(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                new_average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = new_average.clone()

    def apply_shadow(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


def averaged(model: Any, optimizer: Any) -> list[float]:
    ema = TutorialEMA(model, 0.5)
    ema.register()
    losses = []
    for number in range(3):
        step(model, optimizer, number, 0)
        ema.update()
        ema.apply_shadow()
        with torch.no_grad():
            losses.append(loss_of(model, batch(9, 0)).item())
        ema.restore()
    step(model, optimizer, 3, 0)
    return losses


def perturbed(model: Any, optimizer: Any) -> list[float]:
    """Sharpness-aware steps that keep the weights by reference."""
    for number in range(2):
        loss_of(model, batch(number, 0)).backward()
        optimizer.zero_grad()
        old = {parameter: parameter.data for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.05
        loss_of(model, batch(number, 0)).backward()
        for parameter in model.parameters():
            parameter.data = old[parameter]
        optimizer.step()
        optimizer.zero_grad()
    return []


def exchanged(model: Any, optimizer: Any) -> list[float]:
    step(model, optimizer, 0, 0)
    a, b = model.blocks[0].up.weight, model.blocks[1].up.weight
    a.data, b.data = b.data, a.data
    step(model, optimizer, 1, 0)
    return []


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("use", [averaged, perturbed, exchanged])
@pytest.mark.parametrize(
    ("plan", "precision"), [*((plan, "fp32") for plan in EVERY_PLAN), *((plan, "bf16") for plan in WHOLE)]
)
def test_data_kept_by_reference_and_given_back(plan: str, use: Any, precision: str) -> None:
    """Every rank has the same batches, so all is as in one process; or refused before a weight is lost."""
    base, world = Net(), 4 if mesh_plan(plan) else 2
    alone = copy.deepcopy(base)
    losses = use(alone, sgd(alone.parameters()))

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(
            model, sgd(model.parameters()), plan, precision=precision, mesh=mesh_for(plan, world)
        )
        return use(model, optimizer), full_parameters(model)

    if plan not in WHOLE:
        with pytest.raises(tz.Misuse, match="gathered"):
            on_ranks(world, body)
        return
    wanted = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    tolerance = 1e-6 if precision == "fp32" else 0.02
    for found, weights in on_ranks(world, body):
        assert found == pytest.approx(losses, abs=tolerance)
        assert_close({name: value.float() for name, value in weights.items()}, wanted, tolerance)


@pytest.mark.parametrize("plan", WHOLE)
def test_parameters_are_not_tied_by_data(plan: str) -> None:
    def body(rank: int) -> None:
        model: Any = tz.shard(Net(), None, plan)[0]
        model.blocks[0].up.weight.data = model.blocks[1].up.weight.data
        loss_of(model, batch(0, rank))

    with pytest.raises(tz.Misuse, match=r"blocks\.0\.up\.weight.*does not tie"):
        on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_parameters_that_share_memory_are_refused_before_sharding(plan: str) -> None:
    def tied() -> Any:
        model = Net()
        model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
        return model

    with pytest.raises(tz.BadInput, match=r"'blocks\.0\.up\.weight' and 'blocks\.1\.up\.weight'.*share memory"):
        on_ranks(2, lambda rank: tz.shard(tied(), None, plan))


def test_disjoint_views_of_one_memory_are_sharded() -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model = Net()
        flat = torch.arange(sum(parameter.numel() for parameter in model.parameters())) / 1000
        parts = flat.split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.data = part.view_as(parameter)
        wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model, _ = tz.shard(model, None, "zero0")
        assert_close(full_parameters(model), wanted, 0)
        return wanted

    on_ranks(2, body)


KEPT: dict[str, Any] = {
    "data": lambda parameter: parameter.data,
    "detach": lambda parameter: parameter.detach(),
    "view": lambda parameter: parameter.detach().view(-1)[1:],
    "numpy": lambda parameter: torch.from_numpy(parameter.detach().numpy()),
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_kept_of_other_data_has_its_values(kept: str) -> None:
    """As in plain PyTorch, where the memory before is still there; a view of another parameter goes on as one."""

    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), sgd, "zero1")
        step(model, optimizer, 0, rank)
        alias, other = KEPT[kept](model.head.weight), model.head.bias.detach()
        before = alias.clone()
        model.head.weight.data = torch.zeros_like(model.head.weight)
        step(model, optimizer, 1, rank)
        assert torch.equal(alias, before)
        assert other.data_ptr() == model.head.bias.data_ptr()

    on_ranks(2, body)


def test_views_of_parameters_that_modules_keep_are_refused() -> None:
    model, normed = Net(), torch.nn.utils.spectral_norm(nn.Linear(3, 3))
    model.row = model.head.weight[1]
    with fake_group(2):
        with pytest.raises(tz.BadInput, match=r"'row' of 'head\.weight'"):
            tz.shard(model, None, "zero0")
        tz.shard(normed, None, "zero0")


def test_modules_that_move_are_warned_of_and_new_ones_are_refused() -> None:
    def body(rank: int) -> list[str]:
        model, _ = tz.shard(Net(), sgd, "zero0")
        blocks = model.blocks
        blocks[0], blocks[1] = blocks[1], blocks[0]
        with exclusive(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            hooks_of(model)._forward._tree.check(model, lets_in=False)
            hooks_of(model)._forward._tree.check(model, lets_in=False)
        model.blocks = nn.Sequential(*blocks, nn.Linear(1, 1))
        with pytest.raises(tz.Misuse, match=r"came to the model after tz\.shard"):
            hooks_of(model)._forward._tree.check(model, lets_in=False)
        return [str(each.message) for each in told]

    for told in on_ranks(2, body):
        assert len(told) == 1 and "'blocks.0.up.weight' is 'blocks.1.up.weight' now" in told[0]


def _lora(model: Any) -> None:
    linear = model.blocks[1].up
    linear.a, linear.b = nn.Parameter(torch.zeros(2, 13)), nn.Parameter(torch.zeros(27, 2))


def _unfrozen(model: Any) -> None:
    adapter = nn.Linear(17, 17).requires_grad_(False)
    model.head = nn.Sequential(model.head, adapter)
    model(batch())
    adapter.requires_grad_(True)


def _bias(model: Any) -> None:
    model.free.bias = nn.Parameter(torch.zeros(2))


def _child(model: Any) -> None:
    model.head.adapter = nn.Linear(1, 1)


@pytest.mark.filterwarnings("ignore:Modules have been moved")
@pytest.mark.parametrize(
    ("come", "name"),
    [(_lora, "blocks.1.up.a"), (_unfrozen, "head.1.weight"), (_bias, "free.bias"), (_child, "head.adapter.weight")],
)
def test_parameters_that_come_are_refused(come: Callable[[Any], None], name: str) -> None:
    """Registered on a module that was there, in the place of None, or unfrozen later."""
    base = Net()
    base.free = nn.Linear(2, 2, bias=False)

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(base), sgd, "zero2")
        model(batch())
        come(model)
        with pytest.raises(tz.Misuse, match=f"'{re.escape(name)}'.* came to the model after tz.shard"):
            model(batch())

    on_ranks(2, body)


def hooks_of(model: Any) -> Any:
    return engine_of(model).hooks


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_gathered_inside_gathered(outer: bool, inner: bool) -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, "zero3")
        with tz.gathered(model, write=outer) as all_of, torch.no_grad():
            if outer:
                all_of["head.bias"].fill_(2.0)
            with tz.gathered(model, write=inner) as again:
                if inner:
                    again["head.weight"].fill_(3.0)
            seen = all_of["head.bias"].clone(), all_of["head.weight"].clone()
        found = full_parameters(model)
        assert torch.equal(found["head.bias"], seen[0]) and torch.equal(found["head.weight"], seen[1])
        assert (seen[0] == 2).all() == outer and (seen[1] == 3).all() == inner

    on_ranks(2, body)


def test_a_model_that_calls_itself_without_gradients() -> None:
    class Twice(Net):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            if again:
                with torch.no_grad():
                    x = self(x, False).argmax(-1)
            output: Tensor = super().forward(x)
            return output

    base = Twice()
    alone = copy.deepcopy(base)
    optimizer = sgd(alone.parameters())
    loss_of(alone, batch(0, 0)).backward()
    optimizer.step()

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = tz.shard(copy.deepcopy(base), sgd, "zero3")
        step(model, optimizer, 0, 0)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 1e-5)


class Trying(Net):
    """Tries itself on other tokens first, and goes on where that raises."""

    def forward(self, x: Tensor, trying: bool = True) -> Tensor:
        if trying:
            with contextlib.suppress(KeyError):
                self(x, False)
        output: Tensor = super().forward(x)
        return output


def refuse_trying(module: nn.Module, args: Any) -> None:
    if args[1:]:
        raise KeyError("not on other tokens")


@pytest.mark.parametrize("first", [True, False], ids=["before the engine's", "behind the engine's"])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_hook_that_raises_in_a_call_inside_of_a_call_ends_that_one_alone(plan: str, first: bool) -> None:
    base = Trying()
    alone = copy.deepcopy(base)
    alone.register_forward_pre_hook(refuse_trying)
    optimizer = sgd(alone.parameters())
    for number in range(3):
        step(alone, optimizer, number, 0)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = tz.shard(copy.deepcopy(base), sgd, plan)
        model.register_forward_pre_hook(refuse_trying, prepend=first)
        for number in range(3):
            step(model, optimizer, number, 0)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 1e-5)


def test_a_copied_unit_runs_on_one_rank_alone() -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, "zero3")
        with tz.gathered(model):
            block = copy.deepcopy(model.blocks[0])
        if rank == 0:
            block(torch.ones(1, 13)).sum().backward()
            assert block.up.weight.grad is not None

    on_ranks(2, body)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize(("plan", "write"), [("zero0", False), ("zero2", False), ("zero2", True), ("zero3", True)])
def test_other_data_in_the_same_memory_is_seen(plan: str, write: bool) -> None:
    """Such as a checkpoint's layout that is turned."""
    torch.manual_seed(0)
    base = Square()
    alone = copy.deepcopy(base)
    x = torch.randn(3, 5)

    def play(model: Any, optimizer: Any, turned: Any) -> None:
        for number in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                with turned():
                    model.up.weight.data = model.up.weight.data.t()

    play(alone, sgd(alone.parameters()), contextlib.nullcontext)

    def body(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(base)
        model, optimizer = tz.shard(own, sgd(own.parameters()), plan)
        play(model, optimizer, lambda: tz.gathered(model, write=True) if write else contextlib.nullcontext())
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()))


@pytest.mark.parametrize("part", [lambda data: data[:1], lambda data: data.flatten(), lambda data: data[:, :2]])
def test_a_part_of_its_own_memory_is_no_other_data(part: Callable[[Tensor], Tensor]) -> None:
    with fake_group(1):
        model, _ = tz.shard(Square(), None, "zero0")
        model.up.weight.data = part(model.up.weight.data)
        with pytest.raises(tz.Misuse, match=r"'up\.weight' has been given other data.*is a view of the"):
            model(torch.ones(2, 5))
