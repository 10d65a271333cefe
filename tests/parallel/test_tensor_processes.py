"""Tensor parallelism on gloo processes, each with a random generator and memory of its own."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, engine_of
from terrazzo.parallel.tensor import dropout
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.parallel.oracle import parts_of

pytestmark = pytest.mark.processes

CONFIG = DecoderConfig(31, 16, 2, 4, 2, 26, 8, tie_embeddings=False)
DROPS = DecoderConfig(31, 16, 1, 4, 4, 26, 8, dropout=0.5)


def tokens(data_rank: int) -> Tensor:
    return torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(data_rank))


def loss_of(model, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def drawn_on_meta(tp: int, seeds_differ: bool):
    """The weights of a rank whose model was drawn by `tz.shard`, and its losses of two steps."""
    mesh = tz.mesh(tp=tp, device="cpu")
    rank = torch.distributed.get_rank()
    with torch.device("meta"):
        model = Decoder(CONFIG)
    tz.parallelize(model, mesh)
    torch.manual_seed(7 + rank * seeds_differ)
    model, optimizer = tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), "zero3", mesh=mesh, units=[Block])
    with tz.gathered(model) as parameters:
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    losses = []
    for _ in range(2):
        loss = loss_of(model, tokens(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return weights, losses


def dropped(seeds_differ: bool, checkpointing: str):
    """What a rank's dropout leaves of ones, in forward and in backward; or how the forward ends."""
    mesh, rank = tz.mesh(tp=2, device="cpu"), torch.distributed.get_rank()
    torch.manual_seed(3)
    model = Decoder(DROPS)
    checkpoint_activations(model, checkpointing, units=[Block])
    tz.parallelize(model, mesh)
    kept: list[Tensor] = []
    model.blocks[0].dropout.register_forward_hook(lambda module, args, output: kept.append(output.detach() != 0))
    model, _ = tz.shard(model, None, "zero0", mesh=mesh)
    torch.manual_seed(11 + rank * seeds_differ)
    try:
        loss_of(model, tokens(0)).backward()
    except tz.RanksApart as error:
        return str(error)
    return (
        kept,
        torch.randint(1000, ()).item(),
        engine_of(model).trainable()[0].gradient.finished.read().isfinite().all().item(),
    )


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


@pytest.mark.parametrize("seeds_differ", mostly_long([False, True], True))
def test_initial_values_do_not_depend_on_the_mesh(pool: Pool, seeds_differ: bool) -> None:
    alone = pool.run(drawn_on_meta, 1, seeds_differ)
    cut = pool.run(drawn_on_meta, 2, seeds_differ)
    for rank, (weights, losses) in enumerate(cut):
        for name, whole in alone[0][0].items():
            assert torch.equal(weights[name], parts_of(name, whole, CONFIG, 2)[rank]), name
        assert losses == pytest.approx(alone[0][1], rel=1e-5)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_dropout_is_each_ranks_own_and_comes_again_when_a_block_is_recomputed(pool: Pool, checkpointing: str) -> None:
    (first, *ended), (second, *other_ended) = pool.run(dropped, False, checkpointing)
    assert ended == other_ended and ended[1]
    assert first[0].shape == (2, 4, 16) and not torch.equal(first[0], second[0])
    if checkpointing == "full":
        assert all(torch.equal(*pair) for kept in (first, second) for pair in zip(kept, kept[2:], strict=False))


def test_ranks_that_see_the_same_data_are_seeded_alike(pool: Pool) -> None:
    assert all("random states" in found for found in pool.run(dropped, True, "none"))


class AnotherGenerator:
    """Stands for a device's, as `torch.get_device_module` has it."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return self._generator.get_state()


def drawn_on_a_device_by_one_rank() -> str:
    mesh, rank = tz.mesh(tp=2, device="cpu"), torch.distributed.get_rank()
    torch.manual_seed(3)
    model = Decoder(DROPS)
    model, _ = tz.shard(tz.parallelize(model, mesh), None, "zero0", mesh=mesh)
    torch.manual_seed(11)
    with mock.patch.object(dropout, "_generators", return_value=[torch, AnotherGenerator(rank)]):
        try:
            loss_of(model, tokens(0)).backward()
        except tz.RanksApart as error:
            return str(error)
    return "trained"


def test_the_generators_of_devices_are_compared_too(pool: Pool) -> None:
    assert all("random states" in found for found in pool.run(drawn_on_a_device_by_one_rank))


class Dropping(nn.Module):
    """Dropout as a function, with a share that no attribute shows."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), functools.partial(F.dropout, p=share)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.drop(x, training=self.training)))


def dropped_as_a_function(share: float, seeds_differ: bool) -> str:
    mesh, rank = tz.mesh(tp=2, device="cpu"), torch.distributed.get_rank()
    torch.manual_seed(3)
    model = tz.parallelize(Dropping(share), mesh, tensor={"up": "colwise", "down": "rowwise"})
    model, _ = tz.shard(model, None, "zero0", mesh=mesh)
    torch.manual_seed(11 + rank * seeds_differ)
    try:
        for _ in range(2):
            model(torch.ones(2, 4, 8)).sum().backward()
    except tz.RanksApart as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("share", "seeds_differ", "found"),
    [(0.5, True, "random states"), (0.5, False, "trained"), (0.0, True, "trained")],
)
def test_dropout_that_no_attribute_shows_is_seen(pool: Pool, share: float, seeds_differ: bool, found: str) -> None:
    assert all(found in told for told in pool.run(dropped_as_a_function, share, seeds_differ))


class Behind(nn.Module):
    """Drops half of what is between two matrices, and half of what their sum is."""

    def __init__(self, recomputed: str) -> None:
        super().__init__()
        self.up, self.down, self.between, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(), nn.Dropout()
        self.recomputed = recomputed

    def inner(self, x: Tensor) -> Tensor:
        return self.between(self.up(x)).sin()

    def outer(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.inner(x))).sin()

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed == "all":
            return checkpoint(self.outer, x, use_reentrant=False)
        inner = checkpoint(self.inner, x, use_reentrant=False) if self.recomputed == "inner" else self.inner(x)
        return self.drop(self.down(inner))


def dropped_behind_a_sum(recomputed: str):
    """Inside of one module of style `enter`: what is dropped of this rank's part, of the sum, and drawn later."""
    mesh = tz.mesh(tp=2, device="cpu")
    torch.manual_seed(3)
    model = nn.Sequential(Behind(recomputed), nn.Dropout())
    plan = {"0": "enter", "0.up": "colwise", "0.down": "rowwise"}
    tz.parallelize(model, mesh, tensor=plan, sequence=False)
    seen: list[Tensor] = []
    for module in (model[0].between, model[0].down, model[0].drop, model[1]):
        module.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model, _ = tz.shard(model, None, "zero0", mesh=mesh)
    torch.manual_seed(11)
    steps = []
    for _ in range(2):
        loss = model(torch.ones(2, 4, 8)).sum()
        steps.append(seen[:])
        if recomputed == "all":
            with pytest.raises(tz.Misuse, match="recomputed without that module"):
                loss.backward()
            return []
        loss.backward()
        if recomputed:
            assert torch.equal(seen[-1], steps[-1][0])  # it is dropped again
        seen.clear()
    return steps


def test_a_sum_that_is_recomputed_without_its_module_before_dropout_is_refused(pool: Pool) -> None:
    pool.run(dropped_behind_a_sum, "all")


@pytest.mark.parametrize("recomputed", ["", "inner"])
def test_dropout_behind_the_sum_of_a_row_is_that_of_all_ranks(pool: Pool, recomputed: str) -> None:
    first, second = pool.run(dropped_behind_a_sum, recomputed)
    for (between, down, drop, last), (other_between, *others) in zip(first, second, strict=True):
        assert not torch.equal(between != 0, other_between != 0)
        assert all(torch.equal(*pair) for pair in zip((down, drop, last), others, strict=True))
        assert torch.equal(drop, torch.where(drop != 0, 2 * down, 0))
        assert 0 < (drop != 0).sum() < drop.numel()
    assert all(not torch.equal(first[0][place] != 0, first[1][place] != 0) for place in (0, 2, 3))
    assert not torch.equal(first[0][2] != 0, first[0][3] != 0)


def given(rows: int, values: float, by_name: bool, trains: bool = True) -> str:
    mesh, rank = tz.mesh(tp=2, device="cpu"), torch.distributed.get_rank()
    torch.manual_seed(3)
    model = tz.parallelize(Dropping(0.0), mesh, tensor={"up": "colwise", "down": "rowwise"})
    model, _ = tz.shard(model, None, "zero0", mesh=mesh)
    x = torch.full((rows if rank else 2, 4, 8), values if rank else 1.0)
    try:
        with torch.set_grad_enabled(trains):
            output = model.train(trains)(x=x) if by_name else model.train(trains)(x)
        if trains:
            output.sum().backward()
    except tz.RanksApart as error:
        return str(error)
    return "trained"


def given_later(trains: bool) -> str:
    mesh, rank = tz.mesh(tp=2, device="cpu"), torch.distributed.get_rank()
    model = tz.parallelize(Dropping(0.0), mesh, tensor={"up": "colwise", "down": "rowwise"})
    model, _ = tz.shard(model, None, "zero0", mesh=mesh)
    with torch.set_grad_enabled(trains):
        for values in (1.0, 2.0, 3.0 + rank):
            try:
                model.train(trains)(torch.full((2, 4, 8), values))
            except tz.RanksApart as error:
                return f"{values - rank:g}: {error}"
    return "none"


@pytest.mark.parametrize("trains", [True, False])
def test_they_are_compared_in_each_forward(pool: Pool, trains: bool) -> None:
    assert all("3: The ranks along tp were given other inputs" in told for told in pool.run(given_later, trains))


@pytest.mark.parametrize(
    ("rows", "values", "by_name", "trains", "found"),
    [
        (2, 1.0, True, True, "trained"),
        (2, 2.0, True, True, "other inputs (here float32 [2, 4, 8])"),
        (2, 2.0, False, True, "other inputs"),
        (3, 1.0, False, True, "other inputs"),
        (2, 2.0, False, False, "other inputs"),
    ],
)
def test_ranks_that_share_matrices_see_the_same_data(
    pool: Pool, rows: int, values: float, by_name: bool, trains: bool, found: str
) -> None:
    assert all(found in told for told in pool.run(given, rows, values, by_name, trains))
