"""Safetensors: a file, a folder of them, or a Hugging Face model folder with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from terrazzo.checkpoint.format.manifest import DTYPES
from terrazzo.checkpoint.format.tiling import tiling_problem
from terrazzo.checkpoint.importers.parts.paths import size_of_plain_file
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource
from terrazzo.checkpoint.importers.parts.values import Chunk, Chunked, Region, Values
from terrazzo.checkpoint.tensors import dtype_of
from terrazzo.engine.partition.rectangles import Rectangle, whole
from terrazzo.errors import BadInput, Damaged

__all__ = ["INDEX_FILE", "MODEL_FILE", "SafetensorsCheckpoint", "add_safetensors"]

INDEX_FILE, MODEL_FILE = "model.safetensors.index.json", "model.safetensors"

_MAX_INDEX_BYTES = 256 << 20
_SHARDING = "DCP_SHARDING_INFO"  # torch's HuggingFaceStorageWriter, where each rank writes a file of its blocks

_MORE = {"uint16": "U16", "uint32": "U32", "uint64": "U64"}  # that others write
_DTYPES = {stored: dtype_of(name) for name, stored in (DTYPES | _MORE).items()}


class SafetensorsCheckpoint(StateDictSource):
    """Weights in safetensors; there is no optimizer state in this format.

    Of a folder `model.safetensors` is read, else the files that its index names, else all. Files in which each rank has
    written its blocks (torch's `HuggingFaceStorageWriter`) are put together; they do not say how many they are, so
    without the last one tensors are shorter than the model's.

    Raises:
        BadInput: a file is damaged, missing or outside of the folder, or a name is in two files.
    """

    format = "safetensors"

    def __init__(self, path: Path, names: Sequence[str] = ()) -> None:
        super().__init__(str(path))
        add_safetensors(self, path, names)


def add_safetensors(source: StateDictSource, path: Path, names: Sequence[str] = ()) -> None:
    """The weights in a file, or in the files of a folder. `names` are known to be the model's."""
    files, listed = _files(path) if path.is_dir() else ([path], {})
    headers = [_Header(file) for file in files]
    chunks_of: dict[str, list[_TensorChunk]] = {}
    for header in headers:
        for block in header.blocks():
            if listed.get(block.at.what, header.file.name) == header.file.name:
                chunks_of.setdefault(block.at.what, []).append(block)
    for name, file in listed.items():
        if name not in chunks_of:
            raise Damaged(f"'{path / file}' has no tensor '{name}', and the index says that it has: copy it again.")
    source.add_model({name: _assembled(name, blocks) for name, blocks in chunks_of.items()}, names)
    # safetensors.torch.save_model writes one of several tied tensors, and of the others which it is.
    aliases = {
        source.rename(alias): source.rename(name) for header in headers for alias, name in header.metadata.items()
    }
    source.aliases |= {a: name for a, name in aliases.items() if name in source.tensors and a not in source.tensors}
    if path.is_dir() and (others := sorted(file.name for file in path.glob("*.safetensors") if file not in files)):
        source.notes.append(f"{', '.join(others)}: not read, as the weights are in {files[0].name}")


@dataclass(frozen=True)
class _TensorChunk(Chunk):
    box: Rectangle
    at: Region

    def region(self) -> Region:
        return self.at


class _Header:
    """What one file says of its tensors."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with safe_open(file, framework="pt"):  # checks it all
                pass
            with file.open("rb") as opened:
                count = int.from_bytes(opened.read(8), "little")
                self._entries = json.loads(opened.read(count))
        except FileNotFoundError:
            raise Damaged(f"There is no weights file '{file}'.") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise Damaged(f"'{file}' is not a readable safetensors file: {error}.") from None
        self.metadata: dict[str, str] = self._entries.pop("__metadata__", {})
        self._first_byte = 8 + count

    def blocks(self) -> Iterator[_TensorChunk]:
        """Each tensor, and where it is."""
        offsets = self._saved_offsets()
        for name, entry in self._entries.items():
            sizes = tuple(entry["shape"])
            if entry["dtype"] not in _DTYPES:
                raise BadInput(f"'{name}' in '{self.file}' has the dtype {entry['dtype']}, which torch has not.")
            strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
            start = self._first_byte + entry["data_offsets"][0]
            region = Region(self.file, start, _DTYPES[entry["dtype"]], sizes, strides, name)
            yield _TensorChunk(Rectangle(offsets.get(name, whole(sizes).offsets), sizes), region)

    def _saved_offsets(self) -> dict[str, tuple[int, ...]]:
        try:
            sharding = json.loads(self.metadata.get(_SHARDING, "{}"))
            return {name: tuple(map(int, value["saved_offsets"])) for name, value in sharding.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"'{self.file}' has a damaged {_SHARDING}: {error}.") from None


def _assembled(name: str, blocks: Sequence[_TensorChunk]) -> Values:
    first = blocks[0].at
    ranks = {len(block.box.offsets) for block in blocks} | {len(block.box.sizes) for block in blocks}
    if len(ranks) > 1 or any(block.at.dtype != first.dtype for block in blocks):
        raise BadInput(f"'{name}' is in both '{first.file}' and '{blocks[-1].at.file}', and is not the same.")
    ends = [map(sum, zip(block.box.offsets, block.box.sizes, strict=True)) for block in blocks]
    shape = tuple(max(dim) for dim in zip(*ends, strict=True))
    if problem := tiling_problem(shape, [block.box for block in blocks]):
        files = sorted({block.at.file.name for block in blocks})
        raise BadInput(f"'{name}' in {', '.join(files)}, in '{first.file.parent}': {problem}. Remove what is too much.")
    return Chunked(shape, first.dtype, blocks)


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and the file of each tensor where an index says it."""
    files, listed = sorted(folder.glob("*.safetensors")), dict[str, str]()
    if folder / MODEL_FILE in files:
        files = [folder / MODEL_FILE]
    elif (folder / INDEX_FILE).is_file():
        listed = _read_index(folder)
        files = [folder / name for name in sorted(set(listed.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise Damaged(f"'{folder}' lacks {', '.join(missing)}, which {INDEX_FILE} names: copy the folder again.")
    if not files:
        raise BadInput(f"The folder '{folder}' holds no .safetensors file.")
    for file in files:
        size_of_plain_file(folder, file.name)
    return files, listed


def _read_index(folder: Path) -> dict[str, str]:
    file = folder / INDEX_FILE
    if size_of_plain_file(folder, INDEX_FILE) > _MAX_INDEX_BYTES:
        raise BadInput(f"'{file}' has more than {_MAX_INDEX_BYTES} bytes, which no index has.")
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        good = isinstance(listed, dict) and all(isinstance(name, str) for name in listed.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise BadInput(f"'{file}' is not an index: there is no 'weight_map' of tensors to files in it.")
    for name in set(listed.values()):
        if Path(name).name != name:
            raise BadInput(f"'{file}' refers to a file '{name}', which is not inside: it is damaged, or a trap.")
    return dict(listed)
