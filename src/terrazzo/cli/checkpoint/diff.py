"""`terrazzo checkpoint diff`: compares two checkpoints state by state."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.checkpoint import open_source
from terrazzo.checkpoint.operations import describe
from terrazzo.checkpoint.operations.compare import StateDifference, compare, compare_settings
from terrazzo.cli.checkpoint.progress import progress
from terrazzo.cli.checkpoint.text import differences_text
from terrazzo.cli.shared.terminal import say, say_json

__all__ = ["diff_checkpoints"]


def diff_checkpoints(paths: tuple[str, str], kind: str | None, show_all: bool, as_json: bool) -> int:
    """Compare two checkpoints and print the result; returns the exit code."""
    sources = open_source(paths[0]), open_source(paths[1])
    settings = [] if kind else compare_settings(*sources)
    with progress("comparing", sum(describe.total_bytes(source, kind) for source in sources)) as advance:
        for source in sources:
            source.advance = advance
        differences = list(compare(*sources, kind))
    equal = not settings and all(each.equal for each in differences)
    if as_json:
        states = [_as_json(each) for each in differences if show_all or not each.equal]
        say_json(
            {
                "a": paths[0],
                "b": paths[1],
                "equal": equal,
                "compared": len(differences),
                "settings": settings,
                "states": states,
            }
        )
    else:
        heads = [f"{side}  {source.where}: {source.format}" for side, source in zip("AB", sources, strict=True)]
        say("\n".join([*heads, *settings, "", differences_text(differences, show_all)]))
    return 0 if equal else 1


def _as_json(each: StateDifference) -> dict[str, Any]:
    values = {"name": each.name, "kind": each.kind, "note": each.note, "differing": each.differing, "numel": each.numel}
    return values | {"max_abs": each.max_abs if math.isfinite(each.max_abs) else str(each.max_abs)}
