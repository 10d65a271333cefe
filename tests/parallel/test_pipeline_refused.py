"""What a pipeline does not do is refused by name, before anything is changed; and what it promises of weights."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.helpers.threads import run_in_threads


def layers(count: int = 4, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


class Between(nn.Module):
    """Changes values between two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) * (2 if number == 1 else 1)
        return x


class InPlace(Between):
    """Changes values between two of its layers, without another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x.mul_(2)
        return x


class Named(Between):
    """Calls its layers in another order than the line has them."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 2, 1, 3):
            x = self.layers[number](x)
        return x


class Detaching(Between):
    """Gives no gradients to half of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2:](self.layers[:2](x).detach())


class Reading(Between):
    """Reads a parameter of its first layer behind the last, as a head does that uses a table of embeddings."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return F.linear(x, self.layers[0].weight)


def sharded(
    model: nn.Module, pipeline: tz.Pipeline | None = None, precision: str = "fp32", plan: str = "zero3", **mesh: int
):
    mesh = tz.mesh(**{"pp": 2, **mesh}, device="cpu")
    tz.parallelize(model, mesh, pipeline=pipeline or tz.Pipeline())
    return tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), plan, mesh=mesh, precision=precision)


def told_by(world: int, body) -> str:
    with pytest.raises((tz.BadInput, tz.Misuse)) as raised:
        run_in_threads(world, body, timeout_s=10.0)
    return str(raised.value)


LINE = tz.Pipeline(line=["layers.*"])
TIED = DecoderConfig(31, 16, 2, 4, 2, 26, 8)


def tied() -> nn.Module:
    return Decoder(TIED)


def sharing_a_state() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[2].running_mean = model[0].running_mean
    return model


def compiled() -> nn.Module:
    model = layers()
    model[0].compile(backend="eager")
    return model


def aside() -> nn.Module:
    model = Between()
    model.scale = nn.Parameter(torch.ones(()))
    return model


@pytest.mark.parametrize(
    ("make", "pipeline", "message"),
    [
        (tied, tz.Pipeline(tied=["embedding.wieght"]), "no parameter 'embedding.wieght'. Did you mean"),
        (sharing_a_state, None, "'0' and '2' share a buffer that is saved"),
        (compiled, None, "'0' is compiled"),
        (aside, LINE, "'scale' is in no module of the pipeline's line"),
        (Between, None, "Nothing says how values go through a Between"),
        (layers, tz.Pipeline(chunks=4), "4 modules, too few for 8 stages"),
        (layers, tz.Pipeline(split=["9"]), "must name the modules"),
        (layers, tz.Pipeline(line=["0", "0", "1"]), "'?0'? twice|has 0 twice"),
        (layers, tz.Pipeline(line=["[0-3]", "4"]), "'4' matches no module"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), tz.Pipeline(split=["1"]), "no parameter to train"),
    ],
)
def test_models_that_cannot_be_cut(make, pipeline, message):
    def body(rank: int) -> None:
        tz.parallelize(make(), tz.mesh(pp=2, device="cpu"), pipeline=pipeline or tz.Pipeline())

    with pytest.raises(tz.BadInput, match=message):
        run_in_threads(2, body, timeout_s=10.0)


def test_a_model_that_is_compiled_after_it_was_cut():
    def body(rank: int) -> None:
        mesh, model = tz.mesh(pp=2, device="cpu"), layers()
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        model[2 * rank].compile(backend="eager")
        tz.shard(model, None, "zero3", mesh=mesh)

    assert "is compiled" in told_by(2, body)


def test_memory_and_traffic_of_too_few_micro_batches():
    for ask in (lambda model: engine_of(model).promise.traffic(1), lambda model: engine_of(model).promise.memory(1)):
        assert "does not fill a pipeline of 2" in told_by(2, lambda rank, ask=ask: ask(sharded(layers())[0]))


def test_a_mesh_with_stages_and_a_model_without():
    assert "this model is whole" in told_by(
        2, lambda rank: tz.shard(layers(), None, "zero3", mesh=tz.mesh(pp=2, device="cpu"))
    )
    assert "nothing says how its ranks share the model" in told_by(
        2, lambda rank: tz.parallelize(layers(), tz.mesh(pp=2, device="cpu"))
    )


def test_a_model_in_stages_on_another_mesh():
    def body(rank: int) -> None:
        model = layers()
        tz.parallelize(model, tz.mesh(pp=2, device="cpu"), pipeline=tz.Pipeline())
        tz.shard(model, None, "zero3")

    assert "cut into stages for pp 2, and the mesh has pp 1" in told_by(2, body)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Between, "changes what 'layers.1' returns"),
        (Detaching, r"detaches what 'layers\.1' returns before it gives it to 'layers\.2'.*requires_grad_\(False\)"),
        (Named, "comes next"),
    ],
)
def test_a_forward_that_is_no_line(kind, message):
    def body(rank: int) -> None:
        model, _ = sharded(kind(), LINE)
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises(tz.BadInput, match=message):
        run_in_threads(2, body)


class ByName(nn.Module):
    """Called by name, with a mask before its input."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.map(x) * mask


class Masked(Between):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ByName() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(mask=torch.ones(4), x=x)
        return x


def test_modules_may_be_given_what_goes_through_them_behind_other_names() -> None:
    base = Masked()
    rows = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)]
    wanted = sum(F.mse_loss(base(x), y) for x, y in rows)

    def body(rank: int) -> Tensor:
        model, _ = sharded(copy.deepcopy(base), LINE)
        return tz.step(model, rows, F.mse_loss)

    for loss in run_in_threads(2, body):
        torch.testing.assert_close(loss, wanted.detach())


class Reentrant(Between):
    """Asks for gradients of its input, or of that of each layer, as such checkpoints need."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_() if self.each else x, use_reentrant=True)
        return x


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_that_cut_a_stage_off_are_named(each: bool) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Reentrant(each), LINE)
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises(tz.Misuse, match="use_reentrant=False"):
        run_in_threads(2, body)


def test_freezing_what_is_in_front_does_what_detaching_did() -> None:
    torch.manual_seed(1)
    plain = Detaching()
    frozen = copy.deepcopy(plain.layers)
    frozen[:2].requires_grad_(False)
    rows = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)]
    loss_of = functools.partial(F.mse_loss, reduction="sum")
    for x, y in rows:
        (loss_of(plain(x), y) / 16).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(rank: int) -> None:
        model, optimizer = sharded(copy.deepcopy(frozen), tz.Pipeline(split=["3"]))
        tz.step(model, rows, loss_of, denominator=16)
        optimizer.step()
        for name, each in tz.full_state_dict(model, keep=True).items():
            torch.testing.assert_close(each, plain.state_dict()[f"layers.{name}"])

    run_in_threads(2, body)


@pytest.mark.parametrize("axis", ["pp", "dp_shard"])
def test_a_step_that_is_refused_leaves_the_denominator(axis: str) -> None:
    def body(rank: int) -> None:
        mesh = tz.mesh(**{axis: 2}, device="cpu")
        model = layers()
        if axis == "pp":
            tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        model, _ = tz.shard(model, None, "zero3", mesh=mesh)
        model.set_gradient_denominator(3)
        with pytest.raises(tz.RanksApart):
            tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * (2 + rank), F.mse_loss, denominator=7)
        assert engine_of(model).progress.denominator.unscaled == 3

    run_in_threads(2, body)


def test_values_that_are_changed_in_place_between_stages():
    """Without gradients, where torch lets it be: each of two stages would double them."""

    def body(rank: int) -> None:
        model, _ = sharded(InPlace(), LINE)
        with torch.no_grad():
            tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises(tz.BadInput, match=r"changes what 'layers\.1' returns"):
        run_in_threads(2, body)


def test_a_parameter_of_another_stage_is_read():
    def body(rank: int) -> None:
        model, _ = sharded(Reading(), LINE)
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises(tz.Misuse, match=r"linear was called on 'layers.0.weight'.*change it before tz.parallelize"):
        run_in_threads(2, body)


class Skipping(nn.Module):
    """What its first module returns is used further on, as a second argument or between two modules."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) if n and not between else nn.Linear(4, 4) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = layer(x) if self.between else layer(x, first)
        return self.layers[3](x + first) if self.between else self.layers[3](x, first)


@pytest.mark.parametrize("between", [False, True])
def test_a_connection_past_a_stage(between):
    def body(rank: int) -> None:
        model, _ = sharded(Skipping(between), LINE)
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises(tz.Misuse, match=r"was called on what 'layers.0' returns, which a stage before has kept"):
        run_in_threads(2, body)


class Side(nn.Module):
    """Hands values on beside its tensor: in a list, or in a dict inside of a tuple."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        x = self.inner(x)
        if self.way == "list":
            kept.append(x.square().sum())
        else:
            kept[0]["first"] = x
        return x


class Beside(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList(Side(way) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = [] if self.way == "list" else ({},)
        for layer in self.layers:
            x = layer(x, kept)
        return x + sum(kept) if self.way == "list" else x + kept[0].get("first", 0)


@pytest.mark.parametrize("way", ["list", "dict"])
def test_values_in_what_modules_share_do_not_reach_other_stages(way):
    def body(rank: int) -> None:
        model, _ = sharded(Beside(way), LINE)
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises(tz.BadInput, match=r"'layers.[02]' puts what it computed into a list or dict"):
        run_in_threads(2, body)


class Leaving(Side):
    """Leaves a loss in an attribute, which the model's own forward adds up."""

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        x = self.inner(x)
        self.loss = x.square().mean()
        return x


def test_losses_that_modules_of_other_stages_have_left_are_not_read_as_they_were():
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Leaving("") for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, None)
            return x + sum(getattr(layer, "loss", 0.0) for layer in self.layers)

    def body(rank: int) -> None:
        model, optimizer = sharded(Adding(), LINE)
        batches = [(torch.ones(2, 4), torch.ones(2, 4))] * 2
        with pytest.raises(tz.Misuse, match=r"'layers\.0\.loss' is a number with a gradient.*tz\.step\(auxiliary"):
            tz.step(model, batches, F.mse_loss)
        optimizer.zero_grad()
        tz.step(model, batches, F.mse_loss, auxiliary=lambda module: None)

    run_in_threads(2, body)


def test_a_string_in_the_place_of_names_is_refused():
    with pytest.raises(tz.BadInput, match=r"split='2'\) is one string: give a list of names, \['2'\]"):
        tz.Pipeline(split="2")


class Shaping(nn.Module):
    """What it does behind its last module fits that one's values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.view(-1, 3, 2)[:, :, 1]


def test_what_a_model_does_behind_the_line_is_for_the_last_stage_alone():
    base = Shaping()
    batches = [(torch.randn(2, 4), torch.randn(2, 3)) for _ in range(3)]
    wanted = sum(F.mse_loss(base(x), y).item() for x, y in batches)

    def body(rank: int) -> float:
        model, _ = sharded(copy.deepcopy(base), LINE)
        return tz.step(model, batches, F.mse_loss).item()

    assert run_in_threads(2, body) == [pytest.approx(wanted, rel=1e-5)] * 2


def test_an_error_in_a_stages_own_module_is_raised():
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("in a stage")

    def body(rank: int) -> None:
        model, _ = sharded(nn.Sequential(*layers(3), Broken(4, 4)))
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)

    with pytest.raises((ValueError, ConnectionError), match="in a stage"):
        run_in_threads(2, body)


def test_torch_would_clip_each_stage_by_itself():
    def body(rank: int) -> None:
        model, _ = sharded(layers())
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 2, F.mse_loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert "tz.clip_grad_norm_(model, max_norm), which gives it" in told_by(2, body)


@pytest.mark.parametrize(("plan", "message"), [("zero0", "grad"), ("zero2", "grad"), ("zero3", "'0.weight'")])
def test_the_second_half_of_a_zero_bubble_backward_of_torch(plan, message):
    """It computes gradients of weights apart, and assigns them: they would be summed over no rank."""

    def body(rank: int) -> None:
        model, optimizer = tz.shard(layers(2), lambda p: torch.optim.SGD(p, lr=0.1), plan)
        given = torch.ones(2, 4, requires_grad=True)
        output = model(given)
        _, groups = stage_backward_input([output], [torch.ones(2, 4)], [given], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        optimizer.step()

    told = told_by(2, body)
    assert message in told, told


def test_a_model_in_stages_called_by_itself():
    def body(rank: int) -> None:
        sharded(layers())[0](torch.ones(2, 4))

    assert "call tz.step(model" in told_by(2, body)


@pytest.mark.parametrize("staged", [True, False])
def test_a_loss_that_is_not_one_number(staged: bool):
    batch = torch.ones(2, 4), torch.ones(2, 4)

    def body(rank: int) -> None:
        model = sharded(layers())[0] if staged else tz.shard(layers(), None, "zero0")[0]
        tz.step(model, [batch] * 2, lambda output, target: F.mse_loss(output, target).reshape(1))

    with pytest.raises(tz.BadInput, match=r"returned a tensor of shape \(1,\) to tz.step.*0-d"):
        run_in_threads(2, body)


def test_too_few_micro_batches():
    batch = torch.ones(2, 4), torch.ones(2, 4)
    told = told_by(2, lambda rank: tz.step(sharded(layers())[0], [batch], F.mse_loss))
    assert "1 micro-batches does not fill a pipeline of 2 ranks" in told
    assert "larger batch.global_batch" in told


def test_a_gradient_set_by_hand_as_foreign_schedules_do_is_refused():
    def body(rank: int) -> None:
        model, optimizer = sharded(layers())
        for parameter in model.parameters():
            parameter.grad = torch.zeros(parameter.shape)
        optimizer.step()

    assert "grad" in told_by(2, body)


@pytest.mark.parametrize(("plan", "gathers"), [("shard_grad_op", 1), ("zero3", 2 * 4)])
def test_weights_are_gathered_once_a_step_where_the_plan_keeps_them_between(plan, gathers):
    def body(rank: int) -> tuple[int, int]:
        mesh = tz.mesh(pp=2, device="cpu")
        torch.manual_seed(0)
        model = layers(8)
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        model, _ = tz.shard(model, None, plan, mesh=mesh, units=[nn.Linear])
        tz.step(model, [(torch.ones(2, 4), torch.ones(2, 4))] * 4, F.mse_loss)
        engine = engine_of(model)
        return engine.traffic.count["all_gather"], engine.traffic.count["reduce_scatter"]

    for counted in run_in_threads(4, body):
        assert counted == (4 * gathers, 4)  # of 4 units on each rank; summed once


def test_without_stages_a_step_is_a_loop_over_micro_batches():
    batches = [(torch.full((2, 4), float(n)), torch.ones(2, 4)) for n in range(3)]
    plain = layers()
    expected = sum(F.mse_loss(plain(inputs), targets) for inputs, targets in batches)
    expected.backward()

    def body(rank: int) -> tuple[float, Tensor]:
        model, _ = tz.shard(copy.deepcopy(plain), None, "zero2")
        loss = tz.step(model, [({"input": x}, y) for x, y in batches], F.mse_loss)
        return loss.item(), engine_of(model).trainable()[0].gradient.finished.read()[:16]

    for loss, grad in run_in_threads(2, body)[:1]:  # which has the beginning of the first weight
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(grad.view(4, 4), plain[0].weight.grad)


@pytest.mark.parametrize("pp", [1, 2])
def test_losses_in_fp64_stay_so_and_a_frozen_auxiliary_loss_is_not_trained(pp: int) -> None:
    batches = [(torch.full((2, 4), float(n)), torch.ones(2, 4)) for n in range(3)]
    base = layers()

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output.double(), targets.double())

    with torch.no_grad():
        expected = sum(loss_fn(base(inputs), targets) for inputs, targets in batches)

    def body(rank: int) -> Tensor:
        model, _ = sharded(copy.deepcopy(base), pp=pp)
        return tz.step(model, batches, loss_fn, auxiliary=lambda module: torch.ones(()))

    for loss in run_in_threads(2, body):
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, expected, rtol=1e-15, atol=0)  # of fp32 activations with the same bits


def squares(module: nn.Module) -> Tensor:
    return 0.1 * sum(parameter.pow(2).sum() for parameter in module.parameters())


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_penalty_on_weights_is_one_on_those_of_every_stage(plan: str) -> None:
    """In loss_fn it would be one on those of the last."""
    batches = [(torch.full((2, 4), float(n)), torch.ones(2, 4)) for n in range(3)]
    base = layers()
    plain = copy.deepcopy(base)
    for inputs, targets in batches:
        (F.mse_loss(plain(inputs), targets) + squares(plain)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(rank: int) -> None:
        model, optimizer = sharded(copy.deepcopy(base), plan=plan)
        with pytest.raises(tz.Misuse, match=r"'\d.\w+' .pow. outside of the model's forward. loss_fn.*auxiliary="):
            tz.step(model, batches, lambda output, targets: F.mse_loss(output, targets) + squares(model))
        optimizer.zero_grad()
        tz.step(model, batches, F.mse_loss, auxiliary=squares)
        optimizer.step()
        for name, each in tz.full_state_dict(model, keep=True).items():
            torch.testing.assert_close(each, plain.state_dict()[name])

    run_in_threads(2, body)


@pytest.mark.parametrize("attaches", [False, True])
def test_stages_that_are_trained_otherwise(attaches):
    """Ranks of one stage agree with each other here, and those of two stages do not."""

    def body(rank: int) -> None:
        mesh, model = tz.mesh(pp=2, device="cpu"), layers()
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        sgd = functools.partial(torch.optim.SGD, lr=0.1 * (1 + rank))
        model, _ = tz.shard(model, None if attaches else sgd, "zero2", mesh=mesh)
        if attaches:
            tz.attach(model, sgd(model.parameters()))

    assert "optimizer" in told_by(2, body)


def test_plans_of_two_stages():
    def body(rank: int) -> None:
        mesh, model = tz.mesh(pp=2, device="cpu"), layers()
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        tz.shard(model, None, f"zero{2 + rank}", mesh=mesh)

    assert "plan" in told_by(2, body)


def test_a_state_dict_of_a_part_of_the_model_is_not_taken_for_the_whole():
    message = told_by(2, lambda rank: nn.Module.state_dict(sharded(layers())[0]))
    assert "has stages" in message and "model.state_dict()" in message


def test_what_one_rank_of_a_stage_writes_alone_is_refused_in_all_stages():
    def body(rank: int) -> None:
        model, _ = sharded(layers(), dp_shard=2)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            for parameter in parameters.values() if rank == 0 else ():
                parameter.add_(1.0)

    assert "have not written the same" in told_by(4, body)
