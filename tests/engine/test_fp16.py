"""Dynamic loss scaling: overflow anywhere skips everywhere; growth, backoff, hysteresis, minimum, state."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import LossScaling, ModelState, Precision, engine_of
from terrazzo.engine.progress.loss_scale import DynamicLossScale
from tests.engine.toys import (
    EVERY_PLAN,
    Block,
    Net,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    on_ranks,
    sharded,
    train,
)
from tests.helpers.cover import places

F16 = torch.float16


def fp16(**settings: Any) -> Precision:
    return Precision(weight=F16, compute=F16, loss_scaling=LossScaling(**settings))


@pytest.mark.parametrize(("precision", "denominator"), [("fp16", None), ("fp32", 64)])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_a_gradient_given_before_backward_is_refused(plan: str, precision: Any, denominator: float | None) -> None:
    """It would be divided by a scale that it was not multiplied by; once it is gone, training goes on."""

    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), plan, precision=precision)
        model.set_gradient_denominator(denominator)
        for number in range(2):
            train(model, optimizer, 1, rank, first=number)
            weight = model.blocks[1].up.weight
            weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
            with pytest.raises(
                tz.Misuse, match=r"'blocks\.1\.up\.weight' was set to a tensor before backward.*zero_grad"
            ):
                loss_of(model, batch(5, rank)).backward()
            optimizer.zero_grad()

    on_ranks(2, body)


def test_a_denominator_leaves_a_penalty_alone_that_no_output_announces() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero0")
        model.set_gradient_denominator(4)
        model.head.bias.sum().backward()
        torch.testing.assert_close(model.head.bias.grad.norm(), torch.full((17,), 0.5).norm())

    on_ranks(2, body)


# -- the scale, step by step -----------------------------------------------------------------------------------


def scales(pattern: str, **settings: Any) -> list[float]:
    """The scale after each step of `pattern`: `.` is a good step, `x` an overflow."""
    scaler = DynamicLossScale(LossScaling(**settings))
    found = []
    for mark in pattern:
        scaler.update(mark == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("pattern", "settings", "wanted"),
    [
        ("....", {"init": 8.0, "interval": 2}, [8, 16, 16, 32]),
        ("..x..", {"init": 8.0, "interval": 3}, [8, 8, 4, 4, 4]),  # an overflow restarts the interval
        ("..x...", {"init": 8.0, "interval": 3}, [8, 8, 4, 4, 4, 8]),
        ("xx", {"init": 8.0, "backoff": 0.25}, [2, 1]),  # not below the minimum
        ("...", {"init": 8.0, "interval": 1, "growth": 4.0}, [32, 128, 512]),
        ("x.xx", {"init": 8.0, "hysteresis": 2}, [8, 8, 4, 2]),  # lost patience is not regained by lowering
        ("x..x.x", {"init": 8.0, "hysteresis": 2, "interval": 2}, [8, 8, 16, 16, 16, 8]),  # growth restores patience
        ("x", {"init": 8.0, "minimum": 4.0}, [4]),
    ],
)
def test_growth_backoff_and_hysteresis(pattern: str, settings: dict[str, Any], wanted: list[float]) -> None:
    assert scales(pattern, **settings) == wanted


def test_an_overflow_at_the_minimum_is_divergence() -> None:
    with pytest.raises(tz.Diverged, match=r"minimum loss scale 2 .*3 steps skipped.*bf16"):
        scales("xxx", init=8.0, minimum=2.0)


def test_a_restored_scaler_goes_on_alike() -> None:
    settings = LossScaling(init=8.0, interval=3, hysteresis=2)
    first, second = DynamicLossScale(settings), DynamicLossScale(settings)
    for mark in "..x.":
        first.update(mark == "x")
    second.load_state(first.state(), accumulating=False)
    for mark in "..x...":
        first.update(mark == "x")
        second.update(mark == "x")
        assert first.state() == second.state()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scale": math.inf}, "is inf, and a power of two"),
        ({"scale": math.nan}, "is nan, and a power of two"),
        ({"scale": 3.0}, r"is 3\.0, and a power of two"),
        ({"scale": 0.0}, r"is 0\.0, and a power of two"),
        ({"scale": "8"}, "is '8', and a power of two"),
        ({"patience": math.nan}, "are to be counts"),
        ({"patience": None}, "lacks patience"),
    ],
)
def test_a_state_that_no_scaler_gave_is_refused_and_changes_nothing(changed: dict[str, Any], said: str) -> None:
    scaler = DynamicLossScale(LossScaling())
    before = scaler.state()
    state = {"scale": 8.0, "skipped_steps": 1, "good_steps": 2, "patience": 1, **changed}
    with pytest.raises(tz.BadInput, match=said):
        scaler.load_state({key: value for key, value in state.items() if value is not None}, accumulating=False)
    assert scaler.state() == before


# -- in training -----------------------------------------------------------------------------------------------


class Explosive(Net):
    """Multiplies its gradients by `blast` on the way back."""

    blast = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if self.blast != 1.0:
            x.register_hook(lambda grad: grad * self.blast)
        return self.head(self.blocks[2](self.blocks[1](x)))


Row = tuple[int, float, dict[str, Tensor]]


def run(base: Any, plan: str, blasts: list[list[float]], precision: Precision) -> list[list[Row]]:
    """For each rank, after each step: skipped steps, scale, parameters. `blasts[step][rank]`."""

    def body(rank: int) -> list[Row]:
        model, optimizer = sharded(base, plan, 4, precision=precision)
        rows = []
        for step, each in enumerate(blasts):
            model.blast = each[rank]
            train(model, optimizer, 1, rank, first=step)
            rows.append((optimizer.skipped_steps, optimizer.loss_scale, full_parameters(model)))
        return rows

    return on_ranks(4, body)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("blast", [float("inf"), float("nan"), 1e6])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_an_overflow_on_one_rank_skips_the_step_on_all(plan: str, blast: float) -> None:
    base = Explosive()
    blasts = [[1.0] * 4, [1.0, 1.0, blast, 1.0], [1.0] * 4]
    for rows in run(base, plan, blasts, fp16(init=1024.0)):
        (skips_0, scale_0, before), (skips_1, scale_1, skipped), (skips_2, scale_2, after) = rows
        assert (skips_0, skips_1, skips_2) == (0, 1, 1)
        assert (scale_0, scale_1, scale_2) == (1024.0, 512.0, 512.0)
        assert_equal(skipped, before)
        assert not torch.equal(after["head.weight"], before["head.weight"])
        assert all(bool(torch.isfinite(value).all()) for value in after.values())


HIDE: dict[str, Callable[[Tensor], object]] = {
    "clamp": lambda grad: grad.clamp_(-1.0, 1.0),
    "sign": lambda grad: grad.sign_(),
    "nan_to_num": lambda grad: grad.nan_to_num_(nan=0.0, posinf=1.0, neginf=-1.0),
}


@pytest.mark.parametrize("plan", ["zero1", "zero3@cpu"])
@pytest.mark.parametrize("hide", HIDE)
def test_what_is_done_to_gradients_hides_no_overflow(hide: str, plan: str) -> None:
    """As with torch's GradScaler, which looks for one before users change gradients."""

    def body(rank: int) -> list[int]:
        model, optimizer = sharded(Net(), plan, 2, precision=fp16(init=1024.0))
        bias, skipped = model.head.bias, list[int]()
        for step in range(3):
            hook = bias.register_hook(lambda grad: torch.full_like(grad, math.inf) if len(skipped) == 1 else grad)
            loss_of(model, batch(step, rank)).backward()
            hook.remove()
            HIDE[hide](bias.grad)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.skipped_steps)
        return skipped

    assert on_ranks(2, body) == [[0, 1, 1]] * 2


def test_a_skipped_step_leaves_the_optimizers_state_alone() -> None:
    def body(rank: int) -> tuple[Any, Any]:
        model, optimizer = sharded(Explosive(), "zero3", 2, precision=fp16(init=1024.0))
        train(model, optimizer, 2, rank)
        before = [(p.name, p.kind, p.tensor.clone()) for p in ModelState(model).pieces()]
        model.blast = float("inf")
        train(model, optimizer, 1, rank)
        return before, [(p.name, p.kind, p.tensor.clone()) for p in ModelState(model).pieces()]

    for before, after in on_ranks(2, body):
        assert {kind for _, kind, _ in before} == {"weight", "exp_avg", "exp_avg_sq", "step"}
        assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=True))


def test_a_skipped_step_sends_no_weights_and_leaves_graphs_valid() -> None:
    base = Explosive()

    def body(rank: int) -> None:
        model, optimizer = sharded(base, "zero1", precision=fp16(init=1024.0))
        model.blast = float("inf")
        loss = loss_of(model, batch(0, rank))
        loss.backward(retain_graph=True)
        gathered = engine_of(model).traffic.count["all_gather"]
        optimizer.step()
        assert (optimizer.skipped_steps, engine_of(model).traffic.count["all_gather"]) == (1, gathered)
        optimizer.zero_grad()
        loss.backward()  # its weights are still those of its forward
        optimizer.step()
        assert optimizer.skipped_steps == 2

    on_ranks(2, body)


def test_endless_overflow_diverges_on_every_rank() -> None:
    def body(rank: int) -> str:
        model, optimizer = sharded(Explosive(), "zero3", 2, precision=fp16(init=4.0, minimum=1.0))
        model.blast = float("inf") if rank == 0 else 1.0
        with pytest.raises(tz.Diverged) as caught:
            train(model, optimizer, 9, rank)
        return f"{optimizer.skipped_steps} {optimizer.loss_scale} {caught.value}"

    first, second = on_ranks(2, body)
    assert first == second
    assert first.startswith("3 1.0 ")


def test_the_scale_is_no_part_of_losses_gradients_or_norms() -> None:
    """Powers of two divide out exactly: any scale gives nearly the same numbers while nothing overflows."""
    base = Net()

    def body(rank: int, init: float) -> tuple[list[float], float, dict[str, Tensor]]:
        model, optimizer = sharded(base, "zero3", 2, precision=fp16(init=init))
        losses = train(model, optimizer, 2, rank)
        loss_of(model, batch(5, rank)).backward()
        norm = tz.clip_grad_norm_(model, 1e9).item()
        optimizer.step()
        optimizer.zero_grad()
        return losses, norm, full_parameters(model)

    small, large = (on_ranks(2, lambda rank, init=init: body(rank, init)) for init in (2.0**12, 2.0**13))
    for (losses, norm, parameters), (other_losses, other_norm, others) in zip(small, large, strict=True):
        assert losses == pytest.approx(other_losses, abs=1e-4)
        assert norm == pytest.approx(other_norm, rel=1e-2)
        assert 0.01 < norm < 100
        for name, value in parameters.items():
            torch.testing.assert_close(value, others[name], rtol=1e-2, atol=2e-3)


def test_fp16_training_stays_near_fp32() -> None:
    base = Net()
    in_fp32 = on_ranks(2, lambda rank: train(*sharded(base, "zero3", 2), 6, 0))
    in_fp16 = on_ranks(2, lambda rank: train(*sharded(base, "zero3", 2, precision="fp16"), 6, 0))
    assert in_fp16[0][-1] < in_fp16[0][0]
    assert in_fp16[0] == pytest.approx(in_fp32[0], rel=5e-2)


def test_the_models_output_is_fp32() -> None:
    def body(rank: int) -> torch.dtype:
        model, _ = sharded(Net(), "zero3", 2, precision="fp16")
        return model(batch()).dtype

    assert on_ranks(2, body) == [torch.float32] * 2


class WithLoss(Net):
    """Its loss is computed inside, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


def test_a_loss_that_comes_from_the_model_can_be_divided_in_place() -> None:
    base = WithLoss()

    def body(rank: int, in_place: bool) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3", 2, precision="fp16")
        loss = model(batch(0, rank))
        loss = loss.div_(4) if in_place else loss / 4
        loss.backward()
        optimizer.step()
        return full_parameters(model)

    in_place, new = (on_ranks(2, lambda rank, way=way: body(rank, way)) for way in (True, False))
    for one, other in zip(in_place, new, strict=True):
        assert_equal(one, other)


def test_a_checkpoint_around_the_whole_model_may_be_reentrant() -> None:
    """What it runs again in backward is differentiated by a backward of its own, which has the scale, too."""
    base = nn.Sequential(Block(), Block())

    def body(rank: int, reentrant: bool) -> dict[str, Tensor]:
        model, optimizer = sharded(base, units=[Block], precision=fp16(init=2.0**10))
        for step in range(2):
            x = torch.linspace(-1, 1 + step + rank, 26).view(2, 13).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 0
        return full_parameters(model)

    again, plain = (on_ranks(2, lambda rank, way=way: body(rank, way)) for way in (True, False))
    for one, other in zip(again, plain, strict=True):
        assert_equal(one, other)
        assert not torch.equal(one["0.up.weight"], base[0].up.weight)


def test_the_scalers_state_travels_through_the_optimizer() -> None:
    def body(rank: int) -> tuple[dict[str, float], dict[str, float], list[float]]:
        model, optimizer = sharded(Explosive(), "zero3", 2, precision=fp16(init=1024.0, interval=5))
        train(model, optimizer, 3, rank)
        model.blast = float("inf")
        train(model, optimizer, 1, rank)
        _other_model, other = sharded(Explosive(), "zero1", 2, precision=fp16(init=1024.0, interval=5))
        other.load_scaler_state(copy.deepcopy(optimizer.scaler_state()))
        return optimizer.scaler_state(), other.scaler_state(), [other.loss_scale, other.skipped_steps]

    for state, other, numbers in on_ranks(2, body):
        assert state == other
        assert all(isinstance(value, int | float) for value in state.values())
        assert numbers == [512.0, 1]


def test_without_loss_scaling_there_is_nothing_to_report() -> None:
    def body(rank: int) -> tuple[int, float, dict[str, float]]:
        _, optimizer = sharded(Net(), "zero3", 2, precision="bf16")
        optimizer.load_scaler_state({})
        return optimizer.skipped_steps, optimizer.loss_scale, optimizer.scaler_state()

    assert on_ranks(2, body) == [(0, 1.0, {})] * 2


# -- every way to a loss -------------------------------------------------------------------------------------------


class Mapped(dict[str, Tensor]):
    """A class of dicts that torch's pytrees do not know."""


@dataclass
class Mutable:
    logits: Tensor
    aux: list[Tensor]


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    aux: Tensor


@dataclass
class Circular:
    logits: Tensor
    aux: Tensor
    itself: list[Circular]

    @staticmethod
    def of(logits: Tensor, aux: Tensor) -> Circular:
        made = Circular(logits, aux, [])
        made.itself.append(made)
        return made


class Pair(NamedTuple):
    logits: Tensor
    aux: Tensor


class Together(Net):
    """Returns what `form` makes of logits and an auxiliary loss."""

    form: Any = None

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.blocks[0](self.embed(tokens))
        aux = hidden.float().square().mean()
        logits = self.head(self.blocks[2](self.blocks[1](hidden)))
        return type(self).form(logits, aux) if self.form else (logits, aux)


FORMS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda logits, aux: {"logits": logits, "aux": [aux]}, lambda out: (out["logits"], out["aux"][0])),
    "class of dicts": (lambda logits, aux: Mapped(logits=logits, aux=aux), lambda out: (out["logits"], out["aux"])),
    "dataclass": (lambda logits, aux: Mutable(logits, [aux]), lambda out: (out.logits, out.aux[0])),
    "frozen dataclass": (Frozen, lambda out: (out.logits, out.aux)),
    "dataclass that refers to itself": (Circular.of, lambda out: (out.logits, out.itself[0].itself[0].aux)),
    "half in a dataclass": (lambda logits, aux: (logits, Frozen(aux, aux)), lambda out: (out[0], out[1].aux)),
    "named tuple": (Pair, lambda out: (out.logits, out.aux)),
}


_of_plain_parts: list[dict[str, Tensor]] = []


@pytest.mark.parametrize("form", FORMS)
def test_every_part_of_an_output_trains_at_the_same_scale(form: str) -> None:
    """The gradients of a mixed loss are those that a plain tuple's parts give."""
    made, parts = FORMS[form]
    base = Together()

    def body(rank: int, form: Any, parts: Any) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3", precision=fp16(init=2.0**10))
        type(model).form = staticmethod(form) if form else None
        for step in range(2):
            out = model(batch(step, rank))
            logits, aux = parts(out)
            assert logits.dtype == aux.dtype == torch.float32
            (logits.square().mean() + 3 * aux).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    if not _of_plain_parts:
        _of_plain_parts.extend(on_ranks(2, lambda rank: body(rank, None, lambda out: out)))
    for found, wanted in zip(on_ranks(2, lambda rank: body(rank, made, parts)), _of_plain_parts, strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_unit_beside_the_model_is_refused_where_it_would_learn(plan: str) -> None:
    base = Net()

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(base), torch.optim.AdamW, plan, precision=fp16())
        x = torch.ones(2, model.embed.embedding_dim, dtype=F16)
        with torch.no_grad():
            assert model.blocks[0](x).isfinite().all()
        with pytest.raises(tz.Misuse, match=r"blocks\.0.* outside of the model's forward.*tz\.register_forward_method"):
            model.blocks[0](x)
        loss_of(model, batch()).backward()

    on_ranks(2, body)


class Closed:
    def __init__(self, logits: Tensor, aux: Tensor) -> None:
        self.aux = aux


class Slotted:
    __slots__ = ("aux",)

    def __init__(self, logits: Tensor, aux: Tensor) -> None:
        self.aux = aux


def test_outputs_that_the_loss_scale_cannot_reach_are_refused() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Together(), precision="fp16")
        for made, name in ((Closed, "'aux'"), (Slotted, "'aux'"), (lambda logits, aux: {aux}, "0")):
            type(model).form = lambda logits, aux, made=made: (logits, made(logits, aux))
            with pytest.raises(tz.Misuse, match=rf"returned a .*loss scale of fp16 is missing.*{name}.*dataclasses"):
                model(batch(0, rank))
        kept: list[Tensor] = []
        type(model).form = lambda logits, aux: kept.append(aux) or logits.detach()
        model(batch(0, rank))
        with pytest.raises(tz.Misuse, match=r"loss scale of fp16 is missing"):
            kept[0].backward()

    on_ranks(2, body)


@dataclass
class Kept:
    loss: Tensor


class Asides(Net):
    """Puts an auxiliary loss aside as `way` says, and a state that its next forward goes on from."""

    way = "attribute"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.register_buffer("kept", None)
        self.hidden: Tensor | None = None
        self.aux: Any = None

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.blocks[0](self.embed(tokens))
        aux = hidden.float().square().mean()
        self.phases = torch.complex(aux, -aux)
        if self.way == "attribute":
            self.blocks[0].aux = aux
        elif self.way == "dict":
            self.aux = {"loss": aux}
        elif self.way == "buffer":
            self.kept = aux
        elif self.way == "list":
            self.losses.append(aux)
        elif self.way == "tuple":
            self.aux = (aux, "balance")
        elif self.way == "nested":
            self.aux = {"of blocks": [(aux,)]}
        elif self.way == "dataclass":
            self.aux = Kept(aux)
        elif self.way == "deque":
            self.aux = deque([aux], maxlen=1)
        elif self.way == "object":
            self.aux = Closed(hidden, aux)
        hidden = hidden if self.hidden is None else hidden + self.hidden
        self.hidden = self.blocks[1](hidden)
        logits = self.head(self.blocks[2](self.hidden))
        return (logits, aux) if self.way == "output" else logits

    def loss(self, tokens: Tensor) -> Tensor:
        self.losses.clear()
        out = self(tokens)
        aux = {
            "output": lambda: out[1],
            "attribute": lambda: self.blocks[0].aux,
            "dict": lambda: self.aux["loss"],
            "buffer": lambda: self.kept,
            "list": lambda: self.losses[0],
            "tuple": lambda: self.aux[0],
            "nested": lambda: self.aux["of blocks"][0][0],
            "dataclass": lambda: self.aux.loss,
            "deque": lambda: self.aux[0],
            "object": lambda: self.aux.aux,
        }[self.way]()
        return (out[0] if self.way == "output" else out).square().mean() + 3 * aux


_trained_by_output: dict[str, list[dict[str, Tensor]]] = {}
"""By plan."""


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize(
    "way", ["attribute", "dict", "buffer", "list", "tuple", "nested", "dataclass", "deque", "object"]
)
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_what_is_put_aside_trains_at_the_scale_of_an_output(plan: str, way: str) -> None:
    """A state with a gradient that the next forward goes on from is scaled once, by that forward's output."""
    base = Asides()

    def body(rank: int, way: str) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan, precision=fp16(init=2.0**10))
        model.way = way
        for step in range(3):
            loss = model.loss(batch(step, rank))
            with torch.no_grad():
                hidden = model.hidden
                model.hidden = None
                model(batch(9, rank))  # an evaluation between leaves a state of its own
                model.hidden = hidden
            (loss + model.loss(batch(step + 10, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.hidden = None
        assert model.phases.imag != 0  # which no scale makes real
        return full_parameters(model)

    if plan not in _trained_by_output:
        _trained_by_output[plan] = on_ranks(2, lambda rank: body(rank, "output"))
    for found, others in zip(on_ranks(2, lambda rank: body(rank, way)), _trained_by_output[plan], strict=True):
        assert_equal(found, others)


@pytest.mark.parametrize("plan", ["zero0", "hybrid_shard"])
def test_gradients_sent_back_in_fp16_keep_the_loss_scale(plan: str) -> None:
    """Divided by 1e8 they are below what fp16 has; the scale is divided off where they have become wider."""
    base = Net()

    def norm(reduce: str, rank: int) -> float:
        precision = replace(fp16(init=256.0), reduce=reduce)
        model, _ = sharded(base, plan, 4, precision=precision)
        model.set_gradient_denominator(1e8)
        (loss_of(model, batch(0, rank)) * 12).backward()
        return float(tz.clip_grad_norm_(model, float("inf")))

    wanted, found = (on_ranks(4, partial(norm, reduce)) for reduce in ("fp32", "fp16"))
    assert found == pytest.approx(wanted, rel=1e-2)


def test_the_scale_stays_a_number() -> None:
    """Gradients of zeros never overflow."""
    scaler = DynamicLossScale(LossScaling(interval=1))
    for _ in range(200):
        scaler.update(overflow=False)
    assert scaler.scale == 2.0**127


@pytest.mark.parametrize("key", ["scale", "good_steps"])
def test_a_scale_that_one_rank_alone_is_given_is_refused(key: str) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2", 2, precision="fp16")
        train(model, optimizer, 1, rank)
        state = optimizer.scaler_state()
        optimizer.load_scaler_state({**state, key: (state[key] or 1) * 2 if rank else state[key]})
        with pytest.raises(tz.RanksApart, match=rf"the gradients' loss scaler's {key} is .* load_scaler_state"):
            train(model, optimizer, 1, rank, first=1)

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_a_denominator_that_comes_behind_the_last_backward_is_refused(plan: str) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), plan)
        model.set_gradient_denominator(4)
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
        model.set_gradient_denominator(6)
        loss_of(model, batch(1, rank)).backward()
        model.set_gradient_denominator(6)
        with pytest.raises(tz.Misuse, match=r"set to 8\.0 when gradients had been divided by 6 already"):
            model.set_gradient_denominator(8)
        optimizer.step()
        model.set_gradient_denominator(8)
        optimizer.zero_grad()
        loss_of(model, batch(2, rank)).backward()
        optimizer.zero_grad()
        model.set_gradient_denominator(None)

    on_ranks(2, body)


def test_a_scale_is_not_loaded_between_micro_batches() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2", precision="fp16")
        train(model, optimizer, 1, rank)
        state = optimizer.scaler_state()
        with tz.accumulate(model):
            loss_of(model, batch(1, rank)).backward()
        with pytest.raises(tz.Misuse, match="A loss scale was loaded while gradients were still being accumulated"):
            optimizer.load_scaler_state({**state, "scale": 2.0})
        assert optimizer.scaler_state() == state
        optimizer.zero_grad()
        optimizer.load_scaler_state({**state, "scale": 2.0})
        assert optimizer.loss_scale == 2.0

    on_ranks(2, body)


def of_vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_that_leave_through_inputs_are_without_the_scale(plan: str, scale: float) -> None:
    """Of an encoder in front of the model, and of a tensor that is given to it; the oracle casts by hand."""
    base, encoder = of_vectors(), nn.Linear(8, 8)

    def gradients(model: nn.Module, cast: bool) -> list[Tensor]:
        own = copy.deepcopy(encoder)
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        inside = own(x).half() if cast else own(x)
        model(inside).float().square().mean().backward()
        assert x.grad is not None and own.weight.grad is not None
        return [x.grad, own.weight.grad]

    wanted = gradients(copy.deepcopy(base).half(), cast=True)

    def body(rank: int) -> list[Tensor]:
        model, _ = tz.shard(copy.deepcopy(base), None, plan, units=[nn.Linear], precision=fp16(init=scale))
        return gradients(model, cast=False)

    for found in on_ranks(2, body):
        for gradient, expected in zip(found, wanted, strict=True):
            assert (gradient - expected).abs().max() <= 0.01 * expected.abs().max()


@dataclass
class Given:
    x: Tensor


class Opening(nn.Sequential):
    def forward(self, given: Any) -> Tensor:
        x = given["x"] if isinstance(given, dict) else given.x
        return super().forward(x.half())


@pytest.mark.parametrize("form", [Given, lambda x: Mapped(x=x), lambda x: Closed(x, x)], ids=["data", "map", "closed"])
def test_gradients_that_leave_through_what_holds_an_input_are_without_the_scale(form: Any) -> None:
    base = Opening(*of_vectors())

    def body(rank: int) -> None:
        model, _ = sharded(base, "zero2", precision=fp16(init=1024.0))
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        if isinstance(given := form(x), Closed):
            with pytest.raises(tz.Misuse, match=r"was given a Closed, and the gradient of its 'aux'.*dataclasses"):
                model(given)
            return
        model(given).square().mean().backward()
        plain = x.detach().clone().requires_grad_()
        nn.Sequential(*base)(plain).square().mean().backward()
        assert (x.grad - plain.grad).abs().max() <= 0.01 * plain.grad.abs().max()

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_hooks_on_parameters_see_and_make_gradients_without_the_scale(plan: str) -> None:
    """Those from before tz.shard too, and those that change what they are given."""
    base, x = of_vectors(), torch.linspace(-1, 1, 32).reshape(4, 8)
    base(x).square().mean().backward()
    wanted = [parameter.grad for parameter in base.parameters()]
    base.zero_grad()

    def body(rank: int) -> None:
        model, seen = copy.deepcopy(base), dict[int, Tensor]()

        def hook(number: int, grad: Tensor) -> Tensor | None:
            seen[number] = grad.clone()
            return grad * 2 if number == 0 else None

        parameters = [*model.parameters()]
        parameters[0].register_hook(partial(hook, 0))
        model, _ = tz.shard(model, torch.optim.AdamW, plan, units=[nn.Linear], precision=fp16(init=1024.0))
        parameters[1].register_hook(lambda grad: [grad.mul_(2)].clear())
        parameters[2].register_hook(partial(hook, 2))
        model(x).square().mean().backward()
        for number, factor in enumerate([2, 2, 1, 1]):
            assert float(parameters[number].grad.norm()) == pytest.approx(factor * float(wanted[number].norm()), 0.01)
        for number, found in seen.items():
            assert found.dtype == torch.float32
            assert (found - wanted[number]).abs().max() <= 0.01 * wanted[number].abs().max()
        assert seen.keys() == {0, 2}

    on_ranks(2, body)


def test_what_would_see_or_make_a_gradient_with_the_scale_is_refused() -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)

    def body(rank: int) -> None:
        hooked = of_vectors()
        hooked[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(tz.BadInput, match=r"'0\.weight' has been given a hook by register_post.*register_hook"):
            tz.shard(hooked, None, precision="fp16")
        model, optimizer = sharded(of_vectors(), "zero0", precision="fp16")
        with pytest.raises(tz.Misuse, match=r"'0\.weight' was given a hook by register_post_accumulate_grad_hook"):
            model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(tz.Misuse, match=r"autograd\.grad .* '0\.weight', which has the loss scale"):
            torch.autograd.grad(model(x).square().mean(), [model[0].weight])
        for _ in range(2):
            loss = model(x).square().mean() + 0.1 * sum(each.square().sum() for each in model.parameters())
            with pytest.raises(tz.Misuse, match=r"computed with '.*' \(square\) outside .*loss scale.*weight_decay"):
                loss.backward()
            optimizer.zero_grad()
        assert float(model[0].weight.detach().norm()) > 0

    on_ranks(2, body)


def test_two_models_in_a_row_have_the_gradients_of_one_each() -> None:
    """The second one's backward begins that of the first, whose outputs multiply once more."""
    first, second = of_vectors(), of_vectors()

    def norms(precision: Any) -> list[float]:
        encoder, decoder = (
            tz.shard(copy.deepcopy(each), torch.optim.AdamW, "zero2", units=[nn.Linear], precision=precision)[0]
            for each in (first, second)
        )
        decoder(encoder(torch.linspace(-1, 1, 32).reshape(4, 8))).square().mean().backward()
        return [float(tz.clip_grad_norm_(model, 1e9)) for model in (encoder, decoder)]

    for found in on_ranks(2, lambda rank: (norms(fp16(init=256.0)), norms("fp32"))):
        assert found[0] == pytest.approx(found[1], rel=0.02)


def test_a_parameter_that_comes_later_is_refused_on_one_rank_too() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero2", precision=fp16(init=64.0))
        model.late = nn.Parameter(torch.zeros(8))
        with pytest.raises(tz.Misuse, match=r"'late' came to the model after tz\.shard.*that have the loss scale"):
            loss_of(model, batch(0, rank))

    on_ranks(1, body)
