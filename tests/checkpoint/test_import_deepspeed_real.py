"""Importing what a real DeepSpeed writes on two ranks, where it is installed; it says itself what it holds."""

from __future__ import annotations

import logging
import os
import warnings
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.checkpoint.importers.deepspeed import DeepSpeedCheckpoint, recognises
from terrazzo.errors import BadInput
from tests.helpers.imported import States, assert_same
from tests.helpers.processes import Pool

TAG = "global_step3"
CLIENT_STATE = {"epoch": 2, "seen": [1, 0.5], "universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}


class Net(nn.Module):
    """Odd sizes, a parameter of one element, a frozen layer, a tied head, buffers, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.up, self.down = nn.Linear(5, 3), nn.Linear(3, 5)
        self.tiny = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.frozen(self.embedding(tokens)) * self.scale.to(self.embedding.weight.dtype)
        return self.head(self.down(torch.tanh(self.up(x))) * self.tiny)


GROUPS = [["embedding.weight", "up.weight", "down.weight"], ["tiny", "up.bias", "down.bias"]]
SETTINGS = [{"lr": 3e-2, "weight_decay": 0.1}, {"lr": 1e-2, "weight_decay": 0.0}]
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 0, bf16": {"stage": 0, "bf16": True},
    "stage 0, bf16, flat": {"stage": 0, "bf16": True, "flat": True},
    "stage 1": {"stage": 1},
    "stage 1, fp16": {"stage": 1, "fp16": True},
    "BF16_Optimizer": {"stage": 1, "bf16": True, "data_types": {"grad_accum_dtype": "fp32"}},
    "stage 2": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "stage 2, aligned": {"stage": 2, "zero": {"round_robin_gradients": True, "parameter_alignment": True}},
    "stage 3": {"stage": 3, "zero": {"sub_group_size": 20}},
    "stage 3, bf16": {"stage": 3, "bf16": True},
}
CONVERTED = ["stage 1", "BF16_Optimizer", "stage 2, aligned", "stage 3"]


def write_with_deepspeed(root: Path) -> dict[str, list[dict[str, float]]]:
    """Train and save every variant. Rank 0 writes what DeepSpeed has in memory beside it, and converts some."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint.ds_to_universal import main as convert

    for name, variant in VARIANTS.items():
        write_variant(root / name, **variant)
    if dist.get_rank() == 0:
        for name in [*CONVERTED, "stage 2"]:
            workers = {"num_extract_workers": 1, "num_merge_workers": 1}
            folders = {"input_folder": str(root / name / TAG), "output_folder": str(root / name / "universal")}
            convert(Namespace(**folders, **workers, keep_temp_folder=False, strict=True, inject_missing_state=False))
    dist.barrier()


def write_variant(
    folder: Path, stage: int, bf16: bool = False, fp16: bool = False, flat: bool = False, zero: Any = None, **more: Any
) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: fp16  # it is, but too slow for what DeepSpeed expects
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if flat else ()  # decides about flat weights at stage 0
    torch.manual_seed(0)
    model = Net()
    if stage < 3:  # at which DeepSpeed cannot train it
        model.none = nn.Parameter(torch.empty(0, 4))
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in names], **settings}
        for names, settings in zip(GROUPS, SETTINGS, strict=True)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "fp16": {"enabled": fp16, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 2},
        "optimizer": {"type": "Adam"},
        **more,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups), config=config, dist_init_required=False
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = engine(torch.randint(7, (2, 4), generator=generator)).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG, client_state=dict(CLIENT_STATE))
    states = in_memory(engine, stage)
    if dist.get_rank() == 0:
        torch.save(states, folder / "expected.pt")


def in_memory(engine: Any, stage: int) -> States:
    """What DeepSpeed holds, by name and kind of state, in the shapes of the parameters."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    wrapper, states = engine.optimizer, {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter] if stage == 3 else []):
            found = {"weight": parameter.detach().clone()}
        if not parameter.requires_grad or name == "none":
            pass
        elif stage == 3:
            found["weight"] = safe_get_full_fp32_param(parameter)
            found |= {kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
            found["step"] = wrapper.optimizer.state[wrapper.fp32_partitioned_groups_flat[0]]["step"]
        elif wrapper is engine.basic_optimizer:
            found |= wrapper.state[parameter]
        else:
            found |= held_for(parameter, wrapper)
        shape = found["weight"].shape if stage == 3 else parameter.shape
        states |= {
            (name, kind): value.clone().reshape((1,) if kind == "step" else shape) for kind, value in found.items()
        }
    buffers = {name: value for name, value in engine.module.named_buffers() if name != "cache"}
    return states | {(name, "buffer"): value.clone() for name, value in buffers.items()}


def held_for(parameter: nn.Parameter, wrapper: Any) -> dict[str, Tensor]:
    """Of the fp32 tensor that a parameter belongs to the part where the parameter is, in its flat tensor of bf16.

    DeepSpeed's own `safe_get_full_fp32_param` gives that of another parameter if `round_robin_gradients` is set.
    """
    sharded = hasattr(wrapper, "partition_count")
    groups = getattr(wrapper, "bit16_groups", None) or getattr(wrapper, "bf16_groups", None) or wrapper.fp16_groups
    index = next(i for i, group in enumerate(groups) if any(other is parameter for other in group))
    if hasattr(wrapper, "fp32_groups"):
        part = wrapper.fp32_groups[index][[other is parameter for other in groups[index]].index(True)]
        return {"weight": part.detach(), **wrapper.optimizer.state[part]}
    parts = next(getattr(wrapper, key) for key in HELD_PARTS if hasattr(wrapper, key))
    part, first = parts[index], parameter.data.storage_offset()
    found = {"weight": part.detach(), **wrapper.optimizer.state[part]}
    return {
        kind: value if value.dim() == 0 else (whole(value) if sharded else value)[first : first + parameter.numel()]
        for kind, value in found.items()
    }


HELD_PARTS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_groups_flat")


def whole(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    root = tmp_path_factory.mktemp("deepspeed")
    with Pool(2) as pool:
        pool.run(write_with_deepspeed, root, timeout_s=150)
    return root


@pytest.mark.processes
@pytest.mark.parametrize("name", [*VARIANTS, *(f"{name}/universal" for name in CONVERTED)])
def test_what_deepspeed_wrote_is_what_it_held(written: Path, name: str) -> None:
    folder = written / name
    expected = torch.load(written / name.removesuffix("/universal") / "expected.pt", weights_only=True)
    assert recognises(folder)
    source = DeepSpeedCheckpoint(folder)
    assert_same(source, expected)
    assert {name: info.shape for name, info in source.tensors.items()} == {
        name: tuple(value.shape) for (name, kind), value in expected.items() if kind in ("weight", "buffer")
    }
    assert (source.aliases, source.step, source.notes) == ({"head.weight": "embedding.weight"}, 3, [])
    assert source.extra["epoch"] == 2 and source.extra["seen"] == [1, 0.5] and source.extra["global_samples"] == 12
    assert source.optimizer is not None and source.optimizer.name == "AdamW"
    assert [set(group["params"]) for group in source.optimizer.groups] == list(map(set, GROUPS))
    for group, settings in zip(source.optimizer.groups, SETTINGS, strict=True):
        assert group.items() >= settings.items() and group["betas"] == [0.9, 0.999]
    overflows = {"scale": 2.0**15, "skipped_steps": 2, "good_steps": 0, "patience": 1}
    assert source.optimizer.scaler == (overflows if "fp16" in name else {})


@pytest.mark.processes
def test_a_conversion_that_mixed_up_parameters_is_refused(written: Path) -> None:
    with pytest.raises(BadInput, match="round_robin_gradients"):
        DeepSpeedCheckpoint(written / "stage 2/universal")
    expected = torch.load(written / "stage 2/expected.pt", weights_only=True)
    converted = torch.load(written / "stage 2/universal/zero/up.weight/fp32.pt", weights_only=True)
    assert not torch.equal(converted["param"], expected["up.weight", "weight"])  # it is as bad as the error says
