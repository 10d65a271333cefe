"""A manifest as it is read: any version of it, and whether what it says can be.

Time and memory are linear in its size, whatever it says.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

from pydantic import NonNegativeInt, ValidationError

from terrazzo.checkpoint.format.manifest import (
    FAIL_FAST,
    FAIL_FAST_MAPPING,
    ITEMSIZES,
    VERSION,
    Dtype,
    Extent,
    Manifest,
    Shape,
    State,
    Strict,
    Tensor,
    Tile,
    index_space,
    is_crowded,
)
from terrazzo.checkpoint.format.tiling import tiling_problem
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.errors import BadInput, Damaged

__all__ = ["named_tiles", "parse_manifest", "rectangle_of"]

_READ = (2, VERSION)


class _State2(Strict):
    """A state of version 2: one tile, the whole."""

    dtype: Dtype
    numel: NonNegativeInt
    ranges: Annotated[list[Extent], FAIL_FAST]


class _Tensor2(Strict):
    shape: Shape
    states: Annotated[dict[str, _State2], FAIL_FAST_MAPPING]


class _Manifest2(Manifest):
    """A manifest of version 2, which is read for ever."""

    tensors: Annotated[dict[str, _Tensor2], FAIL_FAST_MAPPING]  # type: ignore[assignment]

    def newest(self) -> Manifest:
        """The same as a manifest of today; its `version` stays."""
        tensors = {
            name: Tensor.model_construct(
                shape=tensor.shape, states={kind: _state(tensor, state) for kind, state in tensor.states.items()}
            )
            for name, tensor in self.tensors.items()
        }
        return Manifest.model_construct(**{**dict(self), "tensors": tensors})


def _state(tensor: _Tensor2, state: _State2) -> State:
    space = index_space(tensor.shape, state.numel)
    tile = Tile.model_construct(offsets=[0] * len(space), sizes=list(space), ranges=state.ranges)
    return State.model_construct(dtype=state.dtype, numel=state.numel, tiles=[tile])


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest that `data` is, checked to be consistent in itself. Time and memory are linear in its size.

    Raises:
        Damaged: it is not strict JSON of this form, or its ranges overlap, leave gaps, or leave their files.
        BadInput: it is of a version that this release does not read.
    """
    if is_crowded(data):
        raise Damaged(f"The checkpoint manifest '{where}' holds more small values than any does: it is damaged.")
    try:
        plain = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(plain, ensure_ascii=False).encode()  # half a character is no text
        version = plain.get("version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version not in _READ:
            raise BadInput(_wrong_version(where, version))
        manifest = _Manifest2.model_validate(plain).newest() if version == 2 else Manifest.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(ascii(part).strip("'") for part in first["loc"]) or "the file"
        raise Damaged(f"The checkpoint manifest '{where}' is damaged at {at}: {first['msg']}.") from None
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise Damaged(f"The checkpoint manifest '{where}' is not strict JSON: {error}.") from None
    if problem := next(_problems(manifest), None):
        raise Damaged(f"The checkpoint manifest '{where}' contradicts itself: {problem}.")
    return manifest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} comes twice")
    return fields


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _wrong_version(where: str, version: int) -> str:
    which = "a newer release" if version > VERSION else "the release that wrote it, and save again with this one"
    read = " and ".join(map(str, _READ))
    return f"The checkpoint '{where}' has format version {version}, and this release reads {read}: use {which}."


def _problems(manifest: Manifest) -> Iterator[str]:
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        yield "a file is listed twice"
    yield from (
        f"{file.name} is smaller than its header" for file in manifest.files if file.header_bytes > file.size_bytes
    )
    if manifest.optimizer is not None:
        grouped = Counter(name for group in manifest.optimizer.groups for name in group.params)
        yield from (f"{name!a} is in two parameter groups" for name, count in grouped.items() if count > 1)
    if len(manifest.ranks) not in (0, manifest.topology.world_size):
        yield f"it has random generators of {len(manifest.ranks)} ranks, not of {manifest.topology.world_size}"
    for name, tensor in manifest.tensors.items():
        for kind, state in tensor.states.items():
            yield from _state_problems(_what(name, kind), kind, tensor, state)
    for what, state, tile in _tiles(manifest):
        yield from _range_problems(manifest, what, tile, ITEMSIZES[state.dtype])
    yield from _overlaps(manifest)
    yield from (f"the alias {alias!r} is of nothing" for alias, name in manifest.aliases.items()
                if name not in manifest.tensors or alias in manifest.tensors)  # fmt: skip


def _what(name: str, kind: str) -> str:
    return f"{ascii(name)[1:-1]}, {kind}"


def _tiles(manifest: Manifest) -> Iterator[tuple[str, State, Tile]]:
    """All tiles with their states, and names for messages."""
    for name, tensor in manifest.tensors.items():
        for kind, state in tensor.states.items():
            yield from ((what, state, tile) for what, tile in named_tiles(_what(name, kind), state))


def _state_problems(what: str, kind: str, tensor: Tensor, state: State) -> Iterator[str]:
    """Why the tiles of a state are not it. They are looked at before their ranges are."""
    if kind in ("weight", "buffer") and state.numel != math.prod(tensor.shape):
        yield f"{what}: {state.numel} elements do not make the shape {tensor.shape}"
    space = index_space(tensor.shape, state.numel)
    for tile in state.tiles:
        if not len(tile.offsets) == len(tile.sizes) == len(space):
            yield f"{what}: the tile {tile.sizes} at {tile.offsets} is none of the shape {list(space)}"
            return
        if state.numel and not math.prod(tile.sizes):
            yield f"{what}: the tile {tile.sizes} at {tile.offsets} has no elements"
            return
    if (problem := tiling_problem(space, [rectangle_of(tile) for tile in state.tiles])) is not None:
        yield f"{what}: {problem}"


def rectangle_of(tile: Tile) -> Rectangle:
    """Where a tile is in its state's index space."""
    return Rectangle(tuple(tile.offsets), tuple(tile.sizes))


def named_tiles(what: str, state: State) -> Iterator[tuple[str, Tile]]:
    """The tiles of a state, each with a name for messages: `what` where it is the only one."""
    only = len(state.tiles) == 1
    yield from ((what if only else f"{what}, {rectangle_of(tile)}", tile) for tile in state.tiles)


def _range_problems(manifest: Manifest, what: str, tile: Tile, itemsize: int) -> Iterator[str]:
    position = 0
    for part in tile.ranges:
        if part.start != position or part.stop <= part.start or part.file >= len(manifest.files):
            yield f"{what}: the range {part.start}..{part.stop} does not continue at {position}"
            return
        position = part.stop
        file, count_bytes = manifest.files[part.file], (part.stop - part.start) * itemsize
        if part.offset < file.header_bytes or part.offset + count_bytes > file.size_bytes:
            yield f"{what}: the range {part.start}..{part.stop} is not inside {file.name}"
        if len(part.digests) != -(-count_bytes // manifest.block_bytes):
            yield f"{what}: the range {part.start}..{part.stop} has {len(part.digests)} digests"
    if position != (numel := math.prod(tile.sizes)):
        yield f"{what}: ranges hold {position} of {numel} elements"


def _overlaps(manifest: Manifest) -> Iterator[str]:
    """Ranges of one file that share bytes. They are looked at after each has been found to be inside of its file."""
    claims = sorted(
        (part.file, part.offset, part.offset + (part.stop - part.start) * ITEMSIZES[state.dtype], what)
        for what, state, tile in _tiles(manifest)
        for part in tile.ranges
    )
    for (file, _, end, what), (next_file, start, _, next_what) in pairwise(claims):
        if file == next_file and start < end:
            yield f"{what} and {next_what} overlap in {manifest.files[file].name}"
