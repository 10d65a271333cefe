"""Importing torch.distributed.checkpoint folders; torch writes them, from two processes and from one."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

from terrazzo.checkpoint.importers import dcp as importer
from terrazzo.checkpoint.importers import open_foreign
from terrazzo.checkpoint.importers.parts.numbering import ModelNames
from terrazzo.errors import BadInput, Damaged
from tests.helpers.imported import Layer, Net, RunsCode, assert_same, names_of, states_of, train, trained
from tests.helpers.processes import Pool


def fsdp2(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network of sharded blocks: some of their columns, of sizes that do not divide, and more rows than ranks."""
    torch.manual_seed(0)
    net, mesh = Net(**settings), init_device_mesh("cpu", (2,))
    for layer in net.layers:
        columns = layer.down.weight
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p, columns=columns: Shard(1) if p is columns else None)
    fully_shard(net, mesh=mesh)
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "lr": 1e-2}, {"params": others, "weight_decay": 0.0}]
    return net, torch.optim.AdamW(groups, lr=3e-2, betas=(0.8, 0.9))


def save_fsdp2(folder: Path, settings: dict[str, Any], flat: bool) -> None:
    net, optimizer = fsdp2(**settings)
    train(net, optimizer)
    model_state, optimizer_state = get_state_dict(
        net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    dcp.save({"model": model_state, "optim": optimizer_state, "step": 7, "lr": 0.25}, checkpoint_id=folder / "both")
    dcp.save(model_state, checkpoint_id=folder / "bare")
    dcp.save({**model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "titan")  # as torchtitan does
    if (states := states_of(net, optimizer)) and dist.get_rank() == 0:
        torch.save(states, folder / "expected.pt")


@pytest.mark.processes
@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("settings", [{}, {"tied": True}, {"frozen": True}])
def test_what_fsdp2_holds_is_imported_bitwise(
    two_processes: Pool, tmp_path: Path, settings: dict[str, Any], flat: bool
) -> None:
    two_processes.run(save_fsdp2, tmp_path, settings, flat)
    expected = torch.load(tmp_path / "expected.pt")
    source = open_foreign(tmp_path / "both")
    assert_same(source, expected)
    assert source.aliases == ({"head.weight": "embedding.weight"} if settings.get("tied") else {})
    assert source.optimizer is not None
    assert source.step == 2
    assert source.extra == {"step": 7, "lr": 0.25}
    assert source.notes == []
    decayed, others = source.optimizer.groups
    named = dict(Net(**settings).named_parameters())
    assert decayed["params"] == [name for name, p in named.items() if p.ndim > 1]
    assert others["params"] == [name for name, p in named.items() if p.ndim < 2]
    assert (decayed["lr"], others["lr"]) == (1e-2, 3e-2)
    assert (decayed["betas"], others["weight_decay"]) == ([0.8, 0.9], 0.0)
    assert_same(open_foreign(tmp_path / "titan"), expected)
    if not settings.get("tied"):
        assert_same(open_foreign(tmp_path / "bare"), expected, kinds=["weight"])


def save_fsdp1(folder: Path) -> None:
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({Layer})
    model = FSDP(Net(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    train(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(sharded, checkpoint_id=folder / "sharded")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full_state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(full_state, folder / "full.pt")


@pytest.mark.processes
def test_fsdp1_sharded_and_full(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(save_fsdp1, tmp_path)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "gathered.pt")  # the oracle for what the ranks wrote
    for name, oracle in (("sharded", "gathered.pt"), ("full.pt", "full.pt")):
        saved = torch.load(tmp_path / oracle)
        expected = {(name, "weight"): value for name, value in saved["model"].items()}
        for parameter, entries in saved["optimizer"]["state"].items():
            expected |= {(parameter, kind): value for kind, value in entries.items()}
        source = open_foreign(tmp_path / name)
        assert_same(source, expected)
        assert source.optimizer is not None
        assert source.optimizer.groups[0]["params"] == names_of(Net())
        assert source.step == 2


def save_alone(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():  # that no process group is there
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_layouts_that_programs_make_up(tmp_path: Path) -> None:
    net, optimizer = trained()
    expected = states_of(net, optimizer)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    numbered = {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    for number, state in enumerate(
        (
            numbered,
            {"app": {"model": model_state, "optim": optimizer_state}, "epoch": 3},  # an object with state_dict()
            {"model": {f"module.{k}": v for k, v in model_state.items()}, "optim": optimizer_state, "epoch": 3},
        )
    ):
        source = open_foreign(save_alone(state, tmp_path / str(number)), ModelNames(names_of(net)))
        assert_same(source, expected)
        assert source.extra == {"epoch": 3}
    source = open_foreign(tmp_path / "0")
    assert_same(source, expected, kinds=["weight"])
    assert source.optimizer is None
    assert "Open the checkpoint with the model" in source.optimizer_notes[0]


@pytest.mark.parametrize("copies", [True, False])
def test_what_equals_a_trained_weight_in_samples_alone_is_no_tie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    """As a frozen copy of an embedding, of which training has changed the rows that were looked up."""
    monkeypatch.setattr(importer, "PIECE_BYTES", 4096)
    reference = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    trained_table = reference.clone()
    if not copies:
        trained_table[20] += 1.0
    group = {"params": ["table"], "lr": 0.1, "momentum": 0.9}
    optimizer = {"state": {"table": {"momentum_buffer": torch.ones(64, 128)}}, "param_groups": [group]}
    state = {"model": {"table": trained_table, "reference": reference}, "optim": optimizer}
    source = open_foreign(save_alone(state, tmp_path / "c"))
    assert source.aliases == ({"reference": "table"} if copies else {})
    assert copies or torch.equal(source.whole("reference", "weight"), reference)


def test_memory_formats_other_than_rows_first(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"transposed": torch.arange(12.0).view(3, 4).t(), "image": image.bfloat16(), "empty": torch.ones(3, 0)}
    source = open_foreign(save_alone(state, tmp_path / "c"))
    assert_same(source, {(name, "weight"): value for name, value in state.items()})


@pytest.mark.processes
def test_only_the_blocks_asked_for_are_read(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(save_fsdp2, tmp_path, {}, False)
    expected = torch.load(tmp_path / "expected.pt")["embedding.weight", "exp_avg"].view(-1)
    source = open_foreign(tmp_path / "both")
    (tmp_path / "both/__1_0.distcp").unlink()
    for _ in range(2):
        assert torch.equal(source.read("embedding.weight", "exp_avg", 7, 30), expected[7:30])  # the first rank's rows
        with pytest.raises(Damaged, match=r"__1_0\.distcp.*optim\.state\.embedding\.weight\.exp_avg"):
            source.read("embedding.weight", "exp_avg", 29, 31)
    with pytest.raises(Damaged, match=r"no file '__1_0\.distcp'"):
        open_foreign(tmp_path / "both")


def test_values_that_are_no_tensors_are_taken_or_noted(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(6.0).view(2, 3), "block._extra_state": io.BytesIO(b"x")},
        "train_state": {"step": torch.tensor(5), "seen": 10, "curve": [0.5, None, True], "nan": float("nan")},
        "sampler": RunsCode(),
        "ema": {"w": torch.ones(2, 3)},
    }
    source = open_foreign(save_alone(state, tmp_path / "c"))
    assert_same(source, {("w", "weight"): state["model"]["w"]})
    assert source.extra == {"train_state": {"step": 5, "seen": 10, "curve": [0.5, None, True]}}
    assert sorted(note.split(" ")[0] for note in source.notes) == [
        "block._extra_state",
        "ema.w",
        "sampler",
        "train_state.nan",
    ]
    assert RunsCode.ran == 0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of a weight `w`, and a file beside it that is none of its business."""
    (tmp_path / "secret.distcp").write_bytes(bytes(4096))
    return save_alone({"model": {"w": torch.arange(12.0).view(4, 3)}, "epoch": 1}, tmp_path / "c")


def rewrite(folder: Path, change: Callable[[Metadata, _StorageInfo], None]) -> None:
    """Change the description of a folder, and of where `w` is."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - just written
    change(metadata, next(info for index, info in metadata.storage_data.items() if index.fqn == "model.w"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def chunked(*boxes: tuple[list[int], list[int]]) -> Callable[[Metadata, _StorageInfo], None]:
    def change(metadata: Metadata, where: _StorageInfo) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        metadata.state_dict_metadata["model.w"].chunks = chunks
        metadata.storage_data |= {MetadataIndex("model.w", chunk.offsets): where for chunk in chunks}

    return change


def moved(**values: Any) -> Callable[[Metadata, _StorageInfo], None]:
    return lambda metadata, where: [setattr(where, name, value) for name, value in values.items()] and None


def enlarged(metadata: Metadata, where: _StorageInfo) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([1 << 40, 3])
    chunked(([0, 0], [1 << 40, 3]))(metadata, where)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (moved(relative_path="../secret.distcp"), "not inside"),
        (moved(relative_path="/etc/passwd"), "not inside"),
        (moved(relative_path=".."), "not inside"),
        (moved(relative_path="link.distcp"), "is not followed"),
        (moved(relative_path="gone.distcp"), "no file 'gone.distcp'"),
        (moved(length=1 << 40), "bytes"),
        (moved(offset=-1), "in no file"),
        (moved(transform_descriptors=["zstd"]), "stream transforms"),
        (chunked(([0, 0], [3, 3])), "hold 9 of 12"),
        (chunked(([0, 0], [3, 3]), ([2, 0], [2, 3])), "overlap"),
        (chunked(([0, 0], [4, 3]), ([0, 0], [4, 3])), "overlap"),
        (chunked(([0, 0], [5, 3])), "not inside the shape"),
        (chunked(([0], [12])), "not inside the shape"),
        (enlarged, "bytes for"),
        (lambda metadata, where: setattr(metadata, "storage_data", None), "no .*storage_data"),
        (lambda metadata, where: setattr(metadata, "planner_data", RunsCode()), "ran_code"),
        (lambda metadata, where: metadata.planner_data.update({"epoch": ("model", "w")}), "two entries"),
        (lambda metadata, where: metadata.planner_data.update({"epoch": ("model", "w", "x")}), "two entries"),
    ],
)
def test_a_description_that_lies_is_refused(
    saved: Path, change: Callable[[Metadata, _StorageInfo], None], message: str
) -> None:
    assert open_foreign(saved).extra == {"epoch": 1}
    (saved / "link.distcp").symlink_to(saved.parent / "secret.distcp")
    rewrite(saved, change)
    with pytest.raises(BadInput, match=message):
        open_foreign(saved)
    assert RunsCode.ran == 0


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (RunsCode(), "ran_code"),
        (torch.arange(11.0), "not the block"),
        (torch.arange(12).view(4, 3), "not the block"),
        (bytearray(12), "bytearray"),
        ([torch.zeros(4, 3)], "list"),
        (b"PK", "not as torch writes it"),
    ],
)
def test_a_block_that_is_not_what_was_announced_is_refused(saved: Path, block: Any, message: str) -> None:
    archive = io.BytesIO()
    torch.save(block, archive)
    data = block if isinstance(block, bytes) else archive.getvalue()
    (saved / "other.distcp").write_bytes(data.ljust(2000, b"\0") if isinstance(block, bytes) else data)
    rewrite(saved, moved(relative_path="other.distcp", offset=0, length=(saved / "other.distcp").stat().st_size))
    source = open_foreign(saved)
    with pytest.raises(BadInput, match=message) as error:
        source.whole("w", "weight")
    assert all(what in str(error.value) for what in ("other.distcp", "model.w"))
    assert RunsCode.ran == 0


def test_a_file_that_was_cut_off_is_refused(saved: Path) -> None:
    (data,) = saved.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"__0_0\.distcp' is cut short.* bytes at .*Copy it again"):
        open_foreign(saved)
    (saved / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:-30])
    with pytest.raises(BadInput, match=r"\.metadata"):
        open_foreign(saved)
