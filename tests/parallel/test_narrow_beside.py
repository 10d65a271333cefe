"""Moments in 8 bits of matrices and experts that ranks share: each bit as of plain PyTorch on a rank's own part."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import Box, engine_of
from terrazzo.engine.plan.layout import Range
from terrazzo.train.model.decoder import Block
from terrazzo.train.model.experts import auxiliary_loss
from tests.engine.narrow import rounded
from tests.engine.test_narrow_states import SETTINGS, STOCHASTIC, padded_to_lines, rounding_bits
from tests.helpers.cover import in_turns
from tests.helpers.threads import run_in_threads
from tests.parallel.test_expert_training import base
from tests.parallel.test_training_in_parts import ROWS, TOKENS, batches, gradients_of, loss_of

INT8 = replace(tz.Precision.named("fp32"), moments="int8")


@dataclass
class Alone:
    """A run of one parameter's elements, trained by plain PyTorch on the gradients that its rank has had.

    Attributes:
        elements: which of the whole parameter they are.
    """

    name: str
    values: Tensor
    elements: Tensor
    stochastic: bool

    def __post_init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def step(self, gradient: Tensor) -> None:
        numel = self.values.numel()
        wide = nn.Parameter(padded_to_lines(self.values))
        wide.grad = padded_to_lines(gradient)
        alone = torch.optim.AdamW([wide], **SETTINGS)
        if self.kept:
            alone.state[wide] = {k: v if k == "step" else padded_to_lines(v) for k, v in self.kept.items()}
        alone.step()
        self.kept = {
            k: v if k == "step" else rounded(v[:numel], "int8", k == "exp_avg_sq") for k, v in alone.state[wide].items()
        }
        exact = wide.detach()[:numel]
        if self.stochastic:
            bits = rounding_bits(self.name, self.elements.tolist(), int(self.kept["step"]))
            exact = ((exact.view(torch.int32).long() + bits) >> 16 << 16).int().view(torch.float32)
        self.values = exact.to(self.values.dtype)


def trained(axes: dict[str, int], plan: str, precision: tz.Precision, rank: int) -> None:
    tied = "pp" not in axes
    model: Any = copy.deepcopy(base(tied)).to(precision.master)
    first = {name: each.detach().clone() for name, each in model.named_parameters()}
    mesh = tz.mesh(**axes, device="cpu")  # type: ignore[arg-type]
    tz.parallelize(model, mesh, pipeline=tz.Pipeline() if "pp" in axes else None)
    optimizer: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
    model, optimizer = tz.shard(model, optimizer, plan, units=[Block], precision=precision, mesh=mesh)
    runs: dict[str, Alone] = {}
    readers = mesh.size() // (axes.get("tp", 1) * axes.get("pp", 1))
    for tokens, targets, _ in batches():
        rows = range(rank // axes.get("tp", 1) % readers, ROWS, readers)
        positions = torch.arange(TOKENS)[None]
        own = [((tokens[row : row + 1], positions), targets[row : row + 1]) for row in rows]
        tz.step(model, own, loss_of, denominator=targets.numel(), auxiliary=auxiliary_loss)
        for name, (box, start, gradient) in gradients_of(model).items():
            if name not in runs:
                part = slice(start, start + gradient.numel())
                which = box.of(torch.arange(first[name].numel()).view(box.shape)).flatten()[part]
                values = box.of(first[name]).flatten()[part]
                runs[name] = Alone(name, values, which, precision.stochastic)
            runs[name].step(gradient)
        optimizer.step()
        optimizer.zero_grad()
    full = tz.full_state_dict(model, keep=True)
    engine_of(model).close()
    assert any(run.values.numel() > 512 for run in runs.values())
    for name, run in runs.items():
        assert torch.equal(full[name].flatten()[run.elements].to(run.values.dtype), run.values), name


@pytest.mark.parametrize(
    ("plan", "axes", "ranks", "precision"),
    in_turns(
        [
            ("zero3", {"tp": 2}, 4),
            ("zero1", {"ep": 2}, 2),
            ("zero2", {"pp": 2, "tp": 2, "ep": 2}, 4),
            ("zero1@cpu", {"tp": 2, "ep": 2}, 2),
        ],
        [STOCHASTIC, INT8],
    ),
)
def test_parts_are_bitwise_those_of_plain_pytorch(
    plan: str, axes: dict[str, int], ranks: int, precision: tz.Precision
) -> None:
    base("pp" not in axes), batches()  # drawn here: threads share a random generator
    run_in_threads(ranks, lambda rank: trained(axes, plan, precision, rank), timeout_s=60.0)


BOXES = [
    Box.all_of((3, 4)),
    Box.all_of(()),
    Box.cut((9,), 0, [(3, 7)]),
    Box.cut((8, 6), 0, [(2, 4), (5, 8)]),
    Box.cut((8, 6), 1, [(0, 2), (3, 5)]),
    Box.cut((2, 8, 6), 1, [(1, 3), (5, 8)]),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_elements_of_a_part_are_numbered_as_in_the_whole(box: Box) -> None:
    wanted = box.of(torch.arange(torch.Size(box.shape).numel()).view(box.shape)).flatten()
    for start in range(box.local_numel + 1):
        for stop in range(start, box.local_numel + 1):
            found = box.elements(Range(start, stop), torch.device("cpu"))
            assert torch.equal(found, wanted[start:stop])
