"""What a configuration does not say, such as the number of ranks, from the options of `terrazzo config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrazzo.cli.config.options import ContextOptions
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.documents import load
from terrazzo.errors import BadInput
from terrazzo.words import dtype_named

__all__ = ["reading_context"]

LOAD_DTYPES = ("fp32", "bf16", "fp16")


def reading_context(options: ContextOptions) -> ReadingContext:
    """The context that the options describe.

    Raises:
        BadInput: an option has a value without a meaning.
    """
    load_dtype = None if options.load_dtype is None else dtype_named(options.load_dtype)
    if load_dtype not in (None, *LOAD_DTYPES):
        raise BadInput(f"--load-dtype is '{load_dtype}'; there are: {', '.join(LOAD_DTYPES)}.")
    return ReadingContext(
        world=options.world,
        load_dtype=load_dtype,
        versions=_versions(options.library or []),
        trainer=_arguments(options.trainer) if options.trainer else {},
        **(_sizes(options.model) if options.model else {}),
    )


def _arguments(path: Path) -> dict[str, Any]:
    """TrainingArguments by the names that they have today, as the Trainer's own dialect reads them."""
    document = {key: value for key, value in load(path).document.items() if key != "deepspeed"}
    reading = dialect("trainer").read(document, ReadingContext(folder=path.parent))
    if refused := [f"{each.key}: {each.why}" for each in reading.verdicts if each.kind == "refused"]:
        raise BadInput(f"--trainer '{path}': {'; '.join(refused)}")
    return {key: value for key, value in reading.values.items() if value is not None}


def _versions(texts: list[str]) -> dict[str, str]:
    versions = {}
    for text in texts:
        name, equals, version = text.partition("=")
        if not equals or not version[:1].isdigit():
            raise BadInput(f"--library is '{text}', expected NAME=VERSION such as deepspeed=0.16.0.")
        versions[name.strip().lower()] = version.strip()
    return versions


def _sizes(model: str) -> dict[str, Any]:
    """The fields of `ReadingContext` that describe a model."""
    from terrazzo.planner import model_shape  # takes a moment, and few ask for it

    shape = model_shape(model)
    sizes: dict[str, Any] = {"parameters": shape.numel, "hidden_size": shape.hidden or None}
    sizes |= {"positions": shape.positions, "tied": shape.tied}
    if not shape.blocks:
        return sizes
    block = shape.blocks[0]
    return {
        **sizes,
        "layers": shape.layers,
        "block_numel": max(unit.numel for unit in shape.repeated),
        "heads": block.heads,
        "kv_heads": block.kv_heads,
        "experts": shape.experts,
    }
