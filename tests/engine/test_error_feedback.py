"""What codes of gradients lose is added to the next ones: to the bit as in plain PyTorch, and none of it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import Precision, engine_of, estimate
from terrazzo.errors import BadInput
from tests.engine.offload import runs
from tests.engine.parity import Case, axes, check, with_feature
from tests.engine.test_sums_in_blocks import FEATURES, PLANS, SUMMED_OTHERWISE
from tests.engine.toys import Net, on_ranks, train
from tests.helpers.cover import mostly_long


def sending(form: str = "int4", name: str = "bf16", **others: Any) -> Precision:
    return replace(Precision.named(name), quantized_reduce=form, error_feedback=True, **others)


@pytest.mark.cover(strength=1, case=axes)
@pytest.mark.parametrize("feature", mostly_long(FEATURES, *SUMMED_OTHERWISE))
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize("case", PLANS, ids=str)
def test_every_plan_is_bitwise_the_single_process(case: Case, name: str, form: str, feature: str) -> None:
    """Of gradients, and of sums that are sent in codes as well."""
    check(replace(with_feature(case, feature), precision=name, dtypes=sending(form, name)))


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("tiers", ["cpu-all", "nvme", "all on nvme", "shares"])
@pytest.mark.parametrize("case", [Case("zero1", 3), Case("hybrid_shard", 2, replicas=2)], ids=str)
def test_every_tier_is_bitwise_the_single_process(case: Case, tiers: str, tmp_path: Path) -> None:
    runs.check(runs.on_tiers(replace(case, precision="bf16", dtypes=sending()), tiers, tmp_path))


# -- nothing is lost, and nothing comes twice --------------------------------------------------------------------------


class Slopes(nn.Module):
    """Its gradients are its input, whatever its weights are: 1,024 of a matrix, and 8 of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(8))

    def forward(self, slopes: Tensor) -> Tensor:
        return (self.matrix * slopes).sum()[None] + self.vector.sum()


def slopes(step: int, rank: int) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(97 * step + rank)) * 2.0 ** ((step + 4) % 5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def mesh_of(shape: Sequence[int]) -> Any:
    axes = ("dp_replicate", "dp_shard")
    return None if len(shape) == 1 else init_device_mesh("cpu", tuple(shape), mesh_dim_names=axes)


def shard(plan: str, shape: Sequence[int], name: str = "fp32", **others: Any) -> tuple[Any, Any]:
    return tz.shard(Slopes(), sgd, plan, precision=sending(name=name, **others), mesh=mesh_of(shape))


def residuals(model: Any) -> dict[str, Tensor]:
    """This rank's share of the residuals of the matrix: their sums over all ranks are those of all."""
    total = torch.zeros(1024, dtype=torch.float64)
    kinds = {}
    for piece in tz.engine.ModelState(model).pieces():
        if piece.kind.startswith("error_feedback"):
            assert piece.name == "matrix"
            total[piece.start : piece.stop] += piece.tensor.double()
            kinds[f"{piece.kind}, {piece.start}"] = piece.tensor.clone()
    return {"all": total, **kinds}


TOPOLOGIES = [
    ("zero0", (3,)),
    ("zero1", (2,)),
    ("zero3", (4,)),
    ("zero0", (2, 2)),
    ("hybrid_shard", (2, 2)),
    ("hybrid_shard", (3, 1)),
    ("hfsdp", (2, 2)),
    ("zero3@cpu-all", (2,)),
]


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("name", ["fp32", "fp16"])
@pytest.mark.parametrize(("plan", "shape"), TOPOLOGIES[:-1], ids=str)
def test_what_is_applied_and_residuals_are_the_sum_of_gradients(plan: str, shape: tuple[int, ...], name: str) -> None:
    """Under fp16 the loss scale doubles behind each step, and the second step overflows on one rank."""
    scaling = {"loss_scaling": tz.LossScaling(init=2.0, interval=1)} if name == "fp16" else {}
    count = torch.Size(shape).numel()

    def body(rank: int) -> tuple[Tensor, Tensor, int]:
        model, optimizer = shard(plan, shape, name, **scaling)
        for step in range(6):
            values = slopes(step, rank).half().float()
            if name == "fp16" and step == 1 and rank == count - 1:
                values[3, 3] = float("inf")
            before = residuals(model)
            loss = model(values.to(torch.half if name == "fp16" else torch.float32)).float().sum()
            loss.backward()
            if step == 4:  # is left out
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            if step in ((1, 4) if name == "fp16" else (4,)):
                assert all(torch.equal(before[kind], value) for kind, value in residuals(model).items())
        applied = -tz.full_state_dict(model, keep=True)["matrix"].double().flatten()
        return applied, residuals(model)["all"], getattr(optimizer, "skipped_steps", 0)

    ranks = on_ranks(count, body)
    taken = [step for step in range(6) if step != 4 and not (name == "fp16" and step == 1)]
    wanted = sum(slopes(step, rank).half().double().flatten() for step in taken for rank in range(count))
    left = sum(share for _, share, _ in ranks)
    assert left.abs().max() > 1, "codes have lost little"
    for applied, _, skipped in ranks:
        assert skipped == (name == "fp16")
        torch.testing.assert_close(applied * count + left, wanted, rtol=0, atol=0.1)  # to the bf16 of residuals


def test_gradients_that_are_forgotten_for_some_parameters_change_no_residual_of_these() -> None:
    """Two optimizers: one takes its matrix, the other forgets; the next step has both."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(32, 32)), nn.Parameter(torch.zeros(32, 32))

        def forward(self, values: Tensor) -> Tensor:
            return ((self.a + 2 * self.b) * values).sum()[None]

    def body(rank: int) -> list[tuple[Tensor, Tensor]]:
        model = Two()
        model, optimizers = tz.shard(model, [sgd([model.a]), sgd([model.b])], "zero3", precision=sending(name="fp32"))
        for step in range(5):
            model(slopes(step, rank)).sum().backward()
            for optimizer in optimizers[: 1 if step == 2 else 2]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        applied, pieces = tz.full_state_dict(model, keep=True), list(tz.engine.ModelState(model).pieces())
        left = {name: [p.tensor for p in pieces if p.name == name and p.kind.startswith("error")] for name in "ab"}
        return [(-2 * applied[name].double(), torch.cat(left[name]).view(32, 32).double()) for name in "ab"]

    first, second = on_ranks(2, body)
    for place, steps in enumerate([range(5), (0, 1, 3, 4)]):
        true = sum(slopes(step, rank).double() for step in steps for rank in range(2)) * (place + 1)
        applied, left = first[place][0], first[place][1] + second[place][1]
        torch.testing.assert_close(applied + left, true, rtol=0, atol=0.1)  # to the bf16 of residuals


@pytest.mark.parametrize("in_one_call", [False, True])
def test_a_gradient_that_is_set_to_zero_in_place_is_forgotten(in_one_call: bool) -> None:
    def body(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = shard("zero3", (2,))
        for step in range(3):
            before = residuals(model)["all"]
            model(slopes(step, rank)).sum().backward()
            if step == 1:
                grads = [parameter.grad for parameter in model.parameters()]
                if in_one_call:
                    torch._foreach_zero_(grads)
                else:
                    for grad in grads:
                        grad.zero_()
            optimizer.step()
            assert torch.equal(before, residuals(model)["all"]) == (step == 1)
            optimizer.zero_grad()
        return -2 * tz.full_state_dict(model, keep=True)["matrix"].double().flatten(), residuals(model)["all"]

    (applied, first), (_, second) = on_ranks(2, body)
    true = sum(slopes(step, rank).double().flatten() for step in (0, 2) for rank in range(2))
    torch.testing.assert_close(applied + first + second, true, rtol=0, atol=0.1)  # to the bf16 of residuals


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_residual_of_a_block_that_is_not_finite_stays(plan: str, value: float) -> None:
    """Of four blocks of a matrix the first, on the rank that sends it and, of sums, on the one that adds it."""

    def body(rank: int) -> list[dict[str, Tensor]]:
        model, optimizer = shard(plan, (2,))
        behind = []
        for step in range(3):
            values = slopes(step, rank)
            if step == 1 and rank == 0:
                values[3, 3] = value
            model(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            behind.append(residuals(model))
        return behind

    ranks = on_ranks(2, body)
    sent = "error_feedback, 0"
    assert ranks[0][0][sent][:256].any()
    for rank, (first, second, third) in enumerate(ranks):
        assert all(each[kind].isfinite().all() for each in (first, second, third) for kind in each)
        number = sent if rank == 0 else next(kind for kind in first if kind.startswith("error_feedback@1"))
        assert torch.equal(first[number][:256], second[number][:256]) == (rank == 0)
        assert not torch.equal(second[number][:256], third[number][:256])
        assert not torch.equal(first[number][256:], second[number][256:])
    if plan == "zero0":
        of_sums = next(kind for kind in ranks[0][0] if "of_sums" in kind)
        assert torch.equal(*(ranks[0][step][of_sums][:256] for step in (0, 1)))


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict[str, Tensor]]]]:
    """By topology: a checkpoint behind three steps, and residuals of each rank."""
    found = {}
    for plan, shape in TOPOLOGIES:
        path = tmp_path_factory.mktemp("residuals") / "step"

        def body(rank: int, plan: str = plan, shape: tuple[int, ...] = shape, path: Path = path) -> dict[str, Tensor]:
            model, optimizer = shard(plan, shape)
            run(model, optimizer, rank, range(3))
            checkpoint.save(path, model, optimizer, {})
            return residuals(model)

        found[f"{plan} {shape}"] = path, on_ranks(torch.Size(shape).numel(), body)
    return found


def run(model: Any, optimizer: Any, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        model(slopes(step, rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize(("plan", "shape"), TOPOLOGIES, ids=str)
def test_a_resumed_run_is_to_the_bit_the_one_that_went_on(plan: str, shape: tuple[int, ...], saved: Any) -> None:
    path, _ = saved[f"{plan} {shape}"]

    def body(rank: int) -> list[dict[str, Tensor]]:
        ends = []
        for resumed in (False, True):
            model, optimizer = shard(plan, shape)
            if resumed:
                run(model, optimizer, rank, (7, 8))  # its residuals are others
                checkpoint.load(path, model, optimizer)
            else:
                run(model, optimizer, rank, range(3))
            run(model, optimizer, rank, (3, 4))
            ends.append({"weight": tz.full_state_dict(model, keep=True)["matrix"], **residuals(model)})
        return ends

    for straight, resumed in on_ranks(torch.Size(shape).numel(), body):
        assert straight.keys() == resumed.keys() and len(straight) > 2
        assert all(torch.equal(value, resumed[kind]) for kind, value in straight.items())


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("source", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("target", TOPOLOGIES, ids=str)
def test_residuals_on_another_topology_have_the_same_sum(target: Any, source: Any, saved: Any) -> None:
    path, before = saved[f"{source[0]} {source[1]}"]

    def body(rank: int) -> Tensor:
        model, optimizer = shard(*target)
        checkpoint.load(path, model, optimizer)
        return residuals(model)["all"]

    after = sum(on_ranks(torch.Size(target[1]).numel(), body))
    wanted = sum(each["all"] for each in before)
    assert wanted.abs().max() > 0.2
    torch.testing.assert_close(after, wanted, rtol=0, atol=0.05)
    of_sums = [plan in ("zero0", "hybrid_shard") for plan, _ in (source, target)]
    if target[1][0] >= source[1][0] and of_sums[0] <= of_sums[1]:  # else ranks take over several, and round to bf16
        assert torch.equal(after, wanted)


def test_a_checkpoint_goes_on_without_and_one_without_begins_at_zero(saved: Any, tmp_path: Path) -> None:
    path, _ = saved["zero1 (2,)"]

    def body(rank: int) -> None:
        model, optimizer = tz.shard(Slopes(), sgd, "zero1")
        checkpoint.load(path, model, optimizer)
        checkpoint.save(tmp_path / "without", model, optimizer, {})
        model, optimizer = shard("zero1", (2,))
        run(model, optimizer, rank, range(2))
        checkpoint.load(tmp_path / "without", model, optimizer)
        assert not residuals(model)["all"].any()

    with pytest.warns(UserWarning, match="has what codes of gradients have lost .*, which nothing keeps") as caught:
        on_ranks(2, body)
    assert len(caught) == 1  # of rank 0, where codes have no residuals


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_residuals_are_zero_behind_a_loaded_state_dict(plan: str) -> None:
    def body(rank: int) -> list[Tensor]:
        model, optimizer = shard(plan, (2,))
        state = optimizer.state_dict()
        run(model, optimizer, rank, range(2))
        model(slopes(2, rank)).sum().backward()
        before = residuals(model)["all"]
        optimizer.load_state_dict(state)
        behind = residuals(model)["all"]
        optimizer.zero_grad()
        run(model, optimizer, rank, (3,))
        fresh, fresh_optimizer = shard(plan, (2,))
        run(fresh, fresh_optimizer, rank, (3,))
        return [before, behind, residuals(model)["all"], residuals(fresh)["all"]]

    for before, behind, later, fresh in on_ranks(2, body):
        assert before.any() and not behind.any()
        assert torch.equal(later, fresh)


def test_residuals_have_to_fit_beside_an_optimizer_without_states(saved: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("terrazzo.checkpoint.loading.misfits.RESIDUAL_DTYPE", torch.float16)  # as if it were kept so

    def body(rank: int) -> None:
        model, optimizer = shard("zero1", (2,))
        with pytest.raises(BadInput, match=r"error_feedback\S* is torch\.bfloat16 .* would be rounded"):
            checkpoint.load(saved["zero1 (2,)"][0], model, optimizer)

    on_ranks(2, body)


# -- bytes and what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "shape", "copies"),
    [
        ("zero3", (4,), 1),
        ("zero0", (4,), 1 + 1 / 4),
        ("hybrid_shard", (2, 2), 1 / 2 + 1 / 4),
        ("zero3@cpu-all", (4,), 1),
    ],
)
def test_the_bill_has_two_copies_in_bf16_of_what_a_rank_sends(plan: str, shape: tuple[int, ...], copies: float) -> None:
    def body(rank: int) -> None:
        model = Net(width=64)
        model, optimizer = tz.shard(model, sgd, plan, precision=sending(), mesh=mesh_of(shape))
        engine, bill = engine_of(model), engine_of(model).bill
        train(model, optimizer, 2, rank)
        states = bill.weight_bytes + bill.master_bytes + bill.moments_bytes
        assert engine.state_bytes() == states + bill.residual_bytes
        assert engine.peak_transient_bytes == bill.transient_bytes
        kept = 4 * copies * sum(bucket.spec.full_numel for bucket in engine.trainable() if bucket.spec.in_blocks)
        without = estimate(
            Net(width=64), sgd, plan, precision=replace(sending(), error_feedback=False), mesh=mesh_of(shape)
        )
        assert without.residual_bytes == 0
        if "@cpu" in plan:
            assert bill.host_bytes == engine.store.usage()["host_bytes"] >= without.host_bytes + kept
        else:
            assert bill.residual_bytes == kept
            assert "residuals" in bill.table()

    on_ranks(4, body)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match=r"error_feedback of gradients that are sent in the dtype of reduce"):
        Precision(error_feedback=True)
    with pytest.raises(BadInput, match="error_feedback is 1; it must be True or False"):
        Precision(quantized_reduce="int8", error_feedback=1)  # type: ignore[arg-type]
    assert str(sending()).endswith(", gradients sent in int4 with error feedback")

    def body(rank: int) -> None:
        with pytest.raises(BadInput, match=r"diloco with error_feedback, .* Leave error_feedback out"):
            tz.shard(Slopes(), sgd, "zero3", precision=sending(), mesh=mesh_of((2, 2)), diloco=tz.DiLoCo(2))

    on_ranks(4, body)


def test_one_rank_has_no_residuals() -> None:
    def body(rank: int) -> None:
        with pytest.warns(UserWarning, match="quantized_reduce, error_feedback change nothing"):
            model, optimizer = shard("zero3", (1,))
        run(model, optimizer, rank, range(2))
        assert engine_of(model).bill.residual_bytes == 0
        assert not residuals(model)["all"].any()

    on_ranks(1, body)
