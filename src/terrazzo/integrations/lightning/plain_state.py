"""The part of a Lightning checkpoint that is not tensors of the model, as plain JSON: nothing is pickled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from terrazzo.errors import BadInput

__all__ = ["from_json", "to_json"]

_KIND = "terrazzo:kind"
_LARGEST_NUMEL = 1 << 20
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


def to_json(value: Any, where: str = "checkpoint") -> Any:
    """Plain JSON for numbers, text, lists, tuples, dicts, paths and small tensors.

    Args:
        where: what errors call the value.

    Raises: `BadInput` for anything else, naming where it is.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _tagged("float", str(value))
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, list | tuple):
        items = [to_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
        return items if isinstance(value, list) else _tagged("tuple", items)
    raise BadInput(
        f"{where} is a {type(value).__name__}, which a checkpoint without pickle cannot hold. Keep numbers, text, "
        "lists, dicts and tensors there; hyper-parameters are left out by save_hyperparameters(ignore=[...])."
    )


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; a path comes back as text."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: from_json(each) for key, each in value.items()}
    inner = from_json(value["value"])
    if kind == "items":
        return {key: each for key, each in inner}  # noqa: C416 (pairs are lists)
    if kind == "tensor":
        tensor = torch.tensor(inner, dtype=getattr(torch, value["dtype"]))
        return tensor.reshape(value["shape"]) if "shape" in value else tensor
    return tuple(inner) if kind == "tuple" else float(inner)


def _tagged(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {_KIND: kind, "value": value, **more}


def _mapping(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if all(isinstance(key, str) and key != _KIND for key in value):
        return {key: to_json(each, f"{where}[{key!r}]") for key, each in value.items()}
    return _tagged(
        "items",
        [[to_json(key, f"a key of {where}"), to_json(each, f"{where}[{key!r}]")] for key, each in value.items()],
    )


def _tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.numel() > _LARGEST_NUMEL or value.dtype not in _DTYPES:
        raise BadInput(
            f"{where} is a {value.dtype} tensor of {value.numel():,} elements; at most {_LARGEST_NUMEL:,} are "
            "kept beside the model. Register it as a buffer of the model."
        )
    name = str(value.dtype).removeprefix("torch.")
    shape = {} if value.numel() else {"shape": list(value.shape)}  # which an empty list of values does not tell
    return _tagged("tensor", to_json(value.detach().cpu().tolist(), where), dtype=name, **shape)
