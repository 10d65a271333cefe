"""Configurations that name data."""

from __future__ import annotations

from typing import Any

from terrazzo.config import Config, config_from_dict


def data_config(source: Any, sequence_length: int, **data: Any) -> Config:
    """A run on `source`, with further keys of section `data`."""
    return config_from_dict({"data": {"source": source, **data}, "batch": {"sequence_length": sequence_length}})
