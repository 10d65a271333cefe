"""Gradients of matrices and experts that ranks share, sent in blocks: their sums are those of plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import WireFormat, engine_of
from terrazzo.engine.buckets.gradients.gradient import Gradient
from terrazzo.train.model.decoder import Block
from terrazzo.train.model.experts import auxiliary_loss
from tests.engine.narrow import as_sent
from tests.helpers.threads import run_in_threads
from tests.parallel.oracle import add
from tests.parallel.test_expert_training import base
from tests.parallel.test_training_in_parts import ROWS, TOKENS, batches, loss_of

INT4 = replace(tz.Precision.named("bf16"), quantized_reduce=WireFormat.INT4)


class Summed(NamedTuple):
    """A bucket's gradient on one rank.

    Attributes:
        own: of all elements, before they were summed over `group`: of each micro-batch, or of all.
        start, sums: what the rank has of the sums, from which element on.
        slots: first and last element of each parameter's part.
    """

    own: list[Tensor]
    group: list[int]
    start: int
    sums: Tensor
    slots: list[tuple[int, int]]
    form: WireFormat | None


def summed(axes: dict[str, int], plan: str, rank: int, feedback: bool) -> tuple[float, list[dict[str, Summed]]]:
    """For each of two steps, by the name of a bucket's first parameter."""
    model: Any = copy.deepcopy(base("pp" not in axes))
    mesh = tz.mesh(**axes, device="cpu")  # type: ignore[arg-type]
    tz.parallelize(model, mesh, pipeline=tz.Pipeline() if "pp" in axes else None)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = tz.shard(
        model, optimizer, plan, units=[Block], precision=replace(INT4, error_feedback=feedback), mesh=mesh
    )
    taken: dict[Gradient, list[Tensor]] = {}
    for bucket in engine_of(model).trainable():
        take = bucket.gradient._take_unreduced

        def taking(dtype: torch.dtype, take: Any = take, of: Gradient = bucket.gradient) -> tuple[Tensor, bool]:
            data, lent = take(dtype)
            taken.setdefault(of, []).append(data.to(torch.float32, copy=True))
            return data, lent

        bucket.gradient._take_unreduced = taking  # type: ignore[method-assign]
    readers = mesh.size() // (axes.get("tp", 1) * axes.get("pp", 1))
    tokens, targets, _ = batches()[0]
    rows, positions = range(rank // axes.get("tp", 1) % readers, ROWS, readers), torch.arange(TOKENS)[None]
    own = [((tokens[row : row + 1], positions), targets[row : row + 1]) for row in rows]
    steps = list[dict[str, Summed]]()
    for _ in range(2):
        taken.clear()
        tz.step(model, own, loss_of, denominator=targets.numel(), auxiliary=auxiliary_loss)
        found = {}
        for bucket in engine_of(model).trainable():
            data = [axis for axis in bucket.spec.ranks if axis != "tp"]
            if list(bucket.spec.ranks) != data or len(data) != 1:
                continue  # summed over further axes, as without blocks
            finished = bucket.gradient.finished.sum.wait()
            found[bucket.slots[0].name] = Summed(
                taken[bucket.gradient],
                dist.get_process_group_ranks(bucket.axes.along(data[0]).group),
                finished.range.start,
                finished.data.clone(),
                [(slot.range.start, slot.range.stop) for slot in bucket.slots],
                bucket.spec.gradient_wire.form,
            )
        steps.append(found)
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).close()
    return targets.numel(), steps


class Sender:
    """What codes of values stand for; with feedback their loss is added to the next values at the same place."""

    def __init__(self, form: str, feedback: bool) -> None:
        self._form, self._feedback, self._residuals = form, feedback and bool(form), dict[object, Tensor]()

    def sent(self, place: object, values: Tensor) -> Tensor:
        blocks = pad(values, (0, -values.numel() % 256)).view(-1, 256)
        if not self._feedback:
            return as_sent(blocks.view(1, -1), self._form)
        before = self._residuals.get(place, torch.zeros_like(blocks))
        waiting = (blocks == 0).all(1, keepdim=True)
        total = torch.where(waiting, 0.0, blocks + before)
        decoded = as_sent(total.view(1, -1), self._form)
        self._residuals[place] = torch.where(waiting, before, total - decoded.view(-1, 256)).bfloat16().float()
        return decoded


@pytest.mark.parametrize(
    ("plan", "axes", "feedback"),
    [
        pytest.param("zero3", {"tp": 2}, False, marks=pytest.mark.long),
        ("zero3", {"tp": 2}, True),
        ("zero1", {"ep": 2}, True),
        pytest.param("zero0", {"tp": 2}, False, marks=pytest.mark.long),
        ("zero0", {"tp": 2}, True),
        ("zero2", {"pp": 2}, True),
    ],
    ids=str,
)
def test_parts_are_bitwise_the_sums_of_plain_pytorch(plan: str, axes: dict[str, int], feedback: bool) -> None:
    base("pp" not in axes), batches()  # drawn here: threads share a random generator
    ranks = run_in_threads(4, lambda rank: summed(axes, plan, rank, feedback), timeout_s=60.0)
    checked = 0
    for denominator, steps in ranks:
        for name, form in ((name, bucket.form or "") for name, bucket in steps[0].items()):
            sender = Sender(form, feedback)
            for step, bucket in enumerate(each[name] for each in steps):
                terms = list(zip(*(ranks[rank][1][step][name].own for rank in bucket.group), strict=True))
                for start, stop in bucket.slots:
                    each = [
                        [sender.sent((place, start), part[start:stop]) for place, part in enumerate(parts)]
                        for parts in terms
                    ]
                    whole = add([add(parts) for parts in each])
                    if plan == "zero0" and feedback and form:
                        whole = sender.sent((-1, start), whole[0]) / denominator
                    else:
                        whole = whole / denominator
                        whole = sender.sent((-1, start), whole[0]) if plan == "zero0" else whole
                    first, last = max(start, bucket.start), min(stop, bucket.start + bucket.sums.numel())
                    if first < last:
                        own = bucket.sums[first - bucket.start : last - bucket.start]
                        assert torch.equal(own, whole[0, first - start : last - start]), (name, start, step)
                        checked += bool(form)
    assert checked > 16


class Beside(nn.Module):
    """One matrix that ranks along `tp` share, and compute the same gradient of, and two of which each has a part."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.shared = nn.Linear(32, 32, bias=False)
            self.parts = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))

    def forward(self, values: Tensor) -> Tensor:
        return self.parts(self.shared(values))  # type: ignore[no-any-return]


def residuals_of_shared(
    axes: dict[str, int], rank: int, load: Path | None, save: Path | None
) -> list[dict[str, Tensor]]:
    """By kind, this rank's: at the start, behind two steps that are saved, and behind two more."""
    model: Any = Beside()
    mesh = tz.mesh(**axes, device="cpu")  # type: ignore[arg-type]
    if "tp" in axes:
        styles = {"parts": "enter", "parts.0": "colwise", "parts.2": "rowwise"}
        tz.parallelize(model, mesh, tensor=styles, sequence=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = replace(tz.Precision.named("fp32"), quantized_reduce=WireFormat.INT4, error_feedback=True)
    model, optimizer = tz.shard(model, optimizer, "zero3", precision=precision, mesh=mesh)
    if load is not None:
        checkpoint.load(load, model, optimizer)
    shown = list[dict[str, Tensor]]()
    for step in range(5):
        if step % 2 == 0:
            pieces = tz.engine.ModelState(model).pieces()
            of_shared = [each for each in pieces if each.name == "shared.weight" and "error" in each.kind]
            shown.append({each.kind: each.tensor.clone() for each in of_shared})
        if step == 2 and save is not None:
            checkpoint.save(save, model, optimizer, {})
        seed = 10 * step + rank // axes.get("tp", 1)
        model(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).close()
    return shown


def test_residuals_of_a_shared_matrix_go_to_ranks_whose_gradients_count(tmp_path: Path) -> None:
    """The others send zeros of it: a share of theirs would wait for ever."""
    axes = {"dp_shard": 2, "tp": 2}
    before = run_in_threads(
        2, lambda rank: residuals_of_shared({"dp_shard": 2}, rank, None, tmp_path / "data"), timeout_s=60.0
    )
    after = run_in_threads(
        4, lambda rank: residuals_of_shared(axes, rank, tmp_path / "data", tmp_path / "both"), timeout_s=60.0
    )
    again = run_in_threads(4, lambda rank: residuals_of_shared(axes, rank, tmp_path / "both", None), timeout_s=60.0)
    for rank, (start, *later) in enumerate(after):
        assert len(start) == (rank % 2 == 0)
        for kind, value in start.items():
            assert value.any() and torch.equal(value, before[rank // 2][1][kind])
            assert not any(torch.equal(value, each[kind]) for each in later), "residuals have waited"
        assert all(torch.equal(value, again[rank][0][kind]) for kind, value in later[0].items())
