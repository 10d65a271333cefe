"""Importing safetensors: files, Hugging Face folders, and the blocks that torch's writer makes of them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from terrazzo.checkpoint.importers import open_foreign
from terrazzo.errors import BadInput, Damaged
from tests.checkpoint.test_import_dcp import fsdp2
from tests.helpers.imported import Net, assert_same, states_of
from tests.helpers.processes import Pool


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """A tiny Llama, and the folder that `save_pretrained` made of it."""
    transformers = pytest.importorskip("transformers")

    def save(*, tied: bool = False, shard_bytes: int = 4000) -> tuple[Path, Any]:
        config = transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "hf", max_shard_size=shard_bytes)
        return tmp_path / "hf", model

    return save


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [4000, 1_000_000])
def test_a_hugging_face_folder(llama: Callable[..., tuple[Path, Any]], tied: bool, shard_bytes: int) -> None:
    folder, model = llama(tied=tied, shard_bytes=shard_bytes)
    assert len(list(folder.glob("*.safetensors"))) == (1 if shard_bytes > 4000 else 6 if tied else 7)
    source = open_foreign(folder)
    assert_same(source, {(name, "weight"): value.detach() for name, value in model.named_parameters()})
    assert (source.optimizer, source.step, source.notes) == (None, 0, [])


def test_single_files_and_folders_without_an_index(tmp_path: Path) -> None:
    net = Net()
    expected = {name: value.detach().clone() for name, value in net.state_dict().items()}
    expected["half"], expected["none"] = torch.randn(3, 5).bfloat16(), torch.empty(0, 4)
    expected["flags"], expected["scalar"] = torch.tensor([True, False, True]), torch.tensor(3, dtype=torch.int16)
    names = list(expected)
    save_file({name: expected[name] for name in names[:4]}, tmp_path / "a.safetensors")
    save_file({name: expected[name] for name in names[4:]}, tmp_path / "b.safetensors", {"format": "pt"})
    assert_same(open_foreign(tmp_path), {(name, "weight"): value for name, value in expected.items()})
    assert_same(open_foreign(tmp_path / "a.safetensors"), {(name, "weight"): expected[name] for name in names[:4]})
    save_file({names[0]: expected[names[0]]}, tmp_path / "c.safetensors")
    with pytest.raises(BadInput, match=r"'embedding\.weight' in a\.safetensors, c\.safetensors.* overlap"):
        open_foreign(tmp_path)
    save_file(expected, tmp_path / "model.safetensors")
    source = open_foreign(tmp_path)
    assert_same(source, {(name, "weight"): value for name, value in expected.items()})
    (note,) = source.notes
    assert note == "a.safetensors, b.safetensors, c.safetensors: not read, as the weights are in model.safetensors"


def test_what_save_model_says_of_tied_tensors(tmp_path: Path) -> None:
    save_model(Net(tied=True), str(tmp_path / "m.safetensors"))
    (alias,) = open_foreign(tmp_path / "m.safetensors").aliases.items()
    assert set(alias) == {"embedding.weight", "head.weight"}


def save_blocks(folder: Path) -> None:
    net, _ = fsdp2()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(net.state_dict()), storage_writer=writer)
    torch.save(states_of(net), folder / "expected.pt")


@pytest.mark.processes
def test_the_blocks_of_ranks_are_put_together(two_processes: Pool, tmp_path: Path) -> None:
    two_processes.run(save_blocks, tmp_path)
    expected = torch.load(tmp_path / "expected.pt")
    (tmp_path / "expected.pt").unlink()
    assert_same(open_foreign(tmp_path), expected)
    next(tmp_path.glob("shard-00001-*")).unlink()
    with pytest.raises(BadInput, match="hold"):
        open_foreign(tmp_path)


def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.arange(100.0), "b": torch.ones(5)}, tmp_path / "m.safetensors")
    source = open_foreign(tmp_path / "m.safetensors")
    with (tmp_path / "m.safetensors").open("r+b") as file:
        file.truncate((tmp_path / "m.safetensors").stat().st_size - 200)
    assert torch.equal(source.read("a", "weight", 3, 45), torch.arange(3.0, 45.0))
    with pytest.raises(Damaged, match=r"m\.safetensors' cannot give a, bytes \d+ to \d+"):
        source.read("a", "weight", 0, 100)


def index_of(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_an_index_is_obeyed(llama: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = llama()
    files = sorted(folder.glob("*.safetensors"))
    save_file({"other": torch.ones(2)}, folder / "unlisted.safetensors")
    source = open_foreign(folder)
    assert "other" not in source.tensors
    assert "unlisted.safetensors" in source.notes[0]
    files[2].unlink()
    files[5].unlink()
    with pytest.raises(Damaged, match=f"lacks {files[2].name}, {files[5].name}"):
        open_foreign(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].update(x="../hf/model-00001-of-00007.safetensors"), "not inside"),
        (lambda index: index["weight_map"].update(x="/etc/passwd"), "not inside"),
        (lambda index: index["weight_map"].update(x="link.safetensors"), "is not followed"),
        (lambda index: index["weight_map"].update(x="model-00001-of-00007.safetensors"), "no tensor 'x'"),
        (lambda index: index["weight_map"].update(x=3), "not an index"),
        (lambda index: index.pop("weight_map"), "not an index"),
    ],
)
def test_an_index_that_lies_is_refused(
    llama: Callable[..., tuple[Path, Any]], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder, _ = llama()
    save_file({"x": torch.ones(2)}, folder.parent / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
    index_of(folder, change)
    with pytest.raises(BadInput, match=message):
        open_foreign(folder)


def test_links_within_the_cache_of_the_hub_are_followed(llama: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    folder, model = llama()
    snapshot, blobs = tmp_path / "cache/snapshots/abc", tmp_path / "cache/blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    expected = {(name, "weight"): value.detach() for name, value in model.named_parameters()}
    (tmp_path / "model").symlink_to(snapshot)
    for given in (snapshot, tmp_path / "model"):
        assert_same(open_foreign(given), expected)


def with_header(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(64)


def entry(**values: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} | values}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        with_header(b"{", 1 << 50),
        with_header(b"not json at all"),
        with_header(entry(data_offsets=[0, 1 << 40])),
        with_header(entry(data_offsets=[32, 96])),
        with_header(entry(shape=[1 << 40])),
        with_header(entry(shape=[-16])),
        with_header(entry(dtype="F31")),
        with_header(entry())[:-1],
        with_header(b'{"__metadata__": {"DCP_SHARDING_INFO": "[1]"},' + entry()[1:]),
        with_header(b'{"__metadata__": {"DCP_SHARDING_INFO": "{\\"a\\": {\\"saved_offsets\\": [4]}}"},' + entry()[1:]),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(BadInput, match=r"m\.safetensors"):
        open_foreign(tmp_path / "m.safetensors")


def test_a_good_file_made_by_hand(tmp_path: Path) -> None:
    """What the refused ones above are changed from."""
    (tmp_path / "m.safetensors").write_bytes(with_header(entry()))
    assert_same(open_foreign(tmp_path / "m.safetensors"), {("a", "weight"): torch.zeros(16)})
