"""A model in stages, saved on every mesh and loaded on every other.

The oracle is a plain loop in one process, of one micro-batch after the other. All ranks see the same data: the mean
over two of them has the bits of one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.errors import BadInput, RanksApart
from tests.checkpoint.meshes import State, assert_holds, differences
from tests.helpers.cover import mostly_long
from tests.helpers.threads import exclusive, run_in_threads

WIDTH, MICRO_BATCHES = 6, 4


class Mesh(NamedTuple):
    plan: str
    ranks: int
    pp: int
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.plan}-{self.ranks}-pp{self.pp}-{self.chunks}"


MESHES = [
    Mesh("zero2", 1, 1),
    Mesh("zero3", 2, 1),
    Mesh("zero3", 4, 2),
    Mesh("zero0", 4, 4),
    Mesh("shard_grad_op", 2, 2, chunks=2),
    Mesh("zero3@cpu", 4, 2),
    Mesh("zero1", 4, 2),
]


class Scale(nn.Module):
    """Has a parameter without dims, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.none.sum()


class Model(nn.Module):
    """Six modules in a row, and a buffer that no stage has alone; not all have a bias, and one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=number < 3) for number in range(5)]
        self.layers = nn.ModuleList([*layers[:3], Scale(), *layers[3:]])
        self.register_buffer("offset", torch.arange(float(WIDTH)))
        self.layers[1].bias.requires_grad_(False)

    def pipeline_line(self) -> list[str]:
        return ["layers.*"]

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.offset).to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


def whole() -> Model:
    with exclusive():
        torch.manual_seed(0)
        return Model()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Some stages have no bias."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if not name.endswith("bias")]
    biases = [each for name, each in named.items() if name.endswith("bias") and each.requires_grad]
    groups = [{"params": matrices}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False, fused=False)


def batches() -> list[tuple[Tensor, Tensor]]:
    values = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    return [(values, torch.zeros(3, WIDTH))] * MICRO_BATCHES


def sharded(mesh: Mesh) -> tuple[nn.Module, Any]:
    model = whole()
    axes = tz.mesh(pp=mesh.pp, device="cpu")
    model = tz.parallelize(model, axes, pipeline=tz.Pipeline(chunks=mesh.chunks))
    return tz.shard(model, adamw(model), mesh.plan, mesh=axes, units=[nn.Linear])


def step(model: nn.Module, optimizer: Any) -> None:
    tz.step(model, batches(), F.mse_loss)
    optimizer.step()
    optimizer.zero_grad()


def steps_alone() -> list[State]:
    model, found = whole(), []
    optimizer = adamw(model)
    for _ in range(3):
        for inputs, targets in batches():
            F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {(name, "weight"): each.detach().clone() for name, each in model.named_parameters()}
        for name, each in model.named_parameters():
            if each.numel():  # of what has no elements no states are saved
                state |= {(name, kind): value.clone() for kind, value in optimizer.state.get(each, {}).items()}
        found.append(state)
    return found


@pytest.fixture(scope="module")
def alone() -> list[State]:
    return steps_alone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Mesh, Path]:
    """The checkpoint of two steps on every mesh."""
    root = tmp_path_factory.mktemp("stages")

    def body(rank: int, mesh: Mesh) -> None:
        model, optimizer = sharded(mesh)
        step(model, optimizer)
        step(model, optimizer)
        with torch.no_grad():
            model.offset.neg_()
        checkpoint.check_replicas(model)
        checkpoint.save(root / str(mesh), model, optimizer, {"step": 2})

    for mesh in MESHES:
        run_in_threads(mesh.ranks, functools.partial(body, mesh=mesh))
    return {mesh: root / str(mesh) for mesh in MESHES}


def weights_of(state: State) -> dict[str, Tensor]:
    return {name: values for (name, kind), values in state.items() if kind == "weight"}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_writes_each_element_once_and_as_one_process_has_it(
    mesh: Mesh, saved: dict[Mesh, Path], alone: list[State]
) -> None:
    assert_holds(saved[mesh], {**alone[1], ("offset", "buffer"): -whole().offset})


def test_a_manifest_has_stages_among_the_axes_and_every_parameter_in_its_group(saved: dict[Mesh, Path]) -> None:
    manifest = json.loads((saved[Mesh("zero3", 4, 2)] / "manifest.json").read_text())
    named = dict(whole().named_parameters())
    assert manifest["topology"]["mesh"] == {"dp_shard": 2, "pp": 2}
    assert [(group["lr"], set(group["params"])) for group in manifest["optimizer"]["groups"]] == [
        (1e-2, {name for name in named if not name.endswith("bias")}),
        (2e-2, {"layers.0.bias", "layers.2.bias"}),
    ]


@pytest.mark.parametrize("target", mostly_long(MESHES, *MESHES[1::3]), ids=str)
def test_every_mesh_resumes_every_other_to_the_bit(target: Mesh, saved: dict[Mesh, Path], alone: list[State]) -> None:
    def body(rank: int) -> list[str]:
        model, optimizer = sharded(target)
        wrong = []
        for path in saved.values():
            step(model, optimizer)  # so that there is something else
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            assert checkpoint.load(path, model, optimizer) == {"step": 2}
            assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
            assert torch.equal(model.offset, -torch.arange(float(WIDTH)))
            model.offset.neg_()  # as in one process
            wrong += differences(model, alone[1])
            step(model, optimizer)
            wrong += differences(model, alone[2])
        return wrong

    assert run_in_threads(target.ranks, body) == [[]] * target.ranks


SPLIT = {"layers.0": "colwise", "layers.1": "rowwise", "layers.[234]": "replicate", "layers.5": "colwise_gather_output"}


@pytest.mark.parametrize(("ranks", "pp", "tp"), [(4, 2, 2), (8, 2, 2), (2, 1, 2)])
def test_stages_whose_ranks_share_matrices_write_what_they_were_given(
    ranks: int, pp: int, tp: int, saved: dict[Mesh, Path], alone: list[State], tmp_path: Path
) -> None:
    """And what a model in stages alone has written; training would sum in another order."""

    def body(rank: int) -> list[str]:
        model = whole()
        axes = tz.mesh(pp=pp, tp=tp, device="cpu")
        model = tz.parallelize(model, axes, tensor=SPLIT, pipeline=tz.Pipeline())
        model, optimizer = tz.shard(model, adamw(model), "zero3", mesh=axes, units=[nn.Linear])
        assert checkpoint.load(saved[STAGED], model, optimizer) == {"step": 2}
        checkpoint.save(tmp_path / "again", model, optimizer, {"step": 2})
        model.offset.neg_()  # as in one process
        step(model, optimizer)
        full = tz.full_state_dict(model, keep=True)
        after = weights_of(alone[2])
        return [name for name, values in after.items() if not torch.allclose(full[name], values, atol=1e-5)]

    assert run_in_threads(ranks, body) == [[]] * ranks
    assert_holds(tmp_path / "again", {**alone[1], ("offset", "buffer"): -whole().offset})


STAGED = Mesh("zero3", 4, 2)


def test_saved_in_the_background(tmp_path: Path, alone: list[State]) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(STAGED)
        step(model, optimizer)
        with checkpoint.Saver(model, optimizer) as saver:
            saver.save(tmp_path / "saved", {})
            step(model, optimizer)

    run_in_threads(4, body)
    assert_holds(tmp_path / "saved", {**alone[0], ("offset", "buffer"): whole().offset})


def test_full_weights_go_in_and_come_out(tmp_path: Path, alone: list[State]) -> None:
    """By a state dict, a file of torch, and a folder as transformers writes it."""
    given = {**weights_of(alone[2]), "offset": torch.ones(WIDTH)}
    torch.save(given, tmp_path / "weights.pt")

    def body(rank: int) -> list[dict[str, Tensor]]:
        model, _ = sharded(STAGED)
        found = model.load_state_dict(given)
        assert found.missing_keys == found.unexpected_keys == []
        first = tz.full_state_dict(model)
        model, optimizer = sharded(STAGED)
        checkpoint.load(tmp_path / "weights.pt", model, None)
        tz.save_pretrained(model, tmp_path / "folder", config={"model_type": "row"})
        step(model, optimizer)
        checkpoint.load_weights(model, tmp_path / "weights.pt")
        return [first, tz.full_state_dict(model, keep=rank != 2)]

    held = run_in_threads(4, body)
    exported = load_file(tmp_path / "folder" / "model.safetensors")
    full = [first for first, _ in held[:1]] + [second for rank, (_, second) in enumerate(held) if rank != 2]
    for found in [exported, *full]:
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], values) for name, values in given.items())
    assert list(full[0]) == list(whole().state_dict())
    assert [*(first for first, _ in held[1:]), held[2][1]] == [{}] * 4


def told_by_all(action: Callable[[nn.Module, int], object], kind: type[Exception]) -> list[str]:
    """What each rank raises; before, nothing has been changed."""

    def body(rank: int) -> str:
        model, optimizer = sharded(STAGED)
        with pytest.raises(kind) as raised:
            action(model, rank)
        step(model, optimizer)  # and all go on together
        return str(raised.value)

    return run_in_threads(4, body)


def test_names_that_another_stage_lacks_or_none_has(alone: list[State], tmp_path: Path) -> None:
    given = {**weights_of(alone[2]), "offset": torch.ones(WIDTH)}
    less = {name: values for name, values in given.items() if name != "layers.5.weight"}
    for found in told_by_all(lambda model, rank: model.load_state_dict(less), BadInput):
        assert "missing 'layers.5.weight', unexpected nothing" in found
    more = {**given, "layers.9.weight": torch.ones(1)}
    for found in told_by_all(lambda model, rank: model.load_state_dict(more), BadInput):
        assert "missing nothing, unexpected 'layers.9.weight'" in found
    torch.save({**less, "layers.9.weight": torch.ones(1)}, tmp_path / "weights.pt")
    for found in told_by_all(lambda model, rank: checkpoint.load(tmp_path / "weights.pt", model, None), BadInput):
        assert "missing: layers.5.weight; not in the model: layers.9.weight" in found


def test_another_shape_of_one_stage_is_told_on_all_ranks(alone: list[State]) -> None:
    given = {**weights_of(alone[2]), "offset": torch.ones(WIDTH), "layers.5.weight": torch.ones(2, 2)}
    found = told_by_all(lambda model, rank: model.load_state_dict(given), BadInput)
    assert ["layers.5.weight is (2, 2) and should be (6, 6)" in each for each in found] == [False, False, True, True]
    assert all("Rank 3 cannot do its part" in each for each in found[:2])


def test_tensors_that_ranks_of_all_stages_would_have_to_gather(alone: list[State]) -> None:
    def load(model: nn.Module, rank: int) -> None:
        spread = DTensor.from_local(torch.ones(6, 6), tz.mesh(device="cpu"), run_check=False)
        given = {**weights_of(alone[2]), "offset": torch.ones(WIDTH), "layers.5.weight": spread}
        model.load_state_dict(given)

    found = told_by_all(load, BadInput)
    assert all("'layers.5.weight' are DTensors" in each for each in found[2:])
    assert all("Rank 3 cannot do its part" in each for each in found[:2])


@pytest.mark.parametrize("rank", [0, 3])
def test_other_names_or_values_on_one_rank_of_one_stage(rank: int, alone: list[State]) -> None:
    given = {**weights_of(alone[2]), "offset": torch.ones(WIDTH)}
    name = "layers.0.weight" if rank == 0 else "layers.5.weight"
    less = {each: values for each, values in given.items() if each != name}
    others = {**given, name: given[name] + 1}
    for unlike, message in ((less, "were given other names"), (others, "were given other values")):
        found = told_by_all(
            lambda model, own, unlike=unlike: model.load_state_dict(unlike if own == rank else given, strict=False),
            RanksApart,
        )
        assert all(message in each for each in found)


def test_copies_of_a_stage_that_differ_are_found() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Mesh("zero0", 4, 2))
        if rank == 3:
            with torch.no_grad():
                next(each for each in model.parameters() if each.numel()).view(-1)[0].add_(1.0)
        checkpoint.check_replicas(model)

    with pytest.raises(tz.Diverged, match="of 2 copies that should be equal, ranks 2, 3 differ"):
        run_in_threads(4, body)


def test_averages_and_the_loss_scale_of_stages_come_back(tmp_path: Path) -> None:
    """The average is half of the first weights, and half of those after a step."""

    def body(rank: int, mesh: Mesh, path: Path | None) -> tuple[list[str], float]:
        model = whole()
        axes = tz.mesh(pp=mesh.pp, device="cpu")
        tz.parallelize(model, axes, pipeline=tz.Pipeline())
        precision = replace(tz.Precision.named("fp16"), loss_scaling=tz.LossScaling(init=64.0))
        model, optimizer = tz.shard(model, adamw(model), mesh.plan, mesh=axes, units=[nn.Linear], precision=precision)
        average = tz.EMA(model, decay=0.5)
        before = whole().state_dict()
        if path is not None:
            checkpoint.load(path, model, optimizer)
        else:
            halved = [(inputs.half(), targets) for inputs, targets in batches()]
            tz.step(model, halved, lambda outputs, targets: F.mse_loss(outputs.float(), targets))
            optimizer.step()
            average.update()
            optimizer.load_scaler_state({**optimizer.scaler_state(), "scale": 16.0})
            checkpoint.save(tmp_path / "saved", model, optimizer)
        own = tz.full_state_dict(model, keep=True)
        with average.swapped():
            averaged = tz.full_state_dict(model, keep=True)
        trained = {name for name, each in model.named_parameters() if each.requires_grad and each.numel()}
        wrong = [name for name in trained if not torch.equal(averaged[name], before[name].lerp(own[name], 0.5))]
        assert any(not torch.equal(own[name], before[name]) for name in trained)
        return wrong, optimizer.scaler_state()["scale"]

    assert run_in_threads(4, lambda rank: body(rank, STAGED, None)) == [([], 16.0)] * 4
    for mesh in (Mesh("zero1", 2, 1), Mesh("zero2", 2, 2)):
        resumed = run_in_threads(mesh.ranks, lambda rank, mesh=mesh: body(rank, mesh, tmp_path / "saved"))
        assert resumed == [([], 16.0)] * mesh.ranks


def test_buffers_of_every_stage_are_saved(tmp_path: Path) -> None:
    """Each is updated on the ranks of its stage alone."""

    def layers() -> nn.Sequential:
        with exclusive():
            torch.manual_seed(3)
            linear = lambda: nn.Linear(WIDTH, WIDTH)  # noqa: E731
            return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH), linear())

    own = layers()
    for inputs, targets in batches():
        F.mse_loss(own(inputs), targets).backward()
    expected = dict(own.named_buffers())

    def body(rank: int, pp: int) -> list[dict[str, Tensor]]:
        axes = tz.mesh(pp=pp, device="cpu")
        model = tz.parallelize(layers(), axes, pipeline=tz.Pipeline())
        model, _ = tz.shard(model, None, "zero3", mesh=axes)
        if pp == 1:
            checkpoint.load(tmp_path / "saved", model, None)
            return [tz.full_state_dict(model, keep=True)]
        tz.step(model, batches(), F.mse_loss)
        checkpoint.save(tmp_path / "saved", model, None)
        return [tz.full_state_dict(model, keep=True)]

    for pp, ranks in ((2, 4), (1, 2)):
        for (found,) in run_in_threads(ranks, functools.partial(body, pp=pp)):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
