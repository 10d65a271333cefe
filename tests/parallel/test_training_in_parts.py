"""The decoder trained in parts under every plan, against one process in plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import Box, LossScaling, checkpoint_activations, engine_of
from terrazzo.parallel import Context, context_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import auxiliary_loss
from tests.helpers.cover import places
from tests.helpers.processes import Pool
from tests.helpers.threads import run_in_threads

SIZES = DecoderConfig(61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=32)
ROWS, TOKENS, STEPS = 4, 32, 2


@dataclass(frozen=True)
class Mesh:
    """`ranks`, of which neighbours share matrices, pairs of these sequences, and halves of all the layers."""

    plan: str
    ranks: int
    tp: int
    cp: int
    pp: int = 1

    @property
    def readers(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    def __str__(self) -> str:
        return f"{self.plan}-{self.ranks}-tp{self.tp}-cp{self.cp}" + f"-pp{self.pp}" * (self.pp > 1)


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    mode: str
    documents: bool
    checkpointing: str
    precision: str
    chunks: int = 1


@cache
def base() -> Decoder:
    torch.manual_seed(1)
    model = Decoder(SIZES)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return model


@cache
def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets one ahead of which some are ignored, and positions of documents."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(61, (ROWS, TOKENS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, ::7] = -100
        cut = torch.cat((torch.arange(11), torch.arange(TOKENS - 11)))
        other = torch.cat((torch.arange(25), torch.arange(TOKENS - 25)))
        positions = torch.stack([cut, torch.arange(TOKENS), other, torch.arange(TOKENS)])
        found.append((tokens[:, :-1], targets, positions))
    return found


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are as exact as the gradients; AdamW's first is the sign of each, be it ever so small."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Step = tuple[float, float, dict[str, Any], dict[str, Tensor]]
"""The sum of losses, the gradients' norm, gradients of the mean by name, and weights after it."""


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, total: Tensor, targets: Tensor, aside: float | Tensor = 0.0
) -> Step:
    """Train on the sum of losses `total`, and on what is put aside."""
    ((total + aside) / int((targets != -100).sum())).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
    optimizer.step()
    optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return float(total.detach()), norm, gradients, weights


@cache
def plain(documents: bool) -> list[Step]:
    """Each document is a sequence of its own."""
    model = copy.deepcopy(base())
    optimizer, found = optimizer_of(model), []
    for tokens, targets, positions in batches():
        total = torch.zeros(())
        for row in range(ROWS):
            starts = [*(positions[row] == 0).nonzero().flatten().tolist(), TOKENS] if documents else [0, TOKENS]
            for start, stop in itertools.pairwise(starts):
                piece = slice(start, stop)
                total = total + loss_of(model(tokens[row : row + 1, piece]), targets[row : row + 1, piece])
        found.append(plain_step(model, optimizer, total, targets))
    return found


Part = tuple[Box, int, Tensor]
"""What a rank has of a parameter, and of that, flattened, a run: where it begins, and its values."""


def gradients_of(model: nn.Module) -> dict[str, Part]:
    """This rank's parts of the finished gradients."""
    found = {}
    for bucket in engine_of(model).trainable():
        own = bucket.master.range
        for slot in bucket.slots:
            if (held := own.intersect(slot.range)).numel:
                values = bucket.gradient.finished.read()[held.within(own)].clone()
                found[slot.name] = bucket.box(slot), held.start - slot.offset, values
    return found


def never_skipping(precision: str) -> tz.Precision:
    """With a loss scale under which no step is skipped."""
    named = tz.Precision.named(precision)
    return named if named.loss_scaling is None else replace(named, loss_scaling=LossScaling(init=8.0))


def steps_in_parts(model: Any, optimizer: Any, context: Context | None, rows: range, documents: bool) -> list[Step]:
    """As `plain`, of a rank that is given `rows` of each batch; of gradients the parts that it has."""
    found: list[Step] = []
    for tokens, targets, positions in batches():
        if not documents:
            positions = torch.arange(TOKENS).expand(ROWS, -1)
        micro_batches = []
        for row in rows:
            mine = tokens[row : row + 1], targets[row : row + 1], positions[row : row + 1]
            mine = mine if context is None else context.split(*mine)  # type: ignore[assignment]
            micro_batches.append(((mine[0], mine[2]), mine[1]))
        denominator = int((targets != -100).sum())
        total = float(tz.step(model, micro_batches, loss_of, denominator=denominator, auxiliary=auxiliary_loss))
        norm, gradients = float(tz.clip_grad_norm_(model, float("inf"))), gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        full = {name: each.float() for name, each in tz.full_state_dict(model, keep=True).items()}
        found.append((total, norm, gradients, full))
    engine_of(model).close()
    return found


def trained(case: Case, rank: int) -> list[Step]:
    model: Any = copy.deepcopy(base())
    checkpoint_activations(model, case.checkpointing, units=[Block])
    shared, readers = case.mesh, case.mesh.readers
    axes = {"pp": shared.pp} if shared.pp > 1 else {}
    mesh = tz.mesh(tp=shared.tp, cp=shared.cp, **axes, **({"dp_replicate": readers} if shared.plan in GROUPED else {}))
    pipeline = tz.Pipeline(chunks=case.chunks) if shared.pp > 1 else None
    context = context_of(tz.parallelize(model, mesh, context=case.mode, pipeline=pipeline))  # type: ignore[arg-type]
    precision = never_skipping(case.precision)
    model, optimizer = tz.shard(model, optimizer_of(model), shared.plan, units=[Block], precision=precision, mesh=mesh)
    rows = range(rank // (shared.tp * shared.cp) % readers, ROWS, readers)
    return steps_in_parts(model, optimizer, context, rows, case.documents)


def compare(case: Case, ranks: list[Any]) -> None:
    """What each rank has `trained`, with one process of plain PyTorch."""
    relative = 2e-6 if case.precision == "fp32" else 3e-2
    expected_steps = plain(case.documents)
    for step, (loss, norm, gradients, weights) in enumerate(expected_steps):
        total = sum(each[step][0] for each in ranks) / (case.mesh.tp * case.mesh.pp)  # whose ranks have lost the same
        assert total == pytest.approx(loss, rel=relative)
        for _, its_norm, parts, its_weights in (each[step] for each in ranks):
            assert its_norm == pytest.approx(norm, rel=relative * 5)
            for name, whole in gradients.items():  # each alone: those of norms are lost in a total
                if name not in parts:
                    continue
                box, start, part = parts[name]
                expected = box.of(whole).flatten()[start : start + part.numel()]
                worst = float((part.float() - expected).abs().max() / whole.abs().max())
                assert worst < relative * 5, (name, step)
            for name, weight in weights.items():
                assert (its_weights[name] - weight).abs().max() < relative * weight.abs().max(), (name, step)
        assert {name for each in ranks for name in each[step][2]} == gradients.keys()


WHOLE = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "zero3@cpu", "zero2@cpu-all")
GROUPED = ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")
MESHES = [
    *(Mesh(plan, 2, *axes) for plan in WHOLE for axes in ((1, 2), (2, 1))),
    *(Mesh(plan, 4, *axes) for plan in WHOLE for axes in ((1, 2), (2, 1), (2, 2))),
    *(Mesh(plan, 4, *axes) for plan in GROUPED for axes in ((1, 2), (2, 1))),
    *(pytest.param(Mesh(plan, 8, 2, 2), marks=pytest.mark.long) for plan in (*WHOLE, *GROUPED)),
]
"""Eight ranks, which share sequences and matrices beside stages and experts: test_six_axes."""


def kind(mesh: Mesh) -> dict[str, object]:
    """Of plans whether weights are split, and how; where all states lie meets experts: test_expert_training."""
    return {"weight": str(places(mesh.plan)["weight"])[0], "parts": (mesh.tp, mesh.cp)}


@pytest.mark.cover(mesh=kind, strength=1)  # experts beside the same axes meet in pairs: test_expert_training
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("documents", [False, True], ids=["sequence", "documents"])
@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_in_parts_is_training(
    mesh: Mesh, mode: str, documents: bool, checkpointing: str, precision: str
) -> None:
    case = Case(mesh, mode, documents, checkpointing, precision)
    plain(documents)  # first: the threads would share one random generator
    compare(case, run_in_threads(mesh.ranks, lambda rank: trained(case, rank)))


STAGED = [
    *(Mesh(plan, 4, *axes, pp=2) for plan in WHOLE for axes in ((1, 2), (2, 1))),
    *(
        pytest.param(Mesh(plan, 8, *axes, pp=2), marks=pytest.mark.long)
        for plans, every in ((WHOLE, ((1, 2), (2, 1), (2, 2))), (GROUPED, ((1, 2), (2, 1))))
        for plan in plans
        for axes in every
    ),
]


@pytest.mark.cover(mesh=kind, strength=1, turns=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("mesh", STAGED, ids=str)
def test_so_it_is_in_stages(mesh: Mesh, mode: str, chunks: int, checkpointing: str, precision: str) -> None:
    """Each rank has a part of each matrix and sequence of its own layers alone."""
    case = Case(mesh, mode, mesh.cp > 1, checkpointing, precision, chunks)
    plain(case.documents)
    compare(case, run_in_threads(mesh.ranks, lambda rank: trained(case, rank)))


@pytest.fixture(scope="module")
def four_processes() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "tp", "cp", "mode", "precision"),
    [
        pytest.param("zero0", 2, 1, "gather", "fp32", marks=pytest.mark.long),
        pytest.param("zero0", 2, 2, "ring", "fp16", marks=pytest.mark.long),
        pytest.param("zero1", 2, 2, "gather", "fp32", marks=pytest.mark.long),
        pytest.param("zero1", 1, 2, "ulysses", "bf16", marks=pytest.mark.long),
        pytest.param("zero2", 1, 4, "ring", "fp32", marks=pytest.mark.long),
        ("zero2@cpu-all", 2, 2, "ulysses", "fp32"),
        pytest.param("zero3", 2, 2, "ulysses", "fp32", marks=pytest.mark.long),
        pytest.param("zero3", 2, 1, "gather", "bf16", marks=pytest.mark.long),
        pytest.param("zero3@cpu", 1, 2, "gather", "fp16", marks=pytest.mark.long),
        pytest.param("shard_grad_op", 2, 2, "ring", "fp32", marks=pytest.mark.long),
        pytest.param("hybrid_shard", 2, 1, "gather", "fp32", marks=pytest.mark.long),
        pytest.param("hpz", 1, 2, "ring", "fp32", marks=pytest.mark.long),
    ],
)
def test_so_it_is_between_processes(
    four_processes: Pool, plan: str, tp: int, cp: int, mode: str, precision: str
) -> None:
    case = Case(Mesh(plan, 4, tp, cp), mode, plan == "zero3", "none", precision)
    compare(case, four_processes.run(trained_here, case))


def trained_here(case: Case) -> Any:
    return trained(case, torch.distributed.get_rank())
