"""Shared experts beside what else a model may have: drives, compilation, averages, exports, adapters, wrappers."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import compile_units, engine_of
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from tests.helpers.threads import run_in_threads

EXPERTS = MixtureConfig(count=4, top_k=2, ffn_dim=16, shared=1)
SIZES = DecoderConfig(31, 16, 2, 4, 2, 26, 8, experts=EXPERTS)
STEPS, DECAY = 3, 0.5


@cache
def base() -> Decoder:
    torch.manual_seed(3)
    return Decoder(SIZES)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: Any, optimizer: Any, batches: list[Tensor], *, ema: Any = None) -> None:
    for batch in batches:
        F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sharded(plan: str, *, compiled: bool = False, **settings: Any) -> tuple[Any, Any]:
    mesh = tz.mesh(ep=2)
    model = tz.parallelize(copy.deepcopy(base()), mesh)
    if compiled:
        compile_units(model, units=[Block], backend="eager")
    return tz.shard(model, sgd, plan, units=[Block], mesh=mesh, **settings)


def mine(rank: int) -> list[Tensor]:
    return [tokens(step, rank) for step in range(STEPS)]


@cache
def plain() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of one process after the steps, and torch's average of them."""
    model = copy.deepcopy(base())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        trained(model, optimizer, [torch.cat([tokens(step, rank) for rank in range(2)])])
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict()


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - whole).abs().max()) for name, whole in expected.items())


def test_experts_whose_states_are_on_a_drive_train_and_are_resumed(tmp_path: Path) -> None:
    (expected, _), offload = plain(), tz.Offload(path=str(tmp_path))

    def body(rank: int) -> None:
        model, optimizer = sharded("zero3@nvme", offload=offload)
        trained(model, optimizer, mine(rank)[:2])
        checkpoint.save(tmp_path / "saved", model, optimizer, {})
        engine_of(model).close()
        model, optimizer = sharded("zero3@nvme", offload=offload)
        checkpoint.load(tmp_path / "saved", model, optimizer)
        trained(model, optimizer, mine(rank)[2:])
        assert worst(tz.full_state_dict(model, keep=True), expected) < 1e-6
        engine_of(model).close()

    run_in_threads(2, body)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at views
def test_compiled_blocks_share_experts() -> None:
    expected, _ = plain()

    def body(rank: int) -> float:
        model, optimizer = sharded("zero3", compiled=True)
        trained(model, optimizer, mine(rank))
        return worst(tz.full_state_dict(model, keep=True), expected)

    assert max(run_in_threads(2, body)) < 1e-6


def test_averages_and_exported_weights_are_whole(tmp_path: Path) -> None:
    weights, averages = plain()

    def body(rank: int) -> None:
        model, optimizer = sharded("zero3")
        ema = tz.EMA(model, decay=DECAY)
        trained(model, optimizer, mine(rank), ema=ema)
        tz.save_pretrained(model, tmp_path / "weights", config={})
        with ema.swapped():
            tz.save_pretrained(model, tmp_path / "averages", config={})

    run_in_threads(2, body)
    for name, expected in (("weights", weights), ("averages", averages)):
        (file,) = (tmp_path / name).glob("*.safetensors")
        assert worst(load_file(file), expected) < 1e-6


def test_adapters_beside_shared_experts_are_refused_before_they_are_cut() -> None:
    def body(rank: int) -> None:
        adapters = peft.LoraConfig(target_modules=["query"])
        tz.parallelize(peft.inject_adapter_in_model(adapters, copy.deepcopy(base())), tz.mesh(ep=2))

    with pytest.raises(tz.BadInput, match=r"blocks\.0\.attention\.query.*adapters of peft.*Leave ep out of the mesh"):
        run_in_threads(2, body)


def test_adapters_that_come_after_experts_are_shared_are_refused() -> None:
    def body(rank: int) -> None:
        mesh = tz.mesh(ep=2)
        model = tz.parallelize(copy.deepcopy(base()), mesh)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query"]), model)
        tz.shard(model, sgd, "zero3", units=[Block], mesh=mesh)

    with pytest.raises(tz.BadInput, match=r"experts\.gate.*are frozen, as under adapters.*requires_grad_\(True\)"):
        run_in_threads(2, body)


def test_torchs_own_data_parallelism_around_shared_experts_is_refused() -> None:
    def body(rank: int) -> None:
        model, _ = sharded("zero0")
        torch.nn.DataParallel(model)

    with pytest.raises(tz.Misuse, match="DataParallel"):
        run_in_threads(2, body)


def test_a_model_of_shared_experts_is_refused_by_integrations() -> None:
    def body(rank: int) -> None:
        model = tz.parallelize(copy.deepcopy(base()), tz.mesh(ep=2))
        EngineSetup(TerrazzoArguments("zero3", "fp32")).shard(model, sgd)

    with pytest.raises(tz.BadInput, match=r"tz\.parallelize, so ranks along ep"):
        run_in_threads(2, body)
