"""A step that fails on one rank of a pipeline fails on all, which are told where and why; then they may go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.parallel.pipeline import schedule_runner
from terrazzo.parallel.pipeline.messages import Messages
from tests.helpers.processes import RankFailed, run_in_processes
from tests.helpers.threads import run_in_threads


class Layer(nn.Linear):
    """Does what it is told with its number of calls."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width, width)
        self.calls, self.then = 0, lambda calls, x: x

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.then(self.calls, x))


class OutOfLuck(Exception):
    pass


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer() for _ in range(count)))


def batches(seed: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(2, 4, generator=draw), torch.randn(2, 4, generator=draw)) for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def cut(base: nn.Module, plan: str = "zero2", pipeline: tz.Pipeline | None = None, **mesh: int) -> tuple[Any, Any, Any]:
    model, ranks = copy.deepcopy(base), tz.mesh(**mesh, device="cpu")
    tz.parallelize(model, ranks, pipeline=(pipeline or tz.Pipeline()) if "pp" in mesh else None)
    model, optimizer = tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), plan, mesh=ranks)
    return model, optimizer, ranks


def told(action: Any) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        action()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.cover
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("pipeline", "trains"),
    [
        (tz.Pipeline("1f1b"), True),
        (tz.Pipeline("1f1b"), False),
        (tz.Pipeline("1f1b", chunks=2), True),
        (tz.Pipeline("gpipe"), True),
        (tz.Pipeline("zero_bubble"), True),
    ],
)
@pytest.mark.parametrize("stage", ["first", "last", "loss"])
def test_the_first_failure_is_named_on_every_rank(
    pipeline: tz.Pipeline, trains: bool, stage: str, steps_before: int
) -> None:
    """Of a step whose shapes ranks have told each other before, or not; and the next one is as if it had not been."""
    base, ranks = layers(2 * pipeline.chunks), 2

    def step(model: Any, seed: int, loss_fn: Any = loss_of) -> float:
        with torch.set_grad_enabled(trains):
            return tz.step(model, batches(seed), loss_fn, denominator=1.0).item()

    def body(rank: int) -> tuple[str, list[float]]:
        model, optimizer, _ = cut(base, pipeline=pipeline, pp=ranks)
        losses = [step(model, seed) for seed in range(steps_before)]
        optimizer.zero_grad()

        def fail(calls: int, x: Tensor) -> Tensor:
            if calls == 2:
                raise OutOfLuck("the second is too much")
            return x

        calls: list[int] = []

        def loss(output: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            return loss_of(fail(len(calls), output), target)

        layer = {"first": model[0], "last": model[-1]}.get(stage)
        if layer is not None:
            layer.calls, layer.then = 0, fail
        text = told(lambda: step(model, 8, loss if stage == "loss" else loss_of))
        for each in model:
            each.then = lambda calls, x: x
        optimizer.zero_grad()
        return text, [*losses, step(model, 9)]

    def plain() -> list[float]:
        with torch.no_grad():
            return [sum(loss_of(base(x), y) for x, y in batches(seed)).item() for seed in [*range(steps_before), 9]]

    failing = 0 if stage == "first" else 1
    number = 1 if stage == "first" else ranks * pipeline.chunks
    for rank, (text, losses) in enumerate(run_in_threads(ranks, body, timeout_s=10.0)):
        assert losses == pytest.approx(plain(), rel=1e-5)
        if rank == failing:
            assert text == "OutOfLuck: the second is too much"
        else:
            assert text == (
                f"FailedElsewhere: Rank {failing} (stage {number} of {ranks * pipeline.chunks}) has failed first: "
                "OutOfLuck: the second is too much"
            )


def test_what_one_rank_raises_as_the_last_messages_are_waited_for_is_told_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the last action, which is of no stage."""
    finish, failures = Messages.finish, []

    def fail_once(messages: Messages, patience_s: float | None = None) -> None:
        finish(messages, patience_s)
        if messages.rank == 1 and failures:
            raise failures.pop()

    def body(rank: int) -> str:
        model, *_ = cut(layers(2), pp=2)
        tz.step(model, batches(0), loss_of)
        if rank == 1:
            failures.append(OutOfLuck("no more messages"))
        return told(lambda: tz.step(model, batches(1), loss_of))

    monkeypatch.setattr(Messages, "finish", fail_once)
    assert run_in_threads(2, body, timeout_s=10.0) == [
        "FailedElsewhere: Rank 1 has failed first: OutOfLuck: no more messages",
        "OutOfLuck: no more messages",
    ]


class Counting(Layer):
    """Has another tensor for a buffer in each forward, and one that is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.sum = self.sum + x.detach().sum()
        self.count += 1
        return super().forward(x)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("failing", ["0", "3"])
def test_buffers_are_as_if_a_step_that_failed_had_not_been(failing: str, schedule: str, trains: bool) -> None:
    """Norms of a stage behind were given what stands for values; those of one before, values of half a step."""
    torch.manual_seed(1)
    base = nn.Sequential(Layer(), Counting(), nn.BatchNorm1d(4), Layer(), nn.BatchNorm1d(4), Counting())
    plain = copy.deepcopy(base)
    for seed in (0, 2):
        for x, _ in batches(seed):
            plain(x)

    def fail(calls: int, x: Tensor) -> Tensor:
        if calls == 2:
            raise OutOfLuck
        return x

    def body(rank: int) -> Any:
        model, optimizer, _ = cut(base, pipeline=tz.Pipeline(schedule, split=["3"]), pp=2)
        layer = model.get_submodule(failing)
        with torch.set_grad_enabled(trains):
            tz.step(model, batches(0), loss_of)
            layer.calls, layer.then = 0, fail
            told(lambda: tz.step(model, batches(1), loss_of))
            layer.then = lambda calls, x: x
            optimizer.zero_grad()
            tz.step(model, batches(2), loss_of)
        return tz.full_state_dict(model)

    found = run_in_threads(2, body, timeout_s=10.0)[0]
    for name, each in plain.named_buffers():
        assert torch.equal(found[name], each), name


def test_an_evaluation_that_failed_leaves_the_gradients_of_the_step_around_it() -> None:
    base = layers()
    plain = copy.deepcopy(base)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5)
    sum((loss_of(plain(x), target) for x, target in batches(0)), torch.zeros(())).backward()
    oracle.step()

    def fail(output: Tensor, target: Tensor) -> Tensor:
        raise OutOfLuck

    def body(rank: int) -> Any:
        model, optimizer, _ = cut(base, pp=2)
        tz.step(model, batches(0), loss_of)
        with torch.no_grad():
            told(lambda: tz.step(model, batches(1), fail))
        optimizer.step()
        return tz.full_state_dict(model)

    found = run_in_threads(2, body, timeout_s=10.0)[0]
    torch.testing.assert_close(found, {**plain.state_dict()})


def test_what_one_data_rank_refuses_of_its_loss_is_raised_on_all() -> None:
    """Terrazzo's own errors keep their class."""

    def body(rank: int) -> str:
        model, _, mesh = cut(layers(), pp=2, dp_shard=2)
        tz.step(model, batches(rank % 2), loss_of)  # the first is compared in the middle of it
        shape = (1,) if mesh.get_local_rank("dp_shard") else ()
        return told(lambda: tz.step(model, batches(rank % 2), lambda x, y: loss_of(x, y).reshape(shape)))

    texts = run_in_threads(4, body, timeout_s=10.0)
    assert all(text.startswith("BadInput: ") and "loss_fn returned a tensor of shape (1,)" in text for text in texts)
    assert [text for text in texts if "Rank" not in text] == [texts[3]]
    assert all("Rank 3 (stage 2 of 2) has failed first" in text for text in texts[:3])


def test_another_number_of_micro_batches_on_a_data_rank_is_refused_on_all() -> None:
    def body(rank: int) -> str:
        model, _, mesh = cut(layers(), "zero3", pp=2, dp_shard=2)
        count = 2 + mesh.get_local_rank("dp_shard")
        return told(lambda: tz.step(model, batches(rank % 2, count), loss_of))

    for text in run_in_threads(4, body, timeout_s=10.0):
        assert text.startswith("RanksApart: ") and "from 2 to 3 micro-batches" in text


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3"])
def test_without_stages_data_ranks_may_have_other_numbers_where_nothing_is_exchanged_in_each(plan: str) -> None:
    base = layers(2)
    plain = copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5)
    for reader in range(2):
        for x, y in batches(reader, 2 + reader):
            loss_of(plain(x), y).backward()
    optimizer.step()

    def body(rank: int) -> Any:
        model, optimizer, _ = cut(base, plan, dp_shard=2)
        try:
            tz.step(model, batches(rank, 2 + rank), loss_of, denominator=1.0)
        except tz.RanksApart as error:
            return str(error)
        optimizer.step()
        return tz.full_state_dict(model, keep=True)

    for rank, found in enumerate(run_in_threads(2, body, timeout_s=10.0)):
        if plan in ("zero2", "zero3"):
            assert f"from 2 to 3 micro-batches on the mesh's ranks (here {2 + rank})" in found
        elif rank == 0:
            for name, each in plain.state_dict().items():
                torch.testing.assert_close(found[name], each, rtol=1e-6, atol=1e-6)


def test_without_stages_what_one_data_rank_refuses_is_raised_on_all() -> None:
    """The others would wait for it in the first exchange."""

    def body(rank: int) -> str:
        model, *_ = cut(layers(2), dp_shard=2)
        return told(lambda: tz.step(model, [] if rank else batches(0), loss_of))

    other, own = run_in_threads(2, body, timeout_s=10.0)
    assert own.startswith("BadInput: tz.step was given [] for micro-batches")
    assert other.startswith("BadInput: Rank 1 cannot do its part of this")


def detaching(stage: int, when: Any) -> nn.Sequential:
    model = layers()
    model[stage].then = lambda calls, x: x.detach() if when(calls) else x
    return model


@pytest.mark.parametrize("ranks", [{"pp": 2}, {"pp": 2, "dp_shard": 2}, {"pp": 4}])
def test_a_stage_through_which_no_gradient_comes_back_is_refused(ranks: dict[str, int]) -> None:
    """Weights stay as they are: those in front would have been trained on zeros, and so decayed."""
    base = detaching(2, lambda calls: True)

    def body(rank: int) -> str:
        model, _, mesh = cut(base, **ranks)
        before = tz.full_state_dict(model, keep=True)
        text = told(lambda: tz.step(model, batches(mesh.get_local_rank("dp_shard")), loss_of))
        after = tz.full_state_dict(model, keep=True)
        assert before is None or all(torch.equal(after[name], each) for name, each in before.items())
        return text

    stage = 3 if ranks["pp"] == 4 else 2
    for text in run_in_threads(torch.Size(ranks.values()).numel(), body, timeout_s=10.0):
        assert text.startswith("Misuse: ") and f"through stage {stage} of the pipeline, which begins with '2'" in text


@pytest.mark.parametrize("ranks", [{"pp": 2}, {"pp": 2, "dp_shard": 2}])
def test_a_stage_may_send_no_gradient_back_of_some_micro_batches(ranks: dict[str, int]) -> None:
    """Of the first of each data rank; and of all but one of them all."""
    data = ranks.get("dp_shard", 1)
    for when in (lambda calls: calls == 1, lambda calls: calls != 2):
        plain = layers()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5)
        for reader in range(data):
            for number, (x, y) in enumerate(batches(reader), start=1):
                front = plain[:2](x)
                loss_of(plain[2:](front.detach() if when(number) else front), y).backward()
        optimizer.step()
        base = detaching(2, when)

        def body(rank: int, base: nn.Module = base) -> Any:
            model, optimizer, mesh = cut(base, **ranks)
            tz.step(model, batches(mesh.get_local_rank("dp_shard")), loss_of, denominator=1.0)
            optimizer.step()
            return tz.full_state_dict(model, keep=True)

        found = run_in_threads(2 * data, body, timeout_s=10.0)[0]
        for name, each in plain.state_dict().items():
            torch.testing.assert_close(found[name], each, rtol=1e-6, atol=1e-6)


def fails_alone(folder: Path) -> None:
    """The data ranks of its stage wait for its weights, and those of the other stage for these."""
    schedule_runner.PATIENCE_S = 0.3
    model, *_ = cut(layers(), "zero3", pp=2, dp_shard=2)
    rank, asked = torch.distributed.get_rank(), []
    tz.step(model, batches(rank % 2), loss_of)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        asked.append(1)
        if rank == 3 and len(asked) == 2:
            raise OutOfLuck("this data cannot be compared")
        return loss_of(output, target)

    (folder / str(rank)).write_text(told(lambda: tz.step(model, batches(rank % 2), loss)))
    raise OutOfLuck


@pytest.mark.processes
def test_a_failure_that_others_wait_for_elsewhere_is_named_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_in_processes(4, fails_alone, tmp_path, timeout_s=20.0)
    *others, own = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert own == "OutOfLuck: this data cannot be compared"
    assert set(others) == {
        "FailedElsewhere: Rank 3 (stage 2 of 2) has failed first: OutOfLuck: this data cannot be compared"
    }
