"""A Hugging Face model folder from any checkpoint: `AutoModelForCausalLM.from_pretrained` loads it, nothing to merge.

What the folder says besides weights is a `ModelDescription` of `checkpoint.hub_folder`, such as that of the folder the
model was built from.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from terrazzo.checkpoint.exporters.new_folder import new_file, new_folder
from terrazzo.checkpoint.format.manifest import DTYPES
from terrazzo.checkpoint.format.rank_layout import safetensors_header
from terrazzo.checkpoint.hub_folder import CONFIG_FILE, ModelDescription
from terrazzo.checkpoint.importers.safetensors import INDEX_FILE, MODEL_FILE
from terrazzo.checkpoint.source import BUFFER, PIECE_BYTES, WEIGHT, Source
from terrazzo.checkpoint.tensors import name_of
from terrazzo.errors import BadInput

__all__ = [
    "Planned",
    "export_huggingface",
    "planned",
    "write_folder",
]

_CODES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32})
"""Dtypes in which quantized models keep codes: one each, or several packed into an integer."""


def export_huggingface(
    source: Source,
    out: Path,
    model: ModelDescription,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights and buffers of `source` as the model folder `out`, which must not exist.

    Memory: a piece of one tensor, whatever the size of the model.

    Args:
        model: what else goes into the folder. Its config is corrected to name the dtype of the weights, and no
            quantization.
        dtype: of all floating-point weights, rounded to nearest; by default each keeps its own. Buffers and integers
            keep theirs.
        max_shard_bytes: a larger model becomes several files and an index. A tensor is never divided.

    Raises:
        BadInput: `out` exists, there is too little space for it, `dtype` cannot be used or is too small for a weight,
            the source is damaged, or it has the codes of a quantized model, of which `model` says so too.
        SaveFailed: a file could not be written; nothing is left.
    """
    write_folder(source, out, planned(source, model, dtype, max_shard_bytes))


@dataclass(frozen=True)
class ToWrite:
    """One tensor to write: `name` is its name in the folder, the others say what of the source it is."""

    name: str
    origin: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Planned:
    """A folder before it is written.

    Attributes:
        shards: names of the files, each with its tensors, in the order in which they are read.
        texts: what the other files hold, by name.
    """

    shards: Mapping[str, Sequence[ToWrite]]
    texts: Mapping[str, bytes]


def planned(source: Source, model: ModelDescription, dtype: torch.dtype | None, max_shard_bytes: int) -> Planned:
    """What `export_huggingface` is going to write, from descriptions alone. Raises: `BadInput` as there."""
    tensors = list(_tensors(source, model, dtype))
    shards = _shards(tensors, max_shard_bytes)
    texts = {CONFIG_FILE: _json(_config(model, tensors)), **model.files}
    if len(shards) > 1:
        texts[INDEX_FILE] = _json(_index(shards))
    return Planned(shards, texts)


def write_folder(source: Source, out: Path, plan: Planned) -> None:
    """The second part of `export_huggingface`. Raises: `BadInput` and `SaveFailed` as there."""
    headers = {
        name: safetensors_header("pt", ((each.name, name_of(each.dtype), each.shape) for each in members), 8)
        for name, members in plan.shards.items()
    }
    overhead_bytes = sum(map(len, [*plan.texts.values(), *headers.values()]))
    size_bytes = sum(tensor.size_bytes for members in plan.shards.values() for tensor in members)
    with new_folder(out, overhead_bytes + size_bytes) as folder:
        for name, members in plan.shards.items():
            with new_file(folder / name) as file:
                file.write(headers[name])
                for tensor in members:
                    _write(file, source, tensor)
        for name, data in plan.texts.items():
            with new_file(folder / name) as file:
                file.write(data)


# -- which tensors -------------------------------------------------------------------------------------------------


def _tensors(source: Source, model: ModelDescription, dtype: torch.dtype | None) -> Iterator[ToWrite]:
    """What to write. A tied tensor is written once, unless the config says that loading it will not tie it again."""
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize == 1 or name_of(dtype) not in DTYPES):
        raise BadInput(f"Weights cannot be exported as {dtype}: use torch.float32, torch.bfloat16 or torch.float16.")
    names: dict[str, list[str]] = {name: [name] for name in source.tensors}
    if not model.config.get("tie_word_embeddings", True):
        for alias, name in source.aliases.items():
            names[name].append(alias)
    for origin, info in source.tensors.items():
        kind = WEIGHT if WEIGHT in info.states else BUFFER
        if kind not in info.states:
            continue
        stored = info.states[kind].dtype
        if name_of(stored) not in DTYPES:
            raise BadInput(f"'{origin}' in '{source.where}' is {stored}, which safetensors files cannot hold.")
        if kind == WEIGHT and stored in _CODES and model.config.get("quantization_config"):
            raise BadInput(
                f"'{origin}' in '{source.where}' is {stored}: codes that mean weights only as the model's"
                " quantization_config says, and exported folders have none. Dequantize the checkpoint first."
            )
        written = dtype if dtype is not None and kind == WEIGHT and stored.is_floating_point else stored
        for name in names[origin]:
            for part in model.parts(name, info.shape):
                yield ToWrite(part.name, origin, kind, part.shape, written, part.start)


def _shards(tensors: list[ToWrite], max_bytes: int) -> dict[str, list[ToWrite]]:
    """Tensors by file, in the order of the model; within a file the wider dtypes first, so that all are aligned."""
    shards: list[list[ToWrite]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if shards[-1] and size_bytes + tensor.size_bytes > max_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += tensor.size_bytes
    ordered = [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]
    if len(ordered) == 1:
        return {MODEL_FILE: ordered[0]}
    return {f"model-{i:05d}-of-{len(ordered):05d}.safetensors": shard for i, shard in enumerate(ordered, 1)}


def _config(model: ModelDescription, tensors: list[ToWrite]) -> dict[str, Any]:
    config = {key: value for key, value in model.config.items() if key != "quantization_config"}
    floating = [tensor.dtype for tensor in tensors if tensor.kind == WEIGHT and tensor.dtype.is_floating_point]
    if floating:
        # transformers loads all weights in one dtype: with one that holds all of theirs, none of them is rounded.
        wider = [dtype for dtype in floating if dtype.itemsize > 1]  # torch promotes no dtype of 8 bits
        widest = name_of(functools.reduce(torch.promote_types, wider or floating[:1]))
        config |= dict.fromkeys({"dtype", "torch_dtype"} & config.keys() or {"dtype"}, widest)
    return config


def _index(shards: Mapping[str, Sequence[ToWrite]]) -> dict[str, Any]:
    total_size = sum(tensor.size_bytes for members in shards.values() for tensor in members)
    weight_map = {tensor.name: name for name, members in shards.items() for tensor in members}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def _write(file: BinaryIO, source: Source, tensor: ToWrite) -> None:
    stored = source.tensors[tensor.origin].states[tensor.kind].dtype
    step = PIECE_BYTES // max(stored.itemsize, tensor.dtype.itemsize)
    end = tensor.start + tensor.numel
    for start in range(tensor.start, end, step):
        values = source.read_with_progress(tensor.origin, tensor.kind, start, min(start + step, end))
        cast = values.to(tensor.dtype).contiguous()
        _check_range(source, tensor, values, cast)
        file.write(cast.view(torch.uint8).numpy().data)


def _check_range(source: Source, tensor: ToWrite, values: Tensor, cast: Tensor) -> None:
    if cast.dtype == values.dtype:
        return
    values = values.float() if values.dtype.itemsize == 1 else values  # torch finds no infinities in 8 bits
    if cast.isinf().sum() > values.isinf().sum():
        raise BadInput(
            f"'{tensor.origin}' in '{source.where}' has values as large as {values.abs().max().item():.3g}, beyond the"
            f" range of {tensor.dtype}: export as torch.bfloat16 or torch.float32."
        )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
