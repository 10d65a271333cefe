"""The words of torch's own sharding, for every dialect on FSDP: dtypes, versions, strategies."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import Setting
from terrazzo.dialects.core.keys import choice
from terrazzo.dialects.core.reader import Reader

__all__ = ["DTYPE", "NUMBERED", "ROW_NAMES", "STRATEGIES", "TORCH_DTYPES", "TORCH_NAMES", "VERSION", "canonical"]

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Torch's name of a neutral dtype."""
TORCH_DTYPES = {
    **{name: short for short, name in TORCH_NAMES.items()},
    **{f"torch.{name}": short for short, name in TORCH_NAMES.items()},
    **{short: short for short in TORCH_NAMES},
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}
"""Neutral dtype by any of the words in use."""

DTYPE = choice(TORCH_DTYPES)
"""The type of a key that takes one of them."""

VERSION = choice({1: 1, 2: 2, "1": 1, "2": 2})
"""The type of a key that says FSDP1 or FSDP2."""

STRATEGIES = {
    "full_shard": "zero3",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "zero0",
    "hybrid_shard": "hybrid_shard",
    "_hybrid_shard_zero2": "hybrid_shard_zero2",
    "hybrid_shard_zero2": "hybrid_shard_zero2",
}
"""Row of the table by the name of FSDP1's `ShardingStrategy`."""
ROW_NAMES = {
    "zero3": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "zero0": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
}
"""Torch's name of a row."""
NUMBERED = dict(enumerate(dict.fromkeys(STRATEGIES.values()), 1))
"""Row by the strategy's number."""


def canonical(reader: Reader, key: str, setting: Setting[Any], word: str | None) -> Setting[Any]:
    """The same setting; a spelling other than `word`, which the library itself uses, is said to be renamed."""
    if setting.origin == "file" and word is not None and reader.raw(key) != word:
        reader.mark(key, "renamed", f"written {word} from here on")
    return setting
