"""A pipeline of gloo processes: messages between stages, initial values, and a stage that dies."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.checkpoint.documented import read_as_documented
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool, RankFailed, run_in_processes

pytestmark = pytest.mark.processes

CONFIG = DecoderConfig(31, 16, 4, 4, 2, 26, 8, tie_embeddings=False)


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(31, (2, 6 + micro % 3), generator=generator) for micro in range(count)]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def trained(schedule: str, chunks: int):
    """Weights as `tz.shard` drew them, and losses and weights after two steps."""
    mesh = tz.mesh(pp=2, device="cpu")
    with torch.device("meta"):
        model = Decoder(CONFIG)
    tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule, chunks))
    torch.manual_seed(7)
    model, optimizer = tz.shard(model, lambda p: torch.optim.AdamW(p, lr=0.1), "zero3", mesh=mesh, units=[Block])
    with tz.gathered(model) as parameters:
        drawn = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    losses = []
    for _ in range(2):
        losses.append(tz.step(model, micro_batches(4), loss_of, denominator=1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    with tz.gathered(model) as parameters:
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return drawn, losses, weights, engine_of(model).traffic.count["send"]


def drawn_whole() -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Decoder(CONFIG)
    torch.manual_seed(7)
    model, _ = tz.shard(model, None, "zero0", units=[Block])
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def alone(drawn: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    model = Decoder(CONFIG)
    model.load_state_dict(drawn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        total = torch.zeros(())
        for inputs, targets in micro_batches(4):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, dict(model.named_parameters())


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


@pytest.mark.parametrize(("schedule", "chunks"), mostly_long([("gpipe", 1), ("1f1b", 1), ("1f1b", 2)], ("1f1b", 2)))
def test_stages_draw_and_train_as_one_process(pool: Pool, schedule: str, chunks: int) -> None:
    drawn = pool.run(drawn_whole)[0]
    losses, weights = alone(drawn)
    ranks = pool.run(trained, schedule, chunks)
    assert set(ranks[0][0]) | set(ranks[1][0]) == set(drawn) and not set(ranks[0][0]) & set(ranks[1][0])
    boundaries, forms = 2 * chunks - 1, 3
    assert sum(sent for *_, sent in ranks) == boundaries * (2 * 4 * 2 + forms)  # shapes are sent once for each form
    for own_drawn, own_losses, own_weights, _ in ranks:
        assert own_losses == losses
        for name in own_drawn:
            assert torch.equal(own_drawn[name], drawn[name]), name
            torch.testing.assert_close(own_weights[name], weights[name], rtol=1e-5, atol=1e-6)


def built(pp: int):
    mesh, model = tz.mesh(pp=pp, device="cpu"), Decoder(CONFIG)
    tz.parallelize(model, mesh, pipeline=tz.Pipeline())
    adamw = functools.partial(torch.optim.AdamW, lr=0.1)
    return tz.shard(model, adamw, "zero3", mesh=mesh, units=[Block], precision="bf16")


def goes_on(pp: int, saved: Path | None, folder: Path) -> dict[str, Tensor]:
    """The whole weights after a step, from where `saved` was if it is given; then all is saved."""
    model, optimizer = built(pp)
    if saved is not None:
        tz.checkpoint.load(saved, model, optimizer)
    else:
        tz.step(model, micro_batches(4), loss_of)
        optimizer.step()
    tz.checkpoint.save(folder, model, optimizer)
    return model.state_dict()


def test_processes_save_stages_and_resume_without_and_back(pool: Pool, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("staged", "without", "back")]
    first, *others = pool.run(goes_on, 2, None, places[0])
    others += pool.run(goes_on, 1, places[0], places[1]) + pool.run(goes_on, 2, places[1], places[2])
    assert list(first) == list(Decoder(CONFIG).state_dict())
    for found in others:
        assert all(values.dtype == torch.float32 and torch.equal(found[name], values) for name, values in first.items())
    states = [read_as_documented(place) for place in places]
    assert len(states[0]) == 4 * len(first)  # weights, two moments, steps
    for key, values in states[0].items():
        assert all(state[key].tobytes() == values.tobytes() for state in states[1:]), key


def dies(when: str, heard: Path) -> None:
    """Rank 1 goes in the middle of the second step; the other one notes what it hears of that. The first is saved."""
    model, optimizer = built(2)
    tz.step(model, micro_batches(4), loss_of)
    optimizer.step()
    optimizer.zero_grad()
    tz.checkpoint.save(heard.parent / "saved", model, optimizer)
    asked = 0

    def loss_or_death(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        if asked == 2:
            if when == "killed":
                os.kill(os.getpid(), 9)
            raise ArithmeticError("the second micro-batch cannot be compared")
        return loss_of(logits, targets)

    try:
        tz.step(model, micro_batches(4), loss_or_death)
    except ConnectionError as error:
        heard.write_text(str(error))
        raise


@pytest.mark.parametrize("when", mostly_long(["killed", "raises"], "killed"))
def test_a_stage_that_ends_in_mid_step_ends_all_and_is_named(when: str, pool: Pool, tmp_path: Path) -> None:
    """Others go on from the step before, without stages and with, to the bit."""
    started, heard = time.monotonic(), tmp_path / "heard"
    with pytest.raises(
        RankFailed, match="rank . failed first" if when == "killed" else "the second micro-batch cannot"
    ):
        run_in_processes(2, dies, when, heard, timeout_s=150.0, grace_s=60.0 if when == "killed" else 2.0)
    assert time.monotonic() - started < 140.0
    if when == "killed":  # the other process lives on, and the pool ends both
        assert heard.read_text().startswith("Rank 1, with whose stage a message was exchanged")
    places = [tmp_path / name for name in ("saved", "without", "back")]
    weights = pool.run(goes_on, 1, places[0], places[1]) + pool.run(goes_on, 2, places[1], places[2])
    states = [read_as_documented(place) for place in places]
    assert all(state[key].tobytes() == values.tobytes() for key, values in states[0].items() for state in states[1:])
    assert all(torch.equal(own[name], values) for name, values in weights[0].items() for own in weights[1:])
