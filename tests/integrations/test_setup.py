"""From descriptions to what `tz.shard` takes, without ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from terrazzo.dialects.core.description import LOADED, Description, Extra, Setting, build
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import NAMES, dialect
from terrazzo.engine import LossScaling, Plan
from terrazzo.engine.runtime.topology import ranks_here
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.shared import first_rank
from terrazzo.integrations.shared.engine_setup import ActivationSetup, EngineSetup
from terrazzo.integrations.shared.from_description import setup_for
from tests.helpers.fake import fake_group
from tests.helpers.threads import run_in_threads

CPU = torch.device("cpu")


def described(*extras: Extra, **given: Any) -> Description:
    """A description of settings whose paths are written `section__name`."""
    return build("test", {path.replace("__", "."): Setting(value) for path, value in given.items()}, extras)


def made(*extras: Extra, **given: Any) -> EngineSetup:
    return setup_for(described(*extras, **given), CPU)


def of_row(name: str) -> dict[str, Any]:
    return {f"sharding__{state}": str(place) for state, place in Plan.named(name).places().items()}


def test_a_silent_description_gets_the_defaults() -> None:
    setup = made()
    assert setup.plan.name == "zero3"
    assert {setup.precision.weight, setup.precision.reduce, setup.precision.moments} == {torch.float32}
    assert (setup.arguments.mesh, setup.arguments.units, setup.clip, setup.accumulation, setup.compile) == (
        None,
        None,
        None,
        1,
        False,
    )


def test_what_nobody_carries_out_is_a_warning() -> None:
    """Each setting of a file is asked for by the engine, by the library, by the integration, or named."""
    first_rank._WARNED.clear()
    asked = {
        "units__policy": "min_numel",
        "units__min_numel": 1000,
        "precision__buffers": "bf16",
        "optimizer__lr": 1e-3,
    }
    given = {**asked, "prefetch__forward": 2, "activation_checkpointing__mode": "full"}
    with pytest.warns(UserWarning, match="leaves it out") as told:
        made(**given)
    assert sorted(str(each.message).split(" is ")[0] for each in told) == ["precision.buffers", "units.min_numel"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setup_for(described(precision__buffers="fp32", offload__buffers=None), CPU, own=("precision.buffers",))


@pytest.mark.parametrize("row", ["zero0", "zero1", "zero2", "zero3", "shard_grad_op", "hpz"])
def test_rows_keep_their_places(row: str) -> None:
    assert made(**of_row(row)).plan.places() == Plan.named(row).places()


def test_tiers_go_into_the_plan_and_their_ways_into_offload() -> None:
    setup = made(
        **of_row("zero3"), offload__optim="nvme", offload__grad="cpu", offload__path=("/a",), offload__block_bytes=2**20
    )
    assert (setup.plan.optim.tier, setup.plan.grad.tier, setup.plan.weight.tier) == ("nvme", "cpu", "device")
    offload = setup.arguments.offload
    assert offload is not None
    assert (offload.path, offload.block_mib, offload.step) == (("/a",), 1.0, "overlapped")


def test_linear_layers_are_converted_before_the_model_is_sharded() -> None:
    def sharded(rank: int) -> list[bool]:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        setup = made(precision__linears="fp8-rowwise", precision__skip=("3",))
        model, _ = setup.shard(model, lambda each: torch.optim.SGD(each, lr=0.1))
        return ["float8=rowwise" in repr(layer) for layer in model]

    assert run_in_threads(2, sharded) == [[True, True, True, False]] * 2
    assert (made().float8, made(precision__linears="compute").float8) == (None, None)


def test_precision_is_taken_dtype_by_dtype() -> None:
    precision = made(precision__weight="bf16", precision__compute="bf16", precision__reduce="bf16").precision
    assert (precision.weight, precision.compute, precision.reduce) == (torch.bfloat16,) * 3
    assert (precision.master, precision.accumulate, precision.moments) == (torch.float32,) * 3


def test_loaded_dtypes_are_the_models() -> None:
    description = described(precision__weight=LOADED, precision__master=LOADED)
    assert setup_for(description, CPU, torch.bfloat16).precision.master is torch.bfloat16
    with pytest.raises(Misuse, match="loaded="):
        setup_for(description, CPU)


def test_autocast_leaves_weights_as_they_are() -> None:
    setup = made(precision__autocast=True, precision__compute="bf16", precision__weight="fp32")
    assert setup.autocast is torch.bfloat16
    assert setup.precision.compute is torch.float32


def test_a_fixed_loss_scale_never_moves() -> None:
    scaling = made(precision__static_loss_scale=128, precision__compute="fp16").precision.loss_scaling
    assert scaling is not None
    assert (scaling.init, min(scaling.interval, scaling.hysteresis) > 10**9) == (128, True)


def test_dynamic_loss_scaling_is_passed_on() -> None:
    assert made(precision__loss_scaling=LossScaling(init=4.0)).precision.loss_scaling == LossScaling(init=4.0)


@pytest.mark.parametrize(
    ("given", "units"),
    [
        ({"units__policy": "classes", "units__classes": ("Block",)}, ("Block",)),
        ({"units__policy": "none"}, ()),
        ({"units__policy": "auto"}, None),
        ({"units__policy": "min_numel"}, None),
    ],
)
def test_units(given: dict[str, Any], units: tuple[str, ...] | None) -> None:
    assert made(**given).arguments.units == units


def test_the_larger_prefetch_counts() -> None:
    assert made(prefetch__forward=0, prefetch__backward=2).arguments.prefetch == 2
    assert made(prefetch__forward=0).arguments.prefetch == 0


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, {"dp_shard": 8}),
        ({"mesh__dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        (
            {"mesh__dp_replicate": None, "mesh__dp_shard": 2, **of_row("hybrid_shard")},
            {"dp_replicate": 4, "dp_shard": 2},
        ),
        ({"mesh__dp_replicate": None, "mesh__dp_shard": 8, **of_row("hpz")}, {"dp_replicate": 1, "dp_shard": 8}),
    ],
)
def test_the_mesh_is_over_all_ranks(given: dict[str, Any], sizes: dict[str, int]) -> None:
    with fake_group(8):
        mesh = made(**given).arguments.mesh
        assert mesh is not None
        assert dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) == sizes


@pytest.mark.parametrize(("node", "name"), [(8, "LOCAL_WORLD_SIZE"), (4, "LOCAL_WORLD_SIZE"), (4, "LOCAL_SIZE")])
def test_nodes_are_replicas_where_a_launcher_tells_them(node: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP1 splits over the devices of a node; a single node is one group. The deepspeed launcher has the last name."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, str(node))
    assert ranks_here(otherwise=1) == node
    with fake_group(8):
        mesh = made(mesh__dp_replicate=None, **of_row("hybrid_shard")).arguments.mesh
        assert mesh is not None
        assert (mesh.mesh_dim_names, mesh.shape) == (("dp_replicate", "dp_shard"), (8 // node, node))


def told(monkeypatch: pytest.MonkeyPatch, *sizes: str | None) -> None:
    """Each rank, a thread, is told of as many ranks on its node."""

    monkeypatch.setattr(
        "terrazzo.integrations.shared.from_description.told_ranks_here", lambda: sizes[dist.get_rank()] or ""
    )


def test_nodes_alike_are_replicas_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, *["2"] * 4)
    meshes = run_in_threads(4, lambda rank: made(mesh__dp_replicate=None, **of_row("hybrid_shard")).arguments.mesh)
    assert [mesh.shape for mesh in meshes if mesh is not None] == [(2, 2)] * 4


@pytest.mark.parametrize(
    "sizes", [("3", "3", "3", "1"), ("2", "2", "1", "1"), ("2", "2", "2", None), ("4", "4", "x", "4")]
)
def test_unlike_nodes_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch, sizes: tuple[str | None, ...]) -> None:
    """Else those that can make a mesh of it wait for those that cannot."""
    told(monkeypatch, *sizes)

    def said(rank: int) -> str:
        with pytest.raises(BadInput) as caught:
            made(mesh__dp_replicate=None, **of_row("hybrid_shard"))
        return str(caught.value)

    texts = run_in_threads(4, said, timeout_s=20)
    assert len(set(texts)) == 1
    assert f"LOCAL_WORLD_SIZE is '{sizes[0]}' on rank 0 and" in texts[0]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"mesh__world": 4}, "says 4 ranks; 8 are running"),
        ({"mesh__dp_shard": 3}, "do not make up the 8 ranks"),
        ({"mesh__dp_replicate": None, **of_row("hybrid_shard")}, "how many nodes"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(given: dict[str, Any], word: str) -> None:
    with fake_group(8), pytest.raises(BadInput, match=word):
        made(**given)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        *(({f"mesh__{axis}": 2}, f"mesh.{axis} asks for") for axis in ("tp", "cp", "sp", "ep", "pp")),
        ({"precision__compute": "fp8"}, "fp8"),
        ({"precision__autocast": True, "precision__compute": "fp16"}, "autocast to bf16"),
        ({"precision__static_loss_scale": 100}, "powers of two"),
        ({"units__ignored": ("head",)}, "every parameter"),
        ({"offload__optim": "nvme"}, "no folder"),
        ({"activation_checkpointing__offload": True}, "turn that on"),
        ({"activation_checkpointing__mode": "some"}, "use full, selective or selective_half"),
    ],
)
def test_what_cannot_be_done_is_refused(given: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        made(**given)


def test_extras_that_change_the_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match=r"quantized.*in int8"):
        made(Extra("quantized", True, "weights are gathered in int8", loss="refused"))
    assert made(Extra("steps_per_print", 10, loss="harmless")).plan.name == "zero3"


def test_activation_checkpointing() -> None:
    assert made(
        activation_checkpointing__mode="every", activation_checkpointing__every=2
    ).activation_checkpointing == ActivationSetup("full", 2)


@pytest.mark.parametrize("name", NAMES)
def test_every_dialects_empty_document_is_a_setup(name: str) -> None:
    description = dialect(name).read({}, ReadingContext(load_dtype="fp32")).description
    assert setup_for(description, CPU, torch.float32).accumulation >= 1


def test_shard_checkpoints_activations_first() -> None:
    runs: list[int] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return torch.relu(self.linear(x))

    with fake_group(1):
        model = nn.Sequential(Block(), Block())
        setup = made(activation_checkpointing__mode="full", units__policy="classes", units__classes=("Block",))
        model, optimizer = setup.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(runs) == 4  # two in forward, two again in backward


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_gathered_weights_come_in_the_dtype_of_autocast(compute: str) -> None:
    setup = made(**of_row("zero3"), precision__autocast=True, precision__compute=compute, precision__weight="fp32")
    assert setup.autocast is setup.precision.compute is {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]


def test_an_empty_list_of_layers_to_skip_is_another_choice_than_none() -> None:
    assert [made(precision__skip=skip).skip for skip in ((), None)] == [(), None]
