"""A reader that knows nothing of a checkpoint but docs/reference/checkpoint-format.md."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

DTYPES = {"float32": np.float32, "int64": np.int64, "bfloat16": np.uint16}
"""What NumPy reads of each; of bfloat16 the bits."""

Values = np.ndarray[Any, Any]


def read_as_documented(folder: Path) -> dict[tuple[str, str], Values]:
    """Every state by name and kind, flat, every byte checked."""
    text = (folder / "manifest.json").read_bytes()
    assert (folder / "manifest.sha256").read_text() == f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"
    manifest = json.loads(text)
    assert (manifest["format"], manifest["digest"]) == ("terrazzo", "blake3-128")
    files = [(folder / file["name"]).read_bytes() for file in manifest["files"]]
    covered = [file["header_bytes"] for file in manifest["files"]]
    for file, data in zip(manifest["files"], files, strict=True):
        assert file["size_bytes"] == len(data)
        assert blake3(data[: file["header_bytes"]]).digest()[:16].hex() == file["header_digest"]
    found = {}
    for name, tensor in manifest["tensors"].items():
        for kind, state in tensor["states"].items():
            assert kind not in ("weight", "exp_avg", "buffer") or state["numel"] == math.prod(tensor["shape"])
            space = tensor["shape"] if math.prod(tensor["shape"]) == state["numel"] else [state["numel"]]
            values, times = np.zeros(space, DTYPES[state["dtype"]]), np.zeros(space, int)
            for tile in state["tiles"] if manifest["version"] == 3 else [state | {"offsets": [], "sizes": space}]:
                ends = [offset + size for offset, size in zip(tile["offsets"], tile["sizes"], strict=False)]
                index = tuple(map(slice, tile["offsets"], ends))
                values[index] = _tile(manifest, files, tile, values.dtype, covered).reshape(tile["sizes"])
                times[index] += 1
            assert (times == 1).all(), "each element is in one tile"
            found[name, kind] = values.reshape(-1)
    assert covered == [len(data) for data in files], "every byte is the header's or a range's"
    return found


def _tile(manifest: Any, files: list[bytes], tile: Any, dtype: np.dtype[Any], covered: list[int]) -> Values:
    parts, stop = [np.empty(0, dtype)], 0
    for part in tile["ranges"]:
        assert part["start"] == stop
        stop = part["stop"]
        count_bytes = (part["stop"] - part["start"]) * dtype.itemsize
        data = files[part["file"]][part["offset"] : part["offset"] + count_bytes]
        size = manifest["block_bytes"]
        blocks = [data[first : first + size] for first in range(0, count_bytes, size)]
        assert [blake3(block).digest()[:16].hex() for block in blocks] == part["digests"]
        covered[part["file"]] += count_bytes
        parts.append(np.frombuffer(data, dtype))
    return np.concatenate(parts)
