"""Replicas that train by themselves and take outer steps, against copies of the model in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import ModelState, engine_of, estimate
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.dry_run.outer_steps import dry_run_outer_step
from terrazzo.engine.plan import diloco
from terrazzo.engine.states.restore import FullStates
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.engine.narrow import as_sent
from tests.engine.toys import (
    VOCABULARY,
    Net,
    assert_close,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    on_ranks,
    train,
)
from tests.helpers.cover import mostly_long, places
from tests.helpers.fake import fake_group


class Even(nn.Module):
    """A table, two blocks and a head, of sizes that fill vectors: fused kernels round the rest of others otherwise."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, width)
        self.blocks_used = 2

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: self.blocks_used]:
            x = x + torch.relu(block(x))
        return self.head(x)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)  # what states off the device are stepped by, too


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mesh_of(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))


def masters(model: Any) -> dict[str, Tensor]:
    return tz.full_state_dict(model, keep=True)


def as_received(delta: Tensor, traffic: str) -> Tensor:
    """What all replicas see of one's outer gradient."""
    if traffic == "fp32":
        return delta
    blocks = torch.nn.functional.pad(delta.flatten(), (0, -delta.numel() % 256)).view(-1, 256)
    return as_sent(blocks, traffic).flatten()[: delta.numel()].view(delta.shape)


def plain_diloco(
    base: nn.Module,
    settings: tz.DiLoCo,
    replicas: int,
    shards: int,
    steps: int,
    fragments: Sequence[Sequence[str]] = ((),),
) -> list[dict[str, Tensor]]:
    """The weights of each replica behind `steps` steps: everything by hand, in one process.

    Args:
        fragments: the beginnings of their parameters' names; of the last, any others.
    """
    models = [copy.deepcopy(base) for _ in range(replicas)]
    optimizers = [adamw(model.parameters()) for model in models]
    each = [dict(model.named_parameters()) for model in models]
    first = {name: value.detach().clone() for name, value in base.named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in first.items()}
    left, names_of = [*first], list[list[str]]()
    for beginnings in fragments:
        names_of.append([name for name in left if name.startswith(tuple(beginnings) or "")])
        left = [name for name in left if name not in names_of[-1]]

    def outer_gradient(name: str) -> Tensor:
        deltas = [as_received(first[name] - own[name].detach(), settings.traffic) for own in each]
        total = deltas[0]
        for other in deltas[1:]:
            total = total + other
        return total / replicas

    def outer_step(deltas: dict[str, Tensor], kept: float) -> None:
        for name, delta in deltas.items():
            momentum[name] = momentum[name] * settings.momentum + delta
            step_of = momentum[name] * settings.momentum + delta
            first[name] = first[name] - step_of * settings.lr
            for own in each:
                mixed = own[name].detach() * kept + first[name] * (1 - kept) if kept else first[name]
                own[name].data.copy_(mixed)

    every, count, delay = settings.sync_every, settings.fragments, settings.delay
    meet_every, queue = settings.meet_every or every, list[tuple[int, dict[str, Tensor]]]()
    for step in range(steps):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            total: dict[str, Tensor] = {}
            for shard in range(shards):  # summed in the order of ranks
                loss_of(model, batch(step, replica * shards + shard)).backward()
                for name, parameter in model.named_parameters():
                    grad = parameter.grad
                    total[name] = total[name] + grad if shard else grad.clone()
                optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.grad = total[name].div_(shards)
            optimizer.step()
            optimizer.zero_grad()
        behind = step % meet_every + 1
        for number, names in enumerate(names_of):
            leaves = (behind - (number + 1) * every // count) % every == 0 and behind >= (number + 1) * every // count
            if leaves and behind + delay < meet_every:
                queue.append((behind + delay, {name: outer_gradient(name) for name in names}))
        if queue and queue[0][0] == behind:
            outer_step(queue.pop(0)[1], settings.mixing if delay else 0)
        if behind == meet_every:
            outer_step({name: outer_gradient(name) for name in first}, 0)
    return [{name: value.detach() for name, value in own.items()} for own in each]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(
    ("plan", "replicas", "shards", "every"),
    [
        ("zero0", 2, 2, 3), ("zero1", 2, 2, 1), ("zero2", 2, 2, 3), ("zero3", 2, 2, 3), ("zero3", 3, 1, 1),
        ("zero0", 3, 1, 3), ("zero3", 3, 2, 2), ("zero3@cpu-all", 2, 2, 3), ("zero2@cpu", 2, 1, 1),
        ("zero3@nvme-all", 2, 2, 2), ("zero0@cpu", 2, 2, 2), ("shard_grad_op", 2, 2, 1), ("zero3", 1, 2, 2),
    ],
)  # fmt: skip
def test_each_bit_is_that_of_plain_copies(plan: str, replicas: int, shards: int, every: int, tmp_path: Path) -> None:
    base, settings, steps = Even(), tz.DiLoCo(every, lr=0.6), 2 * every + 1
    wanted = plain_diloco(base, settings, replicas, shards, steps)
    offload = tz.Offload(path=tmp_path, direct=False) if "nvme" in plan else None

    def body(rank: int) -> None:
        model = copy.deepcopy(base)
        mesh = mesh_of(replicas, shards)
        model, optimizer = tz.shard(model, adamw, plan, mesh=mesh, offload=offload, diloco=settings)
        train(model, optimizer, steps, rank)
        assert_equal(masters(model), wanted[rank // shards])
        assert_equal(full_parameters(model), wanted[rank // shards])

    on_ranks(replicas * shards, body)


FRAGMENTS = {1: [[]], 2: [["embed", "head"], []], 3: [["embed", "head"], ["blocks.0"], []]}
"""Of `Even`, whose first unit is the root."""


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(
    ("plan", "replicas", "shards", "settings"),
    [
        ("zero3", 2, 2, tz.DiLoCo(4, lr=0.6, fragments=2, delay=1, meet_every=8)),
        ("zero0", 2, 2, tz.DiLoCo(3, lr=0.6, fragments=3, delay=1, meet_every=6, mixing=0.3)),
        ("zero2", 3, 1, tz.DiLoCo(2, lr=0.6, delay=2, meet_every=6)),
        ("zero3@cpu-all", 2, 2, tz.DiLoCo(4, lr=0.6, fragments=2, delay=2, meet_every=8)),
        ("zero0@cpu", 2, 2, tz.DiLoCo(4, lr=0.6, fragments=2, meet_every=8)),
        ("zero0@nvme", 2, 2, tz.DiLoCo(2, lr=0.6, fragments=2, delay=1, meet_every=4)),
        ("zero3", 2, 2, tz.DiLoCo(4, lr=0.6, traffic="int8", fragments=3, delay=1, meet_every=8)),
        ("zero1", 3, 1, tz.DiLoCo(4, lr=0.6, momentum=0, traffic="int8", fragments=2, delay=1, meet_every=8)),
        ("zero3", 1, 2, tz.DiLoCo(4, lr=0.6, fragments=2, delay=1, meet_every=8)),
    ],
    ids=str,
)  # fmt: skip
def test_fragments_that_stream_have_the_bits_of_plain_copies(
    plan: str, replicas: int, shards: int, settings: tz.DiLoCo, tmp_path: Path
) -> None:
    base, meet_every = Even(), settings.meet_every or 0
    steps, fragments = meet_every + settings.sync_every + settings.delay, FRAGMENTS[settings.fragments]
    wanted = [plain_diloco(base, settings, replicas, shards, each, fragments) for each in (meet_every, steps)]
    tier = tz.Plan.named("zero0").on(optim="nvme") if plan == "zero0@nvme" else plan
    offload = tz.Offload(path=tmp_path, direct=False) if "nvme" in plan else None

    def body(rank: int) -> None:
        mesh = mesh_of(replicas, shards)
        model, optimizer = tz.shard(
            copy.deepcopy(base), adamw, tier, mesh=mesh, offload=offload, units=["blocks.*"], diloco=settings
        )
        train(model, optimizer, meet_every, rank)
        assert_equal(masters(model), wanted[0][0])  # of any replica
        train(model, optimizer, steps - meet_every, rank, meet_every)
        assert_equal(masters(model), wanted[1][rank // shards])
        assert_equal(full_parameters(model), wanted[1][rank // shards])

    on_ranks(replicas * shards, body)


@pytest.mark.parametrize(("plan", "replicas", "shards"), [("zero3", 2, 2), ("zero0", 3, 1), ("zero2", 1, 2)])
def test_blocks_of_8_bits_have_the_bits_of_plain_copies_whatever_the_cut(plan: str, replicas: int, shards: int) -> None:
    base, settings, steps = Even(), tz.DiLoCo(2, lr=0.6, traffic="int8"), 5
    wanted = plain_diloco(base, settings, replicas, shards, steps)

    def body(rank: int) -> None:
        mesh = mesh_of(replicas, shards)
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, plan, mesh=mesh, diloco=settings)
        train(model, optimizer, steps, rank)
        assert_equal(masters(model), wanted[rank // shards])

    on_ranks(replicas * shards, body)


def test_local_sgd_ends_a_round_at_the_mean_of_the_weights() -> None:
    base = Net()

    def body(rank: int) -> dict[str, Tensor]:
        alone = copy.deepcopy(base)
        optimizer = sgd(alone.parameters())
        train(alone, optimizer, 2, rank)
        settings = tz.DiLoCo(2, lr=1, momentum=0)
        model, optimizer = tz.shard(copy.deepcopy(base), sgd, mesh=mesh_of(2, 1), diloco=settings)
        train(model, optimizer, 2, rank)
        engine = engine_of(model)
        assert len(engine.trainable()[0].outer) == 1
        return {"found": masters(model), "alone": dict(alone.named_parameters())}

    both = on_ranks(2, body)
    means = {name: (both[0]["alone"][name] + both[1]["alone"][name]) / 2 for name in both[0]["alone"]}
    for each in both:
        assert_close(each["found"], means, 1e-6)


def test_a_round_sends_flags_between_replicas_as_it_begins_and_an_outer_step_what_is_promised() -> None:
    base = Net()

    def body(rank: int) -> None:
        for traffic, plan in (("fp32", "zero2"), ("int8", "zero3"), ("fp32", "zero0")):
            settings = tz.DiLoCo(2, traffic=traffic)
            model, optimizer = tz.shard(copy.deepcopy(base), adamw, plan, mesh=mesh_of(2, 2), diloco=settings)
            engine = engine_of(model)
            train(model, optimizer, 2, rank)  # to the first outer step
            engine.tally.traffic.reset()
            tz.clip_grad_norm_(model, 1.0)
            engine.tally.traffic.reset()
            train(model, optimizer, 1, rank, 2)
            control = engine.promise.outer_traffic().bytes["control"]  # whether the round begins alike
            between = {kind: times.count for (axis, kind), times in engine.traffic.times.items() if "replicate" in axis}
            assert {kind for kind, count in between.items() if count} == {"control"}
            assert engine.traffic.bytes == engine.promise.traffic().bytes + Counter(control=control)
            train(model, optimizer, 1, rank, 3)
            twice = engine.promise.traffic().bytes + engine.promise.traffic().bytes
            assert engine.traffic.bytes == twice + engine.promise.outer_traffic().bytes
            numel = sum(bucket.spec.numel(bucket.spec.outer_axes) for bucket in engine.trainable())
            sent = numel * 4 if traffic == "fp32" else numel // 256 * 260
            promised = engine.promise.outer_traffic()
            assert promised.bytes["all_reduce" if traffic == "fp32" else "all_gather"] >= sent

    on_ranks(4, body)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("traffic", ["fp32", "int8"])
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "zero0@cpu", "zero3@cpu-all"])
def test_the_bill_has_what_an_outer_step_keeps_and_needs(plan: str, traffic: Any) -> None:
    def body(rank: int) -> None:
        model = Even()
        model, optimizer = tz.shard(model, adamw, plan, mesh=mesh_of(2, 2), diloco=tz.DiLoCo(1, traffic=traffic))
        engine = engine_of(model)
        bill = engine.bill
        train(model, optimizer, 2, rank)
        assert engine.state_bytes() == bill.weight_bytes + bill.master_bytes + bill.moments_bytes + bill.outer_bytes
        assert engine.peak_transient_bytes == bill.transient_bytes
        outer = [state for bucket in engine.trainable() for state in bucket.outer]
        kept = sum(state.nbytes for state in outer)
        whole = sum(bucket.spec.full_numel for bucket in engine.trainable())
        assert kept == 8 * whole // 2
        if "@cpu" in plan:
            assert not bill.outer_bytes
            assert bill.host_bytes == engine.store.usage()["host_bytes"] > kept
        else:
            assert bill.outer_bytes == kept
        without = estimate(Even(), adamw, plan, mesh=mesh_of(2, 2))
        assert without.outer_bytes == 0

    on_ranks(4, body)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("traffic", ["fp32", "int8"])
@pytest.mark.parametrize("plan", mostly_long(["zero0", "zero3", "zero0@cpu"], "zero3", "zero0@cpu"))
def test_a_round_that_streams_takes_and_sends_what_is_promised(plan: str, traffic: Any) -> None:
    settings = tz.DiLoCo(4, traffic=traffic, fragments=2, delay=1, meet_every=8)

    def body(rank: int) -> None:
        mesh = mesh_of(2, 2)
        model, optimizer = tz.shard(Even(), adamw, plan, mesh=mesh, units=["blocks.*"], diloco=settings)
        engine = engine_of(model)
        bill = engine.bill
        train(model, optimizer, 8, rank)
        engine.traffic.reset()
        train(model, optimizer, 8, rank, 8)
        assert engine.peak_transient_bytes == bill.transient_bytes
        expected = engine.promise.outer_traffic().bytes
        for _ in range(8):
            expected += engine.promise.traffic().bytes
        assert engine.traffic.bytes == expected
        sent = engine.traffic.bytes["all_reduce" if traffic == "fp32" else "all_gather"]
        train(model, optimizer, 7, rank, 16)
        engine.traffic.reset()
        train(model, optimizer, 1, rank, 23)
        assert engine.traffic.bytes == engine.promise.traffic(ends_round=True).bytes - Counter(
            control=engine.promise.outer_traffic().bytes["control"]
        )
        largest = max(sum(b.spec.numel(b.spec.outer_axes) for b in part) for part in engine.rounds._fragments)
        assert sent and bill.transient_bytes > 4 * largest

    on_ranks(4, body)


def test_a_replica_alone_has_a_message_beside_training_that_the_bill_has() -> None:
    """It sends nothing, so that the mean is there at once: it waits for its step as that of several replicas does."""
    settings = tz.DiLoCo(2, delay=1, fragments=2, meet_every=4)

    def body(rank: int) -> None:
        mesh = mesh_of(1, 2)
        model, optimizer = tz.shard(Even(), adamw, "zero3", mesh=mesh, units=["blocks.*"], diloco=settings)
        engine = engine_of(model)
        train(model, optimizer, 4, rank)
        engine.traffic.reset()
        train(model, optimizer, 3, rank, 4)  # not to where the round ends, whose step takes more than a fragment's
        unstreamed = estimate(Even(), adamw, "zero3", mesh=mesh, units=["blocks.*"])
        message = max(sum(b.spec.numel(b.spec.outer_axes) for b in part) for part in engine.rounds._fragments)
        assert engine.peak_transient_bytes == engine.bill.transient_bytes > unstreamed.transient_bytes + 4 * message

    on_ranks(2, body)


def test_masters_on_nvme_that_are_whole_come_together_in_memory_that_the_bill_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU ranks too: collectives write to host memory, and not to files. Messages are short: this is most."""
    monkeypatch.setattr(diloco, "MESSAGE_NUMEL", 1024)

    def body(rank: int) -> None:
        plan = tz.Plan.named("zero0").on(optim="nvme")
        offload = tz.Offload(path=tmp_path, direct=False)
        model, _ = tz.shard(Even(), adamw, plan, mesh=mesh_of(2, 2), diloco=tz.DiLoCo(1), offload=offload)
        engine = engine_of(model)
        assert engine.rounds is not None
        engine.rounds.begin()
        engine.settle()
        engine.tally.reset()
        assert engine.rounds.count_step()
        engine.rounds.run()
        whole_bytes = 4 * max(bucket.spec.full_numel for bucket in engine.trainable())
        assert engine.peak_transient_bytes == dry_run_outer_step(engine.units).ledger.peak_bytes == whole_bytes

    on_ranks(4, body)


def test_beside_tensor_parallelism_each_replica_is_a_whole_one() -> None:
    """An outer step after every step of SGD, at the mean of the weights, is a step by the mean of the gradients."""
    torch.manual_seed(0)
    base = Decoder(DecoderConfig(VOCABULARY, 16, 2, 4, 2, 26, 8))
    alone = copy.deepcopy(base)
    for step in range(2):
        torch.stack([loss_of(alone, batch(step, replica)) for replica in range(2)]).mean().backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    def body(rank: int) -> None:
        mesh = tz.mesh(dp_replicate=2, tp=2, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh, sequence=False)
        model, optimizer = tz.shard(model, sgd, mesh=mesh, diloco=tz.DiLoCo(1, lr=1, momentum=0), units=[Block])
        train(model, optimizer, 2, rank // 2)
        assert_close(masters(model), dict(alone.named_parameters()), 1e-5)
        assert "replicas: 2 (dp_replicate) train by themselves" in engine_of(model).describe()

    on_ranks(4, body)


def test_what_ranks_along_tp_have_of_the_momentum_is_saved_once() -> None:
    """Of the weights of norms too, whose gradients they sum."""
    base = Decoder(DecoderConfig(VOCABULARY, 16, 1, 4, 2, 26, 8))

    def body(rank: int) -> Counter[tuple[str, str]]:
        mesh = tz.mesh(dp_replicate=2, tp=2, device="cpu")
        model = tz.parallelize(copy.deepcopy(base), mesh)
        model, _ = tz.shard(model, sgd, mesh=mesh, diloco=tz.DiLoCo(2, momentum=0.5), units=[Block])
        saved = Counter[tuple[str, str]]()
        for piece in ModelState(model).pieces():
            saved[piece.kind, piece.name] += piece.tensor.numel()
        return saved

    numels = {name: parameter.numel() for name, parameter in base.named_parameters()}
    expected = {(kind, name): numel for kind in ("weight", diloco.OUTER_MOMENTUM) for name, numel in numels.items()}
    assert sum(on_ranks(4, body), Counter()) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_replicas_begin_with_the_weights_of_the_first(device: str) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)
        with torch.device(device):
            model = Net()
        model, _ = tz.shard(model, adamw, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(3))
        return masters(model)

    first, second = on_ranks(2, body)
    assert_equal(first, second)


def test_parameters_that_come_to_replicas_of_one_rank_are_refused() -> None:
    """No outer step would join them."""

    def body(rank: int) -> None:
        model, _ = tz.shard(Even(), sgd, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2))
        model.adapter = nn.Linear(2, 2)
        with pytest.raises(tz.Misuse, match=r"'adapter\.weight'.* came to the model after tz\.shard"):
            model(batch())

    on_ranks(2, body)


def test_what_is_written_between_rounds_is_where_the_next_begins() -> None:
    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), sgd, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2, lr=0.5, momentum=0))
        train(model, optimizer, 2, rank)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():
            parameters["head.bias"].fill_(7)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, 2, rank)
        assert masters(model)["head.bias"].eq(7).all()

    on_ranks(2, body)


def test_what_one_replica_refuses_none_of_them_does() -> None:
    """Or those that went on would wait for the others in the next outer step."""

    def body(rank: int) -> None:
        _model, optimizer = tz.shard(Even(), adamw, "zero3", mesh=mesh_of(2, 2), diloco=tz.DiLoCo(2))
        given = optimizer.state_dict()
        if rank == 1:
            given["param_groups"] = given["param_groups"] * 2
        with pytest.raises(tz.BadInput, match="param groups" if rank == 1 else "Rank 1 cannot do its part"):
            optimizer.load_state_dict(given)

    on_ranks(4, body)


def test_replicas_that_begin_a_round_with_other_weights_are_refused_on_every_rank_before_they_train() -> None:
    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), adamw, "zero2", mesh=mesh_of(2, 2), diloco=tz.DiLoCo(2))
        train(model, optimizer, 2, rank)
        with torch.no_grad():
            model.head.bias.fill_(rank // 2)
        before = masters(model)
        loss_of(model, batch(2, rank)).backward()
        for _ in range(2):  # again, too
            with pytest.raises(tz.RanksApart, match=r"begin round 2 with other weights"):
                optimizer.step()
        assert_equal(masters(model), {**before, "head.bias": torch.full((VOCABULARY,), float(rank // 2))})
        with torch.no_grad():
            model.head.bias.fill_(7)
        optimizer.step()
        train(model, optimizer, 1, rank, 3)
        assert engine_of(model).rounds.number == 2

    on_ranks(4, body)


def test_a_step_that_one_replica_refuses_has_not_begun_a_round() -> None:
    """It would compare weights once more than the others."""

    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), adamw, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2))
        if rank:
            with tz.accumulate(model):
                loss_of(model, batch(1, rank)).backward()
            with pytest.raises(tz.Misuse, match="still being accumulated"):
                optimizer.step()
        loss_of(model, batch(0, rank)).backward()
        optimizer.step()
        train(model, optimizer, 1, rank, 1)
        assert engine_of(model).rounds.number == 1

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_what_the_first_rank_writes_is_taken_in_every_replica(plan: str) -> None:
    base = Net()

    def body(rank: int) -> None:
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, plan, mesh=mesh_of(2, 2), diloco=tz.DiLoCo(2))
        with tz.gathered(model, write="first rank") as parameters, torch.no_grad():
            parameters["head.bias"].fill_(7.0 + rank)
        wanted = dict(base.named_parameters()) | {"head.bias": torch.full((VOCABULARY,), 7.0)}
        assert_equal(masters(model), wanted)
        assert_equal(full_parameters(model), wanted)
        train(model, optimizer, 1, rank)
        block = tz.gathered(model, write="first rank")
        with pytest.raises(tz.Misuse, match=r"'first rank'\) came 1 optimizer steps into a round of 2"), block:
            pass
        train(model, optimizer, 1, rank, 1)

    on_ranks(4, body)


def test_replicas_that_write_other_values_between_rounds_are_refused_on_every_rank() -> None:
    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), adamw, mesh=mesh_of(2, 2), diloco=tz.DiLoCo(2))
        before = masters(model)
        block = tz.gathered(model, write=True)
        with pytest.raises(tz.RanksApart, match=r"have not written the same.*'head\.bias'"), block as parameters:
            parameters["head.bias"].data.fill_(rank // 2)
        assert_equal(masters(model), before)
        train(model, optimizer, 1, rank)
        with tz.gathered(model, write=True) as parameters, torch.no_grad():  # within a round each has its own
            parameters["head.bias"].fill_(rank // 2)
        assert masters(model)["head.bias"].eq(rank // 2).all()

    on_ranks(4, body)


def test_replicas_that_load_other_values_are_refused_on_every_rank() -> None:
    base = Net()

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(base), adamw, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2))
        given = {name: value.clone() for name, value in base.state_dict().items()}
        given["head.bias"].fill_(rank)
        with pytest.raises(tz.RanksApart, match=r"other values of 'head\.bias'"):
            model.load_state_dict(given)
        with pytest.raises(tz.RanksApart, match=r"other names; of 'head\.bias'"):
            model.load_state_dict({name: given[name] for name in [*given][: len(given) - rank]}, strict=False)

    on_ranks(2, body)


@pytest.fixture
def first_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees each collective of an exchange end beside a step, the others none."""
    advance = Transfer.advance

    def advance_on_first(exchange: Any) -> None:
        if dist.get_rank() == 0:
            advance(exchange)

    monkeypatch.setattr(Transfer, "advance_if_ended", advance_on_first)


@pytest.mark.usefixtures("first_is_ahead")
@pytest.mark.parametrize("traffic", ["fp32", "int8"])  # in several collectives, and in one
def test_an_exchange_under_way_as_weights_are_loaded_changes_no_replica(traffic: Any) -> None:
    """The momentum is that of before, on all."""
    base, settings = Even(), tz.DiLoCo(4, traffic=traffic, delay=3, meet_every=8)

    def body(rank: int) -> None:
        model, optimizer = tz.shard(copy.deepcopy(base), sgd, "zero0", mesh=mesh_of(2, 1), diloco=settings)
        train(model, optimizer, 5, rank)
        weights = FullStates({name: {"weight": value} for name, value in base.state_dict().items()})
        ModelState(model).restore(weights, with_optimizer=False)
        outer = engine_of(model).rounds
        assert outer is not None
        for bucket in outer._buckets:
            with bucket.outer[1].opened(bucket.outer[1].range) as momentum:
                assert not momentum.any()

    on_ranks(2, body)


@pytest.mark.usefixtures("first_is_ahead")
def test_what_replicas_compare_beside_an_exchange_changes_no_bit_of_it() -> None:
    """Loads that all refuse, of replicas' own weights and of the same ones."""
    base, settings = Even(), tz.DiLoCo(4, lr=0.6, delay=3, meet_every=8)
    wanted = plain_diloco(base, settings, 3, 1, 8)

    def body(rank: int) -> None:
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, "zero0", mesh=mesh_of(3, 1), diloco=settings)
        train(model, optimizer, 5, rank)
        with pytest.raises(tz.BadInput, match="missing"):
            model.load_state_dict({})
        with pytest.raises(tz.BadInput):
            optimizer.load_state_dict({})
        for given in (model.state_dict(), base.state_dict()):
            with pytest.raises(
                tz.Misuse, match=r"load_state_dict\(\) came 5 optimizer steps into a round of 8.* 3 steps later"
            ):
                model.load_state_dict(given)
        train(model, optimizer, 3, rank, 5)
        assert_equal(masters(model), wanted[rank])

    on_ranks(3, body)


def test_a_model_that_is_dropped_beside_an_exchange_is_freed_at_once() -> None:
    def body(rank: int) -> None:
        settings = tz.DiLoCo(4, delay=3, meet_every=8)
        model, optimizer = tz.shard(Even(), adamw, "zero0", mesh=mesh_of(2, 1), diloco=settings)
        train(model, optimizer, 5, rank)
        gone = weakref.ref(engine_of(model).buckets()[0])
        gc.collect()
        dist.barrier()
        gc.disable()
        try:
            del model, optimizer
            assert gone() is None
        finally:
            dist.barrier()
            gc.enable()

    on_ranks(2, body)


def test_replicas_that_attach_other_optimizers_are_refused_on_every_rank() -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2))
        with pytest.raises(tz.BadInput, match=r"told different things about: optimizer\."):
            tz.attach(model, torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1)))
        tz.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    on_ranks(2, body)


def test_clipping_takes_the_norm_of_the_replica() -> None:
    base = Net()

    def body(rank: int) -> None:
        alone = copy.deepcopy(base)
        losses = [loss_of(alone, batch(0, 2 * (rank // 2) + each)) for each in range(2)]
        torch.stack(losses).mean().backward()
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        model, _ = tz.shard(copy.deepcopy(base), adamw, mesh=mesh_of(2, 2), diloco=tz.DiLoCo(2))
        loss_of(model, batch(0, rank)).backward()
        torch.testing.assert_close(tz.clip_grad_norm_(model, 1.0), wanted)

    on_ranks(4, body)


def in_fp16() -> tuple[Any, Any]:
    """On two replicas, in rounds of two steps."""
    return tz.shard(Net(), adamw, precision="fp16", mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2))


def overflow_once(model: Any, optimizer: Any, rank: int) -> None:
    """A round, whose first step overflows in the second replica alone."""
    for step in range(2):
        loss = loss_of(model, batch(step, rank))
        (loss * (float("inf") if rank and not step else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_that_overflows_in_one_replica_is_a_step_of_its_round() -> None:
    """fp16: each replica has a loss scale of its own."""

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = in_fp16()
        overflow_once(model, optimizer, rank)
        assert optimizer.skipped_steps == rank
        assert engine_of(model).rounds.number == 1
        return masters(model)

    assert_equal(*on_ranks(2, body))


REFUSED = {
    "no replicas": ({"mesh": (None, 2)}, r"mesh with the axes dp_replicate"),
    "hybrid": ({"plan": "hybrid_shard"}, r"Take zero3, which splits over the ranks of one group"),
    "masters": ({"precision": "bf16-pure"}, r"master weights in bf16"),
    "in backward": ({"plan": "zero3@cpu", "offload": tz.Offload(step="backward")}, r"step='backward'"),
    "several": ({"several": True}, r"one optimizer with several param groups"),
    "fragments": ({"diloco": tz.DiLoCo(9, fragments=9, meet_every=18)}, r"units of this model are trained here"),
    "no settings": ({"diloco": 10}, r"pass a tz\.DiLoCo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    changed, why = REFUSED[case]
    changed = dict(changed)

    def body(rank: int) -> None:
        options: dict[str, Any] = {"plan": "zero3", "diloco": tz.DiLoCo(2), **changed}
        several = options.pop("several", False)
        mesh = options.pop("mesh", None)
        options["mesh"] = mesh_of(2, 1) if mesh is None else init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = Net()
        optimizer: Any = adamw(model.parameters())
        if several:
            optimizer = [adamw(model.head.parameters()), adamw(model.blocks.parameters())]
        with pytest.raises(tz.BadInput, match=why):
            tz.shard(model, optimizer, **options)

    on_ranks(2, body)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sync_every": 0}, {"sync_every": True}, {"lr": 0}, {"lr": "1"}, {"momentum": 1}, {"traffic": "int4"},
        {"fragments": 0}, {"fragments": 11}, {"delay": -1}, {"delay": 6, "fragments": 2}, {"mixing": 1},
        {"mixing": 0.3}, {"mixing": 0.3, "fragments": 2, "meet_every": 20},
        {"meet_every": 20}, {"meet_every": None, "delay": 1}, {"meet_every": 10, "delay": 1},
        {"meet_every": 25, "fragments": 2}, {"delay": 10, "meet_every": 20},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(tz.BadInput, match=f"diloco: {next(iter(wrong))}"):
        tz.DiLoCo(**{"sync_every": 10, **wrong})


def test_an_average_of_replicas_that_differ_is_refused() -> None:
    with fake_group(2):
        model, _ = tz.shard(Net(), adamw, mesh=mesh_of(2, 1), diloco=tz.DiLoCo(2))
        with pytest.raises(tz.Misuse, match=r"tz\.EMA of a model whose replicas"):
            tz.EMA(model)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param("zero3", "zero2", marks=pytest.mark.long), ("zero0", "zero3@cpu"), ("zero3@nvme-all", "zero0")],
)
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(saved: str, loaded: str, tmp_path: Path) -> None:
    settings = tz.DiLoCo(2, lr=0.6)

    def made(plan: str, base: nn.Module) -> Any:
        offload = tz.Offload(path=tmp_path, direct=False) if "nvme" in plan else None
        return tz.shard(copy.deepcopy(base), adamw, plan, mesh=mesh_of(2, 2), offload=offload, diloco=settings)

    def body(rank: int) -> None:
        model, optimizer = made(saved, Even())
        train(model, optimizer, 3, rank)
        with pytest.raises(tz.Misuse, match=r"1 optimizer steps into a round of 2.*1 steps later"):
            tz.checkpoint.save(tmp_path / "within", model, optimizer, {})
        train(model, optimizer, 1, rank, 3)
        tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        train(model, optimizer, 3, rank, 4)
        other, others = made(loaded, Even())
        train(other, others, 1, rank)  # within a round of its own
        tz.checkpoint.load(tmp_path / "a", other, others)
        train(other, others, 3, rank, 4)
        assert_equal(masters(other), masters(model))
        plain, its = tz.shard(Even(), adamw, "zero3")  # one that sums gradients takes the first one's states
        tz.checkpoint.load(tmp_path / "a", plain, its)

    with pytest.warns(UserWarning, match=r"the momentum of the outer step \(DiLoCo\), which nothing keeps") as caught:
        on_ranks(4, body)
    assert len(caught) == 1  # of rank 0, where gradients are summed


STREAMING = tz.DiLoCo(4, lr=0.6, traffic="int8", fragments=2, delay=2, meet_every=8)


def streaming(plan: str, shards: int = 2, replicas: int = 2) -> Any:
    mesh = mesh_of(replicas, shards)
    return tz.shard(Even(), adamw, plan, mesh=mesh, units=["blocks.*"], diloco=STREAMING)


def test_replicas_that_stream_go_on_from_where_they_met_on_fewer_ranks_too(tmp_path: Path) -> None:
    """The ranks of a replica read the same, so that a rank alone has the bits of their mean."""

    def run(rank: int) -> dict[str, Tensor]:
        model, optimizer = streaming("zero3")
        train(model, optimizer, 7, rank // 2)
        with pytest.raises(tz.Misuse, match=r"7 optimizer steps into a round of 8.*1 steps later"):
            tz.checkpoint.save(tmp_path / "within", model, optimizer, {})
        train(model, optimizer, 1, rank // 2, 7)
        tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        train(model, optimizer, 11, rank // 2, 8)
        return masters(model)

    def go_on(plan: str, shards: int) -> Any:
        def body(rank: int) -> dict[str, Tensor]:
            model, optimizer = streaming(plan, shards)
            train(model, optimizer, 3, rank // shards)  # its first exchange is under way
            tz.checkpoint.load(tmp_path / "a", model, optimizer)
            train(model, optimizer, 11, rank // shards, 8)
            return masters(model)

        return body

    wanted = on_ranks(4, run)
    for rank, found in enumerate(on_ranks(4, go_on("zero2", 2))):
        assert_equal(found, wanted[rank])
    for rank, found in enumerate(on_ranks(2, go_on("zero0", 1))):
        assert_equal(found, wanted[rank * 2])


def test_what_had_no_gradients_in_a_replica_has_no_state_there_when_it_goes_on(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        def made() -> Any:
            return tz.shard(Even(), adamw, "zero3", mesh=mesh_of(2, 2), diloco=tz.DiLoCo(2))

        def run(model: Any, optimizer: Any, first: int, skips: bool) -> None:
            for step in range(first, first + 2):
                tokens = batch(step, rank)
                model.blocks_used = 0 if skips and rank // 2 else 2
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer = made()
        run(model, optimizer, 0, True)
        tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        run(model, optimizer, 2, False)
        other, others = made()
        tz.checkpoint.load(tmp_path / "a", other, others)
        run(other, others, 2, False)
        assert_equal(masters(other), masters(model))

    on_ranks(4, body)


def test_a_checkpoint_of_two_replicas_begins_three_from_the_shared_weights_and_momentum(tmp_path: Path) -> None:
    settings = tz.DiLoCo(2)

    def save(rank: int) -> tuple[dict[str, Tensor], Tensor]:
        model, optimizer = tz.shard(Even(), adamw, mesh=mesh_of(2, 1), diloco=settings)
        train(model, optimizer, 2, rank)
        tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        return masters(model), momentum_of(model)

    def load(rank: int) -> tuple[dict[str, Tensor], Tensor]:
        model, optimizer = tz.shard(Even(), adamw, mesh=mesh_of(3, 1), diloco=settings)
        tz.checkpoint.load(tmp_path / "a", model, optimizer)
        found = masters(model), momentum_of(model)
        train(model, optimizer, 2, rank)
        return found

    weights, momentum = on_ranks(2, save)[0]
    assert momentum.any()
    for found, its in on_ranks(3, load):
        assert_equal(found, weights)
        assert torch.equal(its, momentum)


def momentum_of(model: Any) -> Tensor:
    return torch.cat([bucket.outer[1].data.clone() for bucket in engine_of(model).trainable()])


def test_each_replica_goes_on_with_its_own_loss_scale(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = in_fp16()
        overflow_once(model, optimizer, rank)
        tz.checkpoint.save(tmp_path / "a", model, optimizer, {})
        other, others = in_fp16()
        tz.checkpoint.load(tmp_path / "a", other, others)
        assert others.loss_scale == optimizer.loss_scale == 2.0 ** (16 - rank)

    on_ranks(2, body)
