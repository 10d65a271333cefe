"""The options of `terrazzo checkpoint convert` as values."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

__all__ = ["HuggingFaceOptions", "Target"]


class Target(StrEnum):
    """What `convert` writes."""

    TERRAZZO = "terrazzo"
    HF = "hf"
    DCP = "dcp"


class HuggingFaceOptions(NamedTuple):
    """The options for `--to hf` only, as they were written; None for those left out."""

    reference: Path | None
    dtype: str | None
    max_shard_size: str | None

    @property
    def flags(self) -> list[str]:
        """The flags of the options that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in self._asdict().items() if value is not None]
