"""Tensors in several tiles: read on every mesh from every other, to the bit, without reading much more than is needed.

The oracle is the whole state, indexed by torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from terrazzo.checkpoint import Source, open_source
from terrazzo.checkpoint.exporters.dcp import export_dcp
from terrazzo.checkpoint.exporters.huggingface import export_huggingface
from terrazzo.checkpoint.format.seal import seal_of
from terrazzo.checkpoint.hub_folder import ModelDescription
from terrazzo.checkpoint.operations import audit, compare
from terrazzo.checkpoint.operations.convert import convert
from terrazzo.checkpoint.source import WEIGHT
from terrazzo.checkpoint.storage.local import LocalFolder
from terrazzo.engine.partition.rectangles import Rectangle, rectangles_of
from terrazzo.errors import BadInput, Damaged, SaveFailed
from tests.checkpoint.documented import read_as_documented
from tests.checkpoint.tiled import CUTS, MESHES, Mesh, States, parts, states, write


@pytest.fixture(scope="module")
def whole() -> States:
    return states()


@pytest.fixture(scope="module")
def written(whole: States, tmp_path_factory: pytest.TempPathFactory) -> dict[Mesh, Path]:
    """Of every mesh its checkpoint."""
    root = tmp_path_factory.mktemp("tiles")
    for mesh in MESHES:
        write(root / f"{mesh[0]}x{mesh[1]}", whole, mesh)
    return {mesh: root / f"{mesh[0]}x{mesh[1]}" for mesh in MESHES}


def owned(source: Source, name: str, kind: str, at: tuple[slice, ...], start: int, stop: int) -> torch.Tensor:
    """Elements of a rectangle, as a rank asks for them."""
    outer = Rectangle(tuple(s.start for s in at), tuple(s.stop - s.start for s in at))
    wanted = [part.placed_in(outer) for part in rectangles_of(outer.sizes, start, stop)]
    found = [source.read_box(name, kind, part.offsets, part.sizes) for part in wanted]
    assert [tuple(each.shape) for each in found] == [part.sizes for part in wanted]
    return torch.cat([each.reshape(-1) for each in found])


@pytest.mark.parametrize("origin", MESHES, ids="{0[0]}x{0[1]}".format)
def test_every_mesh_reads_every_other_to_the_bit(origin: Mesh, whole: States, written: dict[Mesh, Path]) -> None:
    source = open_source(written[origin])
    for mesh in MESHES:
        for (name, kind), data, rank in product(whole, range(mesh[0]), range(mesh[1])):
            for at, start, stop in parts(name, mesh, data, rank) if kind != "step" else ():
                expected = whole[name, kind][at].reshape(-1)[start:stop]
                assert torch.equal(owned(source, name, kind, at, start, stop), expected), (mesh, name, kind)
    for (name, kind), values in whole.items():
        assert torch.equal(source.whole(name, kind).reshape(-1), values.reshape(-1))
        third = values.numel() // 3
        assert torch.equal(source.read(name, kind, third, 2 * third), values.reshape(-1)[third : 2 * third])


def assert_holds(folder: Path, whole: States) -> None:
    found = read_as_documented(folder)
    assert found.keys() == whole.keys()
    for key, values in whole.items():
        assert found[key].tobytes() == values.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_stranger_reads_tiles(whole: States, written: dict[Mesh, Path]) -> None:
    assert_holds(written[2, 4], whole)


def test_what_is_not_inside_a_tensor_is_not_read(written: dict[Mesh, Path]) -> None:
    source = open_source(written[2, 2])
    for offsets, sizes in (((0, 4), (6, 6)), ((-1, 0), (2, 2)), ((0,), (6,)), ((0, 0), (6, -1))):
        with pytest.raises(BadInput, match="is not inside"):
            source.read_box("down", WEIGHT, offsets, sizes)
    with pytest.raises(BadInput, match="ask for all of it"):
        source.read_box("down", "step", (0, 0), (1, 1))
    assert source.read_box("down", WEIGHT, (2, 9), (2, 0)).shape == (2, 0)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_commands_see_whole_tensors(whole: States, written: dict[Mesh, Path], tmp_path: Path) -> None:
    tiled, plain = open_source(written[2, 4]), open_source(written[1, 1])
    assert all(difference.equal for difference in compare.compare(tiled, plain))
    assert compare.compare_settings(tiled, plain) == []
    assert audit.open_audit(str(written[2, 4])).problems(2, lambda count: None) == []
    convert(tiled, str(tmp_path / "converted"))
    assert_holds(tmp_path / "converted", whole)
    converted = json.loads((tmp_path / "converted" / "manifest.json").read_text())["tensors"]
    assert {len(state["tiles"]) for tensor in converted.values() for state in tensor["states"].values()} == {1}
    for name, source in {"tiled": tiled, "plain": plain}.items():
        export_huggingface(source, tmp_path / f"hf-{name}", ModelDescription({}))
    model = "model.safetensors"
    assert (tmp_path / "hf-tiled" / model).read_bytes() == (tmp_path / "hf-plain" / model).read_bytes()
    export_dcp(tiled, tmp_path / "dcp")
    found: dict[str, Any] = _load_state_dict_from_keys(checkpoint_id=tmp_path / "dcp")
    for name in CUTS:
        assert torch.equal(found["model"][name], whole[name, "weight"])


# -- what is read --------------------------------------------------------------------------------------------------


class Reads:
    """Bytes and reads of files so far."""

    def __init__(self) -> None:
        self.count_bytes = self.count = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, real = Reads(), LocalFolder.read_each

    def counted(self: LocalFolder, file: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        found.count += len(parts)
        found.count_bytes += sum(len(buffer) for _, buffer in parts)
        real(self, file, parts)

    monkeypatch.setattr(LocalFolder, "read_each", counted)
    return found


class One(Source):
    """A source of one tensor, to convert."""

    format = "one"

    def __init__(self, values: torch.Tensor) -> None:
        from terrazzo.checkpoint.source import StateInfo, TensorInfo

        super().__init__("one")
        self.tensors = {"w": TensorInfo(tuple(values.shape), {WEIGHT: StateInfo(values.dtype, values.numel())})}
        self._values = values.reshape(-1)

    def _read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        return self._values[start:stop].clone()


WIDE = ((0, 4096), (300, 4096)), ((7, 1), (200, 12_000)), ((10, 0), (1, 9000)), ((0, 0), (300, 16_384))
"""Columns, all but some columns, a piece of a row, and everything, of 300 rows of 64 KiB: 20 MB in five blocks."""


@pytest.mark.parametrize(("offsets", "sizes"), WIDE)
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "not checked"])
def test_a_box_costs_its_own_bytes(
    offsets: tuple[int, int], sizes: tuple[int, int], checked: bool, reads: Reads, tmp_path: Path
) -> None:
    """Of blocks that nobody has compared with their digests all is read, each once."""
    values = torch.arange(300 * 16_384, dtype=torch.float32).view(300, 16_384)
    convert(One(values), str(tmp_path / "a"))
    source = open_source(tmp_path / "a")
    if checked:
        source.check(lambda kind: True, 0, 1)
    reads.__init__()  # type: ignore[misc]
    for _ in range(2):
        found = source.read_box("w", WEIGHT, offsets, sizes)
    expected = values[Rectangle(offsets, sizes).slices]
    assert torch.equal(found, expected)
    assert reads.count_bytes <= 2 * 1.1 * expected.nbytes + (0 if checked else values.nbytes)
    if not checked:
        again = reads.count_bytes
        source.read_box("w", WEIGHT, offsets, sizes)
        assert reads.count_bytes - again <= max(1.1 * expected.nbytes, 0)


def test_columns_of_short_rows_are_not_read_row_by_row(reads: Reads, tmp_path: Path) -> None:
    """What lies between them is on pages that are read anyway."""
    values = torch.arange(4096 * 64, dtype=torch.float32).view(4096, 64)
    convert(One(values), str(tmp_path / "a"))
    source = open_source(tmp_path / "a")
    source.check(lambda kind: True, 0, 1)
    reads.__init__()  # type: ignore[misc]
    assert torch.equal(source.read_box("w", WEIGHT, (0, 16), (4096, 16)), values[:, 16:32])
    assert reads.count == 1
    assert reads.count_bytes <= values.nbytes


@pytest.mark.parametrize("kind", ["terrazzo", "torch.save", "distributed"])
def test_what_lies_beyond_the_end_is_refused(kind: str, tmp_path: Path) -> None:
    """By every format, whose memory nobody would have filled."""
    values = torch.arange(12.0).view(3, 4)
    if kind == "terrazzo":
        convert(One(values), str(tmp_path / "a"))
    elif kind == "torch.save":
        torch.save({"w": values}, tmp_path / "a")
    else:
        export_dcp(One(values), tmp_path / "a")
    source = open_source(tmp_path / "a")
    assert torch.equal(source.read("w", WEIGHT, 10, 12), values.view(-1)[10:])
    for start, stop in ((10, 13), (-1, 3), (4, 3)):
        with pytest.raises(BadInput, match=rf"has 12 elements of w, weight, and not {start}\.\.{stop}") as refused:
            source.read("w", WEIGHT, start, stop)
        assert not isinstance(refused.value, Damaged)


@pytest.mark.parametrize("origin", MESHES, ids="{0[0]}x{0[1]}".format)
def test_a_mesh_reads_its_own_tiles_in_one_piece_each(origin: Mesh, written: dict[Mesh, Path], reads: Reads) -> None:
    source = open_source(written[origin])
    source.check(lambda kind: True, 0, 1)
    reads.__init__()  # type: ignore[misc]
    needed = 0
    for name, data, rank in product(CUTS, range(origin[0]), range(origin[1])):
        for at, start, stop in parts(name, origin, data, rank):
            needed += owned(source, name, WEIGHT, at, start, stop).nbytes
    assert reads.count_bytes == needed


# -- what is refused -----------------------------------------------------------------------------------------------


def changed(folder: Path, out: Path, change: Any) -> Path:
    """The checkpoint with another manifest, sealed anew."""
    out.mkdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    (out / "manifest.json").write_bytes(data)
    (out / "manifest.sha256").write_bytes(seal_of(data))
    for file in manifest["files"]:
        (out / file["name"]).write_bytes((folder / file["name"]).read_bytes())
    return out


def tiles(manifest: Any) -> Any:
    return manifest["tensors"]["down"]["states"]["weight"]["tiles"]


def _twice(manifest: Any) -> None:
    tiles(manifest).append(tiles(manifest)[0])


def _moved(manifest: Any) -> None:
    tiles(manifest)[1]["offsets"] = [0, 3]


def _gone(manifest: Any) -> None:
    tiles(manifest).pop()


def _outside(manifest: Any) -> None:
    tiles(manifest)[1]["offsets"] = [0, 5]


def _flat(manifest: Any) -> None:
    tiles(manifest)[0] |= {"offsets": [0], "sizes": [24]}


def _empty(manifest: Any) -> None:
    tiles(manifest).append({"offsets": [0, 0], "sizes": [0, 9], "ranges": []})


def _longer(manifest: Any) -> None:
    tiles(manifest)[0]["ranges"].pop()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_twice, r"the parts \[6, 4\] at \[0, 0\] and \[6, 4\] at \[0, 0\] overlap"),
        (_moved, r"the parts \[6, 4\] at \[0, 0\] and \[6, 5\] at \[0, 3\] overlap"),
        (_gone, "its parts hold 24 of 54 elements"),
        (_outside, r"the part \[6, 5\] at \[0, 5\] is not inside the shape \[6, 9\]"),
        (_flat, r"the tile \[24\] at \[0\] is none of the shape \[6, 9\]"),
        (_empty, r"the tile \[0, 9\] at \[0, 0\] has no elements"),
        (_longer, r"\[6, 4\] at \[0, 0\]: ranges hold 12 of 24 elements"),
    ],
)
def test_tiles_that_are_not_the_tensor(change: Any, words: str, written: dict[Mesh, Path], tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=f"contradicts itself: down, weight.*{words}"):
        open_source(changed(written[2, 2], tmp_path / "a", change))


def test_bytes_of_a_tile_that_have_changed(written: dict[Mesh, Path], tmp_path: Path) -> None:
    folder = changed(written[2, 2], tmp_path / "a", lambda manifest: None)
    part = tiles(json.loads((folder / "manifest.json").read_text()))[1]["ranges"][0]
    file = folder / f"rank-{part['file']:05}.safetensors"
    data = bytearray(file.read_bytes())
    data[part["offset"]] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match=rf"{file.name}.*down, weight, \[6, 5\] at \[0, 4\]: not what was written"):
        open_source(folder).read_box("down", WEIGHT, (0, 5), (2, 2))
    [problem] = audit.open_audit(str(folder)).problems(1, lambda count: None)
    assert "down, weight, [6, 5] at [0, 4]" in str(problem)


def test_ranks_that_give_an_element_twice_or_not_at_all_make_no_checkpoint(
    whole: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tests.checkpoint.tiled as tiled

    real = tiled.parts

    def with_one_more(name: str, mesh: Mesh, data: int, rank: int) -> Iterator[tiled.Part]:
        yield from real(name, mesh, data, rank)
        if name == "down" and rank == data == 0:
            yield (slice(1, 3), slice(2, 4)), 0, 4

    def without_one(name: str, mesh: Mesh, data: int, rank: int) -> Iterator[tiled.Part]:
        yield from (part for part in real(name, mesh, data, rank) if (name, rank) != ("down", 1))

    def shorter(name: str, mesh: Mesh, data: int, rank: int) -> Iterator[tiled.Part]:
        yield from ((at, start, stop - (name == "down")) for at, start, stop in real(name, mesh, data, rank))

    for number, (parts_of, words) in enumerate(
        [(with_one_more, "58 of 54"), (without_one, "24 of 54"), (shorter, r"of \[6, 4\] at \[0, 0\] the ranges")]
    ):
        monkeypatch.setattr(tiled, "parts", parts_of)
        with pytest.raises(SaveFailed, match=f"each element of down, weight once: {words}"):
            write(tmp_path / f"a{number}", whole, (2, 2))
        assert not (tmp_path / f"a{number}").exists()
