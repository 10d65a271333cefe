"""Importing the layouts of DeepSpeed 0.19.8, written here without it for three ranks, and hostile ones."""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from terrazzo.checkpoint.importers.deepspeed import DeepSpeedCheckpoint, recognises
from terrazzo.checkpoint.importers.deepspeed.trained import scaler_counters
from terrazzo.engine.plan.precision import LossScaling
from terrazzo.engine.progress.loss_scale import DynamicLossScale
from terrazzo.errors import BadInput, Damaged
from tests.checkpoint import faults
from tests.helpers.imported import RunsCode, States, assert_same

MODEL = "mp_rank_00_model_states.pt"
TAG, RANKS = "global_step3", 3
GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"embedding.weight": (7, 5), "down.weight": (5, 3), "up.weight": (3, 5)},
    {"tiny": (1,), "up.bias": (3,), "down.bias": (5,)},
    {"lone": (1, 1)},  # ranks 1 and 2 have nothing of it
]
SUB_GROUPS = [{"embedding.weight": (7, 5)}, {"down.weight": (5, 3), "up.weight": (3, 5)}, *GROUPS[1:]]
TRAINED = {name: shape for group in GROUPS for name, shape in group.items()}
FROZEN = ("frozen.weight", "none")
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER_OF_RANK_0, OPTIMIZER_OF_RANK_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
BASE, WEIGHTS = (
    ("optimizer_state_dict", "base_optimizer_state"),
    ("optimizer_state_dict", "single_partition_of_fp32_groups"),
)
LAYOUTS = ["stage 0", "stage 0, bf16", "stage 0, flat", "stage 1", "stage 2", "elastic", "BF16_Optimizer", "stage 3"]
UNIVERSAL = ["stage 2, universal", "stage 3, universal"]


class DynamicLossScaler:
    """Stands for that of DeepSpeed: a pickle shows no more of it than its name and attributes."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 512.0, 10, 4, 2
        self.dtype = torch.half


class ZeroStageEnum(int, Enum):
    gradients = 2


@pytest.fixture(autouse=True)
def _modules_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the classes above the names of DeepSpeed's, and `pickle` the modules that it looks for them in."""
    homes = {DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler", ZeroStageEnum: "deepspeed.runtime.zero.config"}
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    for kind, home in homes.items():
        module = ModuleType(home)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, home, module)
        monkeypatch.setattr(kind, "__module__", home)


@pytest.fixture
def states() -> States:
    """What the checkpoints hold."""
    found: States = {}
    for name, shape in TRAINED.items():
        found |= {(name, kind): torch.randn(shape) for kind in ("weight", *MOMENTS)}
        found[name, "step"] = torch.tensor([3.0])
    found["frozen.weight", "weight"] = torch.randn(5, 5).bfloat16()
    found["none", "weight"] = torch.empty(0, 4, dtype=torch.bfloat16)  # nothing to train
    found["seen", "buffer"] = torch.arange(3)
    return found


def write(folder: Path, files: dict[str, Any]) -> Path:
    """A folder as `save_checkpoint` leaves it."""
    for name, content in files.items():
        path = folder / TAG / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    (folder / "latest").write_text(TAG)
    return folder


def files_of(layout: str, states: States) -> dict[str, Any]:
    """What is in each file of a checkpoint."""
    layout, universal = layout.removesuffix(", universal"), layout.endswith(", universal")
    model = model_of(layout, states)
    if layout.startswith("stage 0"):
        return {MODEL: model | {"optimizer": stage_0(layout, states)}}
    bf16 = "bf16_" if layout == "BF16_Optimizer" else ""
    saved = [(stage_3 if layout == "stage 3" else stage_1_or_2)(layout, states, rank) for rank in range(RANKS)]
    files: dict[str, Any] = {MODEL: model}
    if layout == "stage 3":
        frozen = [{name: piece(states[name, "weight"], rank) for name in FROZEN} for rank in range(RANKS)]
        model["module"] = {name: value if name == "seen" else torch.empty(0) for name, value in model["module"].items()}
        files = {
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": model | {"frozen_param_fragments": frozen[rank]}
            for rank in range(RANKS)
        }
    if universal:
        return files | universal_files(layout, states, saved[0])
    names = [f"{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(RANKS)]
    return files | {name: {"optimizer_state_dict": part} for name, part in zip(names, saved, strict=True)}


def model_of(layout: str, states: States) -> dict[str, Any]:
    shapes = SUB_GROUPS if layout == "stage 3" else None if layout.startswith("stage 0") else GROUPS
    low = torch.float32 if layout == "stage 0" else torch.bfloat16
    module = OrderedDict({name: states[name, "weight"].to(low) for name in TRAINED})
    module |= {name: states[name, "weight"] for name in FROZEN} | {"seen": states["seen", "buffer"]}
    module["head.weight"] = module["embedding.weight"]
    if layout != "stage 3":
        module["twin.weight"] = module["frozen.weight"]  # DeepSpeed does not see that a module has two names
    return {
        "module": module,
        "buffer_names": ["seen"],
        "optimizer": None,
        "param_shapes": shapes and [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in shapes],
        "frozen_param_shapes": {name: states[name, "weight"].shape for name in FROZEN} if layout == "stage 3" else None,
        "shared_params": {"head.weight": "embedding.weight"} if shapes else None,
        "lr_scheduler": {"last_epoch": 3},
        "skipped_steps": 1,
        "global_steps": 3,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "ds_config": {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        "noise": numpy.arange(3.0),
        "args": Namespace(lr=1),
    }


def param_groups(numbers: list[list[int]]) -> list[dict[str, Any]]:
    return [{"lr": 0.5 * (1 + index), "betas": (0.9, 0.95), "params": group} for index, group in enumerate(numbers)]


def stage_0(layout: str, states: States) -> dict[str, Any]:
    """In fp32 the optimizer of torch; else it has weights of its own, one by one or end to end."""
    groups: list[list[str]] = [list(group) for group in GROUPS]
    flat = layout == "stage 0, flat"
    parts = groups if flat else [[name] for group in groups for name in group]

    def joined(kind: str, names: list[str]) -> Tensor:
        return torch.cat([states[n, kind].flatten() for n in names]) if flat else states[names[0], kind].clone()

    state = {
        number: {"step": torch.tensor(3.0), **{kind: joined(kind, names) for kind in MOMENTS}}
        for number, names in enumerate(parts)
    }
    optimizer = {"state": state, "param_groups": param_groups([[0], [1], [2]] if flat else [[0, 1, 2], [3, 4, 5], [6]])}
    if layout == "stage 0":
        return optimizer
    counters = {"cur_scale": 512.0, "cur_iter": 10, "last_overflow_iter": 4}
    if flat:
        return {
            "optimizer_state_dict": optimizer,
            "fp32_groups_flat": [joined("weight", g) for g in groups],
            **counters,
        }
    masters = [[joined("weight", [name]) for name in group] for group in groups]
    return {"optimizer_state_dict": optimizer, "fp32_groups": masters, **counters}


def stage_1_or_2(layout: str, states: States, rank: int) -> dict[str, Any]:
    """Groups end to end in equal parts. Only weights and elastic checkpoints lack padding at the end."""
    aligned = 4 if layout == "stage 2" else 1
    weights, moments, paddings = [], [], []
    for group in GROUPS:
        sizes = list(map(math.prod, group.values()))
        after = [-size % aligned for size in sizes[:-1]] + [0]
        used = sum(sizes) + sum(after)
        share = -(-used // (2 * RANKS)) * 2
        kept = min(share, max(0, used - rank * share))
        parts = {}
        for kind in ("weight", *MOMENTS):
            spaced = [
                padded(states[name, kind].flatten(), size + more)
                for name, size, more in zip(group, sizes, after, strict=True)
            ]
            parts[kind] = padded(torch.cat(spaced), share * RANKS)[rank * share : (rank + 1) * share]
        weights.append(parts.pop("weight")[: share if layout == "BF16_Optimizer" else kept].clone())
        lean = {kind: part[: kept if layout == "elastic" else share].clone() for kind, part in parts.items()}
        moments.append({"step": torch.tensor(3.0), **lean})
        paddings.append(after)
    base = {"state": dict(enumerate(moments)), "param_groups": param_groups([[0], [1], [2]])}
    saved = {
        "base_optimizer_state": moments if layout == "elastic" else base,
        "single_partition_of_fp32_groups": weights,
        "partition_count": [RANKS] * 3,
    }
    if layout == "BF16_Optimizer":
        return saved
    scaler = {"loss_scaler": DynamicLossScaler(), "zero_stage": ZeroStageEnum.gradients}
    return saved | scaler | {"param_alignment_paddings": paddings}


def stage_3(layout: str, states: States, rank: int) -> dict[str, Any]:
    """Of each parameter a piece, the pieces of a sub-group end to end."""

    def flat(kind: str, names: Iterable[str]) -> Tensor:
        return torch.cat([piece(states[name, kind], rank) for name in names])

    moments = [{"step": 3, **{kind: flat(kind, group) for kind in MOMENTS}} for group in SUB_GROUPS]
    return {
        "zero_stage": ZeroStageEnum.gradients,
        "loss_scaler": DynamicLossScaler(),
        "partition_count": RANKS,
        "optimizer_state_dict": {"state": dict(enumerate(moments)), "param_groups": param_groups([[0, 1], [2], [3]])},
        "fp32_flat_groups": [flat("weight", group) for group in SUB_GROUPS],
    }


def universal_files(layout: str, states: States, saved: dict[str, Any]) -> dict[str, Any]:
    """As `ds_to_universal` does it: of stage 3 flat, and the steps only in the file of the optimizer."""
    optimizer = saved["optimizer_state_dict" if layout == "stage 3" else "base_optimizer_state"]
    files: dict[str, Any] = {"zero/optimizer_state.pt": saved | {"param_groups": optimizer["param_groups"]}}
    for name in TRAINED:
        for kind, file in (("weight", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            value = states[name, kind]
            files[f"zero/{name}/{file}.pt"] = value.flatten() if layout == "stage 3" else {"param": value, "cat_dim": 0}
        if layout != "stage 3":
            files[f"zero/{name}/step.pt"] = 3
    return files


def piece(value: Tensor, rank: int) -> Tensor:
    """A rank's piece of a parameter at stage 3."""
    share = -(-value.numel() // RANKS)
    return padded(value.flatten(), share * RANKS)[rank * share : (rank + 1) * share].clone()


def padded(flat: Tensor, numel: int) -> Tensor:
    """With elements behind it that must not be read."""
    return torch.cat([flat, torch.full((numel - flat.numel(),), math.nan, dtype=flat.dtype)])


@pytest.mark.parametrize("layout", [*LAYOUTS, *UNIVERSAL])
def test_every_layout_gives_the_same_states(tmp_path: Path, states: States, layout: str) -> None:
    source = DeepSpeedCheckpoint(write(tmp_path, files_of(layout, states)))
    assert_same(source, states)
    assert {name: source.tensors[name].shape for name in TRAINED} == TRAINED
    seen = {} if layout.startswith("stage 3") else {"twin.weight": "frozen.weight"}
    assert source.aliases == {"head.weight": "embedding.weight", **seen}
    assert source.step == 3 and source.extra == {"lr_scheduler": {"last_epoch": 3}, "skipped_steps": 1}
    assert source.optimizer is not None and source.optimizer.name == "Adam"
    assert [group["params"] for group in source.optimizer.groups] == [list(group) for group in GROUPS]
    notes = [f"{key} is not taken over: it is an object of another library" for key in ("noise", "args")]
    if layout == "elastic":
        notes.insert(0, "hyper-parameters are not taken over: elastic checkpoints do not hold them")
    else:
        assert [(group["lr"], group["betas"]) for group in source.optimizer.groups] == [
            (rate, [0.9, 0.95]) for rate in (0.5, 1.0, 1.5)
        ]
    assert [*source.optimizer_notes, *source.notes] == notes
    patience = 1 if layout.startswith("stage 0") else 2
    scaler = {"scale": 512.0, "skipped_steps": 1, "good_steps": 4, "patience": patience}
    assert source.optimizer.scaler == ({} if layout in ("stage 0", "BF16_Optimizer") else scaler)


@pytest.mark.parametrize(("iteration", "overflow"), [(1, -1), (8, -1), (9, -1), (10, -1), (7, 3), (30, 11)])
def test_the_loss_scale_doubles_when_it_would_have(iteration: int, overflow: int) -> None:
    saved = {"cur_scale": 64.0, "cur_iter": iteration, "last_overflow_iter": overflow}
    scaler = DynamicLossScale(LossScaling(interval=8))
    scaler.load_state(scaler_counters(saved, 0), accumulating=False)
    scale = 64.0
    for later in range(iteration, iteration + 40):  # as DynamicLossScaler.update_scale does without overflow
        stable = later - overflow - 1
        scale *= 2 if stable > 0 and stable % 8 == 0 else 1
        scaler.update(overflow=False)
        assert scaler.scale == scale


def test_equal_contents_and_only_they_are_identical(tmp_path: Path, states: States) -> None:
    files = files_of("stage 1", states)
    first, same = (DeepSpeedCheckpoint(write(tmp_path / name, files)) for name in "ab")
    files[OPTIMIZER_OF_RANK_1]["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][3] += 1
    other = DeepSpeedCheckpoint(write(tmp_path / "c", files))
    assert first.identity == same.identity != other.identity


def test_the_folder_of_the_tag_is_enough(tmp_path: Path, states: States) -> None:
    folder = write(tmp_path, files_of("stage 1", states))
    assert recognises(folder) and recognises(folder / TAG) and not recognises(folder.parent)
    assert_same(DeepSpeedCheckpoint(folder / TAG), states)


@pytest.mark.parametrize("tag", ["", "..", "../step", "/tmp", "step", "linked", "a\0b"])
def test_a_tag_that_is_no_folder_here_is_refused(tmp_path: Path, states: States, tag: str) -> None:
    folder = write(tmp_path / "root", files_of("stage 1", states))
    (folder / TAG).rename(tmp_path / "step")
    (folder / "linked").symlink_to(tmp_path / "step")
    (folder / "latest").write_text(tag)
    with pytest.raises(BadInput, match=r"latest|linked"):
        DeepSpeedCheckpoint(folder)


@pytest.mark.parametrize("layout", ["stage 1", "BF16_Optimizer", "stage 3"])
def test_missing_files_are_all_named(tmp_path: Path, states: States, layout: str) -> None:
    folder = write(tmp_path, files_of(layout, states))
    lost = [path.name for path in (folder / TAG).iterdir() if "zero_pp_rank_0" not in path.name and "zero" in path.name]
    for name in lost:
        (folder / TAG / name).unlink()
    with pytest.raises(Damaged) as caught:
        DeepSpeedCheckpoint(folder)
    assert len(lost) == (4 if layout == "stage 3" else 2) and all(name in str(caught.value) for name in lost)


def test_a_file_outside_is_not_followed(tmp_path: Path, states: States) -> None:
    folder = write(tmp_path / "root", files_of("stage 1", states))
    (folder / TAG / OPTIMIZER_OF_RANK_1).rename(tmp_path / "outside.pt")
    (folder / TAG / OPTIMIZER_OF_RANK_1).symlink_to(tmp_path / "outside.pt")
    with pytest.raises(BadInput, match="is not followed"):
        DeepSpeedCheckpoint(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layer_00-model_states.pt", "pipeline parallelism"),
        ("layer_03-model_01-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "expert parallelism"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert parallelism"),
        ("mp_rank_01_model_states.pt", "ds_to_universal"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "ds_to_universal"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "two checkpoints"),
        ("offloaded_tensors", "NVMe"),
    ],
)
def test_files_of_other_layouts_are_refused_by_name(tmp_path: Path, states: States, name: str, reason: str) -> None:
    folder = write(tmp_path, files_of("stage 1", states))
    (folder / TAG / name).touch()
    with pytest.raises(BadInput, match=reason) as caught:
        DeepSpeedCheckpoint(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "where", "value", "reason"),
    [
        ("stage 1", (MODEL, "mp_world_size"), 2, "tensor parallelism"),
        ("stage 1", (MODEL, "module"), None, "pipeline parallelism"),
        ("stage 1", (OPTIMIZER_OF_RANK_0, *BASE, "param_groups", 1, "moe"), True, "experts"),
        ("stage 3", (OPTIMIZER_OF_RANK_0, "optimizer_state_dict", "ds_zero_partition_groups"), [{}], "experts"),
        ("stage 2, universal", ("zero/up.weight/fp32.pt", "is_expert_param"), True, "experts"),
        ("stage 1", (OPTIMIZER_OF_RANK_0, "optimizer_state_dict", "partition_count"), [2], "3 ranks"),
        ("stage 3", (OPTIMIZER_OF_RANK_0, "optimizer_state_dict", "fp32_flat_groups", 1), torch.ones(12), "MiCS"),
        ("stage 1", (OPTIMIZER_OF_RANK_1, *BASE, "state", 0, "exp_avg"), torch.ones(3), "rank 1"),
        ("stage 1", (OPTIMIZER_OF_RANK_1, *WEIGHTS, 0), torch.ones(3), "rank 1"),
        ("stage 1", (OPTIMIZER_OF_RANK_1, *WEIGHTS, 0), torch.ones(24).half(), "rank 1"),
        ("stage 1", (MODEL, "param_shapes", 0, "../up"), torch.Size([1]), "up"),
        ("BF16_Optimizer", (MODEL, "param_shapes", 1), {"up.bias": torch.Size([3])}, "would fill"),
        ("stage 2, universal", (MODEL, "param_shapes", 0, "../up"), torch.Size([1]), "lacks"),
        ("stage 3, universal", ("zero/up.weight/fp32.pt",), torch.ones(3), "3 elements"),
    ],
)
def test_what_cannot_be_imported_whole_is_refused(
    tmp_path: Path, states: States, layout: str, where: tuple[Any, ...], value: Any, reason: str
) -> None:
    files = files_of(layout, states)
    put(files, where, value)
    with pytest.raises(BadInput, match=reason):
        DeepSpeedCheckpoint(write(tmp_path, files))


def test_tensor_parallelism_is_imported_once_converted(tmp_path: Path, states: States) -> None:
    files = files_of("stage 2, universal", states)
    model = files[MODEL]
    model |= {"mp_world_size": 2, "param_shapes": [{n: torch.Size([1]) for n in group} for group in GROUPS]}
    files["mp_rank_01_model_states.pt"] = model | {"module": dict(model["module"])}
    assert_same(DeepSpeedCheckpoint(write(tmp_path / "same", files)), states)
    other = files["mp_rank_01_model_states.pt"]["module"]
    for folder, value in {"split": torch.ones(5, 5).bfloat16(), "lost": None}.items():
        other["frozen.weight"] = value
        with pytest.raises(BadInput, match=r"'frozen\.weight'"):
            DeepSpeedCheckpoint(write(tmp_path / folder, files))


def test_a_conversion_of_round_robin_gradients_is_refused_unless_aligned(tmp_path: Path, states: States) -> None:
    files = files_of("stage 2, universal", states)
    model = files[MODEL]
    model |= {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}, "dp_world_size": 2}
    assert_same(DeepSpeedCheckpoint(write(tmp_path / "aligned", files)), states)
    files["zero/optimizer_state.pt"]["param_alignment_paddings"] = [[0, 0, 0], [0, 0, 0], [0]]
    with pytest.raises(BadInput, match="round_robin_gradients"):
        DeepSpeedCheckpoint(write(tmp_path / "mixed up", files))


@pytest.mark.parametrize("layout", ["stage 0", "stage 0, bf16", "stage 0, flat"])
def test_stage_0_that_could_be_of_other_parameters_gives_the_model_alone(
    tmp_path: Path, states: States, layout: str
) -> None:
    files = files_of(layout, states)
    module = files[MODEL]["module"]
    module["another"] = module["lone"].clone()
    source = DeepSpeedCheckpoint(write(tmp_path, files))
    assert source.optimizer is None and "Save the checkpoint with ZeRO stage 1" in source.optimizer_notes[0]
    model = {(name, "weight"): value for name, value in module.items() if name not in source.aliases}
    assert_same(
        source, {**{key: value for key, value in model.items() if key[0] != "seen"}, ("seen", "buffer"): module["seen"]}
    )


@pytest.mark.parametrize("layout", ["stage 0", "stage 0, bf16"])
def test_stage_0_tells_parameters_apart_by_shape(tmp_path: Path, states: States, layout: str) -> None:
    files = files_of(layout, states)
    module = files[MODEL]["module"]
    module["another"] = states["another", "weight"] = module["lone"].reshape(1)
    assert_same(DeepSpeedCheckpoint(write(tmp_path, files)), states)


def test_state_that_is_not_by_parameter_is_noted(tmp_path: Path, states: States) -> None:
    files = files_of("stage 1", states)
    state = files[OPTIMIZER_OF_RANK_0]["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    state |= {"weight": torch.ones(24), "errors": torch.ones(2), "unused": None}
    source = DeepSpeedCheckpoint(write(tmp_path, files))
    assert_same(source, states)
    assert [note.split(",")[0] for note in source.optimizer_notes][:2] == ["weight", "errors"]


def put(tree: Any, where: tuple[Any, ...], value: Any) -> Any:
    """Replace what is there; what was there before."""
    for key in where[:-1]:
        tree = tree[key]
    before = tree.get(where[-1]) if isinstance(tree, dict) else tree[where[-1]]
    tree[where[-1]] = value
    return before


def places_of_files(files: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Where something is. Of files that are alike but for a number, each has its turn."""
    alike: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for where in places(files):
        alike[re.sub(r"\d+", "", where[0]), *map(str, where[1:])].append(where)
    return [found[turn % len(found)] for turn, found in enumerate(alike.values())]


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is, above other things first."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, key)
        if type(value) in (dict, list, OrderedDict):
            yield from places(value, (*above, key))


CODE_IN = [
    *("stage 0, bf16", "stage 3", "stage 3, universal"),  # between them every kind of file
    *(pytest.param(layout, marks=pytest.mark.long) for layout in ("stage 1", "stage 2, universal")),
]


@pytest.mark.parametrize("layout", CODE_IN)
def test_code_in_any_place_is_refused_and_does_not_run(tmp_path: Path, states: States, layout: str) -> None:
    files = files_of(layout, states)
    for where in places_of_files(files)[:: 1 if faults.DENSITY > 1 else 3]:
        before = put(files, where, RunsCode())
        with pytest.raises(BadInput, match="ran_code"):
            DeepSpeedCheckpoint(write(tmp_path, {where[0]: files[where[0]]} if (tmp_path / TAG).exists() else files))
        put(files, where, before)
        write(tmp_path, {where[0]: files[where[0]]})
    assert RunsCode.ran == 0
    assert_same(DeepSpeedCheckpoint(tmp_path), states)


@pytest.mark.parametrize("layout", ["stage 0", "stage 0, flat", "stage 1", "stage 3", "stage 2, universal"])
def test_anything_in_any_place_is_read_or_refused(tmp_path: Path, states: States, layout: str) -> None:
    files = files_of(layout, states)
    write(tmp_path, files)
    junk = [None, -1, "x", [], {}, [[1]], {1: 2}, torch.ones(2), 1.5, 2**70]
    places = [place for place in places_of_files(files) if len(place) > 1]
    for index in range(0, len(places), 1 if faults.DENSITY > 1 else 7):  # all junk is tried, at places of all kinds
        where = places[index]
        before = put(files, where, junk[index % len(junk)])
        write(tmp_path, {where[0]: files[where[0]]})
        try:
            source = DeepSpeedCheckpoint(tmp_path)
        except BadInput:
            pass
        else:
            for name, info in source.tensors.items():
                assert all(source.whole(name, kind).numel() == state.numel for kind, state in info.states.items())
            json.dumps([source.extra, source.optimizer.groups if source.optimizer else [], source.all_notes])
        put(files, where, before)
        write(tmp_path, {where[0]: files[where[0]]})
