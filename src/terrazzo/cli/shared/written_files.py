"""Writes files for `terrazzo train`: a configuration with comments that say why, and a model's config.json."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrazzo.documents import write_json, write_yaml
from terrazzo.errors import BadInput

__all__ = ["with_comments", "write_model"]

WIDTH = 110


def with_comments(document: Mapping[str, Any], comments: Mapping[str, Sequence[str]]) -> str:
    """Sections as YAML, each below its comments. Comments under the empty name come first."""
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in comments.get("", ()))]
    for name, section in document.items():
        lines = [line for text in comments.get(name, ()) for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
        parts.append("\n".join([*(f"# {line}" for line in lines), write_yaml({name: section})]))
    return "\n".join(parts)


def write_model(config: Mapping[str, Any], path: Path, writer: str) -> None:
    """Write a model's config.json; `writer` names the command in errors.

    Raises:
        BadInput: another model's file is there.
    """
    text = write_json(config)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise BadInput(f"{writer} would replace '{path}', the config of another model: give FILE another name.")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
